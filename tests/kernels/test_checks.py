"""What the checked entry points of the kernels refuse."""

import pytest
import torch

from locks_hf.kernels import SummaryLayout, attend, backend, combine, decode_step, score, summarize, top_pages

LAYOUT = SummaryLayout(16, 4)
LENGTHS = torch.tensor([32, 20], dtype=torch.int32)
KEYS = torch.zeros(2, 3, 32, 16)
PAGES = torch.zeros(2, 3, 2, dtype=torch.int32)
QUERY = torch.zeros(2, 6, 16)


def summaries(layout=LAYOUT):
    return {name: array.expand(2, 3, *array.shape) for name, array in layout.empty(2).items()}


@pytest.mark.parametrize(
    ("keys", "layout", "message"),
    (
        (torch.zeros(5, 8, 16), LAYOUT, r"keys must be \(N, 16, 16\) for this layout, got \(5, 8, 16\)"),
        (torch.zeros(16, 16), LAYOUT, r"keys must be \(N, 16, 16\).*got \(16, 16\)"),
        (torch.zeros(5, 16, 32), LAYOUT, r"got \(5, 16, 32\)"),
        (torch.zeros(5, 16, 12), SummaryLayout(12, 4), "head_dim 12 has no kernel"),
        (torch.zeros(5, 16, 16).double(), LAYOUT, r"torch\.float64 have no kernel"),
        (torch.zeros(5, 16, 16), SummaryLayout(16, 16), "rank must be from 1 to 15 .* got 16"),
        (torch.zeros(5, 16, 8), SummaryLayout(8, 9), "rank must be from 1 to 8 .* head_dim 8, got 9"),
        (torch.zeros(5, 16, 16), SummaryLayout(16, 0), "got 0"),
    ),
)
def test_summarize(keys, layout, message):
    with pytest.raises(ValueError, match=message):
        summarize(keys, layout)


def test_summarize_of_no_pages_is_no_summaries():
    arrays = summarize(torch.zeros(0, 16, 16), LAYOUT)
    assert {name: tuple(array.shape) for name, array in arrays.items()} == {
        name: (0, *shape) for name, (shape, _) in LAYOUT.fields().items()
    }


