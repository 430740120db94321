"""Triton kernel of page scoring: a block of pages of one (row, KV head) a program.

Bytes: the summaries, read once. Per page and KV head about ``G * d * (r + 1) + G * r * P`` multiply-adds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..layout import SummaryLayout


@triton.jit
def _score_kernel(
    query_ptr,
    basis_ptr,
    coefficients_ptr,
    centroid_ptr,
    scales_ptr,
    n_pages_ptr,
    lse_ptr,
    scaling,
    max_pages,
    capacity,
    stride_query_row,
    stride_query_head,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_J: tl.constexpr,
    N_SCALES: tl.constexpr,
):
    WIDTH: tl.constexpr = D // PARTS
    row_head = tl.program_id(1).to(tl.int64)
    row = row_head // H
    head = row_head % H
    page = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    n_pages = tl.minimum(tl.load(n_pages_ptr + row), max_pages)
    exists = page < n_pages
    group = tl.arange(0, BLOCK_G)
    m_group = group < G
    # [G, J] order of pages within the (row, head) plane of every array
    o_page = row_head * capacity + page.to(tl.int64)
    p_query = query_ptr + row * stride_query_row + (head * G + group)[:, None] * stride_query_head

    channel = tl.arange(0, BLOCK_D)
    m_channel = channel < D
    b_query = tl.load(p_query + channel[None, :], mask=m_group[:, None] & m_channel[None, :], other=0.0)
    p_centroid = centroid_ptr + o_page[:, None] * D + channel[None, :]
    b_centroid = tl.load(p_centroid, mask=exists[:, None] & m_channel[None, :], other=0).to(tl.float32)
    p_scale = scales_ptr + o_page * N_SCALES
    centroid_scale = tl.load(p_scale, mask=exists, other=0.0).to(tl.float32)
    b_centre = tl.dot(b_centroid, tl.trans(b_query.to(tl.float32)), input_precision="ieee")  # [J, G]
    b_centre = b_centre * centroid_scale[:, None]

    token = tl.arange(0, P)
    b_logit = tl.zeros((BLOCK_J, P, BLOCK_G), dtype=tl.float32)
    width = tl.arange(0, BLOCK_W)
    m_width = width < WIDTH
    for i_column in range(R):
        b_projected = tl.zeros((BLOCK_J, BLOCK_G), dtype=tl.float32)
        p_basis = basis_ptr + (o_page[:, None] * R + i_column) * WIDTH + width[None, :]
        b_packed = tl.load(p_basis, mask=exists[:, None] & m_width[None, :], other=0)
        for part in tl.static_range(PARTS):
            m_part = m_group[:, None] & m_width[None, :]
            b_query_part = tl.load(p_query + part * WIDTH + width[None, :], mask=m_part, other=0.0)
            if BITS >= 8:
                b_code = b_packed.to(tl.float32)
            else:
                b_code = (b_packed.to(tl.int32) >> (BITS * part)) & ((1 << BITS) - 1)
                b_code = (b_code - (1 << (BITS - 1))).to(tl.float32)
            b_projected += tl.dot(b_code, tl.trans(b_query_part.to(tl.float32)), input_precision="ieee")
        if BITS < 16:
            column_scale = tl.load(p_scale + 1 + P + i_column, mask=exists, other=0.0).to(tl.float32)
            b_projected = b_projected * column_scale[:, None]
        p_coefficient = coefficients_ptr + (o_page[:, None] * P + token[None, :]) * R + i_column
        b_coefficient = tl.load(p_coefficient, mask=exists[:, None], other=0).to(tl.float32)  # [J, P]
        b_logit += b_coefficient[:, :, None] * b_projected[:, None, :]

    token_scale = tl.load(p_scale[:, None] + 1 + token[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
    b_logit = b_logit * (token_scale * scaling)[:, :, None]
    largest = tl.max(b_logit, axis=1)
    b_lse = largest + tl.log(tl.sum(tl.exp(b_logit - largest[:, None, :]), axis=1)) + b_centre * scaling
    b_lse = tl.where(exists[:, None], b_lse, float("-inf"))
    p_lse = lse_ptr + (row_head * G + group[None, :]) * max_pages + page[:, None]
    tl.store(p_lse, b_lse, mask=(page < max_pages)[:, None] & m_group[None, :])


def score_triton(
    query: torch.Tensor,
    summaries: dict[str, torch.Tensor],
    n_pages: torch.Tensor,
    max_pages: int,
    layout: SummaryLayout,
    scaling: float,
) -> torch.Tensor:
    """Launch the kernel; arguments and result as in :func:`locks_hf.kernels.score.score`."""
    batch, n_kv_heads, capacity, head_dim = summaries["centroid"].shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    summaries = {name: array.contiguous() for name, array in summaries.items()}
    group = query.shape[1] // n_kv_heads
    lse = torch.empty((batch, n_kv_heads, group, max_pages), dtype=torch.float32, device=query.device)
    block_pages = 16
    _score_kernel[(triton.cdiv(max_pages, block_pages), batch * n_kv_heads)](
        query,
        summaries["basis"],
        summaries["coefficients"],
        summaries["centroid"],
        summaries["scales"],
        n_pages,
        lse,
        scaling,
        max_pages,
        capacity,
        query.stride(0),
        query.stride(1),
        H=n_kv_heads,
        G=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        D=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        P=layout.page_size,
        R=layout.rank,
        BITS=layout.basis_bits,
        PARTS=layout.codes_per_byte,
        BLOCK_W=max(16, triton.next_power_of_2(layout.basis_width)),
        BLOCK_J=block_pages,
        N_SCALES=layout.n_scales,
        num_warps=4,
    )
    return lse
