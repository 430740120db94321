"""The CPU forms of the ops against their references and against float64."""

import itertools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locks_hf.kernels import SummaryLayout, attend, backend, combine, score, summarize, top_pages
from locks_hf.kernels.attend import attend_cpu, attend_reference
from locks_hf.kernels.decode import decode_step_reference
from locks_hf.kernels.decode.cpu import decode_step_cpu
from locks_hf.kernels.layout import dequantize
from locks_hf.kernels.score import score_cpu, score_reference
from locks_hf.kernels.select import combine_cpu, combine_reference, top_pages_cpu, top_pages_reference
from locks_hf.kernels.summarize import summarize_cpu, summarize_reference

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (40, 64, 96, 128)
several = settings(max_examples=60, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=((1, 1), (9000, 20000), (1 << 30, 1 << 30)), ids=("smallest", "small", "whole"))
def blocks(request, monkeypatch):
    """One page at a time, some pages or KV heads, or all that a row has."""
    for name, size in zip(("PRODUCT", "_BLOCK"), request.param, strict=True):
        monkeypatch.setattr(sys.modules["locks_hf.kernels.score.cpu"], name, size)
    monkeypatch.setattr(backend, "PRODUCT", request.param[0])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_summaries(g, layout, rows, heads, capacity, innermost=False):
    """Summaries of random pages ``(rows, heads, capacity, ...)``; pages may be innermost in memory."""
    keys = torch.randn(rows * heads * capacity, layout.page_size, layout.head_dim, generator=g)
    keys += 2 * torch.randn(len(keys), 1, layout.head_dim, generator=g)
    summaries = summarize_reference(keys, layout, True)
    summaries = {name: array.unflatten(0, (rows, heads, capacity)) for name, array in summaries.items()}
    if innermost:
        for name in ("coefficients", "token_scales", "scales"):
            summaries[name] = summaries[name].movedim(2, -1).contiguous().movedim(-1, 2)
    return summaries


def exact_scores(query, summaries, layout, scaling):
    """Equation 2 over the packed values in float64, ``(B, H, G, capacity)``."""
    centroid, coefficients, basis = (part.double() for part in dequantize(summaries, layout))
    keys = centroid[..., None, :] + coefficients @ basis  # (B, H, J, P, d)
    grouped = query.double().unflatten(1, (keys.shape[1], -1))
    return torch.logsumexp(torch.einsum("bhgd,bhjpd->bhgjp", grouped, keys) * scaling, dim=-1)


# Summarize


def pages_of_all_kinds(g, n, page_size, head_dim, dtype):
    """Pages with a decaying spectrum, and degenerate ones."""
    left, right = torch.randn(n, page_size, page_size, generator=g), torch.randn(n, page_size, head_dim, generator=g)
    spectrum = torch.logspace(0, -2, page_size)
    keys = left @ (spectrum[:, None] * right) + 3 * torch.randn(n, 1, head_dim, generator=g)
    keys[1] = 1.25
    keys[2] = 0
    keys[3, 1:] = keys[3, :1]
    keys[4, 0] *= 200
    keys[5] *= 1e-4
    return keys.to(dtype)


@pytest.mark.parametrize("refit", (True, False), ids=("refit", "project"))
@pytest.mark.parametrize("bits", (2, 4, 8, 16))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_summarize(head_dim, bits, refit):
    for page_size, rank, dtype in ((4, 3, DTYPES[0]), (16, 8, DTYPES[1]), (16, 1, DTYPES[2]), (64, 15, DTYPES[0])):
        layout = SummaryLayout(head_dim, rank, page_size, bits)
        keys = pages_of_all_kinds(generator(page_size), 12, page_size, head_dim, dtype)
        got, reference = (summarize(keys, layout, refit) for summarize in (summarize_cpu, summarize_reference))
        for name, (shape, field_dtype) in layout.fields().items():
            assert got[name].shape == (12, *shape)
            assert got[name].dtype == field_dtype
        assert sum(array.nbytes for array in got.values()) == 12 * layout.bytes_per_page
        # A column's sign is free and its codes may round differently: what counts is how far the keys are off.
        assert torch.equal(got["centroid"], reference["centroid"])
        size = keys.double().flatten(1).norm(dim=1)
        error, baseline = (
            (centroid[:, None] + coefficients @ basis - keys.double()).flatten(1).norm(dim=1)
            for centroid, coefficients, basis in (
                [part.double() for part in dequantize(summaries, layout)] for summaries in (got, reference)
            )
        )
        assert (error <= 1.02 * baseline + 1e-4 * size).all()


