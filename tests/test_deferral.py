"""``generate`` that is a step ahead of the device: the same tokens, and caches as if it had not been."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from transformers import DynamicCache
from transformers.generation import utils

from locks_hf import deferral, patch, unpatch
from tests.helpers import left_pad, random_tokens, small_cache, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")


class Event:
    """An event of a device on which everything is done at once."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def ahead(monkeypatch):
    """Pretend that the CPU works behind the host's back; gives the steps that were taken back."""
    taken_back = []
    finish = utils.DeferredStopCheck.finish
    monkeypatch.setattr(deferral, "runs_ahead", lambda device: True)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(
        utils.DeferredStopCheck, "finish", lambda check: taken_back.append(finish(check)) or taken_back[-1]
    )
    return taken_back


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa")


def decode(model, ids, new, cache, **options):
    """Prompt and answer of at most ``new`` tokens, which may end before."""
    return model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False, **options)


def test_an_end_of_sequence_is_seen_a_step_late_and_the_step_taken_back(model, ahead):
    ids, more = random_tokens(1, 30), random_tokens(1, 9, 5)
    with patch(model, run_ahead=True):
        plain = decode(model, ids, 40, small_cache())[0, 30:].tolist()
    end = plain[20]
    results = {}
    for late in (False, True):
        with patch(model, run_ahead=True), pytest.MonkeyPatch.context() as rule:
            if not late:
                rule.setattr(deferral, "runs_ahead", lambda device: False)
            cache = small_cache()
            tokens = decode(model, ids, 40, cache, eos_token_id=end, pad_token_id=0)
            length = int(cache.get_seq_length())
            turn = decode(model, torch.cat([tokens, more], 1), 12, cache)  # several tokens, and no drafts
            results[late] = tokens, length, turn, int(cache.get_seq_length()), cache.is_compileable
    # The first call and the second turn end by their lengths, which the host knows.
    assert ahead == [0, 1, 0]
    for a, b in zip(*results.values(), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert results[True][0].shape[1] == 30 + plain.index(end) + 1
    assert results[True][1] == 30 + plain.index(end)


def test_rows_that_end_at_different_steps(model, ahead):
    ids, mask = left_pad([random_tokens(1, length, length)[0] for length in (30, 7, 19)])
    options = {"attention_mask": mask, "eos_token_id": list(range(0, 250, 2)), "pad_token_id": 0}
    with patch(model, run_ahead=True):
        late = decode(model, ids, 30, small_cache(), **options)
    with patch(model, run_ahead=True), pytest.MonkeyPatch.context() as rule:
        rule.setattr(deferral, "runs_ahead", lambda device: False)
        assert torch.equal(decode(model, ids, 30, small_cache(), **options), late)
    assert len(ahead) == 1


def test_assisted_generation_is_as_before(model, ahead):
    ids = random_tokens(1, 30)
    results = []
    for late in (False, True):
        with patch(model, run_ahead=True), pytest.MonkeyPatch.context() as rule:
            if not late:
                rule.setattr(deferral, "runs_ahead", lambda device: False)
            cache = small_cache()
            results.append(decode(model, ids, 12, cache, prompt_lookup_num_tokens=3))
            assert cache._drafting
    assert torch.equal(*results)
    assert not ahead


def test_other_caches_and_models_keep_the_rule_of_transformers(model, ahead):
    rule, generate = utils.DeferredStopCheck.is_supported, type(model).generate
    ids = random_tokens(1, 30)
    other = tiny_model("llama", "locks")
    with patch(model, run_ahead=True):
        decode(other, ids, 4, small_cache())
        assert utils.DeferredStopCheck.is_supported is not rule
        with patch(other, run_ahead=True):
            pass
        assert "generate" not in vars(other)
        assert utils.DeferredStopCheck.is_supported is not rule
        model.set_attn_implementation("sdpa")
        decode(model, ids, 4, DynamicCache())
        model.set_attn_implementation("locks")
    assert ahead == []
    assert utils.DeferredStopCheck.is_supported is rule
    assert "generate" not in vars(model)
    with patch(model):
        decode(model, ids, 4, small_cache())
        assert utils.DeferredStopCheck.is_supported is rule
    assert ahead == []
    assert type(model).generate is generate


def test_where_a_step_more_may_not_be_safe_none_is_made(model, ahead):
    """A cache that is full at the end, positions that end, a streamer, tokens that are chosen by what came before."""
    ids = random_tokens(1, 30)

    class Streamer:
        def put(self, value):
            pass

        def end(self):
            pass

    with patch(model, run_ahead=True):
        plain = decode(model, ids, 40, small_cache())[0, 30:].tolist()
        end = {"eos_token_id": plain[7], "pad_token_id": 0}
        assert plain.index(plain[7]) == 7
        assert decode(model, ids, 40, small_cache(max_cache_len=37), **end).shape[1] == 38
        assert decode(model, ids, 40, small_cache(), streamer=Streamer(), **end).shape[1] == 38
        config = copy.copy(model.generation_config)
        config.update(max_new_tokens=40, do_sample=False, **end)
        others = (config, None, None, None, None, None, Streamer())  # by their places
        assert model.generate(ids, *others, past_key_values=small_cache()).shape[1] == 38
        allowed = lambda batch, row: [] if end["eos_token_id"] in row[30:].tolist() else list(range(96))  # noqa: E731
        assert decode(model, ids, 40, small_cache(), prefix_allowed_tokens_fn=allowed, **end).shape[1] == 38
        assert ahead == [0]
        assert decode(model, ids, 40, small_cache(max_cache_len=69), **end).shape[1] == 38
        assert ahead == [0, 1]
    learned = tiny_model("gpt2", "sdpa", max_position_embeddings=40)
    with patch(learned, run_ahead=True):
        decode(learned, ids, 11, small_cache())
        assert ahead == [0, 1, 0]
        decode(
            learned, ids, 12, small_cache(), stopping_criteria=[lambda row, scores: torch.tensor([row.shape[1] > 40])]
        )
        assert ahead == [0, 1, 0]


def test_an_error_in_between_leaves_nothing_on_the_cache(model, ahead, monkeypatch):
    def fails(self, *args):
        raise RuntimeError("no")

    with patch(model, run_ahead=True):
        cache = small_cache()
        monkeypatch.setattr(utils.DeferredStopCheck, "__init__", fails)
        with pytest.raises(RuntimeError, match="no"):
            decode(model, random_tokens(1, 30), 4, cache)
        cache.activate_past_recording()
        assert cache._drafting


def test_a_patch_that_fails_or_is_lost_leaves_nothing(model):
    rule = utils.DeferredStopCheck.is_supported
    with patch(model, run_ahead=True), pytest.raises(ValueError, match="runs ahead already"):
        patch(model, run_ahead=True)
    with patch(model, run_ahead=True), pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(model)
    with patch(model, run_ahead=True), pytest.raises(ValueError, match="cannot be saved"):
        pickle.dumps(model)
    lost = tiny_model("llama", "sdpa")
    patch(lost, run_ahead=True)
    del lost
    gc.collect()
    assert utils.DeferredStopCheck.is_supported is rule
    patch(model, run_ahead=True)
    theirs = staticmethod(lambda *args, **kwargs: False)
    utils.DeferredStopCheck.is_supported = theirs
    unpatch(model)
    assert utils.DeferredStopCheck.is_supported is theirs.__func__
    utils.DeferredStopCheck.is_supported = staticmethod(rule)


def test_threads_that_generate_while_others_patch(model):
    other, errors, stop = tiny_model("llama", "sdpa"), [], threading.Event()

    def ask():
        try:
            while not stop.is_set():
                utils.DeferredStopCheck.is_supported(torch.device("cpu"), None, False, is_assistant=False)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(200):
        with patch(other, run_ahead=True):
            pass
    stop.set()
    thread.join()
    assert not errors


def test_cropping_nothing_asks_the_device_nothing(model, monkeypatch):
    with patch(model, run_ahead=True):
        cache = small_cache()
        decode(model, random_tokens(1, 30), 4, cache)
        layer = cache.locks_layers[0]
        monkeypatch.setattr(type(layer), "_rows", property(lambda layer: pytest.fail("the device was asked")))
        cache.crop(0)
