"""Triton kernels of page selection: normalisers, combined shares, exact top-k.

The top-k is exact, ties included, and needs no sort and no host round trip. Pages are looked at in groups of 16 first:
the ``k`` groups with the largest maxima (the earlier one among equals) hold the ``k`` largest pages, for any page
outside them is beaten by one page of each. Both choices search the threshold over the ordered integer form of the
values, in registers, and end when it separates exactly as many as are wanted. What does not fit in registers is
searched in memory.

In a decode step the programs that attend choose the pages themselves, each for all: one launch less, and their code is
at hand on the multiprocessors, which decides how long a search of a few thousand values takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..backend import programmatic_launch

_RULE_CODES = {"share": 0, "max": 1, "mass": 2}
_GROUP = 16  # pages
_MOST_IN_REGISTERS = 1 << 15  # values of one search: 64 a thread of 512
_MOST_BESIDE = 1 << 13  # likewise, in a program that has other things to do


@triton.jit
def _normalizer_kernel(lse_ptr, n_pages_ptr, partial_ptr, max_pages, HG: tl.constexpr, BLOCK: tl.constexpr):
    """Largest mass of one query head and the sum of all relative to it."""
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
    largest = tl.where(tl.max((running_max != running_max).to(tl.int32), axis=0) > 0, float("nan"), largest)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(partial_ptr + row_head * 2, largest)
    tl.store(partial_ptr + row_head * 2 + 1, tl.sum(running_sum * tl.exp(running_max - safe), axis=0))


@triton.jit
def _log_total(maxima, sums):
    """Log of the total mass of each column from parts along axis 0, NaN if one part is."""
    largest = tl.max(maxima, axis=0)
    broken = tl.max((maxima != maxima).to(tl.int32), axis=0) > 0
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    total = safe + tl.log(tl.sum(sums * tl.exp(maxima - safe[None, :]), axis=0))
    return tl.where(broken, float("nan"), total)


@triton.jit
def _normalizers(partial_ptr, row_head, n_splits, G: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr):
    """Log of the total mass of each query head, from what the splits of the scoring left."""
    group = tl.arange(0, BLOCK_G)
    running_max = tl.full((BLOCK_S, BLOCK_G), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((BLOCK_S, BLOCK_G), dtype=tl.float32)
    for start in range(0, n_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        p_partial = partial_ptr + ((row_head * n_splits + split)[:, None] * G + group[None, :]) * 2
        m_partial = (split < n_splits)[:, None] & (group < G)[None, :]
        b_max = tl.load(p_partial, mask=m_partial, other=float("-inf"))
        b_sum = tl.load(p_partial + 1, mask=m_partial, other=0.0)
        larger = tl.maximum(running_max, b_max, propagate_nan=tl.PropagateNan.ALL)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        running_sum = running_sum * tl.exp(running_max - safe) + b_sum * tl.exp(b_max - safe)
        running_max = larger
    return _log_total(running_max, running_sum)


@triton.jit
def _rank_values(lse, normalizer, group, G: tl.constexpr, RULE: tl.constexpr):
    """One value a page from scores ``(BLOCK_G, pages)``; see :func:`locks_hf.kernels.select.combine`."""
    if RULE == 2:
        largest = tl.max(lse, axis=0)
        broken = tl.max((lse != lse).to(tl.int32), axis=0) > 0
        safe = tl.where(largest == float("-inf"), 0.0, largest)
        value = safe + tl.log(tl.sum(tl.exp(lse - safe[None, :]), axis=0))
        value = tl.where(broken, float("nan"), value)
    else:
        share = tl.where((group < G)[:, None], tl.exp(lse - normalizer[:, None]), 0.0)
        if RULE == 0:
            value = tl.sum(share, axis=0) / G
        else:
            value = tl.max(share, axis=0)
            value = tl.where(tl.max((share != share).to(tl.int32), axis=0) > 0, float("nan"), value)
    return value


@triton.jit
def _sanitized(value):
    """NaN and infinity as the largest finite value: above all others, below what is forced."""
    largest = 3.4028234663852886e38
    return tl.where(value <= largest, value, largest)


@triton.jit
def _ordered(value):
    """Unsigned keys in the order of the values. -inf becomes 0x007fffff, so zero is free for "none"."""
    value = _sanitized(value)
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 equals 0.0
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _popcount(word):
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _rank(chosen, S: tl.constexpr):
    """How many chosen ones come before each entry of a ``(C, S)`` tile that counts along its rows; ``S <= 32``."""
    column = tl.arange(0, S)[None, :].to(tl.uint32)
    bit = tl.full((), 1, tl.uint32) << column
    bits = tl.sum(tl.where(chosen, bit, 0), axis=1)
    count = _popcount(bits).to(tl.int32)
    before = tl.cumsum(count, axis=0) - count
    return before[:, None] + _popcount(bits[:, None] & (bit - 1)).to(tl.int32)


@triton.jit
def _choose(key, wanted, low, count, near_low, S: tl.constexpr):
    """Mark the ``wanted`` largest of the positive keys of a ``(C, S)`` tile, earlier ones first among equals.

    At least ``wanted`` keys and at most ``count`` reach ``low``. The threshold is just above ``low`` if ``near_low``,
    or else a few octaves below the largest key. Returns the marks and a threshold that exactly or at least as many
    reach.
    """
    high = tl.max(key) + 1
    beyond = count * 0  # keys that reach `high`
    reach = tl.where(near_low, 1 << 19, 1 << 25).to(tl.uint32)
    while (high - low > 1) & (count != wanted):
        # Two thresholds, counted in the halves of one word: one that gallops from the near end until it is the middle,
        # and one where keys evenly spread would have it.
        width = high - low
        first = tl.minimum(width // 2, reach)
        first = tl.where(near_low, low + first, high - first)
        reach = tl.minimum(reach, 1 << 28) * 4
        share = ((count - wanted).to(tl.float32) + 0.5) / (count - beyond).to(tl.float32)
        guess = low + (width.to(tl.float32) * share).to(tl.uint32)
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        second = tl.maximum(first, guess)
        first = tl.minimum(first, guess)
        both = tl.sum((key >= first).to(tl.uint32) + ((key >= second).to(tl.uint32) << 16))
        n_first = (both & 0xFFFF).to(tl.int32)
        n_second = (both >> 16).to(tl.int32)
        if n_second >= wanted:
            low = second
            count = n_second
        elif n_first >= wanted:
            low = first
            count = n_first
            high = second
            beyond = n_second
        else:
            high = first
            beyond = n_first
    chosen = key >= low
    if count != wanted:  # equal keys at the threshold
        above = key > low
        equal = key == low
        chosen = above | (equal & (_rank(equal, S) < wanted - tl.sum(above.to(tl.int32))))
    return chosen, low


@triton.jit
def best_pages(
    p_value,
    p_group_max,
    p_groups,
    p_pages,
    n_scored,
    n_total,
    slots,
    start,
    end,
    GROUP: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Choose the first, the last and the best other pages of one (row, KV head), ``slots`` in all or all there are.

    Those at ``start`` to ``end`` of the ascending choice are written to ``p_pages``, and -1 past its end. Pages up to
    ``n_scored`` have values and groups of them maxima; ``n_total`` exist.
    """
    last = n_total - 1
    wanted = tl.minimum(slots, n_total)
    forced = tl.minimum(n_total, 2)
    used_groups = (n_total + GROUP - 1) // GROUP
    index = tl.arange(0, BLOCK_K)
    low = tl.full((), 1, dtype=tl.uint32)
    count = n_total - forced
    n_candidates = used_groups
    candidate = index
    if used_groups > slots:
        group = tl.arange(0, C)[:, None] * S + tl.arange(0, S)[None, :]
        biggest = tl.load(p_group_max + group, mask=group * GROUP < n_scored, other=float("-inf"))
        m_forced = (group == 0) | (group == last // GROUP)
        key = tl.where(m_forced | (group >= used_groups), 0, _ordered(biggest))
        # Each chosen group has a page that reaches the threshold, so that it bounds the search among their pages too.
        chosen, low = _choose(key, slots - 2, low, used_groups - 2, False, S)
        chosen = chosen | m_forced
        tl.store(p_groups + _rank(chosen, S), group, mask=chosen)
        n_candidates = slots + 0
        count = slots * GROUP
        tl.debug_barrier()
        candidate = tl.load(p_groups + index, mask=index < slots, other=0)
    page = candidate[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    m_page = (index < n_candidates)[:, None] & (page < n_total)
    value = tl.load(p_value + page, mask=m_page & (page < n_scored), other=float("-inf"))
    chosen = m_page & ((page == 0) | (page == last))
    key = tl.where(m_page & (page != 0) & (page != last), _ordered(value), 0)
    if wanted > forced:
        best, low = _choose(key, wanted - forced, low, count, used_groups > slots, GROUP)
        chosen = chosen | best
    place = _rank(chosen, GROUP)
    tl.store(p_pages + place - start, page, mask=chosen & (place >= start) & (place < end))
    tl.store(p_pages + index - start, index * 0 - 1, mask=(index >= wanted) & (index >= start) & (index < end))


@triton.jit
def _counted(counts_ptr, real_ptr, row, capacity, P: tl.constexpr, HAS_REAL: tl.constexpr):
    """Of a row in a decode step: pages that are scored, tokens with the new one, and 1, 0 (padding) or -1 (no room)."""
    count = tl.load(counts_ptr + row)
    added = 1
    if HAS_REAL:
        added = tl.load(real_ptr + row).to(tl.int32)
    length = tl.minimum(count + added, capacity * P)
    return tl.minimum(count // P, capacity), length, tl.where(count < capacity * P, added, -added)


@triton.jit
def _combine_kernel(
    lse_ptr,
    partial_ptr,
    counts_ptr,
    real_ptr,
    value_ptr,
    group_max_ptr,
    lengths_ptr,
    added_ptr,
    max_pages,
    n_splits,
    n_groups,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    P: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STEP: tl.constexpr,
    HAS_REAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Values of a block of pages and the largest of each group of them; in a decode step also the rows' lengths."""
    row_head = tl.program_id(1).to(tl.int64)
    row = row_head // H
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if STEP:
        n_pages, length, added = _counted(counts_ptr, real_ptr, row, max_pages, P, HAS_REAL)
        if (tl.program_id(0) == 0) & (row_head % H == 0):
            tl.store(lengths_ptr + row, length)
            tl.store(added_ptr + row, added)
    else:
        n_pages = tl.minimum(tl.load(counts_ptr + row), max_pages)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = page < n_pages
    group = tl.arange(0, BLOCK_G)
    p_lse = lse_ptr + row_head * G * max_pages + (group[:, None] * max_pages + page[None, :])
    b_lse = tl.load(p_lse, mask=(group < G)[:, None] & exists[None, :], other=float("-inf"))
    normalizer = tl.zeros((BLOCK_G,), dtype=tl.float32)
    if RULE != 2:
        normalizer = _normalizers(partial_ptr, row_head, n_splits, G, BLOCK_G, BLOCK_S)
    value = tl.where(exists, _rank_values(b_lse, normalizer, group, G, RULE), float("-inf"))
    tl.store(value_ptr + row_head * max_pages + page, value, mask=page < max_pages)
    biggest = tl.max(tl.reshape(_sanitized(value), (BLOCK // GROUP, GROUP)), axis=1)
    o_group = tl.program_id(0) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(group_max_ptr + row_head * n_groups + o_group, biggest, mask=o_group < n_groups)


@triton.jit
def _group_max_kernel(value_ptr, group_max_ptr, max_pages, n_groups, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Largest value of each group of pages."""
    row_head = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    page = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(value_ptr + row_head * max_pages + page, mask=page < max_pages, other=float("-inf"))
    tl.store(group_max_ptr + row_head * n_groups + group, tl.max(_sanitized(value), axis=1), mask=group < n_groups)


@triton.jit
def _top_pages_kernel(
    value_ptr,
    group_max_ptr,
    lengths_ptr,
    groups_ptr,
    pages_ptr,
    max_complete,
    n_groups,
    slots,
    H: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + row_head // H), max_complete * P + P - 1)
    best_pages(
        value_ptr + row_head * max_complete,
        group_max_ptr + row_head * n_groups,
        groups_ptr + row_head * BLOCK_K,
        pages_ptr + row_head * slots,
        length // P,
        (length + P - 1) // P,
        slots,
        0,
        slots,
        GROUP,
        C,
        S,
        BLOCK_K,
    )


@triton.jit
def _ordered_keys(value_ptr, page, n_complete, n_total):
    """Unsigned keys in the order of the values; forced pages rank above all, then NaN, missing pages at zero."""
    value = tl.load(value_ptr + page, mask=page < n_complete, other=float("-inf"))
    key = tl.where((page == 0) | (page == n_total - 1), 0xFFFFFFFF, _ordered(value))
    return tl.where(page < n_total, key, 0)


@triton.jit
def _search_pages_kernel(
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
    partial = torch.empty((batch * n_kv_heads, 1, group, 2), dtype=torch.float32, device=lse.device)
    if rule != "mass":
        _normalizer_kernel[(batch * n_kv_heads * group,)](
            lse, n_pages, partial, max_pages, HG=n_kv_heads * group, BLOCK=1024, num_warps=4
        )
    return _launch_combine(lse, partial, n_pages, rule)[0]


@dataclass(frozen=True)
class RankedPages:
    """Values of pages, for programs that choose by :func:`best_pages` themselves.

    Attributes:
        value: float32 ``(B, H, J)``.
        group_max: Largest of each group of 16, float32 ``(B * H, J / 16)``.
        slots: Pages to choose, at least 2.
        sizes: Sizes of the searches.
        warps: Warps that a program needs for them.
    """

    value: torch.Tensor
    group_max: torch.Tensor
    slots: int
    sizes: dict[str, int]
    warps: int


def select_step(
    lse: torch.Tensor,
    partial: torch.Tensor,
    counts: torch.Tensor,
    real: torch.Tensor | None,
    rule: str,
    page_size: int,
    slots: int,
) -> tuple[RankedPages | torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rank the pages of a decode step by what :func:`locks_hf.kernels.score.triton.score_pages` left.

    Args:
        lse: Page log-sum-exp, float32 ``(B, H, G, J)``, contiguous, with ``J`` the capacity in pages.
        partial: What is returned with it.
        counts: Tokens of each row before the new one, int32 ``(B,)`` or longer.
        real: As in :func:`locks_hf.kernels.decode.decode_step`.
        rule: Likewise.
        page_size: Tokens a page.
        slots: Pages to choose, at least 2.

    Returns:
        The ranked pages, or, where the choice is too large to be made by programs that attend, the pages chosen, int32
        ``(B, H, slots)``, ascending and ended by -1; int32 ``(B,)`` of the tokens of each row with the new one; and
        int32 ``(B,)``: 1 where there is one, 0 where it is padding, -1 where it has no room.
    """
    lengths, added = torch.empty((2, lse.shape[0]), dtype=torch.int32, device=lse.device).unbind(0)
    value, group_max = _launch_combine(lse, partial, counts, rule, (real, lengths, added, page_size))
    sizes = _search(lse.shape[3], slots)
    if sizes is not None and max(sizes["C"] * sizes["S"], sizes["BLOCK_K"] * _GROUP) <= _MOST_BESIDE:
        return RankedPages(value, group_max, slots, {"GROUP": _GROUP, **sizes}, _search_warps(sizes)), lengths, added
    return _launch_choice(value, group_max, lengths, page_size, slots), lengths, added


def _search(max_pages: int, slots: int) -> dict[str, int] | None:
    """Sizes of the search in registers, or ``None`` if it does not fit there."""
    n_groups = triton.cdiv(max_pages, _GROUP)
    block_groups = max(128, triton.next_power_of_2(n_groups + 1))  # the most recent page may begin another group
    block_slots = triton.next_power_of_2(slots)
    if max(block_groups, block_slots * _GROUP) > _MOST_IN_REGISTERS:
        return None
    columns = min(32, max(1, block_groups // 128))
    return {"C": block_groups // columns, "S": columns, "BLOCK_K": block_slots}


def _search_warps(sizes: dict[str, int]) -> int:
    largest = max(sizes["C"] * sizes["S"], sizes["BLOCK_K"] * _GROUP)
    return 4 if largest <= 4096 else 8 if largest <= 8192 else 16


def _launch_combine(
    lse: torch.Tensor, partial: torch.Tensor, counts: torch.Tensor, rule: str, step: tuple | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values ``(B, H, J)`` and the largest of each group of 16 pages; in a decode step also lengths."""
    batch, n_kv_heads, group, max_pages = lse.shape
    rows, n_splits = partial.shape[:2]
    real, lengths, added, page_size = step or (None,) * 4
    n_groups = triton.cdiv(max_pages, _GROUP)
    value = torch.empty((batch, n_kv_heads, max_pages), dtype=torch.float32, device=lse.device)
    group_max = torch.empty((rows, n_groups), dtype=torch.float32, device=lse.device)
    # Every program reads all parts of the normalisers: many parts want few programs.
    block, warps = (512, 4) if n_splits < 64 else (1024, 8)
    _combine_kernel[(triton.cdiv(max_pages, block), rows)](
        lse,
        partial,
        counts,
        None if real is None else real.view(torch.uint8),
        value,
        group_max,
        lengths,
        added,
        max_pages,
        n_splits,
        n_groups,
        H=n_kv_heads,
        G=group,
        BLOCK_G=triton.next_power_of_2(group),
        P=page_size,
        RULE=_RULE_CODES[rule],
        BLOCK=block,
        GROUP=_GROUP,
        BLOCK_S=64,
        STEP=step is not None,
        HAS_REAL=real is not None,
        **programmatic_launch(lse.device),
        num_warps=warps,
    )
    return value, group_max


def top_pages_triton(value: torch.Tensor, lengths: torch.Tensor, page_size: int, slots: int) -> torch.Tensor:
    """Launch the kernels; arguments and result as in :func:`locks_hf.kernels.select.top_pages`."""
    value = value.contiguous()
    max_pages, rows = value.shape[2], value.shape[0] * value.shape[1]
    n_groups, group_max = triton.cdiv(max_pages, _GROUP), None
    if _search(max_pages, slots) is not None:
        group_max = torch.empty((rows, n_groups), dtype=torch.float32, device=value.device)
        if n_groups:
            _group_max_kernel[(triton.cdiv(n_groups, 64), rows)](
                value, group_max, max_pages, n_groups, GROUP=_GROUP, BLOCK=64, num_warps=4
            )
    return _launch_choice(value, group_max, lengths, page_size, slots)


def _launch_choice(
    value: torch.Tensor, group_max: torch.Tensor | None, lengths: torch.Tensor, page_size: int, slots: int
) -> torch.Tensor:
    """Pages ``(B, H, slots)`` from values and, if the search fits in registers, the largest of each group."""
    batch, n_kv_heads, max_pages = value.shape
    rows = batch * n_kv_heads
    pages = torch.empty((batch, n_kv_heads, slots), dtype=torch.int32, device=value.device)
    sizes = _search(max_pages, slots)
    if sizes is None:
        _search_pages_kernel[(rows,)](
            value, lengths, pages, max_pages, slots, H=n_kv_heads, P=page_size, BLOCK=1024, num_warps=4
        )
        return pages
    groups = torch.empty((rows, sizes["BLOCK_K"]), dtype=torch.int32, device=value.device)
    _top_pages_kernel[(rows,)](
        value,
        group_max,
        lengths,
        groups,
        pages,
        max_pages,
        group_max.shape[1],
        slots,
        H=n_kv_heads,
        P=page_size,
        GROUP=_GROUP,
        **sizes,
        num_warps=_search_warps(sizes),
    )
    return pages
