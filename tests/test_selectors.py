"""The selectors against their definitions, and selectors of one's own."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locks_hf import LocksCache, LocksConfig
from locks_hf.kernels import top_pages
from locks_hf.selectors import (
    SELECTORS,
    FullSelector,
    LocksSelector,
    OracleSelector,
    PageSelector,
    PageView,
    QuestSelector,
    resolve_selector,
)
from tests.helpers import (
    assert_same_tokens_held,
    check_cache,
    feed,
    greedy,
    one_by_one,
    random_tokens,
    small_cache,
    tiny_model,
)

several = settings(max_examples=60, deadline=None, derandomize=True)
HEADS, DIM, SCALING = 2, 8, 0.4


def view_of(keys, lengths, selector, config):
    """A page view whose summaries are made page by page; what a row does not have is poisoned."""
    rows, heads, capacity, dim = keys.shape
    size = config.page_size
    summaries = {
        name: torch.full((rows, heads, capacity // size, *shape), 113).to(dtype)
        for name, (shape, dtype) in selector.summary_fields(config, dim, keys.dtype).items()
    }
    keys = keys.clone()
    for row, length in enumerate(lengths):
        keys[row, :, length:] = math.nan
        for page in range(length // size):
            made = selector.summarize(keys[row, :, page * size : (page + 1) * size], config)
            for name, array in made.items():
                summaries[name][row, :, page] = array
    return PageView(keys, summaries, torch.tensor(lengths, dtype=torch.int32), max(lengths))


def example(seed, lengths, group, config, selector):
    g = torch.Generator().manual_seed(seed)
    capacity = -(-(max(lengths) + 9) // config.page_size) * config.page_size
    keys = torch.randn(len(lengths), HEADS, capacity, DIM, generator=g)
    query = torch.randn(len(lengths), HEADS * group, DIM, generator=g) * 2
    return query, view_of(keys, lengths, selector, config)


def log_sum_exp(values):
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values))


def used(pages):
    return [page for page in pages.tolist() if page >= 0]


several_rows = st.lists(st.integers(1, 60), min_size=1, max_size=3)
sizes = st.sampled_from((4, 8))


@several
@given(
    seed=st.integers(0, 2**31),
    lengths=several_rows,
    group=st.integers(1, 4),
    page_size=sizes,
    slots=st.integers(2, 6),
    rule=st.sampled_from(("share", "max", "mass")),
)
def test_the_oracle_ranks_by_exact_mass(seed, lengths, group, page_size, slots, rule):
    selector = OracleSelector()
    config = LocksConfig(rank=2, budget=slots * page_size, page_size=page_size, combine=rule)
    query, view = example(seed, lengths, group, config, selector)
    chosen = selector.select(query, view, config, SCALING)
    assert chosen.shape == (len(lengths), HEADS, slots)
    for row, head in itertools.product(range(len(lengths)), range(HEADS)):
        length = lengths[row]
        complete, total = length // page_size, -(-length // page_size)
        masses = []
        for member in range(group):
            q = query[row, head * group + member].double()
            logits = [float(q @ k.double()) * SCALING for k in view.keys[row, head, :length]]
            masses.append([log_sum_exp(logits[p * page_size : (p + 1) * page_size]) for p in range(complete)])
        value = {}
        for page in range(complete):
            if rule == "mass":
                value[page] = sum(math.exp(mass[page]) for mass in masses)
            else:
                shares = [math.exp(mass[page] - log_sum_exp(mass)) for mass in masses]
                value[page] = max(shares) if rule == "max" else sum(shares) / group
        forced = {0, total - 1}
        rest = sorted((p for p in range(total) if p not in forced), key=lambda p: -value[p])
        expected = sorted([*forced, *rest[: max(0, slots - len(forced))]])
        assert used(chosen[row, head]) == expected


@several
@given(
    seed=st.integers(0, 2**31),
    lengths=several_rows,
    group=st.integers(1, 4),
    page_size=sizes,
    slots=st.integers(2, 5),
)
def test_quest_takes_the_union_of_each_heads_best_envelopes(seed, lengths, group, page_size, slots):
    selector = QuestSelector()
    config = LocksConfig(rank=2, budget=slots * page_size, page_size=page_size)
    query, view = example(seed, lengths, group, config, selector)
    chosen = selector.select(query, view, config, SCALING)
    assert chosen.dtype == torch.int32
    assert chosen.shape[2] <= slots * group
    for row, head in itertools.product(range(len(lengths)), range(HEADS)):
        length = lengths[row]
        total = -(-length // page_size)
        union = set()
        for member in range(group):
            q = query[row, head * group + member].double()
            bound = {}
            for page in range(total - 1):
                keys = view.keys[row, head, page * page_size : (page + 1) * page_size].double()
                bound[page] = float(torch.maximum(q * keys.amax(0), q * keys.amin(0)).sum())
            # The most recent page is in each head's choice; no other is forced.
            union |= {total - 1, *sorted(bound, key=lambda p: -bound[p])[: slots - 1]}
        assert used(chosen[row, head]) == sorted(union)


def test_quest_prefers_the_lower_page_among_equals():
    selector, config = QuestSelector(), LocksConfig(rank=2, budget=12, page_size=4)
    keys = torch.ones(1, HEADS, 24, DIM)
    query = torch.ones(1, HEADS, DIM)
    view = view_of(keys, [24], selector, config)
    assert selector.select(query, view, config, SCALING).tolist() == [[[0, 1, 5]] * HEADS]


@several
@given(seed=st.integers(0, 2**31), lengths=several_rows, group=st.integers(1, 3), slots=st.integers(2, 6))
def test_locks_takes_the_first_and_the_last_page_and_fills_all_slots(seed, lengths, group, slots):
    selector = LocksSelector()
    config = LocksConfig(rank=2, budget=slots * 4, page_size=4)
    query, view = example(seed, lengths, group, config, selector)
    chosen = selector.select(query, view, config, SCALING)
    assert chosen.shape == (len(lengths), HEADS, slots)
    for row, length in enumerate(lengths):
        total = -(-length // 4)
        for head in range(HEADS):
            pages = used(chosen[row, head])
            assert len(set(pages)) == len(pages) == min(slots, total)
            assert {0, total - 1} <= set(pages)


def test_locks_of_full_rank_chooses_like_the_oracle():
    config = LocksConfig(rank=7, budget=40, page_size=8, basis_bits=16)
    agree = total = 0
    for seed in range(20):
        query, view = example(seed, [200, 200], 3, config, LocksSelector())
        ours = LocksSelector().select(query, view, config, SCALING)
        exact = OracleSelector().select(query, view, config, SCALING)
        for row, head in itertools.product(range(2), range(HEADS)):
            agree += len(set(used(ours[row, head])) & set(used(exact[row, head])))
            total += 5
    assert agree / total > 0.97


@pytest.mark.parametrize("rule", ("share", "max", "mass"))
def test_the_combine_rule_reaches_the_selector(llama, rule):
    """Rules that were not passed on would give equal logits."""
    ids, tokens = random_tokens(2, 60), random_tokens(2, 8, seed=1)
    logits = {
        other: feed(llama, small_cache(combine=other), ids, *one_by_one(tokens)) for other in ("share", "max", "mass")
    }
    others = [logits[other] for other in logits if other != rule]
    assert not any(torch.equal(logits[rule], other) for other in others)


# Names, sizes and keys


def test_names():
    assert set(SELECTORS) >= {"locks", "oracle", "quest", "full"}
    for name, kind in SELECTORS.items():
        selector = resolve_selector(name)
        assert type(selector) is kind
        assert selector.name == name
        assert LocksCache(selector=name).selector.name == name
    mine = QuestSelector()
    assert resolve_selector(mine) is mine
    assert LocksCache(selector=mine).selector is mine


@pytest.mark.parametrize(
    ("selector", "dtype", "per_page", "to_score"),
    (
        (LocksSelector(), torch.float32, 818, 818),
        (LocksSelector(), torch.bfloat16, 818, 818),
        (QuestSelector(), torch.float32, 2 * 128 * 4, 2 * 128 * 4),
        (QuestSelector(), torch.bfloat16, 2 * 128 * 2, 2 * 128 * 2),
        (OracleSelector(), torch.bfloat16, 0, 16 * 128 * 2),
        (FullSelector(), torch.bfloat16, 0, 0),
    ),
    ids=lambda v: getattr(v, "name", None),
)
def test_bytes_of_summaries_and_of_scoring(selector, dtype, per_page, to_score):
    config = LocksConfig()
    assert selector.bytes_per_page(config, 128, dtype) == per_page
    assert selector.score_bytes(config, 10, 128, dtype) == 10 * to_score
    held = selector.summarize(torch.randn(1, 16, 128).to(dtype), config)
    assert sum(array.nbytes for array in held.values()) == per_page


def test_a_dense_selector_selects_nothing():
    with pytest.raises(TypeError, match="attends every token"):
        FullSelector().select(torch.zeros(1, 2, 8), None, LocksConfig(), 1.0)


def test_a_fork_makes_summaries_only_when_they_would_differ(llama, monkeypatch):
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 40))
    made = []
    summarize = LocksSelector.summarize
    monkeypatch.setattr(
        LocksSelector, "summarize", lambda self, keys, config: made.append(config) or summarize(self, keys, config)
    )
    for same in ({}, {"budget": 16}, {"combine": "max"}, {"max_cache_len": 64}, {"selector": "locks"}):
        check = cache.fork(**same)
        assert made == []
        assert check.stats().summary_bytes == cache.stats().summary_bytes
    for other in ({"rank": 1}, {"basis_bits": 2}, {"refit": False}, {"page_size": 8, "budget": 16}):
        cache.fork(**other)
        assert len(made) == 2, other  # once a layer
        made.clear()


# A selector of one's own


class LargestNorm(PageSelector):
    """Takes the pages whose longest key is longest, as many for each row as there are slots, and the most recent."""

    name = "largest-norm"

    def summary_fields(self, config, head_dim, dtype):
        return {"norm": ((), torch.float32)}

    def summarize(self, keys, config):
        return {"norm": keys.float().norm(dim=-1).amax(dim=-1)}

    def select(self, query, pages, config, scaling):
        size = config.page_size
        rows, heads = pages.keys.shape[:2]
        chosen = torch.full((rows, heads, config.page_slots), -1, dtype=torch.int32)
        for row, length in enumerate(pages.lengths.tolist()):
            last = -(-length // size) - 1
            for head in range(heads):
                norms = pages.summaries["norm"][row, head, : min(last, length // size)]
                best = norms.argsort(descending=True, stable=True)[: config.page_slots - 1]
                picked = torch.cat([best, torch.tensor([last])]).sort().values
                chosen[row, head, : len(picked)] = picked
        return chosen


class Everything(PageSelector):
    """Takes all pages, each step another number of them, through the sparse path."""

    name = "everything"
    fixed_slots = False

    def summary_fields(self, config, head_dim, dtype):
        return {}

    def summarize(self, keys, config):
        return {}

    def select(self, query, pages, config, scaling):
        rows, heads = pages.keys.shape[:2]
        page = torch.arange(-(-pages.max_length // config.page_size))
        exists = page < -(-pages.lengths // config.page_size).view(-1, 1, 1)
        return torch.where(exists, page, -1).to(torch.int32).expand(rows, heads, -1)


def test_a_selector_of_ones_own_decodes_and_keeps_its_summaries(llama):
    ids, tokens = random_tokens(2, 43), random_tokens(2, 6, seed=1)
    cache = small_cache(selector=LargestNorm())
    feed(llama, cache, ids, *one_by_one(tokens))
    check_cache(cache)
    stats = cache.stats()
    assert stats.sparse_steps == 6
    # 49 tokens, 12 complete pages of one fp32 number, 2 rows, 2 heads, 2 layers
    assert stats.summary_bytes == 12 * 4 * 2 * 2 * 2
    cache.crop(-7)
    cache.reorder_cache(torch.tensor([1, 1]))
    check_cache(cache)
    fork = cache.fork(page_size=8, budget=16)
    check_cache(fork)
    assert isinstance(fork.selector, LargestNorm)
    back = fork.fork(selector="locks", page_size=4, budget=12)
    check_cache(back)
    assert_same_tokens_held(back, cache)


class Pooled(PageSelector):
    """Keeps one number a page, made in a way of the instance's own, and ``rank`` of the configuration."""

    name = "pooled"

    def __init__(self, pool):
        self.pool = pool

    def summary_fields(self, config, head_dim, dtype):
        return {"pooled": ((config.rank,), torch.float32)}

    def summarize(self, keys, config):
        return {"pooled": self.pool(keys.float().flatten(1), dim=1)[:, None].expand(-1, config.rank)}

    def select(self, query, pages, config, scaling):
        complete = pages.max_length // config.page_size
        value = pages.summaries["pooled"][:, :, :complete, 0].contiguous()
        return top_pages(value, pages.lengths, config.page_size, config.page_slots)


