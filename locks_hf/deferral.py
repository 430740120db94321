"""``generate`` without a wait for the device after each token.

After each step Transformers asks the device whether all rows have ended, and the device idles while the host prepares
the next step. It also has a check that reads the answer one step late and takes back the step that was one too many,
which it uses on MPS. While a model is patched, that check serves steps on a :class:`LocksCache` on CUDA too: only for
them does Transformers' rule answer otherwise than it would.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache
from transformers.generation import utils

from .cache import LocksCache

_users = 0  # changes in force; counted under the lock of locks_hf.patching
_before: staticmethod | None = None  # the rule of Transformers


def runs_ahead(device: torch.device) -> bool:
    """Whether the host can be a step ahead of a device."""
    return device.type == "cuda"


def _is_supported(device: torch.device, cache: Cache | None, cache_is_returned: bool, is_assistant: bool) -> bool:
    """Stands in for ``DeferredStopCheck.is_supported``."""
    if isinstance(cache, LocksCache) and runs_ahead(device) and not is_assistant and cache.can_take_back_steps:
        if cache_is_returned:  # the check tells the cache that it will take back a step
            cache.expect_deferral()
        return True
    return _before(device, cache, cache_is_returned, is_assistant)


def begin() -> None:
    """Have the check used for steps on a LocksCache, until :func:`end` was called as often."""
    global _users, _before
    if not _users:
        _before = utils.DeferredStopCheck.is_supported
        utils.DeferredStopCheck.is_supported = staticmethod(_is_supported)
    _users += 1


def end() -> None:
    """Undo one :func:`begin`."""
    global _users, _before
    _users -= 1
    if not _users:
        utils.DeferredStopCheck.is_supported = staticmethod(_before)
        _before = None
