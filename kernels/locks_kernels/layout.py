"""How a page summary is packed, and the bytes it takes (paper App. C.7).

A summary of a page of ``P`` keys of ``d`` channels at rank ``r`` is five arrays, kept as structure of arrays:

=============  ==========================  =========  ====================================================
name           shape per page              dtype      content
=============  ==========================  =========  ====================================================
basis          (r, d * bits / 8)           uint8      columns of V, int2 or int4 codes (int8, bf16: unpacked)
coefficients   (P, r)                      int8       C, one row a token
centroid       (d,)                        int8       mu
token_scales   (P,)                        bfloat16   of each row of C
scales         (1 + r,)                    bfloat16   of the centroid, of each column of V
=============  ==========================  =========  ====================================================

Quantisation is symmetric. A bf16 basis has no column scales. Sub-byte codes are stored biased (``code + 2**(bits-1)``)
and split-packed: with ``n = 8 / bits`` codes a byte, part ``p`` of a byte at position ``i`` holds channel
``p * d / n + i``, so that unpacking yields ``n`` contiguous runs of channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BASIS_DTYPES = {2: torch.uint8, 4: torch.uint8, 8: torch.int8, 16: torch.bfloat16}


@dataclass(frozen=True)
class SummaryLayout:
    """Sizes of one packed page summary.

    Attributes:
        head_dim: Channels ``d`` of a key, a multiple of 8.
        rank: Columns ``r`` of the basis.
        page_size: Tokens ``P`` a page.
        basis_bits: 2, 4, 8, or 16 for bf16.

    Raises:
        ValueError: If ``basis_bits`` is another number.
    """

    head_dim: int
    rank: int
    page_size: int = 16
    basis_bits: int = 4

    def __post_init__(self):
        if self.basis_bits not in _BASIS_DTYPES:
            raise ValueError(f"basis_bits must be one of {tuple(_BASIS_DTYPES)}, got {self.basis_bits!r}")

    @property
    def codes_per_byte(self) -> int:
        """Basis codes packed in one byte: 4, 2 or 1."""
        return max(1, 8 // self.basis_bits)

    @property
    def basis_width(self) -> int:
        """Stored elements of one basis column."""
        return self.head_dim // self.codes_per_byte

    @property
    def n_scales(self) -> int:
        """Scales a page besides those of the tokens: centroid, one per basis column unless the basis is bf16."""
        return 1 + (self.rank if self.basis_bits < 16 else 0)

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape per page and dtype of each array."""
        return {
            "basis": ((self.rank, self.basis_width), _BASIS_DTYPES[self.basis_bits]),
            "coefficients": ((self.page_size, self.rank), torch.int8),
            "centroid": ((self.head_dim,), torch.int8),
            "token_scales": ((self.page_size,), torch.bfloat16),
            "scales": ((self.n_scales,), torch.bfloat16),
        }

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page's summary, e.g. 818 for rank 8 and 490 for rank 4 at head_dim 128 with an int4 basis."""
        total = 0
        for shape, dtype in self.fields().values():
            count = 1
            for size in shape:
                count *= size
            total += count * dtype.itemsize
        return total

    def empty(self, n_pages: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Uninitialised summaries of ``n_pages`` pages, each array with a leading page dimension."""
        return {
            name: torch.empty((n_pages, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in self.fields().items()
        }


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Split-pack signed codes along the last dimension.

    Args:
        codes: Integer tensor ``(..., d)`` with values in ``[-2**(bits-1), 2**(bits-1) - 1]``.
        bits: 2 or 4.

    Returns:
        uint8 ``(..., d * bits // 8)``.
    """
    parts = 8 // bits
    biased = (codes.to(torch.int32) + (1 << (bits - 1))).unflatten(-1, (parts, -1))
    packed = biased[..., 0, :]
    for part in range(1, parts):
        packed = packed | (biased[..., part, :] << (bits * part))
    return packed.to(torch.uint8)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo :func:`pack_codes`: uint8 ``(..., d * bits // 8)`` to float32 codes ``(..., d)``."""
    wide = packed.to(torch.int16)
    mask = (1 << bits) - 1
    parts = [((wide >> (bits * part)) & mask) - (1 << (bits - 1)) for part in range(8 // bits)]
    return torch.cat(parts, dim=-1).to(torch.float32)


def dequantize(summaries: dict[str, torch.Tensor], layout: SummaryLayout) -> tuple[torch.Tensor, ...]:
    """Unpack summaries to float32.

    Returns:
        Centroid ``(..., d)``, coefficients ``(..., P, r)`` and basis columns ``(..., r, d)``.
    """
    scales = summaries["scales"].float()
    centroid = summaries["centroid"].float() * scales[..., :1]
    coefficients = summaries["coefficients"].float() * summaries["token_scales"].float()[..., None]
    if layout.basis_bits == 16:
        basis = summaries["basis"].float()
    else:
        codes = summaries["basis"]
        codes = codes.float() if layout.basis_bits == 8 else unpack_codes(codes, layout.basis_bits)
        basis = codes * scales[..., 1:, None]
    return centroid, coefficients, basis