def test_the_summary_of_a_page_does_not_depend_on_its_company():
    layout = SummaryLayout(64, 8)
    keys = pages_of_all_kinds(generator(9), 40, 16, 64, torch.float32)
    together = summarize_cpu(keys, layout, True)
    for some in (slice(0, 1), slice(1, 4), slice(5, 40)):
        for name, array in summarize_cpu(keys[some], layout, True).items():
            assert torch.equal(array, together[name][some])


def test_summarize_strided_and_broken_pages():
    layout = SummaryLayout(64, 4)
    keys = torch.randn(5, 16, 80, generator=generator(10))[..., :64]
    whole = summarize_cpu(keys.contiguous(), layout, True)
    for name, array in summarize_cpu(keys, layout, True).items():
        assert torch.equal(array, whole[name])
    keys[1, 3, 5], keys[2, 0, 0], keys[3] = math.nan, math.inf, -math.inf
    broken = summarize_cpu(keys, layout, True)
    assert broken["scales"].isnan().nonzero().tolist() == [[1, 0], [2, 0], [3, 0]]
    for name, array in broken.items():
        assert torch.equal(array[[0, 4]], whole[name][[0, 4]])


# Score


@pytest.mark.parametrize("innermost", (False, True), ids=("pages-outermost", "pages-innermost"))
@pytest.mark.parametrize("bits", (2, 4, 8, 16))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_score(head_dim, bits, innermost, blocks):
    rows, heads, capacity, pages = 3, 2, 11, 9
    n_pages = torch.tensor([pages, 4, 0], dtype=torch.int32)
    scaling = head_dim**-0.5
    for page_size, group, dtype in ((4, 1, DTYPES[0]), (16, 3, DTYPES[0]), (16, 8, DTYPES[1]), (64, 5, DTYPES[2])):
        g = generator(page_size * group)
        layout = SummaryLayout(head_dim, min(page_size - 1, 8), page_size, bits)
        summaries = random_summaries(g, layout, rows, heads, capacity, innermost)
        query = (torch.randn(rows, heads * group, head_dim, generator=g) * 2).to(dtype)
        got = score_cpu(query, summaries, n_pages, pages, layout, scaling)
        reference = score_reference(query, summaries, n_pages, pages, layout, scaling)
        exact = exact_scores(query, summaries, layout, scaling)
        assert got.shape == (rows, heads, group, pages)
        assert got.dtype == torch.float32
        for row, n in enumerate(n_pages.tolist()):
            assert (got[row, ..., n:] == -math.inf).all()
            if n:
                error, baseline = ((x[row] - exact[row, ..., :pages])[..., :n].abs().max() for x in (got, reference))
                assert error <= 2 * baseline + 1e-6 * exact[row].abs().max()


@several
@given(
    seed=seeds,
    rank=st.integers(1, 15),
    bits=st.sampled_from((2, 4, 8, 16)),
    group=st.integers(1, 8),
    size=st.sampled_from((16, 32)),
    n_pages=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    inside=st.booleans(),
)
def test_score_of_any_shape(seed, rank, bits, group, size, n_pages, inside):
    g = generator(seed)
    layout = SummaryLayout(24, rank, size, bits)
    pages = max(1, *n_pages)
    summaries = random_summaries(g, layout, len(n_pages), 2, pages + 2, inside)
    query = torch.randn(len(n_pages), 2 * group, 24, generator=g)
    counts = torch.tensor(n_pages, dtype=torch.int32)
    got = score_cpu(query, summaries, counts, pages, layout, 0.2)
    torch.testing.assert_close(got, score_reference(query, summaries, counts, pages, layout, 0.2), rtol=1e-5, atol=1e-5)


def test_score_of_broken_pages_and_of_what_lies_past_the_end(blocks):
    layout = SummaryLayout(16, 4)
    summaries = random_summaries(generator(0), layout, 2, 1, 6)
    summaries["scales"][0, 0, 2, 0] = math.nan
    summaries["scales"][1, 0, 3:] = math.nan
    got = score_cpu(torch.ones(2, 3, 16), summaries, torch.tensor([6, 3]), 6, layout, 0.25)
    assert got[0].isnan().all(dim=(0, 1)).tolist() == [False, False, True, False, False, False]
    assert got[0].isnan().sum() == 3
    assert got[1, ..., :3].isfinite().all()
    assert (got[1, ..., 3:] == -math.inf).all()


