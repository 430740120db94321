"""Pages of keys to packed spectral summaries."""

from __future__ import annotations

import torch

from ..backend import check_head_dim_and_dtype, check_page_size, implementation
from ..layout import SummaryLayout
from .cpu import summarize_cpu
from .reference import summarize_reference

__all__ = ["summarize", "summarize_cpu", "summarize_reference"]


def summarize(keys: torch.Tensor, layout: SummaryLayout, refit: bool = True) -> dict[str, torch.Tensor]:
    """Summarise complete pages of keys (paper Sec. 4).

    Args:
        keys: Post-RoPE keys ``(N, P, d)``, fp32, bf16 or fp16.
        layout: Rank, page size and basis bits; its ``page_size`` and ``head_dim`` must match ``keys``.
        refit: Solve the coefficients against the quantised basis and centroid; ``False`` is the paper's ``C = D V``.

    Returns:
        The arrays of :meth:`SummaryLayout.fields`, each with a leading dimension ``N``, on the device of ``keys``.

    Raises:
        ValueError: If shapes do not match ``layout``, or head_dim or dtype are not supported.
    """
    if keys.ndim != 3 or keys.shape[1:] != (layout.page_size, layout.head_dim):
        raise ValueError(
            f"keys must be (N, {layout.page_size}, {layout.head_dim}) for this layout, got {tuple(keys.shape)}"
        )
    check_head_dim_and_dtype(layout.head_dim, keys.dtype)
    check_page_size(layout.page_size)
    if not 1 <= layout.rank <= min(layout.page_size - 1, layout.head_dim):
        raise ValueError(
            f"rank must be from 1 to {min(layout.page_size - 1, layout.head_dim)} for pages of {layout.page_size} "
            f"tokens and head_dim {layout.head_dim}, got {layout.rank}"
        )
    if keys.shape[0] == 0:
        return layout.empty(0, keys.device)
    form = implementation(keys.device)
    if form == "triton":
        from .triton import summarize_triton

        return summarize_triton(keys, layout, refit)
    if form == "cpu":
        return summarize_cpu(keys, layout, refit)
    return summarize_reference(keys, layout, refit)
