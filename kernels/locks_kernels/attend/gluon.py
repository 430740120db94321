"""Gluon kernel of a decode step's attention: every program chooses the pages, and attends those of its own slots.

The same result as of the kernel in :mod:`.triton` over :func:`locks_hf.kernels.select.triton.best_pages`, with the
layouts chosen by hand, because both are bound by latency: a pass of the search counts the keys in eight ranges at once
and meets one barrier, keys of the cache go from global memory right into the registers that the tensor cores read, and
the logits of a block meet in every warp, which then makes its own softmax.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..lanes import columns

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name until Triton 3.6


@gluon.constexpr_function
def _keys_layout(repeats, warps):
    """``(repeats, warps, 32, 8)``: runs of eight in a thread, then lanes, warps and repeats."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]
    registers += [[1 << i, 0, 0, 0] for i in range(repeats.bit_length() - 1)]
    lanes = [[0, 0, 1 << i, 0] for i in range(5)]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, 1 << i, 0, 0] for i in range(warps.bit_length() - 1)], [], [repeats, warps, 32, 8]
    )


@gluon.constexpr_function
def _everywhere(shape, warps):
    """All of a small array in the registers of every thread."""
    registers = [
        [1 << i if d == dim else 0 for d in range(len(shape))]
        for dim in reversed(range(len(shape)))
        for i in range(shape[dim].bit_length() - 1)
    ]
    none = [0] * len(shape)
    return gl.DistributedLinearLayout(registers, [none] * 5, [none] * (warps.bit_length() - 1), [], shape)


@gluon.constexpr_function
def _one_a_warp(warps):
    """One number a warp, in all of its lanes."""
    return gl.DistributedLinearLayout([], [[0]] * 5, [[1 << i] for i in range(warps.bit_length() - 1)], [], [warps])


