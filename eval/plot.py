"""Score against budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .arms import Arm
from .report import average_tasks, tasks_of
from .store import sample_arm


def plot_scores(rows: Sequence[dict], output: Path) -> None:
    """Draw the mean over tasks against the budget: a panel per length, a line per selector and rank.

    Arms without a budget are horizontal lines. Bands are 95 % intervals (1.96 standard errors). An arm that
    lacks one of the tasks at some budget has no point there.

    Args:
        rows: Result rows.
        output: Image file; its ending decides the format.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed; the message names the command that installs it.
        ValueError: If no arm has all the tasks of a length, so that nothing can be drawn, or if the file cannot be
            written or its ending is no image format.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib, which is not installed: pip install 'matplotlib>=3.9'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not output.suffix or output.is_dir():
        raise ValueError(f"cannot write the plot {output}: give a file whose ending names its format, such as plot.png")
    lengths = sorted({row["length"] for row in rows})
    lines = {length: _lines([row for row in rows if row["length"] == length]) for length in lengths}
    if not any(lines.values()):
        raise ValueError(
            "there is nothing to plot: at no length has an arm all the tasks that others have; finish the run, or see "
            "the report"
        )
    figure, panels = plt.subplots(
        1, len(lengths), figsize=(1 + 4.2 * len(lengths), 4), sharey=True, squeeze=False, layout="constrained"
    )
    colours = {}
    for panel, length in zip(panels[0], lengths, strict=True):
        here = [row for row in rows if row["length"] == length]
        tasks = tasks_of(here)
        budgets = sorted({row["budget"] for row in here} - {None})
        for arm, points in sorted(lines[length].items(), key=lambda line: line[0].order):
            colour = colours.setdefault(arm.label, f"C{len(colours)}")
            x, y, stderr = zip(*points, strict=True)
            low = [max(0.0, mean - 1.96 * (error or 0.0)) for mean, error in zip(y, stderr, strict=True)]
            high = [min(100.0, mean + 1.96 * (error or 0.0)) for mean, error in zip(y, stderr, strict=True)]
            if x[0] is None:
                panel.axhline(y[0], color=colour, linestyle="--", label=arm.label)
                panel.axhspan(low[0], high[0], color=colour, alpha=0.12, linewidth=0)
            else:
                panel.plot(x, y, color=colour, marker="o", label=arm.label)
                panel.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        if budgets:
            panel.set_xscale("log", base=2)
            panel.set_xticks(budgets, labels=map(str, budgets))
            panel.minorticks_off()
        panel.set_title(f"RULER, {length} tokens, {len(tasks)} task{'s' if len(tasks) > 1 else ''}")
        panel.set_xlabel("budget (tokens attended per KV head and step)")
        panel.set_ylim(0, 102)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("score, mean over tasks (%)")
    # The panel with the most lines names them all.
    max(panels[0], key=lambda panel: len(panel.get_legend_handles_labels()[1])).legend(fontsize="small")
    try:
        figure.savefig(output, dpi=150)
    except OSError as error:
        raise ValueError(f"cannot write the plot {output}: {error}") from error
    finally:
        plt.close(figure)


def _lines(rows: Sequence[dict]) -> dict[Arm, list[tuple]]:
    """Points ``(budget, mean, standard error)`` of each arm of one length; no arm without a point."""
    tasks = tasks_of(rows)
    arms = defaultdict(list)
    for row in rows:
        arms[sample_arm(row)].append(row)
    lines = defaultdict(list)
    for arm in sorted(arms, key=lambda arm: arm.order):
        average = average_tasks(arms[arm], tasks)
        if average:
            lines[replace(arm, budget=None)].append((arm.budget, *average))
    return lines
