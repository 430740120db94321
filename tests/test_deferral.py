"""``generate`` that is a step ahead of the device: the same tokens, and caches as if it had not been."""

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
    with patch(model):
        plain = decode(model, ids, 40, small_cache())[0, 30:].tolist()
    end = plain[20]
    results = {}
    for late in (False, True):
        with patch(model), pytest.MonkeyPatch.context() as rule:
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
    with patch(model):
        late = decode(model, ids, 30, small_cache(), **options)
    with patch(model), pytest.MonkeyPatch.context() as rule:
        rule.setattr(deferral, "runs_ahead", lambda device: False)
        assert torch.equal(decode(model, ids, 30, small_cache(), **options), late)
    assert len(ahead) == 1


def test_assisted_generation_is_as_before(model, ahead):
    ids = random_tokens(1, 30)
    results = []
    for late in (False, True):
        with patch(model), pytest.MonkeyPatch.context() as rule:
            if not late:
                rule.setattr(deferral, "runs_ahead", lambda device: False)
            cache = small_cache()
            results.append(decode(model, ids, 12, cache, prompt_lookup_num_tokens=3))
            assert cache._drafting
    assert torch.equal(*results)
    assert not ahead


def test_other_caches_and_models_that_are_not_patched_keep_the_rule_of_transformers(model, ahead):
    rule = utils.DeferredStopCheck.is_supported
    ids = random_tokens(1, 30)
    other = tiny_model("llama", "locks")
    decode(other, ids, 4, small_cache())
    with patch(model) as patched:
        with patch(other):
            assert utils.DeferredStopCheck.is_supported is not rule
        patch(other)
        decode(patched, ids, 4, None)
        model.set_attn_implementation("sdpa")
        decode(patched, ids, 4, DynamicCache())
    assert utils.DeferredStopCheck.is_supported is not rule
    unpatch(other)
    assert utils.DeferredStopCheck.is_supported is rule
    assert ahead == []


def test_a_patch_that_fails_leaves_nothing(model):
    rule = utils.DeferredStopCheck.is_supported
    with patch(model, cuda_graphs=True), pytest.raises(ValueError, match="recorded already"):
        patch(model, cuda_graphs=True)
    model.lm_head = torch.nn.Identity()
    for layer in [x for x in model.modules() if isinstance(x, torch.nn.Linear)]:
        layer.forward = layer.forward  # replaced, as by hooks: there is none to make fast
    with pytest.raises(ValueError, match="has no plain"):
        patch(model, fast_linear=True)
    assert utils.DeferredStopCheck.is_supported is rule


def test_cropping_nothing_asks_the_device_nothing(model, monkeypatch):
    with patch(model):
        cache = small_cache()
        decode(model, random_tokens(1, 30), 4, cache)
        layer = cache.locks_layers[0]
        monkeypatch.setattr(type(layer), "_rows", property(lambda layer: pytest.fail("the device was asked")))
        cache.crop(0)
