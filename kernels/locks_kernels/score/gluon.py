"""Gluon kernel of page scoring, for the summaries whose numbers divide evenly among the lanes of a warp.

The same arithmetic as in :mod:`.triton`, written for what each lane holds, because the number of instructions decides
as much as the bytes do. A warp scores eight pages at a time. Lane ``4 * g + j`` loads, 16 bytes at once, just what the
tensor cores want of it, and every array here is of one number a lane:

1. Eight basis columns, of two pages of rank 4 or of one of rank 8, are multiplied with the int8 query. Its two terms
   are the upper and the lower half of the operand's rows, so that the projected query of head ``g`` for the columns
   ``2 * j`` and ``2 * j + 1`` comes back in one lane, in both terms.
2. That is where the next product wants it, with the coefficients of the tokens as its second operand: in TF32, as the
   sum of two numbers, so that nothing is lost. Its rows are the heads of two pages, each with zeros for the
   coefficients of the other (rank 4), or the two terms (rank 8).
3. The logits of four tokens of each page are then in each lane, which sums their exponentials as they are; four lanes
   share the pages of a head and give each other what they have of them. Should a sum leave the range of float32, the
   program starts over and subtracts the maxima.

Bytes: the summaries, read once, and 4 bytes a page and head written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..lanes import columns

_MAGIC = gl.constexpr(12582912.0)  # adding 1.5 * 2**23 leaves the nearest integer in the low bits
_TF32 = gl.constexpr(-8192)  # the bits of a float32 that the tensor cores read


@gluon.constexpr_function
def _lanes(warps):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def _vectors(length, warps):
    """``(lanes, length)``, a row a lane."""
    return gl.BlockedLayout([1, length], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def _heads_layout(warps):
    """``(warps, 8)``: a head a lane, with what all warps have of it in the lane's registers."""
    none = [0, 0]
    return gl.DistributedLinearLayout(
        [[1 << i, 0] for i in range(warps.bit_length() - 1)],
        [none, none, [0, 1], [0, 2], [0, 4]],
        [none] * (warps.bit_length() - 1),
        [],
        [warps, 8],
    )


@gluon.jit
def _split_lanes(x, num_warps: gl.constexpr):
    """The columns of ``(lanes, n)``, each as one number a lane."""
    single = columns(x)
    numbers = ()
    for i in gl.static_range(len(single)):
        number = gl.convert_layout(single[i], _lanes(num_warps), assert_trivial=True)
        numbers = numbers + (number,)  # noqa: RUF005  what Triton compiles
    return numbers


@gluon.jit
def _load_words(pointer, N: gl.constexpr, num_warps: gl.constexpr):
    """``N`` numbers from a pointer on, of each lane its own."""
    VECTORS: gl.constexpr = _vectors(N, num_warps)
    start = gl.convert_layout(pointer, gl.SliceLayout(1, VECTORS), assert_trivial=True)
    p_word = gl.expand_dims(start, 1) + gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, VECTORS)), 0)
    return _split_lanes(gl.load(p_word), num_warps)


@gluon.jit
def _product_of_bytes(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """A product of 16 x 32 with 32 x 8 int8, added to ``c``."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _product_of_floats(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """A product of 16 x 8 with 8 x 8 TF32, as the bits of float32, added to ``c`` in float32."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _pick_bytes(first, second, selector):
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [first, second, selector], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _from_lane(x, DISTANCE: gl.constexpr):
    """What the lane with another bit has."""
    if DISTANCE == 1:
        y = gl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        y = gl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
        )
    return y


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _bits(x):
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def _float(x):
    return x.to(gl.float32, bitcast=True)


