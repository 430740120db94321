"""The kernel of linear layers against float64, on a GPU or in the interpreter; see test_interpret_kernels.py."""

import importlib

import pytest
import torch

from locks_hf.kernels import backend, linear

linear_module = importlib.import_module("locks_hf.kernels.linear")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.skipif(
    not ON_GPU and not backend.interpreting(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "n_out", "n_in"), [(1, 64, 128), (2, 7, 24), (1, 515, 1000), (2, 33, 4096), (1, 3, 13696), (1, 1, 8)]
)
def test_the_kernel_against_float64(monkeypatch, rows, n_out, n_in, bias, dtype):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    x, weight = torch.randn(rows, n_in).to(DEVICE, dtype), torch.randn(n_out, n_in).to(DEVICE, dtype)
    b = torch.randn(n_out).to(DEVICE, dtype) if bias else None
    out = linear(x[:, None], weight, b)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert out.shape == (rows, 1, n_out) and out.dtype == dtype
    # Half a unit in the last place of the result, and what float32 loses of the terms.
    unit = torch.finfo(dtype).eps
    bound = unit * exact.abs() + 1e-5 * (x.double().abs() @ weight.double().abs().T) + torch.finfo(dtype).tiny
    assert ((out[:, 0].double() - exact).abs() <= bound).all()


def test_strided_inputs_and_nan():
    x = torch.randn(2, 64).to(DEVICE, torch.bfloat16)[:, ::2]
    weight = torch.randn(16, 64).to(DEVICE, torch.bfloat16)[:, 32:]
    torch.testing.assert_close(linear(x, weight), x @ weight.T, rtol=2e-2, atol=2e-2)
    x = x.clone()
    x[1, 3] = float("nan")
    out = linear(x, weight)
    assert out[1].isnan().all() and not out[0].isnan().any()


@pytest.mark.parametrize("sizes", [(64, 8), (33, 5, 17), (1, 1, 1), (2, 70, 3)])
@pytest.mark.parametrize("bias", [(True, True, True), (False, True, False), (True, False, True)])
def test_layers_of_one_input_in_one_launch(sizes, bias):
    x = torch.randn(1, 1, 512).to(DEVICE, torch.bfloat16)
    weights = [torch.randn(size, 512).to(DEVICE, torch.bfloat16) for size in sizes]
    biases = [
        torch.randn(size).to(DEVICE, torch.bfloat16) if has else None for size, has in zip(sizes, bias, strict=False)
    ]
    together = linear_module.linears(x, weights, biases)
    for out, weight, one in zip(together, weights, biases, strict=True):
        assert torch.equal(out, linear(x, weight, one))
