"""Markdown tables of stored cells."""

from __future__ import annotations

from collections.abc import Sequence

from .arms import parse_arm
from .profile import TERMS
from .run import NOT_A_MEASUREMENT, show_tokens


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns, the first one to the left."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = [":" + "-" * (max(2, widths[0]) - 1), *("-" * (max(2, width) - 1) + ":" for width in widths[1:])]
    padded = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:]))


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def mean_sd(mean: float | None, sd: float | None, digits: int = 2) -> str:
    """``mean ± sd``."""
    return number(mean, digits) if mean is None or sd is None else f"{mean:.{digits}f} ± {sd:.{digits}f}"


def ok_cells(cells: Sequence[dict]) -> list[dict]:
    """The cells that were measured."""
    return [cell for cell in cells if cell["status"] == "ok"]


def find(cells: Sequence[dict], **what) -> dict | None:
    """The measured cell with these values, or ``None``."""
    return next((c for c in ok_cells(cells) if all(c["cell"].get(name) == v for name, v in what.items())), None)


def fastest_dense(cells: Sequence[dict], context: int, batch: int) -> dict | None:
    """The fastest dense backend's cell at a context and batch, whichever backend that is there."""
    dense = [
        cell
        for cell in ok_cells(cells)
        if (cell["cell"]["context"], cell["cell"]["batch"]) == (context, batch)
        and parse_arm(cell["cell"]["arm"]).is_dense
    ]
    return min(dense, key=lambda cell: cell["ms_mean"], default=None)


def speedup(cells: Sequence[dict], cell: dict) -> float | None:
    """How many times faster a cell is than the fastest dense one of the same context and batch; of none, nothing."""
    if cell["cell"]["arm"] == "none":
        return None
    dense = fastest_dense(cells, cell["cell"]["context"], cell["cell"]["batch"])
    return None if dense is None else dense["ms_mean"] / cell["ms_mean"]


def attention_ms(cells: Sequence[dict], cell: dict) -> float | None:
    """A step's time above that of the step without attention, in milliseconds."""
    where = {name: cell["cell"][name] for name in ("context", "batch")}
    around = find(cells, arm="none", **where)
    return None if around is None or cell is around else cell["ms_mean"] - around["ms_mean"]


def decode_table(cells: Sequence[dict], is_measurement: bool) -> str:
    """Every cell of a decode run."""
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell["cell"]["batch"], cell["cell"]["context"])):
        what = cell["cell"]
        first = [show_tokens(what["context"]), str(what["batch"]), parse_arm(what["arm"]).label]
        if cell["status"] != "ok":
            rows.append([*first, cell["status"], "-", "-", "-", "-", _short(cell.get("reason", ""))])
            continue
        notes = [f"throttled ({cell['throttled']})"] if cell["throttled"] else []
        notes += ["dense step: context within the budget"] if cell.get("dense_step") else []
        notes += [] if cell["settled"] or not is_measurement else ["clocks did not settle"]
        notes += [cell["note"]] if cell.get("note") else []
        rows.append(
            [
                *first,
                mean_sd(cell["ms_mean"], cell["ms_sd"]),
                number(speedup(cells, cell), 2, "x"),
                number(attention_ms(cells, cell)),
                number(cell["tokens_per_s"], 0),
                number(cell["peak_gib"], 1),
                "; ".join(notes),
            ]
        )
    header = ["context", "batch", "arm", "ms/step", "against dense", "attention ms", "tokens/s", "GiB", "remarks"]
    return with_banner(markdown(header, rows), is_measurement)


def profile_table(cells: Sequence[dict]) -> str:
    """Microseconds a step by what kernels are for, of the cells that were profiled; empty if none was."""
    rows = []
    for cell in sorted(ok_cells(cells), key=lambda cell: (cell["cell"]["batch"], cell["cell"]["context"])):
        if profile := cell.get("profile"):
            what = cell["cell"]
            first = [show_tokens(what["context"]), str(what["batch"]), parse_arm(what["arm"]).label]
            terms = [number(profile["terms_us"][term], 0) for term in TERMS]
            rows.append([*first, *terms, number(profile["span_us"], 0), number(profile["kernels"], 0)])
    header = ["context", "batch", "arm, us a step", *TERMS, "all", "kernels"]
    return markdown(header, rows) if rows else ""


