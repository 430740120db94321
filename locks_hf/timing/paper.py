"""The paper's efficiency tables, as stored in ``paper/``."""

from __future__ import annotations

import csv
from importlib import resources

from .run import tokens

TABLES = ("b13", "b14", "c22", "c23")


def read_table(name: str) -> list[dict]:
    """Rows of Table B.13, B.14, C.22 or C.23.

    Args:
        name: One of :data:`TABLES`.

    Returns:
        Dicts; numbers are floats, empty fields ``None``, ``context`` and ``batch`` ints, and ``"OOM"`` stays a string.
    """
    text = (resources.files(__package__) / "paper" / f"table_{name}.csv").read_text(encoding="utf-8")
    return [{key: _value(key, field) for key, field in row.items()} for row in csv.DictReader(text.splitlines())]


def _value(name: str, field: str) -> object:
    if name == "context":
        return tokens(field)
    if name == "batch":
        return int(field)
    if name == "method" or field == "OOM":
        return field
    return float(field) if field else None
