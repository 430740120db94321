"""The cache contract of Transformers: every operation leaves a cache as if it had been filled that way at once.

Caches select from 40 tokens on a budget of 12, so that each decode step is sparse. What a fresh cache that was fed the
same chunks holds and answers is the reference; where a step is dense, the model on "sdpa" is.
"""

import copy
import gc
import inspect
import weakref

import pytest
import torch
from transformers import DynamicCache

from locks_hf import LocksCache
from locks_hf.layer import LocksLayer
from tests.helpers import (
    FULL_ATTENTION,
    PAGE,
    SLIDING,
    assert_same_tokens_held,
    check_cache,
    feed,
    greedy,
    left_pad,
    one_by_one,
    random_tokens,
    small_cache,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SELECTORS = ("locks", "oracle", "quest", "full")
SPARSE = ("locks", "oracle", "quest")
UNEQUAL = (37, 22, 41, 30)  # all four page phases


def prompts_of(lengths, seed=0):
    return [random_tokens(1, length, seed + i)[0] for i, length in enumerate(lengths)]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


# Budgets that cover everything


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_tokens_are_those_of_dense_attention_when_the_budget_covers_them(name):
    ids, mask = left_pad(prompts_of((29, 18)))
    cache = LocksCache(rank=4, budget=64)
    ours = greedy(tiny_model(name), ids, 12, cache, attention_mask=mask)
    assert torch.equal(ours, greedy(tiny_model(name, "sdpa"), ids, 12, attention_mask=mask))
    assert cache.stats().sparse_steps == 0
    assert cache.stats().dense_steps == 11
    check_cache(cache)


@pytest.mark.parametrize("selector", SELECTORS)
def test_each_selector_is_dense_while_the_budget_covers_the_tokens(llama, dense_llama, selector):
    ids = random_tokens(2, 30)
    cache = small_cache(budget=44, selector=selector)
    assert torch.equal(greedy(llama, ids, 15, cache), greedy(dense_llama, ids, 15))
    assert cache.stats().sparse_steps == 0


@pytest.mark.parametrize("budget", (12, 11, 9))
def test_the_first_token_past_the_whole_pages_of_the_budget_makes_steps_sparse(llama, budget):
    cache = small_cache(budget=budget)  # all round up to three pages
    feed(llama, cache, random_tokens(1, 8))
    for length in range(9, 15):
        feed(llama, cache, random_tokens(1, 1))
        assert cache.stats().sparse_steps == max(0, length - 12)
        assert cache.stats().dense_steps == min(4, length - 8)


@pytest.mark.parametrize("selector", SPARSE)
def test_a_sparse_step_over_all_pages_of_a_row_equals_dense_attention(llama, dense_llama, selector):
    """The long row makes the step sparse; the short one fits the budget."""
    ids, mask = left_pad(prompts_of((40, 9)))
    tokens = random_tokens(2, 3, seed=9)
    mask = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], dim=1)
    cache = small_cache(selector=selector)
    ours = feed(llama, cache, ids, *one_by_one(tokens), mask=mask)
    assert cache.stats().sparse_steps == 3
    dense = feed(dense_llama, DynamicCache(), ids, *one_by_one(tokens), mask=mask)
    close(ours[1, -3:], dense[1, -3:])
    assert not torch.allclose(ours[0, -3:], dense[0, -3:], atol=1e-3)


# One row, several ways of getting there


@pytest.mark.parametrize("selector", SELECTORS)
def test_left_padded_rows_decode_like_their_prompts_alone(llama, selector):
    prompts = prompts_of(UNEQUAL)
    ids, mask = left_pad(prompts)
    cache = small_cache(selector=selector)
    together = greedy(llama, ids, 14, cache, attention_mask=mask)
    assert cache.stats().sparse_steps == (0 if selector == "full" else 13)
    check_cache(cache)
    for prompt, tokens in zip(prompts, together, strict=True):
        alone = greedy(llama, prompt[None], 14, small_cache(selector=selector))
        assert torch.equal(tokens, alone[0])


def test_left_padded_rows_give_the_logits_of_their_prompts_alone(llama):
    prompts = prompts_of(UNEQUAL)
    ids, mask = left_pad(prompts)
    tokens = random_tokens(4, 9, seed=3)
    mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
    together = feed(llama, small_cache(), ids, *one_by_one(tokens), mask=mask)
    for row, prompt in enumerate(prompts):
        alone = feed(llama, small_cache(), prompt[None], *one_by_one(tokens[row : row + 1]))
        close(together[row, -9 - len(prompt) :], alone[0])


@pytest.mark.parametrize("seed", range(3))
def test_holes_in_the_mask_are_as_if_their_tokens_were_not_there(llama, seed):
    generator = torch.Generator().manual_seed(seed)
    ids, tokens = random_tokens(3, 50, seed), random_tokens(3, 6, seed + 1)
    mask = torch.rand(3, 50, generator=generator) < 0.75
    full = torch.cat([mask, torch.ones(3, 6, dtype=torch.bool)], dim=1)
    cache = small_cache()
    logits = feed(llama, cache, ids, *one_by_one(tokens), mask=full)
    check_cache(cache)
    for row in range(3):
        alone = feed(llama, small_cache(), ids[row][mask[row]][None], *one_by_one(tokens[row : row + 1]))
        close(logits[row][full[row]], alone[0])


