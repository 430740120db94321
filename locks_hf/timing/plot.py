"""Plots of stored cells."""

from __future__ import annotations

from pathlib import Path

from .arms import parse_arm
from .paper import read_table
from .run import show_tokens
from .tables import ok_cells, speedup


def plot_runs(cells: dict[str, list[dict]], output: Path) -> list[Path]:
    """Draw what there is: step times and speed-ups by context, speed-ups by batch, latency of long generations.

    Args:
        cells: Cells by subcommand.
        output: Directory of the PNG files.

    Returns:
        The files written.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed and there is something to draw.
    """
    decode, long = (ok_cells(cells.get(kind, [])) for kind in ("decode", "longgen"))
    if not decode and not long:
        return []
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib, which is not installed: pip install 'matplotlib>=3.9'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    drawn = []
    with plt.rc_context({"figure.dpi": 150, "axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": "small"}):
        for name, draw, data in (("decode", _decode, decode), ("batches", _batches, decode), ("longgen", _long, long)):
            figure = draw(plt, data)
            if figure is not None:
                for panel in figure.axes:
                    if panel.get_yscale() == "log":  # less than a decade has one power of ten
                        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                path = output / f"{name}.png"
                figure.savefig(path)
                plt.close(figure)
                drawn.append(path)
    return drawn


def _label_contexts(panel, contexts: list[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(contexts, labels=[show_tokens(context) for context in contexts])
    panel.minorticks_off()
    panel.set_xlabel("context (tokens)")


def _decode(plt, cells: list[dict]):
    if not cells:
        return None
    batch = min(cell["cell"]["batch"] for cell in cells)
    here = [cell for cell in cells if cell["cell"]["batch"] == batch]
    contexts = sorted({cell["cell"]["context"] for cell in here})
    figure, (times, gains) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for index, arm in enumerate(dict.fromkeys(cell["cell"]["arm"] for cell in here)):
        line = sorted((c for c in here if c["cell"]["arm"] == arm), key=lambda c: c["cell"]["context"])
        x, y = [c["cell"]["context"] for c in line], [c["ms_mean"] for c in line]
        low, high = zip(*((c["ms_mean"] - c["ms_sd"], c["ms_mean"] + c["ms_sd"]) for c in line), strict=True)
        colour = f"C{index % 10}"
        times.plot(x, y, marker="o", color=colour, label=parse_arm(arm).label)
        times.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        points = [(c["cell"]["context"], speedup(here, c)) for c in line]
        points = [(context, gain) for context, gain in points if gain is not None]
        if parse_arm(arm).kind != "user" and arm != "none" and points:
            gains.plot(*zip(*points, strict=True), marker="o", color=colour, label=parse_arm(arm).label)
    paper = [(row["context"], row["speedup"]) for row in read_table("c22") if row["speedup"]]
    paper = [(context, gain) for context, gain in paper if context in contexts]
    if paper and batch == 1:
        gains.plot(*zip(*paper, strict=True), linestyle="--", color="black", label="paper, r8i4, H200 NVL")
    times.set_ylabel(f"ms a decode step, batch {batch} (band: sd)")
    times.set_yscale("log")
    gains.set_ylabel("times the fastest dense backend")
    for panel in (times, gains):
        _label_contexts(panel, contexts)
        if panel.get_legend_handles_labels()[1]:
            panel.legend()
    return figure


def _batches(plt, cells: list[dict]):
    locks = [cell for cell in cells if parse_arm(cell["cell"]["arm"]).locks]
    if len({cell["cell"]["batch"] for cell in locks}) < 2:
        return None
    arms = list(dict.fromkeys(cell["cell"]["arm"] for cell in locks))
    figure, panels = plt.subplots(1, len(arms), figsize=(1 + 4.5 * len(arms), 4), squeeze=False, layout="constrained")
    for panel, arm in zip(panels[0], arms, strict=True):
        for index, context in enumerate(sorted({cell["cell"]["context"] for cell in locks})):
            line = [c for c in locks if (c["cell"]["arm"], c["cell"]["context"]) == (arm, context)]
            points = sorted((c["cell"]["batch"], gain) for c in line if (gain := speedup(cells, c)) is not None)
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", color=f"C{index}", label=show_tokens(context))
            paper = [
                (row["batch"], row["speedup"])
                for row in read_table("c23")
                if row["context"] == context and isinstance(row["speedup"], float)
            ]
            if arm == "locks-r8i4" and paper:
                panel.plot(
                    *zip(*paper, strict=True), linestyle="--", color=f"C{index}", label=f"{show_tokens(context)} paper"
                )
        panel.set_title(parse_arm(arm).label)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_xlabel("batch")
        panel.set_ylabel("times the fastest dense backend")
        if panel.get_legend_handles_labels()[1]:
            panel.legend()
    return figure


def _long(plt, cells: list[dict]):
    if not cells:
        return None
    figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
    for cell in cells:
        itl, what = cell["itl_ms"], cell["cell"]
        width = what["new"] / len(itl)
        panel.plot([(i + 0.5) * width for i in range(len(itl))], itl, linewidth=0.8, label=parse_arm(what["arm"]).label)
    values = sorted(ms for cell in cells for ms in cell["itl_ms"])
    panel.set_ylim(0, 1.5 * values[int(0.99 * (len(values) - 1))])  # a growth of the cache would hide the rest
    panel.set_xlabel(f"new tokens after a prompt of {show_tokens(cells[0]['cell']['prompt'])}")
    panel.set_ylabel("ms a token")
    panel.legend()
    return figure
