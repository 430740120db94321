"""Locks: rank pages by the log-sum-exp of logits rebuilt from spectral summaries (paper Sec. 4)."""

from __future__ import annotations

import functools

import torch

from ..config import LocksConfig
from ..kernels import SummaryLayout, combine, score, summarize, top_pages
from .base import Fields, PageSelector, PageView


@functools.lru_cache
def _bytes_per_page(layout: SummaryLayout) -> int:
    return layout.bytes_per_page


class LocksSelector(PageSelector):
    """Page-local spectral summaries; one page set per KV head."""

    name = "locks"

    def layout(self, config: LocksConfig, head_dim: int) -> SummaryLayout:
        """Sizes of the summaries."""
        return SummaryLayout(head_dim, config.rank, config.page_size, config.basis_bits)

    def summary_fields(self, config: LocksConfig, head_dim: int, dtype: torch.dtype) -> Fields:
        """The packed arrays of :class:`locks_hf.kernels.SummaryLayout`."""
        return self.layout(config, head_dim).fields()

    def summarize(self, keys: torch.Tensor, config: LocksConfig) -> dict[str, torch.Tensor]:
        """Quantised centroid, basis and coefficients of each page."""
        return summarize(keys, self.layout(config, keys.shape[-1]), config.refit)

    def select(self, query: torch.Tensor, pages: PageView, config: LocksConfig, scaling: float) -> torch.Tensor:
        """Estimated page mass, combined over the group, then the top pages."""
        n_pages = pages.open_pages(config.page_size)
        layout = self.layout(config, query.shape[-1])
        max_complete = pages.max_length // config.page_size
        lse = score(query, pages.summaries, n_pages, max_complete, layout, scaling)
        value = combine(lse, n_pages, config.combine)
        return top_pages(value, pages.lengths, config.page_size, config.page_slots)

    def bytes_per_page(self, config: LocksConfig, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one packed summary."""
        return _bytes_per_page(self.layout(config, head_dim))

    def summary_key(self, config: LocksConfig) -> tuple:
        """Everything that goes into a summary."""
        return (type(self), config.page_size, config.rank, config.basis_bits, config.refit)
