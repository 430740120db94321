"""Sentence splitting with one regular expression, so that nothing has to be downloaded."""

from __future__ import annotations

import re

# A sentence ends at . ! ? or a mark that does their work in Arabic, Devanagari, Chinese or Japanese (with closing
# quotes or brackets) before a space and a letter or digit.
_END = re.compile(r"[.!?؟۔।॥。．！？｡]+[\"'”’)\]»」』）】》〉]* (?=[\"'“‘(\[«„‚「『（【《〈¿¡]*([^\W_]))")
# ... unless the full stop belongs to an initial, a dotted abbreviation or a title.
_NOT_END = re.compile(r"(?:\b[^\W\d_]|\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|cf|No|Fig|Inc|Co|Ltd))\.$")


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
        if _can_open(match[1]) and not _NOT_END.search(text, start, end):
            sentences.append(text[start:end])
            start = match.end()
    if start < len(text):
        sentences.append(text[start:])
    return sentences


def _can_open(character: str) -> bool:
    """Whether a sentence can begin with a letter or digit: any but the lower case of a script with two cases."""
    # Not islower(): Georgian has capitals, but none at the start of a sentence, and its title case says so.
    return character.title() == character
