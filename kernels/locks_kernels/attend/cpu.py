"""Attention over chosen pages for the CPU: whole pages are gathered, and SDPA attends them."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from .reference import attend_reference


def attend_cpu(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scaling: float,
) -> torch.Tensor:
    """Exact attention over the real tokens of the chosen pages; see :func:`locks_hf.kernels.attend.attend`.

    The query heads of a KV head go to SDPA as queries of one head, so that keys and values are read once for all.
    """
    batch, n_kv_heads, capacity, head_dim = keys.shape
    if capacity % page_size or not (keys.is_contiguous() and values.is_contiguous()):
        return attend_reference(query, keys, values, pages, lengths, page_size, scaling)
    grouped = query.float().unflatten(1, (n_kv_heads, -1))  # (B, H, G, d)
    first = torch.arange(batch * n_kv_heads).view(batch, n_kv_heads, 1) * (capacity // page_size)
    # Empty slots read any page; what they read is masked below.
    index = (pages.clamp(min=0) + first).flatten()
    chosen_keys, chosen_values = (
        states.view(-1, page_size * head_dim).index_select(0, index).float().view(batch, n_kv_heads, -1, head_dim)
        for states in (keys, values)
    )
    end = _real_prefix(pages, lengths, page_size)
    if end is not None:
        chosen_keys, chosen_values = chosen_keys[:, :, :end], chosen_values[:, :, :end]
        out = scaled_dot_product_attention(grouped, chosen_keys, chosen_values, scale=scaling)
        return out.flatten(1, 2).to(query.dtype)

    tokens = pages[..., None] * page_size + torch.arange(page_size)
    real = ((pages >= 0)[..., None] & (tokens < lengths.view(batch, 1, 1, 1))).flatten(2)  # (B, H, slots * P)
    # Slots past the end may hold anything, NaN included; a zero weight alone would not silence a NaN.
    chosen_keys, chosen_values = (x.masked_fill_(~real[..., None], 0.0) for x in (chosen_keys, chosen_values))
    out = scaled_dot_product_attention(
        grouped, chosen_keys, chosen_values, attn_mask=real[:, :, None, :], scale=scaling
    )
    # A row without any real token attends to nothing: zeros, not the NaN of an empty softmax.
    return out.masked_fill(~real.any(dim=-1)[..., None, None], 0.0).flatten(1, 2).to(query.dtype)


def _real_prefix(pages: torch.Tensor, lengths: torch.Tensor, page_size: int) -> int | None:
    """Tokens of the chosen pages if all before that count are real and none after, in every row and head.

    So it is at a decode step of rows of equal length: all slots are used, and only the last page may be incomplete.
    """
    ends = set(lengths.tolist())
    if len(ends) != 1:
        return None
    n_complete, tail = divmod(ends.pop(), page_size)
    slots = pages.shape[2]
    lowest, highest = (int(end) for end in torch.aminmax(pages))
    if lowest < 0 or highest > n_complete:
        return None
    if highest < n_complete:
        return slots * page_size
    complete, last = pages[..., :-1], pages[..., -1]
    if (complete < n_complete).all() and (last == n_complete).all():
        return (slots - 1) * page_size + tail
    return None