@pytest.mark.parametrize("bits", (2, 4, 8, 16))
def test_score_survives_extreme_queries(bits):
    g = generator(1)
    layout = SummaryLayout(128, 8, 16, bits)
    summaries = random_summaries(g, layout, 1, 1, 9)
    largest = torch.finfo(torch.float16).max
    query = torch.randn(1, 4, 128, generator=g).sign().mul(largest).half()
    n_pages = torch.tensor([9], dtype=torch.int32)
    got = score_cpu(query, summaries, n_pages, 9, layout, 1.0)
    assert got.isfinite().all()
    exact = exact_scores(query, summaries, layout, 1.0)
    reference = score_reference(query, summaries, n_pages, 9, layout, 1.0)
    assert (got - exact).abs().max() <= 2 * (reference - exact).abs().max() + 1e-6 * exact.abs().max()


def test_score_of_infinite_logits_is_infinite_as_in_the_reference():
    layout = SummaryLayout(16, 2)
    summaries = random_summaries(generator(2), layout, 1, 1, 3)
    summaries["coefficients"][0, 0, 1] = 100
    summaries["scales"][0, 0, 1, 1:] = 1e38
    summaries["token_scales"][0, 0, 1] = 1e38
    summaries["centroid"].zero_()
    arguments = (torch.full((1, 1, 16), 9.0), summaries, torch.tensor([3]), 3, layout, 1.0)
    assert torch.equal(score_cpu(*arguments).isfinite(), score_reference(*arguments).isfinite())


def test_score_of_a_query_that_requires_a_gradient():
    layout = SummaryLayout(16, 4)
    summaries = random_summaries(generator(3), layout, 1, 2, 5)
    query = torch.ones(1, 4, 16, requires_grad=True)
    assert not score_cpu(query, summaries, torch.tensor([5]), 5, layout, 0.25).requires_grad


# Select


@several
@given(
    seed=seeds,
    rule=st.sampled_from(("share", "max", "mass")),
    group=st.integers(1, 8),
    n_pages=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    spread=st.sampled_from((0.1, 3.0, 80.0, 1e30)),
    equal=st.booleans(),
)
def test_combine(seed, rule, group, n_pages, spread, equal):
    if equal:
        n_pages = n_pages[:1] * len(n_pages)
    lse = torch.randn(len(n_pages), 2, group, max(n_pages), generator=generator(seed)) * spread
    counts = torch.tensor(n_pages, dtype=torch.int32)
    got, exact = combine_cpu(lse, counts, rule), combine_reference(lse.double(), counts, rule)
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", ("share", "max"))
def test_combine_ranks_a_page_of_infinite_mass_first(rule):
    lse = torch.zeros(1, 2, 3, 5)
    lse[0, 0, 1, 3] = math.inf
    lse[0, 1, 2, 2] = math.nan
    counts, lengths = torch.tensor([5], dtype=torch.int32), torch.tensor([80], dtype=torch.int32)
    chosen = [top_pages(f(lse, counts, rule), lengths, 16, 3) for f in (combine_cpu, combine_reference)]
    assert torch.equal(*chosen)
    assert chosen[0][0, 0].tolist() == [0, 3, 4]


