"""Triton kernel of page summarisation: one program a page.

The top right singular vectors are found one at a time from the P x P Gram matrix of the centred page: it is squared
until one direction over tokens dominates, whose share is then taken out of the Gram matrix. One product with the page
turns all directions into basis columns. Only P x P matrices are met on the way, so that a single page takes little
time. What that costs in accuracy concerns columns a thousand times weaker than the first, which 8-bit coefficients do
not show.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..backend import launching
from ..layout import SummaryLayout
from .reference import RANK_TOLERANCE, REFIT_RIDGE


@triton.jit
def _round(x):
    """Round half to even, like torch: adding 1.5 * 2**23 drops the fraction of a float32 below 2**22."""
    magic = 12582912.0
    return (x + magic) - magic


@triton.jit
def _quantize(values, axis: tl.constexpr, top: tl.constexpr):
    """Symmetric codes and the float32 value of their bf16 scale, one scale per slice along ``axis``."""
    amax = tl.max(tl.abs(values), axis=axis)
    # Division rounds like torch's only when it is IEEE division.
    scale_bits = tl.div_rn(amax, amax * 0 + top).to(tl.int32, bitcast=True)
    scale = ((scale_bits + 0xFFFF) & ~0xFFFF).to(tl.float32, bitcast=True)  # up to the next bf16
    safe = tl.where(scale > 0, scale, 1.0)
    divisor = tl.expand_dims(safe, axis) + values * 0
    codes = _round(tl.div_rn(values, divisor))
    codes = tl.where(tl.expand_dims(scale, axis) > 0, codes, 0.0)
    return tl.minimum(tl.maximum(codes, -top), top), scale


@triton.jit
def _runs(x, RUNS: tl.constexpr):
    """``(P, D)`` as ``(RUNS, P, D / RUNS)``, so that each warp of a product has other channels."""
    return tl.permute(tl.reshape(x, (x.shape[0], RUNS, x.shape[1] // RUNS)), (1, 0, 2))


@triton.jit
def _high(x):
    """The upper 19 bits, as TF32 has them."""
    return (x.to(tl.int32, bitcast=True) & ~0x1FFF).to(tl.float32, bitcast=True)


@triton.jit
def _product(left, right):
    """``left @ right`` as good as float32, for finite arrays: of two terms of TF32 each, three products."""
    left_high, right_high = _high(left), _high(right)
    product = tl.dot(left_high, right - right_high, input_precision="tf32")
    product = tl.dot(left - left_high, right_high, product, input_precision="tf32")
    return tl.dot(left_high, right_high, product, input_precision="tf32")


@triton.jit
def _halves(x):
    """The even and the odd channels of ``(P, D)``."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _product_of_halves(left, right):
    """``left @ right.T``."""
    left_even, left_odd = _halves(left)
    right_even, right_odd = _halves(right)
    return _product(left_even, tl.trans(right_even)) + _product(left_odd, tl.trans(right_odd))


@triton.jit
def _products(left, right, P: tl.constexpr, D: tl.constexpr, RUNS: tl.constexpr):
    """``left @ right.T`` of two ``(P, D)`` arrays, on the tensor cores and as good as float32."""
    if RUNS > 1:
        across = tl.permute(_runs(right, RUNS), (0, 2, 1))
        product = tl.sum(_product(_runs(left, RUNS), across), axis=0)
    elif P * D <= 4096:
        product = _product(left, tl.trans(right))
    else:  # a quarter of the channels at a time, as the operands take too much shared memory at once
        left_even, left_odd = _halves(left)
        right_even, right_odd = _halves(right)
        product = _product_of_halves(left_even, right_even) + _product_of_halves(left_odd, right_odd)
    return product