def prefill_table(cells: Sequence[dict], is_measurement: bool) -> str:
    """Every cell of a prefill run; TTFT is compared with that of ``locks-full``, the same path without summaries."""
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell["cell"]["batch"], cell["cell"]["context"])):
        what = cell["cell"]
        chunk = "one piece" if what["chunk"] is None else show_tokens(what["chunk"])
        first = [show_tokens(what["context"]), str(what["batch"]), chunk, what["arm"]]
        if cell["status"] != "ok":
            rows.append([*first, cell["status"], "-", "-", "-", _short(cell.get("reason", ""))])
            continue
        share = build_share(cells, cell)
        rows.append(
            [
                *first,
                mean_sd(cell["ttft_s_mean"], cell["ttft_s_sd"], 3),
                mean_sd(cell.get("build_ms_mean"), cell.get("build_ms_sd"), 1),
                "-" if share is None else f"{100 * share:+.1f} %",
                number(cell["peak_gib"], 1),
                "",
            ]
        )
    header = ["context", "batch", "chunk", "arm", "TTFT s", "build ms", "TTFT against no build", "GiB", "remarks"]
    return with_banner(markdown(header, rows), is_measurement)


def build_share(cells: Sequence[dict], cell: dict) -> float | None:
    """How much longer a prefill takes than the same without summaries, as a fraction."""
    if not cell["cell"]["arm"].startswith("locks-r"):
        return None
    where = {name: cell["cell"][name] for name in ("context", "batch", "chunk")}
    without = find(cells, arm="locks-full", **where)
    return None if without is None else cell["ttft_s_mean"] / without["ttft_s_mean"] - 1


def longgen_table(cells: Sequence[dict], is_measurement: bool) -> str:
    """Every cell of a long generation."""
    rows = []
    for cell in cells:
        what = cell["cell"]
        first = [parse_arm(what["arm"]).label, show_tokens(what["prompt"]), show_tokens(what["new"])]
        if cell["status"] != "ok":
            rows.append([*first, cell["status"], *("-",) * 4, _short(cell.get("reason", ""))])
            continue
        rows.append(
            [
                *first,
                number(cell["itl_ms_mean"]),
                number(cell["itl_ms_first"]),
                number(cell["itl_ms_last"]),
                number(cell["wall_s"], 1),
                f"{cell['growths']} ({number(cell['growth_ms'], 0)} ms)",
                cell["attends"],
            ]
        )
    header = ["arm", "prompt", "new", "mean ITL ms", "first", "last", "decode wall s", "growths", "remarks"]
    return with_banner(markdown(header, rows), is_measurement)


def kernels_table(cells: Sequence[dict], is_measurement: bool) -> str:
    """Every cell of a kernels run."""
    read = find(cells, op="read")
    rows = []
    for cell in cells:
        what = cell["cell"]
        first = [what["op"], show_tokens(what["context"]) if "context" in what else "-", what.get("arm", "-")]
        first.append(str(what.get("batch", "-")))
        if cell["status"] != "ok":
            rows.append([*first, cell["status"], *("-",) * 3, _short(cell.get("reason", ""))])
            continue
        share = 100 * cell["gb_per_s"] / read["gb_per_s"] if read is not None and is_measurement else None
        rows.append(
            [
                *first,
                mean_sd(cell["us_mean"], cell["us_sd"], 1),
                number(cell["bytes"] / 1e6, 2),
                number(cell["gb_per_s"], 0),
                number(share, 0, " %"),
                cell.get("note", ""),
            ]
        )
    header = ["op", "context", "arm", "batch", "us", "MB", "GB/s", "of read ceiling", "remarks"]
    return with_banner(markdown(header, rows), is_measurement)


def generate_table(cells: Sequence[dict], is_measurement: bool) -> str:
    """Every cell of a generate run."""
    rows = []
    for cell in cells:
        what = cell["cell"]
        first = [show_tokens(what["context"]), str(what["batch"]), parse_arm(what["arm"]).label, what["how"]]
        if cell["status"] != "ok":
            rows.append([*first, cell["status"], *("-",) * 4, _short(cell.get("reason", ""))])
            continue
        base = find(cells, context=what["context"], batch=what["batch"], arm="dynamic")
        gain = None if base is None or base is cell else cell["tokens_per_s"] / base["tokens_per_s"]
        rows.append(
            [
                *first,
                number(cell["tokens_per_s"], 1),
                number(cell["ms_per_token"]),
                number(gain, 1, "x"),
                number(cell["first_token_s"]),
                number(cell["start_up_s"]),
                cell.get("note", ""),
            ]
        )
    header = ["context", "batch", "cache", "how", "tokens/s", "ms/token", "against DynamicCache", "first token s"]
    return with_banner(markdown([*header, "start-up s", "remarks"], rows), is_measurement)


def with_banner(table: str, is_measurement: bool) -> str:
    """The table, marked if it is none of measurements."""
    return table if is_measurement else f"**{NOT_A_MEASUREMENT}**\n\n{table}"


def _short(reason: str) -> str:
    return reason if len(reason) <= 120 else reason[:117] + "..."