def test_combine_does_not_change_its_input():
    lse = torch.randn(1, 2, 3, 5, generator=generator(4))
    before = lse.clone()
    combine_cpu(lse, torch.tensor([5]), "share")
    assert torch.equal(lse, before)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    seed=seeds,
    page_size=st.sampled_from((4, 16)),
    slots=st.integers(2, 8),
    heads=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 90), min_size=0, max_size=3),
    equal=st.booleans(),
    distinct=st.integers(1, 9),
)
def test_top_pages_are_those_of_the_reference(seed, page_size, slots, heads, lengths, equal, distinct):
    if equal:
        lengths = lengths[:1] * len(lengths)
    numbers = torch.tensor((0.5, 0.0, -0.0, math.nan, -math.inf, 0.25, -1.0, math.inf, 7.0))
    shape = (len(lengths), heads, max(lengths, default=0) // page_size)
    value = numbers[torch.randint(0, distinct, shape, generator=generator(seed))]
    lengths = torch.tensor(lengths, dtype=torch.int32)
    before = value.clone()
    got = top_pages_cpu(value, lengths, page_size, slots)
    assert torch.equal(got, top_pages_reference(value, lengths, page_size, slots))
    assert got.dtype == torch.int32
    torch.testing.assert_close(value, before, rtol=0, atol=0, equal_nan=True)


# Attend


def check_attend(g, group, head_dim, page_size, lengths, slots, dtype, shuffled):
    """Compare with a softmax over the real tokens in float64; nothing past a row's end may matter."""
    rows, heads = len(lengths), 2
    capacity = (max(lengths) // page_size + 2) * page_size
    keys, values = (torch.randn(rows, heads, capacity, head_dim, generator=g).to(dtype) for _ in range(2))
    query = torch.randn(rows, heads * group, head_dim, generator=g).to(dtype)
    pages = torch.full((rows, heads, slots), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        keys[row, :, length:], values[row, :, length:] = math.nan, math.inf
        total = -(-length // page_size)
        for head in range(heads):
            others = torch.randperm(max(0, total - 1), generator=g)[: slots - 1].sort().values
            chosen = [*others.tolist(), total - 1][-slots:] if total else []
            pages[row, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            if shuffled:
                pages[row, head] = pages[row, head, torch.randperm(slots, generator=g)]
    scaling = head_dim**-0.5
    counts = torch.tensor(lengths, dtype=torch.int32)
    got = attend_cpu(query, keys, values, pages, counts, page_size, scaling)
    assert got.dtype == dtype
    assert got.shape == query.shape
    reference = attend_reference(query, keys, values, pages, counts, page_size, scaling)
    for row, head in itertools.product(range(rows), range(heads)):
        heads_of_group = slice(head * group, (head + 1) * group)
        chosen = set(pages[row, head].tolist())
        tokens = [token for token in range(lengths[row]) if token // page_size in chosen]
        if not tokens:
            assert (got[row, heads_of_group] == 0).all()
            continue
        k, v = keys[row, head, tokens].double(), values[row, head, tokens].double()
        exact = torch.softmax(query[row, heads_of_group].double() @ k.T * scaling, dim=-1) @ v
        error, baseline = ((x[row, heads_of_group].double() - exact).abs().max() for x in (got, reference))
        assert error <= 2 * baseline + 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", (4, 16, 64))
def test_attend(page_size, head_dim, dtype, blocks):
    g = generator(page_size + head_dim)
    for group, slots in ((1, 1), (3, 2), (8, 11)):
        whole = 12 * page_size
        for lengths in ([whole], [whole - 3, whole - 3], [whole - 1, page_size + 1, 0]):
            for shuffled in (False, True):
                check_attend(g, group, head_dim, page_size, lengths, slots, dtype, shuffled)


@several
@given(
    seed=seeds,
    group=st.integers(1, 8),
    head_dim=st.sampled_from((8, 24, 40)),
    page_size=st.sampled_from((4, 8, 32)),
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    slots=st.integers(1, 9),
    shuffled=st.booleans(),
)
def test_attend_any_shape(seed, group, head_dim, page_size, lengths, slots, shuffled):
    check_attend(generator(seed), group, head_dim, page_size, lengths, slots, torch.float32, shuffled)


@pytest.mark.parametrize("broken", ("keys", "values"))
@pytest.mark.parametrize("token", (3, 700, 1198))
def test_a_nan_in_a_chosen_page_reaches_the_output(broken, token):
    g = generator(5)
    states = {name: torch.randn(1, 2, 1200, 16, generator=g) for name in ("keys", "values")}
    states[broken][0, 1, token, 7] = math.nan
    pages = torch.arange(75, dtype=torch.int32).expand(1, 2, 75)
    for length in (1200, 1199):
        out = attend_cpu(
            torch.randn(1, 6, 16), **states, pages=pages, lengths=torch.tensor([length]), page_size=16, scaling=0.25
        )
        assert out[0, :3].isfinite().all()
        assert out[0, 3:].isnan().any(dim=-1).all()


@pytest.mark.parametrize("lengths", ([64, 64], [61, 30]))
@pytest.mark.parametrize("size", (32768.0, 65504.0))
def test_attend_extreme_values(size, lengths):
    g = generator(6)
    keys, values = (torch.randn(2, 1, 64, 32, generator=g).sign().mul(size).half() for _ in range(2))
    query = torch.randn(2, 4, 32, generator=g).sign().mul(size).half()
    pages = torch.tensor([[[0, 1, 3]], [[0, 1, -1]]], dtype=torch.int32)
    arguments = (query, keys, values, pages, torch.tensor(lengths, dtype=torch.int32), 16, 1.0)
    got = attend_cpu(*arguments)
    assert got.isfinite().all()
    if size == 32768.0:  # a power of two: no logit is rounded, and equal ones stay equal
        torch.testing.assert_close(got, attend_reference(*arguments))


def test_attend_keys_that_are_not_whole_contiguous_pages():
    g = generator(7)
    wide = torch.randn(2, 2, 3, 50, 24, generator=g)
    pages = torch.arange(4, dtype=torch.int32).expand(2, 3, 4)
    lengths = torch.tensor([50, 50], dtype=torch.int32)
    query = torch.randn(2, 6, 2, 16, generator=g)[:, :, 1]
    for keys, values in (wide[..., :16], wide[..., :16].contiguous(), wide[:, :, :, :48, :16]):
        arguments = (
            query,
            keys,
            values,
            pages[..., : -(-keys.shape[2] // 16)],
            lengths.clamp(max=keys.shape[2]),
            16,
            0.2,
        )
        torch.testing.assert_close(attend_cpu(*arguments), attend_reference(*arguments))


# Dispatch


def test_who_runs_where(monkeypatch):
    expected = "triton" if backend.interpreting() else "cpu"
    assert backend.implementation(CPU) == expected
    assert backend.implementation(torch.device("meta")) == "reference"
    monkeypatch.setenv("LOCKS_KERNELS", "reference")
    assert backend.implementation(CPU) == "reference"


@pytest.mark.skipif(backend.interpreting(), reason="Triton's interpreter is on")
def test_the_entry_points_run_the_cpu_forms_unless_told_otherwise(monkeypatch):
    called = []

    def spy(op, name):
        module = sys.modules[f"locks_hf.kernels.{op}"]
        original = getattr(module, name)

        def record(*args):
            called.append(name)
            return original(*args)

        monkeypatch.setattr(module, name, record)

    forms = ("summarize", "score", "combine", "top_pages", "attend")
    for op, form in zip(("summarize", "score", "select", "select", "attend"), forms, strict=True):
        spy(op, f"{form}_cpu")
        spy(op, f"{form}_reference")
    g = generator(8)
    layout = SummaryLayout(16, 4)
    keys, query = torch.randn(1, 1, 64, 16, generator=g), torch.randn(1, 2, 16, generator=g)
    n_pages, lengths = torch.tensor([4], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)

    def run():
        summaries = summarize(keys.view(4, 16, 16), layout)
        summaries = {name: array[None, None] for name, array in summaries.items()}
        lse = score(query, summaries, n_pages, 4, layout, 0.25)
        return attend(query, keys, keys, top_pages(combine(lse, n_pages), lengths, 16, 2), lengths, 16, 0.25)

    fast = run()
    assert called == [f"{form}_cpu" for form in forms]
    called.clear()
    monkeypatch.setenv("LOCKS_KERNELS", "reference")
    torch.testing.assert_close(run(), fast)
    assert called == [f"{form}_reference" for form in forms]


# A whole decode step


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("size", "slots"), ((16, 3), (4, 4), (16, 64)))
def test_decode_step_equals_the_reference(dtype, size, slots):
    g, layout = generator(5), SummaryLayout(32, 3, size)
    rows, heads, capacity = 3, 2, 8 * size
    keys, values = (torch.randn(rows, heads, capacity, 32, generator=g).to(dtype) for _ in range(2))
    pages = keys.unflatten(2, (-1, size)).flatten(0, 2)
    summaries = {name: a.unflatten(0, (rows, heads, -1)) for name, a in summarize_cpu(pages, layout, True).items()}
    # A page ends in each row; the last row has room for one token only.
    counts = torch.tensor([5 * size - 2, 2 * size - 1, 8 * size - 1, 8 * size], dtype=torch.int32)
    state = (keys, values, summaries, counts)
    twin = (keys.clone(), values.clone(), {name: a.clone() for name, a in summaries.items()}, counts.clone())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for step in range(3):
        query = torch.randn(rows, heads * 2, 32, generator=g).to(dtype)
        key, value = torch.randn(2, rows, heads, 32, generator=g).to(dtype)
        real = None if step == 0 else torch.tensor([True, step == 2, True])
        options = (layout, True, "share", slots, 0.2)
        got = decode_step_cpu(query, key, value, real, *state, *options)
        expected = decode_step_reference(query, key, value, real, *twin, *options)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert got[2].isnan().all().item() == (step > 0)
        assert not got[1].any() if step == 1 else got[1].any()
        for ours, theirs in zip((*state[:2], *state[2].values()), (*twin[:2], *twin[2].values()), strict=True):
            assert torch.equal(ours, theirs)
        assert state[3].tolist() == twin[3].tolist()
