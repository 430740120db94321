"""Arms: what is timed beside each other on the same context.

Four kinds. *Held* arms (dense backends, Quest, none) attend a context that does not grow. *Locks* arms run
:class:`locks_hf.LocksCache` on ``"locks"`` through the model, their counts moving on by themselves. Both are captured
into a CUDA graph. *User* arms are what Transformers does by itself, without the harness's graph: ``dynamic`` is a
DynamicCache with eager SDPA, ``static`` a StaticCache with SDPA under ``torch.compile(mode="reduce-overhead")``.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from locks_hf import LocksCache, patch
from locks_hf.config import LocksConfig
from locks_hf.kernels import SummaryLayout
from locks_hf.linears import fast_linears

from .backends import DENSE, PAGE, Backend, Held, attending, make_backend, registered
from .clock import WARM_UP, Clock
from .fill import fill_synthetic, prefill, random_tokens
from .harness import Compiler, Protocol, Session, Step, decode_once
from .memory import Needs, slack
from .shapes import Shape

_LOCKS = re.compile(r"locks-r(\d+)i(\d+)")
HELD = (*DENSE, "quest", "none")
USER = ("dynamic", "static")
#: Names that stand for several arms, of which those are measured that are there: on a GPU, and for trials on the CPU.
GPU_GROUPS = {
    "dense": ("cudnn", "flash", "fa3", "flashinfer"),
    "default": ("none", "cudnn", "flash", "fa3", "flashinfer", "quest", "locks-r4i4", "locks-r8i4"),
}
CPU_GROUPS = {"dense": ("math",), "default": ("none", "math", "quest", "locks-r4i4", "locks-r8i4")}


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: As given.
        locks: Rank and basis bits of a Locks arm.
    """

    name: str
    locks: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """``"held"``, ``"locks"`` or ``"user"``."""
        return "locks" if self.locks else "user" if self.name in USER else "held"

    @property
    def is_dense(self) -> bool:
        """Whether it is one of the dense backends a speed-up is against."""
        return self.name in DENSE

    @property
    def label(self) -> str:
        """As tables show it."""
        labels = {"cudnn": "cuDNN", "flash": "FA2 (torch)", "fa3": "FA3", "flashinfer": "FlashInfer", "quest": "Quest"}
        labels |= {"none": "no attention", "dynamic": "DynamicCache", "static": "StaticCache, compiled"}
        return f"Locks {self.name.removeprefix('locks-')}" if self.locks else labels.get(self.name, self.name)


def parse_arms(names: list[str], device: torch.device) -> list[Arm]:
    """Arms by their names, each once; ``default`` and ``dense`` stand for several.

    Raises:
        ValueError: If a name is unknown, or a rank or number of bits is out of range.
    """
    arms: dict[str, Arm] = {}
    groups = GPU_GROUPS if device.type == "cuda" else CPU_GROUPS
    for name in names:
        for one in groups.get(name, (name,)):
            arms[one] = parse_arm(one)
    return list(arms.values())


def parse_arm(name: str) -> Arm:
    """One arm by its name.

    Raises:
        ValueError: As :func:`parse_arms`.
    """
    if name in (*HELD, *USER):
        return Arm(name)
    match = _LOCKS.fullmatch(name)
    if match is None:
        raise ValueError(
            f"unknown arm {name!r}; there are: {', '.join((*HELD, *USER))}, and locks-r<rank>i<bits>, such as "
            "locks-r4i4"
        )
    rank, bits = int(match[1]), int(match[2])
    LocksConfig(rank=rank, basis_bits=bits)
    return Arm(name, (rank, bits))


def absence(arm: Arm, budget: int, device: torch.device) -> str | None:
    """Why an arm cannot run on this machine, or ``None`` if it can."""
    return make_backend(arm.name, budget, device).unavailable(device) if arm.kind == "held" else None