def test_selectors_with_parameters_of_their_own_do_not_share_summaries(llama):
    cache = small_cache(selector=Pooled(torch.amax))
    feed(llama, cache, random_tokens(1, 40))
    for change in ({"selector": Pooled(torch.mean)}, {"rank": 3}, {"refit": False}):
        check_cache(cache.fork(**change))
    other = cache.fork(selector=Pooled(torch.mean))
    assert not torch.equal(
        other.layers[0].summaries["pooled"][:, :, :10], cache.layers[0].summaries["pooled"][:, :, :10]
    )
    # And it decodes as a cache that had the other instance from the start.
    fresh = small_cache(selector=Pooled(torch.mean))
    feed(llama, fresh, random_tokens(1, 40))
    tokens = one_by_one(random_tokens(1, 6, seed=1))
    torch.testing.assert_close(feed(llama, other, *tokens), feed(llama, fresh, *tokens))
    assert other.stats().sparse_steps == 6


@pytest.mark.parametrize("arrays", ({}, {"norm": torch.zeros(20), "extra": torch.zeros(20)}))
def test_a_selector_whose_summaries_are_not_its_fields_is_refused(llama, arrays):
    class Other(LargestNorm):
        def summarize(self, keys, config):
            return arrays

    with pytest.raises(ValueError, match=r"Other\.summarize returned \[.*\], but its summary_fields are \['norm'\]"):
        feed(llama, small_cache(selector=Other()), random_tokens(1, 40))


