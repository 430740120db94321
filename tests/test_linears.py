"""Linear layers that stream their weights: the same numbers, and nothing left on the model."""

import copy

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


def test_patch_changes_classes_and_gives_them_back():
    model = tiny_model("llama")
    before = {name: type(module) for name, module in model.named_modules()}
    plain = [name for name, kind in before.items() if kind is nn.Linear]
    tokens = torch.randint(0, 90, (1, 8))
    with torch.no_grad():
        expected = model(tokens).logits
        with patch(model, fast_linear=True):
            assert plain and all(type(model.get_submodule(name)) is FastLinear for name in plain)
            torch.testing.assert_close(model(tokens).logits, expected)
            with pytest.raises(ValueError, match="fast already"):
                patch(model, fast_linear=True)
            with patch(model):  # a second patch may come and go
                pass
            assert all(type(model.get_submodule(name)) is FastLinear for name in plain)
    assert {name: type(module) for name, module in model.named_modules()} == before
    patch(model, fast_linear=True)
    unpatch(model)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_subclasses_stay_as_they_are():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4))
    with fast_linears(model):
        assert [type(layer) for layer in model] == [FastLinear, Own]
    assert [type(layer) for layer in model] == [nn.Linear, Own]
    with pytest.raises(ValueError, match="has no plain"), fast_linears(nn.Sequential(Own(4, 4))):
        pass


def test_gradients_and_autocast_take_the_usual_path():
    layer = nn.Linear(8, 3).to(torch.bfloat16)
    plain = copy.deepcopy(layer)
    x = torch.randn(1, 8, dtype=torch.bfloat16)
    with fast_linears(nn.Sequential(layer)):
        layer(x).sum().backward()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            assert torch.equal(layer(x.float()), plain(x.float().to(torch.bfloat16)))
        with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
            layer(x.float())
    plain(x).sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_a_failed_patch_leaves_nothing():
    model = tiny_model("llama")
    implementation = model.config._attn_implementation
    with fast_linears(model), pytest.raises(ValueError, match="has no plain"):
        patch(model, fast_linear=True)
    assert model.config._attn_implementation == implementation
    with pytest.raises(ValueError, match="not patched"):
        unpatch(model)
