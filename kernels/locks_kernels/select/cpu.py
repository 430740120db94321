"""Page selection for the CPU, in NumPy."""

from __future__ import annotations

import numpy as np
import torch

from .reference import combine_reference

_LARGEST = np.finfo(np.float32).max


def combine_cpu(lse: torch.Tensor, n_pages: torch.Tensor, rule: str) -> torch.Tensor:
    """One rank value per page and KV head; see :func:`locks_hf.kernels.select.combine`.

    Rows of unequal length, and the rule ``"mass"``, take the reference.
    """
    if rule == "mass" or set(n_pages.tolist()) != {lse.shape[-1]}:
        return combine_reference(lse, n_pages, rule)
    mass = lse.detach().numpy()
    with np.errstate(all="ignore"):
        # What is subtracted is finite, so that a page of infinite mass gets NaN, the largest value of all.
        share = mass - np.minimum(np.maximum.reduce(mass, axis=-1, keepdims=True), _LARGEST)
        np.exp(share, out=share)
        share /= np.add.reduce(share, axis=-1, keepdims=True)
        value = (np.add if rule == "share" else np.maximum).reduce(share, axis=2)
        if rule == "share":
            value /= np.float32(share.shape[2])
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
            others = np.fmin(values[row, :, 1 : n_total - 1], _LARGEST)
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
