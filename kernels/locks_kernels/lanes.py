"""What the Gluon kernels share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _log2_of(n):
    return n.bit_length() - 1


@gluon.jit
def columns(x):
    """The columns of ``(rows, n)``, ``n`` a power of two and a row in one thread: a tuple of arrays, nothing moves."""
    ROWS: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    parts = (x,)
    for level in gl.static_range(_log2_of(N)):
        halves = ()
        for i in gl.static_range(1 << level):
            half = gl.permute(gl.reshape(parts[i], (ROWS, 2, N >> (level + 1))), (0, 2, 1))
            first, second = gl.split(half)
            halves = halves + (first, second)  # noqa: RUF005  what Triton compiles
        parts = halves
    single = ()
    for i in gl.static_range(N):
        single = single + (gl.reshape(parts[i], (ROWS,)),)  # noqa: RUF005
    return single
