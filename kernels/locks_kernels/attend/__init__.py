"""Exact attention of one token a row over chosen pages of its cache."""

from __future__ import annotations

import torch

from ..backend import check_head_dim_and_dtype, check_page_size, check_row_counts, implementation
from .cpu import attend_cpu
from .reference import attend_reference

__all__ = ["attend", "attend_cpu", "attend_reference"]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scaling: float,
) -> torch.Tensor:
    """Softmax attention restricted to the real tokens of the chosen pages (paper Sec. 2).

    Args:
        query: Queries of one token a row, ``(B, H * G, d)``, fp32, bf16 or fp16.
        keys: ``(B, H, capacity, d)``, same dtype, row-contiguous; token ``t`` of a row lies in page ``t // page_size``.
        values: Like ``keys``.
        pages: Page indices, int32 ``(B, H, slots)``; ``-1`` is an empty slot. No page may occur twice.
        lengths: Cached tokens of each row, int32 ``(B,)``, each at most ``capacity``. A row of length 0 gives zeros.
        page_size: Tokens a page, a power of two.
        scaling: Factor on the logits.

    Returns:
        ``(B, H * G, d)`` in the dtype of ``query``; accumulated in float32.

    Raises:
        ValueError: If shapes or dtypes disagree or are not supported.
    """
    if keys.shape != values.shape or keys.ndim != 4:
        raise ValueError(
            f"keys and values must both be (B, H, capacity, d), got {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    batch, n_kv_heads, _, head_dim = keys.shape
    if query.ndim != 3 or query.shape[0] != batch or query.shape[2] != head_dim or query.shape[1] % n_kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit keys of {batch} rows, {n_kv_heads} KV heads, head_dim {head_dim}"
        )
    if pages.ndim != 3 or pages.shape[:2] != (batch, n_kv_heads) or pages.shape[2] == 0:
        raise ValueError(f"pages must be ({batch}, {n_kv_heads}, slots), got {tuple(pages.shape)}")
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"query, keys and values must share a dtype, got {query.dtype}, {keys.dtype} and {values.dtype}"
        )
    check_row_counts("lengths", lengths, batch, keys.shape[2])
    check_page_size(page_size)
    check_head_dim_and_dtype(head_dim, keys.dtype)
    form = implementation(query.device)
    if form == "triton":
        from .triton import attend_triton

        return attend_triton(query, keys, values, pages, lengths, page_size, scaling)
    if form == "cpu":
        return attend_cpu(query, keys, values, pages, lengths, page_size, scaling)
    return attend_reference(query, keys, values, pages, lengths, page_size, scaling)