def test_a_row_without_any_token_stays_finite_and_disturbs_nobody(llama):
    prompt = random_tokens(1, 40)
    tokens = random_tokens(2, 4, seed=5)
    ids = torch.cat([prompt, torch.zeros_like(prompt)])
    mask = torch.ones(2, 44, dtype=torch.long)
    mask[1, :40] = 0
    cache = small_cache()
    logits = feed(llama, cache, ids, *one_by_one(tokens), mask=mask)
    assert logits.isfinite().all()
    assert cache.layers[0].row_lengths == [44, 4]
    check_cache(cache)
    close(logits[0], feed(llama, small_cache(), prompt, *one_by_one(tokens[:1]))[0])
    close(logits[1, -4:], feed(llama, small_cache(), *one_by_one(tokens[1:]))[0])


@pytest.mark.parametrize("chunk", (2, 7, 8, 16, 38))
@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
def test_chunked_prefill_gives_what_one_piece_gives(llama, chunk, padded):
    ids, mask = left_pad(prompts_of((40, 33, 5) if padded else (40, 40)))
    tokens = random_tokens(len(ids), 5, seed=4)
    mask = torch.cat([mask, torch.ones_like(tokens)], dim=1) if padded else None
    whole, parts = small_cache(), small_cache()
    expected = feed(llama, whole, ids, *one_by_one(tokens), mask=mask)
    logits = feed(llama, parts, *ids.split(chunk, dim=1), *one_by_one(tokens), mask=mask)
    check_cache(parts)
    assert parts.stats().sparse_steps == 5
    assert parts.stats().prefill_tokens == 40
    assert_same_tokens_held(parts, whole)
    real = torch.ones_like(logits[..., 0], dtype=torch.bool) if mask is None else mask.bool()
    close(logits[real], expected[real])


@pytest.mark.parametrize("chunk", (7, 16, 64))
def test_generate_in_prefill_chunks_gives_the_tokens_of_one_piece(llama, chunk):
    ids, mask = left_pad(prompts_of((40, 33, 5)))
    expected = greedy(llama, ids, 8, small_cache(), attention_mask=mask)
    chunked = greedy(llama, ids, 8, small_cache(), attention_mask=mask, prefill_chunk_size=chunk)
    assert torch.equal(chunked, expected)


@pytest.mark.parametrize("selector", ("locks", "quest"))
def test_where_the_device_counts_prefill_chunks_and_turns_give_the_same(llama, monkeypatch, selector):
    """As on a GPU, where the length is a tensor once steps need nothing from the host."""
    ids, mask = left_pad(prompts_of((40, 33, 5)))

    def two_turns():
        cache = small_cache(selector=selector)
        first = greedy(llama, ids, 8, cache, attention_mask=mask, prefill_chunk_size=7)
        more = torch.cat([ids, first, random_tokens(3, 5)], dim=1)
        longer = torch.cat([mask, torch.ones(3, 13, dtype=mask.dtype)], dim=1)
        return torch.cat([first, greedy(llama, more, 8, cache, attention_mask=longer)], dim=1)

    expected, plain = two_turns(), LocksLayer.get_seq_length

    def on_the_device(layer):
        if layer._started and layer.steps_on_device:
            return layer._counts[-1] + (0 if layer._staged is None else layer._staged[0].shape[2])
        return plain(layer)

    monkeypatch.setattr(LocksLayer, "get_seq_length", on_the_device)
    assert torch.equal(two_turns(), expected)


def test_continuing_a_prefilled_cache_gives_what_one_long_prompt_gives(llama):
    ids = random_tokens(2, 43)
    cache = small_cache()
    feed(llama, cache, ids[:, :21])
    assert torch.equal(greedy(llama, ids, 9, cache), greedy(llama, ids, 9, small_cache()))
    check_cache(cache)


@pytest.mark.parametrize("start", (3, 4, 21))
def test_several_tokens_at_once_attend_everything(llama, dense_llama, start):
    ids = random_tokens(2, start + 17)
    cache = small_cache()
    logits = feed(llama, cache, ids[:, :start], ids[:, start:])
    close(logits, feed(dense_llama, DynamicCache(), ids))
    assert cache.stats().sparse_steps == 0
    check_cache(cache)


def test_rows_of_unequal_length_take_several_tokens_at_once(llama, dense_llama):
    prompts = prompts_of((21, 6))
    ids, mask = left_pad(prompts)
    more = random_tokens(2, 9, seed=7)
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    logits = feed(llama, small_cache(), ids, more, mask=mask)
    for row, prompt in enumerate(prompts):
        whole = torch.cat([prompt, more[row]])[None]
        close(logits[row, -9:], feed(dense_llama, DynamicCache(), whole)[0, -9:])


def test_a_continued_prefill_of_more_queries_than_one_block(llama, dense_llama):
    ids = random_tokens(1, 1100)
    cache = LocksCache(budget=64)
    close(feed(llama, cache, ids[:, :20], ids[:, 20:]), feed(dense_llama, DynamicCache(), ids))


# Turns, forks and copies


