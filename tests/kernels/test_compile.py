"""Every kernel compiles for sm_80 and sm_90, without a GPU, and within the limits of one thread."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("compilation is off in the interpreter", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from locks_hf.kernels.attend.triton import _attend_combine_kernel, _attend_split_kernel
from locks_hf.kernels.score.triton import _score_kernel
from locks_hf.kernels.select.triton import _combine_kernel, _normalizer_kernel, _top_pages_kernel
from locks_hf.kernels.summarize.triton import _summarize_kernel, summarize_warps

POINTERS = {
    "basis_ptr": "*u8", "coefficients_ptr": "*i8", "centroid_ptr": "*i8", "scales_ptr": "*bf16", "n_pages_ptr": "*i32",
    "lengths_ptr": "*i32", "pages_ptr": "*i32", "lse_ptr": "*fp32", "value_ptr": "*fp32", "normalizer_ptr": "*fp32",
    "partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32",
}  # fmt: skip
FLOATS = {"scaling", "rank_tolerance", "ridge_factor"}


def compiled(kernel, capability, dtype="bf16", num_warps=4, **constants):
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{dtype}")
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()}
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": num_warps})


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_kernels_compile(capability, head_dim):
    block_d = triton.next_power_of_2(head_dim)
    kernels = [
        compiled(
            _summarize_kernel, capability, num_warps=summarize_warps(head_dim, 16), D=head_dim, PARTS=2,
            BLOCK_W=block_d // 2, P=16, BLOCK_P=16, R=4, BITS=4, REFIT=True, SQUARINGS=7, N_SCALES=21,
        ),
        compiled(
            _score_kernel, capability, H=4, G=8, BLOCK_G=16, D=head_dim, BLOCK_D=block_d, P=16, R=4, BITS=4, PARTS=2,
            BLOCK_W=block_d // 2, BLOCK_J=16, N_SCALES=21,
        ),
        compiled(
            _attend_split_kernel, capability, H=4, G=8, BLOCK_G=16, D=head_dim, BLOCK_D=block_d, P=16,
            BLOCK_N=64 if head_dim <= 128 else 32, UPCAST=False,
        ),
        compiled(_attend_combine_kernel, capability, num_warps=1, G=8, D=head_dim, BLOCK_D=block_d),
    ]  # fmt: skip
    for kernel in kernels:
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= 99 * 1024  # what a block of sm_86 may use, the least of the supported


def test_large_pages_compile():
    """Pages of 64 tokens, where shared memory is scarcest: fp32 keys of head_dim 256."""
    attend_kernel = compiled(
        _attend_split_kernel, 80, dtype="fp32", H=4, G=8, BLOCK_G=16, D=256, BLOCK_D=256, P=64, BLOCK_N=32, UPCAST=False
    )
    score_kernel = compiled(
        _score_kernel, 80, H=4, G=8, BLOCK_G=16, D=256, BLOCK_D=256, P=64, R=4, BITS=4, PARTS=2, BLOCK_W=128,
        BLOCK_J=16, N_SCALES=69,
    )  # fmt: skip
    for kernel in (attend_kernel, score_kernel):
        assert kernel.metadata.shared <= 163 * 1024  # a block of sm_80


@pytest.mark.parametrize("capability", [80, 90])
def test_select_kernels_compile(capability):
    for kernel in (
        compiled(_normalizer_kernel, capability, HG=32, BLOCK=1024),
        compiled(_combine_kernel, capability, H=4, G=8, RULE=0, BLOCK=256),
        compiled(_top_pages_kernel, capability, H=4, P=16, BLOCK=1024),
    ):
        assert kernel.asm["cubin"]


def test_import_without_triton():
    """The package imports and its references run where Triton is not installed."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from locks_hf.kernels import SummaryLayout, summarize, backend\n"
        "assert backend.triton is None and not backend.interpreting()\n"
        "out = summarize(torch.randn(2, 16, 64), SummaryLayout(64, 4))\n"
        "assert out['centroid'].shape == (2, 64)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
