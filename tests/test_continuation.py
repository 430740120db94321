"""Dense attention of tokens that continue a cache, by masks and in two parts, against float64."""

import pytest
import torch

from locks_hf import continuation
from locks_hf.continuation import continue_densely, in_two_parts


def draw(rows, heads, group, size, start, head_dim, dtype=torch.float32, device="cpu"):
    generator = torch.Generator(device).manual_seed(size * 1000 + start)
    shapes = ((rows, heads * group, size), *[(rows, heads, start + size)] * 2)
    return [torch.randn(*s, head_dim, generator=generator, device=device).to(dtype) for s in shapes]


def exact(query, keys, values, start, scaling):
    query, keys, values = (x.double() for x in (query, keys, values))
    group = query.shape[1] // keys.shape[1]
    logits = query @ keys.repeat_interleave(group, 1).mT * scaling
    seen = torch.arange(keys.shape[2], device=query.device) <= start + torch.arange(query.shape[2])[:, None].to(
        query.device
    )
    out = logits.masked_fill(~seen, float("-inf")).softmax(-1) @ values.repeat_interleave(group, 1)
    return out.transpose(1, 2)


def plain_part(query, keys, values, causal, scaling):
    group = query.shape[1] // keys.shape[1]
    logits = query @ keys.repeat_interleave(group, 1).mT * scaling
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), float("-inf"))
    return logits.softmax(-1) @ values.repeat_interleave(group, 1), logits.logsumexp(-1)


@pytest.mark.parametrize("size", (2, 3, 16, 33))
@pytest.mark.parametrize("start", (1, 17, 64))
@pytest.mark.parametrize("group", (1, 3))
def test_masks_and_two_parts_are_exact(monkeypatch, group, start, size):
    monkeypatch.setattr(continuation, "_MASK_ROWS", 10)
    monkeypatch.setattr(continuation, "_MERGED_QUERIES", 7)
    query, keys, values = draw(2, 2, group, size, start, 24)
    want = exact(query, keys, values, start, 0.3).float()
    torch.testing.assert_close(continue_densely(query, keys, values, start, 0.3), want)
    parts = in_two_parts(plain_part, query, keys, values, start, 0.3).transpose(1, 2)
    torch.testing.assert_close(parts, want)


@pytest.mark.parametrize("factor", (300.0, -300.0))
def test_parts_that_weigh_nothing_beside_the_other(factor):
    query, keys, values = draw(1, 2, 2, 5, 20, 16)
    query[..., 0], keys[..., 0] = 1, 0
    keys[:, :, :20, 0] = factor
    want = exact(query, keys, values, 20, 1.0).float()
    parts = in_two_parts(plain_part, query, keys, values, 20, 1.0).transpose(1, 2)
    torch.testing.assert_close(parts, want, rtol=1e-4, atol=1e-4)


def test_a_nan_in_the_past_reaches_the_output():
    query, keys, values = draw(1, 1, 2, 4, 10, 16)
    keys[0, 0, 3, 5] = float("nan")
    assert continue_densely(query, keys, values, 10, 0.3).isnan().all()
    assert in_two_parts(plain_part, query, keys, values, 10, 0.3).isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
@pytest.mark.parametrize(("size", "start"), ((2, 5000), (300, 17), (1000, 2049)))
def test_on_a_gpu(dtype, head_dim, size, start):
    query, keys, values = draw(2, 2, 4, size, start, head_dim, dtype, "cuda")
    buffers = [torch.zeros(2, 2, start + size + 100, head_dim, dtype=dtype, device="cuda") for _ in range(2)]
    for buffer, x in zip(buffers, (keys, values), strict=True):
        buffer[:, :, : start + size] = x
    held = [buffer[:, :, : start + size] for buffer in buffers]
    kernel = continuation._part_with_lse(query, *held)
    assert (kernel is None) == (dtype == torch.float32)
    got = continue_densely(query, *held, start, head_dim**-0.5).double()
    want = exact(query, keys, values, start, head_dim**-0.5)
    assert ((got - want).norm() / want.norm()).item() < (1e-3 if dtype == torch.float32 else 1e-2)
