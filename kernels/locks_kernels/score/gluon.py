"""Gluon kernel of page scoring, for summaries whose rows divide into what a thread of a tensor-core product holds.

The same arithmetic as in :mod:`.triton`, with the layouts chosen by hand so that nothing moves between threads: a warp
scores 16 pages at a time, and each thread loads from global memory, 16 bytes at once, just the codes that it hands to
the tensor cores, and keeps what they return. A product has pages as rows and query heads as columns; the thread that
holds a page's projected query for a head sums that page's tokens for that head. The projected query is turned into
int16, so that two instructions make the logit of a token for four basis columns.

Bytes: the summaries, read once, and 4 bytes a page and head written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_MAGIC = gl.constexpr(12582912.0)  # adding 1.5 * 2**23 leaves the nearest integer in the low bits


@gluon.constexpr_function
def _layout(shape, registers, lanes, warps):
    """A layout of pages (dimension 0): 8 pages a warp's lanes, 16 a warp, the rest over warps, then registers.

    ``registers`` and ``lanes`` say where the other dimensions go: of a thread's registers before the second page, and
    of the four lanes that share a page.
    """
    rank = len(shape)
    page = [[1 << i] + [0] * (rank - 1) for i in range(shape[0].bit_length() - 1)]
    n_warps = warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        [*registers, page[3], *page[4 + n_warps :]], lanes + page[:3], page[4 : 4 + n_warps], [], shape
    )


@gluon.constexpr_function
def _bytes_layout(pages, n_bytes, warps):
    """Rows of bytes as the first operand of a product wants them: runs of up to 16 in each of four lanes, in turn."""
    run = min(16, n_bytes // 4)
    registers = [[0, 1 << i] for i in range(run.bit_length() - 1)]
    layout = _layout([pages, n_bytes], registers, [[0, run], [0, 2 * run]], warps)
    repeats = [[0, 4 * run << i] for i in range((n_bytes // (4 * run)).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        layout.reg_bases + repeats, layout.lane_bases, layout.warp_bases, [], layout.shape
    )


@gluon.constexpr_function
def _logits_layout(pages, tokens, heads, warps):
    """``(pages, tokens, heads)``: pages and heads as a product leaves them, all tokens of a page in one thread."""
    registers = [[0, 0, 1]] + [[0, 1 << i, 0] for i in range(tokens.bit_length() - 1)]
    layout = _layout([pages, tokens, heads], registers, [[0, 0, 2], [0, 0, 4]], warps)
    more = [[0, 0, 8 << i] for i in range((heads // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(layout.reg_bases + more, layout.lane_bases, layout.warp_bases, [], layout.shape)


@gluon.constexpr_function
def _words_layout(pages, tokens, words, warps):
    """``(pages, tokens, words)`` of coefficients in memory order; the four lanes of a page hold the same."""
    registers = [[0, 0, 1 << i] for i in range(words.bit_length() - 1)]
    registers += [[0, 1 << i, 0] for i in range(tokens.bit_length() - 1)]
    return _layout([pages, tokens, words], registers, [[0, 0, 0], [0, 0, 0]], warps)


@gluon.constexpr_function
def _warps_layout(warps, heads):
    """``(warps, heads)``: a head a lane, with what all warps have of it in the lane's registers."""
    return gl.DistributedLinearLayout(
        [[1 << i, 0] for i in range(warps.bit_length() - 1)],
        [[0, (1 << i) % heads] for i in range(5)],
        [[0, 0]] * (warps.bit_length() - 1),
        [],
        [warps, heads],
    )


@gluon.jit
def _low_nibbles(packed):
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [packed], dtype=gl.int8, is_pure=True, pack=4
    )


