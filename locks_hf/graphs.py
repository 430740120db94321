"""Decode steps as CUDA graphs, captured from the model as it is, without a compiler.

A decode step on a :class:`LocksCache` takes the same shapes every time and nothing from the host, so that the kernels
of a step can be recorded once and launched together. The first step of a kind runs as usual, the second is recorded,
the others are replayed, until the cache moves to larger buffers.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .cache import LocksCache

_PLAIN = (type(None), bool, int, float, str)


@dataclass
class _Step:
    """A call of ``forward`` that is a decode step.

    Attributes:
        cache: Its cache.
        tensors: Arguments that differ from step to step, by name.
        others: Those that do not.
    """

    cache: LocksCache
    tensors: dict[str, torch.Tensor]
    others: dict[str, object]

    def key(self) -> tuple:
        """What a recording depends on besides the content of tensors."""
        shapes = tuple((name, tuple(x.shape), x.dtype) for name, x in sorted(self.tensors.items()))
        plain = tuple((name, x) for name, x in sorted(self.others.items()) if isinstance(x, _PLAIN))
        device = next(iter(self.tensors.values())).device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return shapes, plain, autocast, self.cache.locks_config, self.cache.addresses()


@dataclass
class _Recording:
    replay: Callable[[], None]
    inputs: dict[str, torch.Tensor]
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
            for name, tensor in step.tensors.items():
                recording.inputs[name].copy_(tensor)
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
        tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        others = {name: x for name, x in arguments.items() if name not in tensors}
        if not all(isinstance(x, _PLAIN) or x is cache for x in others.values()):
            return None
        mask = tensors.get("attention_mask")
        if mask is not None and mask.ndim == 2:
            tensors["attention_mask"] = mask[:, -1:]  # of the past the cache knows better
        elif mask is not None and mask.shape[1:] != (1, 1, 1):  # what generate makes of it beforehand
            return None
        return _Step(cache, tensors, others)

    def _record(self, step: _Step) -> _Recording:
        """Record a step and do on the host what belongs to it; it is to be replayed at once.

        Raises:
            ValueError: If the model does something that cannot be recorded, or gives more than tensors.
        """
        inputs = {name: x.clone() for name, x in step.tensors.items()}
        name = type(self._model()).__name__
        try:
            replay, output = capture(lambda: self._forward(**inputs, **step.others))
        except RuntimeError as error:
            raise ValueError(
                f"the decode step of {name} cannot be recorded in a CUDA graph ({str(error).splitlines()[0]}): patch "
                "the model without cuda_graphs=True, and start again with a new cache"
            ) from error
        more = [key for key, x in output.items() if not isinstance(x, (torch.Tensor, LocksCache, type(None)))]
        if more:
            raise ValueError(f"{name} gives {more}, which recorded decode steps cannot: do not ask for them")
        return _Recording(replay, inputs, output)


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
