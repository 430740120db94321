"""Triton kernels of page selection: normalisers, combined shares, exact top-k.

The top-k is exact, ties included, and needs no sort and no host round trip. Pages are looked at in groups first: the
``k`` groups with the largest maxima (the earlier one among equals) hold the ``k`` largest pages, for any page outside
them is beaten by one page of each. Both choices search the threshold over unsigned keys in the order of the values, in
registers, and end when it separates exactly as many as are wanted. What does not fit in registers is searched in
memory.

In a decode step the programs that attend choose the pages themselves, each for all, which saves a launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..backend import interpreting, launching, programmatic_launch

_RULE_CODES = {"share": 0, "max": 1, "mass": 2}
_GROUPS = (8, 16, 32)  # pages
_MOST_IN_REGISTERS = 1 << 15  # values of one search: 64 a thread of 512
_MOST_BESIDE = 1 << 13  # likewise, in a program that has other things to do


@triton.jit
def _normalizer_kernel(lse_ptr, n_pages_ptr, partial_ptr, max_pages, HG: tl.constexpr, BLOCK: tl.constexpr):
    """Log of the total mass of one query head."""
    row_head = tl.program_id(0).to(tl.int64)
    n_pages = tl.minimum(tl.load(n_pages_ptr + row_head // HG), max_pages)
    offset = tl.arange(0, BLOCK)
    running_max = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_pages, BLOCK):
        mask = start + offset < n_pages
        value = tl.load(lse_ptr + row_head * max_pages + start + offset, mask=mask, other=float("-inf"))
        running_max, running_sum = _accumulated(running_max, running_sum, value)
    tl.store(partial_ptr + row_head, _log_total(running_max, running_sum, 0))


@triton.jit
def _accumulated(running_max, running_sum, value):
    """Running log-sum-exp with one more value; a NaN among the values makes the sum NaN."""
    larger = tl.maximum(running_max, value)  # of a NaN and a number the number
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    return larger, running_sum * tl.exp(running_max - safe) + tl.exp(value - safe)


@triton.jit
def _log_total(running_max, running_sum, axis: tl.constexpr):
    """Log-sum-exp along an axis of what :func:`_accumulated` left."""
    largest = tl.max(running_max, axis=axis)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    return safe + tl.log(tl.sum(running_sum * tl.exp(running_max - tl.expand_dims(safe, axis)), axis=axis))


@triton.jit
def _normalizers(partial_ptr, row_head, n_splits, G: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr):
    """Log of the total mass of each query head, from those of the splits of the scoring."""
    group = tl.arange(0, BLOCK_G)
    running_max = tl.full((BLOCK_G, BLOCK_S), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((BLOCK_G, BLOCK_S), dtype=tl.float32)
    for start in range(0, n_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        p_partial = partial_ptr + (row_head * G + group[:, None]) * n_splits + split[None, :]
        m_partial = (group < G)[:, None] & (split < n_splits)[None, :]
        value = tl.load(p_partial, mask=m_partial, other=float("-inf"))
        running_max, running_sum = _accumulated(running_max, running_sum, value)
    return _log_total(running_max, running_sum, 1)


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
def _place(chosen, S: tl.constexpr):
    """Another place for each chosen one of an ``(S, C)`` tile, counting from 0 down its columns; ``S <= 32``."""
    bit = tl.full((), 1, tl.uint32) << tl.arange(0, S)[:, None].to(tl.uint32)
    bits = tl.sum(tl.where(chosen, bit, 0).to(tl.int32, bitcast=True), axis=0).to(tl.uint32, bitcast=True)
    count = _popcount(bits).to(tl.int32)
    before = tl.cumsum(count, axis=0) - count
    return before[None, :] + _popcount(bits[None, :] & (bit - 1)).to(tl.int32)


@triton.jit
def _threshold(key, wanted, low, count, near_low):
    """A threshold that ``wanted`` keys reach, or more if they are equal, and a bound on how many do.

    At least ``wanted`` keys and at most ``count`` reach ``low``. The threshold is just above ``low`` if ``near_low``,
    or else a few octaves below the largest key.
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
        both = tl.sum((key >= first).to(tl.int32) + ((key >= second).to(tl.int32) << 16)).to(tl.uint32, bitcast=True)
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
    return low, count


