"""Command line of the evaluation harnesses."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .plot import plot_scores
from .report import check_comparable, make_tables, merge_rows, read_rows, read_settings
from .ruler import command as ruler


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: Arguments; ``None`` takes those of the process.

    Returns:
        Exit status: 0, 1 if a record could not be answered, 2 for bad input, 130 if interrupted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m locks_hf.eval", description="Evaluation of sparse decoding.")
    commands = parser.add_subparsers(dest="command", required=True)
    ruler.add_arguments(
        commands.add_parser(
            "ruler",
            help="the eight needle tasks of RULER",
            description="The eight needle tasks of RULER under several cache settings. Results go to stdout, "
            "progress to stderr; an interrupted run goes on when the same command is given again.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    report = commands.add_parser("report", help="tables of runs, in markdown")
    plot = commands.add_parser("plot", help="score against budget of runs")
    for command in (report, plot):
        command.add_argument(
            "runs",
            type=Path,
            metavar="RUNDIR",
            nargs="+",
            help="output directories of runs, of other lengths for instance",
        )
    plot.add_argument("--output", type=Path, metavar="PNG", help="image file (default: plot.png in the first RUNDIR)")
    args = parser.parse_args(argv)
    try:
        if args.command == "ruler":
            return ruler.run(args, f"python -m locks_hf.eval {shlex.join(argv)}")
        runs = {run: read_rows(run) for run in args.runs}
        if len(runs) > 1:
            check_comparable({run: read_settings(run) for run in runs})
        rows = merge_rows(runs)
        if args.command == "report":
            print(make_tables(rows))
        else:
            output = args.output or args.runs[0] / "plot.png"
            plot_scores(rows, output)
            print(output)
        return 0
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def restart_with_patient_threads() -> None:
    """Start the process again with CPU threads that sleep while they wait for each other.

    By default they spin, and a run on a CPU takes several times as long as soon as anything else wants the same
    cores. OpenMP reads the setting while torch is imported, which importing this package has done already. Nothing
    happens if the environment has the setting, or if there is a GPU.
    """
    if os.name == "posix" and "OMP_WAIT_POLICY" not in os.environ and not torch.cuda.is_available():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    if sys.argv[1:2] == ["ruler"]:
        restart_with_patient_threads()
    sys.exit(main())
