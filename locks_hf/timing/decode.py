"""``decode``: a complete decode step at each context, batch and arm (paper Tables B.13, C.22, C.23)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

from .arms import GPU_GROUPS, Arm, Bench, HeldContext, needs, open_session, parse_arms
from .harness import Protocol, many_arms, measure
from .profile import profile_steps
from .run import Run, add_options, open_run, plan_memory, positive, progress, protocol_of, say, tokens
from .store import cell_key
from .tables import decode_table, profile_table

_ORDER = {"held": 0, "locks": 1, "user": 2}  # the arms that share a context follow each other
CONTEXTS = tuple(k << 10 for k in (16, 32, 64, 128, 256, 512, 1024))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    add_options(parser, windows=True)
    parser.add_argument("--contexts", type=tokens, nargs="+", default=list(CONTEXTS), metavar="TOKENS", help="K = 1024")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1], help="rows; several sweep")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["default"],
        metavar="ARM",
        help="dense (the dense backends that are installed: cudnn, flash, fa3, flashinfer), default (those and none, "
        "quest, locks-r4i4, locks-r8i4), each of these by name, math, locks-r<rank>i<bits>, dynamic and static (what "
        "Transformers does by itself)",
    )
    parser.add_argument("--profile", action="store_true", help="profile three steps of each cell when all are timed")


def run(args: argparse.Namespace, command: str) -> str:
    """Measure, and give the table.

    Raises:
        ValueError: For anything that cannot be done here.
    """
    protocol = protocol_of(args)
    settings = {
        "step": args.step,
        "compile_mode": args.compile_mode,
        "linear": args.linear,
        "fill": args.fill,
        "chunk": args.chunk if args.fill == "prefill" else None,
        "protocol": protocol.asdict(),
    }
    this = open_run(args, command, "decode", settings)
    with this.store:
        _measure(this, protocol)
        this.store.finish()
        tables = [decode_table(this.store.cells, this.clock.is_measurement), profile_table(this.store.cells)]
        return "\n\n".join(table for table in tables if table)


def _measure(this: Run, protocol: Protocol) -> None:
    args = this.args
    arms = sorted(parse_arms(args.arms, this.device), key=lambda arm: _ORDER[arm.kind])
    named = [name for name in args.arms if name not in GPU_GROUPS]
    absent = this.refuse_absent(arms, named)
    cells, places = [], []
    for batch, context in product(args.batch, args.contexts):
        for arm in arms:
            cell = {"context": context, "batch": batch, "arm": arm.name}
            cells.append((cell, needs(this.shape, arm, context, batch, protocol.room, this.dtype, this.clock)))
            places.append(arm)
    refused = plan_memory(this, cells)
    this.begin({"contexts": args.contexts, "batches": args.batch, "arms": [arm.name for arm in arms]})

    def sweep(todo: list[int], measure_one: Callable[..., dict]) -> None:
        bench, shared, where = None, None, None
        for place in todo:
            cell, arm = cells[place][0], places[place]
            reason = None
            if arm.name in absent:
                reason = ("absent", absent[arm.name])
            elif place in refused:
                reason = ("does not fit", refused[place])
            elif not benches:
                benches.append(this.bench(protocol, fill=args.fill, chunk=args.chunk))
            bench = benches[0] if benches else None
            if where != (cell["context"], cell["batch"]):
                where = (cell["context"], cell["batch"])
                if shared is not None:
                    shared.drop()
                shared = None
            if shared is None and bench is not None:
                shared = HeldContext(bench, *where)
            bar.set_postfix_str(f"{arm.name} {where[0]}x{where[1]}")
            this.attempt(cell, reason, measure_one, this, bench, arm, shared, *where)
            bar.update()

    benches: list[Bench] = []  # made when the first cell needs it
    todo = [place for place, (cell, _) in enumerate(cells) if not this.store.has(cell)]
    with many_arms(), progress(len(cells) * (2 if args.profile else 1)) as bar:
        bar.update(len(cells) - len(todo))
        sweep(todo, _time)
        if args.profile:
            # After all timing: once used, the profiler adds to every launch, for as long as the process lives.
            timed = {cell_key(cell["cell"]): cell for cell in this.store.cells if cell["status"] == "ok"}
            todo = [place for place, (cell, _) in enumerate(cells) if "profile" not in timed.get(cell_key(cell), {})]
            todo = [place for place in todo if cell_key(cells[place][0]) in timed]
            bar.update(len(cells) - len(todo))
            sweep(todo, _profile)


def _time(this: Run, bench: Bench, arm: Arm, shared: HeldContext, context: int, batch: int) -> dict:
    with open_session(bench, arm, context, batch, shared) as session:
        values = measure(session, this.clock, this.monitor, bench.protocol)
        return {**values, **session.facts, "tokens_per_s": batch * 1e3 / values["ms_mean"]}


def _profile(this: Run, bench: Bench, arm: Arm, shared: HeldContext, context: int, batch: int) -> dict:
    """What :func:`_time` gave, and a profile; ``None`` if there is none to be had, which costs no timing."""
    key = cell_key({"context": context, "batch": batch, "arm": arm.name})
    timed = next(cell for cell in this.store.cells if cell_key(cell["cell"]) == key)
    profile = None
    try:
        with open_session(bench, arm, context, batch, shared) as session:
            profile = profile_steps(session, this.clock)
    except (RuntimeError, ValueError) as error:  # out of memory among them
        say(f"no profile: {error}")
    return {**{name: value for name, value in timed.items() if name not in ("cell", "status")}, "profile": profile}
