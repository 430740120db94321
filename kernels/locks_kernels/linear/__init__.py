"""Linear layers of a decode step: a few rows times a weight matrix, which is read once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..backend import has_kernels

__all__ = ["MOST_LAYERS", "MOST_ROWS", "linear", "linears"]

#: Rows up to which the kernel is used: with more, making the sums takes longer than reading the weights.
MOST_ROWS = 2
#: Layers of one launch.
MOST_LAYERS = 3


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
    return linears(x, [weight], [bias])[0]


def linears(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """:func:`linear` of one input by one to three layers, in one launch.

    Args:
        x: As in :func:`linear`.
        weights: One to three weights with as many columns, in the dtype of ``x``.
        biases: As many biases.

    Returns:
        As many outputs.

    Raises:
        ValueError: As :func:`linear`, or if there are more layers than three or none.
    """
    if not 0 < len(weights) <= MOST_LAYERS or len(biases) != len(weights):
        raise ValueError(
            f"linears takes one to {MOST_LAYERS} weights and as many biases, got {len(weights)}, {len(biases)}"
        )
    for weight, bias in zip(weights, biases, strict=True):
        _check(x, weight, bias)
    elsewhere = any(bias is not None and bias.device != x.device for bias in biases)
    if elsewhere or not all(streams(x, weight) for weight in weights):
        return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    outs = torch.ops.locks_hf.linears(x.reshape(-1, x.shape[-1]), weights, biases)
    return [out.view(*x.shape[:-1], -1) for out in outs]


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:] or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"{shapes}, bias {None if bias is None else tuple(bias.shape)} do not fit each other")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        dtypes = ", ".join(str(one.dtype).removeprefix("torch.") for one in (x, weight, bias) if one is not None)
        raise ValueError(f"x, weight and bias must share a dtype, got {dtypes}")


def streams(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether :func:`linear` has a kernel for these."""
    rows = x.numel() // max(1, x.shape[-1])
    if not 0 < rows <= MOST_ROWS or x.dtype not in (torch.bfloat16, torch.float16) or weight.stride(1) != 1:
        return False
    if weight.shape[1] > 1 << 15 or weight.numel() == 0 or weight.device != x.device:
        return False
    return has_kernels(x.device)


@torch.library.custom_op("locks_hf::linears", mutates_args=())
def _linears(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> list[torch.Tensor]:
    from .triton import linears_triton

    return linears_triton(x, weights, biases)


@_linears.register_fake
def _(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [x.new_empty((x.shape[0], weight.shape[0])) for weight in weights]
