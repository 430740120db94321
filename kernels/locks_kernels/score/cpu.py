"""Page scoring for the CPU: the formula of the reference with fewer and smaller passes over memory."""

from __future__ import annotations

import math

import torch

from ..backend import pieces
from ..layout import SummaryLayout


def score_cpu(
    query: torch.Tensor,
    summaries: dict[str, torch.Tensor],
    n_pages: torch.Tensor,
    max_pages: int,
    layout: SummaryLayout,
    scaling: float,
) -> torch.Tensor:
    """Estimated log-sum-exp of each page's attention logits; see :func:`locks_hf.kernels.score.score`.

    Equal to the reference but for rounding. Scales are applied to products rather than to what is multiplied, the bias
    of packed codes goes out as a multiple of the query's sum, pages are the innermost dimension of all that follows the
    products with the query, and logarithms are binary.

    Args:
        query: ``(B, H * G, d)``, fp32, bf16 or fp16; no gradient reaches it.
        summaries: Arrays of :meth:`SummaryLayout.fields` with leading dimensions ``(B, H, capacity)``, any strides.
        n_pages: Integer ``(B,)``.
        max_pages: Pages to score, at least 1.
        layout: Sizes of the summaries.
        scaling: Factor on the logits.

    Returns:
        float32 ``(B, H, G, max_pages)``; ``-inf`` for pages a row does not have.
    """
    batch, n_kv_heads = summaries["centroid"].shape[:2]
    rank, tokens_end = layout.rank, 1 + layout.page_size
    rows = batch * n_kv_heads  # R
    used = {name: array[:, :, :max_pages].flatten(0, 1) for name, array in summaries.items()}
    query = (query.detach().float() * (scaling / math.log(2))).reshape(rows, -1, layout.head_dim)  # (R, G, d)
    products = _products(query, used, layout)  # (R, G, J, r + 1)
    scales = used["scales"].transpose(1, 2).float()  # (R, n, J)
    bias = None
    if layout.codes_per_byte > 1:
        bias = query.sum(dim=-1)[:, :, None, None] * (1 << (layout.basis_bits - 1))
    lse = query.new_empty(rows, query.shape[1], max_pages)
    # As many rows at once as keep the logits small.
    step = pieces(rows, query.shape[1] * layout.page_size * max_pages)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        projected = query.new_empty((*products[part].shape[:2], rank, max_pages))  # (R, G, r, J)
        codes = products[part, :, :, :rank].transpose(2, 3)
        if bias is None:
            projected.copy_(codes)
        else:
            torch.sub(codes, bias[part], out=projected)
        if layout.basis_bits < 16:
            projected.mul_(scales[part, None, tokens_end:])
        logits = _times_coefficients(used["coefficients"][part], projected)  # (R, G, P, J)
        logits.mul_(scales[part, None, 1:tokens_end])
        # Finite, so that infinite logits give an infinite sum rather than NaN; a NaN stays.
        largest = logits.amax(dim=2, keepdim=True).clamp_(*_FINITE)
        within = logits.sub_(largest).exp2_().sum(dim=2).log2_().add_(largest[:, :, 0])
        lse[part] = within.addcmul_(products[part, ..., rank], scales[part, None, 0])
    lse = lse.mul_(math.log(2)).view(batch, n_kv_heads, -1, max_pages)
    if min(n_pages.tolist(), default=max_pages) < max_pages:
        past_end = torch.arange(max_pages) >= n_pages.view(batch, 1)
        lse.masked_fill_(past_end[:, None, None, :], float("-inf"))
    return lse


_FINITE = (torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)


def _products(query: torch.Tensor, used: dict[str, torch.Tensor], layout: SummaryLayout) -> torch.Tensor:
    """The query times the stored codes of the basis columns, bias included, and times those of the centroid.

    Args:
        query: float32 ``(R, G, d)``.
        used: Summaries ``(R, J, ...)``.
        layout: Sizes of the summaries.

    Returns:
        float32 ``(R, G, J, r + 1)``, the centroid last.
    """
    rows, n_pages, rank, width = used["basis"].shape
    bits, parts = layout.basis_bits, layout.codes_per_byte
    # One run of channels at a time, in one buffer that stays in the processor's cache.
    codes = query.new_empty(rows, n_pages, rank + 1, width)
    matrix = codes.flatten(1, 2).transpose(1, 2)  # (R, width, J * (r + 1))
    step = pieces(n_pages, rank * width, rows)
    products = None
    for part in range(parts):
        channels = slice(part * width, (part + 1) * width)
        for basis, centroid, target in zip(used["basis"], used["centroid"], codes, strict=True):
            for packed, unpacked in zip(basis.split(step), target[:, :rank].split(step), strict=True):
                if part:
                    packed = packed >> (bits * part)
                if part < parts - 1:
                    packed = packed & ((1 << bits) - 1)
                unpacked.copy_(packed)
            target[:, rank] = centroid[:, channels]
        if products is None:
            products = torch.bmm(query[:, :, channels], matrix)
        else:
            products.baddbmm_(query[:, :, channels], matrix)
    return products.unflatten(2, (n_pages, rank + 1))


def _times_coefficients(coefficients: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
    """Sum over the rank of int8 coefficients ``(R, J, P, r)`` times ``(R, G, r, J)``: float32 ``(R, G, P, J)``."""
    rows, n_pages, page_size, rank = coefficients.shape
    factors = projected.new_empty(rows, rank, page_size, n_pages)
    step = pieces(rank, page_size * n_pages, rows)
    for source, target in zip(coefficients.permute(0, 3, 2, 1), factors, strict=True):
        for codes, floats in zip(source.split(step), target.split(step), strict=True):
            floats.copy_(codes)
    total = factors[:, None, 0] * projected[:, :, 0, None]
    for column in range(1, rank):
        total.addcmul_(factors[:, None, column], projected[:, :, column, None])
    return total
