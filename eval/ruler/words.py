"""Random keys and values: word pairs, seven-digit numbers, UUIDs."""

from __future__ import annotations

import hashlib
import random
import uuid
from functools import cache
from importlib import resources


@cache
def word_lists() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Adjectives and nouns of the package ``wonderwords``, each sorted and without repeats.

    Raises:
        ModuleNotFoundError: If ``wonderwords`` is not installed; the message names the command that installs
            it.
    """
    try:
        assets = resources.files("wonderwords.assets")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the keys of the needle tasks are made from the word lists of the package wonderwords, which is "
            "not installed: pip install wonderwords==3.0.1"
        ) from error
    lists = ((assets / f"{name}list.txt").read_text(encoding="utf-8").split("\n") for name in ("adjective", "noun"))
    adjectives, nouns = (tuple(sorted({word.strip() for word in words} - {""})) for words in lists)
    return adjectives, nouns


def words_identity() -> str:
    """A hash of the word lists, which differ between versions of ``wonderwords``."""
    return hashlib.sha256("\n".join(" ".join(words) for words in word_lists()).encode()).hexdigest()[:16]


def random_item(kind: str, rng: random.Random) -> str:
    """A random key or value.

    Args:
        kind: ``"words"`` (adjective-noun), ``"numbers"`` (seven digits) or ``"uuids"`` (version 4).
        rng: Source of randomness.

    Raises:
        ValueError: If ``kind`` is none of these.
    """
    if kind == "words":
        adjectives, nouns = word_lists()
        return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    raise ValueError(f"kind must be 'words', 'numbers' or 'uuids', got {kind!r}")
