"""Dense causal attention of several tokens that continue a cache: query ``i`` sees the past and new tokens 0 to ``i``.

PyTorch's causal kernels align the first query with the first key, and a mask over ``n x T`` rules the fast ones out. On
a GPU attention is therefore taken in two parts, over the past without a mask and among the new tokens causally, and
merged by their log-sum-exp. Nothing is repeated for grouped heads and no keys are copied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

# Rows of a mask where a kernel needs one, and queries merged at once: both bound the temporaries.
_MASK_ROWS = 512
_MERGED_QUERIES = 16384

# Output (B, H * G, n, d) and log-sum-exp (B, H * G, n) of attention that is causal or not.
Part = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]]


def continue_densely(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scaling: float
) -> torch.Tensor:
    """Attend new tokens over a cache of equal rows.

    Args:
        query: ``(B, H * G, n, d)``.
        keys: ``(B, H, start + n, d)``.
        values: Likewise.
        start: Tokens cached before the new ones, at least 1.
        scaling: Factor on the logits.

    Returns:
        ``(B, n, H * G, d)``.
    """
    part = _part_with_lse(query, keys, values)
    if part is not None:
        out = in_two_parts(part, query.detach(), keys, values, start, scaling)
    else:
        out = _masked(query, keys, values, start, scaling)
    return out.transpose(1, 2)


def _part_with_lse(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Part | None:
    """The fastest kernel that gives its log-sum-exp, or ``None``.

    cuDNN's from Hopper on, where it is 1.8 times as fast as FlashAttention 2 (measured on an H200), and that one
    before.
    """
    if query.device.type != "cuda" or not query.dtype == keys.dtype == values.dtype:
        return None
    params = SDPAParams(query, keys, values, None, 0.0, False, True)
    if torch.cuda.get_device_capability(query.device) >= (9, 0) and can_use_cudnn_attention(params):
        return _cudnn
    return _flash if can_use_flash_attention(params) else None


def _cudnn(query, keys, values, causal, scaling):
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, keys, values, None, True, 0.0, causal, False, scale=scaling
    )
    return out, lse.reshape(query.shape[:3])


def _flash(query, keys, values, causal, scaling):
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, causal, False, scale=scaling
    )
    return out, lse


def in_two_parts(
    part: Part, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scaling: float
) -> torch.Tensor:
    """As :func:`continue_densely` by a kernel that gives its log-sum-exp; ``(B, H * G, n, d)``."""
    out = torch.empty_like(query)
    for first in range(0, query.shape[2], _MERGED_QUERIES):
        block = query[:, :, first : first + _MERGED_QUERIES]
        past, end = start + first, start + first + block.shape[2]
        old, old_lse = part(block, keys[:, :, :past], values[:, :, :past], False, scaling)
        new, new_lse = part(block, keys[:, :, past:end], values[:, :, past:end], True, scaling)
        weight = torch.sigmoid(old_lse.float() - new_lse.float())[..., None]
        out[:, :, first : first + block.shape[2]] = torch.lerp(new.float(), old.float(), weight)
    return out


def _masked(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scaling: float) -> torch.Tensor:
    """As :func:`continue_densely` with masks; ``(B, H * G, n, d)``.

    The query heads of a group are taken as more queries of one head, so that keys and values need not be repeated.
    """
    grouped = query.unflatten(1, (keys.shape[1], -1))
    group, size = grouped.shape[2:4]
    outputs = []
    step = max(1, _MASK_ROWS // group)
    for first in range(0, size, step):
        block = grouped[:, :, :, first : first + step]
        end = start + first + block.shape[3]
        position = torch.arange(start + first, end, device=query.device)
        mask = torch.arange(end, device=query.device) <= position[:, None]
        mask = mask.repeat(group, 1).expand(query.shape[0], 1, -1, -1)
        output = F.scaled_dot_product_attention(
            block.flatten(2, 3), keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=scaling
        )
        outputs.append(output.unflatten(2, (group, -1)))
    return torch.cat(outputs, dim=3).flatten(1, 2)
