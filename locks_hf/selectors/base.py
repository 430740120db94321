"""What a page selector is: summaries of complete pages, and a choice of pages for a query."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..config import LocksConfig

Fields = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class PageView:
    """What a selector may see of one layer: keys and summaries, never values.

    Attributes:
        keys: Cached post-RoPE keys ``(B, H, capacity, d)``; a row's tokens past its length are undefined.
        summaries: The selector's arrays, each ``(B, H, page capacity, ...)``; defined for complete pages.
        lengths: Cached tokens of each row, int32 ``(B,)`` on the device of ``keys``.
        max_length: The longest row, in tokens, on the host.
    """

    keys: torch.Tensor
    summaries: dict[str, torch.Tensor]
    lengths: torch.Tensor
    max_length: int

    def open_pages(self, page_size: int) -> torch.Tensor:
        """Pages of each row before that of its most recent token, int32 ``(B,)``: all complete, and not forced."""
        return (self.lengths - 1).clamp(min=0) // page_size


class PageSelector(ABC):
    """Chooses the pages a decode step attends. Stateless: the cache keeps the summaries it makes.

    Subclass it and pass an instance as ``LocksCache(selector=...)``. One instance serves all layers.
    """

    name: ClassVar[str]
    #: A dense selector attends every token; its other methods are never called.
    dense: ClassVar[bool] = False
    #: Whether ``select`` fills exactly ``config.page_slots`` slots wherever a row has that many pages.
    fixed_slots: ClassVar[bool] = True

    @abstractmethod
    def summary_fields(self, config: LocksConfig, head_dim: int, dtype: torch.dtype) -> Fields:
        """Shape per page and dtype of each summary array, for keys of ``dtype`` with ``head_dim`` channels."""

    @abstractmethod
    def summarize(self, keys: torch.Tensor, config: LocksConfig) -> dict[str, torch.Tensor]:
        """Summaries of complete pages: keys ``(N, page_size, d)`` to arrays with a leading dimension ``N``."""

    @abstractmethod
    def select(self, query: torch.Tensor, pages: PageView, config: LocksConfig, scaling: float) -> torch.Tensor:
        """Pages to attend for one query token a row.

        Args:
            query: Post-RoPE queries ``(B, H * G, d)``.
            pages: The layer's keys and summaries; the query's own token is already cached.
            config: The cache's configuration.
            scaling: Factor on the attention logits.

        Returns:
            int32 ``(B, H, slots)`` page indices, no page twice, ``-1`` for empty slots; includes the page of the most
            recent token.
        """

    def summary_key(self, config: LocksConfig) -> tuple:
        """What the summaries depend on: two caches with equal keys can share copies of them.

        By default this instance and all of the configuration that may matter to what is stored. A selector without
        parameters of its own may return its type instead of itself, and leave out what it does not use.
        """
        return (self, config.page_size, config.rank, config.basis_bits, config.refit)

    def score_bytes(self, config: LocksConfig, n_pages: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes one KV head of one row reads in a decode step to score ``n_pages`` complete pages."""
        return n_pages * self.bytes_per_page(config, head_dim, dtype)

    def bytes_per_page(self, config: LocksConfig, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page's summary in one KV head."""
        total = 0
        for shape, field_dtype in self.summary_fields(config, head_dim, dtype).values():
            total += torch.Size(shape).numel() * field_dtype.itemsize
        return total