@dataclass
class Bench:
    """What all cells of a run share.

    Attributes:
        shape: The model's shape.
        model: The model.
        clock: Captures and times.
        compiler: Makes the step's function.
        protocol: How long to measure.
        dtype: Of keys and values.
        budget: Tokens attended by Locks and Quest.
        refit: As of :class:`LocksCache`.
        fast_linear: Whether the model's linear layers are fast, in all arms but those of Transformers itself.
        fill: ``"synthetic"`` or ``"prefill"``.
        chunk: Tokens a forward pass of a prefill.
        seed: Of contexts.
    """

    shape: Shape
    model: PreTrainedModel
    clock: Clock
    compiler: Compiler
    protocol: Protocol
    dtype: torch.dtype
    budget: int = 2048
    refit: bool = True
    fast_linear: bool = False
    fill: str = "synthetic"
    chunk: int = 8192
    seed: int = 0

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.clock.device

    def locks_cache(self, arm: Arm, capacity: int | None) -> LocksCache:
        """An empty cache of a Locks arm."""
        rank, bits = arm.locks
        return LocksCache(rank=rank, basis_bits=bits, budget=self.budget, refit=self.refit, max_cache_len=capacity)

    def linears(self) -> AbstractContextManager[None]:
        """The model's linear layers as an arm of the harness has them, until the end of the block."""
        return fast_linears(self.model) if self.fast_linear else nullcontext()

    def load(self, cache, batch: int, length: int, implementation: str) -> None:
        """Fill an empty cache with a context, for a model on ``implementation``."""
        shape = self.shape
        if self.fill == "synthetic":
            fill_synthetic(
                cache,
                shape.layers,
                batch,
                shape.kv_heads,
                length,
                shape.head_dim,
                self.device,
                self.dtype,
                self.seed,
            )
            return
        tokens = random_tokens(batch, length, shape.config.get_text_config(decoder=True).vocab_size, self.device, 1)
        with on(self.model, implementation):
            prefill(self.model, cache, tokens, self.chunk)


