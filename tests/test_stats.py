"""The counters against calculations by hand."""

import itertools

import pytest
import torch

from locks_hf import CacheStats, LocksCache
from locks_hf.selectors import QuestSelector
from tests.helpers import SLIDING, feed, greedy, left_pad, one_by_one, random_tokens, small_cache, tiny_model

# The tiny Llama: 2 layers of 2 KV heads of 8 channels in fp32; pages of 4 tokens; 3 slots; rank 2, int4.
LAYERS, HEADS, DIM, PAGE, SLOTS = 2, 2, 8, 4, 3
KV_TOKEN = 2 * DIM * 4  # bytes of a key and a value in one head
SUMMARY = 2 * 4 + PAGE * 2 + 8 + 2 * (1 + PAGE + 2)  # basis, coefficients, centroid, scales: 38 bytes


def attended(length):
    """Tokens of three pages, the last of which may be incomplete."""
    total = -(-length // PAGE)
    return min(SLOTS, total) * PAGE - (-length % PAGE)


def test_an_unused_cache_has_only_zeros():
    for cache in (LocksCache(), small_cache(), LocksCache().fork(rank=2)):
        stats = cache.stats()
        assert stats == CacheStats()
        assert set(stats.asdict().values()) == {0}
        assert cache.nbytes == 0


def test_one_row_by_hand(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 40))
    stats = cache.stats()
    assert (stats.sparse_steps, stats.dense_steps, stats.prefill_tokens) == (0, 0, 40)
    assert stats.tokens_attended == stats.bytes_read_per_step == 0
    assert stats.summary_bytes == 10 * SUMMARY * HEADS * LAYERS
    assert stats.kv_bytes == 40 * KV_TOKEN * HEADS * LAYERS

    feed(llama, cache, *one_by_one(random_tokens(1, 6)))
    stats = cache.stats()
    assert (stats.sparse_steps, stats.dense_steps, stats.prefill_tokens) == (6, 0, 40)
    # 41 to 46 tokens: two whole pages, and one of 1, 2, 3, 4, 1 and 2 tokens.
    tokens = [9, 10, 11, 12, 9, 10]
    assert tokens == [attended(length) for length in range(41, 47)]
    assert stats.tokens_attended == pytest.approx(sum(tokens) / 6)
    assert stats.kv_bytes_read_per_step == pytest.approx(sum(tokens) / 6 * KV_TOKEN * HEADS * LAYERS)
    # Pages that were scored, those before the most recent one: 10, 10, 10, 10, 11, 11.
    assert stats.summary_bytes_read_per_step == pytest.approx(62 / 6 * SUMMARY * HEADS * LAYERS)
    assert stats.bytes_read_per_step == stats.kv_bytes_read_per_step + stats.summary_bytes_read_per_step
    assert stats.summary_bytes == 11 * SUMMARY * HEADS * LAYERS
    assert stats.kv_bytes == 46 * KV_TOKEN * HEADS * LAYERS


def test_a_padded_batch_by_hand(llama):
    lengths = (40, 6, 23)
    ids, mask = left_pad([random_tokens(1, length, length)[0] for length in lengths])
    mask = torch.cat([mask, torch.ones(3, 5, dtype=torch.long)], dim=1)
    cache = small_cache()
    feed(llama, cache, ids, *one_by_one(random_tokens(3, 5)), mask=mask)
    stats = cache.stats()
    assert stats.prefill_tokens == 40  # logical
    steps = [[length + step for length in lengths] for step in range(1, 6)]
    tokens = sum(attended(length) for step in steps for length in step)
    assert attended(7) == 7  # a row that fits attends itself
    assert stats.tokens_attended == pytest.approx(tokens / (5 * 3))
    assert stats.kv_bytes_read_per_step == pytest.approx(tokens / 5 * KV_TOKEN * HEADS * LAYERS)
    pages = sum((length - 1) // PAGE for step in steps for length in step)
    assert stats.summary_bytes_read_per_step == pytest.approx(pages / 5 * SUMMARY * HEADS * LAYERS)
    assert stats.kv_bytes == (45 + 11 + 28) * KV_TOKEN * HEADS * LAYERS
    assert stats.summary_bytes == (11 + 2 + 7) * SUMMARY * HEADS * LAYERS


def test_dense_steps_read_everything_and_no_summaries(llama):
    for cache in (small_cache(budget=64), small_cache(selector="full")):
        feed(llama, cache, random_tokens(2, 20), *one_by_one(random_tokens(2, 4)))
        stats = cache.stats()
        assert (stats.sparse_steps, stats.dense_steps) == (0, 4)
        assert stats.tokens_attended == (21 + 22 + 23 + 24) / 4
        assert stats.kv_bytes_read_per_step == 22.5 * 2 * KV_TOKEN * HEADS * LAYERS
        assert stats.summary_bytes_read_per_step == 0
    assert stats.summary_bytes == stats.summary_bytes_allocated == 0  # "full" keeps none


def test_steps_that_turn_sparse_are_told_apart(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 10), *one_by_one(random_tokens(1, 5)))
    stats = cache.stats()
    assert (stats.dense_steps, stats.sparse_steps) == (2, 3)
    assert stats.tokens_attended == (11 + 12 + attended(13) + attended(14) + attended(15)) / 5
    assert stats.summary_bytes_read_per_step == 3 * 3 * SUMMARY * HEADS * LAYERS / 5


