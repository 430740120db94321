"""Arms: the cache settings a run compares on the same records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

from locks_hf.config import LocksConfig
from locks_hf.selectors import SELECTORS

# Settings that change what these selectors do; every other selector depends on all of them.
_MATTERS = {"full": (), "oracle": ("budget",), "quest": ("budget",)}
_ALL = ("rank", "basis_bits", "refit", "budget")


@dataclass(frozen=True)
class Arm:
    """One setting of the cache; ``None`` where a field does not matter to the selector.

    Attributes:
        selector: Name of the page selector.
        rank: Rank of the page summaries.
        basis_bits: Bits per basis entry.
        refit: Whether the coefficients are refitted.
        budget: Tokens attended per (layer, KV head) and step.
    """

    selector: str
    rank: int | None = None
    basis_bits: int | None = None
    refit: bool | None = None
    budget: int | None = None

    def cache_settings(self) -> dict:
        """Keyword arguments for ``LocksCache.fork``."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def label(self) -> str:
        """Selector, rank and bits as tables and legends show them, without the budget."""
        if self.rank is None:
            return self.selector
        return f"{self.selector} r{self.rank}i{self.basis_bits}{' refit' if self.refit else ''}"

    @property
    def order(self) -> tuple:
        """Sort key: full first, then oracle, then by falling rank, Quest last."""
        place = {"full": 0, "oracle": 1, "quest": 3}.get(self.selector, 2)
        return (
            place,
            self.selector,
            self.budget or 0,
            -(self.rank or 0),
            -(self.basis_bits or 0),
            not self.refit,
        )

    @property
    def run_order(self) -> tuple:
        """Sort key that puts arms with the same summaries next to each other, so that these are built once."""
        place, selector, budget, *summaries = self.order
        return (place, selector, *summaries, budget)


def make_arms(
    selectors: Sequence[str],
    budgets: Sequence[int],
    ranks: Sequence[int],
    basis_bits: Sequence[int],
    refits: Sequence[bool],
) -> list[Arm]:
    """All combinations, each once, with the fields that do not matter to a selector left out.

    Of budgets that are the same in whole pages, the largest stands for all.

    Returns:
        Arms without repeats, in ``Arm.order``.

    Raises:
        ValueError: If a selector is unknown (the message lists those that exist) or a setting is outside its
            range.
    """
    arms = set()
    for selector in selectors:
        if selector not in SELECTORS:
            raise ValueError(f"unknown selector {selector!r}; there are: {', '.join(sorted(SELECTORS))}")
    distinct = {LocksConfig(budget=budget).whole_budget: budget for budget in sorted(budgets)}.values()
    for selector, *values in product(selectors, ranks, basis_bits, refits, distinct):
        settings = dict(zip(_ALL, values, strict=True))
        LocksConfig(**settings)
        arms.add(Arm(selector, **{name: settings[name] for name in _MATTERS.get(selector, _ALL)}))
    return sorted(arms, key=lambda arm: arm.order)
