"""Counters that tell whether decoding was sparse, and what it read."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass
class CacheStats:
    """What a cache did since it was made, reset or forked, and what it holds now.

    It covers the layers whose pages Locks selects; sliding-window and linear layers of hybrid models are left out. A
    decode step is one query token of one forward pass that continues a sequence; prefill tokens are counted apart.

    Attributes:
        sparse_steps: Decode steps in which at least one layer attended a selection of pages.
        dense_steps: Decode steps in which every layer attended every token.
        prefill_tokens: Logical tokens processed densely in blocks (prompts, chunks, continued turns), per row.
        tokens_attended: Mean tokens attended per (layer, KV head, row) and decode step.
        summary_bytes_read_per_step: Mean bytes read to score pages in a decode step, whole batch, all layers.
        kv_bytes_read_per_step: Mean bytes of attended keys and values in a decode step, whole batch, all layers.
        summary_bytes: Bytes of the summaries of the complete pages held.
        summary_bytes_allocated: Bytes allocated for summaries, spare capacity included.
        kv_bytes: Bytes of the keys and values of the cached tokens.
        kv_bytes_allocated: Bytes allocated for keys and values, spare capacity included.
    """

    sparse_steps: int = 0
    dense_steps: int = 0
    prefill_tokens: int = 0
    tokens_attended: float = 0.0
    summary_bytes_read_per_step: float = 0.0
    kv_bytes_read_per_step: float = 0.0
    summary_bytes: int = 0
    summary_bytes_allocated: int = 0
    kv_bytes: int = 0
    kv_bytes_allocated: int = 0

    @property
    def bytes_read_per_step(self) -> float:
        """Mean bytes a decode step reads from the cache: summaries and attended keys and values."""
        return self.summary_bytes_read_per_step + self.kv_bytes_read_per_step

    def asdict(self) -> dict[str, float]:
        """All fields and ``bytes_read_per_step`` as a plain dict."""
        return {**asdict(self), "bytes_read_per_step": self.bytes_read_per_step}


class LayerCounters:
    """Running totals of one layer. Counts that only the device knows stay there until they are asked for."""

    def __init__(self):
        self.sparse_steps = 0
        self.dense_steps = 0
        self.prefill_tokens = 0
        self.rows_attending = 0  # rows summed over decode steps
        self.score_bytes = 0
        self._host_tokens = 0  # attended, summed over decode steps, rows and KV heads
        self._device_tokens: torch.Tensor | None = None

    @property
    def attended_tokens(self) -> int:
        """Attended tokens summed over decode steps, rows and KV heads; waits for the device if it must."""
        return self._host_tokens + (0 if self._device_tokens is None else int(self._device_tokens))

    def add_prefill(self, tokens: int) -> None:
        """Count ``tokens`` logical prefill tokens."""
        self.prefill_tokens += tokens

    def add_dense(self, lengths: npt.ArrayLike, n_kv_heads: int) -> None:
        """Count dense decode steps.

        Args:
            lengths: Tokens that each row attends, ``(B,)`` in one step or ``(B, steps)``.
            n_kv_heads: KV heads.
        """
        lengths = _by_step(lengths)
        self.dense_steps += lengths.shape[1]
        self.rows_attending += lengths.size
        self._host_tokens += int(lengths.sum()) * n_kv_heads

    def add_sparse(
        self,
        lengths: npt.ArrayLike,
        n_kv_heads: int,
        page_size: int,
        slots: int,
        pages: torch.Tensor | None,
        score_bytes: int,
    ) -> None:
        """Count sparse decode steps.

        Args:
            lengths: Cached tokens of each row, ``(B,)`` in one step or ``(B, steps)``.
            n_kv_heads: KV heads.
            page_size: Tokens a page.
            slots: Page slots that are all used where a row has the pages.
            pages: Selected pages ``(B, H, slots)`` of one step, to be counted on the device instead, or ``None``.
            score_bytes: Bytes read to score pages, in all steps.
        """
        lengths = _by_step(lengths)
        self.sparse_steps += lengths.shape[1]
        self.rows_attending += lengths.size
        self.score_bytes += score_bytes
        # The most recent page is always attended, and only its real tokens are.
        missing = int((-lengths % page_size).sum())
        if pages is None:
            used = int(np.minimum(slots, -(-lengths // page_size)).sum())
            self._host_tokens += (used * page_size - missing) * n_kv_heads
        else:
            self._host_tokens -= missing * n_kv_heads
            used_on_device = (pages >= 0).sum() * page_size
            known = self._device_tokens
            self._device_tokens = used_on_device if known is None else known + used_on_device


def _by_step(lengths: npt.ArrayLike) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    return lengths if lengths.ndim == 2 else lengths[:, None]