@gluon.jit
def _runs(REPEATS: gl.constexpr, LAYOUT: gl.constexpr, num_warps: gl.constexpr):
    """In a :func:`_keys_layout`, the number of each run of eight, in memory order, and the positions within a run."""
    repeat = gl.arange(0, REPEATS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    warp = gl.arange(0, num_warps, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    number = repeat[:, None, None, None] * (32 * num_warps) + warp[None, :, None, None] * 32
    return number + lane[None, None, :, None], within[None, None, None, :]


@gluon.jit
def _popcount(word):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _leading_zeros(word):
    return gl.inline_asm_elementwise("clz.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _largest(key, num_warps: gl.constexpr):
    most = gl.max(gl.max(gl.max(key, axis=3), axis=0), axis=1)
    return gl.max(gl.convert_layout(most, _everywhere([num_warps], num_warps)), axis=0)


@gluon.jit
def _total(count, num_warps: gl.constexpr):
    """Sum of one number a warp and lane."""
    return gl.sum(gl.convert_layout(gl.sum(count, axis=1), _everywhere([num_warps], num_warps)), axis=0)


@gluon.jit
def _meet(a, b, c, d, num_warps: gl.constexpr):
    """Four numbers of each warp, those of all warps in every thread."""
    WARP: gl.constexpr = _one_a_warp(num_warps)
    a, b, c, d = (
        gl.convert_layout(a, WARP),
        gl.convert_layout(b, WARP),
        gl.convert_layout(c, WARP),
        gl.convert_layout(d, WARP),
    )
    parts = gl.join(gl.join(a, b), gl.join(c, d))
    left, right = gl.split(gl.convert_layout(parts, _everywhere([num_warps, 2, 2], num_warps)))
    a, b = gl.split(left)
    c, d = gl.split(right)
    return a, b, c, d


@gluon.jit
def _counts(bucket, num_warps: gl.constexpr):
    """How many keys are in bucket ``i`` of eight or a later one, for ``i`` from 1 to 7 in the halves of four words.

    The high halves are of 4, 5, 6 and 7, the low ones of 1, 2 and 3 those of the second to the fourth word.
    """
    word = gl.sum(gl.full_like(bucket, 1) << (bucket * 4), axis=3)  # a thread's eight keys leave room in four bits
    HALVES: gl.constexpr = 0x000F000F
    n04 = gl.sum(gl.sum(word & HALVES, axis=0), axis=1)
    n15 = gl.sum(gl.sum((word >> 4) & HALVES, axis=0), axis=1)
    n26 = gl.sum(gl.sum((word >> 8) & HALVES, axis=0), axis=1)
    n37 = gl.sum(gl.sum((word >> 12) & HALVES, axis=0), axis=1)
    n04, n15, n26, n37 = _meet(n04, n15, n26, n37, num_warps)
    # From each bucket on, within its half; then the lower ones get what the upper ones have.
    from3 = gl.sum(n37, axis=0)
    from2 = gl.sum(n26, axis=0) + from3
    from1 = gl.sum(n15, axis=0) + from2
    from0 = gl.sum(n04, axis=0) + from1
    rest = from0 >> 16
    return from0, from1 + rest, from2 + rest, from3 + rest


@gluon.jit
def _last_with_enough(bucket, wanted, count, num_warps: gl.constexpr):
    """The last of eight buckets from which on there are as many keys as are wanted, and how many: ``count`` for 0."""
    HIGHEST: gl.constexpr = 0x80008000
    wanted_twice = (wanted * 0x00010001).to(gl.uint32)
    from0, from1, from2, from3 = _counts(bucket, num_warps)
    # Counts are below 1 << 15, and so is `wanted`.
    enough = ((from1 | HIGHEST) - wanted_twice) & HIGHEST
    enough |= (((from2 | HIGHEST) - wanted_twice) & HIGHEST) >> 1
    enough |= (((from3 | HIGHEST) - wanted_twice) & HIGHEST) >> 2
    enough |= (((from0 | HIGHEST) - wanted_twice) & 0x80000000) >> 3
    last = _popcount(enough)
    word = gl.where((last & 2) > 0, gl.where((last & 1) > 0, from3, from2), gl.where((last & 1) > 0, from1, from0))
    reached = ((word >> gl.where(last > 3, 16, 0).to(gl.uint32)) & 0xFFFF).to(gl.int32)
    return last, gl.where(last > 0, reached, count)


@gluon.jit
def _threshold(key, wanted, slack, low, high, count, widening, from_above, num_warps: gl.constexpr):
    """As of :func:`locks_hf.kernels.select.triton._threshold`, by counting in eight ranges a pass.

    The keys are below ``high``; as many as ``slack`` more than ``wanted`` may reach the threshold. The first pass, if
    ``widening``, is by ranges of which each is twice as wide as the one before, counted from ``high``, a quarter of an
    octave at first, or from ``low``, a 256th: the threshold is much nearer to that end than to the other, but how near
    depends on the attention.
    """
    one = gl.to_tensor(1)
    while (high - low > 1) & (count - wanted > slack):
        width = high - low
        bits = ((width - 1).to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 126
        shift = gl.maximum(gl.minimum(bits, 32) - 3, 0)
        above_low = gl.maximum(key, low)
        if widening:
            distance = gl.where(from_above, (high - 1 - above_low) >> 21, (above_low - low) >> 15)
            bucket = (gl.minimum(32 - _leading_zeros(distance), 7) ^ gl.where(from_above, 7, 0)).to(gl.uint32)
        else:
            bucket = gl.minimum((above_low - low) >> shift.to(gl.uint32), 7)
        last, count = _last_with_enough(bucket, wanted, count, num_warps)
        # Where the range begins and where it ends, from `low`.
        begin, end = (last << shift).to(gl.uint32), ((last + 1) << shift).to(gl.uint32)
        if widening:
            outer = gl.minimum((one << gl.where(from_above, 28 - gl.maximum(last, 1), 14 + last)).to(gl.uint32), width)
            inner = gl.minimum((one << gl.where(from_above, 27 - last, 15 + last)).to(gl.uint32), width)
            begin, end = gl.where(from_above, width - outer, outer), gl.where(from_above, width - inner, inner)
        high = gl.where((last < 7) & (end < width), low + end, high)
        low = gl.where(last > 0, low + begin, low)
        widening = gl.to_tensor(False)
    return low, count


@gluon.jit
def _choose(key, index, wanted, slack, low, high, count, from_above, num_warps: gl.constexpr):
    """As of :func:`locks_hf.kernels.select.triton._choose`: keys and what the chosen ones reach, their number, a bound.

    As many as ``slack`` more than ``wanted`` may be chosen.
    """
    low, count = _threshold(key, wanted, slack, low, high, count, gl.to_tensor(True), from_above, num_warps)
    cut = low
    if count - wanted > slack:  # equal keys at the threshold
        chosen = key > low
        missing = wanted - _total(gl.sum(gl.sum(chosen.to(gl.int32), axis=3), axis=0), num_warps)
        order = gl.where(key == low, 0x80000000 - index.to(gl.uint32), 0)
        order = gl.where(missing > 0, order, 0)
        most, least = _largest(order, num_warps) + 1, low * 0 + 1
        never, no_bound = gl.to_tensor(False), count * 0 + (1 << 15)
        first, _ = _threshold(order, missing, 0, least, most, no_bound, never, from_above, num_warps)
        # As keys again, since predicates that live through a branch cost more.
        key = gl.where(chosen | (order >= first), 1, 0).to(gl.uint32)
        cut = least
        count = wanted
    return key, cut, count, low


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _chosen_bits(chosen, C: gl.constexpr, KEYS: gl.constexpr):
    """What a thread has chosen, as bits, and the bit of each key."""
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, KEYS))))
    repeat = gl.arange(0, C, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, KEYS))))
    position = repeat[:, None, None, None] * 8 + within[None, None, None, :]
    bit = (gl.full_like(position, 1) << position).to(gl.uint32)
    return gl.sum(gl.sum(gl.where(chosen, bit, 0), axis=3), axis=0), bit


