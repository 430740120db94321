"""Triton kernels of page scoring: int8 products on the tensor cores, log-sum-exp on the rest.

The query becomes two int8 terms, ``q = step (q1 + q2 / 254)``, so that the codes of centroid and basis meet it in exact
integer products; what is lost of the query is at most 1/508 of a step of its largest entry. A program scores a few
blocks of pages of one (row, KV head). All loads of a block are issued before the first is used.

Bytes: the summaries, read once. Per page and KV head about ``2 G d (r + 1)`` int8 and ``G r P`` float multiply-adds and
``G P`` exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..backend import interpreting, launching, multiprocessors, programmatic_launch
from ..layout import SummaryLayout

#: Pages that a warp scores at a time in the kernel with layouts chosen by hand.
PAGES_OF_WARP = 8


@triton.jit
def quantize_query(query):
    """Two int8 terms of each row of a float32 tile, as floats, and the step of the first."""
    magic = 12582912.0  # adding 1.5 * 2**23 and taking it away rounds to the nearest integer
    largest = tl.max(tl.abs(query), axis=1)
    step = tl.where(largest > 0, largest / 127, 1.0)
    step = tl.where(largest != largest, float("nan"), step)
    scaled = query / step[:, None]
    high = (scaled + magic) - magic
    low = ((scaled - high) * 254 + magic) - magic
    return high, low, step


@triton.jit
def _prepare_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    real_ptr,
    keys_ptr,
    values_ptr,
    counts_ptr,
    codes_ptr,
    unit_ptr,
    bias_ptr,
    scaling,
    capacity,
    stride_query_row,
    stride_query_head,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    P: tl.constexpr,
    OFFSET: tl.constexpr,
    STEP: tl.constexpr,
    HAS_REAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise the queries of one (row, KV head); ``OFFSET`` is what the stored codes of the basis are biased by.

    As part of a decode step (``STEP``) also write the new token.
    """
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // H
    group = tl.arange(0, BLOCK_G)
    channel = tl.arange(0, BLOCK_D)
    m_channel = (channel < D)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    p_query = query_ptr + row * stride_query_row + channel[None, :]
    p_query += ((row_head % H) * G + group)[:, None] * stride_query_head
    b_query = tl.load(p_query, mask=(group < G)[:, None] & m_channel, other=0.0).to(tl.float32)
    high, low, step = quantize_query(b_query)
    p_codes = codes_ptr + (row_head * 2 * BLOCK_G + group)[:, None] * D + channel[None, :]
    tl.store(p_codes, high.to(tl.int8), mask=m_channel)
    tl.store(p_codes + BLOCK_G * D, low.to(tl.int8), mask=m_channel)
    # Logits come out in base 2, for which the exponential is one instruction.
    tl.store(unit_ptr + row_head * BLOCK_G + group, step * (scaling * 1.4426950408889634 / 254))
    total = tl.sum((high * 254 + low).to(tl.int32), axis=1)
    tl.store(bias_ptr + row_head * BLOCK_G + group, total * OFFSET)
    if STEP:
        count = tl.load(counts_ptr + row)
        added = 1
        if HAS_REAL:
            added = tl.load(real_ptr + row).to(tl.int32)
        m_written = channel < tl.where(count < capacity * P, added, 0) * D
        o_token = (row_head * capacity * P + tl.minimum(count, capacity * P - 1)) * D + channel
        p_key = key_ptr + row * stride_key_row + (row_head % H) * stride_key_head
        p_value = value_ptr + row * stride_value_row + (row_head % H) * stride_value_head
        tl.store(keys_ptr + o_token, tl.load(p_key + channel, mask=m_written, other=0.0), mask=m_written)
        tl.store(values_ptr + o_token, tl.load(p_value + channel, mask=m_written, other=0.0), mask=m_written)


