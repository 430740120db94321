"""Page selection for the CPU, in NumPy."""

from __future__ import annotations

import numpy as np
import torch

from ..backend import LARGEST, finite


def combine_cpu(lse: torch.Tensor, n_pages: torch.Tensor, rule: str) -> torch.Tensor:
    """One rank value per page and KV head; see :func:`locks_hf.kernels.select.combine`."""
    mass, past_end = lse.detach().numpy(), None
    if set(n_pages.tolist()) != {mass.shape[3]}:
        past_end = np.arange(mass.shape[3]) >= n_pages.numpy().reshape(-1, 1, 1)  # (B, 1, J)
        mass = np.where(past_end[:, :, None], np.float32(-np.inf), mass)
    axis = 2 if rule == "mass" else 3
    with np.errstate(all="ignore"):
        # What is subtracted is finite, so that a page of infinite mass gets no smaller value than the others.
        largest = finite(np.maximum.reduce(mass, axis=axis, keepdims=True))
        mass = mass - largest
        np.exp(mass, out=mass)
        total = np.add.reduce(mass, axis=axis, keepdims=True)
        if rule == "mass":
            value = (np.log(total) + largest)[:, :, 0]
        elif rule == "share":
            mass /= total
            value = np.add.reduce(mass, axis=2) / np.float32(mass.shape[2])
        else:
            mass /= total
            value = np.maximum.reduce(mass, axis=2)
    if past_end is not None:
        np.copyto(value, -np.inf, where=past_end)
    return torch.from_numpy(value)


def top_pages_cpu(value: torch.Tensor, lengths: torch.Tensor, page_size: int, slots: int) -> torch.Tensor:
    """The first, the most recent and the best other pages; see :func:`locks_hf.kernels.select.top_pages`."""
    batch, n_kv_heads = value.shape[:2]
    values = value.detach().numpy()
    pages = np.full((batch, n_kv_heads, slots), -1, dtype=np.int32)
    wanted = slots - 2
    for row, length in enumerate(lengths.tolist()):
        n_total = -(-length // page_size)
        if n_total <= slots:
            pages[row, :, :n_total] = np.arange(n_total)
            continue
        pages[row, :, 0], pages[row, :, -1] = 0, n_total - 1
        if wanted:
            # All pages between the first and the most recent one are complete. NaN counts as the largest value.
            others = np.fmin(values[row, :, 1 : n_total - 1], LARGEST)
            pages[row, :, 1:-1] = _largest_of_each(others, wanted) + 1
    return torch.from_numpy(pages)


def _largest_of_each(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` largest of each row of ``(H, n)``, ascending, the lower index among equals first."""
    least = np.partition(values, -count, axis=1)[:, -count, None]
    chosen = values >= least
    if np.count_nonzero(chosen) != len(values) * count:  # more are equal to the least than fit
        for row, row_least, row_chosen in zip(values, least, chosen, strict=True):
            surplus = np.count_nonzero(row_chosen) - count
            if surplus:
                row_chosen[np.flatnonzero(row == row_least)[-surplus:]] = False
    return np.nonzero(chosen)[1].reshape(len(values), count)