@gluon.jit
def _of_warps_before(total, num_warps: gl.constexpr):
    """Of one number a warp the sum over the warps before."""
    ALL: gl.constexpr = _everywhere([num_warps], num_warps)
    warp = gl.arange(0, num_warps, total.type.layout)
    warps = gl.arange(0, num_warps, ALL)
    totals = gl.convert_layout(total, ALL)
    before = gl.full_like(warp, 0)
    for w in gl.static_range(num_warps - 1):
        before += gl.where(warp > w, gl.sum(gl.where(warps == w, totals, 0), axis=0), 0)
    return before


@gluon.jit
def _before(bits, num_warps: gl.constexpr):
    """How many keys the threads before have chosen."""
    count = _popcount(bits)
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])  # the same threads: scans want it
    through = gl.associative_scan(gl.convert_layout(count, LANES), 1, _add)
    before = _of_warps_before(gl.sum(count, axis=1), num_warps)
    return gl.convert_layout(through, count.type.layout) - count + gl.expand_dims(before, 1)


@gluon.jit
def _places(chosen, C: gl.constexpr, num_warps: gl.constexpr, KEYS: gl.constexpr):
    """Another place for each chosen key, counting from 0."""
    bits, bit = _chosen_bits(chosen, C, KEYS)
    before = gl.expand_dims(gl.expand_dims(_before(bits, num_warps), 0), 3)
    bits = gl.expand_dims(gl.expand_dims(bits, 0), 3)
    return before + _popcount(bits & (bit - 1))


@gluon.jit
def _ballot(chosen):
    """A bit for each lane of the warp."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
        "=r,r",
        [chosen.to(gl.int32)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _of_lane(x, lane):
    """What another lane of the warp has."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [x, lane], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _registers(x, C: gl.constexpr):
    """Of ``(repeats, warps, 32, 8)`` what a thread has, each as ``(warps, 32)``: by runs, then within them."""
    W: gl.constexpr = x.shape[1]
    single = columns(gl.reshape(gl.permute(x, (1, 2, 0, 3)), (W * 32, 8 * C)))
    registers = ()
    for i in gl.static_range(8 * C):
        registers = registers + (gl.reshape(single[i], (W, 32)),)  # noqa: RUF005  what Triton compiles
    return registers


