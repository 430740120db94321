"""Random sequences of cache operations against a list of the tokens each row ought to hold."""

import copy

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from locks_hf import LocksCache
from locks_hf.attention import locks_attention, locks_mask
from locks_hf.selectors import PageView
from tests.helpers import Attention, check_cache

LAYERS, HEADS, GROUP, HEAD_DIM = 2, 2, 3, 8
SCALING = 0.7
MAX_ROWS, MAX_POSITIONS = 6, 150

seeds = st.integers(0, 10_000)
paddings = st.sampled_from(("none", "none", "left", "holes"))
configurations = st.fixed_dictionaries(
    {
        "selector": st.sampled_from(("locks", "locks", "oracle", "quest", "full")),
        "page_size": st.sampled_from((4, 8)),
        "rank": st.integers(1, 3),
        "budget": st.integers(16, 30),
        "basis_bits": st.sampled_from((2, 4, 8, 16)),
        "refit": st.booleans(),
        "combine": st.sampled_from(("share", "max", "mass")),
    }
)


class Row:
    """What one row ought to hold: which positions are real, and their keys and values, ``(L, H, n, d)``."""

    def __init__(self):
        self.real: list[bool] = []
        self.keys = torch.empty(LAYERS, HEADS, 0, HEAD_DIM)
        self.values = torch.empty(LAYERS, HEADS, 0, HEAD_DIM)

    @property
    def length(self):
        return sum(self.real)

    def append(self, real, keys, values):
        self.real = self.real + real
        chosen = torch.tensor(real)
        self.keys = torch.cat([self.keys, keys[:, :, chosen]], dim=2)
        self.values = torch.cat([self.values, values[:, :, chosen]], dim=2)

    def crop(self, removed):
        self.real = self.real[: max(0, len(self.real) - removed)]
        self.keys, self.values = self.keys[:, :, : self.length], self.values[:, :, : self.length]


def attended(query, keys, values):
    """Softmax attention in float64 of queries ``(G, n, d)`` over keys and values ``(m, d)``, causal at the end."""
    logits = query.double() @ keys.double().T * SCALING
    n, m = logits.shape[1:]
    future = torch.arange(m) > (torch.arange(n) + m - n)[:, None]
    return logits.masked_fill(future, float("-inf")).softmax(-1) @ values.double()


