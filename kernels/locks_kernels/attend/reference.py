"""Torch reference of attention over chosen pages."""

from __future__ import annotations

import torch


def attend_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scaling: float,
) -> torch.Tensor:
    """Exact attention over the real tokens of the chosen pages; see :func:`locks_hf.kernels.attend.attend`."""
    batch, n_kv_heads, capacity, head_dim = keys.shape
    grouped = query.float().unflatten(1, (n_kv_heads, -1))  # (B, H, G, d)
    offsets = torch.arange(page_size, device=query.device)
    tokens = (pages.long()[..., None] * page_size + offsets).flatten(2)  # (B, H, slots * P)
    real = (pages >= 0).repeat_interleave(page_size, dim=-1) & (tokens < lengths.view(batch, 1, 1))
    index = tokens.clamp(0, capacity - 1)[..., None].expand(-1, -1, -1, head_dim)
    chosen_keys = keys.gather(2, index).float()
    # Slots past the end may hold anything, NaN included; a zero weight alone would not silence a NaN.
    chosen_values = values.gather(2, index).float().masked_fill(~real[..., None], 0.0)
    logits = (grouped @ chosen_keys.transpose(-1, -2)) * scaling
    logits = logits.masked_fill(~real[:, :, None, :], float("-inf"))
    # A row without any real token attends to nothing: zeros, not the NaN of an empty softmax.
    weights = logits.softmax(dim=-1).masked_fill(~real.any(dim=-1)[..., None, None], 0.0)
    return (weights @ chosen_values).flatten(1, 2).to(query.dtype)