@gluon.jit
def _four_pages(chosen, page, place, C: gl.constexpr, num_warps: gl.constexpr):
    """The pages in four places of the chosen ones from ``place`` on, -1 where there is none.

    The places count by warps, then by the registers of a thread, then by lanes. A vote for each register tells every
    lane what its warp has chosen; every fourth lane looks for the same place.
    """
    votes = _registers(_ballot(chosen), C)
    pages = _registers(page, C)
    THREADS: gl.constexpr = votes[0].type.layout
    count = _popcount(votes[0])
    for i in gl.static_range(1, 8 * C):
        count += _popcount(votes[i])
    before = _of_warps_before(gl.max(count, axis=1), num_warps)
    lane = gl.arange(0, 32, gl.SliceLayout(0, THREADS))
    index = (place + lane % 4)[None, :] - before[:, None]
    exists = (index >= 0) & (index < count)
    # The register with that place: how many are before it, and its number.
    vote, passed = votes[0], gl.full_like(index, 0)
    through = _popcount(vote)
    for i in gl.static_range(1, 8 * C):
        reached = index >= through
        vote = gl.where(reached, votes[i], vote)
        passed = gl.where(reached, through * 32 + i, passed)
        through += _popcount(votes[i])
    index -= passed >> 5
    position = index * 0  # of the bit with that number
    for i in gl.static_range(5):
        below = _popcount(vote & ((1 << (16 >> i)) - 1))
        higher = index >= below
        position += gl.where(higher, 16 >> i, 0)
        index -= gl.where(higher, below, 0)
        vote = gl.where(higher, (vote.to(gl.uint32, bitcast=True) >> (16 >> i)).to(gl.int32, bitcast=True), vote)
    found = _of_lane(pages[0], position)
    for run in gl.static_range(1, C):
        found = gl.where(passed % 32 >= 8 * run, _of_lane(pages[8 * run], position), found)
    found = gl.where(exists, found + (passed & 7), -1)  # pages of a run follow each other
    found = gl.max(gl.reshape(found, (num_warps, 8, 4)), axis=1)
    found = gl.max(gl.convert_layout(found, _everywhere([num_warps, 4], num_warps)), axis=0)
    which = gl.arange(0, 4, found.type.layout)
    return (
        gl.max(gl.where(which == 0, found, -1), axis=0),
        gl.max(gl.where(which == 1, found, -1), axis=0),
        gl.max(gl.where(which == 2, found, -1), axis=0),
        gl.max(gl.where(which == 3, found, -1), axis=0),
    )


@gluon.jit
def _forced(page, slot, wanted, n_total):
    """What stands in a slot: the first page, the last or one of the others, of ``wanted`` in all."""
    page = gl.where(slot == 0, 0, gl.where(slot == wanted - 1, n_total - 1, page))
    return gl.where(slot < wanted, page, -1)


@gluon.jit
def _page_in(slot, p_pages, n_slots, four, FOUR: gl.constexpr):
    """The page in a slot of the program, from registers if there are four."""
    if FOUR:
        page = gl.where(slot < 2, gl.where(slot < 1, four[0], four[1]), gl.where(slot < 3, four[2], four[3]))
    else:
        page = gl.load(p_pages + slot, mask=slot < n_slots, other=-1)
    return page