@pytest.mark.parametrize(
    ("query", "held", "pages", "message"),
    (
        (QUERY[0], summaries(), 2, r"query must be \(B, heads, d\)"),
        (QUERY, LAYOUT.empty(2), 2, r"centroids \(B, H, capacity, d\), got \(2, 6, 16\) and \(2, 16\)"),
        (QUERY[:1], summaries(), 2, "does not fit summaries of 2 rows, 3 KV heads and head_dim 16"),
        (QUERY[:, :5], summaries(), 2, r"query \(2, 5, 16\) does not fit"),
        (QUERY[..., :8], summaries(), 2, r"query \(2, 6, 8\) does not fit"),
        (QUERY, summaries(), 3, "max_pages must be from 0 to the capacity 2, got 3"),
        (QUERY, summaries(), -1, "max_pages must be from 0 to the capacity 2, got -1"),
        (QUERY.double(), summaries(), 2, r"torch\.float64 have no kernel"),
    ),
)
def test_score(query, held, pages, message):
    with pytest.raises(ValueError, match=message):
        score(query, held, LENGTHS // 16, pages, LAYOUT, 1.0)


def test_no_pages_have_no_scores():
    lse = score(QUERY, summaries(), torch.zeros(2, dtype=torch.int32), 0, LAYOUT, 1.0)
    assert lse.shape == (2, 3, 2, 0)
    value = combine(lse, torch.zeros(2, dtype=torch.int32))
    assert value.shape == (2, 3, 0)
    assert top_pages(value, torch.tensor([5, 0], dtype=torch.int32), 16, 2).tolist() == [[[0, -1]] * 3, [[-1, -1]] * 3]


@pytest.mark.parametrize(
    ("lse", "rule", "message"),
    (
        (torch.zeros(1, 1, 1, 4), "mean", r"rule must be one of \('share', 'max', 'mass'\), got 'mean'"),
        (torch.zeros(1, 1, 4), "share", r"lse must be float32 \(B, H, G, J\), got torch\.float32 \(1, 1, 4\)"),
        (torch.zeros(1, 1, 1, 4).half(), "share", r"got torch\.float16"),
    ),
)
def test_combine(lse, rule, message):
    with pytest.raises(ValueError, match=message):
        combine(lse, torch.tensor([4]), rule)


@pytest.mark.parametrize(
    ("value", "slots", "message"),
    (
        (torch.zeros(1, 1, 4), 1, r"slots must be an int of at least 2 \(the first and the most recent page\), got 1"),
        (torch.zeros(1, 1, 4), 2.0, r"slots must be an int of at least 2 .*, got 2\.0"),
        (torch.zeros(1, 4), 2, r"value must be float32 \(B, H, J\), got torch\.float32 \(1, 4\)"),
        (torch.zeros(1, 1, 4).double(), 2, r"got torch\.float64"),
    ),
)
def test_top_pages(value, slots, message):
    with pytest.raises(ValueError, match=message):
        top_pages(value, torch.tensor([64]), 16, slots)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"values": KEYS[..., :8]}, r"keys and values must both be \(B, H, capacity, d\)"),
        ({"keys": KEYS[0], "values": KEYS[0]}, r"got \(3, 32, 16\) and \(3, 32, 16\)"),
        ({"query": QUERY[:, :5]}, r"query \(2, 5, 16\) does not fit keys of 2 rows, 3 KV heads, head_dim 16"),
        ({"query": QUERY[:1]}, r"query \(1, 6, 16\) does not fit"),
        ({"query": QUERY[:, None]}, r"does not fit keys"),
        ({"pages": PAGES[:1]}, r"pages must be \(2, 3, slots\), got \(1, 3, 2\)"),
        ({"pages": PAGES[..., 0]}, r"pages must be \(2, 3, slots\), got \(2, 3\)"),
        ({"query": QUERY.half()}, r"must share a dtype, got torch\.float16, torch\.float32 and torch\.float32"),
        ({"keys": KEYS.half()}, r"must share a dtype"),
    ),
)
def test_attend(changes, message):
    arguments = {"query": QUERY, "keys": KEYS, "values": KEYS, "pages": PAGES, **changes}
    with pytest.raises(ValueError, match=message):
        attend(**arguments, lengths=LENGTHS, page_size=16, scaling=1.0)


