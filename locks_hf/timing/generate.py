"""``generate``: ``model.generate`` itself, as users call it, against a DynamicCache on SDPA.

The cache is filled with all but the prompt's last token, so that no prefill is waited for. What is reported apart:
the first token, and start-up: how much longer the tokens that are skipped took than as many steady ones, which is
where compilation and graph capture show.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from locks_hf import LocksCache, patch

from .arms import Arm, Bench, needs, on, parse_arms
from .clock import Clock
from .fill import cache_argument, random_tokens
from .harness import Protocol
from .run import Run, add_options, open_run, plan_memory, positive, progress, tokens
from .tables import generate_table

HOW = ("compile", "graphs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add_options(parser, generates=True)
    parser.add_argument("--contexts", type=tokens, nargs="+", default=[128 << 10], metavar="TOKENS")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1])
    parser.add_argument("--arms", nargs="+", default=["locks-r4i4", "dynamic"], metavar="ARM")
    parser.add_argument(
        "--how",
        nargs="+",
        choices=HOW,
        default=list(HOW),
        help="how Locks decodes: compiled by Transformers, or recorded with patch(model, cuda_graphs=True)",
    )
    parser.add_argument("--new", type=tokens, default=256, metavar="TOKENS", help="tokens generated")
    parser.add_argument("--skip", type=tokens, default=64, metavar="TOKENS", help="of them, before the steady state")
    parser.add_argument("--fill", choices=("synthetic", "prefill"), default="synthetic")
    parser.add_argument("--chunk", type=tokens, default=8192, help="tokens a pass of --fill prefill")


def run(args: argparse.Namespace, command: str) -> str:
    """Measure, and give the table.

    Raises:
        ValueError: For anything that cannot be done here.
    """
    if args.skip >= args.new:
        raise ValueError(f"--skip {args.skip} leaves nothing of --new {args.new}")
    if min(args.contexts) < 2:
        raise ValueError("generate needs contexts of at least 2 tokens")
    settings = {"new": args.new, "skip": args.skip, "fill": args.fill, "linear": args.linear}
    this = open_run(args, command, "generate", settings)
    with this.store:
        _measure(this)
        this.store.finish()
        return generate_table(this.store.cells, this.clock.is_measurement)


def _measure(this: Run) -> None:
    args = this.args
    arms = parse_arms(args.arms, this.device)
    for arm in arms:
        if not arm.locks and arm.name != "dynamic":
            raise ValueError(f"generate compares locks-r<rank>i<bits> and dynamic, not {arm.name}")
    cells, places = [], []
    for batch, context in product(args.batch, args.contexts):
        for arm in arms:
            for how in dict.fromkeys(args.how) if arm.locks else ("eager",):
                cell = {"context": context, "batch": batch, "arm": arm.name, "how": how}
                room = 2 * args.new + 2048
                cells.append((cell, needs(this.shape, arm, context, batch, room, this.dtype, this.clock)))
                places.append(arm)
    refused = plan_memory(this, cells)
    this.begin({"contexts": args.contexts, "batches": args.batch, "arms": [arm.name for arm in arms]})
    todo = [place for place, (cell, _) in enumerate(cells) if not this.store.has(cell)]
    bench = None
    with progress(len(cells)) as bar:
        bar.update(len(cells) - len(todo))
        for place in todo:
            cell, arm, reason = cells[place][0], places[place], None
            if place in refused:
                reason = ("does not fit", refused[place])
            elif bench is None:
                bench = this.bench(Protocol(), fill=args.fill, chunk=args.chunk)
            bar.set_postfix_str(f"{arm.name} {cell['context']}x{cell['batch']}")
            this.attempt(cell, reason, time_generate, bench, arm, cell, args.new, args.skip)
            this.clock.release()
            bar.update()


class _Stamps(StoppingCriteria):
    """Never stops; notes on the host when the first token and another one were there."""

    def __init__(self, clock: Clock, another: int):
        self.times: list[float] = []
        self.tokens = 0
        self._clock, self._when = clock, (1, another)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **kwargs) -> torch.Tensor:
        self.tokens += 1
        if self.tokens in self._when:
            self._clock.wait()  # the host may be ahead of the device
            self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def time_generate(bench: Bench, arm: Arm, cell: dict, new: int, skip: int) -> dict:
    """Time one call of ``generate``.

    Args:
        bench: What all cells share.
        arm: The arm.
        cell: Its ``context``, ``batch`` and ``how`` it decodes.
        new: Tokens to generate.
        skip: Tokens before the steady state.

    Returns:
        ``ms_per_token`` and ``tokens_per_s`` of the steady state (whole batch), ``first_token_s``, ``start_up_s``, and
        the cache's counts of sparse and dense steps.

    Raises:
        ValueError: If ``generate`` stopped early.
    """
    model, context, batch = bench.model, cell["context"], cell["batch"]
    implementation = "locks" if arm.locks else "sdpa"
    cache = bench.locks_cache(arm, None) if arm.locks else DynamicCache()
    bench.load(cache, batch, context - 1, implementation)
    vocabulary = bench.shape.config.get_text_config(decoder=True).vocab_size
    prompt = random_tokens(batch, context, vocabulary, bench.device, bench.seed)
    stamps, settings = _Stamps(bench.clock, skip), model.generation_config
    ends, settings.eos_token_id = settings.eos_token_id, None
    bench.clock.wait()
    try:
        graphs = cell["how"] == "graphs"
        options = {"cuda_graphs": graphs, "fast_linear": bench.fast_linear, "run_ahead": True}
        with patch(model, **options) if arm.locks else on(model, "sdpa"):
            start = time.perf_counter()
            output = model.generate(
                prompt,
                max_new_tokens=new,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([stamps]),
                **{cache_argument(model): cache},
            )
            bench.clock.wait()
            end = time.perf_counter()
    finally:
        settings.eos_token_id = ends
    if output.shape[1] != context + new or stamps.tokens < skip:
        raise ValueError(f"generate gave {output.shape[1] - context} tokens instead of {new}")
    first, skipped = stamps.times[0], stamps.times[-1]
    steady = (end - skipped) / (new - skip)
    values = {
        "ms_per_token": steady * 1e3,
        "tokens_per_s": batch / steady,
        "first_token_s": first - start,
        "start_up_s": skipped - first - (skip - 1) * steady,
    }
    if isinstance(cache, LocksCache):
        stats = cache.stats()
        values |= {"sparse_steps": stats.sparse_steps, "dense_steps": stats.dense_steps}
        if stats.dense_steps:
            values["note"] = f"{stats.dense_steps} dense steps: context within the budget"
    return values
