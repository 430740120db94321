"""Contexts for caches: synthetic keys and values drawn on the device, or a real prefill of random tokens.

Synthetic keys have what page selection lives on: a page's tokens are near each other and spread along a few directions
of the page's own. Token ``t`` of a page is ``centre + coefficients @ directions + noise`` with a standard normal centre
of ``d`` channels, :data:`DIRECTIONS` standard normal directions scaled by :data:`SPREAD`, and noise of :data:`NOISE`;
values are standard normal. A page's logits under a random query then differ by several units between pages and by
about half as much within one, so that neither the choice of pages nor attention is degenerate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from locks_hf import LocksCache

DIRECTIONS, SPREAD, NOISE = 4, 0.3, 0.1
PAGE = 16
_CHUNK = 1 << 25  # elements drawn at once: bounds the temporaries, and the matrices of one batched product

Progress = Callable[[int], object]


def synthetic_states(
    batch: int, heads: int, length: int, head_dim: int, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer, each ``(batch, heads, length, head_dim)``; equal seeds give equal states."""
    generator = torch.Generator(device).manual_seed(seed)
    n_pages = -(-length // PAGE)
    keys = torch.empty((batch, heads, length, head_dim), dtype=dtype, device=device)
    values = torch.empty_like(keys)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    step = max(1, _CHUNK // (batch * heads * PAGE * head_dim))
    for first in range(0, n_pages, step):
        pages = min(step, n_pages - first)
        page_keys = draw(batch, heads, pages, PAGE, head_dim).mul_(NOISE)
        page_keys += draw(batch, heads, pages, 1, head_dim)
        page_keys += draw(batch, heads, pages, PAGE, DIRECTIONS) @ draw(batch, heads, pages, DIRECTIONS, head_dim).mul_(
            SPREAD
        )
        start, stop = first * PAGE, min((first + pages) * PAGE, length)
        keys[:, :, start:stop] = page_keys.flatten(2, 3)[:, :, : stop - start]
        values[:, :, start:stop] = draw(batch, heads, stop - start, head_dim)
    return keys, values


def fill_synthetic(
    cache: Cache,
    layers: int,
    batch: int,
    heads: int,
    length: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    done: Progress = lambda layers: None,
) -> None:
    """Write a synthetic context of ``length`` tokens into every layer of an empty cache, summaries included.

    Args:
        cache: A :class:`LocksCache`, which gets them as from a prompt, or a cache of Transformers.
        layers: Layers of the model.
        batch: Rows.
        heads: KV heads.
        length: Tokens a row.
        head_dim: Channels.
        device: Where the states are drawn.
        dtype: Of the states.
        seed: Layer ``l`` draws from ``seed + l``.
        done: Called with 1 as each layer is filled.
    """
    for layer in range(layers):
        keys, values = synthetic_states(batch, heads, length, head_dim, device, dtype, seed + layer)
        write = cache.load_states if isinstance(cache, LocksCache) else cache.update
        write(keys, values, layer)
        del keys, values
        done(1)


def random_tokens(batch: int, length: int, vocabulary: int, device: torch.device, seed: int) -> torch.Tensor:
    """Token ids ``(batch, length)``."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, vocabulary, (batch, length), generator=generator, device=device)


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    cache: Cache,
    tokens: torch.Tensor,
    chunk: int | None,
    done: Progress = lambda tokens: None,
) -> torch.Tensor:
    """Run a prompt through the model into a cache.

    Args:
        model: On the attention implementation that the cache needs.
        cache: The cache, which may hold tokens already.
        tokens: ``(B, n)``.
        chunk: Tokens a forward pass; ``None``: all in one.
        done: Called with the tokens of each pass.

    Returns:
        The token that follows, ``(B, 1)``.
    """
    start = int(cache.get_seq_length())
    piece, logits = chunk or tokens.shape[1], None
    for first in range(0, tokens.shape[1], piece):
        part = tokens[:, first : first + piece]
        position = torch.arange(start + first, start + first + part.shape[1], device=tokens.device)[None]
        logits = model(part, position_ids=position, logits_to_keep=1, **{cache_argument(model): cache}).logits
        done(part.shape[1])
    return logits[:, -1:].argmax(-1)


def cache_argument(model: PreTrainedModel) -> str:
    """What ``forward`` calls its cache: recent Transformers say ``cache`` and warn about ``past_key_values``."""
    import inspect

    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
