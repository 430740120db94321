import pytest
import torch
from transformers import DynamicCache

from locks_hf import LocksCache, patch
from locks_hf.selectors.oracle import exact_page_lse
from locks_hf.timing.fill import PAGE, fill_synthetic, prefill, random_tokens, synthetic_states

CPU = torch.device("cpu")


def fill(cache, rows=2, length=70, **changes):
    options = {"layers": 2, "batch": rows, "heads": 2, "length": length, "head_dim": 16, "seed": 3, **changes}
    fill_synthetic(cache, device=CPU, dtype=torch.float32, **options)
    return cache


def test_every_cache_gets_the_same_context():
    locks, dynamic = fill(LocksCache(rank=4, budget=64)), fill(DynamicCache())
    for layer, other in zip(locks.locks_layers, dynamic.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
    assert locks.get_seq_length() == dynamic.get_seq_length() == 70


def test_chunks_cover_every_token(monkeypatch):
    from locks_hf.timing import fill as module

    monkeypatch.setattr(module, "_CHUNK", 2 * 2 * 3 * PAGE * 16)  # three pages at a time
    keys, values = synthetic_states(2, 2, 101, 16, CPU, torch.float32, 0)
    for states in (keys, values):
        assert torch.isfinite(states).all()
        assert (states != 0).all()


def test_pages_differ_in_mass_and_selection_has_something_to_find():
    keys, _ = synthetic_states(1, 2, 64 * PAGE, 64, CPU, torch.float32, 0)
    query = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1))
    lse = exact_page_lse(query, keys, torch.tensor([64], dtype=torch.int32), PAGE, 64**-0.5)
    share = lse.softmax(-1).sort(descending=True).values
    best_quarter = share[..., :16].sum(-1)
    assert (best_quarter > 0.5).all() and (share[..., 0] < 0.5).all()
    centred = keys.unflatten(2, (64, PAGE))
    centred = centred - centred.mean(3, keepdim=True)
    energy = torch.linalg.svdvals(centred.flatten(0, 2)).square()
    assert (energy[:, :4].sum(1) / energy.sum(1)).median() > 0.6  # four directions carry most of a page


@pytest.mark.parametrize("chunk", (None, 16, 7))
def test_prefill_in_pieces_is_prefill(tiny, chunk):
    tokens = random_tokens(2, 50, 128, CPU, 0)
    whole, pieces, counted = LocksCache(rank=4, budget=32), LocksCache(rank=4, budget=32), []
    with patch(tiny):
        first = prefill(tiny, whole, tokens, None)
        assert torch.equal(prefill(tiny, pieces, tokens, chunk, counted.append), first)
    assert sum(counted) == 50
    assert pieces.locks_layers[0].row_lengths == [50, 50]
