"""Kernels of Locks: one package per operation, a torch reference beside each Triton kernel.

Symbols used throughout: ``B`` batch rows, ``H`` KV heads, ``G`` query heads per KV head, ``J`` pages,
``P`` tokens per page, ``d`` head_dim, ``r`` rank. Nothing here imports transformers.
"""

from .attend import attend
from .decode import decode_step
from .layout import SummaryLayout
from .linear import linear
from .score import score
from .select import combine, top_pages
from .summarize import summarize

__all__ = ["SummaryLayout", "attend", "combine", "decode_step", "linear", "score", "summarize", "top_pages"]
