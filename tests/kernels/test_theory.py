"""What the paper proves and what the summaries promise, as properties of the references.

The formulas are written out again here, in float64 and with plain loops where that is clearest; nothing of the package
is used to check itself.
"""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from locks_hf.kernels import SummaryLayout, attend, combine, score, summarize, top_pages
from locks_hf.kernels.layout import pack_codes, unpack_codes
from locks_hf.kernels.select import combine_reference, top_pages_reference
from locks_hf.kernels.summarize.reference import page_factors, quantize, refit_coefficients
from locks_hf.selectors.oracle import exact_page_lse
from locks_hf.selectors.quest import envelope_score

several = settings(max_examples=60, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def generator(seed):
    return torch.Generator().manual_seed(seed)


# Pages of many kinds


def gaussian(g, n, size, dim):
    return torch.randn(n, size, dim, generator=g, dtype=torch.float64)


def offset(g, n, size, dim):
    return gaussian(g, n, size, dim) + 5 * torch.randn(n, 1, dim, generator=g, dtype=torch.float64)


def decaying(g, n, size, dim):
    """A spectrum that falls fast, as keys have."""
    scale = 2.0 ** -torch.arange(dim, dtype=torch.float64)
    mix = torch.randn(dim, dim, generator=g, dtype=torch.float64)
    return (gaussian(g, n, size, dim) * scale) @ mix


def duplicates(g, n, size, dim):
    return gaussian(g, n, 2, dim)[:, torch.arange(size) % 2]


def constant(g, n, size, dim):
    return gaussian(g, n, 1, dim).expand(n, size, dim).clone()


def zeros(g, n, size, dim):
    return torch.zeros(n, size, dim, dtype=torch.float64)


def outlier(g, n, size, dim):
    keys = gaussian(g, n, size, dim)
    keys[:, size // 2, dim // 3] = 6e4
    return keys


def outlier_token(g, n, size, dim):
    keys = gaussian(g, n, size, dim)
    keys[:, 0] *= 1e4
    return keys


def extremes(g, n, size, dim):
    """The largest fp16 of either sign."""
    return 65504.0 * (torch.randint(0, 2, (n, size, dim), generator=g).double() * 2 - 1)


def tiny(g, n, size, dim):
    """Around the smallest fp16 numbers."""
    return gaussian(g, n, size, dim) * 2.0**-23


KINDS = (gaussian, offset, decaying, duplicates, constant, zeros, outlier, outlier_token, extremes, tiny)
ORDINARY = (gaussian, offset, decaying, duplicates)
shapes = st.sampled_from([(4, 8), (16, 8), (16, 64), (32, 96), (16, 128)])


def log_sum_exp(values):
    top = max(values)
    return top + math.log(sum(math.exp(value - top) for value in values)) if top > -math.inf else top


def exact_lse(query, page, scaling):
    """Eq. 1: log-sum-exp of a page's logits; query ``(d,)``, page ``(P, d)``."""
    return log_sum_exp([float(query @ key) * scaling for key in page])


def estimated_lse(query, centroid, coefficients, basis, scaling):
    """Eq. 2 from the factors of one page: ``(d,)``, ``(P, r)``, ``(r, d)``."""
    projected = basis @ query
    inner = [float(projected @ row) * scaling for row in coefficients]
    return float(query @ centroid) * scaling + log_sum_exp(inner)


# Theorem 1


@several
@given(seed=seeds, shape=shapes, kind=st.sampled_from(KINDS), data=st.data())
def test_theorem_1_i_score_error(seed, shape, kind, data):
    size, dim = shape
    rank = data.draw(st.integers(1, min(size - 1, dim)))
    g = generator(seed)
    page = kind(g, 1, size, dim)[0]
    query = torch.randn(dim, generator=g, dtype=torch.float64) * data.draw(st.sampled_from((0.1, 1.0, 10.0)))
    scaling = dim**-0.5
    centroid, coefficients, basis = page_factors(page, rank)
    error = abs(estimated_lse(query, centroid, coefficients, basis, scaling) - exact_lse(query, page, scaling))

    centred = page - page.mean(0)
    singular = torch.cat([torch.linalg.svdvals(centred), torch.zeros(1, dtype=torch.float64)])
    kept = int((basis.norm(dim=1) > 0).sum())  # fewer than the rank only where the page has no more
    outside = query - basis.T @ (basis @ query)
    rounding = 1e-10 * float(query.norm() * page.norm(dim=1).max()) * scaling + 1e-12
    assert error <= float(outside.norm() * singular[kept]) * scaling + rounding
    # The step before it in the proof, which is tighter.
    rest = centred - centred @ basis.T @ basis
    assert error <= float((rest @ outside).abs().max()) * scaling + rounding


@several
@given(seed=seeds, shape=shapes, kind=st.sampled_from(KINDS), data=st.data())
def test_the_basis_is_the_best_of_its_rank(seed, shape, kind, data):
    """Corollary 1: orthonormal columns that leave only the discarded singular values."""
    size, dim = shape
    rank = data.draw(st.integers(1, min(size - 1, dim)))
    page = kind(generator(seed), 1, size, dim)[0]
    centroid, coefficients, basis = page_factors(page, rank)
    assert basis.isfinite().all()
    centred = page - page.mean(0)
    singular = torch.linalg.svdvals(centred)
    true_rank = int((singular > 1e-6 * singular[0]).sum()) if singular[0] > 1e-12 * page.abs().max() else 0
    norms = basis.norm(dim=1)
    kept = int((norms > 0).sum())
    assert kept >= min(rank, true_rank)
    # Through the Gram matrix a direction has the digits that its share of the variance leaves it.
    digits = 1e-9 if kept == 0 else max(1e-9, 1e-15 * float(singular[0] / singular[kept - 1]) ** 2)
    torch.testing.assert_close(basis[:kept] @ basis[:kept].T, torch.eye(kept, dtype=torch.float64), rtol=0, atol=digits)
    torch.testing.assert_close(centroid, page.mean(0))
    torch.testing.assert_close(coefficients, centred @ basis.T)
    left = (centred - coefficients @ basis).square().sum()
    assert left <= singular[rank:].square().sum() + 1e-9 * centred.square().sum() + 1e-18 * page.square().sum()


def instance(seed, kind, *, n_pages, size, dim, group):
    """Pages ``(J, P, d)``, values, queries ``(G, d)`` and exact scores ``(G, J)`` of one KV head."""
    g = generator(seed)
    pages = kind(g, n_pages, size, dim)
    values = torch.randn(n_pages, size, dim, generator=g, dtype=torch.float64)
    queries = torch.randn(group, dim, generator=g, dtype=torch.float64) * 2
    scaling = dim**-0.5
    exact = torch.tensor([[exact_lse(q, page, scaling) for page in pages] for q in queries], dtype=torch.float64)
    return pages, values, queries, exact, scaling


def best_coverage(exact, slots):
    """The largest group-mean mass of any page set of that size with the first and the last page, by trying them all."""
    share = exact.softmax(-1).mean(0)
    n = len(share)
    forced = {0, n - 1}
    rest = [page for page in range(n) if page not in forced]
    sets = itertools.combinations(rest, min(slots, n) - len(forced))
    return max(float(share[sorted(forced | set(chosen))].sum()) for chosen in sets)


def output_error(pages, values, queries, chosen, scaling):
    """Mean distance over the group between attention over the chosen pages and over all."""
    total = 0.0
    for query in queries:
        weights = ((pages.flatten(0, 1) @ query) * scaling).softmax(0)
        full = weights @ values.flatten(0, 1)
        some = ((pages[chosen].flatten(0, 1) @ query) * scaling).softmax(0) @ values[chosen].flatten(0, 1)
        total += float((full - some).norm())
    return total / len(queries)


@several
@given(
    seed=seeds,
    kind=st.sampled_from(ORDINARY),
    rank=st.integers(1, 7),
    group=st.sampled_from((1, 2, 4)),
    slots=st.integers(2, 5),
    n_pages=st.integers(5, 8),
)
def test_theorem_1_ii_and_iii_coverage_and_output_error(seed, kind, rank, group, slots, n_pages):
    pages, values, queries, exact, scaling = instance(seed, kind, n_pages=n_pages, size=8, dim=16, group=group)
    factors = [page_factors(page, rank) for page in pages]
    estimated = torch.tensor([[estimated_lse(q, *f, scaling) for f in factors] for q in queries], dtype=torch.float64)
    n = torch.tensor([n_pages])
    value = combine_reference(estimated[None, None], n, "share")
    chosen = top_pages_reference(value, n * 8, 8, slots)[0, 0].long()
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert {0, n_pages - 1} <= set(chosen.tolist())

    eta = float((estimated - exact).abs().max())
    coverage = float(exact.softmax(-1).mean(0)[chosen].sum())
    best = best_coverage(exact, slots)
    assert coverage >= math.exp(-4 * eta) * best - 1e-12
    radius = float(values.flatten(0, 1).norm(dim=1).max())
    error = output_error(pages, values, queries, chosen, scaling)
    assert error <= 2 * radius * (1 - coverage) + 1e-9
    assert error <= 2 * radius * (1 - math.exp(-4 * eta) * best) + 1e-9
    if rank == 7:  # a centred page of 8 tokens has no higher rank
        assert eta < 1e-9
        assert coverage == pytest.approx(best, abs=1e-9)


@several
@given(
    seed=seeds,
    kind=st.sampled_from(ORDINARY),
    rank=st.integers(1, 7),
    basis_bits=st.sampled_from((2, 4, 8, 16)),
    refit=st.booleans(),
    group=st.sampled_from((1, 3)),
    slots=st.integers(2, 5),
)
def test_theorem_1_ii_and_iii_hold_for_packed_summaries_with_their_own_error(
    seed, kind, rank, basis_bits, refit, group, slots
):
    """Steps 2 to 4 of the proof use nothing of the scores but how far they are off."""
    pages, values, queries, exact, scaling = instance(seed, kind, n_pages=8, size=8, dim=16, group=group)
    layout = SummaryLayout(16, rank, 8, basis_bits)
    summaries = {name: a[None, None] for name, a in summarize(pages.float(), layout, refit).items()}
    n = torch.tensor([8], dtype=torch.int32)
    lse = score(queries.float()[None], summaries, n, 8, layout, scaling)
    chosen = top_pages(combine(lse, n), n * 8, 8, slots)[0, 0].long()
    eta = float((lse[0, 0].double() - exact).abs().max()) + 1e-5
    coverage = float(exact.softmax(-1).mean(0)[chosen].sum())
    best = best_coverage(exact, slots)
    assert coverage >= math.exp(-4 * eta) * best
    radius = float(values.flatten(0, 1).norm(dim=1).max())
    assert output_error(pages, values, queries, chosen, scaling) <= 2 * radius * (1 - coverage) + 1e-9


@several
@given(seed=seeds, rank=st.integers(1, 6), extra=st.integers(0, 3), dim=st.sampled_from((8, 32, 64)))
def test_a_rank_that_covers_the_page_is_exact(seed, rank, extra, dim):
    g = generator(seed)
    centroid = 3 * torch.randn(dim, generator=g, dtype=torch.float64)
    spread = torch.randn(16, rank, generator=g, dtype=torch.float64)
    page = centroid + spread @ torch.randn(rank, dim, generator=g, dtype=torch.float64)
    factors = page_factors(page, min(rank + extra, dim))
    torch.testing.assert_close(factors[0] + factors[1] @ factors[2], page, rtol=1e-9, atol=1e-9)
    if extra and rank + extra <= dim:
        assert (factors[2][rank:] == 0).all()
    for query in torch.randn(3, dim, generator=g, dtype=torch.float64):
        assert estimated_lse(query, *factors, 0.3) == pytest.approx(exact_lse(query, page, 0.3), abs=1e-9)


# Proposition 1 and Lemma 2


@several
@given(
    seed=seeds, dim=st.sampled_from((8, 16, 64)), width=st.integers(1, 7), spread=st.sampled_from((5.0, 50.0, 500.0))
)
def test_proposition_1_a_shared_basis_is_blind_and_a_page_local_one_is_not(seed, dim, width, spread):
    g = generator(seed)
    shared = torch.randn(dim, width, generator=g, dtype=torch.float64)
    unit = torch.randn(dim, generator=g, dtype=torch.float64)
    q, _ = torch.linalg.qr(shared)
    unit = unit - q @ (q.T @ unit)
    unit = unit / unit.norm()
    plain = torch.zeros(16, dim, dtype=torch.float64)
    wide = plain.clone()
    wide[3], wide[11] = spread * unit, -spread * unit
    # All that shared summaries hold agrees...
    torch.testing.assert_close(wide.mean(0), plain.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(wide @ shared, plain @ shared, rtol=0, atol=1e-9)
    # ... while the pages' masses part, and a basis of one column per page knows it.
    scaling = dim**-0.5
    gap = math.log(14 + 2 * math.cosh(spread * scaling)) - math.log(16)
    assert exact_lse(unit, wide, scaling) - exact_lse(unit, plain, scaling) == pytest.approx(gap, rel=1e-9)
    for page in (plain, wide):
        factors = page_factors(page, 1)
        assert estimated_lse(unit, *factors, scaling) == pytest.approx(exact_lse(unit, page, scaling), rel=1e-9)
    # The packed summary of one column sees most of it.
    layout = SummaryLayout(dim, 1)
    packed = {name: a[None, None] for name, a in summarize(torch.stack([plain, wide]).float(), layout).items()}
    lse = score(unit.float()[None, None], packed, torch.tensor([2]), 2, layout, scaling)[0, 0, 0]
    assert float(lse[0]) == pytest.approx(math.log(16), abs=1e-5)
    assert float(lse[1] - lse[0]) == pytest.approx(gap, rel=0.1, abs=0.1)


@several
@given(seed=seeds, dim=st.sampled_from((8, 64)), size=st.sampled_from((4, 16)), t=st.sampled_from((1.0, 30.0, 1000.0)))
def test_lemma_2_pages_of_equal_extremes_have_equal_envelopes_and_any_gap_in_mass(seed, dim, size, t):
    apart, together = torch.zeros(2, size, dim, dtype=torch.float64)
    together[0, :2], together[1, :2] = torch.tensor([t, t]), torch.tensor([-t, -t])
    apart[0, :2], apart[1, :2] = torch.tensor([t, -t]), torch.tensor([-t, t])
    pages = torch.stack([apart, together]).float()
    low, high = pages.amin(1)[None, None], pages.amax(1)[None, None]
    assert torch.equal(low[:, :, 0], low[:, :, 1])
    assert torch.equal(high[:, :, 0], high[:, :, 1])
    queries = torch.randn(1, 5, dim, generator=generator(seed))
    envelope = envelope_score(queries, low, high)[0, 0]
    assert torch.equal(envelope[:, 0], envelope[:, 1])
    query = torch.zeros(dim, dtype=torch.float64)
    query[:2] = 2**-0.5
    scaling = dim**-0.5
    gap = exact_lse(query, together, scaling) - exact_lse(query, apart, scaling)
    assert exact_lse(query, apart, scaling) == pytest.approx(math.log(size))
    assert gap >= t * 2**0.5 * scaling - math.log(size) - 1e-9


@several
@given(seed=seeds, kind=st.sampled_from(ORDINARY), shape=shapes)
def test_the_envelope_bounds_every_logit(seed, kind, shape):
    g = generator(seed)
    pages = kind(g, 3, *shape).float()
    queries = torch.randn(2, shape[1], generator=g)
    bound = envelope_score(queries[None], pages.amin(1)[None, None], pages.amax(1)[None, None])[0, 0]
    for i, query in enumerate(queries.double()):
        for j, page in enumerate(pages.double()):
            expected = sum(
                max(float(query[c] * page[:, c].max()), float(query[c] * page[:, c].min())) for c in range(shape[1])
            )
            assert float(bound[i, j]) == pytest.approx(expected, rel=1e-4, abs=1e-3)
            assert float((page @ query).max()) <= float(bound[i, j]) + 1e-3 * (1 + abs(expected))


# Packed summaries


@pytest.mark.parametrize(
    ("rank", "page_size", "basis_bits", "expected"),
    (
        (8, 16, 4, 818),
        (4, 16, 4, 490),
        (2, 16, 4, 326),
        (8, 16, 16, 8 * 128 * 2 + 16 * 8 + 128 + 2 * 17),
        (8, 16, 8, 8 * 128 + 16 * 8 + 128 + 2 * 25),
        (8, 16, 2, 8 * 32 + 16 * 8 + 128 + 2 * 25),
        (4, 32, 4, 4 * 64 + 32 * 4 + 128 + 2 * 37),
    ),
)
def test_summaries_take_exactly_the_bytes_of_the_paper(rank, page_size, basis_bits, expected):
    layout = SummaryLayout(128, rank, page_size, basis_bits)
    assert layout.bytes_per_page == expected
    summaries = summarize(torch.randn(3, page_size, 128), layout)
    assert sum(array.nbytes for array in summaries.values()) == 3 * expected
    assert {name: (tuple(a.shape[1:]), a.dtype) for name, a in summaries.items()} == layout.fields()
    assert sum(array.nbytes for array in layout.empty(5).values()) == 5 * expected
    if basis_bits == 4:
        assert expected == 128 * rank // 2 + page_size * rank + 128 + 2 * (rank + page_size + 1)


@several
@given(seed=seeds, bits=st.sampled_from((2, 4)), dim=st.sampled_from((8, 16, 96, 256)))
def test_packing_round_trip_and_byte_order(seed, bits, dim):
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 2, dim), generator=generator(seed))
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 2, dim * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes.float())
    # Part p of byte i is channel p * d / n + i, stored with a bias.
    parts = 8 // bits
    for part in range(parts):
        for i in range(dim // parts):
            stored = (int(packed[1, 1, i]) >> (bits * part)) % 2**bits
            assert stored - 2 ** (bits - 1) == int(codes[1, 1, part * dim // parts + i])


def dequantized(summaries, layout):
    """The reading of the packed arrays, written out again: centroid ``(d,)``, ``(P, r)``, ``(r, d)`` of page 0."""
    rank, dim, bits = layout.rank, layout.head_dim, layout.basis_bits
    scales = summaries["scales"][0].double()
    centroid = summaries["centroid"][0].double() * scales[0]
    coefficients = summaries["coefficients"][0].double() * summaries["token_scales"][0].double()[:, None]
    stored = summaries["basis"][0]
    if bits == 16:
        return centroid, coefficients, stored.double()
    basis = torch.zeros(rank, dim, dtype=torch.float64)
    for row in range(rank):
        for channel in range(dim):
            if bits == 8:
                code = int(stored[row, channel])
            else:
                width = dim * bits // 8
                code = (int(stored[row, channel % width]) >> (bits * (channel // width))) % 2**bits - 2 ** (bits - 1)
            assert abs(code) <= 2 ** (bits - 1) - 1
            basis[row, channel] = code * float(scales[1 + row])
    return centroid, coefficients, basis


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=seeds,
    kind=st.sampled_from(ORDINARY),
    rank=st.integers(1, 7),
    basis_bits=st.sampled_from((2, 4, 8, 16)),
    refit=st.booleans(),
)
def test_score_is_equation_2_over_the_packed_values(seed, kind, rank, basis_bits, refit):
    g = generator(seed)
    pages = kind(g, 4, 8, 16).float()
    layout = SummaryLayout(16, rank, 8, basis_bits)
    summaries = summarize(pages, layout, refit)
    query = torch.randn(2, 2, 16, generator=g) * 2
    # Two rows of two heads over the same four pages; the second row has three of them.
    tiled = {name: a.expand(2, 2, *a.shape) for name, a in summaries.items()}
    queries = query.repeat_interleave(2, 1).reshape(2, 4, 16)
    lse = score(queries, tiled, torch.tensor([4, 3]), 4, layout, 0.4)
    assert lse.shape == (2, 2, 2, 4)
    assert lse.dtype == torch.float32
    assert (lse[1, ..., 3] == -math.inf).all()
    for row, head, j in itertools.product(range(2), range(2), range(4)):
        if row == 1 and j == 3:
            continue
        factors = dequantized({name: a[j : j + 1] for name, a in summaries.items()}, layout)
        for member in range(2):
            expected = estimated_lse(queries[row, 2 * head + member].double(), *factors, 0.4)
            assert float(lse[row, head, member, j]) == pytest.approx(expected, rel=1e-4, abs=1e-3)


def next_bf16(value):
    """The smallest bf16 that is not below a positive value."""
    candidate = torch.tensor(value, dtype=torch.float64).to(torch.bfloat16)
    if candidate.double() < value:
        candidate = torch.nextafter(candidate, torch.tensor(math.inf, dtype=torch.bfloat16))
    return candidate


@several
@given(
    seed=seeds,
    bits=st.sampled_from((2, 4, 8)),
    size=st.integers(1, 40),
    magnitude=st.sampled_from((1e-6, 1e-3, 1.0, 77.0, 6e4)),
)
def test_quantisation_is_symmetric_and_never_off_by_more_than_half_a_step(seed, bits, size, magnitude):
    values = (torch.randn(3, size, generator=generator(seed)) * magnitude).float()
    codes, scale = quantize(values, bits)
    assert scale.dtype == torch.bfloat16
    assert codes.abs().max() <= 2 ** (bits - 1) - 1
    assert (codes == codes.round()).all()
    error = (codes.double() * scale.double() - values.double()).abs()
    assert (error <= scale.double() / 2 * (1 + 1e-6)).all()
    for row in range(3):
        largest = float(values[row].abs().max() / (2 ** (bits - 1) - 1))
        assert float(scale[row]) == float(next_bf16(largest))
    mirrored, same = quantize(-values, bits)
    assert torch.equal(mirrored, -codes)
    assert torch.equal(same, scale)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=seeds, kind=st.sampled_from((gaussian, offset)), rank=st.integers(1, 7), bits=st.sampled_from((2, 4, 8)))
def test_the_papers_rule_is_the_quantised_svd(seed, kind, rank, bits):
    """``C = D V`` with one scale per column of V, per row of C and for the centroid, from LAPACK's own SVD."""
    page = kind(generator(seed), 1, 8, 16).float()
    layout = SummaryLayout(16, rank, 8, bits)
    centroid, coefficients, basis = dequantized(summarize(page, layout, refit=False), layout)

    exact = page[0].double()
    mean = exact.mean(0)
    _, singular, right = torch.linalg.svd(exact - mean, full_matrices=False)
    assume(bool((singular[:7].diff() < -1e-3 * singular[0]).all()))  # distinct: the vectors are unique but for sign
    codes, scale = quantize(mean, 8)
    torch.testing.assert_close(centroid, (codes * scale).double(), rtol=0, atol=1e-6 * float(mean.abs().max()))
    top = 2 ** (bits - 1) - 1
    for column in range(rank):
        vector = right[column]
        step = float(next_bf16(float(vector.abs().max()) / top))
        sign = torch.sign(vector @ basis[column])
        off = (sign * vector / step - basis[column] / step).abs()
        assert float(off.max()) <= 0.5 + 1e-4
    signs = torch.sign((right[:rank] * basis).sum(1))
    projected = (exact - mean) @ (right[:rank] * signs[:, None]).T
    for token in range(8):
        step = float(next_bf16(float(projected[token].abs().max()) / 127))
        assert float((projected[token] - coefficients[token]).abs().max()) <= step * (0.5 + 1e-3)


@several
@given(
    seed=seeds,
    shape=shapes,
    kind=st.sampled_from((*ORDINARY, outlier_token)),
    bits=st.sampled_from((2, 4, 8)),
    data=st.data(),
)
def test_refit_is_never_worse_than_the_papers_rule(seed, shape, kind, bits, data):
    """Before the coefficients are quantised, over the same quantised centroid and basis."""
    size, dim = shape
    rank = data.draw(st.integers(1, min(size - 1, dim, 8)))
    page = kind(generator(seed), 1, size, dim)[0]
    centroid, coefficients, basis = page_factors(page, rank)
    codes, scale = quantize(centroid, 8)
    residual = page - (codes * scale.float()).double()
    codes, scale = quantize(basis, bits)
    used = (codes * scale.float()).double()
    refit = refit_coefficients(residual, used)
    paper_error = float((residual - coefficients @ used).norm())
    refit_error = float((residual - refit @ used).norm())
    assert refit_error <= paper_error * (1 + 1e-9)
    least = torch.linalg.lstsq(used.T, residual.T, driver="gelsd").solution.T
    least_error = float((residual - least @ used).norm())
    assert refit_error <= least_error + 1e-3 * float(residual.norm())


# Nothing is ever NaN or infinite


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=seeds,
    shape=shapes,
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=4),
    dtype=st.sampled_from(DTYPES),
    basis_bits=st.sampled_from((2, 4, 8, 16)),
    refit=st.booleans(),
    rule=st.sampled_from(("share", "max", "mass")),
    data=st.data(),
)
def test_no_finite_keys_give_a_nan_or_an_infinity(seed, shape, kinds, dtype, basis_bits, refit, rule, data):
    size, dim = shape
    rank = data.draw(st.integers(1, min(size - 1, dim, 9)))
    g = generator(seed)
    pages = torch.cat([kind(g, 2, size, dim) for kind in kinds]).to(dtype)
    assert pages.isfinite().all()
    n_pages = len(pages)
    layout = SummaryLayout(dim, rank, size, basis_bits)
    summaries = summarize(pages, layout, refit)
    for array in summaries.values():
        assert array.is_floating_point() is False or array.isfinite().all()
    packed = {name: a[None, None] for name, a in summaries.items()}
    queries = torch.randn(1, 3, dim, generator=g).to(dtype)
    n = torch.tensor([n_pages], dtype=torch.int32)
    lse = score(queries, packed, n, n_pages, layout, dim**-0.5)
    assert lse.isfinite().all()
    value = combine(lse, n, rule)
    assert not value.isnan().any()
    assert (value < math.inf).all()
    if rule == "share":
        # The logarithm of a mass has the digits of fp32, and so has the share.
        assert float(value.sum()) == pytest.approx(1.0, abs=1e-5 + 2.0**-23 * float(lse.abs().max()))
    chosen = top_pages(value, n * size, size, 3)[0, 0].tolist()
    assert len(set(chosen)) == 3
    assert chosen[0] == 0
    assert chosen[-1] == n_pages - 1
    keys = pages.reshape(1, 1, n_pages * size, dim)
    values = torch.randn(keys.shape, generator=g).to(dtype)
    out = attend(queries, keys, values, torch.tensor([[chosen]], dtype=torch.int32), n * size, size, dim**-0.5)
    assert out.isfinite().all()


@pytest.mark.parametrize("refit", (True, False))
@pytest.mark.parametrize("basis_bits", (2, 4, 8, 16))
@pytest.mark.parametrize("kind", (constant, zeros))
def test_a_page_without_variation_has_no_directions(kind, basis_bits, refit):
    page = kind(generator(0), 1, 16, 64).float()
    layout = SummaryLayout(64, 4, 16, basis_bits)
    centroid, coefficients, basis = dequantized(summarize(page, layout, refit), layout)
    assert (basis == 0).all()
    assert (coefficients == 0).all()
    step = float(page.abs().max()) / 127 * 1.01
    assert (centroid - page[0, 0]).abs().max() <= step / 2


@pytest.mark.parametrize("magnitude", (1e-44, 1e-38, 1e-20, 1e20, 1e36))
def test_fp32_keys_of_any_size_stay_finite(magnitude):
    pages = (gaussian(generator(1), 4, 16, 64) * magnitude).float()
    layout = SummaryLayout(64, 4)
    for refit in (True, False):
        summaries = summarize(pages, layout, refit)
        assert summaries["scales"].isfinite().all()
        query = torch.full((1, 1, 64), min(1.0, 1 / magnitude))
        packed = {name: a[None, None] for name, a in summaries.items()}
        assert score(query, packed, torch.tensor([4]), 4, layout, 0.1).isfinite().all()


@pytest.mark.parametrize("broken", (math.nan, math.inf, -math.inf))
def test_a_broken_key_marks_its_page_and_no_other(broken):
    pages = gaussian(generator(2), 3, 16, 64).float()
    whole = summarize(pages, SummaryLayout(64, 4))
    pages[1, 7, 3] = broken
    summaries = summarize(pages, SummaryLayout(64, 4))
    for name, array in summaries.items():
        assert torch.equal(array[[0, 2]], whole[name][[0, 2]])
    assert summaries["scales"].isnan().nonzero().tolist() == [[1, 0]]  # the scale of its centroid
    packed = {name: a[None, None] for name, a in summaries.items()}
    lse = score(torch.ones(1, 1, 64), packed, torch.tensor([3]), 3, SummaryLayout(64, 4), 0.1)
    assert lse[0, 0, 0].isnan().tolist() == [False, True, False]


def test_a_nan_counts_as_the_largest_value():
    value = torch.tensor([[[0.0, 1.0, math.nan, 2.0, 3.0]]])
    assert top_pages(value, torch.tensor([20]), 4, 3).tolist() == [[[0, 2, 4]]]


# Selection


def brute_combine(lse, n_pages, rule):
    """One row and head; lse is a list over the group of lists over pages."""
    values = []
    for page in range(len(lse[0])):
        if page >= n_pages:
            values.append(-math.inf)
            continue
        if rule == "mass":
            values.append(log_sum_exp([head[page] for head in lse]))
            continue
        shares = [math.exp(head[page] - log_sum_exp(head[:n_pages])) for head in lse]
        values.append(sum(shares) / len(shares) if rule == "share" else max(shares))
    return values


@several
@given(
    seed=seeds,
    rule=st.sampled_from(("share", "max", "mass")),
    group=st.integers(1, 5),
    n_pages=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    spread=st.sampled_from((0.1, 3.0, 80.0)),
)
def test_combine_rules_are_their_formulas(seed, rule, group, n_pages, spread):
    lse = torch.randn(len(n_pages), 2, group, max(n_pages), generator=generator(seed)) * spread
    result = combine(lse, torch.tensor(n_pages, dtype=torch.int32), rule)
    assert result.shape == (len(n_pages), 2, max(n_pages))
    for row, head in itertools.product(range(len(n_pages)), range(2)):
        expected = brute_combine(lse[row, head].double().tolist(), n_pages[row], rule)
        torch.testing.assert_close(
            result[row, head].double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-6
        )


def brute_top_pages(value, length, page_size, slots):
    """One row and head: value is a list over complete pages."""
    total = -(-length // page_size)
    forced = {0, total - 1} if total else set()
    others = [page for page in range(total) if page not in forced]
    rank = sorted(others, key=lambda page: (-(math.inf if math.isnan(value[page]) else value[page]), page))
    chosen = sorted([*forced, *rank[: max(0, slots - len(forced))]])
    return chosen + [-1] * (slots - len(chosen))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=seeds,
    page_size=st.sampled_from((4, 16)),
    slots=st.integers(2, 8),
    heads=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    distinct=st.integers(1, 9),
)
def test_top_pages_against_a_sort_with_many_ties(seed, page_size, slots, heads, lengths, distinct):
    numbers = torch.tensor((0.5, 0.0, -0.0, math.nan, -math.inf, 0.25, -1.0, math.inf, 7.0))
    shape = (len(lengths), heads, max(lengths) // page_size)
    value = numbers[torch.randint(0, distinct, shape, generator=generator(seed))]
    pages = top_pages(value, torch.tensor(lengths, dtype=torch.int32), page_size, slots)
    assert pages.shape == (len(lengths), heads, slots)  # one page set for all the query heads of a KV head
    assert pages.dtype == torch.int32
    for row, length in enumerate(lengths):
        for head in range(heads):
            assert pages[row, head].tolist() == brute_top_pages(value[row, head].tolist(), length, page_size, slots)


@several
@given(seed=seeds, length=st.integers(1, 200), page_size=st.sampled_from((4, 8, 16)), slots=st.integers(2, 12))
def test_exactly_the_slots_are_used_and_the_ends_are_among_them(seed, length, page_size, slots):
    value = torch.rand(2, 3, length // page_size, generator=generator(seed))
    pages = top_pages(value, torch.tensor([length, length], dtype=torch.int32), page_size, slots)
    total = -(-length // page_size)
    for chosen in pages.flatten(0, 1).tolist():
        used = [page for page in chosen if page >= 0]
        assert len(used) == len(set(used)) == min(slots, total)
        assert used == sorted(used)
        assert {0, total - 1} <= set(used)


@several
@given(seed=seeds, group=st.sampled_from((1, 4)), slots=st.integers(2, 6))
def test_share_averaging_of_exact_masses_gives_the_best_shared_set(seed, group, slots):
    """Corollary 3, through the oracle's exact scores."""
    g = generator(seed)
    keys = torch.randn(1, 1, 7 * 4, 16, generator=g)
    query = torch.randn(1, group, 16, generator=g) * 3
    n = torch.tensor([7], dtype=torch.int32)
    lse = exact_page_lse(query, keys, n, 4, 0.25)
    pages = keys[0, 0].unflatten(0, (7, 4)).double()
    exact = torch.tensor([[exact_lse(q, page, 0.25) for page in pages] for q in query[0].double()], dtype=torch.float64)
    torch.testing.assert_close(lse[0, 0].double(), exact, rtol=1e-4, atol=1e-4)
    chosen = top_pages(combine(lse, n), n * 4, 4, slots)[0, 0].long()
    coverage = float(exact.softmax(-1).mean(0)[chosen].sum())
    assert coverage == pytest.approx(best_coverage(exact, slots), abs=1e-5)


# Attention over chosen pages


@several
@given(
    seed=seeds,
    page_size=st.sampled_from((4, 8)),
    group=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    slots=st.integers(1, 6),
)
def test_attend_is_a_softmax_over_the_real_tokens_of_the_chosen_pages(seed, page_size, group, lengths, slots):
    g = generator(seed)
    rows, heads, dim, capacity = len(lengths), 2, 8, 32
    keys, values = torch.randn(2, rows, heads, capacity, dim, generator=g)
    query = torch.randn(rows, heads * group, dim, generator=g)
    pages = torch.full((rows, heads, slots), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        # What lies past the end of a row is undefined, and chosen pages come in any order with gaps between them.
        keys[row, :, length:], values[row, :, length:] = math.nan, math.inf
        for head in range(heads):
            existing = torch.randperm(max(1, -(-length // page_size)), generator=g)[:slots].int()
            where = torch.randperm(slots, generator=g)[: len(existing)]
            pages[row, head, where] = existing
    out = attend(query, keys, values, pages, torch.tensor(lengths, dtype=torch.int32), page_size, 0.3)
    assert out.shape == query.shape
    for row, head, member in itertools.product(range(rows), range(heads), range(group)):
        chosen = set(pages[row, head].tolist())
        tokens = [t for t in range(lengths[row]) if t // page_size in chosen]
        result = out[row, head * group + member].double()
        if not tokens:
            assert (result == 0).all()
            continue
        q = query[row, head * group + member].double()
        logits = [float(q @ keys[row, head, t].double()) * 0.3 for t in tokens]
        total = log_sum_exp(logits)
        expected = sum(
            math.exp(logit - total) * values[row, head, t].double() for logit, t in zip(logits, tokens, strict=True)
        )
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_attending_all_pages_is_dense_attention():
    g = generator(3)
    keys, values = torch.randn(2, 2, 2, 50, 16, generator=g)
    query = torch.randn(2, 6, 16, generator=g)
    pages = torch.arange(4, dtype=torch.int32).expand(2, 2, 4)
    out = attend(query, keys, values, pages, torch.tensor([50, 50], dtype=torch.int32), 16, 0.25)
    dense = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], keys, values, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(out, dense[:, :, 0], rtol=1e-5, atol=1e-5)