@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
def test_a_second_generate_on_the_same_cache_continues_it(llama, padded):
    ids, mask = left_pad(prompts_of((30, 19) if padded else (30, 30)))
    cache = small_cache()
    first = greedy(llama, ids, 6, cache, attention_mask=mask)
    check_cache(cache)
    question = random_tokens(2, 7, seed=5)
    context = torch.cat([ids, first, question], dim=1)
    mask = torch.cat([mask, torch.ones(2, 13, dtype=torch.long)], dim=1)
    second = greedy(llama, context, 6, cache, attention_mask=mask)
    check_cache(cache)
    assert cache.get_seq_length() == 30 + 6 + 7 + 5

    # The last token of an answer is cached with the next turn.
    turn = torch.cat([first[:, -1:], question], dim=1)
    mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], dim=1)
    replayed = small_cache()
    chunks = (ids, *one_by_one(first[:, :-1]), turn, *one_by_one(second[:, :-1]))
    logits = feed(llama, replayed, *chunks, mask=mask)
    assert torch.equal(logits[:, -6:].argmax(-1), second)
    assert_same_tokens_held(cache, replayed)


def test_a_chat_of_three_turns_equals_the_dense_cache_when_the_budget_covers_it(llama, dense_llama):
    contexts = []
    for model, cache in ((llama, LocksCache(budget=128)), (dense_llama, DynamicCache())):
        context = random_tokens(1, 23)
        for turn in range(3):
            answer = greedy(model, context, 8, cache)
            context = torch.cat([context, answer, random_tokens(1, 11, seed=turn)], dim=1)
        contexts.append(context)
    assert torch.equal(*contexts)


def test_prefill_once_and_fork_gives_what_generate_gives(llama):
    ids, mask = left_pad(prompts_of((40, 27)))
    prefilled = small_cache(selector="full")
    logits = feed(llama, prefilled, ids, mask=mask)
    first = logits[:, -1:].argmax(-1)
    context = torch.cat([ids, first], dim=1)
    longer = torch.cat([mask, torch.ones_like(first)], dim=1)
    for changes in (
        {"selector": "locks"},
        {"selector": "locks", "rank": 3},
        {"selector": "quest"},
        {"selector": "full"},
    ):
        fork = prefilled.fork(**changes)
        rest = greedy(llama, context, 9, fork, attention_mask=longer)
        expected = greedy(llama, ids, 10, small_cache(**changes), attention_mask=mask)
        assert torch.equal(torch.cat([first, rest], dim=1), expected)
        assert fork.stats().prefill_tokens == 0
        check_cache(fork)
    assert prefilled.get_seq_length() == 40


CHANGES = (
    {},
    {"rank": 3},
    {"rank": 5, "page_size": 8, "budget": 16},
    {"budget": 20},
    {"basis_bits": 8},
    {"refit": False},
    {"combine": "mass"},
    {"selector": "oracle"},
    {"selector": "quest"},
    {"selector": "quest", "page_size": 8, "budget": 16},
    {"selector": "full"},
    {"max_cache_len": 70},
)


@pytest.mark.parametrize("changes", CHANGES, ids=lambda c: "-".join(map(str, c.values())) or "unchanged")
@pytest.mark.parametrize("selector", ("locks", "quest", "full"))
def test_a_fork_equals_a_fresh_cache_of_its_configuration(llama, selector, changes):
    ids, mask = left_pad(prompts_of((43, 26)))
    tokens = random_tokens(2, 6, seed=8)
    mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
    original = small_cache(selector=selector)
    feed(llama, original, ids, mask=mask)
    before = original.stats()
    fork, fresh = original.fork(**changes), small_cache(**{"selector": selector, **changes})
    assert fork.locks_config == fresh.locks_config
    feed(llama, fresh, ids, mask=mask)
    check_cache(fork)
    close(
        feed(llama, fork, *one_by_one(tokens), mask=mask),
        feed(llama, fresh, *one_by_one(tokens), mask=mask),
    )
    check_cache(fork)
    assert_same_tokens_held(fork, fresh)
    assert fork.stats().sparse_steps == fresh.stats().sparse_steps
    # The original has not noticed.
    assert original.stats() == before
    assert original.get_seq_length() == 43
    check_cache(original)


def test_forks_and_their_original_go_separate_ways(llama):
    ids = random_tokens(1, 40)
    original = small_cache()
    feed(llama, original, ids)
    fork = original.fork()
    ours, theirs = random_tokens(1, 7, seed=1), random_tokens(1, 7, seed=2)
    for cache, tokens in ((original, ours), (fork, theirs)):
        expected = feed(llama, small_cache(), ids, *one_by_one(tokens))[:, 40:]
        close(feed(llama, cache, *one_by_one(tokens)), expected)
        check_cache(cache)


def test_a_fork_of_an_empty_cache_is_an_empty_cache(llama):
    fork = small_cache().fork(budget=16)
    ids = random_tokens(1, 40)
    assert torch.equal(greedy(llama, ids, 5, fork), greedy(llama, ids, 5, small_cache(budget=16)))


def test_deepcopy_is_an_independent_cache(llama):
    ids = random_tokens(2, 40)
    cache = small_cache()
    feed(llama, cache, ids, *one_by_one(random_tokens(2, 3)))
    twin = copy.deepcopy(cache)
    tokens, others = random_tokens(2, 6, seed=1), random_tokens(2, 6, seed=2)
    again = copy.deepcopy(cache)
    expected = feed(llama, again, *one_by_one(tokens))
    feed(llama, twin, *one_by_one(others))
    close(feed(llama, cache, *one_by_one(tokens)), expected)
    for each in (cache, twin, again):
        check_cache(each)
        assert each.get_seq_length() == 49


