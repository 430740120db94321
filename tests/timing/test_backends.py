import os
import subprocess
import sys

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from locks_hf.timing.backends import (
    IMPLEMENTATION,
    PAGE,
    Fa3Backend,
    FlashInferBackend,
    Held,
    attending,
    make_backend,
    make_envelopes,
    registered,
)

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, CAPACITY, SCALING = 6, 2, 16, 96, 0.3


def held_of(rows, length, layers=3):
    generator = torch.Generator().manual_seed(length)
    shape = (layers, rows, KV_HEADS, CAPACITY, HEAD_DIM)
    keys, values = (list(torch.randn(shape, generator=generator)) for _ in range(2))
    for one in (*keys, *values):
        one[:, :, length:] = float("nan")  # never to be attended
    return Held(keys, values, length, HEADS)


def new_token(rows):
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 1, HEADS, HEAD_DIM), (rows, 1, KV_HEADS, HEAD_DIM), (rows, 1, KV_HEADS, HEAD_DIM))
    return [torch.randn(shape, generator=generator).transpose(1, 2) for shape in shapes]  # strides as in a model


def exact(held, layer, query, key, value, pages=None):
    """Attention over all tokens in float64, or over those of each query head's pages ``(B, heads, slots)``."""
    keys, values = (x[layer][:, :, : held.length].double().clone() for x in (held.keys, held.values))
    keys[:, :, -1], values[:, :, -1] = key[:, :, 0], value[:, :, 0]
    group = HEADS // KV_HEADS
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    logits = (query.double() @ keys.transpose(-1, -2)) * SCALING
    if pages is not None:
        of_token = torch.arange(held.length) // PAGE
        chosen = (of_token[None, None, :, None] == pages[:, :, None, :]).any(-1)
        logits = logits.masked_fill(~chosen[:, :, None], float("-inf"))
    return (logits.softmax(-1) @ values).transpose(1, 2).float()


@pytest.mark.parametrize("length", (1, 17, 48, 95))
@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("grouped", (True, False), ids=("grouped", "as-tokens"))
@pytest.mark.parametrize("name", ("math", "flash"))
def test_dense_backends_attend_exactly_the_length_with_the_new_token(name, grouped, rows, length):
    held, token, backend = held_of(rows, length), new_token(rows), make_backend(name, 64, CPU)
    backend.bind(held)
    backend._grouped = backend._grouped and grouped
    for layer in range(3):
        out = backend.attend(layer, *token, SCALING)
        assert out.shape == (rows, 1, HEADS, HEAD_DIM) and out.is_contiguous()
        torch.testing.assert_close(out, exact(held, layer, *token))
        assert torch.equal(held.keys[layer][:, :, length - 1], token[1][:, :, 0])
        assert torch.equal(held.values[layer][:, :, length - 1], token[2][:, :, 0])


@pytest.mark.parametrize("length", (5, 48, 95))
def test_quest_attends_everything_under_a_large_budget(length):
    held, token, backend = held_of(2, length), new_token(2), make_backend("quest", CAPACITY, CPU)
    backend.bind(held)
    for layer in range(3):
        torch.testing.assert_close(backend.attend(layer, *token, SCALING), exact(held, layer, *token))


def test_quest_keeps_two_layers_dense_and_lets_each_query_head_choose_its_pages():
    held, token, backend = held_of(2, 90), new_token(2), make_backend("quest", 3 * PAGE, CPU)
    backend.bind(held)
    for layer in (0, 1):
        torch.testing.assert_close(backend.attend(layer, *token, SCALING), exact(held, layer, *token))
    out = backend.attend(2, *token, SCALING)
    keys = held.keys[2][:, :, :90]  # with the new token
    score = []
    for page in keys.split(PAGE, dim=2):
        low, high = page.amin(2).repeat_interleave(3, 1), page.amax(2).repeat_interleave(3, 1)
        query = token[0][:, :, 0]
        score.append(torch.maximum(query * low, query * high).sum(-1))
    score = torch.stack(score, -1)
    score[..., 0] = score[..., -1] = float("inf")
    pages = score.topk(3, dim=-1).indices
    assert len({tuple(sorted(head.tolist())) for head in pages[0]}) > 1  # heads differ, or the test shows nothing
    torch.testing.assert_close(out, exact(held, 2, *token, pages))


