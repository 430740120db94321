"""The task table and the wording of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NOISE_LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."

_ONE_ANSWER = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
_ONE_ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text is"
_MORE_ANSWERS = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
_MORE_ANSWERS_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"


@dataclass(frozen=True)
class NeedleTask:
    """One needle task.

    Attributes:
        name: Task name, as on the command line.
        short: Column heading in tables.
        haystack: What surrounds the needles: ``"noise"`` lines, ``"essay"`` text, or other ``"needle"``
            lines.
        key: Kind of the keys, ``"words"`` or ``"uuids"``.
        value: Kind of the values, ``"numbers"`` or ``"uuids"``.
        keys: Distinct keys planted.
        values: Values planted per key.
        queries: Keys asked for.
    """

    name: str
    short: str
    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def needles(self) -> int:
        """Needles planted in one prompt."""
        return self.keys * self.values

    def prompt(self, context: str, queries: Sequence[str]) -> tuple[str, str]:
        """The user text and the answer prefix.

        Args:
            context: Haystack with the needles in it.
            queries: Keys asked for.

        Returns:
            The text and the prefix the answer is to start with (it begins with a space).
        """
        query = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
        if self.queries * self.values == 1:
            kind, text, prefix = self.value.removesuffix("s"), _ONE_ANSWER, _ONE_ANSWER_PREFIX
        else:
            kind, text, prefix = self.value, _MORE_ANSWERS, _MORE_ANSWERS_PREFIX
        return text.format(kind=kind, context=context, query=query), prefix.format(kind=kind, query=query)


TASKS: dict[str, NeedleTask] = {
    task.name: task
    for task in (
        NeedleTask("niah_single_1", "S1", "noise"),
        NeedleTask("niah_single_2", "S2", "essay"),
        NeedleTask("niah_single_3", "S3", "essay", value="uuids"),
        NeedleTask("niah_multikey_1", "MK1", "essay", keys=4),
        NeedleTask("niah_multikey_2", "MK2", "needle"),
        NeedleTask("niah_multikey_3", "MK3", "needle", key="uuids", value="uuids"),
        NeedleTask("niah_multivalue", "MV", "essay", values=4),
        NeedleTask("niah_multiquery", "MQ", "essay", keys=4, queries=4),
    )
}
