"""Linear layers that stream their weights: the same numbers, and nothing left on the model."""

import copy
import importlib
import pickle
import sys
import weakref

import pytest
import torch
from torch import nn

from locks_hf import patch, unpatch
from locks_hf.kernels import linear
from locks_hf.linears import FastLinear, fast_linears
from tests.helpers import tiny_model

linear_module = importlib.import_module("locks_hf.kernels.linear")
recording = importlib.import_module("locks_hf.linears")._recording


@pytest.mark.parametrize(
    ("x", "weight", "bias", "match"),
    [
        (torch.ones(2, 3), torch.ones(4, 5), None, "do not fit"),
        (torch.ones(2, 3), torch.ones(4, 3), torch.ones(3), "do not fit"),
        (torch.ones(2, 3), torch.ones(3), None, "do not fit"),
        (torch.ones(2, 3), torch.ones(4, 3).half(), None, "share a dtype"),
    ],
)
def test_what_does_not_fit_is_refused(x, weight, bias, match):
    with pytest.raises(ValueError, match=match):
        linear(x, weight, bias)


@pytest.mark.parametrize("shape", [(1, 6), (3, 1, 6), (0, 6), (6,)])
def test_elsewhere_it_is_torch(shape):
    x, weight, bias = torch.randn(shape), torch.randn(5, 6), torch.randn(5)
    assert torch.equal(linear(x, weight, bias), nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("elsewhere", ["weight", "bias"])
def test_arrays_on_several_devices_are_left_to_torch_and_its_error(monkeypatch, elsewhere):
    module = sys.modules["locks_hf.kernels.linear"]
    monkeypatch.setattr(module, "has_kernels", lambda device: True)
    seen = []
    monkeypatch.setattr(module.F, "linear", lambda *arrays: seen.append(arrays))
    arrays = {"x": torch.ones(1, 8), "weight": torch.ones(3, 8), "bias": torch.ones(3)}
    arrays = {name: x.bfloat16().to("meta" if name == elsewhere else "cpu") for name, x in arrays.items()}
    linear(**arrays)
    assert seen == [tuple(arrays.values())]


def test_patch_changes_classes_and_gives_them_back():
    model = tiny_model("llama")
    before = {name: type(module) for name, module in model.named_modules()}
    plain = [name for name, kind in before.items() if kind is nn.Linear]
    state = {name: set(vars(module)) for name, module in model.named_modules()}
    tokens = torch.randint(0, 90, (1, 8))

    def all_fast():
        return bool(plain) and all(type(model.get_submodule(name)) is FastLinear for name in plain)

    with torch.no_grad():
        expected = model(tokens).logits
        with patch(model, fast_linear=True):
            assert all_fast()
            torch.testing.assert_close(model(tokens).logits, expected)
            with patch(model), patch(model, fast_linear=True), fast_linears(model.model):  # others may come and go
                pass
            assert all_fast()
    patch(model, fast_linear=True)
    inner = fast_linears(model.model)
    with inner:
        unpatch(model)
        assert type(model.lm_head) is nn.Linear and type(model.model.layers[0].mlp.up_proj) is FastLinear
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == state


def test_subclasses_and_other_weights_stay_as_they_are():
    class Own(nn.Linear):
        pass

    class Packed(nn.Parameter):
        pass

    odd = nn.Linear(4, 4)
    del odd._parameters["weight"]
    packed = nn.Linear(4, 4)
    packed._parameters["weight"] = Packed(torch.ones(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), odd, packed)
    kinds = [FastLinear, Own, nn.Linear, nn.Linear]
    with fast_linears(model):
        assert [type(layer) for layer in model] == kinds
        model[0]._parameters["weight"] = Packed(torch.ones(4, 4))  # put in meanwhile
        assert torch.equal(model[0](torch.ones(4)), 4 + model[0].bias)
    with pytest.raises(ValueError, match="has no plain"), fast_linears(nn.Sequential(Own(4, 4))):
        pass


def test_derivatives_and_autocast_take_the_usual_path(monkeypatch):
    monkeypatch.setattr("locks_hf.linears.linear", None)  # not to be called
    layer = nn.Linear(8, 3).to(torch.bfloat16)
    plain = copy.deepcopy(layer)
    x = torch.randn(1, 8, dtype=torch.bfloat16)
    with fast_linears(nn.Sequential(layer)):
        layer(x).sum().backward()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            assert torch.equal(layer(x.float()), plain(x.float().to(torch.bfloat16)))
        with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
            layer(x.float())
        layer.weight.requires_grad_(False)
        layer(x).sum().backward()  # of the bias alone
        layer.bias.requires_grad_(False)
        tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1]
    plain(x).sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert torch.equal(layer.bias.grad, 2 * plain.bias.grad)
    torch.testing.assert_close(tangent, plain.weight.sum(1)[None], rtol=2e-2, atol=2e-2)


