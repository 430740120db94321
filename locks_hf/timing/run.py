"""What every measuring subcommand shares: options, the set-up of a run, and the guard around each cell."""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from tqdm import tqdm

from locks_hf.config import LocksConfig
from locks_hf.eval.environment import describe

from .arms import Arm, Bench, absence
from .clock import Clock, make_clock
from .harness import Compiler, Protocol
from .memory import GIB, Needs, free_bytes, refusal
from .monitor import Monitor
from .shapes import SHAPES, Shape, load_model, make_model, resolve_shape
from .store import CellStore

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_EXTRA_PACKAGES = ("fa3-fwd", "flash-attn", "flash-attn-3", "flashinfer-python", "nvidia-ml-py", "matplotlib")
LINEARS = ("torch", "fast")
NOT_A_MEASUREMENT = "CPU, tiny shape: a trial of the command, not a measurement of anything"


def tokens(text: str) -> int:
    """A number of tokens: ``4096``, ``16K`` or ``1M``, with K = 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    scale = {"": 1, "k": 1 << 10, "m": 1 << 20}
    count = float(match[1]) * scale[match[2].lower()] if match else 0
    if count < 1 or count != int(count):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: write 4096, 16K or 1M")
    return int(count)


def show_tokens(count: int) -> str:
    """The other way round: ``16K``, ``1M``, ``4000``."""
    for scale, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if count % scale == 0:
            return f"{count // scale}{letter}"
    return str(count)


def amount(text: str) -> float:
    """A finite number that is not negative."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return number


