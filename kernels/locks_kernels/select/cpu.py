"""Page selection for the CPU, where the host reads the lengths of the rows for nothing."""

from __future__ import annotations

import math

import torch

from .reference import combine_reference, top_pages_reference

_LARGEST = torch.finfo(torch.float32).max


def combine_cpu(lse: torch.Tensor, n_pages: torch.Tensor, rule: str) -> torch.Tensor:
    """One rank value per page and KV head; see :func:`locks_hf.kernels.select.combine`.

    The shares are a softmax in base 2. Rows of unequal length, and the rule ``"mass"``, take the reference.
    """
    if rule == "mass" or set(n_pages.tolist()) != {lse.shape[-1]}:
        return combine_reference(lse, n_pages, rule)
    # Finite, so that a page of infinite mass gets the whole share; a NaN stays.
    lse = lse.clamp(max=_LARGEST)
    mass = (lse - lse.amax(dim=-1, keepdim=True)).mul_(1 / math.log(2)).exp2_()
    share = mass.div_(mass.sum(dim=-1, keepdim=True))
    return share.mean(dim=2) if rule == "share" else share.amax(dim=2)


def top_pages_cpu(value: torch.Tensor, lengths: torch.Tensor, page_size: int, slots: int) -> torch.Tensor:
    """The first, the most recent and the best other pages; see :func:`locks_hf.kernels.select.top_pages`.

    Rows of unequal numbers of pages, and rows with no more pages than slots, take the reference.
    """
    totals = {-(-length // page_size) for length in lengths.tolist()}
    n_total = max(totals, default=0)
    if len(totals) != 1 or n_total <= slots:
        return top_pages_reference(value, lengths, page_size, slots)
    value = value[..., : n_total - 1].nan_to_num(nan=_LARGEST, posinf=_LARGEST, neginf=float("-inf"))
    value[..., 0] = float("inf")
    # A stable sort keeps the lower index first among equals. The most recent page comes on top of the best others.
    best = value.sort(dim=-1, descending=True, stable=True).indices[..., : slots - 1]
    pages = value.new_empty((*value.shape[:2], slots), dtype=torch.int32)
    pages[..., : slots - 1] = best.sort(dim=-1).values
    pages[..., -1] = n_total - 1
    return pages
