"""Triton kernel that begins a step of the held-context backends: write the token, and for Quest prepare its score.

One launch a layer, as FA3's own append and the decode step of Locks have, so that no dense arm pays for a second one.

=========  ========================  =====================================================================
name       shape                     content
=========  ========================  =====================================================================
key        (B, H, d)                 written to ``keys[:, :, position]``; ``value`` likewise
envelopes  (B, H, J, 2 d)            Quest: channel minima then maxima of each page; the last page's are updated
query      (B, H G, d)               Quest: post-RoPE queries
halves     (B, H, G, 2 d)            Quest, out: ``min(q, 0)`` then ``max(q, 0)``
=========  ========================  =====================================================================
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["position", "page"])
def _append_kernel(
    key_ptr,
    value_ptr,
    keys_ptr,
    values_ptr,
    query_ptr,
    envelopes_ptr,
    halves_ptr,
    position,
    page,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_keys_row,
    stride_keys_head,
    stride_keys_token,
    stride_query_row,
    stride_query_head,
    stride_envelopes_head,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUEST: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    row, head = row_head // H, row_head % H
    channel = tl.arange(0, BLOCK_D)
    m_channel = channel < D
    b_key = tl.load(key_ptr + row * stride_key_row + head * stride_key_head + channel, mask=m_channel)
    b_value = tl.load(value_ptr + row * stride_value_row + head * stride_value_head + channel, mask=m_channel)
    o_token = row * stride_keys_row + head * stride_keys_head + position.to(tl.int64) * stride_keys_token + channel
    tl.store(keys_ptr + o_token, b_key, mask=m_channel)
    tl.store(values_ptr + o_token, b_value, mask=m_channel)
    if QUEST:
        p_low = envelopes_ptr + row_head * stride_envelopes_head + page.to(tl.int64) * (2 * D) + channel
        b_low = tl.load(p_low, mask=m_channel)
        b_high = tl.load(p_low + D, mask=m_channel)
        tl.store(p_low, tl.minimum(b_low, b_key), mask=m_channel)
        tl.store(p_low + D, tl.maximum(b_high, b_key), mask=m_channel)
        for g in tl.static_range(G):
            p_query = query_ptr + row * stride_query_row + (head * G + g) * stride_query_head + channel
            b_query = tl.load(p_query, mask=m_channel)
            p_half = halves_ptr + (row_head * G + g) * (2 * D) + channel
            tl.store(p_half, tl.minimum(b_query, 0.0).to(b_query.dtype), mask=m_channel)
            tl.store(p_half + D, tl.maximum(b_query, 0.0).to(b_query.dtype), mask=m_channel)


def append_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    query: torch.Tensor | None = None,
    envelopes: torch.Tensor | None = None,
    page_size: int = 16,
) -> torch.Tensor | None:
    """Launch the kernel.

    Args:
        key: ``(B, H, d)``.
        value: Likewise.
        keys: ``(B, H, capacity, d)``; updated.
        values: Likewise, with the same strides.
        position: Where the token goes.
        query: ``(B, H * G, d)``, with ``envelopes``.
        envelopes: ``(B, H, J, 2 d)``, contiguous; updated.
        page_size: Tokens a page of ``envelopes``.

    Returns:
        The halves of the query, ``(B, H, G, 2 d)``, or ``None`` without ``envelopes``.
    """
    batch, heads, _, head_dim = keys.shape
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    quest = envelopes is not None
    group, halves = 1, None
    if quest:
        query = query if query.stride(-1) == 1 else query.contiguous()
        group = query.shape[1] // heads
        halves = torch.empty((batch, heads, group, 2 * head_dim), dtype=query.dtype, device=query.device)
    _append_kernel[(batch * heads,)](
        key,
        value,
        keys,
        values,
        query,
        envelopes,
        halves,
        position,
        position // page_size,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        query.stride(0) if quest else 0,
        query.stride(1) if quest else 0,
        envelopes.stride(1) if quest else 0,
        H=heads,
        G=group,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        QUEST=quest,
        num_warps=4,
    )
    return halves
