"""From samples to result rows, and from rows to markdown tables."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import NoneType

from .arms import Arm
from .ruler import TASKS
from .store import ARM_KEYS, SAMPLE_KINDS, read_samples, sample_arm

# Settings that rows in one table have in common.
_COMPARED = (
    *("benchmark", "protocol", "model", "model_identity", "dtype", "seed", "max_new_tokens"),
    *("chat_template", "haystack", "words"),
)
_NUMBER = (int, float)
_ROW_KINDS = {
    **{name: kinds for name, kinds in SAMPLE_KINDS.items() if name in ("task", "length", *ARM_KEYS)},
    "n": int,
    "score": _NUMBER,
    "stderr": (*_NUMBER, NoneType),
    "tokens_attended": (*_NUMBER, NoneType),
    "bytes_read_per_step": (*_NUMBER, NoneType),
}
_TASK_ORDER = {name: place for place, name in enumerate(TASKS)}


def make_rows(samples: Sequence[dict]) -> list[dict]:
    """Average the samples of each (task, length, arm).

    Returns:
        Rows of ``results.json``: ``score`` and its standard error ``stderr`` (sample standard deviation over
        sqrt(n); ``None`` for one sample) in percent, ``tokens_attended`` and ``bytes_read_per_step`` as means
        over the samples that had a decode step (``None`` if none had). The order of the samples does not
        matter.
    """
    groups = defaultdict(dict)
    for sample in samples:
        groups[sample["length"], sample["task"], sample_arm(sample)][sample["index"]] = sample
    rows = []
    for length, task, arm in sorted(groups, key=lambda g: (g[0], _TASK_ORDER.get(g[1], len(TASKS)), g[1], g[2].order)):
        group = [sample for _, sample in sorted(groups[length, task, arm].items())]
        scores = [sample["score"] for sample in group]
        mean = _mean(scores)
        stderr = None
        if len(scores) > 1:
            variance = math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
            stderr = math.sqrt(variance / len(scores))
        rows.append(
            {
                "benchmark": "ruler",
                "task": task,
                "length": length,
                "selector": arm.selector,
                "rank": arm.rank,
                "basis_bits": arm.basis_bits,
                "refit": arm.refit,
                "budget": arm.budget,
                "n": len(scores),
                "score": mean,
                "stderr": stderr,
                "tokens_attended": _mean([sample["tokens_attended"] for sample in group]),
                "bytes_read_per_step": _mean([sample["bytes_read_per_step"] for sample in group]),
            }
        )
    return rows


def read_rows(directory: Path) -> list[dict]:
    """Result rows of a run's directory: from its samples, or from ``results.json`` where those were not kept.

    Raises:
        ValueError: If there is neither, nothing in them, or something else; the message names the file.
    """
    results = directory / "results.json"
    if (directory / "samples.jsonl").exists():
        rows = make_rows(read_samples(directory / "samples.jsonl")[0])
    elif results.exists():
        rows = _read_object(results).get("rows")
        if not isinstance(rows, list):
            raise ValueError(f"{results} is not the results file of a run: it has no list of rows")
        for number, row in enumerate(rows, 1):
            _check_row(row, f"row {number} of {results}")
    else:
        raise ValueError(f"{directory} holds neither samples.jsonl nor results.json: give the directory of a run")
    if not rows:
        raise ValueError(f"the run in {directory} holds no finished records yet")
    return rows


def read_settings(directory: Path) -> dict:
    """What a run's directory says of its settings, in ``config.json`` or else in ``results.json``.

    Returns:
        The settings; empty if the files say nothing.

    Raises:
        ValueError: If a file is not that of a run.
    """
    if (directory / "config.json").exists():
        return _read_object(directory / "config.json")
    if (directory / "results.json").exists():
        config = _read_object(directory / "results.json").get("config")
        return config if isinstance(config, dict) else {}
    return {}


def check_comparable(settings: Mapping[Path, dict]) -> None:
    """Refuse to show runs together that did not answer the same questions with the same model.

    Tasks, lengths, records, arms and batches may differ. What a run does not say, it cannot differ in.

    Args:
        settings: Settings of each run's directory.

    Raises:
        ValueError: If two runs differ in another setting; the message names it and both values.
    """
    for (one, there), (other, here) in combinations(settings.items(), 2):
        # A model has many names (paths), so these count only where nothing better is known.
        unnamed = {"model"} if "model_identity" in there.keys() & here.keys() else set()
        for name in _COMPARED:
            if name in there.keys() & here.keys() - unnamed and there[name] != here[name]:
                raise ValueError(
                    f"{one} and {other} cannot be shown together: {name} is {there[name]!r} in the first and "
                    f"{here[name]!r} in the second"
                )


def _read_object(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a file of a run: it holds no JSON object")
    return content


def _check_row(row: object, where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no object: {row!r:.80}")
    for name, kinds in _ROW_KINDS.items():
        if name not in row:
            raise ValueError(f"{where} has no {name}")
        if not isinstance(row[name], kinds):
            raise ValueError(f"{where} has {row[name]!r:.80} for {name}")


def merge_rows(runs: Mapping[Path, Sequence[dict]]) -> list[dict]:
    """Rows of several runs as one list.

    Args:
        runs: Rows of each run's directory.

    Raises:
        ValueError: If two runs have a row for the same task, length and arm: a table cannot show both.
    """
    owner, merged = {}, []
    for directory, rows in runs.items():
        for row in rows:
            key = (row["task"], row["length"], sample_arm(row))
            if key in owner:
                raise ValueError(
                    f"{owner[key]} and {directory} both have {row['task']} at length {row['length']} for "
                    f"{sample_arm(row).label}: show them one at a time"
                )
            owner[key] = directory
        merged += rows
    return merged


def average_tasks(rows: Sequence[dict], tasks: Sequence[str]) -> tuple[float, float | None] | None:
    """Unweighted mean over tasks with its standard error, both in percent.

    Args:
        rows: Rows of one (length, arm).
        tasks: Tasks to average.

    Returns:
        Mean and standard error (``None`` where a task has only one sample), or ``None`` if a task is missing.
    """
    cells = {row["task"]: row for row in rows}
    if not all(task in cells for task in tasks):
        return None
    errors = [cells[task]["stderr"] for task in tasks]
    stderr = None if None in errors else math.sqrt(math.fsum(e * e for e in errors)) / len(errors)
    return _mean([cells[task]["score"] for task in tasks]), stderr


def tasks_of(rows: Sequence[dict]) -> list[str]:
    """Tasks that occur in the rows, in the order of the task table."""
    return sorted({row["task"] for row in rows}, key=lambda task: (_TASK_ORDER.get(task, len(TASKS)), task))


def make_tables(rows: Sequence[dict]) -> str:
    """Markdown tables of arms against tasks, one for each length and budget.

    Arms without a budget are in every table of their length.
    """
    tables = []
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["length"] == length]
        tasks = tasks_of(here)
        for budget in sorted({row["budget"] for row in here} - {None}) or [None]:
            arms = defaultdict(list)
            for row in here:
                if row["budget"] in (None, budget):
                    arms[sample_arm(row)].append(row)
            tables.append(_table(length, budget, tasks, arms))
    return "\n\n".join(tables)


def _table(length: int, budget: int | None, tasks: list[str], arms: dict[Arm, list[dict]]) -> str:
    counts = sorted({row["n"] for rows in arms.values() for row in rows})
    records = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    setting = f"length {length}, budget {budget}" if budget else f"length {length}"
    noun = "record" if counts == [1] else "records"
    title = f"RULER, {setting}, {records} {noun} a cell, percent ± stderr"
    header = ["selector", *(TASKS[task].short if task in TASKS else task for task in tasks), "Avg"]
    lines = [[*header, "tokens/step", "KiB/step"]]
    for arm in sorted(arms, key=lambda arm: arm.order):
        cells = {row["task"]: row for row in arms[arm]}
        average = average_tasks(arms[arm], tasks)
        lines.append(
            [
                arm.label,
                *(_score(cells[task]["score"], cells[task]["stderr"]) if task in cells else "-" for task in tasks),
                _score(*average) if average else "-",
                _number(_mean([row["tokens_attended"] for row in arms[arm]]), 1),
                _number(_mean([row["bytes_read_per_step"] for row in arms[arm]]), 1024),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in lines]
    return "\n".join([f"**{title}**", "", *(f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:]))])


def _score(score: float, stderr: float | None) -> str:
    return f"{score:.1f}" if stderr is None else f"{score:.1f} ±{stderr:.1f}"


def _number(value: float | None, unit: int) -> str:
    return "-" if value is None else f"{value / unit:.0f}"


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there."""
    values = [value for value in values if value is not None]
    return math.fsum(values) / len(values) if values else None
