"""A model's linear layers on the kernel that streams their weights, for decode steps of a few rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from .kernels import linear


class FastLinear(nn.Linear):
    """``nn.Linear`` whose forward pass is :func:`locks_hf.kernels.linear` where no gradient is asked for.

    Layers become one, and ``nn.Linear`` again, by a change of class: their weights, hooks and names stay.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As of ``nn.Linear``."""
        needs_grad = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if needs_grad or torch.is_autocast_enabled(input.device.type) or input.dtype != self.weight.dtype:
            return F.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


class FastLinears:
    """Makes every plain ``nn.Linear`` of a model a :class:`FastLinear`, until :meth:`remove`.

    Subclasses, as those of quantised layers or adapters, stay as they are; so do layers with weights that are.

    Raises:
        ValueError: If the model has no such layer.
    """

    def __init__(self, model: nn.Module):
        layers = [x for x in model.modules() if type(x) is nn.Linear and type(x.weight) is nn.Parameter]
        if not layers:
            raise ValueError(f"{type(model).__name__} has no plain nn.Linear that could be made fast")
        for layer in layers:
            layer.__class__ = FastLinear
        self._layers = [weakref.ref(layer) for layer in layers]

    def remove(self) -> None:
        """Make them ``nn.Linear`` again."""
        for reference in self._layers:
            layer = reference()
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
