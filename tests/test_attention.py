"""The attention implementation "locks": dense wherever it is not asked to select, and loud where it cannot."""

import gc
import threading
import weakref

import pytest
import torch
from transformers import DynamicCache, MllamaTextConfig, StaticCache

from locks_hf import LocksCache, handoff, patch
from locks_hf.attention import locks_attention, locks_mask
from locks_hf.rows import PaddingReader
from locks_hf.selectors import OracleSelector
from tests.helpers import (
    FULL_ATTENTION,
    SLIDING,
    Attention,
    feed,
    greedy,
    left_pad,
    one_by_one,
    random_tokens,
    small_cache,
    tiny_model,
)

MIXED = {
    **SLIDING,
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 0],
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
    },
}
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def padded_batch(seed=0):
    return left_pad([random_tokens(1, length, seed + length)[0] for length in (37, 22, 30)])


def states(length, *, rows=1, heads=4, kv_heads=2, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, heads, length, dim, generator=g)
    key, value = torch.randn(2, rows, kv_heads, length, dim, generator=g)
    return query, key, value


# Prefill equals SDPA


@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_prefill_equals_sdpa(name, padded):
    model, dense = tiny_model(name), tiny_model(name, "sdpa")
    ids, mask = padded_batch()
    mask = mask if padded else torch.ones_like(ids)
    logits = feed(model, small_cache(), ids, mask=mask)
    expected = feed(dense, DynamicCache(), ids, mask=mask)
    close(logits[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
@pytest.mark.parametrize("name", MIXED)
def test_prefill_of_mixed_layers_equals_sdpa(name, padded):
    model, dense = tiny_model(name, **MIXED[name]), tiny_model(name, "sdpa", **MIXED[name])
    ids, mask = padded_batch()
    mask = mask if padded else torch.ones_like(ids)
    logits = feed(model, small_cache(config=model.config), ids, mask=mask)
    expected = feed(dense, DynamicCache(config=dense.config), ids, mask=mask)
    close(logits[mask.bool()], expected[mask.bool()])


def test_prefill_keeps_the_models_own_scaling():
    """Granite scales logits by a factor of its own."""
    options = {"attention_multiplier": 0.9}
    model, dense = tiny_model("granite", **options), tiny_model("granite", "sdpa", **options)
    ids, tokens = random_tokens(2, 30), random_tokens(2, 4, seed=1)
    expected = feed(dense, DynamicCache(), ids, *one_by_one(tokens))
    close(feed(model, LocksCache(budget=64), ids, *one_by_one(tokens)), expected)
    # The oracle with all but one page: close to dense only if it scales alike.
    sparse = feed(model, LocksCache(rank=3, budget=32, page_size=4, selector="oracle"), ids, *one_by_one(tokens))
    close(sparse[:, :-2], expected[:, :-2])


# Other caches on "locks" are dense


@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
@pytest.mark.parametrize("chunk", (37, 9, 1), ids=("whole", "chunks", "single"))
def test_a_dynamic_cache_is_dense(llama, dense_llama, chunk, padded):
    ids, mask = padded_batch()
    mask = mask if padded else None
    logits = feed(llama, DynamicCache(), *ids.split(chunk, dim=1), mask=mask)
    expected = feed(dense_llama, DynamicCache(), *ids.split(chunk, dim=1), mask=mask)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    close(logits[real], expected[real])


@pytest.mark.parametrize("name", SLIDING)
def test_a_dynamic_cache_with_sliding_layers_is_dense(name):
    model, dense = tiny_model(name, **SLIDING[name]), tiny_model(name, "sdpa", **SLIDING[name])
    ids, mask = padded_batch()
    for cache in (lambda: DynamicCache(config=model.config), DynamicCache):
        for chunk in (37, 9):
            logits = feed(model, cache(), *ids.split(chunk, dim=1), mask=mask)
            expected = feed(dense, cache(), *ids.split(chunk, dim=1), mask=mask)
            close(logits[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
def test_no_cache_is_dense(llama, dense_llama, padded):
    ids, mask = padded_batch()
    mask = mask if padded else None
    with torch.no_grad():
        logits = llama(ids, attention_mask=mask, use_cache=False).logits
        expected = dense_llama(ids, attention_mask=mask, use_cache=False).logits
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    close(logits[real], expected[real])


@pytest.mark.parametrize("room", (45, 60), ids=("exact", "spare"))
@pytest.mark.parametrize("padded", (False, True), ids=("equal", "padded"))
def test_a_static_cache_is_dense(llama, dense_llama, padded, room):
    ids, mask = padded_batch()
    mask = mask if padded else torch.ones_like(ids)
    static = StaticCache(config=llama.config, max_cache_len=room)
    tokens = greedy(llama, ids, 9, static, attention_mask=mask)
    assert torch.equal(tokens, greedy(dense_llama, ids, 9, attention_mask=mask))


def test_a_prompt_that_fills_a_static_cache_is_dense(llama, dense_llama):
    ids, mask = padded_batch()
    logits = feed(llama, StaticCache(config=llama.config, max_cache_len=37), ids[:, :30], ids[:, 30:], mask=mask)
    close(logits[mask.bool()], feed(dense_llama, DynamicCache(), ids, mask=mask)[mask.bool()])


def test_packed_sequences_do_not_see_each_other(llama, dense_llama):
    ids = random_tokens(1, 30)
    positions = torch.cat([torch.arange(18), torch.arange(12)])[None]
    with torch.no_grad():
        packed = llama(ids, position_ids=positions, use_cache=False).logits
        expected = dense_llama(ids, position_ids=positions, use_cache=False).logits
        alone = dense_llama(ids[:, 18:], use_cache=False).logits
    close(packed, expected)
    close(packed[:, 18:], alone)


# Training


def test_training_without_a_cache_is_sdpas_with_dropout_and_gradients():
    grads = []
    ids = random_tokens(2, 20)
    for implementation in ("locks", "sdpa"):
        model = tiny_model("llama", implementation, attention_dropout=0.3).train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dropout_with_a_locks_cache_is_refused():
    model = tiny_model("llama", attention_dropout=0.3).train()
    with pytest.raises(ValueError, match=r"dropout 0\.3: call model\.eval\(\)"):
        model(random_tokens(1, 20), past_key_values=small_cache())


def test_a_loss_over_a_prompt_has_gradients_with_a_locks_cache(llama, dense_llama):
    ids = random_tokens(2, 20)
    grads = []
    for model, cache in ((llama, small_cache()), (dense_llama, DynamicCache())):
        weight = model.model.layers[0].self_attn.k_proj.weight
        loss = model(ids, past_key_values=cache, labels=ids).loss
        grads.append(torch.autograd.grad(loss, weight)[0])
    close(*grads)


def test_a_loss_over_left_padded_prompts_has_gradients_too(llama, dense_llama):
    ids, mask = padded_batch()
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    grads = []
    for model, cache in ((llama, small_cache()), (dense_llama, DynamicCache())):
        weights = [model.model.layers[0].self_attn.get_parameter(f"{name}_proj.weight") for name in "qkv"]
        loss = model(ids, past_key_values=cache, labels=ids.masked_fill(mask == 0, -100), **options).loss
        grads.append(torch.autograd.grad(loss, weights))
    for ours, expected in zip(*grads, strict=True):
        close(ours, expected)


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("size", (1, 9))
@pytest.mark.parametrize("budget", (12, 400))
def test_gradients_through_cached_tokens_are_refused_not_wrong(llama, budget, size, padded):
    ids = random_tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0 if padded else 1
    cache = small_cache(budget=budget)
    with torch.no_grad():
        llama(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
    tail = ids[:, 20 : 20 + size]
    loss = llama(tail, attention_mask=mask[:, : 20 + size], past_key_values=cache).logits.sum()
    with pytest.raises(ValueError, match=r"LocksCache is for inference.*torch\.no_grad\(\)"):
        loss.backward()


def test_gradients_of_values_alone_are_refused_too():
    model, ids = tiny_model("llama"), random_tokens(1, 30)
    for name, weight in model.named_parameters():
        weight.requires_grad_("v_proj" in name or "lm_head" in name)
    cache = small_cache()
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
    loss = model(ids[:, 20:], past_key_values=cache).logits.sum()
    with pytest.raises(ValueError, match="LocksCache is for inference"):
        loss.backward()


def test_a_mask_over_a_past_that_gradient_checkpointing_drops_is_refused():
    model = tiny_model("llama")
    ids, cache = random_tokens(1, 30), small_cache()
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="covers 30 positions, but the model attends 10: its cache was not used"):
        model(ids[:, 20:], past_key_values=cache, position_ids=torch.arange(20, 30)[None])


# Wrong pairs of model and cache


@pytest.mark.parametrize("implementation", ("sdpa", "eager"))
def test_a_locks_cache_on_another_implementation_raises_at_the_first_decode_step(implementation):
    model = tiny_model("llama", implementation)
    cache = small_cache()
    feed(model, cache, random_tokens(1, 20))  # a prompt alone is right, it is dense anyway
    with pytest.raises(ValueError, match=r"attn_implementation='locks'.*locks_hf\.patch\(model\)"):
        feed(model, cache, random_tokens(1, 1))
    with pytest.raises(ValueError, match=r"not 'locks'.*cache\.reset\(\)"):
        model.generate(random_tokens(1, 20), past_key_values=small_cache(), max_new_tokens=3)


def test_a_reset_cache_works_after_that_error(llama, dense_llama):
    ids, cache = random_tokens(1, 40), small_cache()
    with pytest.raises(ValueError, match="not 'locks'"):
        greedy(dense_llama, ids, 3, cache)
    cache.reset()
    assert torch.equal(greedy(llama, ids, 5, cache), greedy(llama, ids, 5, small_cache()))


@pytest.mark.parametrize("size", (1, 4))
def test_a_filled_cache_raises_on_another_implementation_before_a_token_comes_out(llama, dense_llama, size):
    """Not one step later: the new tokens alone would be attended."""
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 40))
    with pytest.raises(ValueError, match="not 'locks'"):
        feed(dense_llama, cache, random_tokens(1, size))


def test_what_update_returns_for_a_continued_sequence_is_no_answer():
    _, key, value = states(5)
    cache = small_cache()
    staged = cache.update(key, value, 0)
    assert staged[0] is key
    assert staged[1] is value
    locks_attention(Attention(2), states(5)[0], *staged, None)
    for size in (1, 4):
        query, key, value = states(size)
        staged = cache.update(key, value, 0)
        for tensor in staged:
            assert tensor.shape == (1, 2, 1 if size == 1 else cache.get_seq_length(), 8)
            assert tensor.isnan().all()
        output, _ = locks_attention(Attention(2), query, *staged, torch.ones(1, cache.get_seq_length()).bool())
        assert output.isfinite().all()


@pytest.mark.parametrize("name", ("mistral", *SLIDING))
@pytest.mark.parametrize("length", (10, 40), ids=("within the window", "beyond it"))
def test_sliding_layers_without_config_are_refused_with_the_fix(name, length):
    model = tiny_model(name, **SLIDING.get(name, {"sliding_window": 16}))
    with pytest.raises(ValueError, match=r"sliding-window layer \(16 tokens\).*config=model\.config"):
        feed(model, small_cache(), random_tokens(1, length))


def test_chunked_layers_without_config_are_refused_with_the_fix():
    model = tiny_model("llama4_text", **MIXED["llama4_text"])
    with pytest.raises(ValueError, match=r"config=model\.config"):
        feed(model, small_cache(), random_tokens(1, 40))


@pytest.mark.parametrize("name", ("qwen3_next", "lfm2", "jamba", "nemotron_h"))
def test_linear_layers_without_config_are_refused_with_the_fix(name):
    model = tiny_model(name, **MIXED.get(name, {}))
    with pytest.raises(ValueError, match=r"not full attention: pass config=model\.config"):
        model.generate(random_tokens(1, 20), past_key_values=small_cache(), max_new_tokens=2)


def test_a_model_of_sliding_layers_only_has_nothing_to_select():
    model = tiny_model("mistral", sliding_window=16)
    with pytest.raises(ValueError, match="MistralConfig has no full-attention layer"):
        LocksCache(config=model.config)


def test_layers_that_are_linear_and_full_at_once_are_refused():
    config = tiny_model("falcon_h1", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1).config
    with pytest.raises(ValueError, match="layer 0 of FalconH1Config needs a LinearAttentionAndFullAttentionLayer"):
        LocksCache(config=config)


def test_models_that_pick_tokens_by_an_index_of_their_own_are_refused():
    """They hand the index to an attention function that they do not know, instead of masking."""
    sizes = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    index = {"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    model = tiny_model("glm_moe_dsa", "sdpa", topk_group=1, first_k_dense_replace=2, **sizes, **ranks, **index, **rope)
    with patch(model), pytest.raises(ValueError, match=r"a sparse index of its own \(indices\)"):
        model(random_tokens(1, 40), use_cache=False)


def test_cross_attention_layers_are_refused():
    config = MllamaTextConfig(num_hidden_layers=3, cross_attention_layers=[1])
    with pytest.raises(ValueError, match=r"MllamaTextConfig has cross-attention layers \(\[1\]\)"):
        LocksCache(config=config)


GEMMA3N = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "intermediate_size": [48] * 4,
}


def test_layers_that_share_keys_are_refused():
    model = tiny_model("gemma3n_text", **GEMMA3N)
    with pytest.raises(ValueError, match=r"Gemma3nTextConfig attend the cached keys of other layers \(KV sharing\)"):
        LocksCache(config=model.config)
    # The same layers without sharing are served.
    plain = tiny_model("gemma3n_text", **{**GEMMA3N, "num_kv_shared_layers": 0})
    cache = small_cache(config=plain.config)
    greedy(plain, random_tokens(1, 40), 4, cache)
    assert cache.stats().sparse_steps == 3


def test_keys_attended_twice_are_refused():
    query, key, value = states(10)
    cache = small_cache()
    staged = cache.update(key, value, 0)
    locks_attention(Attention(2), query, *staged, None)
    with pytest.raises(ValueError, match=r"two layers .* same cached keys \(KV sharing\)"):
        locks_attention(Attention(2), query, *staged, None)


MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 4,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize("kv_lora_rank", (16, 8))
def test_latent_attention_is_refused(kv_lora_rank):
    """Whether what is cached differs in shape from keys and values, or looks like them."""
    model = tiny_model("deepseek_v3", **{**MLA, "kv_lora_rank": kv_lora_rank})
    with pytest.raises(ValueError, match="latent-attention model"):
        model.generate(random_tokens(1, 20), past_key_values=small_cache(), max_new_tokens=3)


# What attention refuses


def test_attention_that_is_not_causal_is_refused():
    module = Attention(2)
    module.is_causal = False
    with pytest.raises(ValueError, match=r"Attention is not causal.*locks_hf\.patch\(model\)"):
        locks_attention(module, *states(10), None)
    with pytest.raises(ValueError, match="not causal"):
        locks_attention(Attention(2), *states(10), None, is_causal=False)


def test_attention_is_causal_where_the_call_says_so():
    module = Attention(2)
    module.is_causal = False
    query, key, value = states(10)
    expected, _ = locks_attention(Attention(2), query, key.clone(), value, None)
    output, _ = locks_attention(module, query, key.clone(), value, None, is_causal=True)
    assert torch.equal(output, expected)
    staged = small_cache().update(key, value, 0)
    output, _ = locks_attention(module, query, *staged, None, is_causal=True)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("with_cache", (True, False))
@pytest.mark.parametrize(
    ("name", "feature"),
    (
        ("softcap", "logit soft-capping"),
        ("s_aux", "attention sinks"),
        ("sinks", "attention sinks"),
        ("position_bias", "a position bias"),
        ("indices", "a sparse index of its own"),
        ("block_indices", "a sparse index of its own"),
    ),
)
def test_features_that_sdpa_would_drop_are_refused(name, feature, with_cache):
    query, key, value = states(10)
    if with_cache:
        key, value = small_cache().update(key, value, 0)
    with pytest.raises(ValueError, match=rf"{feature} \({name}\)"):
        locks_attention(Attention(2), query, key, value, None, **{name: torch.ones(1)})


def test_a_custom_mask_is_refused_with_a_locks_cache(llama):
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    mask[..., 15:, :5] = False
    with pytest.raises(ValueError, match=r"2-D padding mask, got torch.bool of shape \(1, 1, 20, 20\)"):
        llama(random_tokens(1, 20), attention_mask=mask, past_key_values=small_cache())


def test_a_mask_over_too_few_tokens_is_refused_and_keeps_nothing():
    query, key, value = states(20)
    cache = small_cache()
    staged = cache.update(key, value, 0)
    mask = torch.ones(1, 15, dtype=torch.bool)
    mask[0, 0] = False
    with pytest.raises(ValueError, match=r"covers 15 positions, but 0 are cached and 20 new: .* cached ones included"):
        locks_attention(Attention(2), query, *staged, mask)
    assert cache.get_seq_length() == 0
    mask = torch.ones(1, 20, dtype=torch.bool)
    locks_attention(Attention(2), query, *cache.update(key.clone(), value, 0), mask)
    assert cache.get_seq_length() == 20


# The mask function


def test_the_mask_is_none_without_padding_and_two_dimensional_with_it():
    mask = torch.ones(2, 9, dtype=torch.bool)
    for given in (None, mask):
        assert locks_mask(2, 9, 9, 0, attention_mask=given) is None
        assert locks_mask(2, 1, 9, 8, attention_mask=given) is None
        # For SDPA, None means that the first new token sees the first key only.
        assert torch.equal(locks_mask(2, 5, 9, 4, attention_mask=given), mask)
    mask[1, 0] = False
    for size in (1, 5, 9):
        assert locks_mask(2, size, 9, 9 - size, attention_mask=mask) is mask


def test_the_mask_is_four_dimensional_where_the_pattern_is_not_plainly_causal():
    def window(batch_idx, head_idx, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx > q_idx - 3)

    mask = locks_mask(2, 5, 9, 4, mask_function=window, allow_is_causal_skip=False)
    assert mask.shape == (2, 1, 5, 9)
    expected = torch.tensor([[4 + q - 3 < k <= 4 + q for k in range(9)] for q in range(5)])
    assert torch.equal(mask[0, 0], expected)
    # A static cache has room behind the tokens.
    assert locks_mask(2, 5, 20, 4, allow_is_causal_skip=False).shape == (2, 1, 5, 20)


def test_a_long_prefill_builds_no_square_mask(llama, monkeypatch):
    import locks_hf.attention

    def refuse(**kwargs):
        raise AssertionError(f"a mask of {kwargs['q_length']} x {kwargs['kv_length']}")

    monkeypatch.setattr(locks_hf.attention, "sdpa_mask", refuse)
    ids, mask = padded_batch()
    cache = small_cache()
    feed(llama, cache, ids, *one_by_one(random_tokens(3, 3)), mask=torch.cat([mask, mask[:, -3:]], dim=1))
    feed(llama, small_cache(), ids, ids)


# The hand-off


def test_only_the_very_tensor_that_update_returned_is_taken():
    _, key, value = states(10)
    cache = small_cache()
    staged, _ = cache.update(key, value, 0)
    assert handoff.take(key.clone()) is None
    assert handoff.take(staged[:]) is None
    assert handoff.take(staged) is cache.layers[0]
    assert handoff.pending() is None


def test_the_last_updated_layer_is_the_one_that_is_asked():
    _, key, value = states(10)
    cache, other = small_cache(), small_cache()
    first, _ = cache.update(key, value, 0)
    second, _ = other.update(key.clone(), value, 0)
    assert handoff.take(second) is other.layers[0]
    assert handoff.take(first) is None


def test_each_thread_has_a_hand_off_of_its_own():
    _, key, value = states(10)
    cache, other = small_cache(), small_cache()
    staged, _ = cache.update(key, value, 0)
    elsewhere = []

    def update_and_take():
        elsewhere.append(handoff.take(staged))
        theirs, _ = other.update(key.clone(), value, 0)
        elsewhere.append(handoff.take(theirs))

    thread = threading.Thread(target=update_and_take)
    thread.start()
    thread.join()
    assert elsewhere == [None, other.layers[0]]
    assert handoff.take(staged) is cache.layers[0]


def test_a_mask_is_read_by_position(llama):
    """Columns past the tokens are ignored, as Transformers ignores them; too few columns are an error."""
    ids = random_tokens(1, 40)
    mask = torch.zeros(1, 64, dtype=torch.long)
    mask[:, 5:40] = 1
    expected = llama(ids, attention_mask=mask[:, :40], past_key_values=small_cache()).logits
    cache = small_cache()
    torch.testing.assert_close(llama(ids, attention_mask=mask, past_key_values=cache).logits, expected)
    assert cache.layers[0].row_lengths == [35]
    with pytest.raises(ValueError, match=r"covers 3 positions, but 40 are cached and 3 new"):
        llama(random_tokens(1, 3), attention_mask=torch.tensor([[0, 1, 1]]), past_key_values=cache)


def test_a_caller_that_combines_the_mask_gets_all_of_it():
    """Models that add their own pattern to the causal one rule out the skip."""
    mask = locks_mask(2, 9, 9, 0, allow_is_causal_skip=False)
    assert mask.shape[-2:] == (9, 9)
    assert torch.equal(mask[0, 0], torch.ones(9, 9, dtype=torch.bool).tril())


class EveryPage(OracleSelector):
    """A selector that returns more slots than the budget has, or something else than pages."""

    def __init__(self, change):
        self.change = change

    def select(self, query, pages, config, scaling):
        return self.change(super().select(query, pages, config, scaling))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pages: torch.cat([pages, pages], -1), "set fixed_slots = False"),
        (lambda pages: pages.long(), "must return int32 pages"),
        (lambda pages: pages[:, 0], "must return int32 pages"),
    ],
)
def test_a_selection_that_is_none_is_refused(llama, change, message):
    with pytest.raises(ValueError, match=message):
        greedy(llama, random_tokens(1, 60), 4, LocksCache(rank=2, budget=32, selector=EveryPage(change)))


