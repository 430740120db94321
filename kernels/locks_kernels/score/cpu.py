"""Page scoring for the CPU: the formula of the reference in NumPy, in blocks that stay in a core's cache."""

from __future__ import annotations

import numpy as np
import torch

from ..backend import PRODUCT, bf16_to_float, finite, raw
from ..layout import SummaryLayout

# Multiply-adds with the query in a block of KV heads and pages: enough that the calls cost less than what they do.
_BLOCK = 1 << 21


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
    of packed codes goes out as a multiple of the query's sum, and pages are the innermost dimension of everything after
    the products with the query.

    Args:
        query: ``(B, H * G, d)``, fp32, bf16 or fp16; no gradient reaches it.
        summaries: Arrays of :meth:`SummaryLayout.fields` with leading dimensions ``(B, H, capacity)``, any strides.
        n_pages: Integer ``(B,)``.
        max_pages: Pages to score.
        layout: Sizes of the summaries.
        scaling: Factor on the logits.

    Returns:
        float32 ``(B, H, G, max_pages)``; ``-inf`` for pages a row does not have.
    """
    batch, n_kv_heads = summaries["centroid"].shape[:2]
    scaled = query.detach().float().numpy() * np.float32(scaling)
    scaled = scaled.reshape(batch, n_kv_heads, -1, layout.head_dim)
    group = scaled.shape[2]
    arrays = {name: raw(array) for name, array in summaries.items()}
    lse = np.full((batch, n_kv_heads, group, max_pages), -np.inf, dtype=np.float32)
    work = (layout.rank + 1) * layout.basis_width * group  # of a page
    for row, count in enumerate(n_pages.tolist()):
        page_step = max(1, min(count, PRODUCT // work))
        head_step = max(1, _BLOCK // (work * page_step))
        for head in range(0, n_kv_heads, head_step):
            for page in range(0, count, page_step):
                heads, pages = slice(head, head + head_step), slice(page, min(page + page_step, count))
                packed = {name: array[row, heads, pages] for name, array in arrays.items()}
                lse[row, heads, :, pages] = _score_pages(scaled[row, heads], packed, layout)
    return torch.from_numpy(lse)


def _score_pages(query: np.ndarray, packed: dict[str, np.ndarray], layout: SummaryLayout) -> np.ndarray:
    """Log-sum-exp of some pages of some KV heads.

    Args:
        query: Scaled queries, float32 ``(H, G, d)``.
        packed: Summaries ``(H, J, ...)``, bf16 as its bits.
        layout: Sizes of the summaries.

    Returns:
        float32 ``(H, G, J)``.
    """
    heads, group, _ = query.shape
    n_pages, rank = packed["basis"].shape[1], layout.rank
    products = _products(query, packed, layout)  # (H, G, r + 1, J), a view with pages outside
    scales = bf16_to_float(packed["scales"].swapaxes(1, 2))[:, None]  # (H, 1, 1 + r, J)
    token_scales = bf16_to_float(packed["token_scales"].swapaxes(1, 2))[:, None]  # (H, 1, P, J)
    projected = np.empty((heads, group, rank, n_pages), dtype=np.float32)
    if layout.codes_per_byte > 1:
        bias = np.add.reduce(query, axis=2) * np.float32(1 << (layout.basis_bits - 1))
        np.subtract(products[:, :, :rank], bias[:, :, None, None], out=projected)
    else:
        projected[...] = products[:, :, :rank]
    with np.errstate(all="ignore"):
        if layout.basis_bits < 16:
            projected *= scales[:, :, 1:]
        coefficients = np.empty((heads, layout.page_size, rank, n_pages), dtype=np.float32)
        coefficients[...] = packed["coefficients"].transpose(0, 2, 3, 1)
        logits = np.einsum("hprj,hgrj->hgpj", coefficients, projected)
        logits *= token_scales
        # Finite, so that infinite logits give an infinite sum rather than NaN.
        largest = finite(np.maximum.reduce(logits, axis=2))
        logits -= largest[:, :, None]
        within = np.log(np.add.reduce(np.exp(logits, out=logits), axis=2))
        within += largest
        within += products[:, :, rank] * scales[:, :, 0]
    return within


def _products(query: np.ndarray, packed: dict[str, np.ndarray], layout: SummaryLayout) -> np.ndarray:
    """The query times the stored codes of the basis columns, bias included, and times those of the centroid.

    Args:
        query: float32 ``(H, G, d)``.
        packed: Summaries ``(H, J, ...)``, bf16 as its bits.
        layout: Sizes of the summaries.

    Returns:
        float32 ``(H, G, r + 1, J)``, the centroid last.
    """
    basis, centroid = packed["basis"], packed["centroid"]
    heads, n_pages, rank, width = basis.shape
    bits, parts = layout.basis_bits, layout.codes_per_byte
    # One run of channels at a time, in one buffer.
    codes = np.empty((heads, n_pages, rank + 1, width), dtype=np.float32)
    products = None
    for part in range(parts):
        run = basis
        if part:
            run = run >> (bits * part)
        if part < parts - 1:
            run = run & ((1 << bits) - 1)
        codes[:, :, :rank] = bf16_to_float(run) if bits == 16 else run
        channels = slice(part * width, (part + 1) * width)
        codes[:, :, rank] = centroid[:, :, channels]
        columns = np.ascontiguousarray(query[:, :, channels].swapaxes(1, 2))
        product = codes.reshape(heads, -1, width) @ columns
        products = product if products is None else np.add(products, product, out=products)
    return products.reshape(heads, n_pages, rank + 1, -1).transpose(0, 3, 2, 1)
