"""The one configuration object of the package."""

from __future__ import annotations

from dataclasses import dataclass

COMBINE_RULES = ("share", "max", "mass")
BASIS_BITS = (2, 4, 8, 16)


@dataclass(frozen=True)
class LocksConfig:
    """What a cache keeps per page and how much of it a decode step reads.

    Attributes:
        rank: Columns of the per-page basis, 1 to ``page_size - 1`` (a centred page has no higher rank).
        budget: Tokens attended per (layer, KV head) and decode step; rounded up to whole pages. At least two
            pages: the first page and the most recent one always take a slot each.
        page_size: Tokens a page, a power of two from 4 to 64.
        basis_bits: Bits per basis entry: 2, 4, 8, or 16 for an unquantised bf16 basis.
        refit: Solve for the coefficients against the quantised basis and centroid (same bytes, smaller error).
            ``False`` is the paper's rule, the plain projection ``C = D V``.
        combine: How the query heads of one KV head agree on a page set: ``"share"`` (mean of the page shares, the
            paper's rule), ``"max"`` (largest share), ``"mass"`` (sum of the unnormalised masses).
        max_cache_len: Fixed capacity in tokens, or ``None`` to grow as needed.

    Raises:
        ValueError: If a value is outside its range; the message names the value and the range.
    """

    rank: int = 8
    budget: int = 2048
    page_size: int = 16
    basis_bits: int = 4
    refit: bool = True
    combine: str = "share"
    max_cache_len: int | None = None

    def __post_init__(self):
        for name in ("rank", "budget", "page_size", "basis_bits"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an int, got {value!r}")
        if not isinstance(self.refit, bool):
            raise ValueError(f"refit must be True or False, got {self.refit!r}")
        if not 4 <= self.page_size <= 64 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two from 4 to 64, got {self.page_size}")
        if not 1 <= self.rank <= self.page_size - 1:
            raise ValueError(
                f"rank must be from 1 to page_size - 1 = {self.page_size - 1}, got {self.rank}: "
                "a centred page has at most that many directions"
            )
        if self.basis_bits not in BASIS_BITS:
            raise ValueError(f"basis_bits must be one of {BASIS_BITS}, got {self.basis_bits}")
        if self.budget < 2 * self.page_size:
            raise ValueError(
                f"budget must be at least two pages = {2 * self.page_size} tokens (the first and the most recent "
                f"page are always attended), got {self.budget}"
            )
        if self.combine not in COMBINE_RULES:
            raise ValueError(f"combine must be one of {COMBINE_RULES}, got {self.combine!r}")
        if self.max_cache_len is not None:
            if isinstance(self.max_cache_len, bool) or not isinstance(self.max_cache_len, int):
                raise ValueError(f"max_cache_len must be an int or None, got {self.max_cache_len!r}")
            if self.max_cache_len < 1:
                raise ValueError(f"max_cache_len must be at least 1 token, got {self.max_cache_len}")

    @property
    def page_slots(self) -> int:
        """Page slots ``k = ceil(budget / page_size)``."""
        return -(-self.budget // self.page_size)

    @property
    def whole_budget(self) -> int:
        """The budget in whole pages, in tokens: what is no longer is attended densely."""
        return self.page_slots * self.page_size
