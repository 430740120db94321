"""Torch reference of page summarisation (paper Sec. 4)."""

from __future__ import annotations

import torch

from ..layout import SummaryLayout, pack_codes

# Singular values below this share of the page's largest are rounding noise: their columns are stored as zeros.
RANK_TOLERANCE = 1e-6
# Relative ridge of the refit. Far below the int8 step of the coefficients, it only matters for singular systems.
REFIT_RIDGE = 1e-4


def page_factors(keys: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Best rank-``rank`` factors of each page's centred keys, unquantised.

    The eigenvectors of the P x P Gram matrix of the centred keys give the right singular vectors. Columns past the
    page's rank are zero.

    Args:
        keys: ``(..., P, d)``, any float dtype.
        rank: Columns to keep.

    Returns:
        Centroid ``(..., d)``, coefficients ``(..., P, rank)`` and basis columns ``(..., rank, d)``, in float64.
    """
    keys = keys.double()
    centroid = keys.mean(dim=-2)
    centred = keys - centroid[..., None, :]
    # Scaling each page by its largest entry keeps the Gram matrix in range for any input.
    size = centred.abs().amax(dim=(-1, -2), keepdim=True)
    unit = torch.where(size > 0, centred / size, 0.0)
    eigenvalues, eigenvectors = torch.linalg.eigh(unit @ unit.transpose(-1, -2))
    eigenvalues = eigenvalues.flip(-1)[..., :rank]
    eigenvectors = eigenvectors.flip(-1)[..., :rank]
    columns = eigenvectors.transpose(-1, -2) @ unit
    noise = eigenvalues <= RANK_TOLERANCE**2 * eigenvalues[..., :1]
    norm = columns.norm(dim=-1, keepdim=True)
    basis = torch.where(noise[..., None] | (norm == 0), 0.0, columns / norm)
    return centroid, centred @ basis.transpose(-1, -2), basis


def quantize(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation along the last dimension with a bf16 scale.

    Args:
        values: ``(..., n)`` float.
        bits: Bits a code; codes lie in ``[-(2**(bits-1) - 1), 2**(bits-1) - 1]``.

    Returns:
        Integer codes ``(..., n)`` as float32 and scales ``(..., 1)`` in bfloat16.
    """
    top = 2 ** (bits - 1) - 1
    values = values.float()
    # The codes are made with the scale that is stored. Rounding it up to bf16 (adding to the 16 bits that go, then
    # cutting them) keeps the largest value within the codes, so that no error exceeds half a step.
    scale_bits = (values.abs().amax(dim=-1, keepdim=True) / top).view(torch.int32)
    scale = ((scale_bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)
    codes = torch.where(scale > 0, values / scale.float(), 0.0).round().clamp(-top, top)
    return codes, scale


def refit_coefficients(residual: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Least-squares coefficients of ``residual`` in a basis that need not be orthonormal.

    Args:
        residual: Keys minus the dequantised centroid, ``(..., P, d)``.
        basis: Dequantised basis columns ``(..., r, d)``; zero columns get zero coefficients.

    Returns:
        ``(..., P, r)``.
    """
    gram = basis @ basis.transpose(-1, -2)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = REFIT_RIDGE * diagonal.amax(dim=-1, keepdim=True)
    # A zero column has a zero row in the Gram matrix; one on its diagonal keeps the system regular.
    ridge = torch.where(diagonal > 0, ridge, 1.0)
    right = basis @ residual.transpose(-1, -2)
    factor = torch.linalg.cholesky(gram + torch.diag_embed(ridge))
    return torch.cholesky_solve(right, factor).transpose(-1, -2)


def summarize_reference(keys: torch.Tensor, layout: SummaryLayout, refit: bool) -> dict[str, torch.Tensor]:
    """Packed summaries of complete pages.

    Args:
        keys: ``(N, P, d)`` post-RoPE keys, any float dtype.
        layout: Sizes of the summary.
        refit: Least-squares coefficients against the quantised basis and centroid instead of ``C = D V``.

    Returns:
        The arrays of :meth:`SummaryLayout.fields`, each with a leading dimension ``N``. A page that holds a NaN or an
        infinity gets a NaN centroid scale, hence a NaN score.
    """
    keys = keys.double()
    broken = ~keys.isfinite().flatten(1).all(dim=1)
    keys = torch.where(broken[:, None, None], 0.0, keys)
    centroid, coefficients, basis = page_factors(keys, layout.rank)

    centroid_codes, centroid_scale = quantize(centroid, 8)
    if layout.basis_bits == 16:
        stored_basis = basis.to(torch.bfloat16)
        used_basis = stored_basis.double()
        column_scale = keys.new_empty(keys.shape[0], 0, dtype=torch.bfloat16)
    else:
        codes, column_scale = quantize(basis, layout.basis_bits)
        stored_basis = codes.to(torch.int8) if layout.basis_bits == 8 else pack_codes(codes, layout.basis_bits)
        used_basis = (codes * column_scale.float()).double()
        column_scale = column_scale.squeeze(-1)
    if refit:
        residual = keys - (centroid_codes * centroid_scale.float()).double()[:, None, :]
        coefficients = refit_coefficients(residual, used_basis)
    coefficient_codes, token_scale = quantize(coefficients, 8)

    centroid_scale = torch.where(broken[:, None], float("nan"), centroid_scale)
    return {
        "basis": stored_basis,
        "coefficients": coefficient_codes.to(torch.int8),
        "centroid": centroid_codes.to(torch.int8),
        "token_scales": token_scale.squeeze(-1),
        "scales": torch.cat([centroid_scale, column_scale], dim=-1),
    }