@triton.jit
def _part_codes(packed, PART: tl.constexpr, BITS: tl.constexpr, INLINE: tl.constexpr):
    """Codes of one part of a split-packed tile, biased, as int8."""
    if BITS == 8:
        return packed
    elif INLINE and BITS == 4 and PART == 0:  # four bytes an instruction
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
    elif INLINE and BITS == 4:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
            "=r,r",
            [packed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        return ((packed >> (BITS * PART)) & ((1 << BITS) - 1)).to(tl.int8)


@triton.jit
def _word_bytes(word, INLINE: tl.constexpr):
    """The four signed bytes of each word as float32, in a new last dimension."""
    if INLINE:  # byte selection with sign, then an integer conversion that runs at full rate
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d;"
            " prmt.b32 a, $4, 0, 0x8880; prmt.b32 b, $4, 0, 0x9991;"
            " prmt.b32 c, $4, 0, 0xAAA2; prmt.b32 d, $4, 0, 0xBBB3;"
            " cvt.rn.f32.s32 $0, a; cvt.rn.f32.s32 $1, b; cvt.rn.f32.s32 $2, c; cvt.rn.f32.s32 $3, d; }",
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a = (word << 24 >> 24).to(tl.float32)
        b = (word << 16 >> 24).to(tl.float32)
        c = (word << 8 >> 24).to(tl.float32)
        d = (word >> 24).to(tl.float32)
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _both_terms(product, ROWS: tl.constexpr, BLOCK_G: tl.constexpr):
    """``254 q1 + q2`` from products with both terms side by side."""
    high, low = tl.split(tl.permute(tl.reshape(product, (ROWS, 2, BLOCK_G)), (0, 2, 1)))
    return high * 254 + low


@triton.jit
def _base2_logits(coefficient, projected, token_scale):
    """``(PIN, G, J, POUT)`` from coefficients ``(PIN, R, J, POUT)`` and projected queries ``(R, G, J)``."""
    logit = tl.sum(coefficient[:, :, None, :, :] * projected[None, :, :, :, None], axis=1)
    return logit * token_scale[:, None, :, :]


@triton.jit
def _score_kernel(
    codes_ptr,
    unit_ptr,
    bias_ptr,
    basis_ptr,
    coefficients_ptr,
    centroid_ptr,
    token_scales_ptr,
    scales_ptr,
    counts_ptr,
    lse_ptr,
    partial_ptr,
    max_pages,
    capacity,
    n_splits,
    blocks_per_split,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_J: tl.constexpr,
    WORDS: tl.constexpr,
    N_SCALES: tl.constexpr,
    INLINE: tl.constexpr,
    STAGES: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    # Parts of the centroid, which is never packed, are those of the basis: they meet the same parts of the query.
    WIDTH: tl.constexpr = D // PARTS
    PIN: tl.constexpr = 4  # tokens a thread holds; the others lie across threads
    POUT: tl.constexpr = P // PIN
    ROWS: tl.constexpr = BLOCK_R * BLOCK_J
    LN2: tl.constexpr = 0.6931471805599453
    row_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.load(counts_ptr + row_head // H)  # of pages, or as part of a step of tokens
    n_pages = tl.minimum(count // P if STEP else count, max_pages)
    group = tl.arange(0, BLOCK_G)
    term = tl.arange(0, 2 * BLOCK_G)
    width = tl.arange(0, BLOCK_W)
    m_width = (width < WIDTH)[None, :]
    queries = ()
    for part in tl.static_range(PARTS):
        p_codes = codes_ptr + (row_head * 2 * BLOCK_G + term)[:, None] * D + part * WIDTH + width[None, :]
        b_codes = tl.load(p_codes) if BLOCK_W == WIDTH else tl.load(p_codes, mask=m_width, other=0)
        queries = queries + (tl.trans(b_codes),)  # noqa: RUF005  what Triton compiles
    unit = tl.load(unit_ptr + row_head * BLOCK_G + group)
    bias = tl.load(bias_ptr + row_head * BLOCK_G + group)

    p_centroid = centroid_ptr + row_head * capacity * D
    p_basis = basis_ptr + row_head * capacity * (R * WIDTH)
    p_coefficient = coefficients_ptr + row_head * capacity * (P * R // 4 if WORDS else P * R)
    p_token_scale = token_scales_ptr + row_head * capacity * P
    p_scale = scales_ptr + row_head * capacity * N_SCALES
    p_lse = lse_ptr + row_head * G * max_pages
    entry = tl.arange(0, ROWS)  # column * BLOCK_J + page of the block
    column = tl.minimum(entry // BLOCK_J, R - 1)
    inner = tl.arange(0, PIN)
    outer = tl.arange(0, POUT)

    # Every n_splits-th block, so that all programs have as much to do however full the cache is.
    n_blocks = (n_pages + BLOCK_J - 1) // BLOCK_J
    used_blocks = tl.minimum(blocks_per_split, (tl.maximum(n_blocks - split, 0) + n_splits - 1) // n_splits)
    for block in range(used_blocks, blocks_per_split):
        page = (split + block * n_splits) * BLOCK_J + tl.arange(0, BLOCK_J)
        m_lse = (page < max_pages)[None, :] & (group < G)[:, None]
        nothing = tl.full((BLOCK_G, BLOCK_J), float("-inf"), dtype=tl.float32)
        tl.store(p_lse + (group[:, None] * max_pages + page[None, :]), nothing, mask=m_lse)

    running_max = tl.full((BLOCK_G, BLOCK_J), float("-inf"), dtype=tl.float32)
    running_sum = tl.zeros((BLOCK_G, BLOCK_J), dtype=tl.float32)
    wrong = tl.zeros((), dtype=tl.int32)
    # Without a shift no exponential overflows or vanishes unless logits are far from zero. If that happened, everything
    # is done again with the largest logit of each page as the shift.
    for careful in range(2):
        if (careful == 0) | (wrong > 0):
            running_max = tl.full((BLOCK_G, BLOCK_J), float("-inf"), dtype=tl.float32)
            running_sum = tl.zeros((BLOCK_G, BLOCK_J), dtype=tl.float32)
            outside = tl.zeros((BLOCK_G, BLOCK_J), dtype=tl.int32)
            for block in tl.range(used_blocks, num_stages=STAGES):
                start = (split + block * n_splits) * BLOCK_J
                page = start + tl.arange(0, BLOCK_J)
                # Pages past the end read the last one instead: clamping costs less than masks.
                some_page = tl.minimum(page, n_pages - 1)
                entry_page = tl.minimum(start + entry % BLOCK_J, n_pages - 1)
                centroids = ()
                for part in tl.static_range(PARTS):
                    p_part = p_centroid + part * WIDTH + (some_page[:, None] * D + width[None, :])
                    b_part = tl.load(p_part) if BLOCK_W == WIDTH else tl.load(p_part, mask=m_width, other=0)
                    centroids = centroids + (b_part,)  # noqa: RUF005
                p_packed = p_basis + (entry_page[:, None] * (R * WIDTH) + column[:, None] * WIDTH + width[None, :])
                b_packed = tl.load(p_packed) if BLOCK_W == WIDTH else tl.load(p_packed, mask=m_width, other=0)
                token = inner[:, None, None, None] + outer[None, None, None, :] * PIN
                if WORDS:
                    word = tl.arange(0, R // 4)[None, :, None, None]
                    o_word = some_page[None, None, :, None] * (P * R // 4) + token * (R // 4) + word
                else:
                    word = tl.minimum(tl.arange(0, BLOCK_R), R - 1)[None, :, None, None]
                    o_word = some_page[None, None, :, None] * (P * R) + token * R + word
                b_word = tl.load(p_coefficient + o_word)
                o_token = some_page[None, :, None] * P + inner[:, None, None] + outer[None, None, :] * PIN
                token_scale = tl.load(p_token_scale + o_token).to(tl.float32)
                centre_scale = tl.load(p_scale + some_page * N_SCALES).to(tl.float32)
                if BITS < 16:
                    column_scale = tl.load(p_scale + (entry_page * N_SCALES + 1 + column)).to(tl.float32)
                else:
                    column_scale = tl.full((ROWS,), 1.0, dtype=tl.float32)
                if BLOCK_R > R:
                    column_scale = tl.where(entry // BLOCK_J < R, column_scale, 0.0)

                product = tl.zeros((BLOCK_J, 2 * BLOCK_G), dtype=tl.int32)
                for part in tl.static_range(PARTS):
                    product = tl.dot(centroids[part], queries[part], product, out_dtype=tl.int32)
                centre = _both_terms(product, BLOCK_J, BLOCK_G).to(tl.float32)
                centre = centre * (centre_scale[:, None] * unit[None, :])
                if BITS < 16:
                    product = tl.zeros((ROWS, 2 * BLOCK_G), dtype=tl.int32)
                    for part in tl.static_range(PARTS):
                        b_part = _part_codes(b_packed, part, BITS, INLINE)
                        product = tl.dot(b_part, queries[part], product, out_dtype=tl.int32)
                    projected = (_both_terms(product, ROWS, BLOCK_G) - bias[None, :]).to(tl.float32)
                else:
                    b_query = queries[0].to(tl.float32)
                    product = tl.dot(b_packed.to(tl.float32), b_query, input_precision="ieee")
                    projected = _both_terms(product, ROWS, BLOCK_G)
                projected = projected * (column_scale[:, None] * unit[None, :])
                projected = tl.permute(tl.reshape(projected, (BLOCK_R, BLOCK_J, BLOCK_G)), (0, 2, 1))
                if WORDS:
                    coefficient = tl.reshape(_word_bytes(b_word, INLINE), (PIN, R // 4, BLOCK_J, POUT, 4))
                    coefficient = tl.reshape(tl.permute(coefficient, (0, 1, 4, 2, 3)), (PIN, R, BLOCK_J, POUT))
                else:
                    coefficient = b_word.to(tl.float32)
                shift = tl.zeros((BLOCK_G, BLOCK_J), dtype=tl.float32)
                if careful > 0:
                    logit = _base2_logits(coefficient, projected, token_scale)
                    shift = tl.max(tl.max(logit, axis=0), axis=2)
                logit = _base2_logits(coefficient, projected, token_scale) - shift[None, :, :, None]
                mass = tl.sum(tl.sum(tl.exp2(logit), axis=0), axis=2)
                outside |= ((mass > 1e-30) & (mass < 1e38)).to(tl.int32) ^ 1
                lse = tl.trans(centre) + (shift + tl.log2(mass))
                lse = tl.where((page < n_pages)[None, :], lse, float("-inf"))
                m_lse = (page < max_pages)[None, :] & (group < G)[:, None]
                tl.store(p_lse + (group[:, None] * max_pages + page[None, :]), lse * LN2, mask=m_lse)
                larger = tl.maximum(running_max, lse, propagate_nan=tl.PropagateNan.ALL)
                safe = tl.where(larger == float("-inf"), 0.0, larger)
                running_sum = running_sum * tl.exp2(running_max - safe) + tl.exp2(lse - safe)
                running_max = larger
            wrong = tl.max(tl.max(outside, axis=1), axis=0)

    largest = tl.max(running_max, axis=1)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(running_sum * tl.exp2(running_max - safe[:, None]), axis=1)
    tl.store(partial_ptr + (row_head * G + group) * n_splits + split, (safe + tl.log2(total)) * LN2, mask=group < G)


@dataclass(frozen=True)
class ScoreSettings:
    """How the pages of a row are dealt to programs.

    Attributes:
        block_pages: Pages scored at a time, a power of two of at least 16.
        blocks_per_split: Blocks a program scores, one after the other.
        warps: Warps a program, in the kernel that the compiler lays out.
        stages: Blocks in flight: 1, or more to load ahead through shared memory.
        registers: Most registers of a thread, or ``None`` for as many as the compiler likes.
    """

    block_pages: int
    blocks_per_split: int
    warps: int = 4
    stages: int = 1
    registers: int | None = None


def score_settings(
    layout: SummaryLayout, group: int, rows: int, max_pages: int, by_hand: bool = False, processors: int = 132
) -> ScoreSettings:
    """Settings for a shape, from measurements on an H200 (head_dim 128, int4, 8 query heads a KV head).

    Args:
        layout: Sizes of the summaries.
        group: Query heads per KV head.
        rows: Batch rows times KV heads.
        max_pages: Pages to score.
        by_hand: For the kernel with layouts chosen by hand.
        processors: Multiprocessors of the device.
    """
    if by_hand:
        # One wave of programs, as many as the registers allow: more only wait, and leave more parts to combine.
        blocks = rows * triton.cdiv(max_pages, 32)
        larger = (layout.rank == 8) + (group > 8) + (layout.head_dim > 128)
        most, registers = ((4, 128), (3, 144 if layout.rank == 8 else 168), (2, 255), (2, 255))[larger]
        return ScoreSettings(32, triton.cdiv(blocks, most * processors), registers=registers)
    block_rank, block_group = triton.next_power_of_2(layout.rank), max(4, triton.next_power_of_2(group))
    block_width = max(32, triton.next_power_of_2(layout.basis_width))
    # As many pages as the registers of the tiles allow.
    fits = min(1024 // layout.page_size, 32768 // (block_rank * block_width), 8192 // (block_rank * block_group))
    block_pages = 16 if layout.basis_bits == 16 else max(16, min(64, 1 << (fits.bit_length() - 1)))
    if rows * max_pages < 128 * block_pages:  # fewer programs than multiprocessors: smaller ones end sooner
        block_pages = max(16, block_pages // 2)
    # Long contexts give each program several blocks; short ones need every program they can get.
    blocks = rows * triton.cdiv(max_pages, block_pages)
    blocks_per_split = max(1, min(8, blocks // 512))
    stages = 3 if blocks_per_split > 2 and layout.rank <= 4 else 1
    return ScoreSettings(block_pages, blocks_per_split, stages=stages)


def score_pages(
    query: torch.Tensor,
    summaries: dict[str, torch.Tensor],
    counts: torch.Tensor,
    max_pages: int,
    layout: SummaryLayout,
    scaling: float,
    step: tuple[torch.Tensor | None, ...] | None = None,
    settings: ScoreSettings | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score pages; as part of a decode step also write the new token.

    Args:
        query: As in :func:`locks_hf.kernels.score.score`.
        summaries: Likewise.
        counts: Pages of each row, int32 ``(B,)`` or longer; in a step, tokens of each row before the new one.
        max_pages: Likewise, at least 1.
        layout: Likewise.
        scaling: Likewise.
        step: The arguments ``key, value, real, keys, values`` of :func:`locks_hf.kernels.decode.decode_step`.
        settings: By default those of :func:`score_settings`.

    Returns:
        The log-sum-exp ``(B, H, G, max_pages)``, and that over all pages of each split, float32 ``(B * H, G, splits)``.
        In a step the scores of pages that a row does not have are undefined.
    """
    batch, n_kv_heads, capacity, head_dim = summaries["centroid"].shape
    group, rows = query.shape[1] // n_kv_heads, batch * n_kv_heads
    summaries = {name: array.contiguous() for name, array in summaries.items()}
    key, value, real, keys, values = step or (None,) * 5
    query, key, value = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    token = (key, value, None if real is None else real.view(torch.uint8), keys, values)
    strides = [stride for x in (query, key, value) for stride in ((0, 0) if x is None else x.stride()[:2])]
    by_hand = _by_hand(layout, group, capacity)
    if settings is None:
        settings = score_settings(layout, group, rows, max_pages, by_hand, multiprocessors(query.device))
    n_splits = triton.cdiv(max_pages, settings.block_pages * settings.blocks_per_split)
    lse = torch.empty((batch, n_kv_heads, group, max_pages), dtype=torch.float32, device=query.device)
    partial = torch.empty((rows, group, n_splits), dtype=torch.float32, device=query.device)
    results = (counts, lse, partial)
    sizes = {"H": n_kv_heads, "G": group, "D": head_dim, "P": layout.page_size, "STEP": step is not None}
    summary = {"R": layout.rank, "BITS": layout.basis_bits}
    options = {**programmatic_launch(query.device), "num_warps": settings.warps}
    if by_hand:
        from .gluon import score_kernel

        # In the units of its loads; scales are read one by one.
        score_kernel[(n_splits, rows)](
            query,
            *token,
            summaries["basis"].view(torch.int32),
            summaries["coefficients"].view(torch.int32 if layout.rank == 4 else torch.int16),
            summaries["centroid"].view(torch.int32),
            summaries["token_scales"].view(torch.int32),
            summaries["scales"],
            *results,
            scaling,
            max_pages,
            capacity,
            n_splits,
            settings.blocks_per_split,
            *strides,
            **sizes,
            **summary,
            **{**options, "num_warps": settings.block_pages // PAGES_OF_WARP},
            BLOCK_G=max(8, triton.next_power_of_2(group)),
            HAS_REAL=real is not None,
            maxnreg=settings.registers,
        )
        return lse, partial

    block_group = max(4, triton.next_power_of_2(group))
    codes = torch.empty((rows, 2 * block_group, head_dim), dtype=torch.int8, device=query.device)
    unit = torch.empty((rows, block_group), dtype=torch.float32, device=query.device)
    bias = torch.empty((rows, block_group), dtype=torch.int32, device=query.device)
    _prepare_kernel[(rows,)](
        query,
        *token,
        counts,
        codes,
        unit,
        bias,
        scaling,
        capacity,
        *strides,
        **sizes,
        **{**options, "num_warps": 4},
        BLOCK_G=block_group,
        BLOCK_D=triton.next_power_of_2(head_dim),
        OFFSET=1 << (layout.basis_bits - 1) if layout.basis_bits < 8 else 0,
        HAS_REAL=real is not None,
    )
    words = layout.rank % 4 == 0
    _score_kernel[(n_splits, rows)](
        codes,
        unit,
        bias,
        summaries["basis"],
        summaries["coefficients"].view(torch.int32) if words else summaries["coefficients"],
        summaries["centroid"],
        summaries["token_scales"],
        summaries["scales"],
        *results,
        max_pages,
        capacity,
        n_splits,
        settings.blocks_per_split,
        **sizes,
        **summary,
        **options,
        BLOCK_J=settings.block_pages,
        BLOCK_G=block_group,
        BLOCK_R=triton.next_power_of_2(layout.rank),
        PARTS=layout.codes_per_byte,
        BLOCK_W=max(32, triton.next_power_of_2(layout.basis_width)),
        WORDS=words,
        N_SCALES=layout.n_scales,
        INLINE=not interpreting(),
        STAGES=settings.stages,
        num_stages=settings.stages,
    )
    return lse, partial


@launching
def score_triton(
    query: torch.Tensor,
    summaries: dict[str, torch.Tensor],
    n_pages: torch.Tensor,
    max_pages: int,
    layout: SummaryLayout,
    scaling: float,
) -> torch.Tensor:
    """Launch the kernels; arguments and result as in :func:`locks_hf.kernels.score.score`."""
    return score_pages(query, summaries, n_pages, max_pages, layout, scaling)[0]


def _by_hand(layout: SummaryLayout, group: int, capacity: int) -> bool:
    """Whether the kernel with layouts chosen by hand fits the summaries; the interpreter has none."""
    return (
        not interpreting()
        and layout.rank in (4, 8)
        and layout.basis_bits in (4, 8)
        and layout.page_size == 16
        and layout.head_dim in (64, 128, 256)
        and group <= 16
        and capacity >= PAGES_OF_WARP  # it loads as many at a time
    )
