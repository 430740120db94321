"""How the attention function finds the cache layer that the model has just updated.

Transformers calls ``cache.update(key, value)`` and then ``attention(module, query, key, value)`` with what it returned,
without the cache. ``update`` leaves its layer here; attention takes it only if the key is the very tensor that layer
returned. Anything else, such as another model's keys, is not ours. A layer that attends the keys of another one cannot
be served this way and must not pass for a model without a LocksCache, so the keys remember that they were taken.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .layer import LocksLayer

_slot = threading.local()
_TAKEN = "_locks_taken"


def offer(layer: LocksLayer) -> None:
    """Remember ``layer`` as the last one updated on this thread."""
    _slot.layer = weakref.ref(layer)  # never the reason that a cache stays in memory


def pending() -> LocksLayer | None:
    """The last layer updated on this thread, unless attention has taken it."""
    reference = getattr(_slot, "layer", None)
    return None if reference is None else reference()


def take(key: torch.Tensor) -> LocksLayer | None:
    """The layer whose staged keys are ``key`` itself, or ``None``.

    Raises:
        ValueError: If the keys were taken before.
    """
    layer = pending()
    if layer is None or not layer.is_staged(key):
        if hasattr(key, _TAKEN):
            raise ValueError(
                "two layers of this model attend the same cached keys (KV sharing), which LocksCache does not support"
            )
        return None
    _slot.layer = None
    if not torch.compiler.is_compiling():
        setattr(key, _TAKEN, True)
    return layer