@triton.jit
def _choose(key, index, wanted, low, count, near_low):
    """Mark the ``wanted`` largest of the positive keys of a tile, among equals those of the lowest ``index``.

    Arguments are as in :func:`_threshold`. Returns the marks and a threshold that they all reach.
    """
    low, count = _threshold(key, wanted, low, count, near_low)
    chosen = key >= low
    if count != wanted:  # equal keys at the threshold
        chosen = key > low
        missing = wanted - tl.sum(chosen.to(tl.int32))
        order = tl.where(key == low, 0x80000000 - index.to(tl.uint32), 0)
        order = tl.where(missing > 0, order, 0)
        first, _ = _threshold(order, missing, low * 0 + 1, count * 0 + (1 << 15), False)
        chosen = chosen | (order >= first)
    return chosen, low


@triton.jit
def best_pages(
    p_key,
    p_group_key,
    p_groups,
    p_pages,
    n_total,
    n_groups,
    slots,
    start,
    end,
    GROUP: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Choose the first, the last and the best other pages of one (row, KV head), ``slots`` in all or all there are.

    Those in the slots ``start`` to ``end`` are written to ``p_pages``, in no particular order but that -1 stands past
    the last. Of ``n_total`` pages, those between the first and the last have positive keys; other keys are zero.
    """
    wanted = tl.minimum(slots, n_total)
    others = tl.maximum(wanted - 2, 0)
    index = tl.arange(0, BLOCK_K)
    low = tl.full((), 1, dtype=tl.uint32)
    n_candidates = (n_total + GROUP - 1) // GROUP
    count = tl.maximum(n_total - 2, 0)
    candidate = index
    in_groups = n_candidates > slots
    if in_groups:
        group = tl.arange(0, S)[:, None] * C + tl.arange(0, C)[None, :]
        biggest = tl.load(p_group_key + group, mask=group < n_groups, other=0).to(tl.uint32, bitcast=True)
        # Each chosen group has a page that reaches the threshold, so that it bounds the search among their pages too.
        chosen, low = _choose(biggest, group, others, low, n_candidates, False)
        tl.store(p_groups + _place(chosen, S), group, mask=chosen)
        n_candidates = others
        count = others * GROUP
        tl.debug_barrier()
        candidate = tl.load(p_groups + index, mask=index < others, other=0)
    page = tl.arange(0, GROUP)[:, None] + candidate[None, :] * GROUP
    key = tl.load(p_key + page, mask=(index < n_candidates)[None, :], other=0).to(tl.uint32, bitcast=True)
    if others > 0:
        chosen, low = _choose(key, page, others, low, count, in_groups)
        place = _place(chosen, GROUP) + 1
        tl.store(p_pages + (place - start), page, mask=chosen & (place >= start) & (place < end))
    rest = tl.where(index == 0, 0, tl.where(index == wanted - 1, n_total - 1, -1))
    rest = tl.where(index < wanted, rest, -1)
    m_rest = (index == 0) | (index >= wanted - 1)
    tl.store(p_pages + (index - start), rest, mask=m_rest & (index >= start) & (index < end))


@triton.jit
def _store_keys(value, page, last, p_key, p_group_key, size, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of a block of pages, zero but between the first and the last, and the largest of each group of them."""
    key = tl.where((page > 0) & (page < last), _ordered(value), 0)
    tl.store(p_key + page, key.to(tl.int32, bitcast=True), mask=page < size)
    biggest = tl.max(tl.reshape(key, (BLOCK // GROUP, GROUP)), axis=1)
    group = tl.program_id(0) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(p_group_key + group, biggest.to(tl.int32, bitcast=True), mask=group * GROUP < size)


@triton.jit
def counted(counts_ptr, real_ptr, row, capacity, P: tl.constexpr, HAS_REAL: tl.constexpr):
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
    key_ptr,
    group_key_ptr,
    lengths_ptr,
    added_ptr,
    max_pages,
    n_splits,
    n_keys,
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
    """Values of a block of pages; in a decode step instead keys for the choice, and the rows' lengths."""
    row_head = tl.program_id(1).to(tl.int64)
    row = row_head // H
    if STEP:
        n_pages, length, added = counted(counts_ptr, real_ptr, row, max_pages, P, HAS_REAL)
    else:
        n_pages = tl.minimum(tl.load(counts_ptr + row), max_pages)
    if PDL:  # in a decode step the counts are older than the kernel before
        gdc_wait()
        gdc_launch_dependents()
    if STEP:  # noqa: SIM102  known when it is compiled
        if (tl.program_id(0) == 0) & (row_head % H == 0):
            tl.store(lengths_ptr + row, length)
            tl.store(added_ptr + row, added)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = page < n_pages
    group = tl.arange(0, BLOCK_G)
    p_lse = lse_ptr + row_head * G * max_pages + (group[:, None] * max_pages + page[None, :])
    b_lse = tl.load(p_lse, mask=(group < G)[:, None] & exists[None, :], other=float("-inf"))
    normalizer = tl.zeros((BLOCK_G,), dtype=tl.float32)
    if RULE != 2:
        normalizer = _normalizers(partial_ptr, row_head, n_splits, G, BLOCK_G, BLOCK_S)
    value = tl.where(exists, _rank_values(b_lse, normalizer, group, G, RULE), float("-inf"))
    if STEP:
        last = (length + P - 1) // P - 1
        p_key, p_group_key = key_ptr + row_head * n_keys, group_key_ptr + row_head * (n_keys // GROUP)
        _store_keys(value, page, last, p_key, p_group_key, n_keys, GROUP, BLOCK)
    else:
        tl.store(value_ptr + row_head * max_pages + page, value, mask=page < max_pages)


@triton.jit
def _key_kernel(
    value_ptr,
    lengths_ptr,
    key_ptr,
    group_key_ptr,
    max_complete,
    n_keys,
    H: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys of a block of pages from their values."""
    row_head = tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + row_head // H), max_complete * P + P - 1)
    last = (length + P - 1) // P - 1
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(value_ptr + row_head * max_complete + page, mask=page < max_complete, other=float("-inf"))
    p_key, p_group_key = key_ptr + row_head * n_keys, group_key_ptr + row_head * (n_keys // GROUP)
    _store_keys(value, page, last, p_key, p_group_key, n_keys, GROUP, BLOCK)


@triton.jit
def _top_pages_kernel(
    key_ptr,
    group_key_ptr,
    lengths_ptr,
    groups_ptr,
    pages_ptr,
    most,
    n_keys,
    slots,
    H: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + row_head // H), most)
    n_groups = n_keys // GROUP
    best_pages(
        key_ptr + row_head * n_keys,
        group_key_ptr + row_head * n_groups,
        groups_ptr + row_head * BLOCK_K,
        pages_ptr + row_head * slots,
        (length + P - 1) // P,
        n_groups,
        slots,
        0,
        slots,
        GROUP,
        C,
        S,
        BLOCK_K,
    )
    # In ascending order, with what is missing at the end.
    tl.debug_barrier()
    index = tl.arange(0, BLOCK_K)
    p_pages = pages_ptr + row_head * slots + index
    page = tl.load(p_pages, mask=index < slots, other=-1).to(tl.uint32, bitcast=True)
    page = tl.sort(page).to(tl.int32, bitcast=True)
    tl.debug_barrier()
    tl.store(p_pages, page, mask=index < slots)


@triton.jit
def _forced_keys(key_ptr, page, n_total):
    """Keys, where the first page and the last rank above all others and there are none beyond."""
    key = tl.load(key_ptr + page, mask=page < n_total, other=0).to(tl.uint32, bitcast=True)
    return tl.where((page < n_total) & ((page == 0) | (page == n_total - 1)), 0xFFFFFFFF, key)


@triton.jit
def _search_pages_kernel(
    key_ptr,
    lengths_ptr,
    pages_ptr,
    most,
    n_keys,
    slots,
    H: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    n_total = (tl.minimum(tl.load(lengths_ptr + row_head // H), most) + P - 1) // P
    wanted = tl.minimum(slots, n_total)
    p_key = key_ptr + row_head * n_keys
    offset = tl.arange(0, BLOCK)

    # The largest threshold that at least `wanted` keys reach, bit by bit.
    threshold = tl.zeros((), dtype=tl.uint32)
    for i in range(32):
        candidate = threshold | (tl.full((), 1, dtype=tl.uint32) << (31 - i))
        count = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, n_total, BLOCK):
            count += (_forced_keys(p_key, start + offset, n_total) >= candidate).to(tl.int32)
        threshold = tl.where(tl.sum(count, axis=0) >= wanted, candidate, threshold)

    above = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, n_total, BLOCK):
        above += (_forced_keys(p_key, start + offset, n_total) > threshold).to(tl.int32)
    equal_wanted = wanted - tl.sum(above, axis=0)

    p_pages = pages_ptr + row_head * slots
    taken = tl.zeros((), dtype=tl.int32)
    equal_seen = tl.zeros((), dtype=tl.int32)
    for start in range(0, n_total, BLOCK):
        page = start + offset
        key = _forced_keys(p_key, page, n_total)
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


@launching
def combine_triton(lse: torch.Tensor, n_pages: torch.Tensor, rule: str) -> torch.Tensor:
    """Launch the kernels; arguments and result as in :func:`locks_hf.kernels.select.combine`."""
    batch, n_kv_heads, group, max_pages = lse.shape
    lse = lse.contiguous()
    partial = torch.empty((batch * n_kv_heads, group, 1), dtype=torch.float32, device=lse.device)
    if rule != "mass":
        _normalizer_kernel[(batch * n_kv_heads * group,)](
            lse, n_pages, partial, max_pages, HG=n_kv_heads * group, BLOCK=1024, num_warps=4
        )
    value = torch.empty((batch, n_kv_heads, max_pages), dtype=torch.float32, device=lse.device)
    _launch_combine(lse, partial, n_pages, rule, value=value)
    return value


@dataclass(frozen=True)
class RankedPages:
    """Keys of pages, for programs that choose by :func:`best_pages` themselves.

    Attributes:
        key: int32 ``(B * H, n)`` with ``n`` a multiple of 16 groups, the bits of unsigned ones.
        group_key: The largest of each group, int32 ``(B * H, n / group)``.
        counts: In a decode step, tokens of each row before the new one, int32.
        real: In a decode step, as in :func:`locks_hf.kernels.decode.decode_step`.
    """

    key: torch.Tensor
    group_key: torch.Tensor
    counts: torch.Tensor | None = None
    real: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        rows: int,
        max_pages: int,
        slots: int,
        device: torch.device,
        counts: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
    ) -> RankedPages:
        """Room for the keys of one page more than ``max_pages``, in groups that suit the choice of ``slots``."""
        group = _group_size(max_pages + 1, slots)
        # A multiple of 16 groups: then the compiler knows that whole vectors of them exist or not.
        n_groups = triton.cdiv(max_pages + 1, group * 16) * 16
        key = torch.empty((rows, n_groups * group), dtype=torch.int32, device=device)
        group_key = torch.empty((rows, n_groups), dtype=torch.int32, device=device)
        return cls(key, group_key, counts, None if real is None else real.view(torch.uint8))

    @property
    def group(self) -> int:
        """Pages of a group."""
        return self.key.shape[1] // self.group_key.shape[1]


def _group_size(pages: int, slots: int) -> int:
    """Pages of a group: the fewest by which one search does, or by which the larger one of two is smallest."""
    for group in _GROUPS[:2]:  # one search through groups of 32 would be larger than two
        if pages <= group * slots:
            return group
    keys = triton.next_power_of_2(slots)
    # Of sizes that search through as many, the larger one.
    return min(
        _GROUPS, key=lambda group: (max(triton.next_power_of_2(triton.cdiv(pages, group)), keys * group), -group)
    )


@dataclass(frozen=True)
class Search:
    """Sizes for :func:`best_pages`.

    Attributes:
        slots: Pages to choose, at least 2.
        group: Pages of a group.
        columns: Of the tile of groups.
        rows: Of the tile of groups.
        block_slots: ``slots``, rounded up.
        warps: Warps of a program, of kernels that the compiler lays out.
    """

    slots: int
    group: int
    columns: int
    rows: int
    block_slots: int
    warps: int

    @classmethod
    def of(cls, ranked: RankedPages, slots: int) -> Search:
        """Sizes that fit."""
        groups, block_slots = max(128, triton.next_power_of_2(ranked.group_key.shape[1])), triton.next_power_of_2(slots)
        group = ranked.group
        # On an H200 the number of warps makes no difference up to 2048 values; at 4096, sixteen take less than four.
        warps = 4 if max(groups, block_slots * group) < 1024 else 16
        columns = max(32 * warps, groups // 32)
        return cls(slots, group, min(columns, groups), max(1, groups // columns), block_slots, warps)

    @property
    def values(self) -> int:
        """Values of the larger of both searches."""
        return max(self.columns * self.rows, self.block_slots * self.group)

    def constants(self) -> dict[str, int]:
        """Arguments for the compiler."""
        return {"GROUP": self.group, "C": self.columns, "S": self.rows, "BLOCK_K": self.block_slots}

    def runs(self) -> dict[str, int]:
        """Arguments for the kernel with layouts chosen by hand: runs of eight values that a thread holds."""
        warps = 4 if self.values <= 2048 else 8  # at most 16 values a thread up to 4096
        runs = max(1, self.values // (256 * warps))
        return {"GROUP": self.group, "C": runs, "BLOCK_K": self.block_slots, "num_warps": warps}


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
    batch, n_kv_heads, _, max_pages = lse.shape
    lengths, added = torch.empty((2, batch), dtype=torch.int32, device=lse.device).unbind(0)
    ranked = RankedPages.empty(batch * n_kv_heads, max_pages, slots, lse.device, counts, real)
    _launch_combine(lse, partial, counts, rule, step=(ranked, lengths, added, page_size))
    if Search.of(ranked, slots).values <= _MOST_BESIDE:
        return ranked, lengths, added
    pages = torch.empty((batch, n_kv_heads, slots), dtype=torch.int32, device=lse.device)
    _launch_choice(ranked, lengths, pages, max_pages * page_size, page_size)
    return pages, lengths, added


def _launch_combine(
    lse: torch.Tensor,
    partial: torch.Tensor,
    counts: torch.Tensor,
    rule: str,
    value: torch.Tensor | None = None,
    step: tuple | None = None,
) -> None:
    """Fill ``value``, or in a decode step what is in ``step``."""
    n_kv_heads, group, max_pages = lse.shape[1:]
    rows, _, n_splits = partial.shape
    ranked, lengths, added, page_size = step or (None,) * 4
    real = None if ranked is None else ranked.real
    n_keys = 0 if ranked is None else ranked.key.shape[1]
    # Every program reads all parts of the normalisers, so that 64 do as well as more.
    block, warps = (512, 4) if rows * (n_keys or max_pages) <= 3 << 14 else (1024, 8)
    grid = (triton.cdiv(n_keys or max_pages, block), rows)
    keys = (None, None) if ranked is None else (ranked.key, ranked.group_key)
    sizes = {"H": n_kv_heads, "G": group, "BLOCK_G": triton.next_power_of_2(group), "P": page_size, "BLOCK": block}
    options = {
        "RULE": _RULE_CODES[rule],
        "GROUP": 1 if ranked is None else ranked.group,
        "HAS_REAL": real is not None,
        "num_warps": warps,
        # Outside of a step the counts may be what the kernel before makes.
        **(programmatic_launch(lse.device) if step is not None else {"PDL": False}),
    }
    if step is not None and rule != "mass" and n_splits <= 1024 and not interpreting():
        from .gluon import combine_kernel

        block_splits = max(32, triton.next_power_of_2(n_splits))
        arrays = (lse, partial, counts, real, *keys, lengths, added)
        combine_kernel[grid](*arrays, max_pages, n_splits, n_keys, **sizes, **options, BLOCK_S=block_splits)
        return
    _combine_kernel[grid](
        lse,
        partial,
        counts,
        real,
        value,
        *keys,
        lengths,
        added,
        max_pages,
        n_splits,
        n_keys,
        **sizes,
        **options,
        BLOCK_S=max(16, min(128, triton.next_power_of_2(n_splits))),
        STEP=step is not None,
    )


def rank_pages(
    value: torch.Tensor, lengths: torch.Tensor, page_size: int, slots: int, counts: torch.Tensor | None = None
) -> RankedPages:
    """Keys for the choice of the pages of rows of some lengths.

    Args:
        value: As in :func:`locks_hf.kernels.select.top_pages`, and the others up to ``slots``.
        lengths: Likewise.
        page_size: Likewise.
        slots: Likewise.
        counts: As in :class:`RankedPages`.
    """
    value = value.contiguous()
    batch, n_kv_heads, max_pages = value.shape
    ranked = RankedPages.empty(batch * n_kv_heads, max_pages, slots, value.device, counts)
    _key_kernel[(triton.cdiv(ranked.key.shape[1], 1024), batch * n_kv_heads)](
        value,
        lengths,
        ranked.key,
        ranked.group_key,
        max_pages,
        ranked.key.shape[1],
        H=n_kv_heads,
        P=page_size,
        GROUP=ranked.group,
        BLOCK=1024,
        num_warps=4,
    )
    return ranked


@launching
def top_pages_triton(value: torch.Tensor, lengths: torch.Tensor, page_size: int, slots: int) -> torch.Tensor:
    """Launch the kernels; arguments and result as in :func:`locks_hf.kernels.select.top_pages`."""
    batch, n_kv_heads, max_pages = value.shape
    ranked = rank_pages(value, lengths, page_size, slots)
    pages = torch.empty((batch, n_kv_heads, slots), dtype=torch.int32, device=value.device)
    _launch_choice(ranked, lengths, pages, max_pages * page_size + page_size - 1, page_size)
    return pages


def _launch_choice(ranked: RankedPages, lengths: torch.Tensor, pages: torch.Tensor, most: int, page_size: int) -> None:
    """Fill ``pages`` ``(B, H, slots)`` for rows of ``lengths``, or ``most``, tokens."""
    n_kv_heads, slots = pages.shape[1:]
    rows, n_keys = ranked.key.shape
    search = Search.of(ranked, slots)
    if search.values > _MOST_IN_REGISTERS:
        _search_pages_kernel[(rows,)](
            ranked.key, lengths, pages, most, n_keys, slots, H=n_kv_heads, P=page_size, BLOCK=1024, num_warps=4
        )
        return
    groups = torch.empty((rows, search.block_slots), dtype=torch.int32, device=pages.device)
    _top_pages_kernel[(rows,)](
        ranked.key,
        ranked.group_key,
        lengths,
        groups,
        pages,
        most,
        n_keys,
        slots,
        H=n_kv_heads,
        P=page_size,
        **search.constants(),
        num_warps=search.warps,
    )
