"""Torch reference of page selection (paper Sec. 4)."""

from __future__ import annotations

import torch


def combine_reference(lse: torch.Tensor, n_pages: torch.Tensor, rule: str) -> torch.Tensor:
    """One rank value per page and KV head; see :func:`locks_hf.kernels.select.combine`."""
    past_end = torch.arange(lse.shape[-1], device=lse.device) >= n_pages.view(-1, 1, 1)  # (B, 1, J)
    lse = lse.masked_fill(past_end[:, :, None, :], float("-inf"))
    if rule == "mass":
        value = torch.logsumexp(lse, dim=2)
    else:
        share = torch.exp(lse - torch.logsumexp(lse, dim=-1, keepdim=True))
        value = share.mean(dim=2) if rule == "share" else share.amax(dim=2)
    return value.masked_fill(past_end, float("-inf"))


def top_pages_reference(value: torch.Tensor, lengths: torch.Tensor, page_size: int, slots: int) -> torch.Tensor:
    """The first, the most recent and the best other pages; see :func:`locks_hf.kernels.select.top_pages`."""
    batch, n_kv_heads, max_complete = value.shape
    n_total = (lengths + page_size - 1) // page_size
    # One column more than there are complete pages: a row's most recent page may be incomplete.
    value = torch.nn.functional.pad(value, (0, max(1, slots - max_complete)), value=float("-inf"))
    page = torch.arange(value.shape[-1], device=value.device)
    exists = page < n_total.view(batch, 1, 1)
    forced = (page == 0) | (page == n_total.view(batch, 1, 1) - 1)
    # Below the forced pages also where it is infinite or NaN.
    largest = torch.finfo(torch.float32).max
    value = value.nan_to_num(nan=largest, posinf=largest, neginf=float("-inf"))
    value = torch.where(forced, float("inf"), value)
    value = value.masked_fill(~exists, float("-inf"))
    # A stable sort keeps the lower index first among equals.
    order = torch.sort(value, dim=-1, descending=True, stable=True).indices[..., :slots]
    taken = torch.arange(slots, device=value.device) < n_total.view(batch, 1, 1)
    chosen = torch.where(taken, order, value.shape[-1]).sort(dim=-1).values
    return torch.where(taken, chosen, -1).to(torch.int32).expand(batch, n_kv_heads, slots).contiguous()
