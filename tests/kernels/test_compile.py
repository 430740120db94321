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
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from locks_hf.kernels import SummaryLayout
from locks_hf.kernels.attend.gluon import attend_kernel
from locks_hf.kernels.attend.triton import _attend_combine_kernel, _attend_split_kernel, combine_options
from locks_hf.kernels.decode.triton import _end_kernel
from locks_hf.kernels.linear.triton import _linear_kernel
from locks_hf.kernels.score.gluon import score_kernel
from locks_hf.kernels.score.triton import _prepare_kernel, _score_kernel, score_settings
from locks_hf.kernels.select.gluon import combine_kernel
from locks_hf.kernels.select.triton import (
    _combine_kernel,
    _key_kernel,
    _normalizer_kernel,
    _search_pages_kernel,
    _top_pages_kernel,
)
from locks_hf.kernels.summarize.triton import _summarize_kernel, summarize_options

POINTERS = {
    "basis_ptr": "*u8", "coefficients_ptr": "*i32", "centroid_ptr": "*i8", "token_scales_ptr": "*bf16",
    "scales_ptr": "*bf16", "codes_ptr": "*i8", "unit_ptr": "*fp32", "bias_ptr": "*i32", "n_pages_ptr": "*i32",
    "lengths_ptr": "*i32", "counts_ptr": "*i32", "added_ptr": "*i32", "real_ptr": "*u8", "pages_ptr": "*i32",
    "groups_ptr": "*i32", "lse_ptr": "*fp32", "partial_ptr": "*fp32", "value_ptr": "*fp32", "key_ptr": "*i32",
    "group_key_ptr": "*i32", "partial_out_ptr": "*fp32", "partial_lse_ptr": "*fp32",
}  # fmt: skip
NO_CHOICE = {"CHOOSE": False, "HAS_REAL": False, "GROUP": 1, "C": 1, "S": 1, "BLOCK_K": 1}
FLOATS = {"scaling", "rank_tolerance", "ridge_factor"}