def test_an_empty_cache_can_be_copied(llama):
    ids = random_tokens(1, 40)
    cache = copy.deepcopy(small_cache())
    assert torch.equal(greedy(llama, ids, 5, cache), greedy(llama, ids, 5, small_cache()))


def test_a_dropped_cache_frees_its_buffers_at_once(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 40), *one_by_one(random_tokens(1, 3)))
    buffers = [weakref.ref(layer.key_buffer) for layer in cache.layers]
    gc.disable()
    try:
        # The last layer that was asked stays known until the next forward pass of anyone.
        feed(llama, small_cache(), random_tokens(1, 5))
        del cache
        assert [buffer() for buffer in buffers] == [None, None]
    finally:
        gc.enable()


# Rows and lengths that change


def test_reset_makes_a_cache_new(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(2, 40), *one_by_one(random_tokens(2, 5)))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.batch_size == small_cache().batch_size
    assert cache.stats() == small_cache().stats()
    ids, mask = left_pad(prompts_of((38, 21, 30)))
    assert torch.equal(
        greedy(llama, ids, 8, cache, attention_mask=mask), greedy(llama, ids, 8, small_cache(), attention_mask=mask)
    )
    check_cache(cache)


@pytest.mark.parametrize("selector", SPARSE)
@pytest.mark.parametrize("removed", (0, 1, 2, 3, 4, 5, 6, 7, 13, 26))
def test_crop_then_continue_equals_never_having_had_the_tokens(llama, selector, removed):
    """21 prompt tokens, 6 decoded: 5 and 6 pages and a rest; a crop ends in the middle of a page or at its edge."""
    ids, decoded, tokens = random_tokens(2, 21), random_tokens(2, 6, seed=1), random_tokens(2, 6, seed=2)
    cache, fresh = small_cache(selector=selector), small_cache(selector=selector)
    feed(llama, cache, ids, *one_by_one(decoded))
    cache.crop(-removed)
    assert cache.get_seq_length() == 27 - removed
    check_cache(cache)
    kept = torch.cat([ids, decoded], dim=1)[:, : 27 - removed]
    prompt, steps = kept[:, :21], kept[:, 21:]
    chunks = [prompt, *one_by_one(steps)] if steps.shape[1] else [prompt]
    feed(llama, fresh, *chunks)
    close(feed(llama, cache, *one_by_one(tokens)), feed(llama, fresh, *one_by_one(tokens)))
    check_cache(cache)
    assert_same_tokens_held(cache, fresh)


def test_crop_then_several_tokens_is_a_dense_turn(llama, dense_llama):
    """Also after a short turn: only assisted generation checks drafts."""
    ids, turn, tokens = random_tokens(1, 40), random_tokens(1, 9, seed=1), random_tokens(1, 8, seed=2)
    cache = small_cache()
    feed(llama, cache, ids, turn)
    cache.crop(-5)
    logits = feed(llama, cache, tokens)
    assert cache.stats().sparse_steps == 0
    whole = torch.cat([ids, turn[:, :4], tokens], dim=1)
    close(logits, feed(dense_llama, DynamicCache(), whole)[:, -8:])


@pytest.mark.parametrize("removed", (1, 4, 10, 14, 20))
def test_crop_into_padding(llama, removed):
    """Rows of 21, 9 and 3 tokens, padded on the left; the longest crops leave rows without any token."""
    prompts = prompts_of((21, 9, 3))
    ids, mask = left_pad(prompts)
    cache = small_cache()
    feed(llama, cache, ids[:, :15], ids[:, 15:], mask=mask)
    cache.crop(-removed)
    kept = 21 - removed
    assert cache.layers[0].row_lengths == mask[:, :kept].sum(1).tolist()
    check_cache(cache)
    turn, tokens = random_tokens(3, 12, seed=4), random_tokens(3, 4, seed=5)
    mask = torch.cat([mask[:, :kept], torch.ones(3, 16, dtype=torch.long)], dim=1)
    logits = feed(llama, cache, turn, *one_by_one(tokens), mask=mask)
    check_cache(cache)
    for row, prompt in enumerate(prompts):
        alone = prompt[: max(0, len(prompt) - removed)]
        whole = torch.cat([alone, turn[row]])[None]
        expected = feed(llama, small_cache(), whole, *one_by_one(tokens[row : row + 1]))
        close(logits[row], expected[0, -16:])


def test_crop_after_steps_that_were_padding_for_a_row(llama, dense_llama):
    """The host learns of steps late, and must know then which of them were padding."""
    ids, mask = random_tokens(2, 10), torch.ones(2, 10, dtype=torch.long)

    @torch.no_grad()
    def run(model, cache):
        model(ids, past_key_values=cache, attention_mask=mask)
        seen = mask
        for step, column in enumerate(([1, 1], [1, 0], [0, 1], [1, 1])):
            seen = torch.cat([seen, torch.tensor(column)[:, None]], dim=1)
            position = seen.sum(1, keepdim=True) - 1
            logits = model(
                ids[:, step : step + 1], past_key_values=cache, attention_mask=seen, position_ids=position
            ).logits
            if step == 2:
                cache.crop(-2)  # the last two of these steps
                seen = seen[:, :-2]
        return logits

    cache = small_cache(budget=400)
    close(run(llama, cache), run(dense_llama, DynamicCache()))
    assert [layer.row_lengths for layer in cache.layers] == [[12, 12]] * 2


