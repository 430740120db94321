"""A model's linear layers on the kernel that streams their weights, for decode steps of a few rows."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from .angles import SharedAngles
from .kernels.linear import linear, linears, streams

# On each layer that is fast: how many changes it is of, and the layers of the same input.
_CHANGES, _SIBLINGS = "_locks_fast_changes", "_locks_siblings"
# Layers that a model calls one after the other on the same input: the projections of attention, and of a gated MLP.
_FAMILIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FastLinear(nn.Linear):
    """``nn.Linear`` whose forward pass is :func:`locks_hf.kernels.linear` where no derivative is asked for.

    Layers become one, and ``nn.Linear`` again, by a change of class: their weights, hooks and names stay. Copies, and
    what is unpickled, are ``nn.Linear``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As of ``nn.Linear``."""
        # A hook may have kept this method beyond its change.
        if not self.__dict__.get(_CHANGES) or not _usual(self, input):
            return F.linear(input, self.weight, self.bias)
        siblings = self.__dict__.get(_SIBLINGS)
        if siblings is not None and _recording(input) and streams(input, self.weight):
            return siblings.output(self, input)
        return linear(input, self.weight, self.bias)

    def __reduce_ex__(self, protocol: int) -> tuple:
        """As of an ``nn.Linear``: a copy is part of no change."""
        return _plain, (), {name: x for name, x in self.__dict__.items() if name not in (_CHANGES, _SIBLINGS)}


def _plain() -> nn.Linear:
    return nn.Linear.__new__(nn.Linear)


def _usual(layer: nn.Linear, input: torch.Tensor) -> bool:
    """Whether a layer's weights are parameters of the input's dtype, and only values are asked for."""
    weight, bias = layer.weight, layer.bias
    if type(weight) is not nn.Parameter or input.dtype != weight.dtype:  # something put other weights in
        return False
    return not _derived(input, weight, bias) and not torch.is_autocast_enabled(input.device.type)


def _recording(input: torch.Tensor) -> bool:
    """Whether what runs is what a compiler traces or a CUDA graph records, by code that is then repeated."""
    if torch.compiler.is_compiling():
        return True
    return input.is_cuda and torch.cuda.is_current_stream_capturing() and not input.is_inference()


class _Siblings:
    """Layers of the same input, computed together when the first of them is called.

    Only where a step is traced or recorded, in which nothing but the model runs: what the others get waits for their
    calls, which come with the same tensor, and is forgotten if they do not. Models change neither that tensor nor
    weights between such calls; where torch counts changes of a tensor, one is seen.

    Args:
        layers: Two or three.
    """

    def __init__(self, layers: list[FastLinear]):
        self._layers = [weakref.ref(layer) for layer in layers]
        self._waiting: tuple[torch.Tensor, int, dict[int, torch.Tensor]] | None = None
        self._apart = False

    def output(self, layer: FastLinear, input: torch.Tensor) -> torch.Tensor:
        """What ``layer`` makes of ``input``."""
        layers, version, waiting = [one() for one in self._layers], _version(input), self._waiting
        index = next(i for i, one in enumerate(layers) if one is layer)
        self._waiting = None
        if waiting is not None:
            of, then, outputs = waiting
            output = outputs.pop(index, None) if of is input and then == version else None
            if output is not None:
                self._waiting = waiting if outputs else None
                return output
            self._apart = True  # they are not called as siblings are
        if self._apart or not _alike(layers, input):
            return linear(input, layer.weight, layer.bias)
        outputs = dict(enumerate(linears(input, [x.weight for x in layers], [x.bias for x in layers])))
        output = outputs.pop(index)
        self._waiting = (input, version, outputs)
        return output


def _alike(layers: list[nn.Linear | None], input: torch.Tensor) -> bool:
    """Whether one launch can do them still: they may be gone, or part of no change, or have other weights."""
    return all(
        one is not None
        and _CHANGES in vars(one)
        and _usual(one, input)
        and one.weight.shape[1] == input.shape[-1]
        and one.weight.device == input.device
        for one in layers
    )


def _version(input: torch.Tensor) -> int:
    """A number that changes with the tensor's contents, where torch counts them."""
    return 0 if torch.compiler.is_compiling() else input._version


def _derived(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a derivative may be asked for, backward or forward."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (input, weight, bias))


class FastLinears:
    """Makes every plain ``nn.Linear`` of a model a :class:`FastLinear`, until :meth:`remove`.

    What else its steps take beside attention it shortens too: see :mod:`locks_hf.angles`.

    Subclasses, as those of quantised layers or adapters, stay as they are; so do layers with weights that are, and,
    with a warning, those whose ``forward`` was replaced, as hooks of Accelerate do. Changes may overlap.

    Raises:
        ValueError: If the model has no such layer.
    """

    def __init__(self, model: nn.Module):
        name = type(model).__name__
        plain = [x for x in model.modules() if type(x) in (nn.Linear, FastLinear)]
        layers = [x for x in plain if "forward" not in vars(x) and type(getattr(x, "weight", None)) is nn.Parameter]
        if not layers:
            raise ValueError(f"{name} has no plain nn.Linear that could be made fast")
        if replaced := sum("forward" in vars(x) for x in plain):
            warnings.warn(
                f"{replaced} linear layers of {name} have had their forward replaced, by hooks of Accelerate for "
                "example, and are as fast as before",
                UserWarning,
                stacklevel=3,
            )
        for layer in layers:
            layer.__class__ = FastLinear
            setattr(layer, _CHANGES, getattr(layer, _CHANGES, 0) + 1)
        self._layers = [weakref.ref(layer) for layer in layers]
        self._angles = SharedAngles(model)
        fast = set(map(id, layers))
        for module in model.modules():
            for names in _FAMILIES:
                found = [module._modules.get(name) for name in names]
                if all(id(one) in fast for one in found):
                    siblings = _Siblings(found)
                    for one in found:
                        setattr(one, _SIBLINGS, siblings)

    def remove(self) -> None:
        """Make them ``nn.Linear`` again, unless another change has them too."""
        self._angles.remove()
        for reference in self._layers:
            layer = reference()
            if layer is None or _CHANGES not in vars(layer):
                continue
            left = getattr(layer, _CHANGES) - 1
            if left:
                setattr(layer, _CHANGES, left)
                continue
            delattr(layer, _CHANGES)
            vars(layer).pop(_SIBLINGS, None)
            if type(layer) is FastLinear:
                layer.__class__ = nn.Linear
        self._layers = []


@contextmanager
def fast_linears(model: nn.Module) -> Iterator[None]:
    """The model's linear layers as :class:`FastLinear`, until the end of the block; for any attention."""
    change = FastLinears(model)
    try:
        yield
    finally:
        change.remove()