def compiled(kernel, capability, dtype="bf16", num_warps=4, num_stages=3, pointers=None, maxnreg=None, **constants):
    if "num_warps" in kernel.arg_names:
        constants["num_warps"] = num_warps
    if "PDL" in kernel.arg_names:
        constants["PDL"] = capability >= 90
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = {**POINTERS, **(pointers or {})}.get(name, f"*{dtype}")
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = kind(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": num_warps, "maxnreg": maxnreg}
    if kind is ASTSource:
        options["num_stages"] = num_stages
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


BYTES = {"coefficients_ptr": "*i8"}  # where coefficients are written, or read one by one


def score_options(head_dim, rank, bits, group, block_pages, page_size=16):
    layout = SummaryLayout(head_dim, rank, page_size, bits)
    return {
        "H": 4, "G": group, "BLOCK_G": max(4, triton.next_power_of_2(group)), "D": head_dim, "P": page_size, "R": rank,
        "BLOCK_R": triton.next_power_of_2(rank), "BITS": bits, "PARTS": layout.codes_per_byte,
        "BLOCK_W": max(32, triton.next_power_of_2(layout.basis_width)), "BLOCK_J": block_pages,
        "WORDS": rank % 4 == 0, "N_SCALES": layout.n_scales, "INLINE": True, "STEP": True,
    }  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_kernels_compile(capability, head_dim):
    block_d = triton.next_power_of_2(head_dim)
    layout = SummaryLayout(head_dim, 4)
    block_pages = 64 if head_dim <= 128 else 32
    kernels = [
        compiled(_summarize_kernel, capability, pointers=BYTES, **summarize_options(layout, True)),
        compiled(
            _prepare_kernel, capability, H=4, G=8, BLOCK_G=8, D=head_dim, BLOCK_D=block_d, P=16, OFFSET=8, STEP=True,
            HAS_REAL=True,
        ),
        compiled(_score_kernel, capability, num_stages=1, STAGES=1, **score_options(head_dim, 8, 4, 4, block_pages)),
        compiled(_score_kernel, capability, STAGES=3, **score_options(head_dim, 4, 4, 8, block_pages)),
        compiled(
            _end_kernel, capability, pointers=BYTES, H=4, G=8,
            **{**summarize_options(layout, True), **combine_options(32, head_dim)},
        ),
        compiled(
            _attend_split_kernel, capability, H=4, G=8, BLOCK_G=16, D=head_dim, BLOCK_D=block_d, P=16,
            BLOCK_N=64 if head_dim <= 128 else 32, UPCAST=False, **NO_CHOICE,
        ),
        compiled(
            _attend_split_kernel, capability, num_stages=1, H=4, G=8, BLOCK_G=16, D=head_dim, BLOCK_D=block_d, P=16,
            BLOCK_N=64 if head_dim <= 128 else 32, UPCAST=False, CHOOSE=True, HAS_REAL=True, GROUP=16,
            C=512, S=8, BLOCK_K=128, num_warps=16,
        ),
        compiled(_attend_combine_kernel, capability, G=8, D=head_dim, **combine_options(32, head_dim)),
    ]  # fmt: skip
    for kernel in kernels:
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= 99 * 1024  # what a block of sm_86 may use, the least of the supported


@pytest.mark.parametrize(
    ("rank", "bits", "page_size", "group", "block_pages"),
    [
        (3, 4, 16, 7, 64),
        (4, 2, 16, 1, 64),
        (8, 8, 16, 2, 32),
        (8, 16, 16, 16, 16),
        (15, 4, 16, 4, 32),
        (8, 4, 64, 4, 16),
    ],
)
def test_score_compiles_for_every_kind_of_summary(rank, bits, page_size, group, block_pages):
    pointers = {} if rank % 4 == 0 else dict(BYTES)
    pointers["basis_ptr"] = {8: "*i8", 16: "*bf16"}.get(bits, "*u8")
    options = score_options(128, rank, bits, group, block_pages, page_size)
    kernel = compiled(_score_kernel, 90, num_stages=1, pointers=pointers, STAGES=1, **options)
    assert kernel.metadata.shared <= 99 * 1024


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_large_pages_compile(dtype):
    """Pages of 64 tokens of head_dim 256, where shared memory is scarcest."""
    attend_kernel = compiled(
        _attend_split_kernel, 80, dtype=dtype, H=4, G=8, BLOCK_G=16, D=256, BLOCK_D=256, P=64, BLOCK_N=32,
        UPCAST=False, **NO_CHOICE,
    )  # fmt: skip
    options = {**combine_options(32, 256), **summarize_options(SummaryLayout(256, 4, 64), True)}
    end_kernel = compiled(_end_kernel, 80, dtype=dtype, pointers=BYTES, H=4, G=8, **options)
    for kernel in (attend_kernel, end_kernel):
        assert kernel.metadata.shared <= 163 * 1024  # a block of sm_80


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("head_dim", "rank", "bits", "group"),
    [(64, 4, 4, 4), (128, 4, 4, 8), (128, 8, 4, 7), (128, 8, 8, 1), (256, 4, 4, 16), (256, 8, 8, 8)],
)
def test_the_kernel_with_layouts_chosen_by_hand_compiles(capability, head_dim, rank, bits, group):
    kernel = compiled(
        score_kernel, capability, H=4, G=group, BLOCK_G=max(8, triton.next_power_of_2(group)), D=head_dim, P=16, R=rank,
        BITS=bits, STEP=True, HAS_REAL=True, num_warps=4,
        maxnreg=score_settings(SummaryLayout(head_dim, rank, basis_bits=bits), group, 4, 1024, True).registers,
        pointers={
            "basis_ptr": "*i32", "coefficients_ptr": "*i32" if rank == 4 else "*i16", "centroid_ptr": "*i32",
            "token_scales_ptr": "*i32",
        },
    )  # fmt: skip
    assert kernel.asm["cubin"]
    # Nothing moves between warps inside the loop: no barrier but those around and after it.
    assert kernel.asm["ptx"].count("bar.sync") <= 16


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("head_dim", "group", "pages", "runs", "warps", "four"),
    [(64, 4, 8, 1, 4, True), (128, 8, 16, 2, 4, True), (128, 7, 16, 2, 8, False), (256, 16, 32, 4, 8, True)],
)
def test_the_choice_with_layouts_chosen_by_hand_compiles(capability, head_dim, group, pages, runs, warps, four):
    sizes = {"H": 4, "G": group, "P": 16, "GROUP": pages}
    attend = compiled(
        attend_kernel, capability, D=head_dim, BLOCK_N=64 if head_dim <= 128 else 32, HAS_REAL=True, C=runs,
        BLOCK_K=128, FOUR=four, num_warps=warps, **sizes,
    )  # fmt: skip
    combine = compiled(
        combine_kernel, capability, BLOCK_G=triton.next_power_of_2(group), RULE=int(four), BLOCK=512, BLOCK_S=128,
        HAS_REAL=True, **sizes,
    )  # fmt: skip
    assert attend.asm["cubin"]
    assert attend.metadata.shared <= 99 * 1024
    assert combine.asm["ptx"].count("bar.sync") <= 2  # the normalisers, and the largest of groups of pages


@pytest.mark.parametrize("capability", [80, 90])
def test_linear_compiles(capability):
    for layers, biases in ((1, 1), (2, 2), (3, 5)):
        sizes = {"ROWS": 2, "BLOCK_N": 2, "BLOCK_K": 4096, "LAYERS": layers, "BIASES": biases}
        assert compiled(_linear_kernel, capability, **sizes).asm["cubin"]


@pytest.mark.parametrize("capability", [80, 90])
def test_select_kernels_compile(capability):
    for kernel in (
        compiled(_normalizer_kernel, capability, HG=32, BLOCK=1024),
        compiled(
            _combine_kernel, capability, H=4, G=7, BLOCK_G=8, P=16, RULE=0, BLOCK=512, GROUP=16, BLOCK_S=64,
            STEP=True, HAS_REAL=True,
        ),
        compiled(_key_kernel, capability, H=4, P=16, GROUP=16, BLOCK=1024),
        compiled(_top_pages_kernel, capability, H=4, P=16, GROUP=16, S=32, C=128, BLOCK_K=128),
        compiled(_search_pages_kernel, capability, H=4, P=16, BLOCK=1024),
    ):  # fmt: skip
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