@pytest.mark.parametrize("selector", ["locks", "oracle", "quest"])
def test_autocast(llama, selector):
    with torch.autocast("cpu", torch.bfloat16):
        cache = LocksCache(rank=2, budget=32, selector=selector)
        greedy(llama, random_tokens(1, 60), 4, cache)
    assert cache.stats().sparse_steps == 3


def test_layers_out_of_step_are_refused(llama):
    cache = small_cache()
    greedy(llama, random_tokens(1, 40), 3, cache)
    cache.layers[1].crop(-1)  # as if the last pass had been interrupted before this layer
    with pytest.raises(ValueError, match=r"hold \[41, 42\] tokens: a forward pass was interrupted"):
        llama(random_tokens(1, 1), past_key_values=cache)
    cache.reset()
    greedy(llama, random_tokens(1, 40), 3, cache)


def interrupt(model, layer, *args, **kwargs):
    """Run a forward pass that ends after the attention of one layer."""

    def stop(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[layer].mlp.register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            model(*args, **kwargs)
    finally:
        hook.remove()


@pytest.mark.parametrize("size", (1, 25))
@pytest.mark.parametrize("filled", (0, 20))
@pytest.mark.parametrize("name", ("llama", "gemma3_text", "cohere2"))
def test_a_cache_whose_pass_was_interrupted_is_refused(name, filled, size):
    model = tiny_model(name, **SLIDING.get(name, {}))
    caches = [small_cache(config=model.config)]
    if name not in SLIDING:
        caches.append(small_cache())
    for cache in caches:
        with torch.no_grad():
            if filled:
                model(random_tokens(1, filled), past_key_values=cache)
            interrupt(model, 0, random_tokens(1, size), past_key_values=cache)
            for attempt in range(2):
                with pytest.raises(ValueError, match=r"a forward pass was interrupted.*cache\.reset\(\)"):
                    model(random_tokens(1, size, seed=attempt), past_key_values=cache)
            cache.reset()
            expected = model(random_tokens(1, 20), past_key_values=small_cache(config=model.config)).logits
            close(model(random_tokens(1, 20), past_key_values=cache).logits, expected)


def test_a_refusal_inside_a_hybrid_model_leaves_no_usable_cache():
    model = tiny_model("gemma3_text", **SLIDING["gemma3_text"])
    cache = small_cache(config=model.config)
    feed(model, cache, random_tokens(1, 10))
    with pytest.raises(ValueError, match="covers 3 positions"):
        model(random_tokens(1, 3), attention_mask=torch.tensor([[0, 1, 1]]), past_key_values=cache)
    with pytest.raises(ValueError, match=r"hold \[10, 13\] tokens: a forward pass was interrupted"):
        feed(model, cache, random_tokens(1, 3))


def test_a_cache_filled_by_a_model_with_fewer_layers_is_refused(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 20))
    with pytest.raises(ValueError, match=r"hold \[0, 20\] tokens:.* or the cache was filled by another model"):
        feed(tiny_model("llama", num_hidden_layers=4), cache, random_tokens(1, 5))


