"""Linear layers of a decode step: a few rows times a weight matrix, which is read once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..backend import has_kernels

__all__ = ["MOST_ROWS", "linear"]

#: Rows up to which the kernel is used: with more, making the sums takes longer than reading the weights.
MOST_ROWS = 2


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, accumulated in float32.

    Where the package's kernels run, for up to :data:`MOST_ROWS` rows of bf16 or fp16 and up to 32768 channels, a kernel
    that streams the weights at close to the memory's bandwidth; otherwise :func:`torch.nn.functional.linear`, which is
    its reference. The kernel has no gradient. On Hopper it reads the weights before the kernel in front of it ends, so
    that must not be what writes them.

    Args:
        x: ``(..., K)``.
        weight: ``(N, K)``, in the dtype of ``x``.
        bias: ``(N,)``, in the dtype of ``x``, or ``None``.

    Returns:
        ``(..., N)`` in the dtype of ``x``.

    Raises:
        ValueError: If shapes or dtypes disagree.
    """
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:] or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"{shapes}, bias {None if bias is None else tuple(bias.shape)} do not fit each other")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        dtypes = ", ".join(str(one.dtype).removeprefix("torch.") for one in (x, weight, bias) if one is not None)
        raise ValueError(f"x, weight and bias must share a dtype, got {dtypes}")
    if not streams(x, weight) or (bias is not None and bias.device != x.device):
        return F.linear(x, weight, bias)
    return torch.ops.locks_hf.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


def streams(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`linear` has a kernel for these."""
    rows = x.numel() // max(1, x.shape[-1])
    if not 0 < rows <= MOST_ROWS or x.dtype not in (torch.bfloat16, torch.float16) or weight.stride(1) != 1:
        return False
    if weight.shape[1] > 1 << 15 or weight.numel() == 0 or weight.device != x.device:
        return False
    return has_kernels(x.device)


@torch.library.custom_op("locks_hf::linear", mutates_args=())
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from .triton import linear_triton

    return linear_triton(x, weight, bias)


@_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))
