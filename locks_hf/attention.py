"""The attention function ``"locks"`` and its mask function, registered with Transformers on import.

Registering adds two names and changes nothing else: a model uses them only when its attention implementation is set to
``"locks"``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from . import handoff
from .cache import NEEDS_CONFIG
from .continuation import continue_densely
from .kernels import attend, decode_step
from .layer import LocksLayer
from .rows import check_mask_rows

NAME = "locks"

# Keyword arguments that change what attention computes, with what asks for them.
_UNSUPPORTED = {
    "softcap": "logit soft-capping",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "a sparse index of its own",
    "block_indices": "a sparse index of its own",
    "position_bias": "a position bias",
}


def locks_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """Mask for the attention function ``"locks"``.

    Plain causal attention over a cache that holds exactly what was seen gets ``None`` or a 2-D padding mask, so that a
    long prefill never builds a T x T mask. Everything else (sliding windows, packed sequences, static caches) gets
    what SDPA would get. There ``None`` means that query ``i`` sees key 0 to ``i``; hence several tokens that continue
    a cache get a 2-D mask also without padding.

    At a decode step that needs nothing from the host, a LocksCache says that its keys have length 1: there the mask
    only tells which rows' new token is real.

    Returns:
        ``None``, bool ``(B, kv_length)``, or bool ``(B, 1, q_length, kv_length)``.

    Raises:
        ValueError: If a padding mask does not have one row for each of the batch.
    """
    if attention_mask is not None:
        check_mask_rows(attention_mask, batch_size)
    if q_length == 1 and kv_length == 1 and (isinstance(q_offset, torch.Tensor) or q_offset > 0):
        return new_token_mask(attention_mask, q_offset)
    if isinstance(q_offset, torch.Tensor) and q_length > 1 and not torch.compiler.is_compiling():
        q_offset = int(q_offset)  # tokens that continue a cache on a GPU: the host takes part in those
    # A caller that rules the skip out goes on to combine the mask with another one.
    plain = mask_function is causal_mask_function and kwargs.get("allow_is_causal_skip", True)
    plain = plain and not isinstance(q_offset, torch.Tensor)
    if not plain or kv_offset != 0 or kv_length != q_offset + q_length:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    if attention_mask is not None:
        if attention_mask.shape[1] > kv_length:
            attention_mask = attention_mask[:, :kv_length]
        if attention_mask.shape[1] < kv_length or not bool(attention_mask.all()):
            return attention_mask
    if q_offset == 0 or q_length == 1:
        return None
    return torch.ones((batch_size, kv_length), dtype=torch.bool, device=kwargs.get("device"))


def new_token_mask(attention_mask: torch.Tensor | None, position: int | torch.Tensor) -> torch.Tensor | None:
    """Which rows' token at ``position`` is real, bool ``(B, 1, 1, 1)``, or ``None``: all.

    Raises:
        ValueError: If the mask does not reach the position, as far as the host can tell.
    """
    if attention_mask is None:
        return None
    seen = attention_mask.shape[1]
    if isinstance(position, torch.Tensor):
        new = attention_mask.index_select(1, position.reshape(1).clamp(max=seen - 1))
    elif position < seen:
        new = attention_mask[:, position : position + 1]
    else:
        raise ValueError(
            f"the attention mask covers {seen} positions, but {position} are cached and 1 new: pass a mask over all "
            "tokens, cached ones included"
        )
    # A copy: a slice would have other strides at each step, for which compiled models would be compiled anew.
    return new.bool().flatten().clone().view(-1, 1, 1, 1)


def locks_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention over the pages of a :class:`LocksCache`, or dense SDPA for any other keys.

    Args:
        module: The attention module.
        query: ``(B, H * G, n, d)``.
        key: What the cache's ``update`` returned, ``(B, H, ..., d)``; of a LocksCache only its identity matters.
        value: Likewise.
        attention_mask: What :func:`locks_mask` returned.
        dropout: Must be 0 with a LocksCache.
        scaling: Factor on the logits, by default ``d ** -0.5``.
        is_causal: As in Transformers; ``False`` is refused.
        **kwargs: Others from the model.

    Returns:
        Output ``(B, n, H * G, d)`` and ``None``.

    Raises:
        ValueError: For attention that is not causal, or features that page selection does not cover.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal:
        raise ValueError(
            f"{type(module).__name__} is not causal: the attention implementation 'locks' is for decoder-only language "
            "models. In a model with several parts set it on the language model alone, for instance with "
            "locks_hf.patch(model)"
        )
    # Also without a LocksCache: SDPA of some Transformers versions drops them silently.
    for name, feature in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"this model uses {feature} ({name}), which Locks does not support")
    layer = handoff.take(key)
    if layer is None:
        mask = _dense_mask(attention_mask, query, key)
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=True, **kwargs
        )

    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    size = query.shape[2]
    try:
        _refuse_unsupported(attention_mask, dropout, kwargs.get("sliding_window"))
        if size == 1 and (output := _device_step(layer, query, attention_mask, scaling)) is not None:
            return output, None
        if attention_mask is not None and attention_mask.ndim == 4:
            real = attention_mask[:, 0, :, 0].cpu()
            real = None if bool(real.all()) else real
        else:
            real = layer.padding_of(attention_mask, size)
    except ValueError:
        layer.discard_staged()
        raise
    starts = layer.row_lengths or [0] * query.shape[0]
    key, value, is_draft_check = layer.commit(real)
    lengths = layer.row_lengths

    if size == 1 or is_draft_check:
        if not layer.selector.dense and max(lengths) > layer.config.whole_budget:
            return _ForwardOnly.of(_sparse_steps(layer, query, scaling), query, key, value), None
        for back in range(size):
            layer.counters.add_dense([max(0, length - back) for length in lengths], layer.n_kv_heads)
    else:
        layer.counters.add_prefill(size)

    if real is None and len(set(starts)) <= 1:
        if starts[0] == 0:
            return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)
        output = _continued(module, query, layer.keys, layer.values, starts[0], scaling)
    else:
        output = _dense_rows(module, query, key, value, layer, real, starts, scaling)
    return output if max(starts, default=0) == 0 else _ForwardOnly.of(output, query, key, value), None


class _ForwardOnly(torch.autograd.Function):
    """Attention over cached tokens, which carry no gradients: a backward pass through it would be silently wrong."""

    @staticmethod
    def of(output: torch.Tensor, *new: torch.Tensor) -> torch.Tensor:
        """``output``, which raises if gradients of the new queries, keys or values are asked for."""
        tracked = [tensor for tensor in new if tensor.requires_grad]
        return _ForwardOnly.apply(output, *tracked) if torch.is_grad_enabled() and tracked else output

    @staticmethod
    def forward(ctx, output: torch.Tensor, *tracked: torch.Tensor) -> torch.Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx, *gradients):
        raise ValueError(
            "LocksCache is for inference: gradients pass through a prompt on an empty cache, not through tokens that "
            "continue one. Train without it, or wrap what needs no gradients in torch.no_grad()"
        )


def _refuse_unsupported(attention_mask: torch.Tensor | None, dropout: float, sliding_window: int | None) -> None:
    if sliding_window is not None:
        raise ValueError(f"a sliding-window layer ({sliding_window} tokens): {NEEDS_CONFIG}")
    marks_new_token = (
        attention_mask is not None and attention_mask.shape[1:] == (1, 1, 1) and attention_mask.dtype == torch.bool
    )
    if attention_mask is not None and attention_mask.ndim != 2 and not marks_new_token:
        raise ValueError(
            f"LocksCache takes a 2-D padding mask, got {attention_mask.dtype} of shape {tuple(attention_mask.shape)}: "
            "custom attention patterns cannot be combined with page selection. If the model has local or chunked "
            "attention layers, pass config=model.config to LocksCache"
        )
    if dropout:
        raise ValueError(f"LocksCache is for inference, got dropout {dropout}: call model.eval()")


def _dense_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The 4-D mask SDPA needs for keys that do not come from a LocksCache.

    Raises:
        ValueError: If a padding mask covers more than the keys.
    """
    q_length, kv_length = query.shape[2], key.shape[2]
    if mask is None or mask.ndim == 4:
        return mask
    if mask.shape[1] > kv_length:
        raise ValueError(
            f"the attention mask covers {mask.shape[1]} positions, but the model attends {kv_length}: its cache was "
            "not used, as in training with gradient checkpointing"
        )
    return sdpa_mask(
        batch_size=query.shape[0],
        q_length=q_length,
        kv_length=kv_length,
        q_offset=kv_length - q_length,
        attention_mask=mask,
        device=query.device,
    )