def test_crop_of_more_than_there_is_empties_the_cache(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(2, 10))
    cache.crop(-100)
    assert cache.get_seq_length() == 0
    ids = random_tokens(2, 40)
    assert torch.equal(greedy(llama, ids, 5, cache), greedy(llama, ids, 5, small_cache()))


def test_crop_takes_what_generate_passes(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 10))
    cache.crop(torch.tensor(-3))
    assert cache.get_seq_length() == 7
    with pytest.raises(ValueError, match=r"crop\(n - cache.get_seq_length\(\)\)"):
        cache.crop(5)
    assert cache.get_seq_length() == 7
    small_cache().crop(-3)  # nothing there yet, nothing to do


OPERATIONS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0, 3])), [2, 0, 0, 3]),
    "identity": (lambda cache: cache.reorder_cache(torch.arange(4)), [0, 1, 2, 3]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2, 3, 3]),
    "repeat once": (lambda cache: cache.batch_repeat_interleave(1), [0, 1, 2, 3]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([3, 1])), [3, 1]),
    "select from the end": (lambda cache: cache.batch_select_indices(torch.tensor([-1, 0, -2])), [3, 0, 2]),
    "select by mask": (lambda cache: cache.batch_select_indices(torch.tensor([True, False, False, True])), [0, 3]),
}


@pytest.mark.parametrize("selector", SPARSE)
@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_row_operations_equal_a_cache_of_those_rows(llama, operation, padded, selector):
    operate, rows = OPERATIONS[operation]
    prompts = prompts_of(UNEQUAL if padded else (37, 37, 37, 37))
    ids, mask = left_pad(prompts)
    decoded, tokens = random_tokens(4, 3, seed=1), random_tokens(len(rows), 6, seed=2)
    more = torch.ones(4, 9, dtype=torch.long)
    mask = torch.cat([mask, more], dim=1) if padded else None
    cache, fresh = small_cache(selector=selector), small_cache(selector=selector)
    feed(llama, cache, ids, *one_by_one(decoded), mask=mask)
    operate(cache)
    check_cache(cache)
    mask_of_rows = None if mask is None else mask[rows]
    feed(llama, fresh, ids[rows], *one_by_one(decoded[rows]), mask=mask_of_rows)
    assert_same_tokens_held(cache, fresh)
    close(
        feed(llama, cache, *one_by_one(tokens), mask=mask_of_rows),
        feed(llama, fresh, *one_by_one(tokens), mask=mask_of_rows),
    )
    check_cache(cache)
    assert cache.stats().kv_bytes == fresh.stats().kv_bytes
    assert cache.stats().summary_bytes == fresh.stats().summary_bytes


def test_row_operations_on_an_empty_cache_do_nothing():
    cache = small_cache()
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.get_seq_length() == 0


def test_crop_after_rows_moved_removes_each_rows_own_tokens(llama):
    ids, mask = left_pad(prompts_of((20, 7)))
    cache = small_cache()
    feed(llama, cache, ids, mask=mask)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.crop(-5)
    assert cache.layers[0].row_lengths == [2, 2]
    cache.crop(-5)
    assert cache.layers[0].row_lengths == [0, 0]


# Capacity


def test_a_fixed_capacity_is_kept_and_says_when_it_is_full(llama):
    ids = random_tokens(2, 40)
    cache, fresh = small_cache(max_cache_len=46), small_cache()
    assert torch.equal(greedy(llama, ids, 7, cache), greedy(llama, ids, 7, fresh))
    assert cache.get_max_length() == 46
    assert cache.layers[0].key_buffer.shape[2] == 48  # whole pages
    with pytest.raises(
        ValueError, match=r"max_cache_len is 46 tokens, but a row needs 47\. Make the cache with a larger"
    ):
        feed(llama, cache, random_tokens(2, 1))
    # The failed step left nothing behind.
    assert cache.get_seq_length() == 46
    check_cache(cache)
    cache.crop(-2)
    fresh.crop(-2)
    tokens = random_tokens(2, 2, seed=3)
    close(feed(llama, cache, *one_by_one(tokens)), feed(llama, fresh, *one_by_one(tokens)))


def test_a_prompt_beyond_the_capacity_is_refused_before_anything_is_kept(llama):
    cache = small_cache(max_cache_len=16)
    with pytest.raises(ValueError, match="max_cache_len is 16 tokens, but a row needs 17"):
        feed(llama, cache, random_tokens(1, 17))
    assert cache.get_seq_length() == 0
    feed(llama, cache, random_tokens(1, 16))
    assert cache.layers[0].key_buffer.shape[2] == 16


def test_padding_takes_no_capacity(llama):
    ids, mask = left_pad(prompts_of((12, 12)))
    ids, mask = (torch.nn.functional.pad(x, (30, 0)) for x in (ids, mask))
    cache = small_cache(max_cache_len=12)
    feed(llama, cache, ids, mask=mask)
    assert cache.get_seq_length() == 42
    assert cache.layers[0].row_lengths == [12, 12]


def test_growing_keeps_the_content_and_decoding_does_not_move_it(llama):
    ids, tokens = random_tokens(2, 1200), random_tokens(2, 3, seed=1)
    cache, fresh = small_cache(), small_cache()
    capacities = []
    for chunk in (ids[:, :5], ids[:, 5:500], ids[:, 500:520], ids[:, 520:]):
        feed(llama, cache, chunk)
        capacities.append(cache.layers[0].key_buffer.shape[2])
        check_cache(cache)
    assert capacities == sorted(capacities)
    assert len(set(capacities)) > 1
    feed(llama, fresh, ids)
    where = cache.layers[0].key_buffer.data_ptr()
    close(feed(llama, cache, *one_by_one(tokens)), feed(llama, fresh, *one_by_one(tokens)))
    assert cache.layers[0].key_buffer.data_ptr() == where
    assert cache.nbytes == cache.stats().kv_bytes_allocated + cache.stats().summary_bytes_allocated