def test_a_padding_mask_with_rows_missing_is_refused(llama):
    ids, mask = padded_batch()
    for rows in (mask[:1], mask[[0, 1, 2, 0]]):
        with pytest.raises(ValueError, match=rf"the attention mask has {len(rows)} rows for a batch of 3"):
            llama(ids, attention_mask=rows, past_key_values=small_cache())


def test_a_misused_cache_does_not_stay_in_memory():
    cache = small_cache()
    _, key, value = states(10)
    cache.update(key, value, 0)
    layer = weakref.ref(cache.layers[0])
    del cache
    gc.collect()
    assert layer() is None


def test_an_additive_mask_of_one_token_is_refused(llama):
    cache = small_cache()
    with torch.no_grad():
        for _ in range(2):  # on the first token and on a later one
            with pytest.raises(
                ValueError, match=r"takes a 2-D padding mask, got torch.float32 of shape \(1, 1, 1, 1\)"
            ):
                llama(random_tokens(1, 1), past_key_values=cache, attention_mask=torch.zeros(1, 1, 1, 1))
            cache.reset()
            llama(random_tokens(1, 20), past_key_values=cache)


def test_a_step_reads_its_mask_once_a_layer(llama, monkeypatch):
    """Also where selectors need the host: asking twice would wait for the device again."""
    asked, read = [], PaddingReader.new_tokens
    monkeypatch.setattr(PaddingReader, "new_tokens", lambda *args, **kwargs: asked.append(1) or read(*args, **kwargs))
    cache, mask = small_cache(selector="quest"), torch.ones(1, 21, dtype=torch.long)
    mask[0, 0] = 0
    with torch.no_grad():
        llama(random_tokens(1, 20), past_key_values=cache, attention_mask=mask[:, :20])
        asked.clear()
        llama(random_tokens(1, 1), past_key_values=cache, attention_mask=mask)
    assert len(asked) == len(cache.layers)