def _device_step(
    layer: LocksLayer, query: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor | None:
    """A decode step that needs nothing from the host, ``(B, 1, H * G, d)``, or ``None`` if the layer cannot do it."""
    if not layer.steps_on_device:
        return None
    if mask is None:
        real = None
    elif mask.ndim == 4:
        real = mask[:, 0, 0, 0]
    else:
        real = layer.padding_of(mask, 1)
        real = None if real is None else real[:, 0].to(query.device)
    step = layer.take_step(real)
    config = layer.config
    output = decode_step(
        query.detach()[:, :, 0].to(layer.dtype),
        *(new.detach()[:, :, 0].to(layer.dtype) for new in step),
        real,
        layer.key_buffer,
        layer.value_buffer,
        layer.summaries,
        layer.counts,
        layer.selector.layout(config, query.shape[-1]),
        config.refit,
        config.combine,
        config.page_slots,
        scaling,
    )
    return _ForwardOnly.of(output.to(query.dtype)[:, None], query, *step)


def _sparse_steps(layer: LocksLayer, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attend each query token over its own selection, as if they had come one at a time.

    Args:
        layer: The layer, with the tokens of all queries committed.
        query: ``(B, H * G, n, d)``.
        scaling: Factor on the logits.

    Returns:
        ``(B, n, H * G, d)``.
    """
    config, selector = layer.config, layer.selector
    size = query.shape[2]
    outputs = []
    for i in range(size):
        back = size - 1 - i
        view = layer.page_view(back)
        one_query = query[:, :, i].to(layer.dtype)
        with _no_autocast(query.device.type):
            pages = selector.select(one_query, view, config, scaling)
            _check_selection(pages, layer)
            output = attend(
                one_query, layer.key_buffer, layer.value_buffer, pages, view.lengths, config.page_size, scaling
            )
        outputs.append(output.to(query.dtype))
        lengths = [max(0, length - back) for length in layer.row_lengths]
        layer.counters.add_sparse(
            lengths,
            layer.n_kv_heads,
            config.page_size,
            config.page_slots,
            None if selector.fixed_slots else pages,
            layer.score_bytes(lengths),
        )
    return outputs[0][:, None] if size == 1 else torch.stack(outputs, dim=1)


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Switches autocast off where it is on; entering the context costs more than asking."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _check_selection(pages: torch.Tensor, layer: LocksLayer) -> None:
    """Refuse what is not a selection, as far as that shows without waiting for the device."""
    selector, slots = layer.selector, layer.config.page_slots
    rows, heads = layer.key_buffer.shape[:2]
    if pages.dtype != torch.int32 or pages.ndim != 3 or pages.shape[:2] != (rows, heads):
        raise ValueError(
            f"{type(selector).__name__}.select must return int32 pages of shape ({rows}, {heads}, slots), got "
            f"{pages.dtype} {tuple(pages.shape)}"
        )
    if selector.fixed_slots and pages.shape[2] != slots:
        raise ValueError(
            f"{type(selector).__name__}.select returned {pages.shape[2]} slots where the budget has {slots}: return as "
            "many, or set fixed_slots = False to have the pages counted"
        )


def _continued(
    module: torch.nn.Module, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scaling: float
) -> torch.Tensor:
    """As :func:`continue_densely`; a single token as Transformers does it."""
    if query.shape[2] == 1:
        return sdpa_attention_forward(module, query, keys, values, None, scaling=scaling)[0]
    return continue_densely(query, keys, values, start, scaling)


def _dense_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    layer: LocksLayer,
    real: torch.Tensor | None,
    starts: list[int],
    scaling: float,
) -> torch.Tensor:
    """Causal attention of new tokens over rows of unequal length; the output at padding is zero."""
    batch, n_heads, size, head_dim = query.shape
    lengths = layer.row_lengths
    if size == 1 and real is None:
        # One token a row: a mask over the longest row is small.
        position = torch.arange(layer.max_length, device=query.device)
        mask = (position < layer.page_view().lengths[:, None])[:, None, None, :]
        return sdpa_attention_forward(module, query, layer.keys, layer.values, mask, scaling=scaling)[0]
    out = query.new_zeros((batch, size, n_heads, head_dim))
    for row in range(batch):
        new = slice(None) if real is None else real[row].to(query.device)
        row_query = query[row : row + 1, :, new]
        if row_query.shape[2] == 0:
            continue
        if starts[row] == 0:
            keys, values = new_key[row : row + 1, :, new], new_value[row : row + 1, :, new]
            row_out = sdpa_attention_forward(module, row_query, keys, values, None, scaling=scaling, is_causal=True)[0]
        else:
            keys = layer.keys[row : row + 1, :, : lengths[row]]
            values = layer.values[row : row + 1, :, : lengths[row]]
            row_out = _continued(module, row_query, keys, values, starts[row], scaling)
        out[row, new] = row_out[0]
    return out


AttentionInterface.register(NAME, locks_attention)
AttentionMaskInterface.register(NAME, locks_mask)