def seed(text: str) -> int:
    """What a generator takes as its seed."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to {(1 << 63) - 1}")
    return int(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def add_options(parser: argparse.ArgumentParser, *, windows: bool = False, generates: bool = False) -> None:
    """Add what all measuring subcommands take."""
    parser.add_argument(
        "--shape",
        default="glm-4-9b-1m",
        help=f"{', '.join(SHAPES)}, the path of a config.json or model directory, or a Hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint", action="store_true", help="load the weights that --shape points at; by default they are random"
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try a command out with --shape tiny")
    parser.add_argument("--dtype", choices=_DTYPES, help="default: bfloat16, on the CPU float32")
    parser.add_argument("--budget", type=positive, default=2048, help="tokens attended by Locks and Quest")
    parser.add_argument("--no-refit", action="store_true", help="Locks summaries by the paper's rule, C = D V")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--memory-limit", type=amount, metavar="GIB", help="use no more than this of the device")
    parser.add_argument("--output", type=Path, metavar="DIR", help="run directory (default: under runs/)")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is in the directory")
    parser.add_argument("--retry", action="store_true", help="measure cells of an earlier run again that failed")
    if windows or generates:
        parser.add_argument(
            "--linear",
            choices=LINEARS,
            default="torch",
            help="linear layers of every arm but those of Transformers itself: torch's, or those of "
            "patch(model, fast_linear=True)",
        )
    if windows:
        parser.add_argument(
            "--step",
            choices=("compiled", "eager"),
            default="compiled",
            help="what the CUDA graph is captured over: the compiled model (the default) or the eager one",
        )
        parser.add_argument(
            "--compile-mode",
            default="default",
            choices=("default", "max-autotune-no-cudagraphs", "max-autotune", "reduce-overhead"),
            help="of torch.compile; those that capture CUDA graphs of their own are refused",
        )
        parser.add_argument(
            "--fill",
            choices=("synthetic", "prefill"),
            default="synthetic",
            help="where contexts come from: drawn on the device, or a real prefill of random tokens",
        )
        parser.add_argument("--chunk", type=tokens, default=8192, help="tokens a pass of --fill prefill")
        parser.add_argument("--window", type=positive, default=64, metavar="STEPS", help="steps a window")
        parser.add_argument("--windows", type=positive, default=3, help="windows kept")
        parser.add_argument("--retries", type=int, default=3, help="throttled windows that are dropped and repeated")
        parser.add_argument("--settle", type=amount, default=3.0, metavar="S", help="longest wait for the clocks")


def protocol_of(args: argparse.Namespace) -> Protocol:
    """The protocol that the options ask for."""
    return Protocol(args.window, args.windows, args.retries, args.settle, min(16, args.window))


@dataclass
class Run:
    """A run that has been set up: the directory is claimed, nothing is allocated yet.

    Attributes:
        args: The options.
        command: The command line.
        shape: The shape.
        clock: Captures and times.
        monitor: Reads the GPU.
        dtype: Of weights, keys and values.
        free: Bytes free on the device.
        store: Where cells go.
    """

    args: argparse.Namespace
    command: str
    shape: Shape
    clock: Clock
    monitor: Monitor
    dtype: torch.dtype
    free: int
    store: CellStore

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.clock.device

    def begin(self, sweep: dict) -> None:
        """Write the settings down and say on the terminal what this is."""
        environment = describe(self.device, self.command)
        environment["packages"] |= {name: _version(name) for name in _EXTRA_PACKAGES}
        environment |= {"driver": self.monitor.driver, "cuda": torch.version.cuda}
        if self.device.type == "cuda":
            facts = torch.cuda.get_device_properties(self.device)
            environment |= {
                "memory_gib": facts.total_memory / GIB,
                "multiprocessors": facts.multi_processor_count,
                "capability": f"{facts.major}.{facts.minor}",
            }
        self.store.begin(sweep, environment)
        if not self.clock.is_measurement:
            say(NOT_A_MEASUREMENT)
        say(
            f"{self.shape.name} on {environment['device']}, {self.free / GIB:.1f} GiB free; results in "
            f"{self.store.directory}"
        )

    def bench(self, protocol: Protocol, **options) -> Bench:
        """Make the model and what its cells share."""
        args = self.args
        make = load_model if args.checkpoint else make_model
        arguments = (self.shape, self.device, self.dtype)
        model = make(*arguments) if args.checkpoint else make(*arguments, args.seed)
        compiler = Compiler(getattr(args, "step", "eager"), getattr(args, "compile_mode", "default"), self.device)
        return Bench(
            self.shape,
            model,
            self.clock,
            compiler,
            protocol,
            self.dtype,
            budget=args.budget,
            refit=not args.no_refit,
            fast_linear=getattr(args, "linear", "torch") == "fast",
            seed=args.seed,
            **options,
        )

    def refuse_absent(self, arms: list[Arm], named: list[str]) -> dict[str, str]:
        """Why arms cannot run on this machine; said on the terminal.

        Args:
            arms: The arms.
            named: Those that were asked for by name: their absence is an error.

        Raises:
            ValueError: If one of ``named`` cannot run.
        """
        absent = {}
        for arm in arms:
            if (reason := absence(arm, self.args.budget, self.device)) is not None:
                if arm.name in named:
                    raise ValueError(f"the backend {arm.name} is not available here: {reason}")
                say(f"absent: {arm.label}: {reason}")
                absent[arm.name] = reason
        return absent

    def attempt(self, cell: dict, reason: tuple[str, str] | None, function: Callable[..., dict], *arguments) -> None:
        """Measure one cell and store it, whatever comes of it.

        Args:
            cell: What is measured.
            reason: Status and reason of a cell that is not to be tried, or ``None``.
            function: Measures it and gives its values.
            *arguments: Of ``function``.

        Raises:
            ValueError: If the GPU does not answer any more, so that nothing more can be measured in this process.
        """
        if reason is not None:
            self.store.add({"cell": cell, "status": reason[0], "reason": reason[1]})
            return
        failure, more = None, {}
        self.clock.reset_peak()
        try:
            values = function(*arguments)
        except torch.OutOfMemoryError as error:
            failure = ("does not fit", f"out of memory while it ran: {_first_line(error)}")
        except Exception as error:  # backends, compilers and drivers fail in ways of their own; the others go on
            failure = ("error", f"{type(error).__name__}: {_first_line(error)}")
            more["traceback"] = traceback.format_exc()[-4000:]
        if failure is None:
            peak = self.clock.peak_bytes()
            values = {"peak_gib": None if peak is None else peak / GIB, "gpu": self.monitor.sample().asdict(), **values}
            self.store.add({"cell": cell, "status": "ok", **values})
            return
        self.store.add({"cell": cell, "status": failure[0], "reason": failure[1], **more})
        say(f"{_name(cell)}: {failure[0]}: {failure[1]}")
        try:
            self.clock.wait()
            self.clock.release()
        except RuntimeError as error:
            raise ValueError(
                f"the GPU does not answer after {_name(cell)} ({_first_line(error)}): give the same command again, it "
                "goes on with the next cell"
            ) from error


def open_run(args: argparse.Namespace, command: str, kind: str, settings: dict) -> Run:
    """Check the options, find the device and claim the directory.

    Args:
        args: The options of :func:`add_options`.
        command: The command line.
        kind: The subcommand.
        settings: What decides a cell's content besides the common options.

    Raises:
        ValueError: For anything that cannot be done here.
    """
    for name in ("contexts", "batch"):
        if hasattr(args, name):
            setattr(args, name, list(dict.fromkeys(getattr(args, name))))
    clock = make_clock(args.device, args.shape)
    LocksConfig(budget=args.budget)
    shape = resolve_shape(args.shape)
    dtype = _DTYPES[args.dtype or ("bfloat16" if clock.device.type == "cuda" else "float32")]
    if args.memory_limit is not None and args.memory_limit <= 0:
        raise ValueError(f"--memory-limit is in GiB and above 0, got {args.memory_limit}")
    common = {
        "timing": kind,
        "measurement": clock.is_measurement,
        "shape": shape.describe(),
        "checkpoint": args.checkpoint,
        "device": torch.cuda.get_device_name(clock.device) if clock.device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "budget": args.budget,
        "refit": not args.no_refit,
        "seed": args.seed,
    }
    store = CellStore(args.output, {**common, **settings}, overwrite=args.overwrite, retry=args.retry)
    free = free_bytes(clock.device, args.memory_limit)
    return Run(args, command, shape, clock, Monitor(clock.device), dtype, free, store)


def plan_memory(run: Run, cells: list[tuple[dict, Needs]]) -> dict[int, str]:
    """Which cells do not fit, by their place in the list, and why; said on the terminal.

    Raises:
        ValueError: If none does; the message names the bytes.
    """
    refused = {place: reason for place, (_, needs) in enumerate(cells) if (reason := refusal(needs, run.free))}
    if cells and len(refused) == len(cells):
        place = min(refused, key=lambda place: cells[place][1].total)
        what = "" if len(cells) == 1 else "nothing of this fits; the smallest, "
        raise ValueError(f"{what}{_name(cells[place][0])} {refused[place]}")
    for place, reason in refused.items():
        say(f"does not fit: {_name(cells[place][0])} {reason}")
    return refused


def progress(total: int, unit: str = "cell") -> tqdm:
    """A bar on stderr."""
    return tqdm(total=total, unit=unit, file=sys.stderr, disable=None, dynamic_ncols=True)


def say(text: str) -> None:
    """A line on stderr, beside the bar."""
    tqdm.write(text, file=sys.stderr)


def _name(cell: dict) -> str:
    parts = []
    for name, value in cell.items():
        if name in ("context", "prompt", "new"):
            parts.append(f"{name} {show_tokens(value)}")
        else:
            parts.append(str(value) if name in ("arm", "op") else f"{name} {value}")
    return ", ".join(parts)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
