"""Torch reference of page scoring (paper Eq. 2)."""

from __future__ import annotations

import torch

from ..layout import SummaryLayout, dequantize


def score_reference(
    query: torch.Tensor,
    summaries: dict[str, torch.Tensor],
    n_pages: torch.Tensor,
    max_pages: int,
    layout: SummaryLayout,
    scaling: float,
) -> torch.Tensor:
    """Estimated log-sum-exp of each page's attention logits; see :func:`locks_hf.kernels.score.score`."""
    batch, n_kv_heads = summaries["centroid"].shape[:2]
    query = query.float().unflatten(1, (n_kv_heads, -1))  # (B, H, G, d)
    used = {name: array[:, :, :max_pages] for name, array in summaries.items()}
    centroid, coefficients, basis = dequantize(used, layout)
    centre = query @ centroid.transpose(-1, -2)  # (B, H, G, J)
    projected = torch.einsum("bhgd,bhjrd->bhjrg", query, basis)
    logits = coefficients @ projected  # (B, H, J, P, G)
    within = torch.logsumexp(logits * scaling, dim=-2)  # (B, H, J, G)
    lse = centre * scaling + within.transpose(-1, -2)
    past_end = torch.arange(max_pages, device=query.device) >= n_pages.view(batch, 1)
    return lse.masked_fill(past_end[:, None, None, :], float("-inf"))
