"""Sines and cosines of rotary positions, computed once in a compiled step.

A model makes them once and hands them to its layers. Inductor, to which they look cheap, makes them again in every
kernel that rotates queries or keys, and past 105,615 radians, the position being that of the fastest angle, each takes
a way that is many times longer. An operation that might change a tensor, and does nothing, has it written to memory.
"""

from __future__ import annotations

import torch
from torch import nn


@torch.library.custom_op("locks_hf::realized", mutates_args=("x",))
def _realized(x: torch.Tensor) -> None:
    pass


@_realized.register_fake
def _(x: torch.Tensor) -> None:
    pass


class _Hook:
    """A forward hook that leaves the output as it is; a copy, as in a copied or pickled model, does nothing."""

    def __call__(self, module: nn.Module, args: tuple, output: object) -> None:
        if not torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.is_grad_enabled():
            return
        if not isinstance(output, tuple):
            return
        for angles in output:
            if isinstance(angles, torch.Tensor) and angles.is_contiguous():  # not one that is expanded
                torch.ops.locks_hf.realized(angles)

    def __reduce__(self) -> tuple:
        return _NoHook, ()


class _NoHook:
    def __call__(self, module: nn.Module, args: tuple, output: object) -> None:
        pass


class SharedAngles:
    """Has a model's rotary embeddings compute their angles once a compiled step, until :meth:`remove`.

    They are known by their frequencies, ``inv_freq``, or several for layers of several kinds, ``<kind>_inv_freq``. A
    model without any is left alone, as are steps that are not compiled or need gradients.
    """

    def __init__(self, model: nn.Module):
        rotary = [
            x for x in model.modules() if any(name.endswith("inv_freq") for name, _ in x.named_buffers(recurse=False))
        ]
        self._handles = [x.register_forward_hook(_Hook()) for x in rotary]

    def remove(self) -> None:
        """Undo it."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
