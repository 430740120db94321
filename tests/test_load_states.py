"""Keys and values written straight into a cache: the same as a prompt that had made them."""

import pytest
import torch

from locks_hf import LocksCache, handoff
from tests.helpers import (
    SLIDING,
    assert_same_tokens_held,
    check_cache,
    feed,
    one_by_one,
    random_tokens,
    small_cache,
    tiny_model,
)


def states_of(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.locks_layers]


@pytest.mark.parametrize("pieces", ((42,), (17, 25), (1, 40, 1)), ids=str)
@pytest.mark.parametrize("rows", (1, 3))
def test_a_loaded_cache_is_the_prefilled_one(llama, rows, pieces):
    prefilled, loaded = small_cache(), small_cache()
    feed(llama, prefilled, random_tokens(rows, 42))
    for start, size in zip((0, *torch.tensor(pieces).cumsum(0).tolist()), pieces, strict=False):
        for index, (keys, values) in enumerate(states_of(prefilled)):
            loaded.load_states(keys[:, :, start : start + size], values[:, :, start : start + size], index)
    check_cache(loaded)
    assert_same_tokens_held(loaded, prefilled, rtol=0, atol=0)
    for layer, other in zip(loaded.locks_layers, prefilled.locks_layers, strict=True):
        assert layer.counts.tolist() == other.counts.tolist()
        for name, array in layer.summaries.items():
            n_pages = 42 // layer.config.page_size
            assert torch.equal(array[:, :, :n_pages], other.summaries[name][:, :, :n_pages])
    assert loaded.get_seq_length() == 42
    steps = one_by_one(random_tokens(rows, 20, seed=1))
    torch.testing.assert_close(feed(llama, loaded, *steps), feed(llama, prefilled, *steps), rtol=0, atol=0)
    assert loaded.stats().sparse_steps == 20


def test_loading_leaves_no_layer_waiting_for_attention():
    cache = small_cache()
    cache.load_states(torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), 0)
    assert handoff.pending() is None


def test_states_that_do_not_fit_are_refused_and_not_kept():
    cache = LocksCache(rank=2, budget=32, max_cache_len=10)
    states = torch.randn(1, 2, 8, 8)
    cache.load_states(states, states, 0)
    with pytest.raises(ValueError, match="max_cache_len is 10 tokens, but a row needs 16"):
        cache.load_states(states, states, 0)
    assert cache.locks_layers[0].row_lengths == [8]
    with pytest.raises(ValueError, match="holds 1 rows of 2 KV heads"):
        cache.load_states(states[:, :1], states[:, :1], 0)


def test_layers_that_are_not_locks_are_refused():
    model = tiny_model("gemma3_text", **SLIDING["gemma3_text"])
    cache = LocksCache(rank=2, budget=32, config=model.config)
    with pytest.raises(ValueError, match="layer 0 is a DynamicSlidingWindowLayer"):
        cache.load_states(torch.randn(1, 2, 8, 8), torch.randn(1, 2, 8, 8), 0)
