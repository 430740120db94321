"""Putting a loaded model on ``"locks"``, and taking it off again."""

from __future__ import annotations

import threading
import weakref

from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from . import deferral
from .attention import NAME
from .deferral import RunAhead
from .graphs import StepGraphs
from .linears import FastLinears

# The changes in force on each model, oldest first. They end with the model, which they do not keep in memory.
_in_force: weakref.WeakKeyDictionary[PreTrainedModel, list[_Change]] = weakref.WeakKeyDictionary()
# Threads may patch one model, each for its own requests. Reentrant: a collected model is undone where it happens.
_lock = threading.RLock()


class _Change:
    """What the configurations of a model had before they were switched, and what else was changed with them."""

    def __init__(self, model: PreTrainedModel):
        # Configurations are not hashable, and models may share them.
        self._before = [(config, config._attn_implementation_internal) for config in _configs(model)]
        self.graphs: weakref.ref[StepGraphs] | None = None  # which the model holds
        self.linears: FastLinears | None = None
        self.ahead: weakref.ref[RunAhead] | None = None  # likewise

    def undo(self) -> None:
        """Restore each configuration that no other change in force covers; leave the others to those changes."""
        for config, before in self._before:
            in_force = (other for changes in _in_force.values() for other in changes)
            others = [other for other in in_force if other is not self and other._covers(config)]
            if not others:
                config._attn_implementation_internal = before
            for other in others:
                other._inherit(config, before)
        if self.graphs is not None and (graphs := self.graphs()) is not None:
            graphs.remove()
        if self.linears is not None:
            self.linears.remove()
        if self.ahead is not None:
            if (ahead := self.ahead()) is not None:
                ahead.remove()
            deferral.end()

    def _covers(self, config: PreTrainedConfig) -> bool:
        return any(own is config for own, _ in self._before)

    def _inherit(self, config: PreTrainedConfig, before: str | None) -> None:
        """Take over what ``config`` had before an older change, where this one found it patched."""
        self._before = [(own, before if own is config and found == NAME else found) for own, found in self._before]


class Patch:
    """The result of :func:`patch`: ignored, it keeps the patch; as a context manager it undoes it at the end."""

    def __init__(self, model: PreTrainedModel, change: _Change):
        self._model = model
        self._change = change

    def __enter__(self) -> PreTrainedModel:
        return self._model

    def __exit__(self, *exc_info) -> None:
        with _lock:
            changes = _in_force[self._model]
            if self._change in changes:
                changes.remove(self._change)
                self._change.undo()


def patch(
    model: PreTrainedModel, *, cuda_graphs: bool = False, fast_linear: bool = False, run_ahead: bool = False
) -> Patch:
    """Switch a loaded decoder-only model to the attention implementation ``"locks"``.

    Works as a plain call, undone by :func:`unpatch`, and as a context manager::

        patch(model)
        with patch(model):
            model.generate(..., past_key_values=LocksCache(budget=2048))

    Without the options only the model's configuration changes; weights are untouched anyway. In a model with several
    parts, the language model alone is switched. Threads may patch and undo at the same time; the model is on
    ``"locks"`` while any of them has it patched.

    Args:
        model: A Transformers model.
        cuda_graphs: Record decode steps on a LocksCache in CUDA graphs and replay them, instead of having ``generate``
            compile the model; see :mod:`locks_hf.graphs`. While it lasts the model's ``forward`` is wrapped. Elsewhere
            than on a CUDA device it changes nothing.
        fast_linear: Compute the linear layers of steps of a few rows by a kernel that reads their weights at close to
            the memory's bandwidth; see :mod:`locks_hf.linears`. While it lasts every plain ``nn.Linear`` of the model
            is a subclass of it: quantise a model, or add adapters or hooks of Accelerate to it, before or without it.
            Sums are rounded in another order than by ``nn.Linear``. Elsewhere than on a CUDA device layers compute as
            before. Compiled steps have the sines and cosines of positions computed once, see :mod:`locks_hf.angles`.
        run_ahead: Have ``generate`` prepare a step while the one before it still runs, and learn one step late that all
            rows of a LocksCache have ended; see :mod:`locks_hf.deferral`. The step too many is taken back: tokens and
            cache are as without it. But logits processors, stopping criteria and the random generator are called once
            more, and the cache's counters have that step. While it lasts the model's ``generate`` is wrapped.
            Elsewhere than on a CUDA device it changes nothing.

    Returns:
        A context manager that yields the model.

    Raises:
        ValueError: If the model is not a Transformers model, is an encoder or encoder-decoder, does not dispatch its
            attention through Transformers' attention interface, is recorded or runs ahead already, or has no linear
            layer to make fast.
    """
    if not isinstance(model, PreTrainedModel):
        compiled = "; patch the model before it is compiled" if hasattr(model, "_orig_mod") else ""
        raise ValueError(f"patch takes a transformers PreTrainedModel, got {type(model).__name__}{compiled}")
    name = type(model).__name__
    text_config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model: Locks supports decoder-only language models")
    causal = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    if not getattr(text_config, "is_causal", True) or (causal and not any(causal)):
        raise ValueError(f"{name} attends in both directions: Locks supports causal language models")
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} does not use Transformers' attention interface, so its attention cannot be switched")

    request = NAME
    if text_config is not model.config:
        parts = model.config.sub_configs
        part = next((key for key in parts if getattr(model.config, key, None) is text_config), None)
        request = {part: NAME}
    with _lock:
        if cuda_graphs and any(change.graphs is not None for change in _in_force.get(model, [])):
            raise ValueError(f"the decode steps of this {name} are recorded already: undo that patch first")
        if run_ahead and any(change.ahead is not None for change in _in_force.get(model, [])):
            raise ValueError(f"this {name} runs ahead already: undo that patch first")
        new = _Change(model)
        model.set_attn_implementation(request)
        if text_config._attn_implementation != NAME:
            new.undo()
            raise ValueError(f"{name} did not accept the attention implementation {NAME!r}")
        try:
            if fast_linear:
                new.linears = FastLinears(model)
            if cuda_graphs:
                new.graphs = weakref.ref(StepGraphs(model))
            if run_ahead:
                new.ahead = weakref.ref(RunAhead(model))
                deferral.begin()
        except BaseException:
            new.undo()
            raise
        if model not in _in_force:
            _in_force[model] = []
            # A model that goes while it is patched may leave its configuration to others.
            weakref.finalize(model, _undo_all, _in_force[model]).atexit = False
        _in_force[model].append(new)
    return Patch(model, new)


def unpatch(model: PreTrainedModel) -> None:
    """Undo all patches of a model: it gets back the attention implementation it had before the first.

    Where another patched model shares its configuration, that one decides when the configuration changes back.

    Raises:
        ValueError: If the model is not patched.
    """
    with _lock:
        changes = _in_force.get(model, [])
        if not changes:
            raise ValueError(
                f"this {type(model).__name__} was not patched with locks_hf.patch (nor was a copy of a patched model; "
                "model.set_attn_implementation changes it)"
            )
        _undo_all(changes)


def _undo_all(changes: list[_Change]) -> None:
    with _lock:
        while changes:
            changes.pop().undo()  # newest first: the oldest knows what was there before all


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every configuration of the model and its parts, each once."""
    found: dict[int, PreTrainedConfig] = {}
    pending = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while pending:
        config = pending.pop()
        if id(config) not in found:
            found[id(config)] = config
            parts = (getattr(config, key, None) for key in config.sub_configs)
            pending.extend(part for part in parts if isinstance(part, PreTrainedConfig))
    return list(found.values())
