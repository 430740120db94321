"""``report``: tables and plots of stored runs, with the paper's values beside the measured ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .arms import parse_arm
from .paper import read_table
from .plot import plot_runs
from .run import NOT_A_MEASUREMENT, show_tokens
from .store import cell_key, read_cells, read_object
from .tables import (
    attention_ms,
    decode_table,
    find,
    generate_table,
    kernels_table,
    longgen_table,
    markdown,
    mean_sd,
    number,
    ok_cells,
    prefill_table,
    profile_table,
    speedup,
)

_TABLES: dict[str, tuple[str, Callable]] = {
    "decode": ("Decode step", decode_table),
    "prefill": ("Prefill", prefill_table),
    "longgen": ("Long generation", longgen_table),
    "kernels": ("Operations", kernels_table),
    "generate": ("model.generate", generate_table),
}
_OF_MODELS = ("decode", "longgen", "generate")  # whose linear layers may be fast
_DENSE_COLUMNS = ("fa3", "flashinfer", "cudnn", "flash")
_PAPER_NAMES = {"fa3": "FA3", "flashinfer": "FlashInfer", "quest": "Quest", "locks-r4i4": "Locks r4i4"}
_PAPER_NAMES["locks-r8i4"] = "Locks r8i4"
Cells = dict[str, list[dict]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUNDIR", help="directories of runs, finished or not")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where report.md and the plots go (default: the first RUNDIR)"
    )


def run(args: argparse.Namespace, command: str) -> str:
    """Write ``report.md`` and the plots, and give the report.

    Raises:
        ValueError: If a directory holds no run, or runs cannot be laid beside each other.
    """
    output = args.output or args.runs[0]
    text, cells = make_report(args.runs)
    try:
        output.mkdir(parents=True, exist_ok=True)
        try:
            plots = plot_runs(cells, output)
        except ModuleNotFoundError as error:
            print(f"no plots: {error}", file=sys.stderr)
            plots = []
        text += "".join(f"\n\n![{path.stem}]({path.name})" for path in plots)
        (output / "report.md").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write the report to {output}: {error}") from error
    return text


def make_report(directories: Sequence[Path]) -> tuple[str, Cells]:
    """The report of several runs, and their cells by subcommand.

    Raises:
        ValueError: As :func:`run`.
    """
    runs = [_read_run(directory) for directory in directories]
    first = runs[0][0]
    for config, _, _, directory in runs[1:]:
        for name in ("measurement", "shape", "device", "dtype", "budget"):
            if config.get(name) != first.get(name):
                raise ValueError(
                    f"{directory} has {name} {config.get(name)!r} and {directories[0]} {first.get(name)!r}: report "
                    "them apart"
                )
    linear = {_linear(config): directory for config, _, _, directory in runs if config["timing"] in _OF_MODELS}
    if len(linear) > 1:
        where = " and ".join(f"{kind} in {directory}" for kind, directory in linear.items())
        raise ValueError(f"linear layers are {where}: report them apart")
    cells: Cells = {}
    for config, found, _, directory in runs:
        here = cells.setdefault(config["timing"], [])
        known = {cell_key(cell["cell"]) for cell in ok_cells(here)}
        twice = [cell["cell"] for cell in ok_cells(found) if cell_key(cell["cell"]) in known]
        if twice:
            raise ValueError(f"{directory} has {twice[0]}, which another of these runs has too: report them apart")
        here += found
    sections = ["# Timings", _conditions(runs)]
    for kind, (title, table) in _TABLES.items():
        if kind in cells:
            sections += [f"## {title}", table(cells[kind], first["measurement"])]
    if profiled := profile_table(cells.get("decode", [])):
        sections += ["## Profile of the decode step", profiled]
    banner = "" if first["measurement"] else f"**{NOT_A_MEASUREMENT}**\n\n"
    sections += _beside_paper(cells, banner)
    return "\n\n".join(sections), cells


def _read_run(directory: Path) -> tuple[dict, list[dict], list[dict], Path]:
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} holds no timing run: there is no config.json")
    config = read_object(directory / "config.json")
    if config.get("timing") not in _TABLES or not isinstance(config.get("shape"), dict):
        raise ValueError(f"{directory} was not written by python -m locks_hf.timing")
    environments = []
    path = directory / "environments.json"
    if path.exists():
        try:
            environments = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    return config, read_cells(directory / "cells.jsonl")[0], environments, directory


def _conditions(runs: list[tuple[dict, list[dict], list[dict], Path]]) -> str:
    config = runs[0][0]
    lines = [] if config["measurement"] else [f"**{NOT_A_MEASUREMENT}**", ""]
    shape = config["shape"]
    weights = "checkpoint" if config.get("checkpoint") else "random weights"
    lines.append(
        f"{shape['name']} ({shape['layers']} layers, {shape['heads']} query and {shape['kv_heads']} KV heads, head_dim "
        f"{shape['head_dim']}), {weights}, {config['dtype']}, budget {config['budget']}, summaries "
        f"{'refitted' if config.get('refit') else 'by C = D V'}{_linears(runs)}."
    )
    seen = []
    for _, _, environments, _ in runs:
        for one in environments:
            packages = ", ".join(f"{name} {version}" for name, version in one["packages"].items() if version)
            line = (
                f"{one['device']}, driver {one.get('driver')}, CUDA {one.get('cuda')}, git {one.get('git')}, {packages}"
            )
            if line not in seen:
                seen.append(line)
    lines += [f"- {line}" for line in seen]
    commands = [one.get("command") for _, _, environments, _ in runs for one in environments]
    lines += ["", "```bash", *dict.fromkeys(command for command in commands if command), "```"]
    absent = {}
    for _, cells, _, _ in runs:
        absent |= {c["cell"]["arm"]: c.get("reason", "") for c in cells if c["status"] == "absent"}
    lines += ["", *(f"Absent: {parse_arm(name).label}: {reason}." for name, reason in absent.items())]
    return "\n".join(lines).rstrip()


def _linear(config: dict) -> str:
    return config.get("linear", "torch")  # what runs had before there was a choice


def _linears(runs: list[tuple[dict, list[dict], list[dict], Path]]) -> str:
    known = next((_linear(config) for config, _, _, _ in runs if config["timing"] in _OF_MODELS), None)
    where = "of every arm but Transformers' own"
    return {
        "fast": f", linear layers {where} by patch(fast_linear=True)",
        "torch": ", linear layers by torch",
        None: "",
    }[known]


def _beside_paper(cells: Cells, banner: str) -> list[str]:
    sections = []
    decode, prefill, long = (cells.get(kind, []) for kind in ("decode", "prefill", "longgen"))
    if decode or prefill:
        sections += ["## Table B.13 (paper: GH200) and measured", banner + table_b13(decode, prefill)]
    if long:
        sections += ["## Table B.14 (paper: GH200, 32K + 128K) and measured", banner + table_b14(long, prefill)]
    if decode or prefill:
        sections += ["## Table C.22 (paper: H200 NVL) and measured", banner + table_c22(decode, prefill)]
    if decode:
        sections += ["## Table C.23 (paper: H200 NVL) and measured", banner + table_c23(decode)]
    return sections


def _ttft(prefill: list[dict], context: int, arms: Sequence[str], batch: int = 1) -> dict | None:
    found = (find(prefill, context=context, batch=batch, arm=arm) for arm in arms)
    return next((cell for cell in found if cell is not None), None)


def table_b13(decode: list[dict], prefill: list[dict]) -> str:
    """TTFT and mean ITL at batch 1, a row of the paper's and one of the measured values for each context.

    The measured dense TTFT is that of SDPA in Transformers, whatever the decode backend.
    """
    paper = {(row["context"], row["method"]): row for row in read_table("b13")}
    contexts = _contexts([*paper], decode, prefill)
    columns = ("fa3", "flashinfer", "cudnn", "flash", "quest", "quest-u", "locks-r4i4")
    header = ["context", "", "TTFT s dense", "TTFT s r4i4"]
    header += [f"ITL ms {'Quest-U' if arm == 'quest-u' else parse_arm(arm).label}" for arm in columns]
    rows = []
    for context in contexts:
        names = [*(_PAPER_NAMES.get(arm) for arm in columns)]
        names[columns.index("quest-u")] = "Quest-U"
        known = [paper.get((context, name), {}) for name in names]
        if any(known):
            dense, ours = (paper.get((context, name), {}).get("ttft_s") for name in ("FA3", "Locks r4i4"))
            itls = [number(row.get("mean_itl_ms")) for row in known]
            rows.append([show_tokens(context), "paper", number(dense), number(ours), *itls])
        dense, ours = _ttft(prefill, context, ("sdpa", "locks-full")), _ttft(prefill, context, ("locks-r4i4",))
        found = [find(decode, context=context, batch=1, arm=arm) for arm in columns]
        if any(found) or dense or ours:
            rows.append(
                [
                    show_tokens(context),
                    "measured",
                    number(dense and dense["ttft_s_mean"]),
                    number(ours and ours["ttft_s_mean"]),
                    *(number(cell and cell["ms_mean"]) for cell in found),
                ]
            )
    return markdown(header, rows)


def table_b14(long: list[dict], prefill: list[dict]) -> str:
    """Long generation; the measured TTFT is that of the prefill run at the prompt's length."""
    rows = [
        [
            row["method"],
            "paper",
            "32K",
            "128K",
            number(row["ttft_s"]),
            number(row["mean_itl_ms"]),
            number(row["decode_wall_s"], 1),
        ]
        for row in read_table("b14")
    ]
    for cell in ok_cells(long):
        arm, prompt = cell["cell"]["arm"], cell["cell"]["prompt"]
        ttft = _ttft(prefill, prompt, (arm,) if parse_arm(arm).locks else ("sdpa", "locks-full"))
        rows.append(
            [
                parse_arm(arm).label,
                "measured",
                show_tokens(prompt),
                show_tokens(cell["cell"]["new"]),
                number(ttft and ttft["ttft_s_mean"]),
                number(cell["itl_ms_mean"]),
                number(cell["wall_s"], 1),
            ]
        )
    return markdown(["method", "", "prompt", "new", "TTFT s", "mean ITL ms", "decode wall s"], rows)


