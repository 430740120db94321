"""Triton kernels of a decode step: one that appends, then those of scoring, selection and attention.

Nothing waits for the host: lengths are read on the device, and the grids follow the capacity of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attend.triton import attend_triton
from ..layout import SummaryLayout
from ..score.triton import quantize_query, score_prepared
from ..select.triton import combine_partial, top_grouped_pages
from ..summarize.reference import RANK_TOLERANCE, REFIT_RIDGE
from ..summarize.triton import packed_channels, summarize_options, summarize_page


@triton.jit
def _append_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    real_ptr,
    keys_ptr,
    values_ptr,
    counts_ptr,
    added_ptr,
    lengths_ptr,
    n_pages_ptr,
    codes_ptr,
    unit_ptr,
    bias_ptr,
    basis_ptr,
    coefficients_ptr,
    centroid_ptr,
    token_scales_ptr,
    scales_ptr,
    scaling,
    rank_tolerance,
    ridge_factor,
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
    BLOCK_D: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_REAL: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    R: tl.constexpr,
    BITS: tl.constexpr,
    REFIT: tl.constexpr,
    SQUARINGS: tl.constexpr,
    N_SCALES: tl.constexpr,
):
    """Write the token of one (row, KV head), summarise the page it completes, quantise the queries."""
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // H
    head = row_head % H
    channel = tl.arange(0, BLOCK_D)
    m_channel = channel < D
    length = tl.load(counts_ptr + row)
    added = 1
    if HAS_REAL:
        added = tl.load(real_ptr + row).to(tl.int32)
    written = tl.where(length < capacity, added, 0)
    m_written = channel < written * D
    position = tl.minimum(length, capacity - 1).to(tl.int64)
    new_length = tl.minimum(length + added, capacity)
    if head == 0:
        tl.store(added_ptr + row, tl.where(length >= capacity, -added, added))
        tl.store(lengths_ptr + row, new_length)
        tl.store(n_pages_ptr + row, new_length // P)
    b_key = tl.load(key_ptr + row * stride_key_row + head * stride_key_head + channel, mask=m_channel, other=0.0)
    b_value = tl.load(
        value_ptr + row * stride_value_row + head * stride_value_head + channel, mask=m_channel, other=0.0
    )
    o_token = (row_head * capacity + position) * D + channel
    tl.store(keys_ptr + o_token, b_key, mask=m_written)
    tl.store(values_ptr + o_token, b_value, mask=m_written)

    group = tl.arange(0, BLOCK_G)
    p_query = query_ptr + row * stride_query_row + (head * G + group)[:, None] * stride_query_head + channel[None, :]
    b_query = tl.load(p_query, mask=(group < G)[:, None] & m_channel[None, :], other=0.0).to(tl.float32)
    high, low, step = quantize_query(b_query)
    p_codes = codes_ptr + (row_head * 2 * BLOCK_G + group)[:, None] * D + channel[None, :]
    tl.store(p_codes, high.to(tl.int8), mask=m_channel[None, :])
    tl.store(p_codes + BLOCK_G * D, low.to(tl.int8), mask=m_channel[None, :])
    tl.store(unit_ptr + row_head * BLOCK_G + group, step * (scaling * 1.4426950408889634 / 254))
    total = tl.sum((high * 254 + low).to(tl.int32), axis=1)
    tl.store(bias_ptr + row_head * BLOCK_G + group, total * OFFSET)

    if (written > 0) & (new_length % P == 0):
        tl.debug_barrier()  # the page is read back, the token just written included
        page = (new_length // P - 1).to(tl.int64)
        token = tl.arange(0, BLOCK_P)
        lane, m_lane = packed_channels(D, PARTS, BLOCK_W)
        p_page = keys_ptr + (row_head * capacity + page * P) * D + token[:, None] * D + lane[None, :]
        b_page = tl.load(p_page, mask=(token < P)[:, None] & m_lane[None, :], other=0.0).to(tl.float32)
        summarize_page(
            b_page,
            row_head * (capacity // P) + page,
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
            SQUARINGS,
            N_SCALES,
        )


def decode_step_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    summaries: dict[str, torch.Tensor],
    counts: torch.Tensor,
    layout: SummaryLayout,
    refit: bool,
    rule: str,
    slots: int,
    scaling: float,
) -> torch.Tensor:
    """Launch the kernels; arguments and result as in :func:`locks_hf.kernels.decode.decode_step`."""
    batch, n_kv_heads, capacity, head_dim = keys.shape
    group = query.shape[1] // n_kv_heads
    rows, device = batch * n_kv_heads, query.device
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    block_group = max(4, triton.next_power_of_2(group))
    codes = torch.empty((rows, 2 * block_group, head_dim), dtype=torch.int8, device=device)
    unit = torch.empty((rows, block_group), dtype=torch.float32, device=device)
    bias = torch.empty((rows, block_group), dtype=torch.int32, device=device)
    added, lengths, n_pages = torch.empty((3, batch), dtype=torch.int32, device=device).unbind(0)
    _append_kernel[(rows,)](
        query,
        key,
        value,
        None if real is None else real.view(torch.uint8),
        keys,
        values,
        counts,
        added,
        lengths,
        n_pages,
        codes,
        unit,
        bias,
        *(summaries[name] for name in ("basis", "coefficients", "centroid", "token_scales", "scales")),
        scaling,
        RANK_TOLERANCE,
        REFIT_RIDGE,
        capacity,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        H=n_kv_heads,
        G=group,
        BLOCK_G=block_group,
        BLOCK_D=triton.next_power_of_2(head_dim),
        OFFSET=1 << (layout.basis_bits - 1) if layout.basis_bits < 8 else 0,
        HAS_REAL=real is not None,
        **summarize_options(layout, refit),
    )
    prepared, max_pages = (codes, unit, bias), capacity // layout.page_size
    lse, partial = score_prepared(prepared, group, summaries, n_pages, max_pages, layout)
    rank_value, group_max = combine_partial(lse, partial, n_pages, rule)
    pages = top_grouped_pages(rank_value, group_max, lengths, layout.page_size, slots)
    return attend_triton(query, keys, values, pages, lengths, layout.page_size, scaling, step=(counts, added))
