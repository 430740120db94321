"""Triton kernels against their references and against float64, on a GPU or in the interpreter.

Run with TRITON_INTERPRET=1 on a machine without a GPU; every output is poisoned before a kernel writes it.
"""

import importlib
import itertools

import numpy as np
import pytest
import torch

from locks_hf.kernels import SummaryLayout, attend, backend, combine, decode_step, score, summarize, top_pages
from locks_hf.kernels.attend import attend_reference
from locks_hf.kernels.decode import decode_step_reference
from locks_hf.kernels.layout import dequantize
from locks_hf.kernels.score import score_reference
from locks_hf.kernels.select import combine_reference, top_pages_reference
from locks_hf.kernels.summarize import summarize_reference
from locks_hf.kernels.summarize.reference import page_factors

attend_triton = importlib.import_module("locks_hf.kernels.attend.triton")
select_triton = importlib.import_module("locks_hf.kernels.select.triton")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.skipif(
    not ON_GPU and not backend.interpreting(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)

HEAD_DIMS = (64, 96, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Interpreting every combination takes hours; a GPU takes seconds.
GRID = list(itertools.product(HEAD_DIMS, DTYPES))
if not ON_GPU:
    GRID = list(zip(HEAD_DIMS, (torch.float32, torch.bfloat16, torch.float16, torch.float32), strict=True))
GRID.append((40, torch.float32))
GRID_IDS = [f"d{d}-{str(dtype).removeprefix('torch.')}" for d, dtype in GRID]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill what torch.empty returns: NaN for floats, the largest value for integers."""
    real_empty = torch.empty

    def empty(*args, **kwargs):
        out = real_empty(*args, **kwargs)
        return out.fill_(float("nan") if out.dtype.is_floating_point else torch.iinfo(out.dtype).max)

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def rng():
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    return generator


def randn(rng, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=rng).to(dtype).to(DEVICE)


def low_rank_pages(rng, n, page_size, head_dim, dtype):
    """Pages with a decaying spectrum, like real keys, and the degenerate ones that occur in practice."""
    spectrum = torch.logspace(0, -2, page_size)
    left, right = (
        torch.randn(n, page_size, page_size, generator=rng),
        torch.randn(n, page_size, head_dim, generator=rng),
    )
    keys = left @ (spectrum[:, None] * right) + torch.randn(n, 1, head_dim, generator=rng) * 3
    keys[1] = 1.25
    keys[2] = 0
    keys[3, 1:] = keys[3, :1]
    keys[4, 0] *= 200
    keys[5] *= 1e-4
    return keys.to(dtype).to(DEVICE)


def reconstruction(summaries, layout):
    centroid, coefficients, basis = dequantize(summaries, layout)
    return centroid[:, None, :] + coefficients @ basis


def assert_as_good(got, expected, pages, layout, made):
    """Of summaries of the same pages those not ``made`` just now are equal, and the others as close to their pages.

    Sums in another order may round a code differently, or mix directions of nearly the same strength.
    """
    got, expected = (
        {name: array.reshape(len(made), *layout.fields()[name][0]) for name, array in one.items()}
        for one in (got, expected)
    )
    for name in got:
        assert torch.equal(got[name][~made], expected[name][~made])
    pages = pages[made].double()
    ours, theirs = ((reconstruction(x, layout)[made].double() - pages).norm(dim=2) for x in (got, expected))
    sizes = pages.norm(dim=2)
    assert (ours <= 1.1 * theirs + 0.01 * sizes).all()
    assert (ours.norm(dim=1) <= 1.01 * theirs.norm(dim=1) + 1e-3 * sizes.norm(dim=1)).all()


@pytest.mark.parametrize(("head_dim", "dtype"), GRID, ids=GRID_IDS)
@pytest.mark.parametrize("refit", [True, False], ids=["refit", "project"])
@pytest.mark.parametrize(("rank", "bits", "page_size"), [(8, 4, 16), (3, 2, 16), (15, 8, 16), (1, 16, 16), (4, 4, 32)])
def test_summarize(rng, head_dim, dtype, rank, bits, page_size, refit):
    layout = SummaryLayout(head_dim, rank, page_size, bits)
    keys = low_rank_pages(rng, 13, page_size, head_dim, dtype)
    got = summarize(keys, layout, refit)
    expected = summarize_reference(keys, layout, refit)
    for name, (shape, field_dtype) in layout.fields().items():
        assert got[name].shape == (13, *shape)
        assert got[name].dtype == field_dtype
    assert sum(array.nbytes for array in got.values()) == 13 * layout.bytes_per_page
    assert torch.isfinite(got["scales"].float()).all()
    assert torch.isfinite(got["token_scales"].float()).all()
    # The centroid needs no eigenvectors: codes agree but for rounding of the mean.
    assert (got["centroid"].int() - expected["centroid"].int()).abs().max() <= 1

    keys = keys.double()
    scale = (keys - keys.mean(1, keepdim=True)).flatten(1).norm(dim=1) + 1e-2 * keys.flatten(1).norm(dim=1) + 1e-30
    got_error = (reconstruction(got, layout).double() - keys).flatten(1).norm(dim=1) / scale
    ref_error = (reconstruction(expected, layout).double() - keys).flatten(1).norm(dim=1) / scale
    assert torch.isfinite(got_error).all()
    # Same quality page by page; a column may round differently, so a small slack.
    assert (got_error <= 1.25 * ref_error + 0.02).all(), (got_error / ref_error, got_error)
    assert got_error.mean() <= 1.05 * ref_error.mean() + 0.002


def test_summarize_pages_of_few_different_tokens():
    """Fewer directions than columns: rounding errors are all that is left, on these pages with large negative ones."""
    layout, pages = SummaryLayout(64, 8), []
    for seed in (7, 494, 573, 1347, 1758, 2907, 2995, 3675, 4602, 5222, 5417, 7183, 8639, 9240, 9795, 10242):
        random = np.random.default_rng(seed)
        tokens = random.standard_normal((random.integers(3, 8), 64))
        pages.append(torch.from_numpy(tokens[random.integers(0, len(tokens), 16)]))
    keys = torch.stack(pages).bfloat16().to(DEVICE)
    got, expected = (reconstruction(x(keys, layout, True), layout) for x in (summarize, summarize_reference))
    sizes = keys.double().flatten(1).norm(dim=1)
    errors = [(x.double() - keys.double()).flatten(1).norm(dim=1) / sizes for x in (got, expected)]
    assert (errors[0] <= 1.25 * errors[1] + 0.02).all()
    assert errors[0].mean() <= 1.05 * errors[1].mean()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-36, 1e36])
def test_summarize_keys_of_any_size(rng, scale):
    layout = SummaryLayout(64, 4)
    keys = (torch.randn(3, 16, 64, generator=rng) * scale).to(DEVICE)
    assert all(array.float().isfinite().all() for array in summarize(keys, layout, True).values())


@pytest.mark.parametrize("page_size", [4, 16, 32, 64])
def test_summarize_finds_the_best_subspace(rng, page_size):
    """With a bf16 basis the residual is the optimal one of the float64 factors."""
    rank = min(8, page_size - 1)
    layout = SummaryLayout(64, rank, page_size, 16)
    keys = low_rank_pages(rng, 9, page_size, 64, torch.float32)[6:]
    got = reconstruction(summarize(keys, layout, True), layout).double()
    centroid, coefficients, basis = page_factors(keys, rank)
    best = (centroid[:, None, :] + coefficients @ basis - keys).flatten(1).norm(dim=1)
    size = (keys.double() - centroid[:, None, :]).flatten(1).norm(dim=1)
    centroid_rounding = centroid.abs().amax(dim=1) / 127 / 2 * 1.01 * (page_size * 64) ** 0.5  # half a step everywhere
    assert ((got - keys).flatten(1).norm(dim=1) <= 1.01 * best + 0.01 * size + centroid_rounding).all()


def test_summarize_strided_and_broken_pages(rng):
    layout = SummaryLayout(64, 4)
    wide = randn(rng, 5, 16, 80)
    keys = wide[..., :64]
    assert not keys.is_contiguous()
    got, expected = summarize(keys, layout), summarize(keys.contiguous(), layout)
    for name in got:
        assert torch.equal(got[name], expected[name])
    keys = keys.contiguous()
    keys[1, 3, 5] = float("nan")
    keys[2, 0, 0] = float("inf")
    keys[3] = float("-inf")
    broken = summarize(keys, layout)
    scales = broken["scales"].float()
    assert scales[:, 0].isnan().tolist() == [False, True, True, True, False]
    assert scales[:, 1:].isfinite().all()
    assert broken["token_scales"].float().isfinite().all()
    # A broken page changes no other page.
    for name in layout.fields():
        assert torch.equal(summarize(keys, layout)[name][[0, 4]], expected[name][[0, 4]])


def random_summaries(rng, layout, batch, heads, capacity):
    keys = torch.randn(batch * heads * capacity, layout.page_size, layout.head_dim, generator=rng)
    summaries = summarize_reference(keys, layout, True)
    return {name: a.unflatten(0, (batch, heads, capacity)).to(DEVICE) for name, a in summaries.items()}


@pytest.mark.parametrize(("head_dim", "dtype"), GRID, ids=GRID_IDS)
@pytest.mark.parametrize(
    ("rank", "bits", "page_size", "group"),
    [(8, 4, 16, 4), (4, 2, 16, 3), (2, 8, 16, 1), (5, 16, 16, 16), (7, 4, 32, 7)]
    + [(4, 4, 16, 8), (8, 8, 16, 16), (4, 8, 16, 1), (8, 4, 16, 7), (4, 4, 16, 12)] * ON_GPU,  # not interpreted
)
def test_score(rng, head_dim, dtype, rank, bits, page_size, group):
    layout = SummaryLayout(head_dim, rank, page_size, bits)
    batch, heads, capacity, pages = 2, 2, 23, 21
    summaries = random_summaries(rng, layout, batch, heads, capacity)
    query = (randn(rng, batch, heads * group, head_dim) * 2).to(dtype)
    n_pages = torch.tensor([pages, 6], dtype=torch.int32, device=DEVICE)
    scaling = head_dim**-0.5
    got = score(query, summaries, n_pages, pages, layout, scaling)
    # The query's rounding, 1/508 of 1/127 of its largest entry a channel at the most, against keys of about this size.
    tolerance = 1e-4 + 4 * query.float().abs().max().item() / (127 * 508) * scaling * head_dim**0.5

    centroid, coefficients, basis = (part.double() for part in dequantize(summaries, layout))
    keys = centroid[..., None, :] + coefficients @ basis  # (B, H, J, P, d)
    logits = torch.einsum("bhgd,bhjpd->bhgjp", query.double().unflatten(1, (heads, group)), keys) * scaling
    expected = torch.logsumexp(logits, dim=-1)[..., :pages]
    for row, n in enumerate(n_pages.tolist()):
        torch.testing.assert_close(got[row, ..., :n].double(), expected[row, ..., :n], rtol=1e-5, atol=tolerance)
        assert (got[row, ..., n:] == float("-inf")).all()
    reference = score_reference(query, summaries, n_pages, pages, layout, scaling)
    torch.testing.assert_close(got, reference, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(("rank", "pages"), [(8, 5), (4, 13), (8, 70)])
def test_score_survives_extreme_queries(rng, rank, pages):
    layout = SummaryLayout(64, rank)
    summaries = random_summaries(rng, layout, 1, 1, pages)
    query = randn(rng, 1, 4, 64) * 3000  # logits far outside the range of exp
    got = score(query, summaries, torch.tensor([pages], dtype=torch.int32, device=DEVICE), pages, layout, 1.0)
    assert torch.isfinite(got).all()
    reference = score_reference(query, summaries, torch.tensor([pages], device=DEVICE), pages, layout, 1.0)
    # The kernels keep the query to half of 1/254 of a step of its largest entry; not all errors add up.
    centroid, coefficients, basis = (x.abs() for x in dequantize(summaries, layout))
    parts = (centroid.unsqueeze(-2) + coefficients @ basis).sum(-1).amax(-1)  # (1, 1, pages)
    step = query.abs().amax(-1)[:, None, :, None] / (127 * 254)
    assert ((got - reference).abs() <= step / 4 * parts[:, :, None] + 1e-5 * reference.abs()).all()


@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize("name", ["scales", "token_scales"])
def test_a_broken_page_leaves_the_others_alone(rng, rank, name):
    layout, pages = SummaryLayout(64, rank), 19
    summaries = random_summaries(rng, layout, 1, 2, pages)
    query, counts = randn(rng, 1, 8, 64), torch.tensor([pages], dtype=torch.int32, device=DEVICE)
    whole = score(query, summaries, counts, pages, layout, 0.125)
    broken = {**summaries, name: summaries[name].clone()}
    broken[name][0, 0, 6] = float("nan")
    got = score(query, broken, counts, pages, layout, 0.125)
    assert got[0, 0, :, 6].isnan().all()
    got[0, 0, :, 6] = whole[0, 0, :, 6]
    torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("refit", [True, False], ids=["refit", "project"])
def test_pages_at_the_ends_of_fp16_stay_finite(rng, refit):
    layout, largest, smallest = SummaryLayout(64, 4), 65504.0, 2.0**-24
    keys = torch.randn(7, 16, 64, generator=rng)
    keys[0] = keys[0].sign() * largest
    keys[1] = largest
    keys[2, 5, 7] = 6e4
    keys[3] = keys[3].sign() * smallest
    keys[4] = 0
    keys[5, 1:] = -largest
    keys = keys.half().to(DEVICE)
    summaries = summarize(keys, layout, refit)
    assert all(array.float().isfinite().all() for array in summaries.values())
    summaries = {name: array[None, None] for name, array in summaries.items()}
    query, counts = randn(rng, 1, 4, 64, dtype=torch.float16), torch.tensor([7], dtype=torch.int32, device=DEVICE)
    lse = score(query, summaries, counts, 7, layout, 0.125)
    assert lse.isfinite().all()
    # The query's rounding, 1/508 of 1/127 of its largest entry a channel at the most, against keys of this size.
    tolerance = query.float().abs().max().item() / (127 * 508) * largest * 0.125 * 64
    reference = score_reference(query, summaries, counts, 7, layout, 0.125)
    torch.testing.assert_close(lse, reference, rtol=1e-4, atol=tolerance)
    assert combine(lse, counts).isfinite().all()


@pytest.mark.parametrize(("rank", "group", "slots"), [(8, 4, 16), (4, 3, 5), (2, 8, 9)])
def test_kernels_and_references_choose_the_same_pages(rng, rank, group, slots):
    layout, batch, heads, capacity = SummaryLayout(64, rank), 2, 2, 40
    summaries = random_summaries(rng, layout, batch, heads, capacity)
    query = randn(rng, batch, heads * group, 64) * 2
    lengths = torch.tensor([40 * 16, 27 * 16 + 3], dtype=torch.int32, device=DEVICE)
    counts = lengths // 16
    value = combine(score(query, summaries, counts, capacity, layout, 0.125), counts)
    reference = combine_reference(score_reference(query, summaries, counts, capacity, layout, 0.125), counts, "share")
    torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-7)
    chosen, expected = top_pages(value, lengths, 16, slots), top_pages_reference(reference, lengths, 16, slots)
    # Pages may change places where their values agree to the accuracy of float32.
    differing = (chosen != expected).nonzero().tolist()
    for row, head, slot in differing:
        pair = reference[row, head, [chosen[row, head, slot], expected[row, head, slot]]]
        torch.testing.assert_close(pair[0], pair[1], rtol=1e-4, atol=1e-7)
    assert len(differing) <= 2


@pytest.mark.parametrize("rule", ["share", "max", "mass"])
@pytest.mark.parametrize("max_pages", [1, 2, 63, 1000, 1025])
def test_combine(rng, rule, max_pages):
    lse = randn(rng, 2, 3, 5, max_pages) * 10
    n_pages = torch.tensor([max_pages, max(1, max_pages // 3)], dtype=torch.int32, device=DEVICE)
    got = combine(lse, n_pages, rule)
    expected = combine_reference(lse.double(), n_pages, rule)
    for row, n in enumerate(n_pages.tolist()):
        torch.testing.assert_close(got[row, :, :n].double(), expected[row, :, :n], rtol=1e-4, atol=1e-6)
        assert (got[row, :, n:] == float("-inf")).all()


@pytest.mark.parametrize("ties", [False, True], ids=["random", "ties"])
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize(
    ("complete", "slots"), [(1, 2), (4, 4), (9, 4), (63, 8), (1030, 128), (40, 64), (5000, 40), (2600, 512)]
)
def test_top_pages(rng, complete, slots, page_size, ties):
    """The very same pages as the reference, in the same order."""
    value = torch.randn(3, 2, complete, generator=rng).to(DEVICE)
    if ties:
        value = value.round()  # -0.0 included
    lengths = [complete * page_size + 3, complete * page_size, max(1, complete // 2) * page_size - 1]
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    value[2, :, int(lengths[2]) // page_size :] = float("-inf")
    got = top_pages(value.float(), lengths, page_size, slots)
    expected = top_pages_reference(value.float(), lengths, page_size, slots)
    assert torch.equal(got, expected)
    for row in range(3):
        total = -(-int(lengths[row]) // page_size)
        for head in range(2):
            pages = got[row, head].tolist()
            used = [page for page in pages if page >= 0]
            assert used == sorted(set(used))
            assert len(used) == min(slots, total)
            assert {0, total - 1} <= set(used)


def test_top_pages_with_nan_and_infinite_values():
    value = torch.tensor([[[0.5, float("-inf"), 0.5, float("nan"), 0.1, float("-inf"), 0.2, 0.3]]], device=DEVICE)
    lengths = torch.tensor([8 * 16], dtype=torch.int32, device=DEVICE)
    for slots in range(2, 10):
        got = top_pages(value, lengths, 16, slots)
        assert torch.equal(got, top_pages_reference(value, lengths, 16, slots))
    assert top_pages(value, lengths, 16, 3)[0, 0].tolist() == [0, 3, 7]


@pytest.mark.parametrize(("head_dim", "dtype"), GRID, ids=GRID_IDS)
@pytest.mark.parametrize(
    ("group", "slots", "page_size"), [(1, 2, 16), (3, 9, 16), (8, 64, 16), (16, 5, 32), (7, 40, 4), (4, 6, 64)]
)
def test_attend(rng, head_dim, dtype, group, slots, page_size):
    batch, heads = 2, 2
    total = slots + 3
    capacity = total * page_size
    keys, values = (randn(rng, batch, heads, capacity, head_dim, dtype=dtype) for _ in range(2))
    query = randn(rng, batch, heads * group, head_dim, dtype=dtype)
    lengths = torch.tensor([capacity - 3, 2 * page_size - 1], dtype=torch.int32, device=DEVICE)
    # What lies past a row's end must never matter.
    for row, length in enumerate(lengths.tolist()):
        keys[row, :, length:] = float("nan")
        values[row, :, length:] = float("nan")
    pages = torch.full((batch, heads, slots), -1, dtype=torch.int32)
    for head in range(heads):
        others = torch.randperm(total - 1, generator=rng)[: slots - 1].sort().values
        pages[0, head] = torch.cat([others, torch.tensor([total - 1])])
        pages[1, head, :2] = torch.tensor([0, 1])
    pages = pages.to(DEVICE)
    scaling = head_dim**-0.5
    got = attend(query, keys, values, pages, lengths, page_size, scaling)
    assert got.dtype == dtype

    expected = torch.empty(batch, heads * group, head_dim, dtype=torch.float64)
    baseline_error = 0.0
    for row, head in itertools.product(range(batch), range(heads)):
        tokens = [
            page * page_size + i
            for page in pages[row, head].tolist()
            if page >= 0
            for i in range(page_size)
            if page * page_size + i < int(lengths[row])
        ]
        q = query[row, head * group : (head + 1) * group]
        k, v = keys[row, head, tokens], values[row, head, tokens]
        exact = torch.softmax(q.double() @ k.double().T * scaling, dim=-1) @ v.double()
        plain = torch.softmax((q @ k.T) * scaling, dim=-1) @ v
        baseline_error = max(baseline_error, (plain.double() - exact).abs().max().item())
        expected[row, head * group : (head + 1) * group] = exact.cpu()
    error = (got.double().cpu() - expected).abs().max().item()
    cut = 0 if ON_GPU or dtype != torch.bfloat16 else 2**-7 * expected.abs().max().item()  # the interpreter truncates
    assert error <= 2 * baseline_error + cut + 1e-5, (error, baseline_error)
    reference = attend_reference(query, keys, values, pages, lengths, page_size, scaling)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("complete", "slots", "rows", "ties"),
    [
        (300, 8, 1, False),
        (300, 9, 2, True),
        (40, 64, 1, True),
        (2100, 34, 1, True),
        (48, 3, 1, False),
        (4200, 3, 2, True),
    ]
    # In the first of these the last group has the last page alone, and all groups fit.
    + [(1760, 100, 1, False), (9000, 128, 1, False), (8200, 128, 9, True), (33000, 128, 1, True)] * ON_GPU
    + [(70000, 100, 1, False)] * ON_GPU,
)
@pytest.mark.parametrize("head_dim", (64, 128, 256) if ON_GPU else (64,))
def test_programs_that_attend_choose_as_top_pages(rng, complete, slots, rows, ties, head_dim):
    """The choice inside of attention, of its own kernel on a GPU, is the exact one, equal values included."""
    n_kv_heads, group, page_size = 2, 3, 16
    capacity = complete + 1
    value = torch.rand(rows, n_kv_heads, complete, generator=rng) ** 8
    if ties:
        value = (value * 5).floor() / 5
        value[:, :, 7], value[:, :, 11], value[:, 0, 13] = float("nan"), float("inf"), -float("inf")
    value = value.to(DEVICE)
    counts = torch.randint(1, complete * page_size, (rows + 1,), generator=rng, dtype=torch.int32).to(DEVICE)
    counts[0] = complete * page_size + 3
    lengths = counts[:-1] + 1
    keys, values = (randn(rng, rows, n_kv_heads, capacity * page_size, head_dim, dtype=torch.bfloat16) for _ in "kv")
    query = randn(rng, rows, n_kv_heads * group, head_dim, dtype=torch.bfloat16)
    pages = top_pages(value, lengths, page_size, slots)
    expected = attend(query, keys, values, pages, lengths, page_size, 0.3).float()
    ranked = select_triton.rank_pages(value, lengths, page_size, slots, counts)
    out, lse = attend_triton.attend_splits(query, keys, values, ranked, lengths, page_size, 0.3, slots=slots)
    weight = torch.softmax(lse, dim=1)[..., None]
    out = (weight * out).sum(1).unflatten(0, (rows, n_kv_heads)).flatten(1, 2)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-3)


def test_attend_strided_query_and_empty_row(rng):
    keys, values = (randn(rng, 2, 1, 64, 64) for _ in range(2))
    query = randn(rng, 2, 4, 3, 64)[:, :, 1]  # as attention slices one token of several
    assert not query.is_contiguous()
    pages = torch.tensor([[[0, 2, 3]], [[-1, -1, -1]]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([60, 0], dtype=torch.int32, device=DEVICE)
    got = attend(query, keys, values, pages, lengths, 16, 0.125)
    torch.testing.assert_close(got, attend_reference(query, keys, values, pages, lengths, 16, 0.125))
    assert (got[1] == 0).all()


@pytest.mark.parametrize(("head_dim", "dtype"), GRID, ids=GRID_IDS)
@pytest.mark.parametrize(
    ("rank", "bits", "page_size", "group", "slots", "limits"),
    [
        (4, 4, 16, 8, 3, {}),
        (3, 8, 4, 3, 3, {"_GROUPS": (2,)}),
        (8, 4, 16, 1, 16, {}),
        (4, 4, 8, 2, 3, {"_MOST_BESIDE": 0, "_GROUPS": (2,)}),
        (2, 4, 8, 2, 3, {"_MOST_IN_REGISTERS": 0}),
    ],
    ids=["one by one", "in groups", "all", "before", "in memory"],
)
def test_decode_step(rng, monkeypatch, head_dim, dtype, rank, bits, page_size, group, slots, limits):
    """Step by step as the other operations, one after the other: outputs, tokens, summaries and counts."""
    select = importlib.import_module("locks_hf.kernels.select.triton")
    for name, value in limits.items():
        monkeypatch.setattr(select, name, value)
    layout = SummaryLayout(head_dim, rank, page_size, bits)
    batch, heads, capacity = 3, 2, 8 * page_size
    start = [5 * page_size - 2, 2 * page_size - 1, 8 * page_size - 1]  # a page ends in each row; the last has no room
    pages = low_rank_pages(rng, 6 + batch * heads * 8, page_size, head_dim, torch.float32)[6:] * 0.3
    keys = pages.to(dtype).unflatten(0, (batch, heads, 8)).flatten(2, 3).contiguous()
    values = randn(rng, batch, heads, capacity, head_dim, dtype=dtype)
    pages, ended = keys.view(-1, page_size, head_dim), 0
    summaries = {name: a.unflatten(0, (batch, heads, -1)) for name, a in summarize(pages, layout).items()}
    counts = torch.tensor([*start, 8 * page_size], dtype=torch.int32, device=DEVICE)
    state = (keys, values, summaries, counts)
    twin = (keys.clone(), values.clone(), {name: a.clone() for name, a in summaries.items()}, counts.clone())
    for step in range(3):
        query = randn(rng, batch, heads * group, 3, head_dim, dtype=dtype)[:, :, 1]
        key, value = randn(rng, 2, batch, heads, 1, head_dim, dtype=dtype)[:, :, :, 0]
        real = None if step == 0 else torch.tensor([True, step == 2, True], device=DEVICE)
        arguments = (layout, True, "share", slots, head_dim**-0.5)
        before = counts[:batch].clone()
        got = decode_step(query, key, value, real, *state, *arguments)
        expected = decode_step_reference(query, key, value, real, *twin, *arguments)
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert got[2].isnan().all().item() == (step > 0)
        assert got[:2].isfinite().all()
        assert not got[1].any() if step == 1 else got[1].any()
        assert all(torch.equal(state[i], twin[i]) for i in (0, 1, 3))
        ends = (counts[:batch] % page_size == 0) & (counts[:batch] > before) & (counts[:batch] <= capacity)
        made = torch.zeros(batch, heads, 8, dtype=torch.bool, device=DEVICE)
        for row in ends.nonzero().flatten():
            made[row, :, counts[row] // page_size - 1] = True
        ended += made.sum().item()
        assert_as_good(summaries, twin[2], pages, layout, made.flatten())
        for name, array in summaries.items():
            twin[2][name].copy_(array)
    assert counts.tolist() == [start[0] + 3, start[1] + 2, start[2] + 3, 8 * page_size + 3]
    assert ended == batch * heads


@pytest.mark.parametrize("excess", [1, 17, 1000])
def test_counts_past_the_end_are_taken_as_the_end(rng, excess):
    """On a GPU nothing checks them before: memory past the end must not be touched, so it is poisoned here."""
    from locks_hf.kernels.attend.triton import attend_triton
    from locks_hf.kernels.score.triton import score_triton
    from locks_hf.kernels.select.triton import combine_triton, top_pages_triton

    layout, held, room = SummaryLayout(64, 4), 5, 90
    query, keys, values = randn(rng, 1, 4, 64), randn(rng, 1, 1, room * 16, 64), randn(rng, 1, 1, room * 16, 64)
    summaries = random_summaries(rng, layout, 1, 1, room)
    summaries["token_scales"][:, :, held:], summaries["scales"][:, :, held:] = float("nan"), float("nan")
    keys[:, :, held * 16 :], values[:, :, held * 16 :] = float("nan"), float("nan")
    keys, values = keys[:, :, : held * 16], values[:, :, : held * 16]
    exact, more = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (held, held + excess))
    lse = score_triton(query, summaries, exact, held, layout, 0.125)
    assert torch.equal(score_triton(query, summaries, more, held, layout, 0.125), lse)
    for rule in ("share", "max", "mass"):
        value = combine_triton(lse, exact, rule)
        assert torch.equal(combine_triton(lse, more, rule), value)
    pages = top_pages_triton(value, exact * 16 + 15, 16, 4)
    assert torch.equal(top_pages_triton(value, more * 16, 16, 4), pages)
    pages = torch.arange(held + 1, dtype=torch.int32, device=DEVICE).expand(1, 1, -1)
    expected = attend_reference(query, keys, values, pages, exact * 16, 16, 0.125)
    torch.testing.assert_close(attend_triton(query, keys, values, pages, more * 16, 16, 0.125), expected)


def test_kernels_really_ran(monkeypatch):
    """Dispatch reaches the kernels here: otherwise the tests above compare the reference with itself."""
    assert backend.use_triton(torch.device(DEVICE))
    monkeypatch.setenv("LOCKS_KERNELS", "reference")
    assert not backend.use_triton(torch.device(DEVICE))
