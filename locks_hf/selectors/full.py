"""Dense attention behind the selector interface, so that comparisons run one code path."""

from __future__ import annotations

import torch

from ..config import LocksConfig
from .base import Fields, PageSelector, PageView


class FullSelector(PageSelector):
    """Attends every token (FullKV)."""

    name = "full"
    dense = True

    def summary_fields(self, config: LocksConfig, head_dim: int, dtype: torch.dtype) -> Fields:
        """No summaries."""
        return {}

    def summarize(self, keys: torch.Tensor, config: LocksConfig) -> dict[str, torch.Tensor]:
        """No summaries."""
        return {}

    def select(self, query: torch.Tensor, pages: PageView, config: LocksConfig, scaling: float) -> torch.Tensor:
        """Not a choice: dense steps bypass selection.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a dense selector attends every token and selects nothing")
