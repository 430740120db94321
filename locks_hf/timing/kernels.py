"""``kernels``: each operation alone, in microseconds and in bytes a second, beside the ceiling of the same run.

One graph calls an operation once for each layer of a synthetic cache, so that each call reads other memory than the
ones before it; the layers' arrays together are larger than the L2 cache of current GPUs at all but short contexts, and
a remark says where they are not. Bytes are those the layout requires, each counted once. ``linear`` is all linear
layers of a model, one after the other, with torch's products and with those of ``--linear fast``.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import nn

from locks_hf import LocksCache
from locks_hf.kernels import SummaryLayout, attend, combine, decode_step, score, summarize, top_pages
from locks_hf.kernels.linear import linear
from locks_hf.linears import fast_linears

from .arms import Arm, needs, parse_arm
from .clock import WARM_UP, Clock
from .fill import PAGE, fill_synthetic
from .memory import Needs, refusal
from .run import Run, add_options, open_run, plan_memory, positive, progress, tokens
from .shapes import make_model
from .tables import kernels_table

OPS = ("summarize", "score", "select", "attend", "step", "linear")
LINEARS = ("torch", "fast")
_SUMMARIZED = 1 << 16  # pages a call of summarize
_CEILING_BYTES = 4 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add_options(parser)
    parser.add_argument(
        "--contexts", type=tokens, nargs="+", default=[k << 10 for k in (16, 128, 512)], metavar="TOKENS"
    )
    parser.add_argument("--batch", type=positive, nargs="+", default=[1])
    parser.add_argument("--arms", nargs="+", default=["locks-r4i4", "locks-r8i4"], metavar="ARM")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--layers", type=positive, help="layers to rotate over (default: the model's)")
    parser.add_argument("--repeats", type=positive, default=30, help="replays of the graph that are timed")


def run(args: argparse.Namespace, command: str) -> str:
    """Measure, and give the table.

    Raises:
        ValueError: For anything that cannot be done here.
    """
    arms = [parse_arm(name) for name in dict.fromkeys(args.arms)]
    for arm in arms:
        if not arm.locks:
            raise ValueError(
                f"kernels times the operations of Locks, which {arm.name} is not: use locks-r<rank>i<bits>"
            )
    if min(args.contexts) < PAGE:
        raise ValueError(f"kernels needs contexts of at least one page of {PAGE} tokens")
    this = open_run(args, command, "kernels", {"repeats": args.repeats, "layers": args.layers})
    with this.store:
        _measure(this, arms)
        this.store.finish()
        return kernels_table(this.store.cells, this.clock.is_measurement)


def _measure(this: Run, arms: list[Arm]) -> None:
    args = this.args
    shape = replace(this.shape, layers=args.layers or this.shape.layers, parameters=0)
    room = _room(args.repeats)
    ops = [op for op in args.ops if op != "linear"]
    groups = list(product(args.batch, args.contexts, arms)) if ops else []
    wanted = []
    for batch, context, arm in groups:
        takes = needs(shape, arm, context, batch, room, this.dtype, this.clock)
        wanted.append(({"context": context, "batch": batch, "arm": arm.name}, takes))
    refused = plan_memory(this, wanted)
    this.begin({"contexts": args.contexts, "batches": args.batch, "arms": args.arms, "ops": args.ops})
    kinds = product(args.batch, LINEARS) if "linear" in args.ops else ()
    linears = [{"op": "linear", "batch": batch, "arm": kind} for batch, kind in kinds]
    with progress(len(groups) * len(ops) + len(linears) + 2, "op") as bar:
        for op in ("read", "copy"):
            if not this.store.has({"op": op}):
                this.attempt({"op": op}, None, ceiling, op, this.clock, this.free, args.repeats)
            bar.update()
        _measure_linears(this, linears, bar)
        for place, (batch, context, arm) in enumerate(groups):
            cells = {op: {"op": op, "context": context, "batch": batch, "arm": arm.name} for op in ops}
            todo = {op: cell for op, cell in cells.items() if not this.store.has(cell)}
            bar.update(len(cells) - len(todo))
            bar.set_postfix_str(f"{arm.name} {context}x{batch}")
            if place in refused:
                for cell in todo.values():
                    this.attempt(cell, ("does not fit", refused[place]), dict)
                bar.update(len(todo))
                continue
            bodies: dict = {}
            for op, cell in todo.items():
                this.attempt(cell, None, _time, op, this, shape, arm, context, batch, bodies)
                bar.update()
            bodies.clear()
            this.clock.release()


def _measure_linears(this: Run, cells: list[dict], bar) -> None:
    too_much = refusal(Needs(weights=this.shape.parameters * this.dtype.itemsize), this.free)

    @functools.cache
    def model() -> nn.Module:
        return make_model(this.shape, this.device, this.dtype, this.args.seed)  # when the first cell needs it

    for cell in cells:
        if not this.store.has(cell):
            this.attempt(cell, too_much and ("does not fit", too_much), _time_linears, this, model, cell)
        bar.update()
    model.cache_clear()
    this.clock.release()


def _time_linears(this: Run, model: Callable[[], nn.Module], cell: dict) -> dict:
    layers = [module for module in model().modules() if type(module) is nn.Linear]
    generator = torch.Generator(this.device).manual_seed(this.args.seed)
    inputs = {
        size: torch.randn((cell["batch"], 1, size), generator=generator, dtype=this.dtype, device=this.device)
        for size in {layer.in_features for layer in layers}
    }

    def body() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    with torch.no_grad(), fast_linears(model()) if cell["arm"] == "fast" else nullcontext():
        us = time_calls(this.clock, body, 1, this.args.repeats)
    moved = sum(layer.weight.nbytes for layer in layers)
    return {**rates(us, moved), "note": f"all {len(layers)} linear layers of the model"}


def _room(repeats: int) -> int:
    return repeats + WARM_UP + 8 + PAGE


def _time(op: str, this: Run, shape, arm: Arm, context: int, batch: int, bodies: dict) -> dict:
    if not bodies:  # the first op makes what all of them use; if it cannot, the next one tries again
        bodies.update(_bodies(this, shape, arm, context, batch))
    body, moved, after = bodies[op]
    us = time_calls(this.clock, body, shape.layers, this.args.repeats)
    after()
    values = rates(us, moved)
    notes = []
    if op == "summarize":
        notes.append(f"{min(_SUMMARIZED, context // PAGE)} pages of one KV head a call")
    if moved * shape.layers < 2 * _l2_bytes(this.clock):
        notes.append("all layers together are less than twice the L2 cache")
    return {**values, "note": "; ".join(notes)}


def _l2_bytes(clock: Clock) -> int:
    if clock.device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(clock.device), "L2_cache_size", 0))


def rates(us: list[float], moved: int) -> dict:
    """Values of a cell from microseconds a call and bytes a call."""
    mean = statistics.fmean(us)
    sd = statistics.stdev(us) if len(us) > 1 else None
    return {"us_mean": mean, "us_sd": sd, "bytes": moved, "gb_per_s": moved / mean / 1e3}


def time_calls(clock: Clock, body: Callable[[], object], calls: int, repeats: int) -> list[float]:
    """Microseconds a call in each of ``repeats`` replays of a body that makes ``calls`` calls."""
    replay = clock.capture(body)
    replay()
    marks = [clock.mark()]
    for _ in range(repeats):
        replay()
        marks.append(clock.mark())
    clock.wait()
    return [clock.ms(start, end) * 1e3 / calls for start, end in pairwise(marks)]


def ceiling(op: str, clock: Clock, free: int, repeats: int) -> dict:
    """What plain reading or copying reaches on this device, in the same units; of ways to read the fastest."""
    size = min(_CEILING_BYTES if clock.device.type == "cuda" else 1 << 22, free // 4)
    channels = 4096
    matrix = torch.zeros((size // 2 // channels, channels), dtype=torch.bfloat16, device=clock.device)
    source = matrix.view(torch.float32)
    if op == "copy":
        target = torch.empty_like(source)
        us = time_calls(clock, lambda: torch.neg(source, out=target), 1, repeats)
        return rates(us, 2 * source.nbytes) | {"note": "torch.neg, float32, read and written"}
    vector = torch.zeros((1, channels), dtype=torch.bfloat16, device=clock.device)
    ways = {
        "torch.sum, float32": lambda: source.sum(),
        "torch.amax, float32": lambda: source.amax(),
        "matrix times vector by torch, bfloat16": lambda: F.linear(vector, matrix),
        "matrix times vector by --linear fast, bfloat16": lambda: linear(vector, matrix),
    }
    times = {name: time_calls(clock, way, 1, repeats) for name, way in ways.items()}
    fastest = min(times, key=lambda name: statistics.fmean(times[name]))
    return rates(times[fastest], source.nbytes) | {"note": fastest}


def _bodies(this: Run, shape, arm: Arm, context: int, batch: int) -> dict[str, tuple[Callable, int, Callable]]:
    """For each op a body that calls it for every layer, the bytes of a call, and what is done after it was timed."""
    args, device, dtype = this.args, this.device, this.dtype
    rank, bits = arm.locks
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    layout = SummaryLayout(head_dim, rank, PAGE, bits)
    cache = LocksCache(
        rank, args.budget, basis_bits=bits, refit=not args.no_refit, max_cache_len=context + _room(args.repeats)
    )
    fill_synthetic(cache, shape.layers, batch, kv_heads, context, head_dim, device, dtype, args.seed)
    layers, config = cache.locks_layers, cache.locks_config
    slots, scaling, pages = config.page_slots, head_dim**-0.5, context // PAGE
    generator = torch.Generator(device).manual_seed(args.seed)
    query = torch.randn((shape.layers, batch, heads, head_dim), generator=generator, dtype=dtype, device=device)
    new = torch.randn((2, shape.layers, batch, kv_heads, head_dim), generator=generator, dtype=dtype, device=device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    n_pages = torch.full((batch,), pages, dtype=torch.int32, device=device)
    each = list(enumerate(layers))

    def scores(index: int) -> torch.Tensor:
        return score(query[index], layers[index].summaries, n_pages, pages, layout, scaling)

    # One score array a layer, so that select reads other memory each time as well.
    lse = [scores(index) for index, _ in each]
    chosen = [top_pages(combine(one, n_pages, config.combine), lengths, PAGE, slots) for one in lse]
    summarized = min(_SUMMARIZED, pages)

    def body_of(call: Callable[[int, object], object]) -> Callable[[], None]:
        def body() -> None:
            for index, layer in each:
                call(index, layer)

        return body

    def one_summarize(index: int, layer) -> None:
        keys = layer.key_buffer[0, index % kv_heads, : summarized * PAGE].unflatten(0, (summarized, PAGE))
        summarize(keys, layout, config.refit)

    def one_select(index: int, layer) -> None:
        top_pages(combine(lse[index], n_pages, config.combine), lengths, PAGE, slots)

    def one_attend(index: int, layer) -> None:
        attend(query[index], layer.key_buffer, layer.value_buffer, chosen[index], lengths, PAGE, scaling)

    def one_step(index: int, layer) -> None:
        decode_step(
            query[index],
            new[0, index],
            new[1, index],
            None,
            layer.key_buffer,
            layer.value_buffer,
            layer.summaries,
            layer.counts,
            layout,
            config.refit,
            config.combine,
            slots,
            scaling,
        )

    def rewind() -> None:
        cache.crop(context - layers[0].max_length)

    rows, size = batch * kv_heads, dtype.itemsize
    scored = rows * pages * layout.bytes_per_page
    selected = rows * pages * 4 * (heads // kv_heads + 2)  # scores read, values written and read
    attended = rows * min(slots, -(-context // PAGE)) * PAGE * 2 * head_dim * size
    return {
        "summarize": (body_of(one_summarize), summarized * (PAGE * head_dim * size + layout.bytes_per_page), _nothing),
        "score": (body_of(lambda index, layer: scores(index)), scored + 4 * batch * heads * pages, _nothing),
        "select": (body_of(one_select), selected, _nothing),
        "attend": (body_of(one_attend), attended, _nothing),
        "step": (body_of(one_step), scored + 4 * batch * heads * pages + selected + attended, rewind),
    }


def _nothing() -> None:
    pass
