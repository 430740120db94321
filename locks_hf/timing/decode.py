"""``decode``: a complete decode step at each context, batch and arm (paper Tables B.13, C.22, C.23)."""

from __future__ import annotations

import argparse
import functools
from itertools import product

from .arms import GPU_GROUPS, Arm, Bench, HeldContext, needs, open_session, parse_arms
from .harness import Protocol, many_arms, measure
from .profile import profile_steps
from .run import Run, add_options, open_run, plan_memory, positive, progress, protocol_of, say, tokens
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

    @functools.cache
    def bench() -> Bench:
        return this.bench(protocol, fill=args.fill, chunk=args.chunk)  # made when the first cell needs it

    shared = _Shared()
    todo = [place for place, (cell, _) in enumerate(cells) if not this.store.has(cell)]
    with many_arms(), progress(len(cells) * (2 if args.profile else 1)) as bar:
        bar.update(len(cells) - len(todo))
        for place in todo:
            cell, arm = cells[place][0], places[place]
            bar.set_postfix_str(f"{arm.name} {cell['context']}x{cell['batch']}")
            if arm.name in absent:
                this.attempt(cell, ("absent", absent[arm.name]), dict)
            elif place in refused:
                this.attempt(cell, ("does not fit", refused[place]), dict)
            else:
                held = shared.of(bench(), cell)
                this.attempt(cell, None, _time, this, bench(), arm, held, cell["context"], cell["batch"])
            bar.update()
        # After all timing: once used, the profiler adds to every launch, for as long as the process lives.
        for place, (cell, _) in enumerate(cells if args.profile else ()):
            arm, timed = places[place], this.store.get(cell)
            bar.set_postfix_str(f"profile of {arm.name} {cell['context']}x{cell['batch']}")
            measured = timed is not None and timed["status"] == "ok" and "profile" not in timed
            if measured and arm.name not in absent and place not in refused:
                _profile(this, bench(), arm, shared.of(bench(), cell), timed)
            bar.update()


class _Shared:
    """The held context of the cell before, for as long as the next has the same."""

    def __init__(self):
        self._context: HeldContext | None = None
        self._where: tuple[int, int] | None = None

    def of(self, bench: Bench, cell: dict) -> HeldContext:
        """The held context of a cell."""
        where = (cell["context"], cell["batch"])
        if where != self._where:
            if self._context is not None:
                self._context.drop()
            self._context, self._where = HeldContext(bench, *where), where
        return self._context


def _time(this: Run, bench: Bench, arm: Arm, shared: HeldContext, context: int, batch: int) -> dict:
    with open_session(bench, arm, context, batch, shared) as session:
        values = measure(session, this.clock, this.monitor, bench.protocol)
        return {**values, **session.facts, "tokens_per_s": batch * 1e3 / values["ms_mean"]}


def _profile(this: Run, bench: Bench, arm: Arm, shared: HeldContext, timed: dict) -> None:
    """Add a profile to a cell, if there is one to be had: whatever happens, its timing stays."""
    context, batch = timed["cell"]["context"], timed["cell"]["batch"]
    where = f"{arm.name}, {context} tokens, batch {batch}"
    try:
        with open_session(bench, arm, context, batch, shared) as session:
            profile = profile_steps(session, this.clock)
    except Exception as error:  # profilers, compilers and drivers fail in ways of their own
        say(f"no profile of {where}: {type(error).__name__}: {error}")
        return
    if profile is None:
        say(f"no profile of {where}: there is no GPU, or its profiler gave nothing")
    elif not this.store.amend(timed, profile=profile):
        say(f"no profile of {where}: it was timed on another machine or with other versions")
