"""Putting a loaded model on ``"locks"``, and taking it off again."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from .attention import NAME

_Snapshot = list[tuple[PreTrainedConfig, str | None]]
# What each permanently or temporarily patched model had before its first patch.
_originals: WeakKeyDictionary[PreTrainedModel, _Snapshot] = WeakKeyDictionary()


class Patch:
    """The result of :func:`patch`: ignored, it keeps the patch; as a context manager it undoes it at the end."""

    def __init__(self, model: PreTrainedModel, before: _Snapshot, was_patched: bool):
        self._model = model
        self._before = before
        self._was_patched = was_patched

    def __enter__(self) -> PreTrainedModel:
        return self._model

    def __exit__(self, *exc_info) -> None:
        _restore(self._before)
        if not self._was_patched:
            _originals.pop(self._model, None)


def patch(model: PreTrainedModel) -> Patch:
    """Switch a loaded decoder-only model to the attention implementation ``"locks"``.

    Works as a plain call, undone by :func:`unpatch`, and as a context manager::

        patch(model)
        with patch(model):
            model.generate(..., past_key_values=LocksCache(budget=2048))

    Only the model's configuration changes; its modules and weights are untouched. In a model with several parts, the
    language model alone is switched.

    Args:
        model: A Transformers model.

    Returns:
        A context manager that yields the model.

    Raises:
        ValueError: If the model is not a Transformers model, is an encoder or encoder-decoder, or does not dispatch its
            attention through Transformers' attention interface.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"patch takes a transformers PreTrainedModel, got {type(model).__name__}")
    name = type(model).__name__
    text_config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model: Locks supports decoder-only language models")
    causal = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    if not getattr(text_config, "is_causal", True) or (causal and not any(causal)):
        raise ValueError(f"{name} attends in both directions: Locks supports causal language models")
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} does not use Transformers' attention interface, so its attention cannot be switched")

    before = _snapshot(model)
    was_patched = model in _originals
    request = NAME
    if text_config is not model.config:
        parts = model.config.sub_configs
        part = next((key for key in parts if getattr(model.config, key, None) is text_config), None)
        request = {part: NAME}
    model.set_attn_implementation(request)
    if text_config._attn_implementation != NAME:
        _restore(before)
        raise ValueError(f"{name} did not accept the attention implementation {NAME!r}")
    _originals.setdefault(model, before)
    return Patch(model, before, was_patched)


def unpatch(model: PreTrainedModel) -> None:
    """Give a patched model back the attention implementation it had before its first :func:`patch`.

    Raises:
        ValueError: If the model is not patched.
    """
    before = _originals.pop(model, None)
    if before is None:
        raise ValueError(f"this {type(model).__name__} was not patched with locks_hf.patch")
    _restore(before)


def _snapshot(model: PreTrainedModel) -> _Snapshot:
    configs: dict[int, PreTrainedConfig] = {}
    pending = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while pending:
        config = pending.pop()
        if id(config) in configs:
            continue
        configs[id(config)] = config
        parts = (getattr(config, key, None) for key in config.sub_configs)
        pending.extend(part for part in parts if isinstance(part, PreTrainedConfig))
    return [(config, config._attn_implementation_internal) for config in configs.values()]


def _restore(snapshot: _Snapshot) -> None:
    for config, implementation in snapshot:
        config._attn_implementation_internal = implementation
