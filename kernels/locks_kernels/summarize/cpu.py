"""Page summarisation for the CPU: the reference step by step in NumPy, cheap for the few pages of a decode step."""

from __future__ import annotations

import numpy as np
import torch

from ..layout import SummaryLayout
from .reference import RANK_TOLERANCE, REFIT_RIDGE

_NAN = 0x7FC0  # as the bits of a bf16


def summarize_cpu(keys: torch.Tensor, layout: SummaryLayout, refit: bool) -> dict[str, torch.Tensor]:
    """Packed summaries of complete pages; see :func:`locks_hf.kernels.summarize.summarize_reference`.

    A page's summary does not depend on the other pages that are given.
    """
    pages = keys.detach().double().numpy()
    broken = ~np.isfinite(pages).all(axis=(1, 2))
    if broken.any():
        pages = np.where(broken[:, None, None], 0.0, pages)
    with np.errstate(all="ignore"):
        centroid, coefficients, basis = _page_factors(pages, layout.rank)
        centroid_codes, centroid_bits, centroid = _quantize(centroid, 8)
        if layout.basis_bits == 16:
            stored_basis = torch.from_numpy(basis).to(torch.bfloat16)
            basis = stored_basis.double().numpy()
            column_bits = np.empty((len(pages), 0), dtype=np.int16)
        else:
            codes, column_bits, basis = _quantize(basis, layout.basis_bits)
            stored_basis = torch.from_numpy(_pack(codes, layout.basis_bits))
        if refit:
            coefficients = _refit(pages - centroid[:, None], basis)
        coefficient_codes, token_bits, _ = _quantize(coefficients, 8)
    centroid_bits[broken] = _NAN
    scales = np.concatenate((centroid_bits[:, None], column_bits), axis=1)
    return {
        "basis": stored_basis,
        "coefficients": torch.from_numpy(coefficient_codes),
        "centroid": torch.from_numpy(centroid_codes),
        "token_scales": torch.from_numpy(token_bits).view(torch.bfloat16),
        "scales": torch.from_numpy(scales).view(torch.bfloat16),
    }


def _page_factors(pages: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centroids ``(N, d)``, coefficients ``(N, P, rank)`` and basis columns ``(N, rank, d)`` of float64 pages."""
    centroid = np.add.reduce(pages, axis=1) / pages.shape[1]
    centred = pages - centroid[:, None]
    # Scaling each page by its largest entry keeps the Gram matrix in range for any input.
    size = np.maximum.reduce(np.abs(centred), axis=(1, 2), keepdims=True)
    unit = centred / np.where(size > 0, size, 1.0)
    eigenvalues, eigenvectors = np.linalg.eigh(unit @ unit.swapaxes(1, 2))
    eigenvalues = eigenvalues[:, ::-1][:, :rank]
    columns = eigenvectors[:, :, ::-1][:, :, :rank].swapaxes(1, 2) @ unit
    norm = np.sqrt(np.add.reduce(columns * columns, axis=2))
    # Columns past the page's rank are rounding noise: zeros.
    kept = (eigenvalues > RANK_TOLERANCE**2 * eigenvalues[:, :1]) & (norm > 0)
    basis = np.where(kept[:, :, None], columns / norm[:, :, None], 0.0)
    return centroid, centred @ basis.swapaxes(1, 2), basis


def _quantize(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symmetric quantisation along the last dimension of ``(..., n)``.

    Returns:
        Codes int8 ``(..., n)``, bf16 scales as their bits, int16 ``(...)``, and float64 values ``(..., n)``.
    """
    top = (1 << (bits - 1)) - 1
    values = values.astype(np.float32)
    scale = np.maximum.reduce(np.abs(values), axis=-1) / np.float32(top)
    # Rounded up to bf16, so that no value leaves the codes.
    scale_bits = (scale.view(np.int32) + 0xFFFF) >> 16
    scale = (scale_bits << 16).view(np.float32)[..., None]
    codes = np.rint(values / np.where(scale > 0, scale, np.float32(np.inf))).clip(-top, top)
    return codes.astype(np.int8), scale_bits.astype(np.int16), (codes * scale).astype(np.float64)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Basis codes ``(N, r, d)`` as they are stored; see :func:`locks_hf.kernels.layout.pack_codes`."""
    if bits == 8:
        return codes
    parts = 8 // bits
    biased = (codes + np.int8(1 << (bits - 1))).view(np.uint8).reshape(*codes.shape[:2], parts, -1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(biased << shifts, axis=2)


def _refit(residual: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Least-squares coefficients ``(N, P, r)`` of ``(N, P, d)`` in basis columns ``(N, r, d)``."""
    gram = basis @ basis.swapaxes(1, 2)
    diagonal = np.einsum("nii->ni", gram)
    ridge = REFIT_RIDGE * np.maximum.reduce(diagonal, axis=1, keepdims=True)
    # A zero column has a zero row in the Gram matrix; one on its diagonal keeps the system regular.
    diagonal += np.where(diagonal > 0, ridge, 1.0)
    return np.linalg.solve(gram, basis @ residual.swapaxes(1, 2)).swapaxes(1, 2)