def test_counts_past_what_is_held():
    value, lse = torch.zeros(2, 3, 2), torch.zeros(2, 3, 2, 2)
    with pytest.raises(ValueError, match=r"lengths must be from 0 to 47, got \[48, 0\]"):
        top_pages(value, torch.tensor([48, 0]), 16, 2)
    with pytest.raises(ValueError, match=r"n_pages must be from 0 to 2, got \[3, 0\]"):
        combine(lse, torch.tensor([3, 0]))
    with pytest.raises(ValueError, match=r"n_pages must be from 0 to 1, got \[2, 1\]"):
        score(QUERY, summaries(), LENGTHS // 16, 1, LAYOUT, 1.0)
    with pytest.raises(ValueError, match=r"lengths must be from 0 to 32, got \[33, -1\]"):
        attend(QUERY, KEYS, KEYS, PAGES, torch.tensor([33, -1]), 16, 1.0)


def test_a_layout_of_other_bits():
    with pytest.raises(ValueError, match=r"basis_bits must be one of \(2, 4, 8, 16\), got 3"):
        SummaryLayout(16, 4, basis_bits=3)


def test_counts_pages_and_layouts_that_do_not_fit():
    layout = SummaryLayout(16, 4)
    summaries = {name: a.unflatten(0, (1, 2, 3)) for name, a in summarize(torch.randn(6, 16, 16), layout).items()}
    query, counts = torch.randn(1, 4, 16), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match="the summaries' basis must be"):
        score(query, summaries, counts, 3, SummaryLayout(16, 8), 1.0)
    with pytest.raises(ValueError, match=r"n_pages must be int32 \(1,\), one a row"):
        score(query, summaries, counts.expand(2), 3, layout, 1.0)
    keys = torch.randn(1, 2, 64, 16)
    pages = torch.zeros(1, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lengths must be int32 \(1,\), one a row"):
        attend(query, keys, keys, pages, torch.tensor([64, 64], dtype=torch.int32), 16, 1.0)
    with pytest.raises(ValueError, match="page_size must be a power of two from 4 to 64, got 12"):
        attend(query, keys, keys, pages, torch.tensor([64], dtype=torch.int32), 12, 1.0)
    with pytest.raises(ValueError, match=r"pages must be \(1, 2, slots\)"):
        attend(query, keys, keys, pages[..., :0], torch.tensor([64], dtype=torch.int32), 16, 1.0)
    with pytest.raises(ValueError, match="page_size must be a power of two from 4 to 64, got 128"):
        top_pages(torch.randn(1, 2, 3), counts, 128, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"slots": 1}, "slots must be an int of at least 2"),
        ({"slots": 3.0}, "slots must be an int of at least 2"),
        ({"rule": "foo"}, "rule must be one of"),
        ({"query": torch.zeros(1, 0, 16)}, "does not fit keys of 1 rows, 2 KV heads, head_dim 16"),
        ({"query": torch.zeros(1, 3, 16)}, "does not fit keys"),
        ({"counts": torch.zeros(3, dtype=torch.int32)}, r"counts must be int32 \(2,\)"),
        ({"counts": torch.tensor([-1, 0], dtype=torch.int32)}, "counts must not be negative"),
        ({"layout": SummaryLayout(16, 5)}, r"summaries\['basis'\] must be torch.uint8 \(1, 2, 4, 5, 8\)"),
        ({"summaries": {}}, r"summaries\['.*'\] must be .* got nothing"),
        ({"keys": torch.zeros(1, 2, 16, 64).mT}, "make them contiguous"),
    ),
)
def test_decode_step_changes_nothing_before_it_refuses(changes, message):
    layout = SummaryLayout(16, 4)
    keys = torch.zeros(1, 2, 64, 16)
    summaries = {name: a.unflatten(0, (1, 2, 4)) for name, a in summarize(torch.randn(8, 16, 16), layout).items()}
    arguments = {
        "query": torch.randn(1, 4, 16),
        "key": torch.randn(1, 2, 16),
        "value": torch.randn(1, 2, 16),
        "real": None,
        "keys": keys,
        "values": keys.clone(),
        "summaries": summaries,
        "counts": torch.tensor([40, 40], dtype=torch.int32),
        "layout": layout,
        "refit": True,
        "rule": "share",
        "slots": 2,
        "scaling": 1.0,
        **changes,
    }
    counts = arguments["counts"].clone()
    with pytest.raises(ValueError, match=message):
        decode_step(**arguments)
    assert torch.equal(arguments["counts"], counts) and not keys.any()


def test_launches_run_on_the_device_of_their_first_argument(monkeypatch):
    entered = []

    class Device:
        def __init__(self, device):
            entered.append(str(device))

        def __enter__(self):
            entered.append("in")

        def __exit__(self, *exception):
            entered.append("out")

    class OnGpu:
        device = torch.device("cuda:1")

    monkeypatch.setattr(torch.cuda, "device", Device)
    launch = backend.launching(lambda first, more: entered.append("launched") or more)
    assert launch(OnGpu(), 3) == 3
    assert entered == ["cuda:1", "in", "launched", "out"]
    assert launch(torch.ones(1), 4) == 4 and len(entered) == 5
