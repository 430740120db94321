"""``longgen``: one long generation through the graph (paper Table B.14, Figure 4c).

A Locks cache grows as it needs to: the growth counts as part of the intervals, and the graph is captured anew, which
does not, because no growing buffer is needed to serve one. Dense arms and Quest attend a fixed length for
``--bucket`` tokens, the middle of the bucket, so that their mean is that of a length that moves by one a step.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from .arms import (
    GPU_GROUPS,
    Arm,
    Bench,
    HeldContext,
    attending,
    make_backend,
    mark_growing,
    needs,
    on,
    parse_arms,
    registered,
)
from .backends import Held
from .clock import WARM_UP
from .harness import Protocol, Step, many_arms
from .run import Run, add_options, open_run, plan_memory, positive, progress, tokens
from .tables import longgen_table

DEFAULT = ("dense", "quest", "locks-r4i4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add_options(parser, windows=True)
    parser.add_argument("--prompt", type=tokens, default=32 << 10, metavar="TOKENS")
    parser.add_argument("--new", type=tokens, default=128 << 10, metavar="TOKENS")
    parser.add_argument("--every", type=positive, default=10, metavar="TOKENS", help="tokens an interval averages over")
    parser.add_argument("--bucket", type=tokens, default=4096, metavar="TOKENS", help="tokens a dense length stays for")
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT), metavar="ARM", help="default: %(default)s")


def run(args: argparse.Namespace, command: str) -> str:
    """Measure, and give the table.

    Raises:
        ValueError: For anything that cannot be done here.
    """
    if args.new < args.every:
        raise ValueError(f"--new {args.new} is less than --every {args.every}")
    settings = {
        "step": args.step,
        "compile_mode": args.compile_mode,
        "linear": args.linear,
        "fill": args.fill,
        "every": args.every,
        "bucket": args.bucket,
    }
    this = open_run(args, command, "longgen", settings)
    with this.store:
        _measure(this)
        this.store.finish()
        return longgen_table(this.store.cells, this.clock.is_measurement)


def _measure(this: Run) -> None:
    args = this.args
    arms = parse_arms(args.arms, this.device)
    for arm in arms:
        if arm.kind == "user":
            raise ValueError(f"longgen runs through the graph, which {arm.name} does not: use decode or generate")
    absent = this.refuse_absent(arms, [name for name in args.arms if name not in GPU_GROUPS])
    total = args.prompt + args.new
    cells = []
    for arm in arms:
        cell = {"arm": arm.name, "prompt": args.prompt, "new": args.new, "batch": 1}
        # A growth holds the old and the new buffer of one layer, and ends up to half as large again as the tokens.
        room = args.new + (total // 2 if arm.locks else 0)
        cells.append(
            (
                cell,
                needs(this.shape, arm, args.prompt + (0 if arm.locks else args.new), 1, room, this.dtype, this.clock),
            )
        )
    refused = plan_memory(this, cells)
    this.begin({"prompt": args.prompt, "new": args.new, "arms": [arm.name for arm in arms]})
    todo = [place for place, (cell, _) in enumerate(cells) if not this.store.has(cell)]
    if not todo:
        return
    bench, shared = None, None
    with many_arms(), progress(len(todo) * args.new, "token") as bar:
        for place in todo:
            cell, arm, reason = cells[place][0], arms[place], None
            if arm.name in absent:
                reason = ("absent", absent[arm.name])
            elif place in refused:
                reason = ("does not fit", refused[place])
            elif bench is None:
                bench = this.bench(Protocol(), fill=args.fill, chunk=args.chunk)
                shared = HeldContext(bench, total, 1)
            bar.set_postfix_str(arm.name)
            generate = _grow if arm.locks else _buckets
            this.attempt(cell, reason, generate, bench, arm, args, shared, bar)


class _Intervals:
    """Times every so many steps of a replay."""

    def __init__(self, bench: Bench, every: int, bar):
        self._clock, self._every, self._bar = bench.clock, every, bar
        self.ms: list[float] = []  # of each interval, per token
        self._pending, self._spent = 0, 0.0
        self.total_ms = 0.0

    def replay(self, run, steps: int) -> None:
        """Run ``steps`` steps; an interval may span two calls, and what lies between them does not count."""
        clock, left = self._clock, steps
        marks, sizes = [clock.mark()], []
        while left:
            size = min(left, self._every - (self._pending if not sizes else 0))
            for _ in range(size):
                run()
            marks.append(clock.mark())
            sizes.append(size)
            left -= size
        clock.wait()
        for size, start, end in zip(sizes, marks, marks[1:], strict=False):
            ms = clock.ms(start, end)
            self.total_ms += ms
            self._spent += ms
            self._pending += size
            if self._pending == self._every:
                self._close()
        self._bar.update(steps)

    def add(self, ms: float) -> None:
        """Time that a step took besides its replay."""
        self._spent += ms
        self.total_ms += ms

    def _close(self) -> None:
        self.ms.append(self._spent / self._pending)
        self._pending, self._spent = 0, 0.0

    def finish(self, new: int, **facts) -> dict:
        """The cell's values."""
        if self._pending:
            self._close()
        tenth = max(1, len(self.ms) // 10)
        return {
            "itl_ms": [round(ms, 5) for ms in self.ms],
            "itl_ms_mean": self.total_ms / new,
            "itl_ms_first": statistics.fmean(self.ms[:tenth]),
            "itl_ms_last": statistics.fmean(self.ms[-tenth:]),
            "wall_s": self.total_ms / 1e3,
            **facts,
        }


def _check(step: Step) -> None:
    if not bool(torch.isfinite(step.logits).all()):
        raise ValueError("the step's logits are not finite: there is a NaN or an infinity in the cache or the weights")


def _grow(bench: Bench, arm: Arm, args: argparse.Namespace, shared: HeldContext, bar) -> dict:
    """A Locks arm: the cache grows, its counts move on by themselves."""
    shared.drop()
    bench.clock.release()
    cache = bench.locks_cache(arm, None)
    bench.load(cache, 1, args.prompt, "locks")
    intervals = _Intervals(bench, args.every, bar)
    done, growths, growth_ms, capture_s, captures, replay = 0, 0, 0.0, 0.0, 0, None
    spare = 2 * (WARM_UP + 1) + 2  # what warm-up and capture believe to need, although the tokens are taken back
    with on(bench.model, "locks"), bench.linears():
        step = Step(bench.compiler.function, bench.model, 1, args.prompt, bench.device, cache)
        while done < args.new:
            layers = cache.locks_layers
            room = layers[0].key_buffer.shape[2] - (args.prompt + done) - spare
            if room < 1:
                replay = None
                for layer in layers:
                    layer.settle()
                bench.clock.wait()
                start = time.perf_counter()
                for layer in layers:
                    layer.make_room(spare + 1)
                bench.clock.wait()
                growth = (time.perf_counter() - start) * 1e3
                growths, growth_ms = growths + 1, growth_ms + growth
                intervals.add(growth)
                continue
            if replay is None:
                mark_growing(cache)
                start = time.perf_counter()
                before = cache.locks_layers[0].max_length
                position = step.position.clone()
                replay = bench.clock.capture(step)
                bench.clock.wait()
                cache.crop(before - cache.locks_layers[0].max_length)
                step.position.copy_(position)
                bench.clock.wait()
                capture_s, captures = capture_s + time.perf_counter() - start, captures + 1
            steps = min(room, args.new - done)
            intervals.replay(replay, steps)
            done += steps
        _check(step)
    return intervals.finish(
        args.new,
        growths=growths,
        growth_ms=growth_ms,
        captures=captures,
        capture_s=capture_s,
        attends=f"all, budget {bench.budget}; the cache grows",
    )


def _buckets(bench: Bench, arm: Arm, args: argparse.Namespace, shared: HeldContext, bar) -> dict:
    """A dense arm or Quest: a fixed length for each bucket."""
    whole = shared.get(arm)
    intervals = _Intervals(bench, args.every, bar)
    capture_s, captures = 0.0, 0
    backend = make_backend(arm.name, bench.budget, bench.device)
    if (reason := backend.unavailable(bench.device)) is not None:
        raise ValueError(f"{arm.name} is not available: {reason}")
    with registered(bench.model), bench.linears(), attending(backend):
        step = Step(bench.compiler.function, bench.model, 1, args.prompt, bench.device, None)
        for first in range(0, args.new, args.bucket):
            steps = min(args.bucket, args.new - first)
            start = time.perf_counter()
            if arm.name != "none":
                length = args.prompt + first + (steps + 1) // 2
                backend.bind(Held(whole.keys, whole.values, length, whole.heads))
            replay = bench.clock.capture(step)
            bench.clock.wait()
            capture_s, captures = capture_s + time.perf_counter() - start, captures + 1
            intervals.replay(replay, steps)
            del replay
        _check(step)
    return intervals.finish(
        args.new,
        growths=0,
        growth_ms=0.0,
        captures=captures,
        capture_s=capture_s,
        attends=f"fixed for {args.bucket} tokens each, at their middle",
    )
