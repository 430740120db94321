"""``prefill``: time to first token with and without summary building (paper Tables B.13, C.22).

``sdpa`` is a DynamicCache on Transformers' SDPA; ``locks-full`` a LocksCache without summaries, the same path as the
Locks arms apart from the build. Prompts are random tokens; the first token's argmax is part of the time.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product

import torch
from transformers import DynamicCache

from locks_hf import LocksCache
from locks_hf.config import LocksConfig
from locks_hf.selectors import LocksSelector

from .arms import PAGE, Bench, on, parse_arm
from .clock import Clock
from .fill import prefill, random_tokens
from .harness import Protocol
from .memory import Needs, slack
from .run import Run, add_options, open_run, plan_memory, positive, progress, tokens
from .shapes import Shape
from .tables import prefill_table

ARMS = ("sdpa", "locks-full")
_WARM_UP_TOKENS = 4096


class TimedSelector(LocksSelector):
    """The Locks selector, with a pair of marks around each build of summaries."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._marks: list[tuple] = []

    def summarize(self, keys: torch.Tensor, config: LocksConfig) -> dict[str, torch.Tensor]:
        """As :class:`LocksSelector`."""
        start = self._clock.mark()
        out = super().summarize(keys, config)
        self._marks.append((start, self._clock.mark()))
        return out

    def take_ms(self) -> float:
        """Milliseconds spent since the last call; waits for the device."""
        self._clock.wait()
        total = sum(self._clock.ms(start, end) for start, end in self._marks)
        self._marks = []
        return total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add_options(parser)
    parser.add_argument(
        "--contexts", type=tokens, nargs="+", default=[k << 10 for k in (16, 32, 64, 128)], metavar="TOKENS"
    )
    parser.add_argument("--batch", type=positive, nargs="+", default=[1])
    parser.add_argument(
        "--chunk", type=tokens, metavar="TOKENS", help="tokens a pass, such as 8192; default: one piece"
    )
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument(
        "--arms",
        nargs="+",
        default=[*ARMS, "locks-r4i4", "locks-r8i4"],
        metavar="ARM",
        help=f"{', '.join(ARMS)}, locks-r<rank>i<bits>",
    )


def run(args: argparse.Namespace, command: str) -> str:
    """Measure, and give the table.

    Raises:
        ValueError: For anything that cannot be done here.
    """
    for name in args.arms:
        if name not in ARMS and not parse_arm(name).locks:
            raise ValueError(f"prefill has no arm {name!r}; it has {', '.join(ARMS)} and locks-r<rank>i<bits>")
    this = open_run(args, command, "prefill", {"repeats": args.repeats})
    with this.store:
        _measure(this)
        this.store.finish()
        return prefill_table(this.store.cells, this.clock.is_measurement)


def _measure(this: Run) -> None:
    args = this.args
    cells = []
    for batch, context in product(args.batch, args.contexts):
        for arm in dict.fromkeys(args.arms):
            cell = {"context": context, "batch": batch, "chunk": args.chunk, "arm": arm}
            cells.append((cell, prefill_needs(this.shape, arm, context, batch, args.chunk, this.dtype, this.clock)))
    refused = plan_memory(this, cells)
    this.begin({"contexts": args.contexts, "batches": args.batch, "chunk": args.chunk, "arms": args.arms})
    todo = [place for place, (cell, _) in enumerate(cells) if not this.store.has(cell)]
    if not todo:
        return
    bench = None
    with progress(len(cells)) as bar:
        bar.update(len(cells) - len(todo))
        for place in todo:
            cell, reason = cells[place][0], None
            if place in refused:
                reason = ("does not fit", refused[place])
            elif bench is None:
                bench = this.bench(Protocol())
            bar.set_postfix_str(f"{cell['arm']} {cell['context']}")
            this.attempt(cell, reason, time_prefill, bench, cell, args.repeats)
            bar.update()


def prefill_needs(
    shape: Shape, arm: str, context: int, batch: int, chunk: int | None, dtype: torch.dtype, clock: Clock
) -> Needs:
    """Memory that a prefill takes, the model included: KV, summaries, and activations of one pass."""
    size, text = dtype.itemsize, shape.config.get_text_config(decoder=True)
    pages = -(-context // PAGE)
    layer_kv = 2 * batch * shape.kv_heads * pages * PAGE * shape.head_dim * size
    in_pass = batch * min(context, chunk or context)
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    activations = in_pass * size * (6 * text.hidden_size + 4 * wide + 4 * shape.heads * shape.head_dim)
    kv, summaries = shape.layers * layer_kv + 2 * layer_kv, 0
    if arm.startswith("locks-r"):
        from locks_hf.kernels import SummaryLayout

        rank, bits = parse_arm(arm).locks
        layout = SummaryLayout(shape.head_dim, rank, PAGE, bits)
        summaries = shape.layers * batch * shape.kv_heads * pages * layout.bytes_per_page
    return Needs(shape.parameters * size, kv, summaries, activations + slack(clock.device))


def time_prefill(bench: Bench, cell: dict, repeats: int) -> dict:
    """Time prefills of one cell, after a short one that is thrown away.

    Returns:
        ``ttft_s`` of each repeat with mean and sd, and ``build_ms`` likewise where summaries are built.
    """
    clock, vocabulary = bench.clock, bench.shape.config.get_text_config(decoder=True).vocab_size
    selector = TimedSelector(clock)
    arm, context, batch, chunk = (cell[name] for name in ("arm", "context", "batch", "chunk"))
    prompt = random_tokens(batch, context, vocabulary, bench.device, bench.seed)

    def cache():
        if arm == "sdpa":
            return DynamicCache()
        if arm == "locks-full":
            return LocksCache(selector="full", max_cache_len=context)
        rank, bits = parse_arm(arm).locks
        return LocksCache(
            rank, bench.budget, basis_bits=bits, refit=bench.refit, selector=selector, max_cache_len=context
        )

    times, builds = [], []
    with on(bench.model, "sdpa" if arm == "sdpa" else "locks"):
        short = prompt[:, : min(context, chunk + 16 if chunk else _WARM_UP_TOKENS)]
        prefill(bench.model, cache(), short, chunk)
        selector.take_ms()
        for _ in range(repeats):
            empty = cache()
            clock.wait()
            start = clock.mark()
            prefill(bench.model, empty, prompt, chunk)
            end = clock.mark()
            builds.append(selector.take_ms())
            times.append(clock.ms(start, end) / 1e3)
            del empty
    values = {"ttft_s": times, "ttft_s_mean": statistics.fmean(times), "ttft_s_sd": _sd(times)}
    if arm.startswith("locks-r"):
        values |= {"build_ms": builds, "build_ms_mean": statistics.fmean(builds), "build_ms_sd": _sd(builds)}
    return values


def _sd(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
