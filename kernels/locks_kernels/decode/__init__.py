"""A whole decode step of one layer as one operation that needs nothing from the host.

It is registered with ``torch.library`` as ``locks_hf::decode_step``, so that compiled models call it without a graph
break. All that changes from step to step lives in tensors it updates in place.
"""

from __future__ import annotations

import functools

import torch

from ..backend import check_head_dim_and_dtype, check_page_size, check_row_counts, implementation
from ..layout import SummaryLayout
from ..select import RULES
from .cpu import decode_step_cpu
from .reference import decode_step_reference

__all__ = ["decode_step", "decode_step_reference"]


def decode_step(
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
    """Append one token a row, summarise the pages it completes, select pages and attend them (paper Sec. 4).

    Args:
        query: Post-RoPE queries ``(B, H * G, d)``, fp32, bf16 or fp16.
        key: Post-RoPE keys ``(B, H, d)``, same dtype.
        value: Values ``(B, H, d)``.
        real: bool ``(B,)``; where false the row's token is padding: it is not appended and its output is zero.
            ``None``: all real.
        keys: Cached keys ``(B, H, capacity, d)``, with ``capacity`` a multiple of the page size; updated.
        values: Cached values, likewise.
        summaries: Arrays of :meth:`SummaryLayout.fields` with leading dimensions ``(B, H, capacity / P)``; updated.
        counts: int32 ``(B + 1,)``: cached tokens of each row, then logical positions seen; updated.
        layout: Sizes of the summaries.
        refit: Rule of the coefficients; see :func:`locks_hf.kernels.summarize.summarize`.
        rule: How query heads agree; see :func:`locks_hf.kernels.select.combine`.
        slots: Pages to attend, at least 2. Rows with no more pages attend all they have.
        scaling: Factor on the logits.

    Returns:
        ``(B, H * G, d)``. A row that has no room left for its token gets NaN, and nothing is written past its end.

    Raises:
        ValueError: If shapes or dtypes disagree or are not supported.
    """
    batch, heads, capacity, head_dim = keys.shape
    if key.shape != (batch, heads, head_dim) or value.shape != key.shape or values.shape != keys.shape:
        raise ValueError(
            f"key and value must be {(batch, heads, head_dim)} for a cache of {tuple(keys.shape)} and "
            f"{tuple(values.shape)}, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    group = query.shape[1] // heads if query.ndim == 3 else 0
    if query.shape != (batch, heads * group, head_dim) or not query.numel():
        raise ValueError(
            f"query {tuple(query.shape)} does not fit keys of {batch} rows, {heads} KV heads, head_dim {head_dim}"
        )
    if not query.dtype == key.dtype == value.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"query, keys and values must share a dtype, got {query.dtype}, {key.dtype}, {value.dtype}, {keys.dtype} "
            f"and {values.dtype}"
        )
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError(f"keys and values are updated in place: make them contiguous, strides are {keys.stride()}")
    check_head_dim_and_dtype(head_dim, keys.dtype)
    check_page_size(layout.page_size)
    check_row_counts("counts", counts, batch + 1, None)
    if capacity % layout.page_size:
        raise ValueError(f"the capacity {capacity} must be a multiple of the page size {layout.page_size}")
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    if not isinstance(slots, int) or slots < 2:
        raise ValueError(f"slots must be an int of at least 2 (the first and the most recent page), got {slots}")
    if counts.device.type == "cpu" and not torch.compiler.is_compiling() and min(counts.tolist()) < 0:
        raise ValueError(f"counts must not be negative, got {counts.tolist()}")
    if not torch.compiler.is_compiling():
        _check_summaries(summaries, layout, (batch, heads, capacity // layout.page_size))
    if real is not None and (real.shape != (batch,) or real.dtype != torch.bool):
        raise ValueError(f"real must be bool ({batch},), got {real.dtype} {tuple(real.shape)}")
    state = (summaries, counts, layout, refit, rule, slots, scaling)
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        # On a CPU the dispatch of a registered operation costs as much as a good part of the step.
        return _run(query, key, value, real, keys, values, *state)
    return torch.ops.locks_hf.decode_step(
        query,
        key,
        value,
        real,
        keys,
        values,
        summaries["basis"],
        summaries["coefficients"],
        summaries["centroid"],
        summaries["token_scales"],
        summaries["scales"],
        counts,
        layout.rank,
        layout.page_size,
        layout.basis_bits,
        refit,
        rule,
        slots,
        scaling,
    )


@functools.lru_cache
def _expected(layout: SummaryLayout, leading: tuple[int, int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: ((*leading, *shape), dtype) for name, (shape, dtype) in layout.fields().items()}


def _check_summaries(summaries: dict[str, torch.Tensor], layout: SummaryLayout, leading: tuple[int, int, int]) -> None:
    for name, (shape, dtype) in _expected(layout, leading).items():
        array = summaries.get(name)
        if array is None or array.shape != shape or array.dtype != dtype:
            got = "nothing" if array is None else f"{array.dtype} {tuple(array.shape)}"
            raise ValueError(f"summaries[{name!r}] must be {dtype} {shape} for {layout}, got {got}")


def _run(query: torch.Tensor, *arguments) -> torch.Tensor:
    form = implementation(query.device)
    if form == "triton":
        from .triton import decode_step_triton

        return decode_step_triton(query, *arguments)
    step = decode_step_cpu if form == "cpu" else decode_step_reference
    if not torch.is_autocast_enabled(query.device.type):  # entering the context costs more than asking
        return step(query, *arguments)
    with torch.autocast(query.device.type, enabled=False):
        return step(query, *arguments)


@torch.library.custom_op(
    "locks_hf::decode_step",
    mutates_args=(
        "keys",
        "values",
        "basis",
        "coefficients",
        "centroid",
        "token_scales",
        "scales",
        "counts",
    ),
)
def _decode_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    basis: torch.Tensor,
    coefficients: torch.Tensor,
    centroid: torch.Tensor,
    token_scales: torch.Tensor,
    scales: torch.Tensor,
    counts: torch.Tensor,
    rank: int,
    page_size: int,
    basis_bits: int,
    refit: bool,
    rule: str,
    slots: int,
    scaling: float,
) -> torch.Tensor:
    layout = SummaryLayout(query.shape[-1], rank, page_size, basis_bits)
    summaries = {
        "basis": basis,
        "coefficients": coefficients,
        "centroid": centroid,
        "token_scales": token_scales,
        "scales": scales,
    }
    state = (summaries, counts, layout, refit, rule, slots, scaling)
    return _run(query, key, value, real, keys, values, *state)


@_decode_step.register_fake
def _(query, *args) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)