@contextmanager
def on(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """The model on another attention implementation, until the end of the block."""
    if implementation == "locks":
        with patch(model):
            yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def needs(shape: Shape, arm: Arm, context: int, batch: int, room: int, dtype: torch.dtype, clock: Clock) -> Needs:
    """Memory that a decode cell takes, the model included.

    Args:
        shape: The shape.
        arm: The arm.
        context: Tokens a row.
        batch: Rows.
        room: Tokens a cache has room for behind the context.
        dtype: Of weights, keys and values.
        clock: Of the device.
    """
    size = dtype.itemsize
    tokens = -(-(context + (0 if arm.kind == "held" else room)) // PAGE) * PAGE
    layer_kv = 2 * batch * shape.kv_heads * tokens * shape.head_dim * size
    pages = batch * shape.kv_heads * (tokens // PAGE)
    text = shape.config.get_text_config(decoder=True)
    workspace = slack(clock.device) + batch * text.vocab_size * (2 * size + 8)
    kv, summaries = shape.layers * layer_kv, 0
    workspace += 3 * layer_kv // 2  # a layer's states while they are drawn
    if arm.name == "none":
        kv, workspace = 0, workspace - 3 * layer_kv // 2
    elif arm.name == "quest":
        summaries = shape.layers * pages * 2 * shape.head_dim * size
    elif arm.locks:
        summaries = (
            shape.layers * pages * SummaryLayout(shape.head_dim, arm.locks[0], PAGE, arm.locks[1]).bytes_per_page
        )
    elif arm.kind == "user":
        workspace += layer_kv * (1 if arm.name == "dynamic" else shape.heads // shape.kv_heads)
    if arm.locks or arm.name == "quest":
        workspace += 3 * 4 * batch * shape.heads * (tokens // PAGE)
    return Needs(shape.parameters * size, kv, summaries, workspace)


class HeldContext:
    """Keys and values that the held arms of one context and batch share; made when first asked for."""

    def __init__(self, bench: Bench, context: int, batch: int):
        self._bench, self._context, self._batch = bench, context, batch
        self._held: Held | None = None

    def get(self, arm: Arm) -> Held:
        """The context, or an empty one for the arm that attends nothing."""
        heads = self._bench.shape.heads
        if arm.name == "none":
            return Held([], [], self._context, heads)
        if self._held is None:
            _release(self._bench.clock)
            cache = LocksCache(selector="full", page_size=PAGE, max_cache_len=self._context)
            self._bench.load(cache, self._batch, self._context, "locks")
            layers = cache.locks_layers
            self._held = Held(
                [layer.key_buffer for layer in layers],
                [layer.value_buffer for layer in layers],
                self._context,
                heads,
            )
        return self._held

    def drop(self) -> None:
        """Let go of the buffers."""
        self._held = None


@contextmanager
def open_session(bench: Bench, arm: Arm, context: int, batch: int, shared: HeldContext) -> Iterator[Session]:
    """A session of an arm on a context; everything it allocated is given back at the end.

    Args:
        bench: What all cells share.
        arm: The arm.
        context: Tokens a row.
        batch: Rows.
        shared: The held context of this ``context`` and ``batch``.

    Raises:
        ValueError: If a step does not fit where it should; see also :func:`needs`.
    """
    opener: Callable = {"held": _held_session, "locks": _locks_session, "user": _user_session}[arm.kind]
    with ExitStack() as stack:
        stack.callback(_release, bench.clock)
        yield opener(stack, bench, arm, context, batch, shared)


def _release(clock: Clock) -> None:
    gc.collect()
    clock.release()


def _captured(bench: Bench, step: Step, rewind: Callable[[int], None], facts: dict) -> Session:
    start = time.perf_counter()
    run = bench.clock.capture(step)
    bench.clock.wait()
    return Session(run, rewind, lambda: step.logits, {**facts, "prepare_s": time.perf_counter() - start})


def _held_session(stack: ExitStack, bench: Bench, arm: Arm, context: int, batch: int, shared: HeldContext) -> Session:
    backend: Backend = make_backend(arm.name, bench.budget, bench.device)
    if (reason := backend.unavailable(bench.device)) is not None:
        raise ValueError(f"{arm.name} is not available: {reason}")
    if arm.name != "none":
        backend.bind(shared.get(arm))
    stack.enter_context(registered(bench.model))
    stack.enter_context(bench.linears())
    stack.enter_context(attending(backend))
    step = Step(bench.compiler.function, bench.model, batch, context - 1, bench.device, None)
    facts = {"attends": f"{context} tokens, fixed"}
    if backend.note:
        facts["note"] = backend.note
    session = _captured(bench, step, lambda steps: step.rewind(), facts)
    step.rewind()
    return session


def _locks_session(stack: ExitStack, bench: Bench, arm: Arm, context: int, batch: int, shared: HeldContext) -> Session:
    shared.drop()
    _release(bench.clock)
    cache = bench.locks_cache(arm, context + bench.protocol.room)
    bench.load(cache, batch, context, "locks")
    mark_growing(cache)
    stack.enter_context(on(bench.model, "locks"))
    stack.enter_context(bench.linears())
    step = Step(bench.compiler.function, bench.model, batch, context, bench.device, cache)

    def rewind(steps: int) -> None:
        cache.crop(-steps)
        step.rewind()

    dense = context + 1 <= cache.locks_config.whole_budget
    facts = {"attends": f"{context} tokens and more, budget {bench.budget}", "dense_step": dense}
    session = _captured(bench, step, rewind, facts)
    rewind(cache.locks_layers[0].max_length - context)  # the warm-up's tokens
    return session


def mark_growing(cache: LocksCache) -> None:
    """Tell the compiler that the capacity differs between caches, so that one compilation serves every context."""
    for layer in cache.locks_layers:
        for buffer in (layer.key_buffer, layer.value_buffer, *layer.summaries.values()):
            torch._dynamo.maybe_mark_dynamic(buffer, 2)


def _user_session(stack: ExitStack, bench: Bench, arm: Arm, context: int, batch: int, shared: HeldContext) -> Session:
    shared.drop()
    _release(bench.clock)
    model, room = bench.model, bench.protocol.room
    stack.enter_context(on(model, "sdpa"))
    if arm.name == "dynamic":
        cache, function = DynamicCache(), decode_once
    else:
        cache = StaticCache(config=model.config, max_cache_len=context + room)
        options = {"backend": "eager"} if bench.device.type == "cpu" else {"mode": "reduce-overhead"}
        # As generate() does: the forward pass alone, and a copy of the logits, which live in the graph's memory.
        forward = torch.compile(model.__call__, fullgraph=True, **options)

        def function(model, token, position, arguments):
            return decode_once(lambda *args, **kwargs: _copied(forward(*args, **kwargs)), token, position, arguments)

    bench.load(cache, batch, context, "sdpa")
    step = Step(function, model, batch, context, bench.device, cache)

    def rewind(steps: int) -> None:
        if steps and arm.name == "dynamic":
            cache.crop(-steps)
        elif steps:
            for layer in cache.layers:
                layer.cumulative_length.sub_(steps)  # Transformers 5.17 cannot crop a static layer
        step.rewind()

    start = time.perf_counter()
    for _ in range(WARM_UP):
        step()
    bench.clock.wait()
    prepare = time.perf_counter() - start
    rewind(WARM_UP)
    facts = {"attends": f"{context} tokens and more", "note": "not in the harness's graph", "prepare_s": prepare}
    return Session(step, rewind, lambda: step.logits, facts)


def _copied(output):
    output.logits = output.logits.float()
    return output
