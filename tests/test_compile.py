"""Decode steps under torch.compile: one graph, no breaks, and no more compilations as the sequence grows."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.generation.configuration_utils import CompileConfig

from locks_hf import patch
from tests.helpers import check_cache, left_pad, one_by_one, random_tokens, small_cache, tiny_model


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiling():
    """``generate`` compiles by itself on a GPU; this asks for it anywhere. The backend runs the graph as it is."""
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    return {"compile_config": config, "do_sample": False}


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ("llama", "qwen3", "gpt_neox"))
def test_generate_compiles_once_and_gives_the_same_tokens(name, compiling):
    model = tiny_model(name)
    ids = random_tokens(1, 40)
    cache, eager = small_cache(), small_cache()
    compiled = model.generate(ids, past_key_values=cache, max_new_tokens=60, **compiling)
    assert graphs() == 1
    assert not counters["graph_break"]
    assert torch.equal(compiled, model.generate(ids, past_key_values=eager, max_new_tokens=60, do_sample=False))
    check_cache(cache)
    assert cache.stats() == eager.stats()
    assert cache.stats().sparse_steps == 59


def test_prompts_of_other_lengths_use_the_same_graph(compiling):
    model = tiny_model("llama")
    for length in (20, 40, 70, 300):
        ids = random_tokens(1, length, seed=length)
        compiled = model.generate(ids, past_key_values=small_cache(), max_new_tokens=10, **compiling)
        assert graphs() == 1
        assert torch.equal(
            compiled, model.generate(ids, past_key_values=small_cache(), max_new_tokens=10, do_sample=False)
        )


def test_a_left_padded_batch_compiles_once(compiling):
    model = tiny_model("llama")
    ids, mask = left_pad([random_tokens(1, length, seed=length)[0] for length in (37, 22, 30)])
    cache = small_cache()
    compiled = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=40, **compiling)
    assert graphs() == 1
    eager = model.generate(ids, attention_mask=mask, past_key_values=small_cache(), max_new_tokens=40, do_sample=False)
    assert torch.equal(compiled, eager)
    assert cache.layers[0].row_lengths == [37 + 39, 22 + 39, 30 + 39]


def test_a_second_turn_uses_the_graph_of_the_first(compiling):
    model = tiny_model("llama")
    cache, eager = small_cache(), small_cache()
    ids = random_tokens(1, 40)
    for turn in range(3):
        compiled = model.generate(ids, past_key_values=cache, max_new_tokens=12, **compiling)
        assert torch.equal(compiled, model.generate(ids, past_key_values=eager, max_new_tokens=12, do_sample=False))
        ids = torch.cat([compiled, random_tokens(1, 7, seed=turn)], dim=1)
    assert graphs() == 1
    check_cache(cache)


def test_growing_past_the_capacity_compiles_anew_a_few_times(compiling):
    model = tiny_model("llama", max_position_embeddings=4096)
    cache = small_cache()
    model.generate(random_tokens(1, 20), past_key_values=cache, max_new_tokens=1500, **compiling)
    assert cache.get_seq_length() == 1519
    assert not counters["graph_break"]
    assert graphs() <= 3  # one for each of 1024, 1536 and 2304 tokens, or one for any


@pytest.mark.parametrize("fast_linear", [False, True])
def test_two_thousand_tokens_compile_nothing_after_the_first(compiling, fast_linear):
    model = tiny_model("llama", max_position_embeddings=4096)
    ids, cache = random_tokens(1, 20), small_cache(max_cache_len=2200)
    compiled = []

    def look(ids, scores, **kwargs):
        compiled.append((graphs(), sum(counters["graph_break"].values()), counters["stats"]["calls_captured"]))
        return torch.zeros(len(ids), dtype=torch.bool)

    with patch(model, fast_linear=fast_linear):
        model.generate(ids, past_key_values=cache, max_new_tokens=2001, stopping_criteria=[look], **compiling)
    assert cache.get_seq_length() == 2020 and len(compiled) == 2001
    # The first token is of the prefill, the second of the step that is compiled.
    assert set(compiled[1:]) == {(1, 0, compiled[1][2])}


def test_a_fixed_capacity_compiles_once_and_says_when_it_is_full(compiling):
    model = tiny_model("llama")
    cache = small_cache(max_cache_len=64)
    model.generate(random_tokens(1, 20), past_key_values=cache, max_new_tokens=45, **compiling)
    assert graphs() == 1
    with pytest.raises(ValueError, match="max_cache_len is 64 tokens, but a row needs 65"):
        model.generate(random_tokens(1, 65), past_key_values=cache, max_new_tokens=3, **compiling)


def test_a_compiled_model_without_generate():
    model = tiny_model("llama")
    step = torch.compile(model, backend="eager", fullgraph=True)
    cache, eager = small_cache(), small_cache()
    ids, tokens = random_tokens(2, 40), random_tokens(2, 30, seed=1)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids, past_key_values=eager)
        for token in one_by_one(tokens):
            position = torch.full((2, 1), int(eager.get_seq_length()))
            got = step(token, position_ids=position, past_key_values=cache).logits
            torch.testing.assert_close(got, model(token, past_key_values=eager).logits)
    assert graphs() == 1
    check_cache(cache)


def test_a_model_compiled_by_hand_has_the_room_it_was_given_and_says_when_it_was_full(monkeypatch):
    monkeypatch.setattr("locks_hf.layer._HEADROOM_TOKENS", 16)
    model = tiny_model("llama")
    step = torch.compile(model, backend="eager", fullgraph=True)
    ids, tokens = random_tokens(1, 32), random_tokens(1, 40, seed=1)

    def decode(cache, steps, forward):
        for token in one_by_one(tokens[:, :steps]):
            position = cache.layers[0].counts[-1:].long()[None]
            logits = forward(token, position_ids=position, past_key_values=cache).logits
        return logits

    with torch.no_grad():
        cache = small_cache()
        model(ids, past_key_values=cache)
        cache.make_room(40)
        assert decode(cache, 40, step).isfinite().all()
        check_cache(cache)
        # Eager steps after compiled ones grow the cache.
        assert decode(cache, 40, model).isfinite().all()
        check_cache(cache)
        cache = small_cache()
        model(ids, past_key_values=cache)
        assert decode(cache, 40, step).isnan().all()
        with pytest.raises(ValueError, match=r"decoded up to \d+ tokens in room for \d+"):
            cache.get_seq_length()


def test_make_room_is_for_a_cache_in_use():
    with pytest.raises(ValueError, match="call it before the decode steps"):
        small_cache().make_room(3)
    cache = small_cache()
    tiny_model("llama")(random_tokens(1, 20), past_key_values=cache)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        cache.make_room(-1)
