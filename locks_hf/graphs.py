"""Decode steps as CUDA graphs, captured from the model as it is, without a compiler.

A decode step on a :class:`LocksCache` takes the same shapes every time and nothing from the host, so that the kernels
of a step can be recorded once and launched together. The first step of a kind runs as usual, the second is recorded,
the others are replayed, until the cache moves to larger buffers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .attention import new_token_mask
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
        real: bool ``(B,)``, false where a row's token is padding, or ``None``: no mask.
        training: Whether the model is in training mode.
    """

    cache: LocksCache
    tensors: dict[Path, torch.Tensor]
    others: dict[Path, object]
    real: torch.Tensor | None
    training: bool

    def key(self) -> tuple:
        """What a recording depends on besides the content of tensors."""
        shapes = tuple((path, tuple(x.shape), x.dtype) for path, x in sorted(self.tensors.items()))
        plain = tuple((path, x) for path, x in sorted(self.others.items()) if isinstance(x, _PLAIN))
        device = next(iter(self.tensors.values())).device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        modes = (autocast, torch.is_inference_mode_enabled(), self.training)
        return shapes, plain, modes, self.cache.locks_config, self.cache.addresses()


@dataclass
class _Recording:
    """A recorded step. It does not hold the cache, whose end is also its own.

    Attributes:
        replay: Launches it.
        inputs: The tensors that it reads.
        kind: The type of output.
        fields: The tensors that it writes, by their names in the output.
        cache_field: The name of the cache in the output, if it has one.
    """

    replay: Callable[[], None]
    inputs: dict[Path, torch.Tensor]
    kind: type[ModelOutput]
    fields: dict[str, torch.Tensor | None]
    cache_field: str | None

    def output(self, cache: LocksCache) -> ModelOutput:
        """A copy of what the last launch gave."""
        fields = {name: x if x is None else x.clone() for name, x in self.fields.items()}
        return self.kind(**fields, **({} if self.cache_field is None else {self.cache_field: cache}))


class _Forward:
    """Takes the place of a model's ``forward``, and of no other's."""

    def __init__(self, call: Callable, forward: Callable):
        self._call = call
        functools.update_wrapper(self, forward)

    def __call__(self, *args, **kwargs) -> ModelOutput:
        return self._call(args, kwargs)

    def __deepcopy__(self, memo: dict):
        raise ValueError("a model whose decode steps are recorded cannot be copied: undo patch(cuda_graphs=True) first")

    def __reduce__(self):
        raise ValueError("a model whose decode steps are recorded cannot be saved: undo patch(cuda_graphs=True) first")


class StepGraphs:
    """Stands in for a model's ``forward``: replays decode steps on a LocksCache, and calls the model for all else.

    Args:
        model: The model; its ``forward`` and ``get_compiled_call`` are replaced until :meth:`remove`.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = weakref.ref(model)
        self._before = {name: model.__dict__.get(name) for name in ("forward", "get_compiled_call")}
        self._forward = model.forward
        self._compiled_call = model.get_compiled_call
        self._signature = inspect.signature(self._forward)
        self._warned = False
        self._seen: weakref.WeakKeyDictionary[LocksCache, tuple] = weakref.WeakKeyDictionary()
        self._recorded: weakref.WeakKeyDictionary[LocksCache, dict] = weakref.WeakKeyDictionary()
        model.forward = _Forward(self._call, self._forward)
        model.get_compiled_call = self._get_compiled_call

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

    def _get_compiled_call(self, compile_config) -> Callable:
        """Transformers compiles decode steps on caches that allow it; recorded ones need no compiler."""

        def call(*args, **kwargs):
            ours = any(isinstance(x, LocksCache) for x in (*args, *kwargs.values()))
            model = self._model()
            return (model.__call__ if ours else self._compiled_call(compile_config))(*args, **kwargs)

        return call

    def _call(self, args: tuple, kwargs: dict) -> ModelOutput:
        step = self._as_step(args, kwargs)
        if step is None:
            return self._forward(*args, **kwargs)
        key = step.key()
        recordings = self._recorded.setdefault(step.cache, {})
        recording = recordings.get(key)
        if recording is None and self._seen.get(step.cache) != key:
            output = self._forward(*args, **kwargs)
            if self._recordable(output):
                self._seen[step.cache] = key
            return output
        if step.cache.prepare_step():  # buffers moved
            return self._forward(*args, **kwargs)
        if recording is None:
            # Recordings of smaller buffers are of no use any more.
            recordings.clear()
            recording = recordings[key] = self._record(step)
            if step.real is not None:
                step.cache.note_padding(step.real)
        else:
            for path, tensor in step.tensors.items():
                recording.inputs[path].copy_(tensor)
            step.cache.count_step(step.real)
        recording.replay()
        return recording.output(step.cache)

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
        kind = ids.device.type
        if torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
            return self._unrecorded(
                "autocast keeps copies of weights that recordings would outlive, pass cache_enabled=False to it"
            )
        flat = _flat(arguments)
        tensors = {path: x for path, x in flat.items() if isinstance(x, torch.Tensor)}
        others = {path: x for path, x in flat.items() if path not in tensors}
        for path, x in others.items():
            if not (isinstance(x, _PLAIN) or x is cache):
                return self._unrecorded(f"{'.'.join(path)} is a {type(x).__name__}")
        real = None
        for path, mask in list(tensors.items()):
            if path[0] != "attention_mask":
                continue
            if mask.ndim == 2:  # of the past the cache knows better
                tensors[path] = mask = new_token_mask(mask, cache.get_seq_length())
            elif mask.shape[1:] != (1, 1, 1) or mask.dtype != torch.bool:  # what generate makes of it beforehand
                return self._unrecorded(f"{'.'.join(path)} is {mask.dtype} {tuple(mask.shape)}")
            real = mask[:, 0, 0, 0]
        return _Step(cache, tensors, others, real, self._model().training)

    def _recordable(self, output: ModelOutput | tuple) -> bool:
        """Whether an output can be given by recorded steps."""
        if not isinstance(output, ModelOutput):
            self._unrecorded(f"it gives a {type(output).__name__}, call it with return_dict=True")
            return False
        more = [name for name, x in output.items() if not isinstance(x, (torch.Tensor, LocksCache, type(None)))]
        if more:
            self._unrecorded(f"it gives {', '.join(more)}, do not ask for them")
        return not more

    def _unrecorded(self, reason: str) -> None:
        """Say once why decode steps are as slow as without recording."""
        if not self._warned:
            self._warned = True
            name = type(self._model()).__name__
            warnings.warn(f"decode steps of {name} are not recorded: {reason}", UserWarning, stacklevel=4)

    def _record(self, step: _Step) -> _Recording:
        """Record a step and do on the host what belongs to it; it is to be replayed at once.

        Raises:
            ValueError: If the model does something that cannot be recorded.
        """
        inputs = {path: x.clone() for path, x in step.tensors.items()}
        arguments = _nested({**inputs, **step.others})
        name, device = type(self._model()).__name__, next(iter(inputs.values())).device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                replay, output = capture(lambda: self._forward(**arguments))
        except RuntimeError as error:
            raise ValueError(
                f"the decode step of {name} cannot be recorded in a CUDA graph ({str(error).splitlines()[0]}): patch "
                "the model without cuda_graphs=True, and start again with a new cache"
            ) from error
        fields = {name: x for name, x in output.items() if not isinstance(x, LocksCache)}
        cache_field = next((name for name, x in output.items() if isinstance(x, LocksCache)), None)
        return _Recording(replay, inputs, type(output), fields, cache_field)


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