@triton.jit
def _squared(x, P: tl.constexpr):
    """``x @ x`` of a symmetric ``(P, P)`` array, of its numbers rounded to 11 bits."""
    x = ((x.to(tl.int32, bitcast=True) + 0x1000) & ~0x1FFF).to(tl.float32, bitcast=True)
    if P == 16:
        # Columns in the order in which a product of the tensor cores leaves them with the threads that the next one
        # wants them of, so that nothing moves between threads; a batch of one, so that all warps do the same.
        x = tl.reshape(x, (P, P // 8, 4, 2))
        left = tl.reshape(tl.permute(x, (0, 1, 3, 2)), (1, P, P))
        right = tl.reshape(tl.permute(x, (1, 3, 2, 0)), (1, P, P))
        product = tl.reshape(tl.dot(left, right, input_precision="tf32"), (P, P))
    else:
        product = tl.dot(x, tl.trans(x), input_precision="tf32")
    return product


@triton.jit
def packed_channels(D: tl.constexpr, PARTS: tl.constexpr, BLOCK_W: tl.constexpr):
    """Channels in the order of the packed basis, PARTS runs of D / PARTS each padded to BLOCK_W, and which exist."""
    WIDTH: tl.constexpr = D // PARTS
    lane = tl.arange(0, PARTS * BLOCK_W)
    return (lane // BLOCK_W) * WIDTH + lane % BLOCK_W, lane % BLOCK_W < WIDTH


@triton.jit
def summarize_page(
    b_key,
    page,
    basis_ptr,
    coefficients_ptr,
    centroid_ptr,
    token_scales_ptr,
    scales_ptr,
    rank_tolerance,
    ridge_factor,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    R: tl.constexpr,
    BITS: tl.constexpr,
    REFIT: tl.constexpr,
    N_SCALES: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Summarise float32 keys ``[BLOCK_P, channels in packed order]``, zero where there is none, as page ``page``."""
    token = tl.arange(0, BLOCK_P)
    WIDTH: tl.constexpr = D // PARTS
    BLOCK_D: tl.constexpr = PARTS * BLOCK_W
    lane = tl.arange(0, BLOCK_D)
    channel, m_channel = packed_channels(D, PARTS, BLOCK_W)
    # Basis columns share the block size of tokens: r < P, and tl.dot wants at least 16.
    column = tl.arange(0, BLOCK_P)

    # A page with a NaN or an infinity is summarised as zeros with a NaN centroid scale, so that its score is NaN.
    broken = tl.sum(tl.sum((tl.abs(b_key) < float("inf")).to(tl.int32), axis=1), axis=0) < BLOCK_P * BLOCK_D
    b_key = tl.where(broken, 0.0, b_key)

    b_mean = tl.sum(b_key / P, axis=0)
    mean_codes, mean_scale = _quantize(b_mean, 0, 127)
    tl.store(centroid_ptr + page * D + channel, mean_codes.to(tl.int8), mask=m_channel)
    p_scale = scales_ptr + page * N_SCALES
    tl.store(p_scale, tl.where(broken, float("nan"), mean_scale).to(tl.bfloat16))

    b_left = tl.where((token < P)[:, None], b_key - b_mean[None, :], 0.0)  # what no column explains yet
    size = tl.max(tl.max(tl.abs(b_left), axis=1), axis=0)
    size = tl.where(size > 1e-37, size, 1.0)  # a smaller one has no reciprocal, and nothing of it shows
    b_left = b_left * (1.0 / size)
    diagonal = token[:, None] == token[None, :]

    b_gram = _products(b_left, b_left, BLOCK_P, BLOCK_D, RUNS)
    first_peak = tl.max(tl.max(tl.abs(b_gram), axis=1), axis=0)
    b_direction = tl.zeros((BLOCK_P, BLOCK_P), dtype=tl.float32)  # [column, token]: times the page gives the columns
    b_component = tl.zeros((BLOCK_P, BLOCK_P), dtype=tl.float32)  # [column, token]: of the page along them
    for i_column in range(R):
        peak = tl.max(tl.max(tl.abs(b_gram), axis=1), axis=0)
        alive = peak > rank_tolerance * rank_tolerance * first_peak
        # The 128th power, the 256th of the singular value ratio: directions that it fails to separate have singular
        # values within 1 % of each other, and either serves. The largest entry being 1, the largest eigenvalue is 1 to
        # P, also where rounding errors are all that is left, of both signs: the 16th power keeps to float32's range.
        b_power = b_gram * (1.0 / tl.where(alive, peak, 1.0))
        for _ in tl.static_range(4):
            b_power = _squared(b_power, BLOCK_P)
        strength = tl.sum(tl.where(diagonal, b_power, 0.0), axis=1)
        strongest = tl.argmax(strength, axis=0)
        b_power = b_power * (1.0 / tl.where(alive, tl.max(strength, axis=0), 1.0))
        for _ in tl.static_range(3):
            b_power = _squared(b_power, BLOCK_P)
        # Its columns are the direction, and so are its rows.
        b_left_vector = tl.sum(tl.where(token[None, :] == strongest, b_power, 0.0), axis=1)
        b_across = tl.sum(tl.where(token[:, None] == strongest, b_power, 0.0), axis=0)
        b_image = tl.sum(b_gram * b_across[None, :], axis=1)
        b_image_across = tl.sum(b_gram * b_left_vector[:, None], axis=0)
        square = tl.sum(b_left_vector * b_image, axis=0)  # of the column's norm
        alive = alive & (square > 0)
        inverse = tl.where(alive, 1.0 / tl.sqrt(tl.where(alive, square, 1.0)), 0.0)
        b_gram = b_gram - (b_image * inverse)[:, None] * (b_image_across * inverse)[None, :]
        # The direction is that of what is left of the page: what earlier columns have is taken off.
        b_shared = tl.sum(b_component * b_across[None, :], axis=1)
        b_across -= tl.sum(b_direction * b_shared[:, None], axis=0)
        b_direction = tl.where(column[:, None] == i_column, (b_across * inverse)[None, :], b_direction)
        b_component = tl.where(column[:, None] == i_column, (b_image_across * inverse)[None, :], b_component)

    # Scaled by something else than before, since a product of the same would keep its operand in shared memory
    # through the loop.
    b_centred = tl.where((token < P)[:, None], b_key - b_mean[None, :], 0.0) * (0.5 / size)
    b_columns = _product(b_direction, b_centred)  # [column, channel]
    norm = tl.sqrt(tl.sum(b_columns * b_columns, axis=1))
    b_columns = b_columns * tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)[:, None]
    # Rows past the rank are zero: dividing takes long, and so few as possible are quantised.
    ROWS: tl.constexpr = 1 << (R - 1).bit_length()
    row = tl.arange(0, ROWS)
    b_columns = tl.sum(tl.reshape(b_columns, (BLOCK_P // ROWS, ROWS, BLOCK_D)), axis=0)
    p_row = page * R + row[:, None]
    m_row = (row < R)[:, None]
    if BITS == 16:
        b_stored = b_columns.to(tl.bfloat16)
        tl.store(basis_ptr + p_row * D + channel[None, :], b_stored, mask=m_row & m_channel[None, :])
        b_used = b_stored.to(tl.float32)
    else:
        codes, scale = _quantize(b_columns, 1, (1 << (BITS - 1)) - 1)
        tl.store(p_scale + 1 + row, scale.to(tl.bfloat16), mask=row < R)
        b_used = codes * scale[:, None]
        if BITS == 8:
            tl.store(basis_ptr + p_row * D + channel[None, :], codes.to(tl.int8), mask=m_row & m_channel[None, :])
        else:
            biased = (codes.to(tl.int32) + (1 << (BITS - 1))) << (BITS * (lane // BLOCK_W))[None, :]
            packed = tl.sum(tl.reshape(biased, (ROWS, PARTS, BLOCK_W)), axis=1)
            byte = tl.arange(0, BLOCK_W)
            m_byte = m_row & (byte < WIDTH)[None, :]
            tl.store(basis_ptr + p_row * WIDTH + byte[None, :], packed.to(tl.uint8), mask=m_byte)

    if REFIT:
        first = tl.arange(0, BLOCK_P // ROWS) == 0
        b_basis = tl.reshape(tl.where(first[:, None, None], b_used[None, :, :], 0.0), (BLOCK_P, BLOCK_D))
        b_residual = tl.where((token < P)[:, None], b_key - (mean_codes * mean_scale)[None, :], 0.0)
        b_gram = _products(b_basis, b_basis, BLOCK_P, BLOCK_D, RUNS)  # of the basis, from here on
        b_right = _products(b_basis, b_residual, BLOCK_P, BLOCK_D, RUNS)  # [column, token]
        b_diagonal = tl.sum(tl.where(diagonal, b_gram, 0.0), axis=1)
        ridge = ridge_factor * tl.max(b_diagonal, axis=0)
        b_ridge = tl.where(b_diagonal > 0, ridge, 1.0)
        b_gram += tl.where(diagonal, b_ridge[:, None], 0.0)
        # Gauss-Jordan without pivoting: the system is symmetric positive definite.
        for i in range(R):
            here = column == i
            pivot = tl.sum(tl.sum(tl.where(here[:, None] & here[None, :], b_gram, 0.0), axis=1), axis=0)
            inverse = 1.0 / pivot
            gram_row = tl.sum(tl.where(here[:, None], b_gram, 0.0), axis=0) * inverse
            right_row = tl.sum(tl.where(here[:, None], b_right, 0.0), axis=0) * inverse
            factor = tl.where(here, 0.0, tl.sum(tl.where(here[None, :], b_gram, 0.0), axis=1))
            b_gram = tl.where(here[:, None], gram_row[None, :], b_gram - factor[:, None] * gram_row[None, :])
            b_right = tl.where(here[:, None], right_row[None, :], b_right - factor[:, None] * right_row[None, :])
        b_coefficient = tl.where(column[None, :] < R, tl.trans(b_right), 0.0)
    else:
        b_coefficient = tl.trans(b_component) * size

    codes, scale = _quantize(b_coefficient, 1, 127)
    tl.store(token_scales_ptr + page * P + token, scale.to(tl.bfloat16), mask=token < P)
    p_coefficient = coefficients_ptr + (page * P + token[:, None]) * R + column[None, :]
    tl.store(p_coefficient, codes.to(tl.int8), mask=(token < P)[:, None] & (column < R)[None, :])


@triton.jit
def _summarize_kernel(
    keys_ptr,
    basis_ptr,
    coefficients_ptr,
    centroid_ptr,
    token_scales_ptr,
    scales_ptr,
    stride_page,
    stride_token,
    rank_tolerance,
    ridge_factor,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    R: tl.constexpr,
    BITS: tl.constexpr,
    REFIT: tl.constexpr,
    N_SCALES: tl.constexpr,
    RUNS: tl.constexpr,
):
    page = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK_P)
    channel, m_channel = packed_channels(D, PARTS, BLOCK_W)
    p_key = keys_ptr + page * stride_page + token[:, None] * stride_token + channel[None, :]
    b_key = tl.load(p_key, mask=(token < P)[:, None] & m_channel[None, :], other=0.0).to(tl.float32)
    summarize_page(
        b_key,
        page,
        basis_ptr,
        coefficients_ptr,
        centroid_ptr,
        token_scales_ptr,
        scales_ptr,
        rank_tolerance,
        ridge_factor,
        D,
        PARTS,
        BLOCK_W,
        P,
        BLOCK_P,
        R,
        BITS,
        REFIT,
        N_SCALES,
        RUNS,
    )


def summarize_warps(head_dim: int, page_size: int) -> int:
    """Warps a page: about 64 of a page's entries a thread, more would spill registers."""
    entries = triton.next_power_of_2(head_dim) * max(16, page_size)
    return min(8, max(1, entries // (32 * 64)))


def summarize_options(layout: SummaryLayout, refit: bool, warps: int | None = None) -> dict:
    """Compile-time arguments of :func:`summarize_page`.

    Args:
        layout: Sizes of the summaries.
        refit: Whether coefficients are fitted to the quantised basis.
        warps: Warps for one page, by default those that many pages at once are done with in the least time.
    """
    block_width = max(16 // layout.codes_per_byte, triton.next_power_of_2(layout.basis_width))
    block_tokens, block_channels = max(16, layout.page_size), block_width * layout.codes_per_byte
    # Each warp multiplies its own channels, where there are enough; else all warps would do the same.
    # A product of 64 tokens takes too many registers for that.
    shares = warps is not None and block_channels >= 16 * warps and block_tokens <= min(32, 4096 // block_channels)
    return {
        "D": layout.head_dim,
        "PARTS": layout.codes_per_byte,
        "BLOCK_W": block_width,
        "P": layout.page_size,
        "BLOCK_P": block_tokens,
        "R": layout.rank,
        "BITS": layout.basis_bits,
        "REFIT": refit,
        "N_SCALES": layout.n_scales,
        "RUNS": warps if shares else 1,
        "num_warps": warps or summarize_warps(layout.head_dim, layout.page_size),
    }


@launching
def summarize_triton(keys: torch.Tensor, layout: SummaryLayout, refit: bool) -> dict[str, torch.Tensor]:
    """Launch the kernel; arguments and result as in :func:`locks_hf.kernels.summarize.summarize`."""
    if keys.stride(-1) != 1:
        keys = keys.contiguous()
    n_pages = keys.shape[0]
    out = layout.empty(n_pages, keys.device)
    _summarize_kernel[(n_pages,)](
        keys,
        out["basis"],
        out["coefficients"],
        out["centroid"],
        out["token_scales"],
        out["scales"],
        keys.stride(0),
        keys.stride(1),
        RANK_TOLERANCE,
        REFIT_RIDGE,
        **summarize_options(layout, refit),
    )
    return out
