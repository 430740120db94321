"""Which logical positions of each batch row hold real tokens.

A cache counts positions the way the model does, padding included; storage holds real tokens only. This ledger maps the
one to the other, cheaply: a run of appends without padding is one segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class _Segment:
    size: int
    real: torch.Tensor | None  # bool (B, size) on the CPU, or None: all real


@dataclass
class RowLedger:
    """Logical and real lengths of the rows of one layer.

    Attributes:
        batch: Rows.
        seen: Logical positions, padding included, the same for all rows.
        lengths: Real tokens of each row.
    """

    batch: int
    seen: int = 0
    lengths: list[int] = field(default_factory=list)
    segments: list[_Segment] = field(default_factory=list)

    def __post_init__(self):
        if not self.lengths:
            self.lengths = [0] * self.batch

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same real length."""
        return len(set(self.lengths)) <= 1

    @property
    def all_real(self) -> bool:
        """Whether no position of any row is padding."""
        return all(segment.real is None for segment in self.segments)

    def append(self, size: int, real: torch.Tensor | None) -> None:
        """Add ``size`` positions; ``real`` marks the real tokens, bool ``(B, size)`` on the CPU (``None``: all)."""
        self.seen += size
        if real is None:
            self.lengths = [length + size for length in self.lengths]
            if self.segments and self.segments[-1].real is None:
                self.segments[-1].size += size
                return
        else:
            self.lengths = [length + new for length, new in zip(self.lengths, real.sum(1).tolist(), strict=True)]
        self.segments.append(_Segment(size, real))

    def drop_last(self, size: int) -> None:
        """Remove the last ``size`` positions (all of them if there are fewer)."""
        size = min(size, self.seen)
        self.seen -= size
        while size:
            last = self.segments[-1]
            removed = min(size, last.size)
            if last.real is None:
                self.lengths = [length - removed for length in self.lengths]
            else:
                gone = last.real[:, last.size - removed :].sum(1).tolist()
                self.lengths = [length - n for length, n in zip(self.lengths, gone, strict=True)]
                last.real = last.real[:, : last.size - removed]
            last.size -= removed
            size -= removed
            if last.size == 0:
                self.segments.pop()

    def take_rows(self, rows: list[int]) -> None:
        """Replace the rows by the given ones, in order; a row may occur several times or not at all."""
        self.batch = len(rows)
        self.lengths = [self.lengths[row] for row in rows]
        for segment in self.segments:
            if segment.real is not None:
                segment.real = segment.real[rows]

    def copy(self) -> RowLedger:
        """An independent copy."""
        segments = [_Segment(s.size, None if s.real is None else s.real.clone()) for s in self.segments]
        return RowLedger(self.batch, self.seen, list(self.lengths), segments)


def check_mask_rows(mask: torch.Tensor, rows: int) -> None:
    """Refuse a padding mask that does not have one row for each of the batch.

    Raises:
        ValueError: If it has more or fewer.
    """
    if mask.shape[0] != rows:
        raise ValueError(f"the attention mask has {mask.shape[0]} rows for a batch of {rows}: pass one row each")


class PaddingReader:
    """Reads from attention masks which new tokens are real, once for all layers of a forward pass."""

    def __init__(self):
        self._mask: torch.Tensor | None = None
        self._size = 0
        self._reader = 0
        self._real: torch.Tensor | None = None

    def new_tokens(
        self, mask: torch.Tensor | None, rows: int, seen: int, size: int, reader: int
    ) -> torch.Tensor | None:
        """Which of the ``size`` positions after the first ``seen`` are real.

        Args:
            mask: Padding mask ``(B, positions)``, true at real tokens, or ``None``: no padding. As in Transformers its
                first column is the first position ever seen, and columns past the new positions are ignored.
            rows: Rows of the batch.
            seen: Positions seen before.
            size: New positions.
            reader: Who asks. A reader asks once per forward pass, so that its second question starts a new pass.

        Returns:
            bool ``(B, size)`` on the CPU, or ``None`` if all are real.

        Raises:
            ValueError: If the mask has fewer than ``seen + size`` positions or not one row for each of the batch.
        """
        if mask is None:
            return None
        check_mask_rows(mask, rows)
        if mask.shape[1] < seen + size:
            raise ValueError(
                f"the attention mask covers {mask.shape[1]} positions, but {seen} are cached and {size} new: pass "
                "a mask over all tokens, cached ones included"
            )
        # All layers get the same mask object; reading it from the device once spares a wait per layer. Between passes
        # its content may change.
        if mask is not self._mask or size != self._size or reader == self._reader:
            real = mask[:, seen : seen + size].to(device="cpu", dtype=torch.bool, copy=True)
            self._mask, self._size, self._reader = mask, size, reader
            self._real = None if bool(real.all()) else real
        return self._real
