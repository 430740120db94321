"""The cache: its layers, kept right through every operation of Transformers' Cache contract."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
)
from transformers.configuration_utils import PreTrainedConfig

from . import handoff
from .config import LocksConfig
from .layer import LocksLayer, decodes_on_device
from .rows import PaddingReader
from .selectors import PageSelector, resolve_selector
from .stats import CacheStats, LayerCounters

# Layers of other kinds that keep what Transformers gives them. DummyLayer exists in later versions only.
_KEPT_LAYERS = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer")
    if hasattr(cache_utils, name)
)

NEEDS_CONFIG = (
    "LocksCache cannot know which layers of this model are not full attention: pass config=model.config, "
    "as in LocksCache(..., config=model.config)"
)


# Layers that see every token and say how many they have seen.
_COUNTING_LAYERS = (LocksLayer, cache_utils.DynamicSlidingWindowLayer)


def _positions(layer: CacheLayerMixin) -> int:
    """Positions a layer has seen in the passes that the host took part in, without waiting for the device."""
    # As an int: after crop a layer of Transformers 5.17 may count in a tensor.
    return layer.host_positions if isinstance(layer, LocksLayer) else int(layer.get_seq_length())


class LocksCache(Cache):
    """A Transformers cache that attends only the best pages at each decode step and evicts nothing.

    Use it with a model whose attention implementation is ``"locks"``::

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="locks")
        model.generate(**inputs, past_key_values=LocksCache(rank=8, budget=2048))

    Prompts (and anything else of several tokens) are processed densely; single new tokens, and drafted tokens that
    assisted generation checks (after its first check, and up to 64 at once), attend ``budget`` tokens per (layer, KV
    head). While every row fits the budget, steps are dense and equal to the model without Locks. A cache sees tokens,
    not where they come from: a prompt chunk or turn of exactly one token is a decode step.

    Args:
        rank: Columns of the per-page basis, 1 to ``page_size - 1``.
        budget: Tokens attended per (layer, KV head) and step, at least two pages.
        page_size: Tokens a page, a power of two.
        basis_bits: 2, 4, 8 or 16 bits per basis entry.
        refit: Refit coefficients against the quantised basis (same bytes, less error); ``False`` is the paper's rule.
        combine: ``"share"`` (the paper's), ``"max"`` or ``"mass"``; see :class:`locks_hf.config.LocksConfig`.
        selector: ``"locks"``, ``"oracle"`` (exact page mass), ``"quest"``, ``"full"`` (dense), or a
            :class:`locks_hf.selectors.PageSelector`.
        max_cache_len: Fixed capacity in tokens a row; by default the cache grows.
        config: The model's config. Needed when some layers are not full attention (sliding window, linear): those
            keep the caches Transformers gives them.

    Raises:
        ValueError: If a value is out of range, or the config has layers that Locks does not support.
    """

    def __init__(
        self,
        rank: int = 8,
        budget: int = 2048,
        *,
        page_size: int = 16,
        basis_bits: int = 4,
        refit: bool = True,
        combine: str = "share",
        selector: str | PageSelector = "locks",
        max_cache_len: int | None = None,
        config: PreTrainedConfig | None = None,
    ):
        if isinstance(rank, PreTrainedConfig):
            raise ValueError("LocksCache takes the model's configuration by name: LocksCache(config=model.config)")
        self.locks_config = LocksConfig(
            rank=rank,
            budget=budget,
            page_size=page_size,
            basis_bits=basis_bits,
            refit=refit,
            combine=combine,
            max_cache_len=max_cache_len,
        )
        self.selector = resolve_selector(selector)
        self._padding = PaddingReader()
        self._drafting = False
        self._deferral_expected = False
        new_layer = self._layer_factory()
        self._knows_layers = config is not None
        if config is None:
            super().__init__(layer_class_to_replicate=new_layer)
        else:
            super().__init__(layers=_layers_for(config, new_layer))

    def _layer_factory(self) -> partial:
        return partial(LocksLayer, self.locks_config, self.selector, self._padding)

    @property
    def locks_layers(self) -> list[LocksLayer]:
        """The layers whose pages Locks selects."""
        return [layer for layer in self.layers if isinstance(layer, LocksLayer)]

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` may compile decode steps: they take part in nothing that the host must know."""
        others = (layer for layer in self.layers if not isinstance(layer, LocksLayer))
        steps = decodes_on_device(self.selector) and not self._drafting
        return steps and all(layer.is_compileable for layer in others)

    @property
    def steps_on_device(self) -> bool:
        """Whether a forward pass over single tokens is a decode step that the host takes no part in."""
        return self.is_compileable and bool(self.locks_layers) and all(x.steps_on_device for x in self.locks_layers)

    def addresses(self) -> tuple[int, ...]:
        """Where decode steps read and write, and how much room there is; recorded steps are good for these only."""
        return tuple(
            number
            for layer in self.locks_layers
            for number in (
                layer.key_buffer.shape[2],
                *(x.data_ptr() for x in (layer.key_buffer, layer.value_buffer, layer.counts)),
                *(x.data_ptr() for x in layer.summaries.values()),
            )
        )

    def prepare_step(self) -> bool:
        """Do once before a decode step what needs the host.

        Returns:
            Whether buffers moved.

        Raises:
            ValueError: If the step does not fit ``max_cache_len``.
        """
        return any([layer.prepare_step() for layer in self.locks_layers])  # a list: all of them, not up to the first

    def count_step(self, real: torch.Tensor | None) -> None:
        """Note a decode step that is replayed; ``real`` bool ``(B,)``, false at padding, or ``None``: all real."""
        for layer in self.locks_layers:
            layer.count_step(real)

    def note_padding(self, real: torch.Tensor) -> None:
        """As :meth:`LocksLayer.note_padding`."""
        for layer in self.locks_layers:
            layer.note_padding(real)

    def make_room(self, tokens: int) -> None:
        """Grow for so many more tokens a row; for models that are compiled by hand, whose steps cannot.

        Raises:
            ValueError: If they do not fit ``max_cache_len``, or the cache is empty.
        """
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        if not any(layer.steps_on_device for layer in self.locks_layers):
            raise ValueError("make_room is for a cache that has seen its prompt: call it before the decode steps")
        for layer in self.locks_layers:
            layer.make_room(tokens)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As in :class:`transformers.Cache`. Asked before each forward pass, it is where room for a step is made.

        Raises:
            ValueError: If the step does not fit ``max_cache_len``.
        """
        if query_length == 1 and not torch.compiler.is_compiling():
            for layer in self.locks_layers:
                if layer.steps_on_device:
                    layer.prepare_step()
        return super().get_mask_sizes(query_length, layer_idx)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values and summaries of :attr:`locks_layers`, spare capacity included."""
        held = [layer.held_bytes() for layer in self.locks_layers]
        return sum(h["kv_bytes_allocated"] + h["summary_bytes_allocated"] for h in held)

    def stats(self) -> CacheStats:
        """Counters since creation, :meth:`reset` or :meth:`reset_stats`, and what is held now."""
        layers = self.locks_layers
        stats = CacheStats()
        for layer in layers:
            for name, count in layer.held_bytes().items():
                setattr(stats, name, getattr(stats, name) + count)
        counters = [layer.counters for layer in layers]
        steps = max((c.sparse_steps + c.dense_steps for c in counters), default=0)
        stats.sparse_steps = max((c.sparse_steps for c in counters), default=0)
        stats.dense_steps = steps - stats.sparse_steps
        stats.prefill_tokens = max((c.prefill_tokens for c in counters), default=0)
        if steps:
            heads = [layer.n_kv_heads if layer.is_initialized else 0 for layer in layers]
            attended = [c.attended_tokens for c in counters]
            stats.tokens_attended = sum(attended) / sum(
                c.rows_attending * n for c, n in zip(counters, heads, strict=True)
            )
            stats.summary_bytes_read_per_step = sum(c.score_bytes for c in counters) / steps
            per_token = [
                2 * layer.key_buffer.shape[3] * layer.dtype.itemsize if layer.is_initialized else 0 for layer in layers
            ]
            stats.kv_bytes_read_per_step = sum(a * p for a, p in zip(attended, per_token, strict=True)) / steps
        return stats

    def reset(self) -> None:
        """Drop everything, counters included."""
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                # Transformers 5.17 zeroes these layers and then appends to the zeros.
                layer.keys = layer.values = None
                layer.is_initialized = False
            layer.reset()
        self._drafting = False

    def reset_stats(self) -> None:
        """Set all counters to zero."""
        for layer in self.locks_layers:
            layer.settle()
            layer.counters = LayerCounters()

    def reconfigure(self, *, budget: int | None = None, combine: str | None = None) -> None:
        """Change what later decode steps read. What is stored does not depend on these, so nothing is rebuilt.

        Args:
            budget: New budget in tokens.
            combine: New combine rule.

        Raises:
            ValueError: If a value is out of range; nothing is changed then.
        """
        changes = {name: value for name, value in (("budget", budget), ("combine", combine)) if value is not None}
        self.locks_config = replace(self.locks_config, **changes)
        for layer in self.locks_layers:
            layer.settle()
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = self._layer_factory()
        for layer in self.locks_layers:
            layer.config = self.locks_config

    def fork(self, *, selector: str | PageSelector | None = None, **changes) -> LocksCache:
        """A new cache with a copy of the cached tokens, and its own configuration, selector, summaries and counters.

        Prefill once, then decode from one fork per method.

        Args:
            selector: Selector of the new cache; by default this one's.
            **changes: Fields of :class:`locks_hf.config.LocksConfig` to change, such as ``budget`` or ``rank``.

        Raises:
            ValueError: If a field is unknown or out of range.
        """
        fields = vars(self.locks_config)
        unknown = sorted(set(changes) - set(fields))
        if unknown:
            raise ValueError(f"fork does not know {unknown}; it can change {sorted(fields)} and selector")
        new = LocksCache(**{**fields, **changes}, selector=self.selector if selector is None else selector)
        new._knows_layers = self._knows_layers
        if self._knows_layers:
            new.layer_class_to_replicate = None
        new.layers = [
            layer.fork(new.locks_config, new.selector, new._padding)
            if isinstance(layer, LocksLayer)
            else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return new

    @property
    def can_take_back_steps(self) -> bool:
        """Whether decode steps can be taken back by :meth:`crop` without having been recorded."""
        return self.steps_on_device and len(self.locks_layers) == len(self.layers)

    def expect_deferral(self, expected: bool) -> None:
        """Whether the next :meth:`activate_past_recording` announces no drafts, but a step that may be taken back."""
        self._deferral_expected = expected

    def activate_past_recording(self) -> None:
        """Assisted generation begins; tells the layers, those still to be made included."""
        if self._deferral_expected:
            self._deferral_expected = False
            return
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = partial(self.layer_class_to_replicate, drafting=True)
        self._drafting = True
        super().activate_past_recording()

    def get_conv_state(self, layer_idx: int, *args, **kwargs) -> torch.Tensor | None:
        """As in :class:`transformers.Cache`.

        Raises:
            ValueError: If the cache was made without the model's config.
        """
        if not self._knows_layers:
            raise ValueError(NEEDS_CONFIG)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args, **kwargs) -> torch.Tensor | None:
        """As in :class:`transformers.Cache`.

        Raises:
            ValueError: If the cache was made without the model's config.
        """
        if not self._knows_layers:
            raise ValueError(NEEDS_CONFIG)
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def _lengths_before(self, layer_idx: int, size: int) -> set[int]:
        """Tokens held before this pass of ``size``: by all layers where it begins, later by two that must agree."""
        first = next((index for index, layer in enumerate(self.layers) if isinstance(layer, _COUNTING_LAYERS)), None)
        if layer_idx == first:
            return {_positions(layer) for layer in self.layers if isinstance(layer, _COUNTING_LAYERS)}
        if first is None:
            return set()
        before = _positions(self.layers[first]) - size  # it has this pass's tokens already
        if layer_idx >= len(self.layers):
            return {before, 0}  # a layer that is still to be made
        layer = self.layers[layer_idx]
        return {before, _positions(layer)} if isinstance(layer, _COUNTING_LAYERS) else set()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in :class:`transformers.Cache`.

        Raises:
            ValueError: As :meth:`LocksLayer.update`, and if an interrupted forward pass left layers ahead of others.
        """
        # A compiled pass is one piece.
        compiling = torch.compiler.is_compiling()
        held = set() if compiling else self._lengths_before(layer_idx, key_states.shape[-2])
        if len(held) > 1:
            raise ValueError(
                f"the layers of this cache hold {sorted(held)} tokens: a forward pass was interrupted between them, or "
                "the cache was filled by another model. Start again with a new cache or cache.reset()"
                + ("" if self._knows_layers else f". If that is not so: {NEEDS_CONFIG}")
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def load_states(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> None:
        """Append tokens to a layer that come from elsewhere than a forward pass, as a prompt would have.

        Load into all layers alike before a model continues the cache.

        Args:
            key_states: Post-RoPE keys ``(B, H, n, d)``, all of them real tokens.
            value_states: Values, likewise.
            layer_idx: The layer.

        Raises:
            ValueError: As :meth:`update`, if the tokens do not fit ``max_cache_len``, and if the layer is not one of
                :attr:`locks_layers`.
        """
        if layer_idx < len(self.layers) and not isinstance(self.layers[layer_idx], LocksLayer):
            kind = type(self.layers[layer_idx]).__name__
            raise ValueError(f"layer {layer_idx} is a {kind}, which Locks does not fill: load into the others alone")
        returned, _ = self.update(key_states, value_states, layer_idx)
        handoff.take(returned)
        self.layers[layer_idx].commit(None)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args, **kwargs) -> torch.Tensor:
        """As in :class:`transformers.Cache`.

        Raises:
            ValueError: If the cache was made without the model's config.
        """
        if not self._knows_layers:
            raise ValueError(NEEDS_CONFIG)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, *args, **kwargs) -> torch.Tensor:
        """As in :class:`transformers.Cache`.

        Raises:
            ValueError: If the cache was made without the model's config.
        """
        if not self._knows_layers:
            raise ValueError(NEEDS_CONFIG)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, *args, **kwargs) -> bool:
        """As in :class:`transformers.Cache`.

        Raises:
            ValueError: If the cache was made without the model's config.
        """
        if not self._knows_layers:
            raise ValueError(NEEDS_CONFIG)
        return super().has_previous_state(layer_idx, *args, **kwargs)


def _layers_for(config: PreTrainedConfig, new_layer: partial) -> list:
    """Layers for a model config: Locks where Transformers would keep everything, its own layers elsewhere."""
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"config must be a model's configuration, as in config=model.config, got {config!r:.80}")
    text_config = config.get_text_config(decoder=True)
    # The modes say it from Transformers 5.24 on, the number before.
    modes = getattr(text_config, "kv_sharing_modes", None) or ()
    if getattr(text_config, "num_kv_shared_layers", 0) or any(mode is not None for mode in modes):
        raise ValueError(
            f"some layers of {type(config).__name__} attend the cached keys of other layers (KV sharing), which Locks "
            "does not support"
        )
    layers = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicLayer:
            layers.append(new_layer())
        elif type(layer) in _KEPT_LAYERS:
            layers.append(layer)
        else:
            raise ValueError(
                f"layer {index} of {type(config).__name__} needs a {type(layer).__name__}, which Locks does not support"
            )
    if getattr(text_config, "cross_attention_layers", None):
        raise ValueError(
            f"{type(config).__name__} has cross-attention layers ({text_config.cross_attention_layers}), which Locks "
            "does not support"
        )
    if not any(isinstance(layer, LocksLayer) for layer in layers):
        raise ValueError(f"{type(config).__name__} has no full-attention layer: Locks has nothing to select there")
    return layers
