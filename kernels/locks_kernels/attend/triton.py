"""Triton kernels of attention over chosen pages: partial softmax per split, then one combination.

Bytes: the chosen keys and values, read once, ``2 * slots * P * d`` entries per (row, KV head). The G query heads of a
KV head share each load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..backend import interpreting, launching
from ..select.triton import RankedPages, Search, best_pages, counted


@dataclass(frozen=True)
class AttendSettings:
    """How the slots of a row are dealt to programs.

    Attributes:
        block_tokens: Tokens attended at a time.
        slots_per_split: Slots of a program.
        warps: Warps a program.
    """

    block_tokens: int
    slots_per_split: int
    warps: int = 4


def attend_settings(head_dim: int, page_size: int, rows: int, slots: int) -> AttendSettings:
    """Settings for a shape.

    Args:
        head_dim: Channels of a key.
        page_size: Tokens a page.
        rows: Batch rows times KV heads.
        slots: Pages to attend.
    """
    block_tokens = 64 if head_dim <= 128 else 32
    pages_per_block = max(1, block_tokens // page_size)
    # 512 programs fill any current GPU, and a split below four pages is not worth its combination.
    splits = min(triton.cdiv(512, rows), triton.cdiv(slots, 4))
    return AttendSettings(block_tokens, triton.cdiv(triton.cdiv(slots, splits), pages_per_block) * pages_per_block)


@triton.jit
def _attend_split_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    pages_ptr,
    lengths_ptr,
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
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
    CHOOSE: tl.constexpr,
    HAS_REAL: tl.constexpr,
    GROUP: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Attend the pages of a few slots of one (row, KV head); to ``CHOOSE``, find out first which pages these are."""
    split = tl.program_id(0)
    row_head = tl.program_id(1).to(tl.int64)
    row = row_head // H
    head = row_head % H
    group = tl.arange(0, BLOCK_G)
    channel = tl.arange(0, BLOCK_D)
    m_group = group < G
    m_channel = channel < D
    p_query = query_ptr + row * stride_query_row + (head * G + group)[:, None] * stride_query_head + channel[None, :]
    b_query = tl.load(p_query, mask=m_group[:, None] & m_channel[None, :], other=0.0)
    if UPCAST:
        b_query = b_query.to(tl.float32)
    if CHOOSE:
        _, length, _ = counted(counts_ptr, real_ptr, row, capacity // P, P, HAS_REAL)
    if PDL:  # in a decode step the query and the counts are older than the kernel before, the keys of pages are not
        gdc_wait()
        gdc_launch_dependents()
    if not CHOOSE:
        length = tl.minimum(tl.load(lengths_ptr + row), capacity)
    p_head = row * stride_kv_row + head * stride_kv_head

    b_max = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_G,), dtype=tl.float32)
    b_out = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    first = split * slots_per_split
    last = tl.minimum(first + slots_per_split, slots)
    if CHOOSE:
        own = row_head * n_splits + split
        p_pages = pages_ptr + own * slots_per_split
        best_pages(
            key_ptr + row_head * n_keys,
            group_key_ptr + row_head * (n_keys // GROUP),
            groups_ptr + own * BLOCK_K,
            p_pages,
            (length + P - 1) // P,
            n_keys // GROUP,
            slots,
            first,
            last,
            GROUP,
            C,
            S,
            BLOCK_K,
        )
        tl.debug_barrier()
    else:
        p_pages = pages_ptr + row_head * slots + first
    offset = tl.arange(0, BLOCK_N)
    for start in range(first * P, last * P, BLOCK_N):  # a block may hold several pages or a part of one
        slot = (start + offset) // P
        page = tl.load(p_pages + slot - first, mask=slot < last, other=-1)
        token = page.to(tl.int64) * P + (start + offset) % P
        real = (page >= 0) & (token < length)
        m_token = real[:, None] & m_channel[None, :]
        o_token = p_head + token[:, None] * stride_kv_token + channel[None, :]
        b_key = tl.load(keys_ptr + o_token, mask=m_token, other=0.0)
        b_value = tl.load(values_ptr + o_token, mask=m_token, other=0.0)  # on its way while the logits are made
        if UPCAST:
            b_key = b_key.to(tl.float32)
            b_value = b_value.to(tl.float32)
        b_logit = tl.dot(b_query, tl.trans(b_key), input_precision="ieee").to(tl.float32) * scaling
        b_logit = tl.where(real[None, :], b_logit, float("-inf"))
        larger = tl.maximum(b_max, tl.max(b_logit, axis=1))
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        b_weight = tl.exp(b_logit - safe[:, None])
        rescale = tl.exp(b_max - safe)
        b_out = b_out * rescale[:, None]
        b_out += tl.dot(b_weight.to(b_value.dtype), b_value, input_precision="ieee")
        b_sum = b_sum * rescale + tl.sum(b_weight, axis=1)
        b_max = larger

    # A split of empty slots only has sum 0: it stores a zero output with log-sum-exp -inf, which weighs nothing.
    b_lse = tl.where(b_sum > 0, b_max + tl.log(tl.where(b_sum > 0, b_sum, 1.0)), float("-inf"))
    b_lse = tl.where(b_sum != b_sum, float("nan"), b_lse)
    b_out = b_out / tl.where(b_sum == 0, 1.0, b_sum)[:, None]
    o_partial = (row_head * n_splits + split) * G + group
    tl.store(partial_lse_ptr + o_partial, b_lse, mask=m_group)
    p_out = partial_out_ptr + o_partial[:, None] * D + channel[None, :]
    tl.store(p_out, b_out, mask=m_group[:, None] & m_channel[None, :])


@triton.jit
def _attend_combine_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    n_splits,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    channel = tl.arange(0, BLOCK_D)
    b_out = combined_output(partial_out_ptr, partial_lse_ptr, row_head, g, n_splits, G, D, BLOCK_D, BLOCK_S)
    tl.store(out_ptr + (row_head * G + g) * D + channel, b_out.to(out_ptr.dtype.element_ty), mask=channel < D)


@triton.jit
def combined_output(
    partial_out_ptr,
    partial_lse_ptr,
    row_head,
    g,
    n_splits,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Output of one query head from its splits, float32 ``[BLOCK_D]``; zeros for a row without tokens."""
    channel = tl.arange(0, BLOCK_D)
    split = tl.arange(0, BLOCK_S)
    m_split = split < n_splits
    o_partial = (row_head * n_splits + split) * G + g
    b_lse = tl.load(partial_lse_ptr + o_partial, mask=m_split, other=float("-inf"))
    p_part = partial_out_ptr + o_partial[:, None] * D + channel[None, :]
    b_part = tl.load(p_part, mask=m_split[:, None] & (channel < D)[None, :], other=0.0)
    largest = tl.max(b_lse, axis=0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    b_weight = tl.exp(b_lse - safe)
    total = tl.sum(b_weight, axis=0)
    return tl.sum(b_part * b_weight[:, None], axis=0) / tl.where(total == 0, 1.0, total)


@launching
def attend_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scaling: float,
) -> torch.Tensor:
    """Launch the kernels; arguments and result as in :func:`locks_hf.kernels.attend.attend`."""
    batch, n_kv_heads, _, head_dim = keys.shape
    group = query.shape[1] // n_kv_heads
    partial_out, partial_lse = attend_splits(query, keys, values, pages, lengths, page_size, scaling)
    n_splits = partial_out.shape[1]
    out = torch.empty((batch, n_kv_heads * group, head_dim), dtype=query.dtype, device=query.device)
    _attend_combine_kernel[(batch * n_kv_heads, group)](
        partial_out, partial_lse, out, n_splits, G=group, D=head_dim, **combine_options(n_splits, head_dim)
    )
    return out


def attend_splits(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor | RankedPages,
    lengths: torch.Tensor,
    page_size: int,
    scaling: float,
    launch: dict[str, bool] | None = None,
    slots: int = 0,
    settings: AttendSettings | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the slots of each split.

    Args:
        query: As in :func:`locks_hf.kernels.attend.attend`, and the others up to ``scaling``.
        keys: Likewise.
        values: Likewise.
        pages: Likewise, or what ``slots`` of them are to be chosen from.
        lengths: Likewise.
        page_size: Likewise.
        scaling: Likewise.
        launch: Launch options, in a decode step.
        slots: Pages to choose, at least 2.
        settings: By default those of :func:`attend_settings`.

    Returns:
        Outputs of the splits, float32 ``(B * H, splits, G, d)``, and the log-sum-exp of their logits.
    """
    batch, n_kv_heads, _, head_dim = keys.shape
    if keys.stride() != values.stride() or keys.stride(-1) != 1:
        keys, values = keys.contiguous(), values.contiguous()
    if query.stride(-1) != 1:
        query = query.contiguous()
    group, device = query.shape[1] // n_kv_heads, query.device
    key = group_key = groups = search = counts = real = None
    if isinstance(pages, RankedPages):
        key, group_key, counts, real = pages.key, pages.group_key, pages.counts, pages.real
        search = Search.of(pages, slots)
    else:
        pages = pages.contiguous()
        slots = pages.shape[-1]
    if settings is None:
        settings = attend_settings(head_dim, page_size, batch * n_kv_heads, slots)
    n_splits = triton.cdiv(slots, settings.slots_per_split)
    by_hand = search is not None and _by_hand(query, page_size, group)
    in_registers = by_hand and settings.slots_per_split == 4 and settings.block_tokens <= 4 * page_size
    if search is not None:
        programs = batch * n_kv_heads * n_splits
        pages = None
        if not in_registers:
            pages = torch.empty((programs, settings.slots_per_split), dtype=torch.int32, device=device)
        groups = torch.empty((programs, search.block_slots), dtype=torch.int32, device=device)
    partial_out = torch.empty((batch * n_kv_heads, n_splits, group, head_dim), dtype=torch.float32, device=device)
    partial_lse = torch.empty((batch * n_kv_heads, n_splits, group), dtype=torch.float32, device=device)
    arrays = (query, keys, values, pages)
    outputs = (partial_out, partial_lse)
    sizes = (scaling, slots, settings.slots_per_split, n_splits, keys.shape[2], 0 if key is None else key.shape[1])
    strides = (query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2))
    shape = {"H": n_kv_heads, "G": group, "D": head_dim, "P": page_size, "BLOCK_N": settings.block_tokens}
    launch = launch or {"PDL": False}
    if by_hand:
        from .gluon import attend_kernel

        attend_kernel[(n_splits, batch * n_kv_heads)](
            *arrays,
            key,
            group_key,
            groups,
            counts,
            real,
            *outputs,
            *sizes,
            *strides,
            **shape,
            **launch,
            **search.runs(),
            FOUR=in_registers,
            HAS_REAL=real is not None,
        )
        return outputs

    _attend_split_kernel[(n_splits, batch * n_kv_heads)](
        *arrays,
        lengths,
        key,
        group_key,
        groups,
        counts,
        real,
        *outputs,
        *sizes,
        *strides,
        **shape,
        **launch,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        UPCAST=interpreting() and query.dtype == torch.bfloat16,  # the interpreter cannot multiply bf16 matrices
        CHOOSE=search is not None,
        HAS_REAL=real is not None,
        **({"GROUP": 1, "C": 1, "S": 1, "BLOCK_K": 1} if search is None else search.constants()),
        num_warps=settings.warps if search is None else max(settings.warps, search.warps),
        num_stages=1 if settings.slots_per_split * page_size <= settings.block_tokens else 3,
    )
    return outputs


def _by_hand(query: torch.Tensor, page_size: int, group: int) -> bool:
    """Whether the kernel with layouts chosen by hand fits; the interpreter has none."""
    return (
        not interpreting()
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] in (64, 128, 256)
        and page_size == 16
        and group <= 16
    )


def combine_options(n_splits: int, head_dim: int) -> dict[str, int]:
    """Sizes for :func:`combined_output`."""
    block_splits, block_d = triton.next_power_of_2(n_splits), max(16, triton.next_power_of_2(head_dim))
    return {"BLOCK_S": block_splits, "BLOCK_D": block_d, "num_warps": 4 if block_splits * block_d <= 8192 else 8}
