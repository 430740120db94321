"""What only a GPU shows: captured graphs do what the steps do, and every backend that is installed is exact."""

import json

import pytest
import torch

from locks_hf.timing.__main__ import main
from locks_hf.timing.append import append_triton
from locks_hf.timing.arms import Bench, HeldContext, open_session, parse_arm
from locks_hf.timing.backends import DENSE, Held, make_backend
from locks_hf.timing.clock import CpuClock, make_clock
from locks_hf.timing.harness import Compiler, Protocol, many_arms
from locks_hf.timing.monitor import Monitor
from locks_hf.timing.shapes import make_model, resolve_shape
from locks_hf.timing.store import read_cells

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 8, 2, 128, 4096


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """A small model with a head_dim that every backend has kernels for."""
    folder = tmp_path_factory.mktemp("small")
    config = resolve_shape("tiny").config
    config.update({"head_dim": HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS})
    config.update({"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 4})
    config.save_pretrained(folder)
    return resolve_shape(str(folder))


@pytest.fixture(scope="module")
def clock(shape):
    return make_clock("cuda", shape.name)


@pytest.fixture(scope="module")
def model(shape, clock):
    return make_model(shape, clock.device, torch.bfloat16, 0)


@pytest.mark.parametrize("length", (2, 17, 2049, 4096))
@pytest.mark.parametrize("rows", (1, 3))
@pytest.mark.parametrize("name", (*DENSE, "quest"))
def test_backends_are_exact_inside_a_graph(clock, name, rows, length):
    backend = make_backend(name, CAPACITY, clock.device)
    if (reason := backend.unavailable(clock.device)) is not None:
        pytest.skip(reason)
    generator = torch.Generator("cuda").manual_seed(length)

    def draw(*size):
        return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

    held = Held(*(list(draw(3, rows, KV_HEADS, CAPACITY, HEAD_DIM)) for _ in range(2)), length, HEADS)
    query = draw(rows, 1, HEADS, HEAD_DIM).transpose(1, 2)
    key, value = (draw(rows, 1, KV_HEADS, HEAD_DIM).transpose(1, 2) for _ in range(2))
    backend.bind(held)
    out = []
    with torch.no_grad():
        replay = clock.capture(lambda: out.append(backend.attend(2, query, key, value, HEAD_DIM**-0.5)))
    out[-1].zero_()
    replay()
    assert torch.equal(held.keys[2][:, :, length - 1], key[:, :, 0])
    keys, values = (x[2][:, :, :length].float() for x in (held.keys, held.values))
    exact = torch.nn.functional.scaled_dot_product_attention(query.float(), keys, values, enable_gqa=True)
    torch.testing.assert_close(out[-1].float(), exact.transpose(1, 2), rtol=2e-2, atol=2e-2)


def test_the_append_kernel_on_the_gpu(clock):
    keys, values = torch.randn(2, 2, 3, 64, 128, device="cuda", dtype=torch.bfloat16).unbind(0)
    key, value = torch.randn(2, 2, 3, 128, device="cuda", dtype=torch.bfloat16).unbind(0)
    query = torch.randn(2, 21, 128, device="cuda", dtype=torch.bfloat16)
    envelopes = torch.zeros(2, 3, 4, 256, device="cuda", dtype=torch.bfloat16)
    halves = append_triton(key, value, keys, values, 40, query, envelopes)
    assert torch.equal(keys[:, :, 40], key) and torch.equal(values[:, :, 40], value)
    grouped = query.unflatten(1, (3, 7))
    assert torch.equal(halves, torch.cat([grouped.clamp(max=0), grouped.clamp(min=0)], -1))
    assert torch.equal(envelopes[:, :, 2], torch.cat([key.clamp(max=0), key.clamp(min=0)], -1))
    assert not envelopes[:, :, [0, 1, 3]].any()


class Uncaptured(CpuClock):
    """The host's clock on a GPU: the same steps, not in a graph."""


@pytest.fixture
def logits_after(shape, clock, model):
    """The logits after so many steps of an arm, captured or not, compiled or not."""

    def run(steps, name, captured, compiler, budget=256):
        timer = clock if captured else Uncaptured(clock.device)
        bench = Bench(shape, model, timer, compiler, Protocol(), torch.bfloat16, budget=budget)
        with open_session(bench, parse_arm(name), 1000, 2, HeldContext(bench, 1000, 2)) as session:
            for _ in range(steps):
                session.step()
            timer.wait()
            torch.cuda.synchronize()
            return session.logits().float().clone()

    return run


ARMS = ("cudnn", "flash", "quest", "locks-r4i4", "locks-r8i4")


@pytest.mark.parametrize("kind", ("eager", "compiled"))
@pytest.mark.parametrize("name", ARMS)
def test_replays_do_what_the_steps_do(clock, logits_after, name, kind):
    with many_arms():
        compiler = Compiler(kind, "default", clock.device)
        steps, replays = (logits_after(20, name, captured, compiler) for captured in (False, True))
    torch.testing.assert_close(replays, steps, rtol=0.1, atol=0.1)
    assert torch.isfinite(replays).all()


@pytest.mark.parametrize("name", ARMS)
def test_compiled_steps_do_what_eager_ones_do(clock, logits_after, name):
    # Compiled code rounds otherwise, so that soon other pages and tokens are the likeliest: one step over all pages.
    with many_arms():
        eager, compiled = (
            logits_after(1, name, True, Compiler(kind, "default", clock.device), budget=1040)
            for kind in ("eager", "compiled")
        )
    torch.testing.assert_close(compiled, eager, rtol=0.1, atol=0.1)


def test_the_gpu_is_read(clock):
    sample = Monitor(clock.device).sample()
    assert sample.source in ("nvml", "nvidia-smi") and sample.sm_mhz > 0 and sample.slowed is not None


@pytest.mark.parametrize(
    "command",
    (
        ["decode", "--contexts", "1K", "5K", "--batch", "1", "3", "--window", "8", "--settle", "0.2", "--profile"],
        ["decode", "--contexts", "1K", "--arms", "dynamic", "static", "--window", "8", "--settle", "0"],
        ["prefill", "--contexts", "5K", "--chunk", "2K", "--repeats", "1"],
        ["longgen", "--prompt", "1K", "--new", "2K", "--bucket", "1K", "--step", "eager"],
        ["kernels", "--contexts", "16K", "--repeats", "3"],
        ["generate", "--contexts", "4K", "--new", "24", "--skip", "12"],
    ),
    ids=lambda command: " ".join(command[:3]),
)
def test_commands_on_the_gpu(shape, tmp_path, command):
    assert main([*command, "--shape", shape.name, "--budget", "256", "--output", str(tmp_path)]) == 0
    cells, _ = read_cells(tmp_path / "cells.jsonl")
    assert cells and {cell["status"] for cell in cells} <= {"ok", "absent"}, json.dumps(
        [cell for cell in cells if cell["status"] not in ("ok", "absent")], indent=1
    )
    if "--profile" in command:
        locks = [cell for cell in cells if cell["cell"]["arm"] == "locks-r4i4"]
        assert all(cell["profile"]["terms_us"]["score"] > 0 for cell in locks)
