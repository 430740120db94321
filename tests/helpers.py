"""Tiny random models, caches that select early, and checks of what a cache holds."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from locks_hf import LocksCache

PAGE = 4  # page size of small_cache
VOCAB = 96
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Large weights make attention peaked, so that the choice of pages shows in the tokens.
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
# Architectures whose every layer is full attention, and what they need besides the sizes.
FULL_ATTENTION = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "phi3": {"num_key_value_heads": 4},
    "gemma": {},
    "gpt2": {},
    "gpt_neox": {},
}
# Architectures that mix sliding-window and full-attention layers.
SLIDING = {
    "gemma3_text": {"sliding_window": 16, "layer_types": _ALTERNATING},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "layer_types": _ALTERNATING},
    "cohere2": {"sliding_window": 16, "layer_types": _ALTERNATING},
}


class Attention(nn.Module):
    """What an attention function reads of the module that calls it."""

    is_causal = True

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups


def tiny_model(name, implementation="locks", *, seed=0, **overrides):
    """A random causal language model in eval mode; equal seeds give equal weights."""
    sizes = {**_SIZES, **FULL_ATTENTION.get(name, {}), **overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(name, **sizes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.eval()


def small_cache(**changes):
    """A LocksCache of three 4-token pages at rank 2."""
    return LocksCache(**{"rank": 2, "budget": 3 * PAGE, "page_size": PAGE, **changes})


def random_tokens(rows, length, seed=0):
    """Token ids ``(rows, length)``, none of them the pad token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (rows, length), generator=generator)


def left_pad(prompts):
    """Prompts of unequal length as one batch: ids and mask ``(rows, longest)``."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def greedy(model, ids, new_tokens, cache=None, **kwargs):
    """The new tokens of greedy decoding, ``(rows, new_tokens)``."""
    cache = DynamicCache() if cache is None else cache
    output = model.generate(
        ids, past_key_values=cache, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, **kwargs
    )
    return output[:, ids.shape[1] :]


@torch.no_grad()
def feed(model, cache, *chunks, mask=None):
    """Run the chunks through the model one after the other; the logits of all their tokens.

    Args:
        model: The model.
        cache: Its cache, which may hold tokens already.
        *chunks: Token ids ``(rows, n)``.
        mask: Padding mask over everything, cached tokens included, or ``None``.
    """
    logits = []
    for chunk in chunks:
        start = cache.get_seq_length()
        end = start + chunk.shape[1]
        extra = {}
        if mask is not None:
            positions = (mask[:, :end].long().cumsum(-1) - 1).clamp(min=0)
            extra = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:]}
        logits.append(model(chunk, past_key_values=cache, **extra).logits)
    return torch.cat(logits, dim=1)


def one_by_one(ids):
    """Chunks of one token each: decode steps."""
    return ids.split(1, dim=1)


def check_cache(cache):
    """Assert that a cache is consistent and that its summaries are those made fresh from its keys."""
    layers = [layer for layer in cache.locks_layers if layer.is_initialized]
    assert len({layer.get_seq_length() for layer in layers}) <= 1
    assert len({tuple(layer.row_lengths) for layer in layers}) <= 1
    for layer in layers:
        config, lengths = layer.config, layer.row_lengths
        size, capacity = config.page_size, layer.key_buffer.shape[2]
        assert layer.key_buffer.shape == layer.value_buffer.shape
        assert layer.key_buffer.shape[0] == len(lengths) == cache.batch_size
        assert capacity % size == 0
        assert layer.max_length == max(lengths) <= capacity
        assert max(lengths) <= layer.get_seq_length()
        view = layer.page_view()
        assert view.lengths.tolist() == lengths
        assert view.max_length == max(lengths)
        for row, length in enumerate(lengths):
            n_pages = length // size
            if n_pages == 0:
                continue
            pages = layer.keys[row, :, : n_pages * size].unflatten(1, (n_pages, size)).flatten(0, 1)
            for name, fresh in layer.selector.summarize(pages, config).items():
                held = layer.summaries[name][row, :, :n_pages].flatten(0, 1)
                torch.testing.assert_close(held, fresh, rtol=0, atol=0, equal_nan=True)
        check_bytes(layer)


def check_bytes(layer):
    """Assert that the bytes a layer reports are those of its tensors."""
    lengths, size = layer.row_lengths, layer.config.page_size
    held = layer.held_bytes()
    pages = sum(length // size for length in lengths)
    per_page = sum(array.nbytes // max(1, array.shape[0] * array.shape[2]) for array in layer.summaries.values())
    assert held["summary_bytes"] == pages * per_page
    assert held["summary_bytes_allocated"] == sum(array.nbytes for array in layer.summaries.values())
    heads, head_dim = layer.key_buffer.shape[1], layer.key_buffer.shape[3]
    per_token = 2 * heads * head_dim * layer.key_buffer.element_size()
    assert held["kv_bytes"] == sum(lengths) * per_token
    assert held["kv_bytes_allocated"] == layer.key_buffer.nbytes + layer.value_buffer.nbytes


def assert_same_tokens_held(cache, expected, *, rtol=1e-4, atol=1e-4):
    """Assert that two caches hold the same keys and values in every row."""
    assert len(cache.locks_layers) == len(expected.locks_layers)
    for layer, other in zip(cache.locks_layers, expected.locks_layers, strict=True):
        assert layer.row_lengths == other.row_lengths
        for row, length in enumerate(layer.row_lengths):
            for name in ("keys", "values"):
                ours, theirs = getattr(layer, name), getattr(other, name)
                torch.testing.assert_close(ours[row, :, :length], theirs[row, :, :length], rtol=rtol, atol=atol)
