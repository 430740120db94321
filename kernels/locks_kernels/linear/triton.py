"""Triton kernel of a linear layer for a few rows.

Bytes: the weights, read once, ``2 * N * K``. A program takes whole rows of the weights, all of them on their way before
anything is computed, so that enough is in flight; and before it waits for the kernel in front of it, since weights are
older. They pass by the L1 cache, where the activations stay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..backend import interpreting, launching, programmatic_launch

_WEIGHTS = 1 << 13  # of a program


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    n_out,
    n_in,
    stride_x,
    stride_weight,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_K)
    m_out, m_channel = out < n_out, channel < n_in
    p_weight = weight_ptr + out[:, None].to(tl.int64) * stride_weight + channel[None, :]
    b_weight = tl.load(p_weight, mask=m_out[:, None] & m_channel[None, :], other=0.0, cache_modifier=".cg")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    b_bias = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(bias_ptr + out, mask=m_out, other=0.0).to(tl.float32)
    for row in tl.static_range(ROWS):
        b_x = tl.load(x_ptr + row * stride_x + channel, mask=m_channel, other=0.0).to(tl.float32)
        b_out = tl.sum(b_weight.to(tl.float32) * b_x[None, :], axis=1) + b_bias
        tl.store(out_ptr + row * n_out + out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)


@launching
def linear_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Launch the kernel.

    Args:
        x: ``(rows, K)``, at least one row.
        weight: ``(N, K)``, rows contiguous.
        bias: ``(N,)`` or ``None``.

    Returns:
        ``(rows, N)`` in the dtype of ``x``.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    n_out, n_in = weight.shape
    out = torch.empty((x.shape[0], n_out), dtype=x.dtype, device=x.device)
    block_in = max(128, triton.next_power_of_2(n_in))
    block_out = max(1, _WEIGHTS // block_in)
    _linear_kernel[(triton.cdiv(n_out, block_out),)](
        x,
        weight,
        bias if bias is None else bias.contiguous(),
        out,
        n_out,
        n_in,
        x.stride(0),
        weight.stride(0),
        ROWS=x.shape[0],
        BLOCK_N=block_out,
        BLOCK_K=block_in,
        HAS_BIAS=bias is not None,
        **({"PDL": False} if interpreting() else programmatic_launch(x.device)),
        num_warps=4,
    )
    return out
