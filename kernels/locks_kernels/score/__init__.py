"""Queries and packed summaries to estimated page log-sum-exp mass."""

from __future__ import annotations

import torch

from ..backend import check_head_dim_and_dtype, check_page_size, check_row_counts, implementation
from ..layout import SummaryLayout
from .cpu import score_cpu
from .reference import score_reference

__all__ = ["score", "score_cpu", "score_reference"]


def score(
    query: torch.Tensor,
    summaries: dict[str, torch.Tensor],
    n_pages: torch.Tensor,
    max_pages: int,
    layout: SummaryLayout,
    scaling: float,
) -> torch.Tensor:
    """Estimate each page's log-sum-exp of attention logits from its summary (paper Eq. 2).

    Args:
        query: Post-RoPE queries of one token a row, ``(B, H * G, d)``, fp32, bf16 or fp16. Query heads of one KV head
            are adjacent.
        summaries: Arrays of :meth:`SummaryLayout.fields` with leading dimensions ``(B, H, capacity)``.
        n_pages: Summarised pages of each row, int32 ``(B,)``, each at most ``max_pages``.
        max_pages: Pages to score, at most ``capacity``.
        layout: Sizes of the summaries.
        scaling: Factor on the logits, usually ``d ** -0.5``.

    Returns:
        float32 ``(B, H, G, max_pages)``; ``-inf`` for pages a row does not have.

    Raises:
        ValueError: If shapes disagree, or head_dim or dtype are not supported.
    """
    centroid = summaries["centroid"]
    if centroid.ndim != 4 or query.ndim != 3:
        raise ValueError(
            f"query must be (B, heads, d) and the centroids (B, H, capacity, d), got {tuple(query.shape)} and "
            f"{tuple(centroid.shape)}"
        )
    batch, n_kv_heads, capacity, head_dim = centroid.shape
    if query.shape[0] != batch or query.shape[2] != head_dim or query.shape[1] % n_kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit summaries of {batch} rows, {n_kv_heads} KV heads and head_dim "
            f"{head_dim}"
        )
    for name, (shape, dtype) in layout.fields().items():
        array = summaries[name]
        if array.shape != (batch, n_kv_heads, capacity, *shape) or array.dtype != dtype:
            raise ValueError(
                f"the summaries' {name} must be {dtype} {(batch, n_kv_heads, capacity, *shape)} for this layout, got "
                f"{array.dtype} {tuple(array.shape)}"
            )
    check_page_size(layout.page_size)
    if not 0 <= max_pages <= capacity:
        raise ValueError(f"max_pages must be from 0 to the capacity {capacity}, got {max_pages}")
    check_row_counts("n_pages", n_pages, batch, max_pages)
    check_head_dim_and_dtype(head_dim, query.dtype)
    form = implementation(query.device)
    if form == "triton" and max_pages:
        from .triton import score_triton

        return score_triton(query, summaries, n_pages, max_pages, layout, scaling)
    if form == "cpu" and max_pages:
        return score_cpu(query, summaries, n_pages, max_pages, layout, scaling)
    return score_reference(query, summaries, n_pages, max_pages, layout, scaling)
