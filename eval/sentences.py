"""Sentence splitting with one regular expression, so that nothing has to be downloaded."""

from __future__ import annotations

import re

# A sentence ends at . ! or ? (with closing quotes or brackets) before a space and something that can open the
# next one.
_END = re.compile(r"[.!?]+[\"'”’)\]]* (?=[\"'“‘(\[]*[A-Z0-9])")
# ... unless the full stop belongs to an initial, a dotted abbreviation or a title.
_NOT_END = re.compile(r"(?:\b[A-Za-z]|\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|cf|No|Fig|Inc|Co|Ltd))\.$")


def split_sentences(text: str) -> list[str]:
    """Split text whose whitespace is single spaces.

    Args:
        text: Text without line breaks or runs of spaces.

    Returns:
        Sentences; joined with single spaces they give ``text`` back.
    """
    sentences, start = [], 0
    for match in _END.finditer(text):
        end = match.end() - 1
        if not _NOT_END.search(text, start, end):
            sentences.append(text[start:end])
            start = match.end()
    if start < len(text):
        sentences.append(text[start:])
    return sentences
