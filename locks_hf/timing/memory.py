"""What a cell needs in memory, before anything is allocated for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import torch

GIB = 1 << 30
# Compiled code, graphs, library workspaces and what the allocator cannot use, on a GPU.
_SLACK = 3 * GIB // 2


@dataclass(frozen=True)
class Needs:
    """Bytes a cell takes.

    Attributes:
        weights: The model.
        kv: Keys and values.
        summaries: Page summaries or envelopes.
        workspace: Everything else.
    """

    weights: int = 0
    kv: int = 0
    summaries: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name} {getattr(self, field.name) / GIB:.2f}" for field in fields(self))
        return f"{self.total / GIB:.2f} GiB ({parts})"


def slack(device: torch.device) -> int:
    """Bytes that a process needs besides what can be counted."""
    return _SLACK if device.type == "cuda" else 0


def free_bytes(device: torch.device, limit: float | None = None) -> int:
    """Bytes that can still be allocated on a device.

    Args:
        device: The device.
        limit: At most this many GiB, whatever is free.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free if limit is None else min(free, int(limit * GIB))


def refusal(needs: Needs, free: int) -> str | None:
    """Why a cell does not fit, or ``None`` if it does."""
    if needs.total <= free:
        return None
    return f"needs {needs}, and {free / GIB:.2f} GiB are free"
