"""One decode step of a layer from the other operations: append, summarise, score, select, attend."""

from __future__ import annotations

import torch

from ..attend import attend
from ..layout import SummaryLayout
from ..score import score
from ..select import combine, top_pages
from ..summarize import summarize


def decode_step_reference(
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
    """One decode step of a layer; see :func:`locks_hf.kernels.decode.decode_step`."""
    batch, _, capacity, _ = keys.shape
    page_size = layout.page_size
    lengths, rows = counts[:-1], torch.arange(batch, device=keys.device)
    added = torch.ones_like(lengths) if real is None else real.to(lengths.dtype)
    overflow = lengths + added > capacity
    n_pages = lengths // page_size  # the page of the new token is attended anyway, and not scored
    position = lengths.clamp(max=capacity - 1).long()
    written = ((added > 0) & ~overflow)[:, None, None]
    keys[rows, :, position] = torch.where(written, key, keys[rows, :, position])
    values[rows, :, position] = torch.where(written, value, values[rows, :, position])
    lengths += added
    counts[-1] += 1
    lengths = lengths.clamp(max=capacity)

    completed = (added > 0) & ~overflow & (lengths % page_size == 0)
    # Reading this from the device costs a wait there; on the host it saves the work.
    if keys.device.type != "cpu" or bool(completed.any()):
        page = (lengths // page_size - 1).clamp(min=0).long()
        last = keys.unflatten(2, (-1, page_size))[rows, :, page]  # (B, H, P, d)
        for name, array in summarize(last.flatten(0, 1), layout, refit).items():
            new = array.unflatten(0, last.shape[:2])
            kept = summaries[name][rows, :, page]
            chosen = completed.view(-1, *(1,) * (new.ndim - 1))
            summaries[name][rows, :, page] = torch.where(chosen, new, kept)

    longest = capacity if keys.device.type != "cpu" else int(lengths.max())
    if -(-longest // page_size) <= slots:
        pages = torch.arange(slots, dtype=torch.int32, device=keys.device)
        pages = torch.where(pages * page_size < lengths[:, None], pages, -1)
        pages = pages[:, None].expand(-1, keys.shape[1], -1)
    else:
        lse = score(query, summaries, n_pages, longest // page_size, layout, scaling)
        pages = top_pages(combine(lse, n_pages, rule), lengths, page_size, slots)
    out = attend(query, keys, values, pages, lengths, page_size, scaling)
    if real is not None:
        out = out.masked_fill(~real[:, None, None], 0.0)
    return out.masked_fill(overflow[:, None, None], float("nan"))
