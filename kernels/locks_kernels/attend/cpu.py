"""Attention over chosen pages for the CPU, one KV head at a time, in NumPy."""

from __future__ import annotations

import numpy as np
import torch

from ..backend import bf16_to_float, product, raw


def attend_cpu(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    scaling: float,
) -> torch.Tensor:
    """Exact attention over the real tokens of the chosen pages; see :func:`locks_hf.kernels.attend.attend`.

    Gathers real tokens only, so that no mask is needed. No gradient reaches the query.
    """
    batch, n_kv_heads, _, head_dim = keys.shape
    scaled = query.detach().float().numpy() * np.float32(scaling)
    columns = np.ascontiguousarray(scaled.reshape(batch, n_kv_heads, -1, head_dim).swapaxes(2, 3))  # (B, H, d, G)
    out = np.zeros((batch, n_kv_heads, columns.shape[3], head_dim), dtype=np.float32)
    chosen, all_keys, all_values = pages.numpy(), raw(keys), raw(values)
    for row, length in enumerate(lengths.tolist()):
        # No page but the one after the complete pages can be incomplete.
        n_complete, tail = divmod(length, page_size)
        for head in range(n_kv_heads):
            selected = chosen[row, head]
            complete = selected[(selected >= 0) & (selected < n_complete)]
            end = length if tail and (selected == n_complete).any() else n_complete * page_size
            if not len(complete) and end % page_size == 0:
                continue  # Nothing to attend to: zeros.
            parts = (complete, n_complete * page_size, end, page_size)
            logits = product(_gather(all_keys[row, head], *parts, keys.dtype), columns[row, head])  # (n, G)
            logits = np.ascontiguousarray(logits.T)
            with np.errstate(all="ignore"):
                logits -= np.maximum.reduce(logits, axis=1, keepdims=True)
                weights = np.exp(logits, out=logits)
                total = np.add.reduce(weights, axis=1, keepdims=True)
                weighted = product(_gather(all_values[row, head], *parts, keys.dtype).T, weights.T)  # (d, G)
                np.divide(weighted.T, total, out=out[row, head])
    return torch.from_numpy(out.reshape(query.shape)).to(query.dtype)


def _gather(
    states: np.ndarray, complete: np.ndarray, start: int, end: int, page_size: int, dtype: torch.dtype
) -> np.ndarray:
    """Whole pages of one KV head, then the tokens from ``start`` to ``end``.

    Args:
        states: ``(capacity, d)``, 16-bit floats as their bits.
        complete: Indices of pages before ``start``, ``(n,)``.
        start: A multiple of ``page_size``.
        end: At least ``start``.
        page_size: Tokens a page.
        dtype: What ``states`` are.

    Returns:
        float32 ``(n * page_size + end - start, d)``.
    """
    n_whole, head_dim = len(complete) * page_size, states.shape[1]
    taken = np.empty((n_whole + end - start, head_dim), dtype=states.dtype)
    if n_whole:
        by_page = states[:start].reshape(-1, page_size * head_dim)
        # "clip" spares a buffer; all indices are in range.
        by_page.take(complete, axis=0, out=taken[:n_whole].reshape(len(complete), -1), mode="clip")
    taken[n_whole:] = states[start:end]
    if dtype == torch.bfloat16:
        return bf16_to_float(taken)
    if dtype == torch.float16:  # by torch, which is ten times as fast here
        return torch.from_numpy(taken).view(dtype).float().numpy()
    return taken
