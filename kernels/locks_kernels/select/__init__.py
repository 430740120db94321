"""Page scores to the set of pages a decode step attends."""

from __future__ import annotations

import torch

from ..backend import check_page_size, check_row_counts, implementation
from .cpu import combine_cpu, top_pages_cpu
from .reference import combine_reference, top_pages_reference

__all__ = ["combine", "combine_cpu", "combine_reference", "top_pages", "top_pages_cpu", "top_pages_reference"]

RULES = ("share", "max", "mass")


def combine(lse: torch.Tensor, n_pages: torch.Tensor, rule: str = "share") -> torch.Tensor:
    """Turn the page scores of a group's query heads into one rank value per page (paper Sec. 4, App. C.1).

    Args:
        lse: Page log-sum-exp, float32 ``(B, H, G, J)``.
        n_pages: Complete pages of each row, int32 ``(B,)``; the normaliser runs over all of them.
        rule: ``"share"``: mean over the group of each head's softmax share. ``"max"``: largest share. ``"mass"``: log
            of the summed unnormalised masses.

    Returns:
        float32 ``(B, H, J)``, ``-inf`` for pages a row does not have.

    Raises:
        ValueError: On an unknown rule or a wrong shape.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    if lse.ndim != 4 or lse.dtype != torch.float32:
        raise ValueError(f"lse must be float32 (B, H, G, J), got {lse.dtype} {tuple(lse.shape)}")
    check_row_counts("n_pages", n_pages, lse.shape[0], lse.shape[3])
    form = implementation(lse.device)
    if form == "triton" and lse.shape[-1]:
        from .triton import combine_triton

        return combine_triton(lse, n_pages, rule)
    if form == "cpu" and lse.shape[-1]:
        return combine_cpu(lse, n_pages, rule)
    return combine_reference(lse, n_pages, rule)


def top_pages(value: torch.Tensor, lengths: torch.Tensor, page_size: int, slots: int) -> torch.Tensor:
    """Choose each row's first page, its most recent page and the best of the others.

    Exact: equal values go to the lower page index, and a NaN value counts as the largest.

    Args:
        value: Rank values of complete pages, float32 ``(B, H, J)``.
        lengths: Cached tokens of each row, int32 ``(B,)``. ``lengths // page_size`` pages are complete; one more may be
            incomplete and is then the most recent page.
        page_size: Tokens a page.
        slots: Pages to choose, at least 2.

    Returns:
        Page indices, int32 ``(B, H, slots)``, ascending; rows with fewer pages than slots end in ``-1``.

    Raises:
        ValueError: If ``slots`` is below 2, or shapes or lengths are wrong.
    """
    if not isinstance(slots, int) or slots < 2:
        raise ValueError(f"slots must be an int of at least 2 (the first and the most recent page), got {slots}")
    if value.ndim != 3 or value.dtype != torch.float32:
        raise ValueError(f"value must be float32 (B, H, J), got {value.dtype} {tuple(value.shape)}")
    check_page_size(page_size)
    # One page more than there are values may be incomplete.
    check_row_counts("lengths", lengths, value.shape[0], (value.shape[2] + 1) * page_size - 1)
    form = implementation(value.device)
    if form == "triton":
        from .triton import top_pages_triton

        return top_pages_triton(value, lengths, page_size, slots)
    if form == "cpu":
        return top_pages_cpu(value, lengths, page_size, slots)
    return top_pages_reference(value, lengths, page_size, slots)