# What generate does with a cache


def sum_of_log_probabilities(model, cache, ids, mask, answers):
    longer = torch.cat([mask, torch.ones_like(answers[:, :-1])], dim=1)
    logits = feed(model, cache, ids, *one_by_one(answers[:, :-1]), mask=longer)
    logits = logits[:, -answers.shape[1] :].double().log_softmax(-1)
    return logits.gather(-1, answers[..., None]).sum((1, 2))


@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
def test_beams_equal_beams_of_the_dense_cache_when_the_budget_covers_them(llama, dense_llama, padded):
    ids, mask = left_pad(prompts_of((30, 17) if padded else (30, 30)))
    options = {"num_beams": 4, "num_return_sequences": 4, "attention_mask": mask}
    cache = LocksCache(budget=64)
    assert torch.equal(greedy(llama, ids, 9, cache, **options), greedy(dense_llama, ids, 9, **options))
    check_cache(cache)


@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
@pytest.mark.parametrize("selector", SPARSE)
def test_the_scores_of_sparse_beams_are_those_of_their_tokens(llama, selector, padded):
    """A beam that was decoded on another beam's cache would have another score."""
    ids, mask = left_pad(prompts_of((38, 25) if padded else (38, 38)))
    cache = small_cache(selector=selector)
    output = llama.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=9,
        length_penalty=0.0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert cache.stats().sparse_steps == 8
    check_cache(cache)
    answers = output.sequences[:, ids.shape[1] :]
    each = [tensor.repeat_interleave(4, 0) for tensor in (ids, mask)]
    expected = sum_of_log_probabilities(llama, small_cache(selector=selector), *each, answers)
    torch.testing.assert_close(output.sequences_scores.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
def test_sampled_tokens_come_from_the_distributions_of_their_own_row(llama, padded):
    ids, mask = left_pad(prompts_of((38, 25) if padded else (38, 38)))
    cache = small_cache()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = llama.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            do_sample=True,
            num_return_sequences=2,
            max_new_tokens=8,
            return_dict_in_generate=True,
            output_logits=True,
        )
    assert cache.stats().sparse_steps == 7
    answers = output.sequences[:, ids.shape[1] :]
    assert len({tuple(answer) for answer in answers.tolist()}) > 1
    ids, mask = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
    mask = torch.cat([mask, torch.ones_like(answers[:, :-1])], dim=1)
    logits = feed(llama, small_cache(), ids, *one_by_one(answers[:, :-1]), mask=mask)
    close(torch.stack(output.logits, dim=1), logits[:, -8:])


def test_sampling_equals_the_dense_cache_when_the_budget_covers_it(llama, dense_llama):
    ids = random_tokens(3, 30)
    results = []
    for model, cache in ((llama, LocksCache(budget=64)), (dense_llama, DynamicCache())):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            results.append(model.generate(ids, past_key_values=cache, do_sample=True, max_new_tokens=12))
    assert torch.equal(*results)


@pytest.fixture(scope="module")
def draft():
    """A draft model whose tokens are sometimes right: the target's weights, one layer fewer."""
    return tiny_model("llama", "locks", num_hidden_layers=1)


ASSISTANCE = ("draft model", "prompt lookup")


def assistance(kind, draft):
    return {"assistant_model": draft} if kind == "draft model" else {"prompt_lookup_num_tokens": 3}


