"""Recorded decode steps. Without a GPU a recording is the call itself, run again over the same inputs."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from transformers import DynamicCache

from locks_hf import LocksCache, graphs, patch, unpatch
from locks_hf.layer import LocksLayer
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
                with pytest.MonkeyPatch.context() as host:  # which takes no part in a replay
                    host.setattr(LocksLayer, "prepare_step", lambda layer: False)
                    host.setattr(LocksLayer, "count_step", lambda layer, real: None)
                    host.setattr(LocksCache, "_lengths_before", lambda cache, layer_idx, size: set())
                    again = run()
                for name, x in again.items():
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
    monkeypatch.setattr("locks_hf.layer._HEADROOM_TOKENS", 4)
    ids = random_tokens(1, 30)
    with patch(model):
        expected = greedy(model, ids, 60, small_cache())
    with patch(model, cuda_graphs=True):
        assert torch.equal(greedy(model, ids, 60, small_cache()), expected)
    assert 2 <= len(recordings) <= 10
    assert sum(replays for (replays,) in recordings) > 30


@pytest.mark.parametrize("asking", (False, True), ids=["", "asking between steps"])
@pytest.mark.parametrize("start", range(3, 9))
def test_no_step_is_lost_where_buffers_are_full(model, recordings, monkeypatch, start, asking):
    """The host learns of steps while the next one is on its way, and must not count its room twice or not at all."""
    monkeypatch.setattr("locks_hf.layer._HEADROOM_TOKENS", 4)
    tokens, logits = random_tokens(2, 60), []
    for cache in (DynamicCache(), small_cache(budget=400), small_cache(budget=400)):
        with patch(model, cuda_graphs=len(logits) == 2), torch.no_grad():
            model(tokens[:, :start], past_key_values=cache)
            steps = []
            for i in range(start, 60):
                steps.append(model(tokens[:, i : i + 1], past_key_values=cache).logits)
                if asking and i % 3 == 0:
                    assert cache.get_seq_length() == i + 1
            logits.append(torch.cat(steps, dim=1))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[2], logits[1])


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


@pytest.mark.parametrize(
    ("asked", "reason"),
    (({"output_hidden_states": True}, "it gives hidden_states"), ({"return_dict": False}, "it gives a tuple")),
)
def test_what_a_recording_cannot_give_is_not_recorded_and_said(model, recordings, asked, reason):
    cache = small_cache()
    with patch(model, cuda_graphs=True), torch.no_grad():
        model(random_tokens(1, 30), past_key_values=cache)
        with pytest.warns(UserWarning, match=f"LlamaForCausalLM are not recorded: {reason}"):
            for _ in range(3):
                model(random_tokens(1, 1), past_key_values=cache, **asked)
    assert not recordings
    assert cache.get_seq_length() == 33


def test_autocast_with_its_cache_of_weights_is_not_recorded(model, recordings):
    cache = small_cache()
    with patch(model, cuda_graphs=True), torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(random_tokens(1, 30), past_key_values=cache)
            with pytest.warns(UserWarning, match="cache_enabled=False"):
                for _ in range(3):
                    model(random_tokens(1, 1), past_key_values=cache)
        assert not recordings
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            for _ in range(3):
                model(random_tokens(1, 1), past_key_values=cache)
        assert len(recordings) == 1


@pytest.mark.parametrize("spare", (0, 40))
def test_masks_over_all_tokens_and_longer_ones(model, recordings, spare):
    """The column of the new token counts, wherever the mask ends."""
    ids, mask = left_pad([random_tokens(1, length, length)[0] for length in (30, 7)])
    steps = random_tokens(2, 6, seed=3)
    lengths, logits = [], []
    for graphs_too in (False, True):
        cache = small_cache()
        with patch(model, cuda_graphs=graphs_too), torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            for i in range(6):
                seen = torch.cat([mask, torch.ones(2, 6, dtype=mask.dtype)], dim=1)
                seen[1, 32] = 0  # a step that is padding for the second row
                seen = torch.cat([seen[:, : 31 + i], torch.zeros(2, spare, dtype=mask.dtype)], dim=1)
                logits.append(model(steps[:, i : i + 1], attention_mask=seen, past_key_values=cache).logits)
        cache.crop(-2)
        lengths.append([layer.row_lengths for layer in cache.layers])
    assert len(recordings) == 1
    assert lengths[0] == lengths[1] == [[34, 10], [34, 10]]
    for eager, recorded in zip(logits[:6], logits[6:], strict=True):
        torch.testing.assert_close(recorded, eager)


def test_recording_asks_the_device_for_nothing(model, recordings, monkeypatch):
    """Also where a step just fits."""
    within = []
    capture, rows = graphs.capture, LocksLayer._rows.fget

    def watched(run):
        def inside():
            within.append(True)
            try:
                return run()
            finally:
                within.pop()

        return capture(inside)

    def asked(layer):
        assert not within, "the device was asked while recording"
        return rows(layer)

    monkeypatch.setattr(graphs, "capture", watched)
    monkeypatch.setattr(LocksLayer, "_rows", property(asked))
    monkeypatch.setattr(LocksLayer, "get_seq_length", lambda layer: layer.host_positions)
    for room in range(2, 8):
        cache = small_cache(max_cache_len=64)
        with patch(model, cuda_graphs=True), torch.no_grad():
            model(random_tokens(1, 64 - room), past_key_values=cache)
            for _ in range(room):
                model(random_tokens(1, 1), past_key_values=cache)
            with pytest.raises(ValueError, match="max_cache_len is 64 tokens, but a row needs 65"):
                model(random_tokens(1, 1), past_key_values=cache)


def test_steps_under_inference_mode_and_without(model, recordings):
    ids, steps = random_tokens(1, 30), random_tokens(1, 8, seed=1)
    results = []
    for graphs_too in (False, True):
        cache, logits = small_cache(), []
        with patch(model, cuda_graphs=graphs_too):
            for i in range(9):
                token = ids if i == 0 else steps[:, i - 1 : i]
                with torch.inference_mode() if i < 5 else torch.no_grad():
                    logits.append(model(token, past_key_values=cache).logits[:, -1].clone())
        results.append(torch.stack(logits))
        assert cache.get_seq_length() == 38
    torch.testing.assert_close(results[1], results[0])
    assert len(recordings) == 2


def test_a_recorded_model_is_not_copied_or_saved(model, recordings):
    with patch(model, cuda_graphs=True):
        with pytest.raises(ValueError, match="cannot be copied"):
            copy.deepcopy(model)
        with pytest.raises(ValueError, match="cannot be saved"):
            pickle.dumps(model)
    copy.deepcopy(model)


def test_other_caches_are_compiled_as_before(model):
    calls = []
    model.get_compiled_call = lambda config: lambda *args, **kwargs: calls.append("compiled")
    with patch(model, cuda_graphs=True):
        call = model.get_compiled_call(None)
        call(random_tokens(1, 4), past_key_values=DynamicCache())
        assert calls == ["compiled"]
        with torch.no_grad():
            call(random_tokens(1, 4), past_key_values=small_cache())
    assert calls == ["compiled"]


def test_a_cache_with_recorded_steps_goes_when_it_is_let_go(model, monkeypatch):
    monkeypatch.setattr(graphs, "capturable", lambda device: True)
    monkeypatch.setattr(graphs, "capture", lambda run: (lambda: None, run()))
    with patch(model, cuda_graphs=True), torch.no_grad():
        cache = small_cache()
        model(random_tokens(1, 30), past_key_values=cache)
        for _ in range(3):
            output = model(random_tokens(1, 1), past_key_values=cache)
        assert output.past_key_values is cache
        gone = weakref.ref(cache)
        del cache, output
        gc.collect()
        assert gone() is None


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