@gluon.jit
def attend_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    pages_ptr,
    key_ptr,
    group_key_ptr,
    groups_ptr,
    counts_ptr,
    real_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    scaling,
    slots,
    slots_per_split,
    n_splits,
    capacity,
    n_keys,
    stride_query_row,
    stride_query_head,
    stride_kv_row,
    stride_kv_head,
    stride_kv_token,
    H: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_REAL: gl.constexpr,
    GROUP: gl.constexpr,
    C: gl.constexpr,
    BLOCK_K: gl.constexpr,
    FOUR: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Choose the pages of one (row, KV head), and attend those of a few slots."""
    LOG2E: gl.constexpr = 1.4426950408889634
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, num_warps], [16, 8])
    Q: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    K: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    V: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HEAD: gl.constexpr = gl.SliceLayout(1, MMA)
    VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [num_warps, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    KEYS: gl.constexpr = _keys_layout(C, num_warps)

    split = gl.program_id(0)
    row_head = gl.program_id(1).to(gl.int64)
    row = row_head // H
    head = row_head % H
    group_q = gl.arange(0, 16, gl.SliceLayout(1, Q))[:, None]
    channel_q = gl.arange(0, D, gl.SliceLayout(0, Q))[None, :]
    p_query = query_ptr + row * stride_query_row + (head * G + group_q) * stride_query_head + channel_q
    query = gl.load(p_query, mask=group_q < G, other=0.0)
    count = gl.load(counts_ptr + row)
    added = 1
    if HAS_REAL:
        added = gl.load(real_ptr + row).to(gl.int32)
    length = gl.minimum(count + added, capacity // P * P)
    if PDL:  # the query and the counts are older than the kernel before, the keys of pages are not
        gdc_wait()
        gdc_launch_dependents()

    # The choice, as of locks_hf.kernels.select.triton.best_pages.
    start = split * slots_per_split
    end = gl.minimum(start + slots_per_split, slots)
    own = row_head * n_splits + split
    p_pages = pages_ptr if FOUR else pages_ptr + own * slots_per_split
    p_groups = groups_ptr + own * BLOCK_K
    n_total = (length + P - 1) // P
    wanted = gl.minimum(slots, n_total)
    others = gl.maximum(wanted - 2, 0)
    n_candidates = (n_total + GROUP - 1) // GROUP
    run, within = _runs(C, KEYS, num_warps)
    slot = run * 8 // GROUP
    line, limit = run, n_candidates * (GROUP // 8)  # runs of eight keys; those up to `limit` have some
    key = gl.full([C, num_warps, 32, 8], 0, gl.uint32, KEYS)
    low = gl.to_tensor(1).to(gl.uint32)
    high, cut = low, low
    slack, bound = gl.to_tensor(0), gl.maximum(n_total - 2, 0)
    first_phase = gl.where(n_candidates > slots, 0, 1)
    n_groups = n_keys // (16 * GROUP) * 16  # exact, and the compiler sees that runs are aligned
    if first_phase == 0:
        # Each chosen group has a page that reaches the threshold, so that it bounds the search among their pages too.
        # There may be as many groups as there is room for, which takes fewer passes.
        limit, slack = n_groups // 8, BLOCK_K - others
        # At first these have a key: a last group of the last page alone has none, and is not to be counted.
        bound = (n_total - 2) // GROUP + 1
    # Groups, if they are many, then pages: by the same instructions, since to fetch them takes longer than to run them.
    for phase in range(gl.where(others > 0, first_phase, 2), 2):
        base = key_ptr + row_head * n_keys
        if phase == 0:
            base = group_key_ptr + row_head * n_groups
        index = line * 8 + within
        key = gl.load(base + index, mask=run < limit, other=0).to(gl.uint32, bitcast=True)
        from_above = phase == first_phase
        if from_above:
            high = _largest(key, num_warps) + 1
        key, cut, count, low = _choose(key, index, others, slack, low, high, bound, from_above, num_warps)
        if phase == 0:
            chosen = key >= cut
            gl.store(p_groups + _places(chosen, C, num_warps, KEYS), index, mask=chosen)
            limit, slack, bound = count * (GROUP // 8), gl.to_tensor(0), count * GROUP
            barrier()
            candidate = gl.load(p_groups + slot, mask=run < limit, other=0)
            line = candidate * (GROUP // 8) + run % (GROUP // 8)
    chosen, page = key >= cut, line * 8 + within
    four = (0, 0, 0, 0)
    if FOUR:
        four = _four_pages(chosen, page, start - 1, C, num_warps)
        four = (
            _forced(four[0], start, wanted, n_total),
            _forced(four[1], start + 1, wanted, n_total),
            _forced(four[2], start + 2, wanted, n_total),
            _forced(four[3], start + 3, wanted, n_total),
        )
    else:
        place = _places(chosen, C, num_warps, KEYS) + 1
        gl.store(p_pages + (place - start), page, mask=chosen & (place >= start) & (place < end))
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
        for at in range(start, end, 32 * num_warps):
            rest = at + gl.arange(0, 32 * num_warps, LINE)
            m_rest = (rest == 0) | (rest >= wanted - 1)
            gl.store(p_pages + (rest - start), _forced(rest * 0, rest, wanted, n_total), mask=m_rest & (rest < end))
        barrier()

    p_head = row * stride_kv_row + head * stride_kv_head
    token_k = gl.arange(0, BLOCK_N, gl.SliceLayout(0, K))
    channel_k = gl.arange(0, D, gl.SliceLayout(1, K))[:, None]
    token_v = gl.arange(0, BLOCK_N, gl.SliceLayout(1, VALUES))
    channel_v = gl.arange(0, D, gl.SliceLayout(0, VALUES))[None, :]
    token_m = gl.arange(0, BLOCK_N, gl.SliceLayout(0, MMA))
    running_max = gl.full([16], float("-inf"), gl.float32, HEAD)
    running_sum = gl.full([16], 0.0, gl.float32, HEAD)
    out = gl.full([16, D], 0.0, gl.float32, MMA)
    shared = gl.allocate_shared_memory(values_ptr.dtype.element_ty, [BLOCK_N, D], SHARED)
    ONE_BLOCK: gl.constexpr = FOUR and BLOCK_N == 4 * P
    for block in range(0, (end - start) * P, BLOCK_N):  # BLOCK_N is a multiple of P
        first = 0 if ONE_BLOCK else block  # so that the compiler knows which page a token is of
        page_k = _page_in((first + token_k) // P, p_pages, end - start, four, FOUR)
        page_v = _page_in((first + token_v) // P, p_pages, end - start, four, FOUR)
        page_m = _page_in((first + token_m) // P, p_pages, end - start, four, FOUR)
        at_k, at_v = page_k * P + token_k % P, page_v * P + token_v % P
        real_k = ((page_k >= 0) & (at_k < length))[None, :]
        real_v = ((page_v >= 0) & (at_v < length))[:, None]
        real_m = (page_m >= 0) & (page_m * P + token_m % P < length)
        p_key = keys_ptr + (p_head + at_k[None, :].to(gl.int64) * stride_kv_token + channel_k)
        p_value = values_ptr + (p_head + at_v[:, None].to(gl.int64) * stride_kv_token + channel_v)
        b_key = gl.load(p_key, mask=real_k, other=0.0)
        b_value = gl.load(p_value, mask=real_v, other=0.0)
        logit = mma_v2(query, b_key, gl.full([16, BLOCK_N], 0.0, gl.float32, MMA)) * (scaling * LOG2E)
        shared.store(b_value)
        # All logits in every warp, laid out as the first operand of the next product.
        logit = gl.convert_layout(gl.where(real_m[None, :], logit, float("-inf")), WEIGHT)
        larger = gl.maximum(running_max, gl.convert_layout(gl.max(logit, axis=1), HEAD))
        safe = gl.where(larger == float("-inf"), 0.0, larger)
        weight = gl.exp2(logit - gl.convert_layout(safe, gl.SliceLayout(1, WEIGHT))[:, None])
        rescale = gl.exp2(running_max - safe)
        running_sum = running_sum * rescale + gl.convert_layout(gl.sum(weight, axis=1), HEAD)
        running_max = larger
        out = mma_v2(weight.to(values_ptr.dtype.element_ty), shared.load(V), out * rescale[:, None])

    # A split of empty slots only has sum 0: it stores a zero output with log-sum-exp -inf, which weighs nothing.
    nothing = running_sum == 0
    lse = gl.where(nothing, float("-inf"), (running_max + gl.log2(running_sum)) * 0.6931471805599453)
    out = out / gl.where(nothing, 1.0, running_sum)[:, None]
    group = gl.arange(0, 16, HEAD)
    o_partial = own * G + group
    gl.store(partial_lse_ptr + o_partial, lse, mask=group < G)
    channel = gl.arange(0, D, gl.SliceLayout(0, MMA))[None, :]
    gl.store(partial_out_ptr + (o_partial[:, None] * D + channel), out, mask=(group < G)[:, None])
