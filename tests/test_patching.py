"""Putting models on "locks" and taking them off again."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    CLIPVisionConfig,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    SiglipVisionConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from locks_hf import LocksCache, patch, unpatch
from tests.helpers import SLIDING, VOCAB, feed, greedy, one_by_one, random_tokens, small_cache, tiny_model

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
ENCODER = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
ENCODER_DECODER = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}

T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 32}


def configs_of(model):
    """Every config object of a model and its parts, by identity."""
    found = {}
    pending = [module.config for module in model.modules() if hasattr(module, "config")]
    while pending:
        config = pending.pop()
        if id(config) not in found:
            found[id(config)] = config
            pending += [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return found


def state_of(model):
    """All that a patch might change: every attribute of every config and module, weights and hooks included."""
    configs = {key: copy.deepcopy(vars(config)) for key, config in configs_of(model).items()}
    for attributes in configs.values():
        for name, value in attributes.items():
            if hasattr(value, "to_dict"):
                attributes[name] = value.to_dict()  # a part, compared under its own key
    modules = {
        name: {
            key: id(value) if isinstance(value, torch.nn.Module) else repr(value)
            for key, value in vars(module).items()
            if key not in ("_parameters", "_buffers", "_modules")
        }
        for name, module in model.named_modules()
    }
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return configs, modules, weights


def assert_unchanged(model, before):
    configs, modules, weights = state_of(model)
    assert configs == before[0]
    assert modules == before[1]
    assert weights.keys() == before[2].keys()
    assert all(torch.equal(weights[name], before[2][name]) for name in weights)


def implementation(model):
    return model.config.get_text_config(decoder=True)._attn_implementation


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa")


def llava():
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION, projection_dim=16),
        text_config=LlamaConfig(**LLAMA),
        image_token_index=95,
        vision_feature_layer=-1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()


def gemma3():
    text = Gemma3TextConfig(**{**LLAMA, **SLIDING["gemma3_text"]})
    config = Gemma3Config(
        text_config=text,
        vision_config=SiglipVisionConfig(**VISION, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_id=95,
        boi_token_id=94,
        eoi_token_id=93,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gemma3ForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()


# Patching and unpatching


@pytest.mark.parametrize("before", ("sdpa", "eager"))
def test_patch_switches_a_loaded_model_and_unpatch_leaves_it_as_it_was(before):
    model = tiny_model("llama", before)
    state = state_of(model)
    patch(model)
    assert implementation(model) == "locks"
    cache = small_cache()
    greedy(model, random_tokens(1, 40), 4, cache)
    assert cache.stats().sparse_steps == 3
    unpatch(model)
    assert implementation(model) == before
    assert_unchanged(model, state)


def test_a_patched_model_gives_what_a_model_loaded_on_locks_gives(llama, model):
    ids = random_tokens(2, 40)
    patch(model)
    assert torch.equal(greedy(model, ids, 8, small_cache()), greedy(llama, ids, 8, small_cache()))


@pytest.mark.parametrize("make", (llava, gemma3))
def test_unpatch_restores_every_part_of_a_model_with_several(make):
    model = make()
    model.config.vision_config._attn_implementation = "eager"
    state = state_of(model)
    patch(model)
    unpatch(model)
    assert_unchanged(model, state)


def test_the_context_manager_gives_the_model_and_undoes_itself(model):
    state = state_of(model)
    with patch(model) as patched:
        assert patched is model
        assert implementation(model) == "locks"
        with pytest.raises(AssertionError):  # the comparison does see it
            assert_unchanged(model, state)
    assert_unchanged(model, state)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM was not patched with locks_hf\.patch"):
        unpatch(model)


def test_an_exception_inside_the_context_undoes_it_too(model):
    state = state_of(model)
    with pytest.raises(RuntimeError, match="inside"), patch(model):
        raise RuntimeError("inside")
    assert_unchanged(model, state)


def test_nested_contexts_undo_themselves_one_by_one(model):
    state = state_of(model)
    with patch(model):
        with patch(model):
            assert implementation(model) == "locks"
        assert implementation(model) == "locks"
    assert_unchanged(model, state)


def test_a_context_inside_a_permanent_patch_leaves_it_in_place(model):
    state = state_of(model)
    patch(model)
    with patch(model):
        pass
    assert implementation(model) == "locks"
    unpatch(model)
    assert_unchanged(model, state)


def test_patching_twice_is_undone_by_one_unpatch(model):
    state = state_of(model)
    patch(model)
    patch(model)
    unpatch(model)
    assert_unchanged(model, state)
    with pytest.raises(ValueError, match="was not patched"):
        unpatch(model)


def test_unpatch_inside_a_context_is_not_undone_by_its_end(model):
    state = state_of(model)
    with patch(model):
        unpatch(model)
        assert_unchanged(model, state)
    assert_unchanged(model, state)


def test_a_patch_that_fails_changes_nothing():
    model = BertModel(BertConfig(**ENCODER, intermediate_size=32))
    state = state_of(model)
    with pytest.raises(ValueError, match="attends in both directions"):
        patch(model)
    assert_unchanged(model, state)
    with pytest.raises(ValueError, match="was not patched"):
        unpatch(model)


def test_patching_one_model_leaves_another_alone(model):
    other = tiny_model("llama", "sdpa")
    state = state_of(other)
    with patch(model):
        assert_unchanged(other, state)


def test_loading_with_the_name_works(tmp_path, llama):
    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="locks")
    assert implementation(model) == "locks"
    ids = random_tokens(1, 40)
    assert torch.equal(greedy(model, ids, 5, small_cache()), greedy(llama, ids, 5, small_cache()))
    assert "locks" not in (tmp_path / "config.json").read_text()
    patch(model).__enter__().save_pretrained(tmp_path / "again")
    assert "locks" not in (tmp_path / "again" / "config.json").read_text()


def test_a_patched_model_can_be_copied(model):
    patch(model)
    twin = copy.deepcopy(model)
    ids = random_tokens(1, 40)
    assert torch.equal(greedy(twin, ids, 5, small_cache()), greedy(model, ids, 5, small_cache()))
    unpatch(model)
    assert implementation(twin) == "locks"
    patch(twin)


# What can be patched


@pytest.mark.parametrize("thing", (None, "smollm2", torch.nn.Linear(2, 2)), ids=("none", "name", "module"))
def test_only_transformers_models_can_be_patched(thing):
    with pytest.raises(ValueError, match=f"takes a transformers PreTrainedModel, got {type(thing).__name__}"):
        patch(thing)


def test_a_compiled_model_is_patched_before():
    with pytest.raises(ValueError, match="got OptimizedModule; patch the model before it is compiled"):
        patch(torch.compile(tiny_model("llama", "sdpa"), backend="eager"))


def test_encoders_are_refused():
    with pytest.raises(ValueError, match="BertModel attends in both directions"):
        patch(BertModel(BertConfig(**ENCODER, intermediate_size=32)))
    model = BertModel._from_config(BertConfig(**ENCODER, intermediate_size=32), attn_implementation="locks")
    with pytest.raises(ValueError, match="BertSelfAttention is not causal"):
        model(random_tokens(1, 10))


def test_an_encoder_made_a_decoder_is_served():
    config = BertConfig(**ENCODER, intermediate_size=32, is_decoder=True, initializer_range=0.5)
    model = BertLMHeadModel(config).eval()
    ids = random_tokens(1, 40)
    dense = greedy(model, ids, 6)
    with patch(model):
        assert torch.equal(greedy(model, ids, 6, LocksCache(budget=64)), dense)
        cache = small_cache()
        greedy(model, ids, 6, cache)
        assert cache.stats().sparse_steps == 5


@pytest.mark.parametrize(
    ("kind", "config"),
    (
        (BartForConditionalGeneration, BartConfig(**ENCODER_DECODER)),
        (
            T5ForConditionalGeneration,
            T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, num_layers=1, num_heads=4, d_ff=32),
        ),
    ),
    ids=("bart", "t5"),
)
def test_encoder_decoders_are_refused(kind, config):
    with pytest.raises(ValueError, match=f"{kind.__name__} is an encoder-decoder model"):
        patch(kind(config))
    config.decoder_start_token_id = 0
    model = kind._from_config(config, attn_implementation="locks")
    with pytest.raises(ValueError, match=r"Attention is not causal.*locks_hf\.patch"):
        model.generate(random_tokens(1, 10), past_key_values=LocksCache(), max_new_tokens=2)


def test_models_without_the_attention_interface_are_refused():
    config = AutoConfig.for_model("bloom", vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)
    model = AutoModelForCausalLM.from_config(config)
    state = state_of(model)
    with pytest.raises(ValueError, match="BloomForCausalLM does not use Transformers' attention interface"):
        patch(model)
    assert_unchanged(model, state)


def test_models_without_attention_have_nothing_to_select():
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="MambaConfig has no full-attention layer"):
        LocksCache(config=model.config)


# Models of several parts


def test_of_a_model_that_sees_the_text_part_alone_is_patched():
    model = llava()
    ids = torch.cat([random_tokens(1, 20) % 90 + 1, torch.full((1, 4), 95), random_tokens(1, 20) % 90 + 1], dim=1)
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    dense = greedy(model, ids, 6, pixel_values=pixels)
    blind = greedy(model, ids, 6, pixel_values=pixels * 0)
    assert not torch.equal(dense, blind)
    with patch(model):
        assert model.config.text_config._attn_implementation == "locks"
        assert model.config.vision_config._attn_implementation == "sdpa"
        assert torch.equal(greedy(model, ids, 6, LocksCache(budget=64), pixel_values=pixels), dense)
        cache = small_cache()
        greedy(model, ids, 6, cache, pixel_values=pixels)
        assert cache.stats().sparse_steps == 5


def test_putting_all_parts_on_locks_is_refused_where_one_is_not_causal():
    model = llava()
    model.set_attn_implementation("locks")
    pixels = torch.zeros(1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"CLIPAttention is not causal.*locks_hf\.patch\(model\)"):
        model(torch.full((1, 4), 95), pixel_values=pixels)


def test_a_model_that_sees_with_sliding_layers_and_its_config():
    model = gemma3()
    ids = random_tokens(1, 40) % 90 + 1
    dense = greedy(model, ids, 6, DynamicCache(config=model.config))
    with patch(model):
        assert torch.equal(greedy(model, ids, 6, LocksCache(budget=64, config=model.config)), dense)
        cache = small_cache(config=model.config)
        greedy(model, ids, 6, cache)
        assert cache.stats().sparse_steps == 5
        with pytest.raises(ValueError, match=r"config=model\.config"):
            greedy(model, ids, 2, small_cache())


# Several models in one process


def interleaved(steps):
    """Run generators of logits in turns; what each gave."""
    results = [[] for _ in steps]
    running = dict(enumerate(steps))
    while running:
        for index in list(running):
            try:
                results[index].append(next(running[index]))
            except StopIteration:
                del running[index]
    return [torch.cat(result, dim=1) for result in results]


def decoding(model, cache, ids, tokens):
    yield feed(model, cache, ids)
    for token in one_by_one(tokens):
        yield feed(model, cache, token)


def test_interleaved_models_and_caches_do_not_mix(llama):
    second = tiny_model("llama", seed=1)
    dense = tiny_model("llama", "sdpa", seed=2)
    ids, tokens = random_tokens(2, 40), random_tokens(2, 6, seed=1)
    runs = [
        (llama, small_cache),
        (second, small_cache),
        (dense, DynamicCache),
        (llama, DynamicCache),
        (llama, lambda: small_cache(selector="quest")),
    ]
    alone = [torch.cat(list(decoding(model, cache(), ids, tokens)), dim=1) for model, cache in runs]
    together = interleaved([decoding(model, cache(), ids, tokens) for model, cache in runs])
    for ours, expected in zip(together, alone, strict=True):
        assert torch.equal(ours, expected)


def test_models_in_two_threads_do_not_mix(llama):
    second = tiny_model("llama", seed=1)
    runs = [(llama, random_tokens(2, 40)), (second, random_tokens(1, 43)), (llama, random_tokens(3, 38))]
    expected = [greedy(model, ids, 12, small_cache()) for model, ids in runs]
    results = [None] * len(runs)
    barrier = threading.Barrier(len(runs))

    def run(index):
        model, ids = runs[index]
        barrier.wait()
        for _ in range(3):
            results[index] = greedy(model, ids, 12, small_cache())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, alone in zip(results, expected, strict=True):
        assert torch.equal(ours, alone)


def test_a_draft_and_its_target_do_not_mix(llama):
    """Both on "locks", the target with a LocksCache that covers everything: greedy tokens of the target."""
    draft = tiny_model("llama", num_hidden_layers=1)
    ids = random_tokens(1, 9).repeat(1, 5)
    expected = greedy(llama, ids, 16, DynamicCache())
    assert torch.equal(greedy(llama, ids, 16, LocksCache(budget=128), assistant_model=draft), expected)


def test_a_cache_filled_inside_the_context_raises_outside_it(model):
    cache = small_cache()
    ids = random_tokens(1, 40)
    with patch(model):
        answer = greedy(model, ids, 4, cache)
    context = torch.cat([ids, answer, random_tokens(1, 5)], dim=1)
    with pytest.raises(ValueError, match=r"attn_implementation='locks'.*locks_hf\.patch\(model\)"):
        greedy(model, context, 4, cache)


def test_models_that_share_a_configuration():
    config = tiny_model("llama", "sdpa").config
    first, second = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    assert first.config is second.config
    for order in ((first, second), (second, first)):
        patch(first)
        patch(second)
        unpatch(order[0])
        assert config._attn_implementation == "locks"
        unpatch(order[1])
        assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "options", ({}, {"cuda_graphs": True}, {"fast_linear": True}, {"cuda_graphs": True, "fast_linear": True})
)
def test_a_patched_model_does_not_stay_in_memory(options):
    model = tiny_model("llama", "sdpa")
    patch(model, **options)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_the_context_manager_keeps_a_model_that_nobody_else_holds():
    with patch(tiny_model("llama", "sdpa")) as model:
        gc.collect()
        assert model.config._attn_implementation == "locks"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("first_to_go", (0, 1))
def test_a_patched_model_that_goes_leaves_a_shared_configuration_to_the_other(first_to_go):
    models = [tiny_model("llama", "sdpa")]
    models.append(type(models[0])(models[0].config))
    config = models[0].config
    patch(models[0])
    patch(models[1])
    del models[first_to_go]
    gc.collect()
    assert config._attn_implementation == "locks"
    unpatch(models[0])
    assert config._attn_implementation == "sdpa"
    patch(models[0])
    patch(models[0])
    del models[0]
    gc.collect()
    assert config._attn_implementation == "sdpa"


def test_contexts_leave_nothing_behind(model):
    contexts = []
    for _ in range(3):
        with (context := patch(model)):
            contexts.append(weakref.ref(context._change))
        del context
    gc.collect()
    assert [change() for change in contexts] == [None] * 3


def test_contexts_left_out_of_order():
    model = tiny_model("llama", "sdpa")
    outer, inner = patch(model), patch(model)
    outer.__exit__(None, None, None)
    assert model.config._attn_implementation == "locks"
    inner.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"
    inner.__exit__(None, None, None)  # a second time changes nothing
    with pytest.raises(ValueError, match="was not patched"):
        unpatch(model)


def test_a_copy_of_a_patched_model_was_not_patched():
    model = tiny_model("llama", "sdpa")
    with patch(model), pytest.raises(ValueError, match="nor was a copy of a patched model"):
        unpatch(copy.deepcopy(model))


def test_threads_patch_one_model(model):
    failures = []

    def patch_often():
        try:
            for _ in range(100):
                with patch(model):
                    assert model.config._attn_implementation == "locks"
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=patch_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert model.config._attn_implementation == "sdpa"