@gluon.jit
def _difference(x, bits):
    """``x`` minus the float32 of some bits, for which the compiler would first turn the sign."""
    return gl.inline_asm_elementwise("sub.f32 $0, $1, $2;", "=f,f,r", [x, bits], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _as_it_is(x):
    """``x``, of which the compiler does not know what it is."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _byte_as_float(word, selector):
    """One of the int8 of a word whose sign bits were flipped, as the bits of a float32."""
    return _bits(_float(_pick_bytes(word, gl.full_like(word, 0x4B000000), selector)) - 8388736.0)


@gluon.jit
def _load_query(p_query, real, D: gl.constexpr, BITS: gl.constexpr, j, num_warps: gl.constexpr):
    """The query of a head, in the order of the channels of a lane's codes."""
    PARTS: gl.constexpr = 8 // BITS
    WIDTH: gl.constexpr = D // PARTS
    RUN: gl.constexpr = 16 if WIDTH >= 64 else WIDTH // 4
    VECTORS: gl.constexpr = _vectors(RUN, num_warps)
    p_lane = gl.convert_layout(p_query + RUN * j, gl.SliceLayout(1, VECTORS), assert_trivial=True)
    m_lane = gl.convert_layout(real, gl.SliceLayout(1, VECTORS), assert_trivial=True)
    p_lane = gl.expand_dims(p_lane, 1) + gl.expand_dims(gl.arange(0, RUN, gl.SliceLayout(0, VECTORS)), 0)
    values = ()
    for run in gl.static_range(D // (4 * RUN)):
        value = gl.load(p_lane + run * 4 * RUN, mask=gl.expand_dims(m_lane, 1), other=0.0)
        values = values + (value,)  # noqa: RUF005
    return values


@gluon.jit
def _int8_query(query, D: gl.constexpr, BITS: gl.constexpr, j, num_warps: gl.constexpr):
    """What :func:`_load_query` loaded as two int8 terms.

    Returns:
        Words of the first term, those of the second, the start of both sums, and the largest value.
    """
    RUN: gl.constexpr = query[0].shape[1]
    VECTORS: gl.constexpr = _vectors(RUN, num_warps)
    values = ()
    most = gl.full_like(j, 0)  # as bits without the sign, of which those of a NaN are the largest
    for run in gl.static_range(D // (4 * RUN)):
        value = query[run].to(gl.float32)
        values = values + (value,)  # noqa: RUF005
        bits = gl.max(_bits(value) & 0x7FFFFFFF, axis=1)
        most = gl.maximum(most, gl.convert_layout(bits, _lanes(num_warps), assert_trivial=True))
    most = gl.maximum(most, _bits(_from_lane(_float(most), 1)))
    most = gl.maximum(most, _bits(_from_lane(_float(most), 2)))
    largest = gl.where(most > 0, _float(most), 127.0)
    factor = gl.convert_layout(127 * _reciprocal(largest), gl.SliceLayout(1, VECTORS), assert_trivial=True)
    high_words = ()
    low_words = ()
    high_sum = gl.full_like(j, 0)
    low_sum = gl.full_like(j, 0)
    for run in gl.static_range(D // (4 * RUN)):
        scaled = values[run] * gl.expand_dims(factor, 1)
        high = scaled + _MAGIC
        low = (scaled - (high - _MAGIC)) * 254 + _MAGIC
        high_bytes = _split_lanes(_bits(high), num_warps)
        low_bytes = _split_lanes(_bits(low), num_warps)
        for word in gl.static_range(RUN // 4):
            high_word = _word_of_bytes(
                high_bytes[4 * word], high_bytes[4 * word + 1], high_bytes[4 * word + 2], high_bytes[4 * word + 3]
            )
            low_word = _word_of_bytes(
                low_bytes[4 * word], low_bytes[4 * word + 1], low_bytes[4 * word + 2], low_bytes[4 * word + 3]
            )
            high_words = high_words + (high_word,)  # noqa: RUF005
            low_words = low_words + (low_word,)  # noqa: RUF005
            high_sum = _sum_of_bytes(high_word, high_sum)
            low_sum = _sum_of_bytes(low_word, low_sum)
    high_sum += _bits(_from_lane(_float(high_sum), 1))
    high_sum += _bits(_from_lane(_float(high_sum), 2))
    low_sum += _bits(_from_lane(_float(low_sum), 1))
    low_sum += _bits(_from_lane(_float(low_sum), 2))
    OFFSET: gl.constexpr = 1 << (BITS - 1) if BITS < 8 else 0  # codes of less than a byte are stored from 0 on
    return high_words, low_words, high_sum * -OFFSET, low_sum * -OFFSET, largest


@gluon.jit
def _sum_of_bytes(word, total):
    """``total`` and the four int8 of a word."""
    return gl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, 0x01010101, $2;", "=r,r,r", [word, total], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _word_of_bytes(a, b, c, d):
    """The low bytes of four words."""
    low = _pick_bytes(a, b, gl.full_like(a, 0x0040))
    high = _pick_bytes(c, d, gl.full_like(a, 0x0040))
    return _pick_bytes(low, high, gl.full_like(a, 0x5410))


@gluon.jit
def _pages_at(pointers, page, g, j, D: gl.constexpr, R: gl.constexpr, BITS: gl.constexpr):
    """Where a lane's parts of eight pages begin; what lies past the end of the cache is moved to where pages are."""
    p_basis, p_coefficient, p_centroid, p_token_scale, p_scale = pointers
    WORDS: gl.constexpr = D * BITS // 32
    RUN: gl.constexpr = 4 if WORDS >= 16 else WORDS // 4
    column, page_of_columns = (j * 2) % R, page + (j * 2) // R
    if R == 4:  # the words of tokens 2 * g and 2 * g + 1
        o_coefficient = page_of_columns * 16 + g * 2
    else:  # half a word of each: two columns
        o_coefficient = page_of_columns * 64 + (g * 8 + j)
    return (
        p_basis + (page * (R * WORDS) + (g * WORDS + j * RUN)),
        p_coefficient + o_coefficient,
        p_centroid + ((page + g) * (D // 4) + j * RUN),
        p_token_scale + (page * 8 + j * 2),
        p_scale + (page_of_columns * (1 + R) + column),
        p_scale + (page + j * 2) * (1 + R),
    )


@gluon.jit
def _load_tile(at, TILE: gl.constexpr, D: gl.constexpr, R: gl.constexpr, BITS: gl.constexpr, num_warps: gl.constexpr):
    """What a lane holds of eight basis columns, and of the tokens of their pages."""
    p_basis, p_coefficient, _, p_token_scale, p_scale, _ = at
    WORDS: gl.constexpr = D * BITS // 32
    RUN: gl.constexpr = 4 if WORDS >= 16 else WORDS // 4
    PAGES: gl.constexpr = 8 // R
    codes = ()
    for run in gl.static_range(WORDS // (4 * RUN)):
        codes = codes + _load_words(p_basis + (TILE * 8 * WORDS + run * 4 * RUN), RUN, num_warps)
    p_own = p_scale + TILE * PAGES * (1 + R)
    scales = (gl.load(p_own + 1), gl.load(p_own + 2))
    if R == 4:
        coefficients = _load_words(p_coefficient + TILE * PAGES * 16, 2, num_warps)
    else:
        p_half = p_coefficient + TILE * PAGES * 64
        coefficients = (gl.load(p_half), gl.load(p_half + 4))
    tokens = ()
    for p in gl.static_range(PAGES):
        tokens = tokens + _load_words(p_token_scale + (TILE * PAGES + p) * 8, 2, num_warps)
    return codes, scales, coefficients, tokens


@gluon.jit
def _load_centroids(at, D: gl.constexpr, R: gl.constexpr, BITS: gl.constexpr, num_warps: gl.constexpr):
    """Likewise of the centroids of eight pages."""
    _, _, p_centroid, _, _, p_centre_scale = at
    WORDS: gl.constexpr = D * BITS // 32
    RUN: gl.constexpr = 4 if WORDS >= 16 else WORDS // 4
    words = ()
    for run in gl.static_range(D // 4 // (4 * RUN)):  # the same channels as of the basis
        words = words + _load_words(p_centroid + run * 4 * RUN, RUN, num_warps)
    return words, gl.load(p_centre_scale), gl.load(p_centre_scale + (1 + R))


@gluon.jit
def _projected(high_words, low_words, codes, high_start, low_start, D: gl.constexpr):
    """Products of the query with two of eight rows of codes, of which the lane holds a part."""
    c0, c1, c2, c3 = high_start, high_start, low_start, low_start
    for step in gl.static_range(D // 32):
        c0, c1, c2, c3 = _product_of_bytes(
            high_words[2 * step], low_words[2 * step], high_words[2 * step + 1], low_words[2 * step + 1],
            codes[2 * step], codes[2 * step + 1], c0, c1, c2, c3,
        )  # fmt: skip
    return (c0 * 254 + c2).to(gl.float32), (c1 * 254 + c3).to(gl.float32)


@gluon.jit
def _unpacked(codes, PARTS: gl.constexpr):
    """Words of int8 codes: of the low nibbles, then of the high ones, which are of later channels."""
    words = codes
    if PARTS == 2:
        words = ()
        for i in gl.static_range(len(codes)):
            words = words + (codes[i] & 0x0F0F0F0F,)  # noqa: RUF005
        for i in gl.static_range(len(codes)):
            words = words + ((codes[i] >> 4) & 0x0F0F0F0F,)  # noqa: RUF005
    return words


@gluon.jit
def _coefficient_operands(coefficients, j, R: gl.constexpr):
    """The coefficients of two tokens for the lane's two columns."""
    if R == 4:
        column = (j % 2) * 2
        first, second = coefficients[0] ^ -2139062144, coefficients[1] ^ -2139062144
    else:
        column = j * 0
        first, second = coefficients[0].to(gl.int32) ^ 0x8080, coefficients[1].to(gl.int32) ^ 0x8080
    selector = column + 0x7440
    return (
        _byte_as_float(first, selector),
        _byte_as_float(first, selector + 1),
        _byte_as_float(second, selector),
        _byte_as_float(second, selector + 1),
    )


@gluon.jit
def _logits(first, second, operands, masks, R: gl.constexpr):
    """Logits of a lane's four tokens, of two pages with rank 4 and of one with rank 8, without the tokens' scales."""
    first_high, second_high = _bits(first) & _TF32, _bits(second) & _TF32
    first_low, second_low = _bits(_difference(first, first_high)), _bits(_difference(second, second_high))
    zero = gl.full_like(first, 0.0)
    if R == 4:
        upper, lower = masks
        first_bits, second_bits = _bits(first), _bits(second)
        a0, a1, a2, a3 = first_bits & upper, first_bits & lower, second_bits & upper, second_bits & lower
        b0, b1, b2, b3 = first_low & upper, first_low & lower, second_low & upper, second_low & lower
        p0, p2, q0, q2 = _product_of_floats(a0, a1, a2, a3, operands[0], operands[1], zero, zero, zero, zero)
        p0, p2, q0, q2 = _product_of_floats(b0, b1, b2, b3, operands[0], operands[1], p0, p2, q0, q2)
        p1, p3, q1, q3 = _product_of_floats(a0, a1, a2, a3, operands[2], operands[3], zero, zero, zero, zero)
        p1, p3, q1, q3 = _product_of_floats(b0, b1, b2, b3, operands[2], operands[3], p1, p3, q1, q3)
        logits = ((p0, p1, p2, p3), (q0, q1, q2, q3))
    else:
        p0, p2, q0, q2 = _product_of_floats(
            first_high, first_low, second_high, second_low, operands[0], operands[1], zero, zero, zero, zero
        )
        p1, p3, q1, q3 = _product_of_floats(
            first_high, first_low, second_high, second_low, operands[2], operands[3], zero, zero, zero, zero
        )
        logits = ((p0 + q0, p1 + q1, p2 + q2, p3 + q3),)
    return logits


@gluon.jit
def _sum_of_page(logits, scales, CAREFUL: gl.constexpr):
    """The sum of the exponentials of a lane's four tokens, and what was subtracted from the logits of the page."""
    a = logits[0] * _float(scales[0] << 16)
    b = logits[1] * _float(scales[0] & -65536)
    c = logits[2] * _float(scales[1] << 16)
    d = logits[3] * _float(scales[1] & -65536)
    shift = gl.full_like(a, 0.0)
    if CAREFUL:
        shift = gl.maximum(gl.maximum(a, b), gl.maximum(c, d))
        shift = gl.maximum(shift, _from_lane(shift, 1))
        shift = gl.maximum(shift, _from_lane(shift, 2))
        a, b, c, d = a - shift, b - shift, c - shift, d - shift
    return (_exp2(a) + _exp2(b)) + (_exp2(c) + _exp2(d)), shift


@gluon.jit
def _own_pages(x, j):
    """Of eight numbers a lane the sums over four lanes of two: those of pages ``2 * j`` and ``2 * j + 1``."""
    upper = j >= 2
    half = ()
    for i in gl.static_range(4):
        kept, given = gl.where(upper, x[4 + i], x[i]), gl.where(upper, x[i], x[4 + i])
        half = half + (kept + _from_lane(given, 2),)  # noqa: RUF005
    odd = j % 2 == 1
    kept, given = gl.where(odd, half[2], half[0]), gl.where(odd, half[0], half[2])
    first = kept + _from_lane(given, 1)
    kept, given = gl.where(odd, half[3], half[1]), gl.where(odd, half[1], half[3])
    return first, kept + _from_lane(given, 1)


@gluon.jit
def _picked(x, j):
    """Of eight numbers a lane those of pages ``2 * j`` and ``2 * j + 1``."""
    first = gl.where(j < 2, gl.where(j < 1, x[0], x[2]), gl.where(j < 3, x[4], x[6]))
    second = gl.where(j < 2, gl.where(j < 1, x[1], x[3]), gl.where(j < 3, x[5], x[7]))
    return first, second


@gluon.jit
def _score_blocks(
    pointers,
    loaded,
    p_lse,
    queries,
    units,
    split,
    n_splits,
    used,
    n_pages,
    max_pages,
    capacity,
    g,
    j,
    warp,
    G: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    BITS: gl.constexpr,
    CAREFUL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Score every ``n_splits``-th block, of which ``loaded`` has the beginning of the first.

    Returns:
        For each eight heads the maximum and the sum of what a lane has seen, and the smallest and the largest sum of a
        page.
    """
    LN2: gl.constexpr = 0.6931471805599453
    PAGES: gl.constexpr = 8 // R  # of a tile
    HEADS: gl.constexpr = len(queries)
    AHEAD: gl.constexpr = 4  # tiles
    nothing = gl.full_like(g, 0).to(gl.float32)
    maxima = ()
    sums = ()
    for _ in gl.static_range(HEADS):
        maxima = maxima + (nothing + float("-inf"),)  # noqa: RUF005
        sums = sums + (nothing,)  # noqa: RUF005
    smallest, biggest = nothing + 1.0, nothing + 1.0
    masks = (_as_it_is(gl.where(j < 2, _TF32, 0)), _as_it_is(gl.where(j < 2, 0, _TF32)))
    tiles, centroids = loaded
    for block in range(used):
        page = ((split + block * n_splits) * num_warps + warp) * 8
        start = gl.minimum(page, capacity - 8)
        at = _pages_at(pointers, start, g, j, D, R, BITS)
        following = gl.minimum(page + n_splits * (8 * num_warps), capacity - 8)
        at_following = _pages_at(pointers, following, g, j, D, R, BITS)
        page_sums = ()
        page_shifts = ()
        for tile in gl.static_range(R):  # eight columns, of eight pages of R
            codes, scales, coefficients, tokens = tiles[0]
            words = _unpacked(codes, 8 // BITS)
            operands = _coefficient_operands(coefficients, j, R)
            # A tile makes room for a later one, which loads while others are scored.
            if tile + AHEAD < R:
                tiles = tiles[1:] + (_load_tile(at, tile + AHEAD, D, R, BITS, num_warps),)  # noqa: RUF005
            else:
                tiles = tiles[1:] + (_load_tile(at_following, tile + AHEAD - R, D, R, BITS, num_warps),)  # noqa: RUF005
            for h in gl.static_range(HEADS):
                high_words, low_words, high_start, low_start = queries[h]
                first, second = _projected(high_words, low_words, words, high_start, low_start, D)
                first = first * (scales[0].to(gl.float32) * units[h])
                second = second * (scales[1].to(gl.float32) * units[h])
                logits = _logits(first, second, operands, masks, R)
                for p in gl.static_range(PAGES):
                    total, shift = _sum_of_page(logits[p], (tokens[2 * p], tokens[2 * p + 1]), CAREFUL)
                    page_sums = page_sums + (total,)  # noqa: RUF005
                    page_shifts = page_shifts + (shift,)  # noqa: RUF005
        words, first_scale, second_scale = centroids
        centroids = _load_centroids(at_following, D, R, BITS, num_warps)
        own = start + j * 2
        new_maxima = ()
        new_sums = ()
        for h in gl.static_range(HEADS):
            high_words, low_words, _high_start, _low_start = queries[h]
            zero = gl.full_like(g, 0)
            first, second = _projected(high_words, low_words, words, zero, zero, D)
            first = first * (first_scale.to(gl.float32) * units[h])
            second = second * (second_scale.to(gl.float32) * units[h])
            of_head = ()
            shifts = ()
            for i in gl.static_range(8):
                of_head = of_head + (page_sums[(i // PAGES) * HEADS * PAGES + h * PAGES + i % PAGES],)  # noqa: RUF005
                shifts = shifts + (page_shifts[(i // PAGES) * HEADS * PAGES + h * PAGES + i % PAGES],)  # noqa: RUF005
            first_mass, second_mass = _own_pages(of_head, j)
            # Pages in front of the block are another's, and come here at the end of the cache only.
            first_real, second_real = (own >= page) & (own < n_pages), (own + 1 >= page) & (own + 1 < n_pages)
            first += _log2(first_mass)
            second += _log2(second_mass)
            if CAREFUL:
                first_shift, second_shift = _picked(shifts, j)
                first += first_shift
                second += second_shift
            first_mass, second_mass = gl.where(first_real, first_mass, 1.0), gl.where(second_real, second_mass, 1.0)
            smallest = gl.minimum(smallest, gl.minimum(first_mass, second_mass))
            biggest = gl.maximum(biggest, gl.maximum(first_mass, second_mass))
            first = gl.where(first_real, first, float("-inf"))
            second = gl.where(second_real, second, float("-inf"))
            head = h * 8 + g
            o_lse = head * max_pages + own
            gl.store(p_lse + o_lse, first * LN2, mask=(own >= page) & (own < max_pages) & (head < G))
            gl.store(p_lse + o_lse + 1, second * LN2, mask=(own + 1 >= page) & (own + 1 < max_pages) & (head < G))
            larger = gl.maximum(maxima[h], gl.maximum(first, second))  # a NaN is not larger, and stays in the sum
            safe = gl.where(larger == float("-inf"), 0.0, larger)
            total = sums[h] * _exp2(maxima[h] - safe) + (_exp2(first - safe) + _exp2(second - safe))
            new_maxima = new_maxima + (larger,)  # noqa: RUF005
            new_sums = new_sums + (total,)  # noqa: RUF005
        maxima = new_maxima
        sums = new_sums
    return maxima, sums, smallest, biggest


@gluon.jit
def _load_first(
    pointers, page, capacity, g, j, D: gl.constexpr, R: gl.constexpr, BITS: gl.constexpr, num_warps: gl.constexpr
):
    """The beginning of a block, for :func:`_score_blocks`."""
    at = _pages_at(pointers, gl.minimum(page, capacity - 8), g, j, D, R, BITS)
    tiles = ()
    for tile in gl.static_range(4):
        tiles = tiles + (_load_tile(at, tile, D, R, BITS, num_warps),)  # noqa: RUF005
    return tiles, _load_centroids(at, D, R, BITS, num_warps)


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
    STEP: gl.constexpr,
    HAS_REAL: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Score a few blocks of pages of one (row, KV head), eight pages a warp.

    As part of a decode step (``STEP``) the counts are of tokens, not of pages, and the first program of each (row, KV
    head) writes the new token.
    """
    LN2: gl.constexpr = 0.6931471805599453
    BLOCK_J: gl.constexpr = 8 * num_warps
    LANES: gl.constexpr = _lanes(num_warps)

    row_head = gl.program_id(1).to(gl.int64)
    row = row_head // H
    split = gl.program_id(0)
    thread = gl.arange(0, 32 * num_warps, LANES)
    warp, g, j = thread // 32, thread % 32 // 4, thread % 4
    pointers = (
        basis_ptr + row_head * capacity * (R * D * BITS // 32),
        coefficients_ptr + row_head * capacity * (P * R // (4 if R == 4 else 2)),
        centroid_ptr + row_head * capacity * (D // 4),
        token_scales_ptr + row_head * capacity * (P // 2),
        scales_ptr + row_head * capacity * (1 + R),
    )
    first_page = (split * num_warps + warp) * 8
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = gl.load(counts_ptr + row)
    heads = ()
    for h in gl.static_range(BLOCK_G // 8):
        p_query = query_ptr + row * stride_query_row + ((row_head % H) * G + (h * 8 + g)) * stride_query_head
        heads = heads + (_load_query(p_query, h * 8 + g < G, D, BITS, j, num_warps),)  # noqa: RUF005
    loaded = _load_first(pointers, first_page, capacity, g, j, D, R, BITS, num_warps)  # they come meanwhile
    n_pages = gl.minimum(count // P if STEP else count, max_pages)
    if STEP:  # noqa: SIM102  one is known to the compiler
        if split == 0:
            channel = gl.arange(0, D, LANES)
            added = 1
            if HAS_REAL:
                added = gl.load(real_ptr + row).to(gl.int32)
            m_written = channel < gl.where(count < capacity * P, added, 0) * D
            o_token = (row_head * capacity * P + gl.minimum(count, capacity * P - 1)) * D + channel
            p_key = key_ptr + row * stride_key_row + (row_head % H) * stride_key_head
            p_value = value_ptr + row * stride_value_row + (row_head % H) * stride_value_head
            gl.store(keys_ptr + o_token, gl.load(p_key + channel), mask=m_written)
            gl.store(values_ptr + o_token, gl.load(p_value + channel), mask=m_written)
    queries = ()
    units = ()
    for h in gl.static_range(BLOCK_G // 8):
        high_words, low_words, high_start, low_start, largest = _int8_query(heads[h], D, BITS, j, num_warps)
        queries = queries + ((high_words, low_words, high_start, low_start),)  # noqa: RUF005
        # Logits come out in base 2, for which the exponential is one instruction.
        units = units + (largest * (scaling * (1.4426950408889634 / (127 * 254))),)  # noqa: RUF005

    # Every n_splits-th block, so that all programs have as much to do however full the cache is.
    n_blocks = (n_pages + BLOCK_J - 1) // BLOCK_J
    used = gl.minimum(blocks_per_split, (gl.maximum(n_blocks - split, 0) + n_splits - 1) // n_splits)
    p_lse = lse_ptr + row_head * G * max_pages
    maxima, sums, smallest, biggest = _score_blocks(
        pointers, loaded, p_lse, queries, units, split, n_splits, used, n_pages, max_pages, capacity, g, j, warp, G, D,
        R, BITS, False, num_warps,
    )  # fmt: skip
    outside = gl.where((smallest > 1e-30) & (biggest < 1e38), 0, 1)
    if gl.max(outside, axis=0) > 0:
        loaded = _load_first(pointers, first_page, capacity, g, j, D, R, BITS, num_warps)
        maxima, sums, smallest, biggest = _score_blocks(
            pointers, loaded, p_lse, queries, units, split, n_splits, used, n_pages, max_pages, capacity, g, j, warp, G,
            D, R, BITS, True, num_warps,
        )  # fmt: skip
    if not STEP:  # a step looks at no page that does not exist
        for block in range(used, blocks_per_split):
            page = ((split + block * n_splits) * num_warps + warp) * 8 + j * 2
            for h in gl.static_range(BLOCK_G // 8):
                head = h * 8 + g
                o_lse = head * max_pages + page
                nothing = gl.full_like(g, 0).to(gl.float32) + float("-inf")
                gl.store(p_lse + o_lse, nothing, mask=(page < max_pages) & (head < G))
                gl.store(p_lse + o_lse + 1, nothing, mask=(page + 1 < max_pages) & (head < G))

    # Over the four lanes of a head, then over the warps in every thread.
    HEADS: gl.constexpr = _heads_layout(num_warps)
    for h in gl.static_range(BLOCK_G // 8):
        peak = gl.maximum(maxima[h], _from_lane(maxima[h], 1))
        peak = gl.maximum(peak, _from_lane(peak, 2))
        safe = gl.where(peak == float("-inf"), 0.0, peak)
        mass = sums[h] * _exp2(maxima[h] - safe)
        mass += _from_lane(mass, 1)
        mass += _from_lane(mass, 2)
        share = gl.reshape(safe + _log2(mass), (num_warps, 8, 4))
        share = gl.convert_layout(gl.max(share, axis=2), HEADS)
        peak = gl.max(share, axis=0)
        safe = gl.where(peak == float("-inf"), 0.0, peak)
        share = safe + _log2(gl.sum(_exp2(share - gl.expand_dims(safe, 0)), axis=0))
        head = h * 8 + gl.arange(0, 8, gl.SliceLayout(0, HEADS))
        gl.store(partial_ptr + (row_head * G + head) * n_splits + split, share * LN2, mask=head < G)