def table_c22(decode: list[dict], prefill: list[dict]) -> str:
    """TPOT with sd, speed-up, TTFT and build at batch 1; the measured speed-up is against the fastest dense backend."""
    paper = {(row["context"], row["method"]): row for row in read_table("c22")}
    locks = ("locks-r8i4", "locks-r4i4")
    header = ["context", "", *(f"{parse_arm(arm).label} ms" for arm in (*_DENSE_COLUMNS, *locks))]
    header += ["r8i4", "r4i4", "attention r8i4 ms", "attention r4i4 ms", "TTFT s dense", "TTFT s r8i4", "build r8i4 ms"]
    rows = []
    for context in _contexts([*paper], decode, prefill):
        ours = paper.get((context, "Locks r8i4"), {})
        if ours:
            known = [paper.get((context, _PAPER_NAMES.get(arm)), {}) for arm in (*_DENSE_COLUMNS, *locks)]
            rows.append(
                [
                    show_tokens(context),
                    "paper",
                    *(mean_sd(row.get("tpot_ms"), row.get("tpot_sd")) for row in known),
                    number(ours["speedup"], 2, "x"),
                    "-",
                    "-",
                    "-",
                    number(paper[context, "FA3"]["ttft_s"]),
                    number(ours["ttft_s"]),
                    mean_sd(ours["build_ms"], ours["build_sd"], 0),
                ]
            )
        found = [find(decode, context=context, batch=1, arm=arm) for arm in (*_DENSE_COLUMNS, *locks)]
        dense, built = _ttft(prefill, context, ("sdpa", "locks-full")), _ttft(prefill, context, ("locks-r8i4",))
        if any(found) or dense or built:
            rows.append(
                [
                    show_tokens(context),
                    "measured",
                    *(mean_sd(cell and cell["ms_mean"], cell and cell["ms_sd"]) for cell in found),
                    *(number(cell and speedup(decode, cell), 2, "x") for cell in found[-2:]),
                    *(number(cell and attention_ms(decode, cell)) for cell in found[-2:]),
                    number(dense and dense["ttft_s_mean"]),
                    number(built and built["ttft_s_mean"]),
                    mean_sd(built and built["build_ms_mean"], built and built["build_ms_sd"], 0),
                ]
            )
    return markdown(header, rows)


