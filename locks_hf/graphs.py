"""Decode steps as CUDA graphs, captured from the model as it is, without a compiler.

A decode step on a :class:`LocksCache` takes the same shapes every time and nothing from the host, so that the kernels
of a step can be recorded once and launched together. The first step of a kind runs as usual, the second is recorded,
the others are replayed, until the cache moves to larger buffers.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .cache import LocksCache

_PLAIN = (type(None), bool, int, float, str)
# Where an argument is: its name, and a key if it is in a dictionary, as masks by layer type are.
Path = tuple[str, ...]


@dataclass
class _Step:
    """A call of ``forward`` that is a decode step.

    Attributes:
        cache: Its cache.
        tensors: Arguments that differ from step to step.
        others: Those that do not.
    """

    cache: LocksCache
    tensors: dict[Path, torch.Tensor]
    others: dict[Path, object]

    def key(self) -> tuple:
        """What a recording depends on besides the content of tensors."""
        shapes = tuple((path, tuple(x.shape), x.dtype) for path, x in sorted(self.tensors.items()))
        plain = tuple((path, x) for path, x in sorted(self.others.items()) if isinstance(x, _PLAIN))
        device = next(iter(self.tensors.values())).device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return shapes, plain, autocast, self.cache.locks_config, self.cache.addresses()


@dataclass
class _Recording:
    replay: Callable[[], None]
    inputs: dict[Path, torch.Tensor]
    output: ModelOutput


class StepGraphs:
    """Stands in for a model's ``forward``: replays decode steps on a LocksCache, and calls the model for all else.

    Args:
        model: The model; its ``forward`` and ``get_compiled_call`` are replaced until :meth:`remove`.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = weakref.ref(model)
        self._before = {name: model.__dict__.get(name) for name in ("forward", "get_compiled_call")}
        self._forward = forward = model.forward
        self._signature = inspect.signature(forward)
        self._warned = False
        self._seen: weakref.WeakKeyDictionary[LocksCache, set] = weakref.WeakKeyDictionary()
        self._recorded: weakref.WeakKeyDictionary[LocksCache, dict] = weakref.WeakKeyDictionary()

        @functools.wraps(forward)
        def graphed(*args, **kwargs):
            return self._call(args, kwargs)

        model.forward = graphed
        # Transformers compiles decode steps on caches that allow it; recorded ones need no compiler.
        model.get_compiled_call = lambda compile_config: model.__call__

    def remove(self) -> None:
        """Give the model its own methods back and free what was recorded."""
        model = self._model()
        for name, before in self._before.items():
            if before is not None:
                setattr(model, name, before)
            elif name in model.__dict__:
                delattr(model, name)
        self._seen.clear()
        self._recorded.clear()

    def _call(self, args: tuple, kwargs: dict) -> ModelOutput:
        step = self._as_step(args, kwargs)
        if step is None:
            return self._forward(*args, **kwargs)
        key = step.key()
        recordings = self._recorded.setdefault(step.cache, {})
        recording = recordings.get(key)
        if recording is None:
            seen = self._seen.setdefault(step.cache, set())
            if key not in seen:
                seen.add(key)
                return self._forward(*args, **kwargs)
            # Recordings of smaller buffers are of no use any more.
            recordings.clear()
            recording = recordings[key] = self._record(step)
        else:
            if not step.cache.begin_step():
                return self._forward(*args, **kwargs)
            for path, tensor in step.tensors.items():
                recording.inputs[path].copy_(tensor)
        recording.replay()
        return type(recording.output)(
            **{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in recording.output.items()}
        )

    def _as_step(self, args: tuple, kwargs: dict) -> _Step | None:
        """The call as a decode step, or ``None`` if it is another one."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        arguments = self._signature.bind(*args, **kwargs).arguments
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name, {}))
        cache = next((x for x in arguments.values() if isinstance(x, LocksCache)), None)
        ids = arguments.get("input_ids")
        if cache is None or ids is None or ids.shape[1] != 1 or not (capturable(ids.device) and cache.steps_on_device):
            return None
        flat = _flat(arguments)
        tensors = {path: x for path, x in flat.items() if isinstance(x, torch.Tensor)}
        others = {path: x for path, x in flat.items() if path not in tensors}
        for path, x in others.items():
            if not (isinstance(x, _PLAIN) or x is cache):
                return self._unrecorded(f"{'.'.join(path)} is a {type(x).__name__}")
        for path, mask in list(tensors.items()):
            if path[0] != "attention_mask":
                continue
            if mask.ndim == 2:
                tensors[path] = mask[:, -1:]  # of the past the cache knows better
            elif mask.shape[1:] != (1, 1, 1):  # what generate makes of it beforehand
                return self._unrecorded(f"{'.'.join(path)} has shape {tuple(mask.shape)}")
        return _Step(cache, tensors, others)

    def _unrecorded(self, reason: str) -> None:
        """Say once why decode steps are as slow as without recording."""
        if not self._warned:
            self._warned = True
            name = type(self._model()).__name__
            warnings.warn(f"decode steps of {name} are not recorded: {reason}", UserWarning, stacklevel=4)

    def _record(self, step: _Step) -> _Recording:
        """Record a step and do on the host what belongs to it; it is to be replayed at once.

        Raises:
            ValueError: If the model does something that cannot be recorded, or gives more than tensors.
        """
        inputs = {path: x.clone() for path, x in step.tensors.items()}
        arguments = _nested({**inputs, **step.others})
        name = type(self._model()).__name__
        try:
            replay, output = capture(lambda: self._forward(**arguments))
        except RuntimeError as error:
            raise ValueError(
                f"the decode step of {name} cannot be recorded in a CUDA graph ({str(error).splitlines()[0]}): patch "
                "the model without cuda_graphs=True, and start again with a new cache"
            ) from error
        more = [key for key, x in output.items() if not isinstance(x, (torch.Tensor, LocksCache, type(None)))]
        if more:
            raise ValueError(f"{name} gives {more}, which recorded decode steps cannot: do not ask for them")
        return _Recording(replay, inputs, output)


def _flat(arguments: dict[str, object]) -> dict[Path, object]:
    """Arguments by where they are."""
    flat = {}
    for name, x in arguments.items():
        flat.update({(name, key): y for key, y in x.items()} if isinstance(x, dict) else {(name,): x})
    return flat


def _nested(flat: dict[Path, object]) -> dict[str, object]:
    """The opposite of :func:`_flat`."""
    arguments: dict[str, object] = {}
    for (name, *key), x in flat.items():
        if key:
            arguments.setdefault(name, {})[key[0]] = x
        else:
            arguments[name] = x
    return arguments


def capturable(device: torch.device) -> bool:
    """Whether steps on a device can be recorded."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def capture(run: Callable[[], ModelOutput]) -> tuple[Callable[[], None], ModelOutput]:
    """Record what ``run`` launches, without launching it.

    Returns:
        What launches it, and the output that ``run`` returned, whose tensors every launch fills.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = run()
    return graph.replay, output