def test_quest_reads_keys_without_copying_them(monkeypatch):
    from locks_hf.timing import backends

    seen = []

    def attend(query, keys, values, *rest):
        seen.append((keys.data_ptr(), keys.stride(1)))
        return torch.zeros_like(query)

    monkeypatch.setattr(backends, "attend", attend)
    held, backend = held_of(2, 90), make_backend("quest", 48, CPU)
    backend.bind(held)
    backend.attend(2, *new_token(2), SCALING)
    assert seen == [(held.keys[2].data_ptr(), 0)]


def test_envelopes_cover_an_incomplete_last_page():
    keys = torch.randn(1, 2, 48, 8)
    envelopes = make_envelopes(keys, 37)
    assert envelopes.shape == (1, 2, 3, 16)
    assert torch.equal(envelopes[:, :, 2, :8], keys[:, :, 32:37].amin(2))
    assert torch.equal(envelopes[:, :, 1, 8:], keys[:, :, 16:32].amax(2))


class FakeFlashInfer:
    """Does what the wrapper of FlashInfer's documentation does, in torch."""

    __version__ = "0"

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, workspace, layout, use_cuda_graph, use_tensor_cores, **buffers):
            assert layout == "HND" and use_cuda_graph
            assert {name for name in buffers} == {
                "paged_kv_indptr_buffer",
                "paged_kv_indices_buffer",
                "paged_kv_last_page_len_buffer",
            }

        def plan(
            self, indptr, indices, last, heads, kv_heads, head_dim, page, *, pos_encoding_mode, q_data_type, sm_scale
        ):
            assert indptr.dtype == indices.dtype == last.dtype == torch.int32
            self.table, self.group, self.scale = (indptr, indices, last), heads // kv_heads, sm_scale

        def run(self, query, pages):
            indptr, indices, last = self.table
            out = []
            for row in range(query.shape[0]):
                mine = indices[indptr[row] : indptr[row + 1]].long()
                length = (len(mine) - 1) * PAGE + int(last[row])
                keys, values = (
                    x[mine].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(self.group, 0) for x in pages
                )
                weights = (torch.einsum("hd,htd->ht", query[row], keys) * self.scale).softmax(-1)
                out.append(torch.einsum("ht,htd->hd", weights, values))
            return torch.stack(out)


@pytest.mark.parametrize("length", (3, 48, 90))
@pytest.mark.parametrize("rows", (1, 3))
def test_the_page_table_for_flashinfer_names_the_right_tokens(rows, length):
    held, token, backend = held_of(rows, length), new_token(rows), FlashInferBackend()
    backend._module = FakeFlashInfer
    backend.bind(held)
    for layer in range(3):
        torch.testing.assert_close(backend.attend(layer, *token, SCALING), exact(held, layer, *token))


@pytest.mark.parametrize("gives_lse", (False, True))
def test_fa3_gets_its_layout(gives_lse):
    held, token, backend = held_of(2, 50), new_token(2), Fa3Backend()

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, softmax_scale, causal):
        assert q.shape == (2, 1, HEADS, HEAD_DIM) and k_cache.shape == (2, 50, KV_HEADS, HEAD_DIM)
        assert cache_seqlens.tolist() == [50, 50] and cache_seqlens.dtype == torch.int32 and not causal
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k_cache, v_cache)), scale=softmax_scale, enable_gqa=True
        ).transpose(1, 2)
        return (out, None) if gives_lse else out

    backend._function = flash_attn_with_kvcache
    backend.bind(held)
    torch.testing.assert_close(backend.attend(1, *token, SCALING), exact(held, 1, *token))


