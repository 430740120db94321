"""One decode step of a layer on the CPU: the host knows the lengths, so that rows and pages are plain slices."""

from __future__ import annotations

import numpy as np
import torch

from ..attend.cpu import attend_cpu
from ..backend import raw
from ..layout import SummaryLayout
from ..score.cpu import score_cpu
from ..select.cpu import combine_cpu, top_pages_cpu
from ..summarize.cpu import summarize_cpu


def decode_step_cpu(
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
    before = counts[:-1].tolist()
    added = [True] * batch if real is None else real.tolist()
    lengths = [min(length + new, capacity) for length, new in zip(before, added, strict=True)]
    # Through NumPy, whose small operations take a fraction of the time of torch's.
    moving = counts.numpy()
    moving += np.append(added, True)
    states = [(raw(buffer), raw(new)) for buffer, new in ((keys, key), (values, value))]
    complete = []
    for row, (old, new) in enumerate(zip(before, lengths, strict=True)):
        if new > old:
            for buffer, token in states:
                buffer[row, :, old] = token[row]
            if new % page_size == 0:
                complete.append(row)

    longest = max(lengths)
    row_lengths = torch.tensor(lengths, dtype=torch.int32)
    if -(-longest // page_size) <= slots:
        page = torch.arange(slots, dtype=torch.int32)
        pages = torch.where(page * page_size < row_lengths[:, None], page, -1)[:, None].expand(-1, keys.shape[1], -1)
    else:
        n_pages = torch.tensor([min(length, capacity) // page_size for length in before], dtype=torch.int32)
        lse = score_cpu(query, summaries, n_pages, longest // page_size, layout, scaling)
        pages = top_pages_cpu(combine_cpu(lse, n_pages, rule), row_lengths, page_size, slots)
    out = attend_cpu(query, keys, values, pages, row_lengths, page_size, scaling)
    for row in complete:
        page = lengths[row] // page_size - 1
        made = summarize_cpu(keys[row, :, page * page_size : lengths[row]], layout, refit)
        for name, array in made.items():
            summaries[name][row, :, page] = array
    for row, new in enumerate(added):
        if not new:
            out[row] = 0.0
        elif before[row] >= capacity:
            out[row] = float("nan")
    return out
