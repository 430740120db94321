"""How the attention function finds the cache layer that the model has just updated.

Transformers calls ``cache.update(key, value)`` and then ``attention(module, query, key, value)`` with what it returned,
without the cache. ``update`` leaves its layer here; attention takes it only if the key is the very tensor that layer
returned. Anything else, such as another model's keys, is not ours.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .cache import LocksLayer

_slot = threading.local()


def offer(layer: LocksLayer) -> None:
    """Remember ``layer`` as the last one updated on this thread."""
    _slot.layer = layer


def take(key: torch.Tensor) -> LocksLayer | None:
    """The layer whose staged keys are ``key`` itself, or ``None``."""
    layer = getattr(_slot, "layer", None)
    if layer is None or not layer.is_staged(key):
        return None
    _slot.layer = None
    return layer