def repetitive(length):
    return random_tokens(1, 9).repeat(1, length // 9 + 1)[:, :length]


@pytest.mark.parametrize("kind", ASSISTANCE)
def test_assisted_generation_equals_the_dense_cache_when_the_budget_covers_it(llama, dense_llama, draft, kind):
    ids = repetitive(40)
    cache = LocksCache(budget=128)
    assert torch.equal(greedy(llama, ids, 20, cache, **assistance(kind, draft)), greedy(dense_llama, ids, 20))
    assert cache.stats().sparse_steps == 0
    check_cache(cache)


@pytest.mark.parametrize("kind", ASSISTANCE)
@pytest.mark.parametrize("length", (40, 90))
def test_assisted_generation_checks_its_drafts_sparsely(llama, draft, kind, length):
    ids = repetitive(length)
    cache = small_cache()
    answer = greedy(llama, ids, 20, cache, **assistance(kind, draft))
    check_cache(cache)
    stats = cache.stats()
    assert stats.dense_steps == 0
    assert stats.sparse_steps >= 14  # at most the first round of drafts is checked with the prompt
    assert stats.prefill_tokens <= length + 20
    again = small_cache()
    assert torch.equal(greedy(llama, ids, 20, again, **assistance(kind, draft)), answer)


def test_a_check_of_drafts_equals_single_steps(llama):
    ids, tokens = random_tokens(1, 70), random_tokens(1, 5, seed=1)
    cache, single = small_cache(), small_cache()
    cache.activate_past_recording()
    feed(llama, cache, ids)
    cache.crop(-2)  # two drafts that came with the prompt are rejected
    feed(llama, single, ids[:, :68])
    for first, rejected in ((0, 3), (2, 0)):
        drafts = tokens[:, first:]
        close(feed(llama, cache, drafts), feed(llama, single, *one_by_one(drafts)))
        cache.crop(-rejected)
        single.crop(-rejected)
        check_cache(cache)
        assert_same_tokens_held(cache, single)
    assert cache.stats().sparse_steps == single.stats().sparse_steps == 8
    assert cache.stats().tokens_attended == single.stats().tokens_attended


def test_a_turn_after_assisted_generation_is_dense_when_it_is_assisted_too(llama, draft):
    cache = small_cache()
    ids = repetitive(40)
    answer = greedy(llama, ids, 12, cache, assistant_model=draft)
    before = cache.stats().prefill_tokens
    context = torch.cat([ids, answer, random_tokens(1, 15, seed=3)], dim=1)
    if "cache" not in inspect.signature(llama.forward).parameters:
        # Old versions give assisted generation the whole context once more, which would cache it twice.
        with pytest.raises(ValueError, match="are cached and 69 new"):
            greedy(llama, context, 6, cache, assistant_model=draft)
        return
    greedy(llama, context, 6, cache, assistant_model=draft)
    assert cache.stats().prefill_tokens - before >= 15
    check_cache(cache)


def test_generate_takes_the_cache_under_its_new_name(llama):
    if "cache" not in inspect.signature(llama.forward).parameters:
        pytest.skip("this Transformers calls the argument past_key_values only")
    ids, cache = random_tokens(1, 40), small_cache()
    output = llama.generate(ids, cache=cache, max_new_tokens=6, do_sample=False)
    assert cache.stats().sparse_steps == 5
    assert torch.equal(output[:, 40:], greedy(llama, ids, 6, small_cache()))


def test_generate_hands_the_cache_back_and_takes_embeddings(llama):
    ids = random_tokens(2, 40)
    cache = small_cache()
    output = llama.generate(
        inputs_embeds=llama.get_input_embeddings()(ids).detach(),
        past_key_values=cache,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert output.past_key_values is cache
    assert torch.equal(output.sequences, greedy(llama, ids, 6, small_cache()))


def test_what_transformers_asks_of_a_cache(llama):
    cache = small_cache()
    assert len(cache) == 0
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(7, 0) == (7, 0)
    assert cache.is_compileable
    ids, mask = left_pad(prompts_of((21, 9)))
    feed(llama, cache, ids, mask=mask)
    assert len(cache) == 2
    # Logical lengths, padding included, on every layer.
    assert [cache.get_seq_length(layer) for layer in range(2)] == [21, 21]
    assert cache.get_mask_sizes(2, 0) == (23, 0)
    assert cache.get_mask_sizes(1, 0) == (1, 0)  # a decode step needs no mask over the past
    assert cache.get_max_length() == -1
    assert cache.batch_size == 2
    assert cache.is_croppable
    assert cache.is_compileable
    assert cache.is_sliding == [False, False]
    assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (2, 2, 21, 8)
    assert [layer.row_lengths for layer in cache.layers] == [[21, 9]] * 2


# Modes of torch


@pytest.mark.parametrize("then", (torch.no_grad, torch.enable_grad, torch.inference_mode))
@pytest.mark.parametrize("first", (torch.no_grad, torch.enable_grad, torch.inference_mode))
def test_a_cache_filled_in_one_grad_mode_continues_in_another(llama, first, then):
    ids, tokens = random_tokens(2, 40), random_tokens(2, 3, seed=1)
    cache = small_cache()
    with first():
        llama(ids, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
    twin = cache.fork(rank=3)
    with then():
        for token in one_by_one(tokens):
            logits = llama(token, past_key_values=cache).logits
            llama(token, past_key_values=twin)
    check_cache(cache)
    check_cache(copy.deepcopy(twin))
    assert not cache.layers[0].key_buffer.requires_grad
    expected = feed(llama, small_cache(), ids[[1, 0]], *one_by_one(tokens))
    close(logits.detach().clone(), expected[:, -1:])


def test_a_mask_that_its_owner_changes_is_read_anew_and_changes_no_history(llama):
    ids = random_tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :3] = False
    cache = small_cache()
    llama(ids, attention_mask=mask, past_key_values=cache)
    assert cache.layers[0].row_lengths == [17, 20]
    cache.reset()
    mask[:] = True
    mask[1, :6] = False
    llama(ids, attention_mask=mask, past_key_values=cache)
    assert [layer.row_lengths for layer in cache.layers] == [[20, 14]] * 2
    mask[:] = True
    cache.crop(-16)
    assert cache.layers[0].row_lengths == [4, 0]


# What does not fit


def test_another_batch_on_a_reused_cache_is_refused(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(2, 20))
    with pytest.raises(ValueError, match=r"holds 2 rows .* use one cache per batch, or call cache\.reset\(\)"):
        feed(llama, cache, random_tokens(3, 4))
    assert cache.get_seq_length() == 20
    check_cache(cache)


@pytest.mark.parametrize(
    ("changes", "held"),
    (({"num_key_value_heads": 4}, "2 KV heads"), ({"head_dim": 16}, "head_dim 8")),
)
def test_another_models_states_are_refused(llama, changes, held):
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 20))
    with pytest.raises(ValueError, match=rf"{held}.*cache\.reset\(\)"):
        feed(tiny_model("llama", **changes), cache, random_tokens(1, 1))


