"""Page selectors, one a file."""

from __future__ import annotations

from .base import PageSelector, PageView
from .full import FullSelector
from .locks import LocksSelector
from .oracle import OracleSelector
from .quest import QuestSelector

__all__ = [
    "SELECTORS",
    "FullSelector",
    "LocksSelector",
    "OracleSelector",
    "PageSelector",
    "PageView",
    "QuestSelector",
    "resolve_selector",
]

SELECTORS: dict[str, type[PageSelector]] = {
    selector.name: selector for selector in (LocksSelector, OracleSelector, QuestSelector, FullSelector)
}


def resolve_selector(selector: str | PageSelector) -> PageSelector:
    """An instance for a name, or the object itself.

    Raises:
        ValueError: If the name is unknown or the object is not a :class:`PageSelector`.
    """
    if isinstance(selector, PageSelector):
        return selector
    if isinstance(selector, str) and selector in SELECTORS:
        return SELECTORS[selector]()
    raise ValueError(f"selector must be one of {sorted(SELECTORS)} or a PageSelector instance, got {selector!r}")
