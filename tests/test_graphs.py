"""Recorded decode steps. Without a GPU a recording is the call itself, run again over the same inputs."""

import gc
import warnings
import weakref

import pytest
import torch
from transformers import DynamicCache

from locks_hf import LocksCache, graphs, patch, unpatch
from tests.helpers import greedy, left_pad, random_tokens, small_cache, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")


@pytest.fixture
def recordings(monkeypatch):
    """Pretend that the CPU can record; gives what was recorded and how often it was replayed."""
    made = []

    def capture(run):
        output = run()  # what runs here is what the first replay would have run
        made.append([-1])

        def replay(replays=made[-1]):
            replays[0] += 1
            if replays[0]:
                for name, x in run().items():
                    if isinstance(x, torch.Tensor):
                        output[name].copy_(x)

        return replay, output

    monkeypatch.setattr(graphs, "capturable", lambda device: True)
    monkeypatch.setattr(graphs, "capture", capture)
    return made


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa")


@pytest.fixture(params=("llama", "qwen3"))
def either_model(request):
    """Transformers hands the second one its masks in a dictionary, by the type of layer."""
    return tiny_model(request.param, "sdpa")


def test_generate_replays_one_recording_and_gives_the_same_tokens(either_model, recordings):
    ids = random_tokens(2, 30)
    with patch(either_model):
        expected = greedy(either_model, ids, 12, small_cache())
    with patch(either_model, cuda_graphs=True):
        cache = small_cache()
        assert torch.equal(greedy(either_model, ids, 12, cache), expected)
    # 11 steps: the first as usual, the second recorded, the others replayed.
    assert recordings == [[9]]
    assert cache.stats().sparse_steps == 11


def test_a_left_padded_batch(either_model, recordings):
    ids, mask = left_pad([random_tokens(1, length, length)[0] for length in (30, 7, 19)])
    with patch(either_model):
        expected = greedy(either_model, ids, 9, small_cache(), attention_mask=mask)
    with patch(either_model, cuda_graphs=True):
        assert torch.equal(greedy(either_model, ids, 9, small_cache(), attention_mask=mask), expected)
    assert recordings == [[6]]


def test_a_cache_that_moves_is_recorded_anew(model, recordings, monkeypatch):
    monkeypatch.setattr("locks_hf.cache._HEADROOM_TOKENS", 4)
    ids = random_tokens(1, 30)
    with patch(model):
        expected = greedy(model, ids, 60, small_cache())
    with patch(model, cuda_graphs=True):
        assert torch.equal(greedy(model, ids, 60, small_cache()), expected)
    assert 2 <= len(recordings) <= 10
    assert sum(replays for (replays,) in recordings) > 30


def test_caches_and_turns_keep_to_their_own_recordings(model, recordings):
    first, second = random_tokens(1, 30), random_tokens(1, 26, seed=1)
    caches = small_cache(), small_cache(budget=16)
    with patch(model):
        expected = [greedy(model, ids, 8, cache.fork()) for ids, cache in zip((first, second), caches, strict=True)]
    with patch(model, cuda_graphs=True):
        for ids, cache, tokens in zip((first, second), caches, expected, strict=True):
            assert torch.equal(greedy(model, ids, 8, cache), tokens)
        assert len(recordings) == 2
        # A second turn on the first cache goes on with what is recorded.
        more = torch.cat([first, expected[0], random_tokens(1, 5, seed=2)], dim=1)
        greedy(model, more, 6, caches[0])
        assert len(recordings) == 2


def test_other_caches_and_calls_are_the_models_own(model, recordings):
    ids = random_tokens(1, 30)
    expected = greedy(model, ids, 6, DynamicCache())
    with patch(model, cuda_graphs=True):
        assert torch.equal(greedy(model, ids, 6, DynamicCache()), expected)
        greedy(model, ids, 6, small_cache(selector="oracle"))
        greedy(model, ids, 6, small_cache(), num_beams=2)  # rows are taken anew each step
        model.generate(ids, past_key_values=small_cache(), max_new_tokens=5, output_hidden_states=False)
        cache = small_cache()
        for token in (ids, ids[:, :1], ids[:, :1], ids[:, :1]):
            loss = model(token, past_key_values=cache).logits.sum()  # with gradients
        with pytest.raises(ValueError, match="for inference"):
            loss.backward()


def test_what_a_recording_cannot_give_is_refused(model, recordings):
    cache = small_cache()
    with patch(model, cuda_graphs=True), torch.no_grad():
        model(random_tokens(1, 30), past_key_values=cache)
        model(random_tokens(1, 1), past_key_values=cache, output_hidden_states=True)
        with pytest.raises(ValueError, match=r"LlamaForCausalLM gives \['hidden_states'\]"):
            model(random_tokens(1, 1), past_key_values=cache, output_hidden_states=True)


def test_steps_that_are_not_recorded_say_why_once(model, recordings):
    cache = small_cache()
    with patch(model, cuda_graphs=True), torch.no_grad():
        model(random_tokens(1, 30), past_key_values=cache)
        with pytest.warns(UserWarning, match="LlamaForCausalLM are not recorded: extra is a object"):
            model(random_tokens(1, 1), past_key_values=cache, extra=object())
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model(random_tokens(1, 1), past_key_values=cache, extra=object())
    assert not recordings


def test_a_model_that_cannot_be_recorded_says_so(model, recordings, monkeypatch):
    def capture(run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "capture", capture)
    with patch(model, cuda_graphs=True), pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be .*cuda_graphs"):
        greedy(model, random_tokens(1, 30), 6, small_cache())


def test_nothing_stays_on_the_model_or_in_memory(model, recordings):
    own = dict(model.__dict__)
    cache = small_cache()
    with patch(model, cuda_graphs=True):
        greedy(model, random_tokens(1, 30), 6, cache)
        with pytest.raises(ValueError, match="are recorded already"):
            patch(model, cuda_graphs=True)
        with patch(model):
            pass
        assert "forward" in model.__dict__
    assert model.__dict__ == own
    patch(model, cuda_graphs=True)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    unpatch(model)
    assert model.__dict__ == own
    patch(model, cuda_graphs=True)
    gone = weakref.ref(model)
    del model
    gc.collect()


def test_without_a_gpu_it_changes_nothing(model):
    ids = random_tokens(1, 30)
    with patch(model):
        expected = greedy(model, ids, 6, small_cache())
    with patch(model, cuda_graphs=True):
        assert torch.equal(greedy(model, ids, 6, LocksCache(rank=2, budget=12, page_size=4)), expected)