class Operations(RuleBasedStateMachine):
    @initialize(configuration=configurations, rows=st.integers(1, 3))
    def start(self, configuration, rows):
        self.cache = LocksCache(**configuration)
        self.rows = [Row() for _ in range(rows)]
        self.drafting = self.prompt_expected = self.rolled_back = False
        self.last_append = 0
        self.left_behind = []  # caches that were copied, and what they hold
        self.forget_counts()
        self.append(30, "left", 0, True)

    def forget_counts(self):
        self.sparse = self.dense = self.prefilled = self.attended = self.asked = 0

    @property
    def seen(self):
        return len(self.rows[0].real)

    # Tokens

    @rule(size=st.integers(2, 40), padding=paddings, seed=seeds, whole_mask=st.booleans())
    def turn(self, size, padding, seed, whole_mask):
        self.append(size, padding, seed, whole_mask)

    @rule(steps=st.integers(1, 9), padding=paddings, seed=seeds, whole_mask=st.booleans())
    def decode(self, steps, padding, seed, whole_mask):
        for step in range(steps):
            self.append(1, padding, seed + step, whole_mask)

    @rule(drafts=st.lists(st.integers(2, 8), min_size=1, max_size=4), seed=seeds, data=st.data())
    def generate_with_drafts(self, drafts, seed, data):
        """As assisted generation does: a prompt that ends in drafts, then a rollback and a check, and again."""
        self.cache.activate_past_recording()
        self.drafting, self.prompt_expected, self.rolled_back = True, True, False
        for number, size in enumerate([12, *drafts]):
            self.append(size, "none", seed + number, False)
            self.crop(data.draw(st.integers(0, size - 1)))

    def append(self, size, padding, seed, whole_mask):
        if self.seen + size > MAX_POSITIONS:
            return
        generator = torch.Generator().manual_seed(seed)
        batch = len(self.rows)
        real = torch.ones(batch, size, dtype=torch.bool)
        if padding == "left":
            real = torch.arange(size) >= torch.randint(0, size + 1, (batch, 1), generator=generator)
        elif padding == "holes":
            real = torch.rand(batch, size, generator=generator) < 0.7
        shape = (LAYERS, batch, HEADS, size, HEAD_DIM)
        # Keys of unequal scale, so that pages differ in mass.
        keys = torch.randn(shape, generator=generator) * torch.rand(batch, 1, size, 1, generator=generator) * 2
        values = torch.randn(shape, generator=generator)
        queries = torch.randn(LAYERS, batch, HEADS * GROUP, size, HEAD_DIM, generator=generator)
        mask = torch.tensor([row.real for row in self.rows], dtype=torch.bool).reshape(batch, -1)
        mask = torch.cat([mask, real], dim=1)

        is_check = self.rolled_back and size > 1 and bool(real.all())
        for row, row_real in enumerate(real.tolist()):
            self.rows[row].append(row_real, keys[:, row], values[:, row])
        self.drafting = self.drafting and (size == 1 or is_check or self.prompt_expected)
        self.last_append, self.prompt_expected, self.rolled_back = size, False, False

        given = mask if whole_mask or not mask.all() else None
        given = locks_mask(batch, size, self.seen, self.seen - size, attention_mask=given)
        assert (given is None) == (bool(mask.all()) and (size == 1 or self.seen == size))
        outputs = []
        for layer in range(LAYERS):
            staged = self.cache.update(keys[layer].clone(), values[layer].clone(), layer)
            output, _ = locks_attention(Attention(GROUP), queries[layer], *staged, given, scaling=SCALING)
            outputs.append(output.unflatten(2, (HEADS, GROUP)))
        if size == 1 or is_check:
            self.expect_steps(queries, torch.stack(outputs), real)
        else:
            self.prefilled += size
            self.expect_dense(queries, torch.stack(outputs), real)

    def expect_dense(self, queries, outputs, real):
        for index, row in enumerate(self.rows):
            chosen = real[index]
            for layer in range(LAYERS):
                for head in range(HEADS):
                    query = queries[layer, index].unflatten(0, (HEADS, GROUP))[head][:, chosen]
                    expected = attended(query, row.keys[layer, head], row.values[layer, head])
                    output = outputs[layer, index, chosen, head].transpose(0, 1)
                    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)

    def expect_steps(self, queries, outputs, real):
        """Each token as if it had come alone, over the pages a fresh view of its row gives."""
        config, selector = self.cache.locks_config, self.cache.selector
        size = queries.shape[3]
        sparse = not selector.dense and max(row.length for row in self.rows) > config.page_slots * config.page_size
        for step in range(size):
            self.sparse, self.dense = self.sparse + sparse, self.dense + (not sparse)
            self.asked += len(self.rows)
            for index, row in enumerate(self.rows):
                length = row.length - (size - 1 - step)
                if length <= 0:
                    continue
                for layer in range(LAYERS):
                    query = queries[layer, index : index + 1, :, step]
                    keys, values = row.keys[layer, :, :length], row.values[layer, :, :length]
                    pages = self.fresh_selection(query, keys) if sparse else None
                    for head in range(HEADS):
                        tokens = torch.arange(length)
                        if sparse:
                            tokens = tokens[torch.isin(tokens // config.page_size, pages[head])]
                        self.attended += len(tokens)
                        if not bool(real[index, step]):
                            continue
                        expected = attended(
                            query[0].unflatten(0, (HEADS, GROUP))[head][:, None],
                            keys[head, tokens],
                            values[head, tokens],
                        )[:, 0]
                        output = outputs[layer, index, step, head]
                        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-4)

    def fresh_selection(self, query, keys):
        """Pages ``(H, slots)`` for one row whose keys ``(H, n, d)`` were summarised just now."""
        config, selector = self.cache.locks_config, self.cache.selector
        length = keys.shape[1]
        n_pages = length // config.page_size
        paged = keys[:, : n_pages * config.page_size].reshape(HEADS * n_pages, config.page_size, HEAD_DIM)
        fields = selector.summary_fields(config, HEAD_DIM, keys.dtype)
        if n_pages:
            summaries = selector.summarize(paged, config)
        else:
            summaries = {name: torch.empty(0, *shape, dtype=dtype) for name, (shape, dtype) in fields.items()}
        summaries = {name: array.unflatten(0, (1, HEADS, n_pages)) for name, array in summaries.items()}
        view = PageView(keys[None], summaries, torch.tensor([length], dtype=torch.int32), length)
        return selector.select(query, view, config, SCALING)[0]

    # Operations

    @rule(removed=st.one_of(st.integers(0, 9), st.integers(10, 80)))
    def rollback(self, removed):
        self.crop(removed)

    def crop(self, removed):
        self.cache.crop(-removed)
        if self.cache.layers:
            self.rolled_back = self.drafting and removed < self.last_append
        for row in self.rows:
            row.crop(removed)

    def take(self, indices):
        self.rows = [copy.copy(self.rows[index]) for index in indices]

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def reorder(self, data):
        n = len(self.rows)
        indices = data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
        self.cache.reorder_cache(torch.tensor(indices))
        self.take(indices)

    @precondition(lambda self: self.seen and len(self.rows) * 2 <= MAX_ROWS)
    @rule(repeats=st.integers(1, 2))
    def repeat_interleave(self, repeats):
        self.cache.batch_repeat_interleave(repeats)
        self.take([index for index in range(len(self.rows)) for _ in range(repeats)])

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def select_indices(self, data):
        n = len(self.rows)
        indices = data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=MAX_ROWS))
        self.cache.batch_select_indices(torch.tensor(indices))
        self.take([index % n for index in indices])

    @rule(rows=st.integers(1, 3))
    def reset(self, rows):
        self.cache.reset()
        self.rows = [Row() for _ in range(rows)]
        self.drafting = self.prompt_expected = self.rolled_back = False
        self.last_append = 0
        self.forget_counts()

    @rule()
    def deepcopy(self):
        self.leave_behind()
        self.cache = copy.deepcopy(self.cache)

    @precondition(lambda self: self.cache.layers)
    @rule(
        changes=configurations, keep=st.sets(st.sampled_from(("selector", "page_size", "rank", "basis_bits", "refit")))
    )
    def fork(self, changes, keep):
        self.leave_behind()
        self.cache = self.cache.fork(**{name: value for name, value in changes.items() if name not in keep})
        self.drafting = self.prompt_expected = self.rolled_back = False
        self.last_append = 0
        self.forget_counts()

    def leave_behind(self):
        self.left_behind.append((self.cache, [copy.copy(row) for row in self.rows]))
        del self.left_behind[:-2]

    # What always holds

    @invariant()
    def holds_its_rows(self):
        for cache, rows in [(self.cache, self.rows), *self.left_behind]:
            assert cache.get_seq_length() == len(rows[0].real)
            check_cache(cache)
            for number, layer in enumerate(cache.locks_layers):
                if not layer.is_initialized:
                    continue
                assert layer.row_lengths == [row.length for row in rows]
                for index, row in enumerate(rows):
                    assert torch.equal(layer.keys[index, :, : row.length], row.keys[number])
                    assert torch.equal(layer.values[index, :, : row.length], row.values[number])

    @invariant()
    def counts(self):
        stats = self.cache.stats()
        assert (stats.sparse_steps, stats.dense_steps) == (self.sparse, self.dense)
        assert stats.prefill_tokens == self.prefilled
        steps = self.sparse + self.dense
        expected = self.attended / (LAYERS * HEADS * self.asked) if self.asked else 0.0
        assert abs(stats.tokens_attended - expected) < 1e-6
        per_token = 2 * HEAD_DIM * 4
        expected = self.attended * per_token / steps if steps else 0.0
        assert abs(stats.kv_bytes_read_per_step - expected) < 1e-3


TestOperations = Operations.TestCase
TestOperations.settings = settings(
    max_examples=25,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
