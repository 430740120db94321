"""Which implementation runs: the Triton kernels or the torch references."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np
import torch

try:
    import triton
except ImportError:
    triton = None

OPS = ("summarize", "score", "select", "attend", "linear")
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 256
MIN_CAPABILITY = (8, 0)
_CHOICES = ("auto", "reference")
LARGEST = np.finfo(np.float32).max
# Multiply-adds up to which a BLAS neither calls in other threads nor reorders its operands first.
PRODUCT = 1 << 19


@functools.cache
def interpreting() -> bool:
    """Whether Triton kernels run in the CPU interpreter (``TRITON_INTERPRET=1`` when Triton was imported)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def _choice() -> str:
    choice = os.environ.get("LOCKS_KERNELS", "auto")
    if choice not in _CHOICES:
        raise ValueError(f"LOCKS_KERNELS must be one of {_CHOICES}, got {choice!r}")
    return choice


@functools.cache
def _cuda_obstacle(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on this CUDA device, or ``None`` if they can."""
    if triton is None:
        return "the package triton is not installed (pip install triton)"
    if torch.version.hip is not None:
        return "ROCm devices are untested"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, the kernels need 8.0 or later"
    return None


def implementation(device: torch.device) -> str:
    """What an op on ``device`` runs: ``"triton"``, ``"cpu"`` or ``"reference"``.

    A CPU runs the op's CPU form, which is the reference where an op has none, or Triton's interpreter where that is
    switched on. Other devices that are not CUDA take the reference. The environment variable
    ``LOCKS_KERNELS=reference`` forces the reference everywhere.

    Raises:
        ValueError: On a CUDA device that cannot run the kernels, rather than falling back silently.
    """
    if _choice() == "reference":
        return "reference"
    if device.type == "cuda":
        obstacle = _cuda_obstacle(device)
        if obstacle is not None:
            raise ValueError(
                f"the Locks kernels cannot run on {device}: {obstacle}. Set LOCKS_KERNELS=reference to use the much "
                "slower torch reference instead"
            )
        return "triton"
    if device.type == "cpu":
        return "triton" if interpreting() else "cpu"
    return "reference"


@torch.compiler.assume_constant_result
def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run on ``device``, for ops that are as well done without."""
    if _choice() == "reference":
        return False
    if device.type == "cuda":
        return _cuda_obstacle(device) is None
    return device.type == "cpu" and interpreting()


def use_triton(device: torch.device) -> bool:
    """Whether an op on ``device`` runs its Triton kernel; see :func:`implementation`."""
    return implementation(device) == "triton"


def raw(array: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a NumPy array over the same memory; 16-bit floats as their bits, int16."""
    array = array.detach()
    return (array.view(torch.int16) if array.dtype in (torch.bfloat16, torch.float16) else array).numpy()


def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bf16 numbers given as their bits, int16; contiguous."""
    wide = np.empty(bits.shape, dtype=np.int32)
    np.left_shift(bits, 16, out=wide, dtype=np.int32)
    return wide.view(np.float32)


def finite(values: np.ndarray) -> np.ndarray:
    """Float32 values with infinities replaced by the largest and least finite ones, in place; a NaN stays."""
    return np.minimum(np.maximum(values, -LARGEST, out=values), LARGEST, out=values)


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """``left @ right`` for a long and a narrow matrix, in pieces that a BLAS does at once on the calling thread."""
    step = max(1, PRODUCT // right.size)
    if len(left) <= step:
        return left @ right
    return np.concatenate([left[start : start + step] @ right for start in range(0, len(left), step)])


def launching(function: Callable) -> Callable:
    """Decorate a function that launches kernels: Triton does so on the current device, whatever its arguments' is."""

    @functools.wraps(function)
    def launch(first: torch.Tensor, *args, **kwargs):
        if first.device.type != "cuda":
            return function(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return function(first, *args, **kwargs)

    return launch


def programmatic_launch(device: torch.device) -> dict[str, bool]:
    """Launch options by which a kernel starts while the one before it ends: from compute capability 9.0 on."""
    if interpreting() or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; of the one the kernels are tuned on elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def check_head_dim_and_dtype(head_dim: int, dtype: torch.dtype) -> None:
    """Refuse keys and values that the kernels do not support.

    Raises:
        ValueError: If ``head_dim`` is not a multiple of 8 from 8 to 256, or ``dtype`` is not fp32, bf16 or fp16.
    """
    if head_dim % 8 or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {head_dim} has no kernel: Locks supports multiples of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        )
    if dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in SUPPORTED_DTYPES)
        raise ValueError(f"keys and values of {dtype} have no kernel: load the model in one of {names}")


def check_row_counts(name: str, counts: torch.Tensor, rows: int, most: int | None) -> None:
    """Refuse per-row counts that are not one integer a row from 0 to ``most``.

    The values are checked on the CPU only, where they cost no wait; on a GPU the kernels take what exceeds ``most`` as
    ``most``. ``most`` of ``None`` leaves the values alone.

    Raises:
        ValueError: If ``counts`` is not an integer tensor of shape ``(rows,)``, or a value is out of range.
    """
    if counts.shape != (rows,) or counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 ({rows},), one a row, got {counts.dtype} {tuple(counts.shape)}")
    if most is None or counts.device.type != "cpu":
        return
    values = counts.tolist()  # several times faster than comparing tensors of a few rows
    if any(not 0 <= value <= most for value in values):
        raise ValueError(f"{name} must be from 0 to {most}, got {values}")


def check_page_size(page_size: int) -> None:
    """Refuse page sizes that the kernels do not support.

    Raises:
        ValueError: If ``page_size`` is not a power of two from 4 to 64.
    """
    if not 4 <= page_size <= 64 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two from 4 to 64, got {page_size}")


def kernel_status() -> list[tuple[str, bool, str]]:
    """For each op: its name, whether its Triton kernel runs on this machine, and why or why not."""
    if _choice() == "reference":
        usable, reason = False, "LOCKS_KERNELS=reference is set"
    elif torch.cuda.is_available():
        obstacle = _cuda_obstacle(torch.device("cuda"))
        usable, reason = obstacle is None, obstacle or torch.cuda.get_device_name()
    elif interpreting():
        usable, reason = (
            True,
            "CPU, in the Triton interpreter (TRITON_INTERPRET is set): for tests, very slow",
        )
    else:
        usable, reason = False, "no CUDA device: the op's CPU form runs instead"
    return [(op, usable, reason) for op in OPS]
