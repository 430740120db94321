"""Command line of the timings."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from . import decode, generate, kernels, longgen, prefill, report

_COMMANDS = {
    "decode": (decode, "a complete decode step at each context, batch and arm"),
    "prefill": (prefill, "time to first token, with and without building summaries"),
    "longgen": (longgen, "one long generation: latency of every token"),
    "kernels": (kernels, "each operation alone: time, bytes a second, share of the ceiling"),
    "generate": (generate, "model.generate itself, against a DynamicCache"),
    "report": (report, "tables and plots of stored runs, the paper's values beside the measured ones"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: Arguments; ``None`` takes those of the process.

    Returns:
        Exit status: 0, 2 for bad input, 130 if interrupted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m locks_hf.timing",
        description="Timing of decode, prefill and kernels. Results go to stdout and to the run's directory, progress "
        "to stderr; an interrupted run goes on when the same command is given again.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=module.__doc__.replace("``", "")))
    args = parser.parse_args(argv)
    try:
        print(_COMMANDS[args.command][0].run(args, f"python -m locks_hf.timing {shlex.join(argv)}"))
        return 0
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: give the same command again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