def test_another_dtype_is_refused(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 20))
    with pytest.raises(ValueError, match=r"holds torch\.float32 .* got torch\.bfloat16 .* cache\.reset\(\)"):
        feed(tiny_model("llama").to(torch.bfloat16), cache, random_tokens(1, 1))


def test_offloading_is_refused(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 20))
    with pytest.raises(ValueError, match="offloading is not supported"):
        cache.layers[0].offload()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_caches_keep_the_contract(dtype):
    model = tiny_model("llama").to(dtype)
    prompts = prompts_of((40, 27))
    ids, mask = left_pad(prompts)
    cache = small_cache()
    feed(model, cache, ids, *one_by_one(random_tokens(2, 4)), mask=torch.cat([mask, mask[:, -4:]], dim=1))
    assert cache.layers[0].key_buffer.dtype == dtype
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([1, 0]))
    check_cache(cache)
    check_cache(cache.fork(page_size=8, rank=3, budget=16))


# Models whose layers are not all full attention


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_layers_keep_their_own_caches(name):
    model = tiny_model(name, **SLIDING[name])
    dense = tiny_model(name, "sdpa", **SLIDING[name])
    ids, mask = left_pad(prompts_of((40, 29)))
    covering = LocksCache(budget=64, config=model.config)
    expected = greedy(dense, ids, 9, DynamicCache(config=dense.config), attention_mask=mask)
    assert torch.equal(greedy(model, ids, 9, covering, attention_mask=mask), expected)
    assert len(covering.locks_layers) == 1
    sparse = small_cache(config=model.config)
    together = greedy(model, ids, 9, sparse, attention_mask=mask)
    assert sparse.stats().sparse_steps == 8
    check_cache(sparse)
    for row, prompt in enumerate(prompts_of((40, 29))):
        alone = greedy(model, prompt[None], 9, small_cache(config=model.config))
        assert torch.equal(together[row], alone[0])


def test_operations_reach_the_layers_of_every_kind():
    model = tiny_model("gemma3_text", **SLIDING["gemma3_text"])
    ids, tokens = random_tokens(2, 40), random_tokens(4, 5, seed=1)
    cache, fresh = small_cache(config=model.config), small_cache(config=model.config)
    feed(model, cache, ids)
    cache.batch_repeat_interleave(2)
    cache = copy.deepcopy(cache).fork(budget=16).fork(budget=3 * PAGE)
    feed(model, fresh, ids.repeat_interleave(2, 0))
    close(feed(model, cache, *one_by_one(tokens)), feed(model, fresh, *one_by_one(tokens)))
    check_cache(cache)
    cache.reset()
    close(feed(model, cache, ids), feed(model, small_cache(config=model.config), ids))


@pytest.mark.parametrize("kind", ("beams", "assisted"))
def test_generation_modes_on_a_model_with_sliding_layers(kind):
    options = SLIDING["gemma3_text"]
    model, dense = tiny_model("gemma3_text", **options), tiny_model("gemma3_text", "sdpa", **options)
    ids = repetitive(40)
    extra = {"num_beams": 3} if kind == "beams" else {"prompt_lookup_num_tokens": 3}
    covering = LocksCache(budget=128, config=model.config)
    expected = greedy(dense, ids, 10, DynamicCache(config=dense.config), **extra)
    assert torch.equal(greedy(model, ids, 10, covering, **extra), expected)
    sparse = small_cache(config=model.config)
    greedy(model, ids, 10, sparse, **extra)
    assert sparse.stats().sparse_steps > 0
    check_cache(sparse)


def test_a_linear_attention_hybrid_with_its_config():
    model = tiny_model("qwen3_next", **QWEN3_NEXT)
    dense = tiny_model("qwen3_next", "sdpa", **QWEN3_NEXT)
    ids = random_tokens(2, 40)
    covering = LocksCache(budget=64, config=model.config)
    expected = greedy(dense, ids, 9, DynamicCache(config=dense.config))
    assert torch.equal(greedy(model, ids, 9, covering), expected)
    sparse = small_cache(config=model.config)
    greedy(model, ids, 9, sparse)
    assert sparse.stats().sparse_steps == 8
    check_cache(sparse)
    fork = sparse.fork(rank=3)
    token = random_tokens(2, 1)
    assert feed(model, fork, token).isfinite().all()


QWEN3_NEXT = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def test_drafts_end_with_the_first_turn_that_is_none(llama):
    cache = LocksCache(rank=2, budget=32)
    llama.generate(random_tokens(1, 50), past_key_values=cache, max_new_tokens=8, prompt_lookup_num_tokens=3)
    feed(llama, cache, random_tokens(1, 80))  # a turn too long for drafts
    cache.crop(-5)
    cache.reset_stats()
    feed(llama, cache, random_tokens(1, 20))
    assert (cache.stats().prefill_tokens, cache.stats().sparse_steps) == (20, 0)


def test_a_fork_is_not_in_the_middle_of_drafts(llama):
    cache = LocksCache(rank=2, budget=32)
    llama.generate(random_tokens(1, 50), past_key_values=cache, max_new_tokens=8, prompt_lookup_num_tokens=3)
    fork = cache.fork()
    feed(llama, fork, random_tokens(1, 20))
    assert (fork.stats().prefill_tokens, fork.stats().sparse_steps) == (20, 0)