def test_copies_and_hooks_outlive_a_change_unchanged():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with fast_linears(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        kept = model[0].forward  # as hooks of Accelerate keep it
    assert all(type(layer) is nn.Linear for one in copies for layer in one)
    assert all(torch.equal(one(torch.ones(4)), model(torch.ones(4))) for one in copies)
    linear_called = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("locks_hf.linears.linear", lambda *args: linear_called.append(args))
        assert torch.equal(kept(torch.ones(4)), model[0](torch.ones(4)))
    assert not linear_called
    model[1].forward = model[1].forward
    with pytest.warns(UserWarning, match="1 linear layers of Sequential have had their forward replaced"):
        change = fast_linears(model)
        with change:
            assert [type(layer) for layer in model] == [FastLinear, nn.Linear]


def test_a_failed_patch_leaves_nothing(monkeypatch):
    model = tiny_model("llama")
    before = model.config._attn_implementation, {type(module) for module in model.modules()}
    monkeypatch.setattr("locks_hf.patching.StepGraphs", lambda model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patch(model, fast_linear=True, cuda_graphs=True)
    assert before == (model.config._attn_implementation, {type(module) for module in model.modules()})
    with pytest.raises(ValueError, match="not patched"):
        unpatch(model)


@pytest.fixture
def streaming(monkeypatch):
    """The path of a GPU that records, with torch's product in place of the kernel; the widths of the launches made."""
    launches = []

    def products(x, weights, biases):
        launches.append(tuple(len(weight) for weight in weights))
        return [nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    monkeypatch.setattr(linear_module, "streams", lambda x, weight: x.shape[-2] == 1)
    monkeypatch.setattr("locks_hf.linears.streams", lambda x, weight: x.shape[-2] == 1)
    monkeypatch.setattr("locks_hf.linears._recording", lambda x: True)
    monkeypatch.setattr(importlib.import_module("locks_hf.kernels.linear.triton"), "linears_triton", products)
    return launches


@pytest.mark.parametrize("compiled", [False, True])
def test_projections_of_one_input_are_one_launch(streaming, compiled):
    model = tiny_model("qwen3")
    tokens = torch.randint(0, 90, (1, 9))
    with torch.no_grad():
        expected = [model(tokens[:, i : i + 1], use_cache=False).logits for i in range(9)]
        with patch(model, fast_linear=True):
            forward = torch.compile(model.__call__, fullgraph=True, backend="eager") if compiled else model
            for i in range(9):
                streaming.clear()
                out = forward(tokens[:, i : i + 1], use_cache=False).logits
                torch.testing.assert_close(out, expected[i])
                assert streaming == [(32, 16, 16), (32,), (48, 48), (32,)] * 2 + [(96,)]
            assert all(
                vars(one)["_locks_siblings"]._waiting is None
                for one in model.modules()
                if "_locks_siblings" in vars(one)
            )
    assert not any("_locks_siblings" in vars(one) for one in model.modules())
    torch._dynamo.reset()


def test_siblings_called_in_other_ways_are_right(streaming):
    module = nn.Module()
    for name, size in (("q_proj", 6), ("k_proj", 3), ("v_proj", 4)):
        setattr(module, name, nn.Linear(8, size))
    x, y = torch.randn(2, 1, 8).unbind(0)
    with fast_linears(module), torch.no_grad():
        for names in (("q", "q", "k"), ("v", "k", "q"), ("k",), ("q", "k", "v")):
            for name, input in zip(names, (x, y, x), strict=False):
                layer = module.get_submodule(f"{name}_proj")
                expected = nn.functional.linear(input[None], layer.weight, layer.bias)
                assert torch.equal(layer(input[None]), expected)


@pytest.fixture
def gated():
    """Two layers of one input."""
    module = nn.Module()
    module.gate_proj, module.up_proj = nn.Linear(8, 4), nn.Linear(8, 4)
    return module


def test_siblings_see_that_their_input_has_changed(streaming, gated):
    module, x = gated, torch.randn(1, 1, 8)
    with fast_linears(module), torch.no_grad():
        module.gate_proj(x)
        x += 1
        assert torch.equal(module.up_proj(x), nn.functional.linear(x, module.up_proj.weight, module.up_proj.bias))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_outside_of_recordings_nothing_waits(streaming, monkeypatch, gated, context):
    monkeypatch.setattr("locks_hf.linears._recording", recording)
    x = torch.randn(1, 1, 8)
    with fast_linears(gated), context():
        gated.gate_proj(x)
        gated.up_proj.weight.mul_(2)
        x = x.mul_(3)
        expected = nn.functional.linear(x, gated.up_proj.weight, gated.up_proj.bias)
        assert torch.equal(gated.up_proj(x), expected)
    assert streaming == [(4,), (4,)]


def test_layers_that_are_not_called_as_siblings_are_computed_apart(streaming, gated):
    with fast_linears(gated), torch.no_grad():
        for _ in range(4):
            gated.gate_proj(torch.randn(1, 1, 8))
    assert streaming == [(4, 4), (4,), (4,), (4,)]


def test_a_sibling_with_derivatives_has_them(streaming, gated):
    gated.gate_proj.requires_grad_(False)
    with fast_linears(gated):
        out = gated.gate_proj(torch.ones(1, 1, 8)) + gated.up_proj(torch.ones(1, 1, 8))
        out.sum().backward()
    assert gated.up_proj.weight.grad is not None and streaming == [(4,)]


def test_overlapping_changes_leave_no_half_of_a_family(streaming, gated):
    inner = fast_linears(gated.gate_proj)
    with inner, torch.no_grad():
        with fast_linears(gated):
            pass
        gated.gate_proj(torch.ones(1, 1, 8))
        assert streaming == [(4,)]
        with fast_linears(gated):
            x = torch.ones(1, 1, 8)
            gated.gate_proj(x), gated.up_proj(x)
            assert streaming == [(4,), (4, 4)]


def test_a_changed_model_is_freed_at_once(gated):
    with fast_linears(gated):
        kept = weakref.ref(gated.gate_proj.weight)
        other = nn.Linear(8, 4)
        gated.gate_proj = other
        assert kept() is None


def test_siblings_of_other_widths_are_computed_apart(streaming):
    module = nn.Module()
    module.gate_proj, module.up_proj = nn.Linear(8, 4), nn.Linear(6, 4)
    with fast_linears(module), torch.no_grad():
        for layer, size in ((module.gate_proj, 8), (module.up_proj, 6)):
            x = torch.randn(1, 1, size)
            assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert streaming == [(4,), (4,)]
