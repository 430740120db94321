"""The append kernel compiles for sm_80 and sm_90, without a GPU."""

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("compilation is off in the interpreter", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from locks_hf.timing.append import _append_kernel


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("quest", [False, True], ids=["dense", "quest"])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (7, 96), (8, 128)])
def test_the_append_kernel_compiles(capability, quest, group, head_dim):
    block_d = triton.next_power_of_2(head_dim)
    constants = {"H": 4, "G": group, "D": head_dim, "BLOCK_D": block_d, "QUEST": quest}
    if not quest:
        constants |= dict.fromkeys(("query_ptr", "envelopes_ptr", "halves_ptr"))
    names = _append_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else "*bf16" if name.endswith("_ptr") else "i32" for name in names
    }
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=_append_kernel, signature=signature, constexprs=constexprs)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert kernel.asm["cubin"]
