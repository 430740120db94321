"""Linear layers that stream their weights: the same numbers, and nothing left on the model."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

from locks_hf import patch, unpatch
from locks_hf.kernels import linear
from locks_hf.linears import FastLinear, fast_linears
from tests.helpers import tiny_model


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