@pytest.mark.parametrize("name", ("cudnn", "fa3", "flashinfer"))
def test_backends_say_why_they_are_absent(name):
    assert "needs a CUDA device" in make_backend(name, 64, CPU).unavailable(CPU)


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="unknown backend 'xformers'; there are: cudnn, flash"):
        make_backend("xformers", 64, CPU)


def test_the_model_is_on_the_held_context_only_inside_the_block(tiny, tiny_shape):
    generator = torch.Generator().manual_seed(0)
    shape = (tiny_shape.layers, 1, tiny_shape.kv_heads, 32, tiny_shape.head_dim)
    held = Held(*(list(torch.randn(shape, generator=generator)) for _ in range(2)), length=20, heads=tiny_shape.heads)
    backend = make_backend("math", 64, CPU)
    backend.bind(held)
    token = torch.tensor([[3]])
    with registered(tiny):
        with attending(backend):
            inside = tiny(token, position_ids=torch.tensor([[19]]), use_cache=False).logits
        with pytest.raises(RuntimeError, match="no backend is bound"):
            tiny(token, use_cache=False)
    assert IMPLEMENTATION not in ALL_ATTENTION_FUNCTIONS
    assert tiny.config._attn_implementation == "sdpa"
    # The same through a cache of Transformers.
    from transformers import DynamicCache

    from locks_hf.timing.fill import cache_argument

    cache = DynamicCache()
    for layer in range(tiny_shape.layers):
        cache.update(held.keys[layer][:, :, :19], held.values[layer][:, :, :19], layer)
    outside = tiny(token, position_ids=torch.tensor([[19]]), **{cache_argument(tiny): cache}).logits
    torch.testing.assert_close(inside, outside)


_INTERPRETED = """
import torch
from locks_hf.timing.append import append_triton
for rows, heads, group, d in ((1, 2, 4, 16), (3, 1, 1, 24), (2, 3, 7, 8)):
    keys, values = torch.randn(2, rows, heads, 48, d).unbind(0)
    key, value = torch.randn(2, rows, 1, heads, d).transpose(2, 3)[:, :, :, 0].unbind(0)
    wanted_keys, wanted_values = keys.clone(), values.clone()
    wanted_keys[:, :, 37], wanted_values[:, :, 37] = key, value
    assert append_triton(key, value, keys, values, 37) is None
    assert torch.equal(keys, wanted_keys) and torch.equal(values, wanted_values)
    query = torch.randn(rows, heads * group, d)
    envelopes = torch.cat([torch.zeros(rows, heads, 3, d), torch.ones(rows, heads, 3, d)], -1)
    wanted = envelopes.clone()
    wanted[:, :, 2, :d] = torch.minimum(wanted[:, :, 2, :d], key)
    wanted[:, :, 2, d:] = torch.maximum(wanted[:, :, 2, d:], key)
    halves = append_triton(key, value, keys, values, 37, query, envelopes)
    grouped = query.unflatten(1, (heads, group))
    assert torch.equal(halves, torch.cat([grouped.clamp(max=0), grouped.clamp(min=0)], -1))
    assert torch.equal(envelopes, wanted)
print("equal")
"""


def interpreted(*command):
    """Run Python with Triton's interpreter, in a process of its own: Triton reads the variable when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)


def test_the_append_kernel_writes_what_it_should():
    done = interpreted("-c", _INTERPRETED)
    assert done.stdout == "equal\n", done.stderr[-2000:]


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this is the process in which the kernels run")
def test_quest_and_dense_backends_hold_with_the_kernels():
    tests = "quest_attends or quest_keeps or (dense_backends and math and 17)"
    done = interpreted("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", tests)
    assert done.returncode == 0, done.stdout[-2000:]
