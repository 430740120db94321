"""Quest (Tang et al., 2024): rank pages by the upper bound their channel-wise key extremes give.

As in the paper's App. B.2, every query head selects its own pages and the group attends their union, between ``budget``
and ``G * budget`` tokens. The most recent page takes one slot of each head; no other page is forced.
"""

from __future__ import annotations

import torch

from ..config import LocksConfig
from .base import Fields, PageSelector, PageView


def envelope_score(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Upper bound of the unscaled logits of each page, ``sum_c max(q_c low_c, q_c high_c)``.

    Args:
        query: ``(B, H * G, d)``.
        low: Channel minima ``(B, H, J, d)``.
        high: Channel maxima ``(B, H, J, d)``.

    Returns:
        float32 ``(B, H, G, J)``.
    """
    grouped = query.float().unflatten(1, (low.shape[1], -1))
    upper = grouped.clamp(min=0) @ high.float().transpose(-1, -2)
    return upper + grouped.clamp(max=0) @ low.float().transpose(-1, -2)


class QuestSelector(PageSelector):
    """Per-query-head selection by key envelopes; a group attends the union."""

    name = "quest"
    fixed_slots = False

    def summary_fields(self, config: LocksConfig, head_dim: int, dtype: torch.dtype) -> Fields:
        """Channel minima and maxima in the dtype of the keys."""
        return {"low": ((head_dim,), dtype), "high": ((head_dim,), dtype)}

    def summarize(self, keys: torch.Tensor, config: LocksConfig) -> dict[str, torch.Tensor]:
        """Channel minima and maxima of each page."""
        low, high = keys.aminmax(dim=1)
        return {"low": low, "high": high}

    def summary_key(self, config: LocksConfig) -> tuple:
        """The page size alone."""
        return (type(self), config.page_size)

    def select(self, query: torch.Tensor, pages: PageView, config: LocksConfig, scaling: float) -> torch.Tensor:
        """Union over the group of each head's top pages."""
        page_size, slots = config.page_size, config.page_slots
        n_total = (pages.lengths + page_size - 1) // page_size
        max_complete = pages.max_length // page_size
        max_total = -(-pages.max_length // page_size)
        low, high = pages.summaries["low"], pages.summaries["high"]
        value = envelope_score(query, low[:, :, :max_complete], high[:, :, :max_complete])
        value = torch.nn.functional.pad(value, (0, max_total - max_complete))
        page = torch.arange(max_total, device=query.device)
        last = n_total.view(-1, 1, 1, 1) - 1
        largest = torch.finfo(torch.float32).max
        value = value.nan_to_num(nan=largest, posinf=largest, neginf=float("-inf"))
        value = torch.where(page == last, float("inf"), value)
        value = value.masked_fill(page > last, float("-inf"))
        best = torch.sort(value, dim=-1, descending=True, stable=True).indices[..., :slots]
        chosen = torch.zeros(value.shape, dtype=torch.bool, device=query.device).scatter_(-1, best, True)
        union = (chosen & (page <= last)).any(dim=2)  # (B, H, J)
        index = torch.where(union, page, max_total)
        index = index.sort(dim=-1).values[..., : slots * value.shape[2]]
        return torch.where(index < max_total, index, -1).to(torch.int32)
