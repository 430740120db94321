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

# Weights of a program. One row of activations takes so few registers that twice as many programs fit side by side.
_WEIGHTS_FOR_ONE_ROW, _WEIGHTS = 1 << 12, 1 << 13


@triton.jit
def _rows_of_one(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    block,
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
    """A block of the outputs of one layer."""
    out = block * BLOCK_N + tl.arange(0, BLOCK_N)
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


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    second_weight_ptr,
    second_bias_ptr,
    second_out_ptr,
    third_weight_ptr,
    third_bias_ptr,
    third_out_ptr,
    n_out,
    second_n_out,
    third_n_out,
    n_in,
    stride_x,
    stride_weight,
    second_stride_weight,
    third_stride_weight,
    LAYERS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIASES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One to three layers of the same input, whose blocks follow each other."""
    block = tl.program_id(0)
    first, second = tl.cdiv(n_out, BLOCK_N), tl.cdiv(second_n_out, BLOCK_N)
    if block < first:
        _rows_of_one(
            x_ptr, weight_ptr, bias_ptr, out_ptr, block, n_out, n_in, stride_x, stride_weight, ROWS, BLOCK_N, BLOCK_K,
            BIASES % 2 == 1, PDL,
        )  # fmt: skip
    elif LAYERS == 2 or block < first + second:
        if LAYERS > 1:
            _rows_of_one(
                x_ptr, second_weight_ptr, second_bias_ptr, second_out_ptr, block - first, second_n_out, n_in, stride_x,
                second_stride_weight, ROWS, BLOCK_N, BLOCK_K, BIASES // 2 % 2 == 1, PDL,
            )  # fmt: skip
    elif LAYERS > 2:
        _rows_of_one(
            x_ptr, third_weight_ptr, third_bias_ptr, third_out_ptr, block - first - second, third_n_out, n_in, stride_x,
            third_stride_weight, ROWS, BLOCK_N, BLOCK_K, BIASES // 4 == 1, PDL,
        )  # fmt: skip


@launching
def linears_triton(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Launch the kernel.

    Args:
        x: ``(rows, K)``, at least one row.
        weights: One to three ``(N, K)``, rows contiguous.
        biases: As many, ``(N,)`` or ``None``.

    Returns:
        As many ``(rows, N)`` in the dtype of ``x``.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    layers, n_in = len(weights), x.shape[1]
    biases = [bias if bias is None else bias.contiguous() for bias in biases]
    outs = [torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device) for weight in weights]
    block_in = max(128, triton.next_power_of_2(n_in))
    weights_each = _WEIGHTS_FOR_ONE_ROW if x.shape[0] == 1 else _WEIGHTS
    block_out = max(1, weights_each // block_in)
    missing = 3 - layers  # of the layers that the kernel has arguments for
    sizes = [*(weight.shape[0] for weight in weights), *[0] * missing]
    strides = [*(weight.stride(0) for weight in weights), *[0] * missing]
    _linear_kernel[(sum(triton.cdiv(size, block_out) for size in sizes),)](
        x,
        *(array for layer in zip(weights, biases, outs, strict=True) for array in layer),
        *[None] * (3 * missing),
        *sizes,
        n_in,
        x.stride(0),
        *strides,
        LAYERS=layers,
        ROWS=x.shape[0],
        BLOCK_N=block_out,
        BLOCK_K=block_in,
        BIASES=sum((bias is not None) << index for index, bias in enumerate(biases)),
        **({"PDL": False} if interpreting() else programmatic_launch(x.device)),
        num_warps=4,
        maxnreg=64 if block_in * block_out == _WEIGHTS_FOR_ONE_ROW else None,
    )
    return outs
