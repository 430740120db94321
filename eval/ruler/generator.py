"""Prompts of a wanted length: as much haystack as fits, with the needles in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from transformers.utils import chat_template_utils

from ..haystack import Haystack
from .tasks import NEEDLE, NOISE_LINE, NeedleTask
from .words import random_item

CHAT_TEMPLATES = ("none", "chat")
# Some templates print a date; every run has to print the same one.
CHAT_DATE = datetime(2024, 7, 26)

_DEPTHS = tuple(round(100 * i / 39) for i in range(40))


@dataclass(frozen=True)
class Record:
    """One prompt.

    Attributes:
        task: Task name.
        length: Wanted length in tokens.
        index: Number of the record within (task, length).
        text: What the model reads, answer prefix and chat markup included.
        references: Values asked for.
        tokens: Tokens of ``text`` (without a BOS token added by the tokenizer) plus the new tokens.
    """

    task: str
    length: int
    index: int
    text: str
    references: tuple[str, ...]
    tokens: int


class NeedleGenerator:
    """Makes the records of one (task, length).

    Each record depends on (seed, task, length, index, tokenizer, haystack, ``max_new_tokens``, chat template)
    alone: not on how many records there are, nor on which were made before.

    Args:
        task: Entry of ``TASKS``.
        length: Upper bound in tokens: ``len(tokenizer.tokenize(text)) + max_new_tokens <= length``.
        tokenizer: Any Hugging Face tokenizer.
        haystack: Text of the essay tasks.
        seed: Base seed.
        max_new_tokens: Tokens left for the answer (upstream: 128).
        chat_template: ``"none"`` for the bare prompt with the answer prefix behind it, ``"chat"`` for the
            tokenizer's chat template with the prefix behind the assistant header.

    Raises:
        ValueError: If not even the smallest haystack fits; the message names the task, the length and the
            least length, estimated from one sample. If the haystack has too few sentences. If ``chat_template``
            is unknown, or ``"chat"`` with a tokenizer that has none, or one that raises.
    """

    def __init__(
        self,
        task: NeedleTask,
        length: int,
        tokenizer,
        *,
        haystack: Haystack,
        seed: int = 42,
        max_new_tokens: int = 64,
        chat_template: str = "none",
    ):
        if chat_template not in CHAT_TEMPLATES:
            raise ValueError(f"chat_template must be one of {CHAT_TEMPLATES}, got {chat_template!r}")
        if chat_template == "chat" and not tokenizer.chat_template:
            raise ValueError("this model's tokenizer has no chat template; use --chat-template none")
        self.task = task
        self.length = length
        self.tokenizer = tokenizer
        self.haystack = haystack
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.chat_template = chat_template
        self.kind = "noise" if task.haystack == "essay" and haystack.is_noise else task.haystack
        # Noise lines need an index for each needle, sentences and distractors one unit at least.
        self.fewest = task.needles if self.kind == "noise" else 1
        self.step = 500 if self.kind == "essay" else 25 if length >= 4096 else 5
        self.units = self._size()
        if self.kind == "essay":
            haystack.check_spread(self.units)

    def record(self, index: int) -> Record:
        """Record ``index`` (0, 1, ...).

        Raises:
            ValueError: If this record does not fit even with the smallest haystack.
        """
        rng = random.Random(f"{self.seed}/{self.task.name}/{self.length}/{index}")
        units = self.units
        while True:
            text, references = self._sample(units, rng)
            tokens = self._tokens(text)
            if tokens <= self.length:
                return Record(self.task.name, self.length, index, text, references, tokens)
            if units == self.fewest:
                raise self._too_short(tokens, f"record {index} of ")
            # Upstream's step, and a smaller one where the haystack is no longer than that.
            units = max(self.fewest, units - (self.step if units > self.step else max(1, units // 10)))

    def _size(self) -> int:
        """Largest number of haystack units found to fit, by bisection over samples of their own."""
        rng = random.Random(f"{self.seed}/{self.task.name}/{self.length}/size")

        def tokens(units: int) -> int:
            return self._tokens(self._sample(units, rng)[0])

        probe = tokens(self.step)
        low, high = self.step, max(int(self.length / (probe / self.step) * 3), 2 * self.step)
        best = None
        if probe > self.length:
            smallest = tokens(self.fewest)
            if smallest > self.length:
                raise self._too_short(smallest)
            best, low, high = self.fewest, self.fewest, self.step
        while low <= high:
            middle = (low + high) // 2
            if tokens(middle) <= self.length:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return self.step if best is None else best

    def _too_short(self, minimum: int, what: str = "") -> ValueError:
        return ValueError(
            f"{what}{self.task.name} does not fit a length of {self.length} tokens: with the shortest haystack and "
            f"{self.max_new_tokens} new tokens it takes {minimum}, an estimate from one record; ask for a length of at "
            f"least {minimum} and some tokens to spare"
        )

    def _tokens(self, text: str) -> int:
        # The bisection looks beyond the model's window on purpose; only fast tokenizers warn about that here.
        quiet = {"verbose": False} if self.tokenizer.is_fast else {}
        return len(self.tokenizer.tokenize(text, **quiet)) + self.max_new_tokens

    def _sample(self, units: int, rng: random.Random) -> tuple[str, tuple[str, ...]]:
        """A random prompt with ``units`` units of haystack, and the values asked for."""
        task = self.task
        keys: list[str] = []
        while len(keys) < task.keys:
            key = random_item(task.key, rng)
            if key not in keys:
                keys.append(key)
        values = {key: [random_item(task.value, rng) for _ in range(task.values)] for key in keys}
        needles = [NEEDLE.format(kind=task.value, key=key, value=value) for key in keys for value in values[key]]
        # Upstream's rule: the same permutation for every record.
        random.Random(self.seed).shuffle(needles)
        context = self._essay(units, needles, rng) if self.kind == "essay" else self._lines(units, needles, keys, rng)
        queries = rng.sample(keys, task.queries)
        references = tuple(value for key in queries for value in values[key])
        return self._wrap(*task.prompt(context, queries)), references

    def _essay(self, units: int, needles: list[str], rng: random.Random) -> str:
        """The first ``units`` words of the text with the needles between its sentences."""
        sentences = list(self.haystack.sentences(units))
        places = sorted(int(len(sentences) * depth / 100) for depth in rng.sample(_DEPTHS, len(needles)))
        for place, needle in zip(reversed(places), reversed(needles), strict=True):
            sentences.insert(place, needle)
        return " ".join(sentences)

    def _lines(self, units: int, needles: list[str], keys: list[str], rng: random.Random) -> str:
        """``units`` noise lines or distracting needles with the needles between them."""
        if self.kind == "noise":
            lines = [NOISE_LINE] * units
        else:
            lines = []
            while len(lines) < units:
                key = random_item(self.task.key, rng)
                if key not in keys:
                    value = random_item(self.task.value, rng)
                    lines.append(NEEDLE.format(kind=self.task.value, key=key, value=value))
        for place in sorted(rng.sample(range(units), len(needles)), reverse=True):
            lines.insert(place, needles.pop())
        return "\n".join(lines)

    def _wrap(self, text: str, prefix: str) -> str:
        if self.chat_template == "none":
            return text + prefix
        messages = [{"role": "user", "content": text}]
        date = CHAT_DATE.strftime("%d %b %Y")
        try:
            with _clock_stopped():
                header = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, date_string=date
                )
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(
                f"the tokenizer's chat template does not take a single user message ({error}); use --chat-template none"
            ) from error
        return header + prefix


class _StoppedClock:
    """Stands in for ``datetime`` where templates ask for the time."""

    @staticmethod
    def now() -> datetime:
        return CHAT_DATE


@contextmanager
def _clock_stopped() -> Iterator[None]:
    """Have ``strftime_now`` of chat templates give ``CHAT_DATE``; a function of ours cannot be handed to them."""
    clock = chat_template_utils.datetime
    chat_template_utils.datetime = _StoppedClock
    try:
        yield
    finally:
        chat_template_utils.datetime = clock
