"""The exact-LSE oracle: the same ranking from every cached key (paper Sec. 2). A reference, not a fast path."""

from __future__ import annotations

import torch

from ..config import LocksConfig
from ..kernels import combine, top_pages
from .base import Fields, PageSelector, PageView


def exact_page_lse(
    query: torch.Tensor, keys: torch.Tensor, n_complete: torch.Tensor, page_size: int, scaling: float
) -> torch.Tensor:
    """Exact log-sum-exp of each complete page's logits (paper Eq. 1).

    Args:
        query: ``(B, H * G, d)``.
        keys: ``(B, H, T, d)`` with ``T`` a multiple of ``page_size``.
        n_complete: Complete pages of each row, int32 ``(B,)``.
        page_size: Tokens a page.
        scaling: Factor on the logits.

    Returns:
        float32 ``(B, H, G, T / page_size)``, ``-inf`` for pages a row does not have.
    """
    grouped = query.float().unflatten(1, (keys.shape[1], -1))
    logits = (grouped @ keys.float().transpose(-1, -2)) * scaling
    lse = torch.logsumexp(logits.unflatten(-1, (-1, page_size)), dim=-1)
    past_end = torch.arange(lse.shape[-1], device=lse.device) >= n_complete.view(-1, 1)
    return lse.masked_fill(past_end[:, None, None, :], float("-inf"))


class OracleSelector(PageSelector):
    """Selects by exact page mass; reads all keys each step."""

    name = "oracle"

    def summary_fields(self, config: LocksConfig, head_dim: int, dtype: torch.dtype) -> Fields:
        """No summaries."""
        return {}

    def summarize(self, keys: torch.Tensor, config: LocksConfig) -> dict[str, torch.Tensor]:
        """No summaries."""
        return {}

    def select(self, query: torch.Tensor, pages: PageView, config: LocksConfig, scaling: float) -> torch.Tensor:
        """Exact page mass, combined over the group, then the top pages."""
        n_pages = pages.open_pages(config.page_size)
        complete_tokens = pages.max_length // config.page_size * config.page_size
        keys = pages.keys[:, :, :complete_tokens]
        lse = exact_page_lse(query, keys, n_pages, config.page_size, scaling)
        value = combine(lse, n_pages, config.combine)
        return top_pages(value, pages.lengths, config.page_size, config.page_slots)

    def score_bytes(self, config: LocksConfig, n_pages: int, head_dim: int, dtype: torch.dtype) -> int:
        """All keys of the complete pages."""
        return n_pages * config.page_size * head_dim * dtype.itemsize
