"""The decode step every arm is timed with, and the windows it is timed in (paper App. C.7).

A step is one token a row through the whole model, the next token's argmax included, on static inputs. It is compiled or
not, captured into one CUDA graph, and replayed: the same for dense attention, Quest and Locks.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .clock import WARM_UP, Clock
from .fill import cache_argument
from .monitor import Monitor, Sample

# Steps before a window that are not timed: the GPU has idled while the state was rewound.
LEAD_IN = 4


@dataclass(frozen=True)
class Protocol:
    """How long to measure.

    Attributes:
        steps: Steps a window.
        windows: Windows kept.
        retries: Windows that may be dropped and repeated for throttling, in all.
        settle_s: Longest wait for the clocks, in seconds.
        settle_steps: Steps of the windows whose means are compared meanwhile.
        tolerance: Relative difference of successive means at which the clocks have settled.
    """

    steps: int = 64
    windows: int = 3
    retries: int = 3
    settle_s: float = 3.0
    settle_steps: int = 16
    tolerance: float = 0.01

    def __post_init__(self):
        if self.steps < 2 or self.windows < 1 or self.retries < 0 or self.settle_s < 0 or self.settle_steps < 1:
            raise ValueError(f"a protocol needs at least one window of two steps and no negative number, got {self}")

    @property
    def room(self) -> int:
        """Tokens a cache must have room for behind its context: it is rewound after each window."""
        return max(self.steps + LEAD_IN, self.settle_steps) + 2 * (WARM_UP + 1) + 8

    def asdict(self) -> dict:
        """As JSON types."""
        return asdict(self)


def decode_once(forward: Callable, token: torch.Tensor, position: torch.Tensor, arguments: dict) -> torch.Tensor:
    """One greedy step: ``token`` and ``position`` ``(B, 1)`` become those of the next one.

    Args:
        forward: The model, or its compiled forward pass.
        token: The token to process.
        position: Its position.
        arguments: Others of ``forward``, the cache among them.

    Returns:
        Logits ``(B, vocabulary)``.
    """
    logits = forward(token, position_ids=position, **arguments).logits[:, -1]
    token.copy_(logits.argmax(-1, keepdim=True))
    position.add_(1)
    return logits


class Compiler:
    """Makes the step's function: as it is, or compiled. One instance serves a whole run.

    Args:
        kind: ``"eager"`` or ``"compiled"``.
        mode: ``torch.compile`` mode; modes with CUDA graphs of their own are not for this harness.
        device: On the CPU the graph is traced, but run as it is.

    Raises:
        ValueError: If the mode captures graphs itself.
    """

    def __init__(self, kind: str, mode: str, device: torch.device):
        if mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"mode {mode} captures CUDA graphs of its own, inside the harness's: use default or "
                "max-autotune-no-cudagraphs"
            )
        self.kind = kind
        self.traces = 0
        self.function = decode_once
        if kind == "compiled":
            backend = self._counting if device.type == "cpu" else "inductor"
            options = {} if device.type == "cpu" or mode == "default" else {"mode": mode}
            self.function = torch.compile(decode_once, fullgraph=True, backend=backend, **options)

    def _counting(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.traces += 1
        return graph.forward


@contextmanager
def many_arms() -> Iterator[None]:
    """Let one compiled function serve all arms: static shapes, but for those marked, and no limit on how many."""
    config = torch._dynamo.config
    with config.patch(automatic_dynamic_shapes=False, recompile_limit=256, accumulated_recompile_limit=4096):
        yield


class Step:
    """A decode step on static inputs, callable.

    Args:
        function: :func:`decode_once`, or what a :class:`Compiler` made of it.
        model: On the attention implementation of the arm.
        batch: Rows.
        position: Position of the first new token.
        device: Where the inputs live.
        cache: The cache, or ``None`` for attention that holds its context itself.

    Attributes:
        logits: Of the last step, ``(B, vocabulary)``; in a graph the memory that each replay writes.
    """

    def __init__(
        self,
        function: Callable,
        model: PreTrainedModel,
        batch: int,
        position: int,
        device: torch.device,
        cache: Cache | None,
    ):
        self._model, self._function, self._start = model, function, position
        self.token = torch.zeros((batch, 1), dtype=torch.long, device=device)
        self.position = torch.full((batch, 1), position, dtype=torch.long, device=device)
        self._arguments = {"use_cache": cache is not None}
        if cache is not None:
            self._arguments[cache_argument(model)] = cache
        self.logits: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        """Run it once."""
        self.logits = self._function(self._model, self.token, self.position, self._arguments)

    def rewind(self) -> None:
        """Back to the first position and token."""
        self.position.fill_(self._start)
        self.token.zero_()


class Session:
    """A step that is ready to be timed.

    Args:
        run: Runs the step once: a graph's replay, or the step itself.
        rewind: Brings the state back to where the windows begin, given the steps made since.
        logits: The logits of the last step, to be checked.
        facts: What to store with the cell.
    """

    def __init__(
        self,
        run: Callable[[], object],
        rewind: Callable[[int], None],
        logits: Callable[[], torch.Tensor | None],
        facts: dict | None = None,
    ):
        self.run, self._rewind, self.logits = run, rewind, logits
        self.facts = facts or {}
        self._steps = 0

    def step(self) -> None:
        """Run the step once."""
        self.run()
        self._steps += 1

    def rewind(self) -> None:
        """Back to where the windows begin."""
        if self._steps:
            self._rewind(self._steps)
            self._steps = 0


def check_finite(session: Session) -> None:
    """Run one step and look at its logits.

    Raises:
        ValueError: If they are not finite: what was timed then would be no decoding.
    """
    session.step()
    logits = session.logits()
    if logits is not None and not bool(torch.isfinite(logits).all()):
        raise ValueError("the step's logits are not finite: there is a NaN or an infinity in the cache or the weights")
    session.rewind()


def time_window(session: Session, clock: Clock, monitor: Monitor, steps: int) -> tuple[list[float], Sample]:
    """Milliseconds of each of ``steps`` steps in a row, and a reading of the GPU while it still works on them.

    A few steps before them are not timed.
    """
    for _ in range(LEAD_IN):
        session.step()
    marks = [clock.mark()]
    for _ in range(steps):
        session.step()
        marks.append(clock.mark())
    sample = monitor.sample()
    clock.wait()
    return [clock.ms(start, end) for start, end in pairwise(marks)], sample


def settle(session: Session, clock: Clock, monitor: Monitor, protocol: Protocol) -> tuple[bool, float]:
    """Replay until the means of successive windows agree.

    Returns:
        Whether they came to agree, and the milliseconds it took.
    """
    spent, before = 0.0, None
    while spent < protocol.settle_s * 1e3:
        marks = clock.mark()
        for _ in range(protocol.settle_steps):
            session.step()
        end = clock.mark()
        clock.wait()
        window = clock.ms(marks, end)
        spent += window
        session.rewind()
        if before is not None and abs(window - before) <= protocol.tolerance * before:
            return True, spent
        before = window
    return False, spent


def measure(session: Session, clock: Clock, monitor: Monitor, protocol: Protocol) -> dict:
    """Time a session by the protocol.

    Windows during which the GPU says that it is slowed down are dropped and repeated, up to ``protocol.retries`` of
    them in all; when those are spent, throttled windows are kept and the cell says so.

    Returns:
        JSON types: ``ms_mean`` and ``ms_sd`` over all kept steps, ``window_ms`` (mean of each kept window), ``steps``,
        ``dropped_windows``, ``throttled`` (why, if kept windows were; ``None``: unknown), ``settled``, ``settle_ms``,
        ``gpu`` (the last reading).

    Raises:
        ValueError: If the step's logits are not finite.
    """
    check_finite(session)
    settled, settle_ms = settle(session, clock, monitor, protocol)
    kept, reasons, dropped, sample = [], [], 0, Sample()
    collecting = gc.isenabled()
    gc.disable()  # a collection in a window would show as one slow step
    try:
        while len(kept) < protocol.windows:
            session.rewind()
            times, sample = time_window(session, clock, monitor, protocol.steps)
            if sample.slowed and dropped < protocol.retries:
                dropped += 1
                continue
            kept.append(times)
            reasons.append(sample.slowed)
    finally:
        if collecting:
            gc.enable()
    session.rewind()
    steps = [ms for window in kept for ms in window]
    known = [reason for reason in reasons if reason is not None]
    return {
        "ms_mean": statistics.fmean(steps),
        "ms_sd": statistics.stdev(steps),
        "window_ms": [statistics.fmean(window) for window in kept],
        "steps": len(steps),
        "dropped_windows": dropped,
        "throttled": ", ".join(sorted({part for part in known if part})) if known else None,
        "settled": settled,
        "settle_ms": settle_ms,
        "gpu": sample.asdict(),
    }