def test_a_selector_of_all_pages_gives_dense_attention(llama, dense_llama):
    ids = random_tokens(3, 40)
    cache = small_cache(selector=Everything())
    assert torch.equal(greedy(llama, ids, 12, cache), greedy(dense_llama, ids, 12))
    stats = cache.stats()
    assert stats.sparse_steps == 11
    assert stats.tokens_attended == sum(range(41, 52)) / 11
    assert stats.summary_bytes_read_per_step == 0


def test_a_selector_that_misses_a_method_cannot_be_made():
    class Half(PageSelector):
        name = "half"

        def summary_fields(self, config, head_dim, dtype):
            return {}

    with pytest.raises(TypeError, match="abstract"):
        Half()


class Inverted(LocksSelector):
    """Derived, with choices of its own."""

    def select(self, query, pages, config, scaling):
        chosen = torch.full((*pages.keys.shape[:2], config.page_slots), -1, dtype=torch.int32)
        chosen[..., 0] = 0
        return chosen


def test_a_selector_derived_from_ours_chooses_itself():
    model = tiny_model("llama")
    ids = random_tokens(1, 30)
    cache, plain = small_cache(selector=Inverted()), small_cache()
    with torch.no_grad():
        for each in (cache, plain):
            model(ids, past_key_values=each)
        ours, theirs = (model(ids[:, :1], past_key_values=each).logits for each in (plain, cache))
    assert not cache.is_compileable and plain.is_compileable
    assert not torch.allclose(ours, theirs)
    assert cache.layers[0].counters.sparse_steps == 1