def test_the_oracle_reads_the_keys_of_all_complete_pages(llama):
    cache = small_cache(selector="oracle")
    feed(llama, cache, random_tokens(1, 40), *one_by_one(random_tokens(1, 1)))
    assert cache.stats().summary_bytes_read_per_step == 10 * PAGE * DIM * 4 * HEADS * LAYERS
    assert cache.stats().summary_bytes == 0


class Recording(QuestSelector):
    def __init__(self):
        self.calls = []

    def select(self, query, pages, config, scaling):
        chosen = super().select(query, pages, config, scaling)
        self.calls.append((chosen.clone(), pages.lengths.tolist()))
        return chosen


def test_the_union_of_quest_is_counted(llama):
    ids, mask = left_pad([random_tokens(1, length, length)[0] for length in (40, 27)])
    mask = torch.cat([mask, torch.ones(2, 6, dtype=torch.long)], dim=1)
    selector = Recording()
    cache = small_cache(selector=selector)
    feed(llama, cache, ids, *one_by_one(random_tokens(2, 6)), mask=mask)
    tokens = 0
    for chosen, lengths in selector.calls:
        for row, head in itertools.product(range(2), range(HEADS)):
            tokens += sum(min(PAGE, lengths[row] - page * PAGE) for page in chosen[row, head].tolist() if page >= 0)
    stats = cache.stats()
    assert stats.tokens_attended == pytest.approx(tokens / (6 * LAYERS * HEADS * 2))
    assert stats.tokens_attended > 12  # two query heads do not always agree
    assert stats.kv_bytes_read_per_step == pytest.approx(tokens * KV_TOKEN / 6)
    pages = sum((length - 1) // PAGE for _, lengths in selector.calls for length in lengths)
    assert stats.summary_bytes_read_per_step == pytest.approx(pages * HEADS * 2 * DIM * 4 / 6)


def test_prefill_counts_chunks_and_turns_but_no_single_tokens(llama):
    cache = small_cache()
    feed(llama, cache, *random_tokens(2, 20).split(8, dim=1))
    assert cache.stats().prefill_tokens == 20
    feed(llama, cache, random_tokens(2, 1), random_tokens(2, 5))
    assert cache.stats().prefill_tokens == 25
    assert cache.stats().sparse_steps == 1


def test_counters_start_anew(llama):
    cache = small_cache()
    greedy(llama, random_tokens(1, 40), 4, cache)
    held = {name: value for name, value in cache.stats().asdict().items() if "_bytes" in name and "read" not in name}
    fork = cache.fork()
    for each in (fork, cache):
        each.reset_stats()
        stats = each.stats()
        assert (stats.sparse_steps, stats.dense_steps, stats.prefill_tokens) == (0, 0, 0)
        assert stats.tokens_attended == stats.bytes_read_per_step == 0
        kept = {name: stats.asdict()[name] for name in held if "allocated" not in name}
        assert kept == {name: held[name] for name in kept}
    cache.reset()
    assert cache.stats() == CacheStats()


def test_as_a_dict():
    stats = CacheStats(sparse_steps=3, summary_bytes_read_per_step=5.0, kv_bytes_read_per_step=2.5)
    assert stats.bytes_read_per_step == 7.5
    assert stats.asdict() == {
        "sparse_steps": 3,
        "dense_steps": 0,
        "prefill_tokens": 0,
        "tokens_attended": 0.0,
        "summary_bytes_read_per_step": 5.0,
        "kv_bytes_read_per_step": 2.5,
        "summary_bytes": 0,
        "summary_bytes_allocated": 0,
        "kv_bytes": 0,
        "kv_bytes_allocated": 0,
        "bytes_read_per_step": 7.5,
    }


def storages(cache):
    """Bytes of the distinct memory behind keys, values and summaries."""
    found = {}
    for layer in cache.locks_layers:
        for tensor in (layer.key_buffer, layer.value_buffer, *layer.summaries.values()):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("options", ({}, {"max_cache_len": 77}, {"selector": "quest"}, {"selector": "full"}), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_nbytes_is_what_is_allocated(options, dtype):
    model = tiny_model("llama").to(dtype)
    cache = small_cache(**options)
    ids, mask = left_pad([random_tokens(1, length, length)[0] for length in (40, 21)])
    feed(model, cache, ids, mask=mask)
    for change in (lambda: None, lambda: cache.crop(-9), lambda: cache.batch_repeat_interleave(3)):
        change()
        stats = cache.stats()
        assert cache.nbytes == storages(cache) == stats.kv_bytes_allocated + stats.summary_bytes_allocated
        assert stats.kv_bytes <= stats.kv_bytes_allocated
        assert stats.summary_bytes <= stats.summary_bytes_allocated
    fork = cache.fork(selector="locks")
    assert fork.nbytes == storages(fork)


def test_layers_that_are_not_locks_are_not_counted():
    model = tiny_model("gemma3_text", **SLIDING["gemma3_text"])
    cache = small_cache(config=model.config)
    feed(model, cache, random_tokens(1, 40), *one_by_one(random_tokens(1, 2)))
    stats = cache.stats()
    assert stats.sparse_steps == 2
    assert stats.tokens_attended == (9 + 10) / 2
    assert stats.kv_bytes == 42 * KV_TOKEN * HEADS
    assert stats.kv_bytes_read_per_step == 9.5 * KV_TOKEN * HEADS
