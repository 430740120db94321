"""Triton kernels of a decode step: those of scoring, selection and attention, and one that ends it.

Nothing waits for the host: lengths are read on the device, and the grids follow the capacity of the cache. The scoring
writes the new token; the counts move on in the last kernel, after all others have read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..attend.triton import attend_splits, combine_options, combined_output
from ..backend import launching, programmatic_launch
from ..layout import SummaryLayout
from ..score.triton import score_pages
from ..select.triton import select_step
from ..summarize.reference import RANK_TOLERANCE, REFIT_RIDGE
from ..summarize.triton import packed_channels, summarize_options, summarize_page, summarize_warps


@triton.jit
def _end_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    keys_ptr,
    counts_ptr,
    lengths_ptr,
    added_ptr,
    basis_ptr,
    coefficients_ptr,
    centroid_ptr,
    token_scales_ptr,
    scales_ptr,
    rank_tolerance,
    ridge_factor,
    capacity,
    n_splits,
    n_rows,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
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
    """Combine the splits of one query head; one more program a (row, KV head) summarises the page that is complete."""
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // H
    g = tl.program_id(1)
    if PDL:
        # What follows may start while the attention still runs: it waits for the end of this kernel, which waits for
        # that of the attention. So only weights may be read before that wait, as by a linear layer, which fetches them
        # while the memory idles. No other kernel may let its successor start before its own wait: by that alone all
        # that is older than the attention has ended when this kernel and its successor start. So here everything but
        # the attention's results can be read at once.
        gdc_launch_dependents()
    added = tl.load(added_ptr + row)  # 1, or 0 for padding, or -1 for a token without room
    if g < G:
        if PDL:
            gdc_wait()
        channel = tl.arange(0, BLOCK_D)
        b_out = combined_output(partial_out_ptr, partial_lse_ptr, row_head, g, n_splits, G, D, BLOCK_D, BLOCK_S)
        b_out = tl.where(added == 0, 0.0, tl.where(added < 0, float("nan"), b_out))
        tl.store(out_ptr + (row_head * G + g) * D + channel, b_out.to(out_ptr.dtype.element_ty), mask=channel < D)
    else:
        length = tl.load(lengths_ptr + row)
        if (added > 0) & (length % P == 0):  # the attention, which takes as long, does not look at summaries
            page = (length // P - 1).to(tl.int64)
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
                N_SCALES,
                RUNS,
            )
        if PDL:
            gdc_wait()
        if row_head % H == 0:
            tl.store(counts_ptr + row, tl.load(counts_ptr + row) + (added != 0).to(tl.int32))
            if row == 0:
                tl.store(counts_ptr + n_rows, tl.load(counts_ptr + n_rows) + 1)


@launching
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
    group, page_size = query.shape[1] // n_kv_heads, layout.page_size
    launch = programmatic_launch(query.device)
    if query.stride(-1) != 1:  # here, for attention reads it before the kernel in front of it has ended
        query = query.contiguous()
    step = (key, value, real, keys, values)
    lse, partial = score_pages(query, summaries, counts, capacity // page_size, layout, scaling, step)
    pages, lengths, added = select_step(lse, partial, counts, real, rule, page_size, slots)
    partial_out, partial_lse = attend_splits(query, keys, values, pages, lengths, page_size, scaling, launch, slots)
    out = torch.empty((batch, n_kv_heads * group, head_dim), dtype=query.dtype, device=query.device)
    n_splits = partial_out.shape[1]
    sizes = combine_options(n_splits, head_dim)
    warps = max(sizes["num_warps"], summarize_warps(head_dim, page_size))
    _end_kernel[(batch * n_kv_heads, group + 1)](
        partial_out,
        partial_lse,
        out,
        keys,
        counts,
        lengths,
        added,
        *(summaries[name] for name in ("basis", "coefficients", "centroid", "token_scales", "scales")),
        RANK_TOLERANCE,
        REFIT_RIDGE,
        capacity,
        n_splits,
        batch,
        H=n_kv_heads,
        G=group,
        **launch,
        **{**sizes, **summarize_options(layout, refit, warps)},
    )
    return out
