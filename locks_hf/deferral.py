"""``generate`` a step ahead of the device: without a wait for it after each token.

After each step Transformers asks the device whether all rows have ended, and the device idles while the host prepares
the next step. It also has a check that reads the answer one step late and takes back the step that was one too many,
which it uses on MPS. For a model that is patched with ``run_ahead=True`` that check serves calls of ``generate`` on a
:class:`LocksCache` on CUDA as well.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import utils
from transformers.generation.utils import GenerateOutput

from .cache import LocksCache

_UNKNOWN = 1 << 62
_call = threading.local()  # of the call of `generate` that a thread is in: `longest` tokens, and the `cache` it came to
_users = 0  # models that run ahead; counted under the lock of locks_hf.patching
_before: Callable[..., bool] = utils.DeferredStopCheck.is_supported  # the rule of Transformers


def runs_ahead(device: torch.device) -> bool:
    """Whether the host can be a step ahead of a device."""
    return device.type == "cuda"


def _is_supported(device: torch.device, cache: Cache | None, cache_is_returned: bool, is_assistant: bool) -> bool:
    """Stands in for ``DeferredStopCheck.is_supported``."""
    longest = getattr(_call, "longest", None)
    if longest is None or is_assistant or not isinstance(cache, LocksCache) or not runs_ahead(device):
        return _before(device, cache, cache_is_returned, is_assistant)
    room = cache.locks_config.max_cache_len
    if not cache.can_take_back_steps or (room is not None and longest - 1 > room):
        return False
    if cache_is_returned:  # the check tells the cache that it will take back a step
        cache.expect_deferral(True)
        _call.cache = cache
    return True


def begin() -> None:
    """Have Transformers ask here too, until :func:`end` was called as often."""
    global _users, _before
    current = utils.DeferredStopCheck.is_supported
    if current is not _is_supported:
        _before = current
        utils.DeferredStopCheck.is_supported = staticmethod(_is_supported)
    _users += 1


def end() -> None:
    """Undo one :func:`begin`."""
    global _users
    _users -= 1
    if not _users and utils.DeferredStopCheck.is_supported is _is_supported:
        utils.DeferredStopCheck.is_supported = staticmethod(_before)


def _longest(model: PreTrainedModel, arguments: dict) -> int | None:
    """Tokens that a call of ``generate`` can come to, or ``None`` if a step more may not be safe."""
    if any(arguments.get(name) for name in ("streamer", "prefix_allowed_tokens_fn", "synced_gpus")):
        return None
    config = arguments.get("generation_config") or model.generation_config
    new, longest = (arguments.get(name, getattr(config, name, None)) for name in ("max_new_tokens", "max_length"))
    ids = arguments.get("inputs", arguments.get("input_ids"))
    if new is not None:
        longest = None if ids is None else ids.shape[1] + new
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is None:
        return _UNKNOWN if longest is None else longest
    return longest if longest is not None and longest - 1 <= positions else None


class RunAhead:
    """Stands in for a model's ``generate``: the same, a step ahead of the device where that is safe.

    It is not with a streamer, which waits for each token anyway, with ``prefix_allowed_tokens_fn``, which may have no
    answer past the end, with ``synced_gpus``, and where the step that is taken back might find no position or no room.

    Args:
        model: The model; its ``generate`` is replaced until :meth:`remove`.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = weakref.ref(model)
        self._own = model.__dict__.get("generate")
        functools.update_wrapper(self, type(model).generate)
        model.generate = self

    def remove(self) -> None:
        """Give the model its own method back."""
        model = self._model()
        if model is None or model.__dict__.get("generate") is not self:
            return
        if self._own is None:
            del model.generate
        else:
            model.generate = self._own

    def __call__(self, *args, **kwargs) -> GenerateOutput | torch.LongTensor:
        """As of the model."""
        model = self._model()
        call = functools.partial(type(model).generate, model) if self._own is None else self._own
        arguments = inspect.signature(call).bind(*args, **kwargs).arguments
        before = getattr(_call, "longest", None)
        _call.longest = _longest(model, {**arguments.pop("kwargs", {}), **arguments})
        try:
            return call(*args, **kwargs)
        finally:
            _call.longest = before
            cache = _call.__dict__.pop("cache", None)
            if cache is not None:
                cache.expect_deferral(False)

    def __deepcopy__(self, memo: dict):
        raise ValueError("a model that runs ahead cannot be copied: undo patch(run_ahead=True) first")

    def __reduce__(self):
        raise ValueError("a model that runs ahead cannot be saved: undo patch(run_ahead=True) first")
