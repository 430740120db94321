"""Triton kernels of page selection: normaliser, combined shares, exact top-k.

The top-k is a binary search over the bits of the ordered integer form of the values, then one ordered compaction. It is
exact, ties included, and needs no sort and no host round trip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_RULE_CODES = {"share": 0, "max": 1, "mass": 2}


@triton.jit
def _normalizer_kernel(lse_ptr, n_pages_ptr, normalizer_ptr, max_pages, HG: tl.constexpr, BLOCK: tl.constexpr):
    """Log of the sum over pages of one query head's masses."""
    row_head = tl.program_id(0).to(tl.int64)
    n_pages = tl.minimum(tl.load(n_pages_ptr + row_head // HG), max_pages)
    offset = tl.arange(0, BLOCK)
    running_max = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_pages, BLOCK):
        mask = start + offset < n_pages
        value = tl.load(lse_ptr + row_head * max_pages + start + offset, mask=mask, other=float("-inf"))
        larger = tl.maximum(running_max, value, propagate_nan=tl.PropagateNan.ALL)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        running_sum = running_sum * tl.exp(running_max - safe) + tl.exp(value - safe)
        running_max = larger
    largest = tl.max(running_max, axis=0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(running_sum * tl.exp(running_max - safe), axis=0)
    tl.store(normalizer_ptr + row_head, safe + tl.log(total))


@triton.jit
def _combine_kernel(
    lse_ptr,
    n_pages_ptr,
    normalizer_ptr,
    value_ptr,
    max_pages,
    H: tl.constexpr,
    G: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_head = tl.program_id(1).to(tl.int64)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_row = page < max_pages
    exists = in_row & (page < tl.load(n_pages_ptr + row_head // H))
    p_lse = lse_ptr + row_head * G * max_pages + page
    if RULE == 2:
        largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        for g in range(G):
            value = tl.load(p_lse + g * max_pages, mask=exists, other=float("-inf"))
            largest = tl.maximum(largest, value, propagate_nan=tl.PropagateNan.ALL)
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for g in range(G):
            total += tl.exp(tl.load(p_lse + g * max_pages, mask=exists, other=float("-inf")) - safe)
        value = safe + tl.log(total)
    else:
        value = tl.zeros((BLOCK,), dtype=tl.float32)
        for g in range(G):
            normalizer = tl.load(normalizer_ptr + row_head * G + g)
            share = tl.exp(tl.load(p_lse + g * max_pages, mask=exists, other=0.0) - normalizer)
            if RULE == 0:
                value += share
            else:
                value = tl.maximum(value, share, propagate_nan=tl.PropagateNan.ALL)
        if RULE == 0:
            value = value / G
    tl.store(value_ptr + row_head * max_pages + page, tl.where(exists, value, float("-inf")), mask=in_row)


@triton.jit
def _ordered_keys(value_ptr, page, n_complete, n_total):
    """Unsigned keys in the order of the values; forced pages rank above all, then NaN, missing pages at zero."""
    value = tl.load(value_ptr + page, mask=page < n_complete, other=float("-inf"))
    largest = 3.4028234663852886e38
    value = tl.where(value <= largest, value, largest)  # NaN and infinity stay below the forced pages
    value = tl.where((page == 0) | (page == n_total - 1), float("inf"), value)
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 equals 0.0
    bits = value.to(tl.int32, bitcast=True)
    # Ordered as signed integers, then shifted to unsigned. -inf maps to 0x007fffff, so zero is free for "no page".
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = ordered.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(page < n_total, key, 0)


@triton.jit
def _top_pages_kernel(
    value_ptr,
    lengths_ptr,
    pages_ptr,
    max_complete,
    slots,
    H: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + row_head // H), max_complete * P + P - 1)
    n_complete = length // P
    n_total = (length + P - 1) // P
    wanted = tl.minimum(slots, n_total)
    p_value = value_ptr + row_head * max_complete
    offset = tl.arange(0, BLOCK)

    # The largest threshold that at least `wanted` keys reach, bit by bit.
    threshold = tl.zeros((), dtype=tl.uint32)
    for i in range(32):
        candidate = threshold | (tl.full((), 1, dtype=tl.uint32) << (31 - i))
        count = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, n_total, BLOCK):
            count += (_ordered_keys(p_value, start + offset, n_complete, n_total) >= candidate).to(tl.int32)
        threshold = tl.where(tl.sum(count, axis=0) >= wanted, candidate, threshold)

    above = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, n_total, BLOCK):
        above += (_ordered_keys(p_value, start + offset, n_complete, n_total) > threshold).to(tl.int32)
    equal_wanted = wanted - tl.sum(above, axis=0)

    p_pages = pages_ptr + row_head * slots
    taken = tl.zeros((), dtype=tl.int32)
    equal_seen = tl.zeros((), dtype=tl.int32)
    for start in range(0, n_total, BLOCK):
        page = start + offset
        key = _ordered_keys(p_value, page, n_complete, n_total)
        equal = ((key == threshold) & (page < n_total)).to(tl.int32)
        rank_among_equal = equal_seen + tl.cumsum(equal, axis=0) - equal
        chosen = (key > threshold) | ((equal > 0) & (rank_among_equal < equal_wanted))
        chosen_count = chosen.to(tl.int32)
        slot = taken + tl.cumsum(chosen_count, axis=0) - chosen_count
        tl.store(p_pages + slot, page, mask=chosen)
        taken += tl.sum(chosen_count, axis=0)
        equal_seen += tl.sum(equal, axis=0)
    for start in range(0, slots, BLOCK):
        slot = start + offset
        tl.store(p_pages + slot, slot * 0 - 1, mask=(slot >= taken) & (slot < slots))


def combine_triton(lse: torch.Tensor, n_pages: torch.Tensor, rule: str) -> torch.Tensor:
    """Launch the kernels; arguments and result as in :func:`locks_hf.kernels.select.combine`."""
    batch, n_kv_heads, group, max_pages = lse.shape
    lse = lse.contiguous()
    normalizer = torch.empty((batch, n_kv_heads, group), dtype=torch.float32, device=lse.device)
    if rule != "mass":
        _normalizer_kernel[(batch * n_kv_heads * group,)](
            lse, n_pages, normalizer, max_pages, HG=n_kv_heads * group, BLOCK=1024, num_warps=4
        )
    value = torch.empty((batch, n_kv_heads, max_pages), dtype=torch.float32, device=lse.device)
    block = 256
    _combine_kernel[(triton.cdiv(max_pages, block), batch * n_kv_heads)](
        lse, n_pages, normalizer, value, max_pages, H=n_kv_heads, G=group, RULE=_RULE_CODES[rule], BLOCK=block
    )
    return value


def top_pages_triton(value: torch.Tensor, lengths: torch.Tensor, page_size: int, slots: int) -> torch.Tensor:
    """Launch the kernel; arguments and result as in :func:`locks_hf.kernels.select.top_pages`."""
    batch, n_kv_heads, max_complete = value.shape
    value = value.contiguous()
    pages = torch.empty((batch, n_kv_heads, slots), dtype=torch.int32, device=value.device)
    _top_pages_kernel[(batch * n_kv_heads,)](
        value, lengths, pages, max_complete, slots, H=n_kv_heads, P=page_size, BLOCK=1024, num_warps=4
    )
    return pages
