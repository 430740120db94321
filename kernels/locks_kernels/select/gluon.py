"""Gluon kernel that ranks the pages of a decode step.

The same result as of the kernel in :mod:`.triton`, with the layouts chosen by hand: all heads of a page are in one
thread, and the normalisers meet one barrier, each warp making those of some heads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.constexpr_function
def _pages_layout(heads, pages, warps):
    """``(heads, pages)``: runs of four pages in a thread, then lanes and warps; all heads of a page in one thread."""
    in_thread = 4 * 32 * warps
    registers = [[0, 1], [0, 2]] + [[1 << i, 0] for i in range(heads.bit_length() - 1)]
    registers += [[0, in_thread << i] for i in range((pages // in_thread).bit_length() - 1)]
    lanes = [[0, 4 << i] for i in range(5)]
    warp = [[0, 128 << i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warp, [], [heads, pages])


@gluon.constexpr_function
def _splits_layout(heads, splits, warps):
    """``(heads, splits)``: splits over lanes, then registers; heads over warps, then registers."""
    lanes = [[0, 1 << i] for i in range(5)]
    registers = [[0, 32 << i] for i in range((splits // 32).bit_length() - 1)]
    of_warps, of_heads = warps.bit_length() - 1, heads.bit_length() - 1
    registers += [[1 << i, 0] for i in range(of_warps, of_heads)]
    warp = [[1 << i, 0] if i < of_heads else [0, 0] for i in range(of_warps)]
    return gl.DistributedLinearLayout(registers, lanes, warp, [], [heads, splits])


@gluon.jit
def _ordered(value):
    """As of :func:`locks_hf.kernels.select.triton._ordered`."""
    largest: gl.constexpr = 3.4028234663852886e38
    value = gl.where(value <= largest, value, largest)
    value = gl.where(value == 0.0, 0.0, value)
    bits = value.to(gl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(gl.uint32, bitcast=True) ^ 0x80000000


@gluon.jit
def combine_kernel(
    lse_ptr,
    partial_ptr,
    counts_ptr,
    real_ptr,
    key_ptr,
    group_key_ptr,
    lengths_ptr,
    added_ptr,
    max_pages,
    n_splits,
    n_keys,
    H: gl.constexpr,
    G: gl.constexpr,
    BLOCK_G: gl.constexpr,
    P: gl.constexpr,
    RULE: gl.constexpr,
    BLOCK: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_S: gl.constexpr,
    HAS_REAL: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Keys for the choice among a block of pages, by shares averaged over heads (``RULE`` 0) or the largest (1)."""
    LOG2E: gl.constexpr = 1.4426950408889634
    PAGES: gl.constexpr = _pages_layout(BLOCK_G, BLOCK, num_warps)
    SPLITS: gl.constexpr = _splits_layout(BLOCK_G, BLOCK_S, num_warps)
    row_head = gl.program_id(1).to(gl.int64)
    row = row_head // H
    count = gl.load(counts_ptr + row)
    added = 1
    if HAS_REAL:
        added = gl.load(real_ptr + row).to(gl.int32)
    capacity = max_pages * P
    length = gl.minimum(count + added, capacity)
    n_pages = gl.minimum(count // P, max_pages)
    if PDL:  # the counts are older than the kernel before
        gdc_wait()
        gdc_launch_dependents()
    if (gl.program_id(0) == 0) & (row_head % H == 0):
        gl.store(lengths_ptr + row, length)
        gl.store(added_ptr + row, gl.where(count < capacity, added, -added))
    page = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, PAGES))
    head = gl.arange(0, BLOCK_G, gl.SliceLayout(1, PAGES))[:, None]
    p_lse = lse_ptr + row_head * G * max_pages + (gl.minimum(head, G - 1) * max_pages + page[None, :])
    lse = gl.load(p_lse, mask=(page < max_pages)[None, :], other=0.0)

    split = gl.arange(0, BLOCK_S, gl.SliceLayout(0, SPLITS))[None, :]
    head_s = gl.arange(0, BLOCK_G, gl.SliceLayout(1, SPLITS))[:, None]
    p_partial = partial_ptr + (row_head * G + gl.minimum(head_s, G - 1)) * n_splits + split
    partial = gl.load(p_partial, mask=split < n_splits, other=float("-inf"))
    peak = gl.max(partial, axis=1)
    safe = gl.where(peak == float("-inf"), 0.0, peak)
    total = gl.sum(gl.exp2((partial - gl.expand_dims(safe, 1)) * LOG2E), axis=1)
    normalizer = gl.convert_layout(safe + gl.log2(total) * (1 / LOG2E), gl.SliceLayout(1, PAGES))

    share = gl.where(head < G, gl.exp2((lse - normalizer[:, None]) * LOG2E), 0.0)
    if RULE == 0:
        value = gl.sum(share, axis=0) / G
    else:
        value = gl.max(share, axis=0)
        value = gl.where(gl.max(gl.where(share != share, 1, 0), axis=0) > 0, float("nan"), value)
    last = (length + P - 1) // P - 1
    value = gl.where(page < n_pages, value, float("-inf"))
    key = gl.where((page > 0) & (page < last), _ordered(value), 0)
    gl.store(key_ptr + row_head * n_keys + page, key.to(gl.int32, bitcast=True), mask=page < n_keys)
    biggest = gl.max(gl.reshape(key, (BLOCK // GROUP, GROUP)), axis=1).to(gl.int32, bitcast=True)
    group = gl.program_id(0) * (BLOCK // GROUP) + gl.arange(0, BLOCK // GROUP, biggest.type.layout)
    gl.store(group_key_ptr + row_head * (n_keys // GROUP) + group, biggest, mask=group * GROUP < n_keys)
