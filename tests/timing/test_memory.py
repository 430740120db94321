import pytest
import torch

from locks_hf import LocksCache
from locks_hf.timing.arms import needs, parse_arm
from locks_hf.timing.clock import CpuClock
from locks_hf.timing.memory import GIB, Needs, free_bytes, refusal
from locks_hf.timing.prefill import prefill_needs
from locks_hf.timing.shapes import resolve_shape

CLOCK = CpuClock(torch.device("cpu"))
MILLION = 1 << 20


@pytest.fixture(scope="module")
def glm():
    return resolve_shape("glm-4-9b-1m")


def need(shape, name, context=MILLION, batch=1, room=0):
    return needs(shape, parse_arm(name), context, batch, room, torch.bfloat16, CLOCK)


def test_glm_at_a_million_tokens(glm):
    dense = need(glm, "cudnn")
    assert dense.weights == 2 * glm.parameters
    assert dense.kv == 80 * 1024 * MILLION  # 80 KiB a token over 40 layers
    locks = need(glm, "locks-r4i4")
    assert locks.summaries == 40 * 4 * (MILLION // 16) * 490
    assert need(glm, "locks-r8i4").summaries == 40 * 4 * (MILLION // 16) * 818
    assert need(glm, "quest").summaries == 40 * 4 * (MILLION // 16) * 512
    assert dense.total < locks.total < 139 * GIB  # one H200
    assert need(glm, "none").total < 20 * GIB
    assert need(glm, "cudnn", batch=2).total > 139 * GIB


def test_the_estimate_is_what_the_cache_allocates(tiny_shape):
    from locks_hf.timing.fill import fill_synthetic

    cache = LocksCache(rank=4, budget=64, max_cache_len=320)
    shape = (tiny_shape.layers, 3, tiny_shape.kv_heads, 300, tiny_shape.head_dim)
    fill_synthetic(cache, *shape, torch.device("cpu"), torch.float32, 0)
    estimate = needs(tiny_shape, parse_arm("locks-r4i4"), 300, 3, 20, torch.float32, CLOCK)
    assert cache.nbytes == estimate.kv + estimate.summaries


def test_chunks_make_a_prefill_smaller(glm):
    arguments = (glm, "locks-r4i4", 512 << 10, 1)
    whole, pieces = (prefill_needs(*arguments, chunk, torch.bfloat16, CLOCK) for chunk in (None, 8192))
    assert whole.kv == pieces.kv and whole.summaries == pieces.summaries > 0
    assert whole.workspace > 20 * pieces.workspace


def test_a_refusal_names_what_is_needed_and_what_is_free():
    needs = Needs(weights=18 * GIB, kv=80 * GIB, summaries=5 * GIB, workspace=GIB)
    reason = refusal(needs, 100 * GIB)
    assert reason == (
        "needs 104.00 GiB (weights 18.00, kv 80.00, summaries 5.00, workspace 1.00), and 100.00 GiB are free"
    )
    assert refusal(needs, 104 * GIB) is None


def test_a_limit_is_kept():
    assert free_bytes(torch.device("cpu"), 0.5) <= GIB // 2 < free_bytes(torch.device("cpu"))