def table_c23(decode: list[dict]) -> str:
    """Speed-up over the fastest dense backend by context and batch, and tokens/s at the largest batch of both."""
    paper = {(row["context"], row["batch"]): row for row in read_table("c23")}
    batches = sorted({batch for _, batch in paper} | {cell["cell"]["batch"] for cell in ok_cells(decode)})
    contexts = sorted({context for context, _ in paper}, reverse=True)
    contexts += sorted({cell["cell"]["context"] for cell in ok_cells(decode)} - set(contexts), reverse=True)
    rows = []
    for context in contexts:
        known = [paper.get((context, batch), {}) for batch in batches]
        if any(known):
            frontier = [row["frontier_tokens_per_s"] for row in known if row.get("frontier_tokens_per_s")]
            values = [row.get("speedup") for row in known]
            shown = [value if isinstance(value, str) else number(value) for value in values]
            rows.append([show_tokens(context), "paper r8i4", *shown, number(frontier[0] if frontier else None, 0)])
        for arm in ("locks-r8i4", "locks-r4i4"):
            found = [find(decode, context=context, batch=batch, arm=arm) for batch in batches]
            if not any(found):
                continue
            shown, best = [], None
            for batch, cell in zip(batches, found, strict=True):
                gain = cell and speedup(decode, cell)
                best = cell if gain else best
                shown.append(number(gain) if gain else _missing(decode, context, batch, arm))
            rows.append(
                [
                    show_tokens(context),
                    f"measured {arm.removeprefix('locks-')}",
                    *shown,
                    number(best and best["tokens_per_s"], 0),
                ]
            )
    return markdown(["context", "", *(f"batch {batch}" for batch in batches), "tokens/s at the largest"], rows)


def _missing(decode: list[dict], context: int, batch: int, arm: str) -> str:
    """Why there is no speed-up: the cell, or every dense one, does not fit."""
    here = [c for c in decode if (c["cell"]["context"], c["cell"]["batch"]) == (context, batch)]
    ours = [c for c in here if c["cell"]["arm"] == arm]
    dense = [c for c in here if parse_arm(c["cell"]["arm"]).is_dense and c["status"] != "absent"]
    lost = any(c["status"] == "does not fit" for c in ours) or (
        bool(dense) and all(c["status"] == "does not fit" for c in dense)
    )
    return "OOM" if lost else "-"


def _contexts(paper: list[tuple], *runs: list[dict]) -> list[int]:
    measured = {cell["cell"]["context"] for cells in runs for cell in ok_cells(cells)}
    return sorted({context for context, *_ in paper} | measured)