@gluon.jit
def _high_nibbles(packed):
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
        "=r,r",
        [packed],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _pair(first, second):
    """The int16 in the low halves of two words."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _dp2a_low(pair, word, total):
    """``total`` plus the product of two int16 with the first two int8 of ``word``."""
    return gl.inline_asm_elementwise(
        "dp2a.lo.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [pair, word, total], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _dp2a_high(pair, word, total):
    """Likewise with the last two."""
    return gl.inline_asm_elementwise(
        "dp2a.hi.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [pair, word, total], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _integer(x):
    """The nearest integer, in the low bits of a word."""
    return (x + _MAGIC).to(gl.int32, bitcast=True)


@gluon.jit
def score_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    real_ptr,
    keys_ptr,
    values_ptr,
    basis_ptr,
    coefficients_ptr,
    centroid_ptr,
    token_scales_ptr,
    scales_ptr,
    counts_ptr,
    lse_ptr,
    partial_ptr,
    scaling,
    max_pages,
    capacity,
    n_splits,
    blocks_per_split,
    stride_query_row,
    stride_query_head,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    H: gl.constexpr,
    G: gl.constexpr,
    BLOCK_G: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    R: gl.constexpr,
    BITS: gl.constexpr,
    BLOCK_J: gl.constexpr,
    STEP: gl.constexpr,
    HAS_REAL: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Score a few blocks of pages of one (row, KV head).

    As part of a decode step (``STEP``) the counts are of tokens, not of pages, and the first program of each (row, KV
    head) writes the new token.
    """
    PARTS: gl.constexpr = 8 // BITS
    WIDTH: gl.constexpr = D // PARTS
    RUN: gl.constexpr = 16 if WIDTH >= 64 else WIDTH // 4
    WORDS: gl.constexpr = R // 4
    N_SCALES: gl.constexpr = 1 + R
    LN2: gl.constexpr = 0.6931471805599453
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, RUN)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, RUN)
    BASIS: gl.constexpr = _bytes_layout(BLOCK_J, WIDTH, num_warps)
    CENTROID: gl.constexpr = _bytes_layout(BLOCK_J, D, num_warps)
    LOGITS: gl.constexpr = _logits_layout(BLOCK_J, P, BLOCK_G, num_warps)
    COEFFICIENTS: gl.constexpr = _words_layout(BLOCK_J, P, WORDS, num_warps)
    TOKENS: gl.constexpr = gl.SliceLayout(2, LOGITS)
    SUMS: gl.constexpr = gl.SliceLayout(1, LOGITS)  # the registers of MMA in another order
    PAGE: gl.constexpr = gl.SliceLayout(1, MMA)
    HEAD: gl.constexpr = gl.SliceLayout(0, MMA)

    row_head = gl.program_id(1).to(gl.int64)
    row = row_head // H
    split = gl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = gl.load(counts_ptr + row)
    if STEP:
        n_pages = gl.minimum(count // P, max_pages)
        if split == 0:
            LINE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
            channel = gl.arange(0, D, LINE)
            added = 1
            if HAS_REAL:
                added = gl.load(real_ptr + row).to(gl.int32)
            m_written = channel < gl.where(count < capacity * P, added, 0) * D
            o_token = (row_head * capacity * P + gl.minimum(count, capacity * P - 1)) * D + channel
            p_key = key_ptr + row * stride_key_row + (row_head % H) * stride_key_head
            p_value = value_ptr + row * stride_value_row + (row_head % H) * stride_value_head
            gl.store(keys_ptr + o_token, gl.load(p_key + channel), mask=m_written)
            gl.store(values_ptr + o_token, gl.load(p_value + channel), mask=m_written)
    else:
        n_pages = gl.minimum(count, max_pages)

    # The query as two int8 terms, the second operand of the products.
    channel_b = gl.arange(0, D, gl.SliceLayout(1, B))[:, None]
    head_b = gl.arange(0, BLOCK_G, gl.SliceLayout(0, B))[None, :]
    p_query = query_ptr + row * stride_query_row + ((row_head % H) * G + head_b) * stride_query_head + channel_b
    query = gl.load(p_query, mask=(head_b < G) & (channel_b < D), other=0.0).to(gl.float32)
    largest = gl.max(gl.abs(query), axis=0)
    nan = gl.max(gl.where(query != query, 1, 0), axis=0)
    largest = gl.where(largest > 0, largest, 127.0)
    largest = gl.where(nan > 0, float("nan"), largest)
    scaled = query * (127 * _reciprocal(largest))[None, :]
    high = scaled + _MAGIC
    low = (scaled - (high - _MAGIC)) * 254 + _MAGIC
    q_high = high.to(gl.int32, bitcast=True).to(gl.int8)
    q_low = low.to(gl.int32, bitcast=True).to(gl.int8)
    total = gl.sum((high - _MAGIC) * 254 + (low - _MAGIC), axis=0)  # at most 127 * 255 * D: exact in float32
    OFFSET: gl.constexpr = 1 << (BITS - 1) if BITS < 8 else 0
    bias = gl.convert_layout((total * -OFFSET).to(gl.int32), HEAD)
    # Logits come out in base 2, for which the exponential is one instruction.
    unit = gl.convert_layout(largest * (scaling * (1.4426950408889634 / (127 * 254))), HEAD)

    head = gl.arange(0, BLOCK_G, HEAD)
    page_in = gl.arange(0, BLOCK_J, PAGE)
    basis_page = gl.arange(0, BLOCK_J, gl.SliceLayout(1, BASIS))
    basis_byte = gl.arange(0, WIDTH, gl.SliceLayout(0, BASIS))
    centroid_page = gl.arange(0, BLOCK_J, gl.SliceLayout(1, CENTROID))
    centroid_byte = gl.arange(0, D, gl.SliceLayout(0, CENTROID))
    token_page = gl.arange(0, BLOCK_J, gl.SliceLayout(1, TOKENS))
    token = gl.arange(0, P, gl.SliceLayout(0, TOKENS))
    word_page = gl.arange(0, BLOCK_J, gl.SliceLayout(1, gl.SliceLayout(2, COEFFICIENTS)))
    word_token = gl.arange(0, P, gl.SliceLayout(0, gl.SliceLayout(2, COEFFICIENTS)))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, COEFFICIENTS)))
    p_basis = basis_ptr + row_head * capacity * (R * WIDTH)
    p_coefficient = coefficients_ptr + row_head * capacity * (P * WORDS)
    p_centroid = centroid_ptr + row_head * capacity * D
    p_token_scale = token_scales_ptr + row_head * capacity * P
    p_scale = scales_ptr + row_head * capacity * N_SCALES
    p_lse = lse_ptr + row_head * G * max_pages

    # Every n_splits-th block, so that all programs have as much to do however full the cache is.
    n_blocks = (n_pages + BLOCK_J - 1) // BLOCK_J
    used = gl.minimum(blocks_per_split, (gl.maximum(n_blocks - split, 0) + n_splits - 1) // n_splits)
    last = gl.maximum(n_pages - 1, 0)
    zero = gl.full((BLOCK_J, BLOCK_G), 0, gl.int32, MMA)
    biased = zero + bias[None, :]
    running_max = gl.full((BLOCK_J, BLOCK_G), float("-inf"), gl.float32, MMA)
    running_sum = gl.full((BLOCK_J, BLOCK_G), 0.0, gl.float32, MMA)
    for block in range(used):
        start = (split + block * n_splits) * BLOCK_J
        # Pages past the end read the last one instead: clamping costs less than masks.
        o_scale = gl.minimum(start + page_in, last) * N_SCALES
        o_basis = gl.minimum(start + basis_page, last)[:, None] * (R * WIDTH) + basis_byte[None, :]
        o_centroid = gl.minimum(start + centroid_page, last)[:, None] * D + centroid_byte[None, :]
        o_word = gl.minimum(start + word_page, last)[:, None] * (P * WORDS) + word_token[None, :] * WORDS
        o_token = gl.minimum(start + token_page, last)[:, None] * P + token[None, :]
        packed = ()
        column_scales = ()
        for c in gl.static_range(R):
            packed = packed + (gl.load(p_basis + o_basis + c * WIDTH),)  # noqa: RUF005  what Triton compiles
            column_scales = column_scales + (gl.load(p_scale + o_scale + (1 + c)),)  # noqa: RUF005
        coefficients = gl.load(p_coefficient + o_word[:, :, None] + word[None, None, :])
        token_scale = gl.load(p_token_scale + o_token).to(gl.float32)
        centroid = gl.load(p_centroid + o_centroid)
        centre_scale = gl.load(p_scale + o_scale).to(gl.float32)

        projected = ()
        strongest = gl.full((BLOCK_J, BLOCK_G), 0.0, gl.float32, MMA)
        for c in gl.static_range(R):
            if PARTS == 1:
                codes = packed[c]
            else:  # parts of a byte are runs of channels
                codes = gl.join(_low_nibbles(packed[c]), _high_nibbles(packed[c]))
                codes = gl.reshape(gl.permute(codes, (0, 2, 1)), (BLOCK_J, D))
            a = gl.convert_layout(codes, A)
            value = mma_v2(a, q_high, zero) * 254 + mma_v2(a, q_low, biased)
            value = value.to(gl.float32) * column_scales[c].to(gl.float32)[:, None]
            strongest = gl.maximum(strongest, gl.abs(value))
            projected = projected + (value,)  # noqa: RUF005
        strongest = gl.where(strongest > 0, strongest, 1.0)
        inverse = 32767 * _reciprocal(strongest)
        factor = gl.convert_layout(strongest * (unit[None, :] * (1.0 / 32767)), SUMS)
        pairs = ()
        for c in gl.static_range(R // 2):
            pair = _pair(_integer(projected[2 * c] * inverse), _integer(projected[2 * c + 1] * inverse))
            pairs = pairs + (gl.expand_dims(gl.convert_layout(pair, SUMS), 1),)  # noqa: RUF005
        if WORDS == 1:
            words = (gl.convert_layout(gl.reshape(coefficients, (BLOCK_J, P)), TOKENS),)
        else:
            first_word, second_word = gl.split(coefficients)
            words = (gl.convert_layout(first_word, TOKENS), gl.convert_layout(second_word, TOKENS))
        logit = gl.full((BLOCK_J, P, BLOCK_G), 0, gl.int32, LOGITS)
        for w in gl.static_range(WORDS):
            logit = _dp2a_low(pairs[2 * w], gl.expand_dims(words[w], 2), logit)
            logit = _dp2a_high(pairs[2 * w + 1], gl.expand_dims(words[w], 2), logit)
        logit = logit.to(gl.float32) * gl.expand_dims(factor, 1) * gl.expand_dims(token_scale, 2)
        shift = gl.max(logit, axis=1)
        mass = gl.sum(gl.exp2(logit - gl.expand_dims(shift, 1)), axis=1)

        a = gl.convert_layout(centroid, A)
        centre = (mma_v2(a, q_high, zero) * 254 + mma_v2(a, q_low, zero)).to(gl.float32)
        centre = centre * (centre_scale[:, None] * unit[None, :])
        lse = centre + gl.convert_layout(shift + _log2(mass), MMA)
        page = start + page_in
        lse = gl.where((page < n_pages)[:, None], lse, float("-inf"))
        o_lse = head[None, :] * max_pages + page[:, None]
        gl.store(p_lse + o_lse, lse * LN2, mask=(page < max_pages)[:, None] & (head < G)[None, :])
        larger = gl.where((lse <= running_max) | (running_max != running_max), running_max, lse)  # a NaN stays
        safe = gl.where(larger == float("-inf"), 0.0, larger)
        running_sum = running_sum * gl.exp2(running_max - safe) + gl.exp2(lse - safe)
        running_max = larger
    if not STEP:  # a step looks at no page that does not exist
        for block in range(used, blocks_per_split):
            page = (split + block * n_splits) * BLOCK_J + page_in
            o_lse = head[None, :] * max_pages + page[:, None]
            nothing = gl.full((BLOCK_J, BLOCK_G), float("-inf"), gl.float32, MMA)
            gl.store(p_lse + o_lse, nothing, mask=(page < max_pages)[:, None] & (head < G)[None, :])

    # Of each warp first, then over the warps in every thread: a reduction over all of them waits four times.
    maxima = gl.reshape(running_max, (num_warps, BLOCK_J // num_warps, BLOCK_G))
    sums = gl.reshape(running_sum, (num_warps, BLOCK_J // num_warps, BLOCK_G))
    peak = gl.max(maxima, axis=1)
    safe = gl.where(peak == float("-inf"), 0.0, peak)
    mass = gl.sum(sums * gl.exp2(maxima - gl.expand_dims(safe, 1)), axis=1)
    ALL: gl.constexpr = _warps_layout(num_warps, BLOCK_G)
    share = gl.convert_layout(safe + _log2(mass), ALL)
    peak = gl.max(share, axis=0)
    safe = gl.where(peak == float("-inf"), 0.0, peak)
    share = safe + _log2(gl.sum(gl.exp2(share - gl.expand_dims(safe, 0)), axis=0))
    head = gl.arange(0, BLOCK_G, gl.SliceLayout(0, ALL))
    gl.store(partial_ptr + (row_head * G + head) * n_splits + split, share * LN2, mask=head < G)
