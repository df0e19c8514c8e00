"""Which keys a row of attention() sees, in the words of PyTorch's operations."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .._kernels.probe import HIDDEN, MASK_DTYPES, ProbeMask, visible_keys


class Seen(NamedTuple):
    """Keys that every part allows; the parts are those of attention.h."""

    causal: bool = False
    window: int = 0
    of_q: Optional[Tensor] = None  # cu_seqlens
    of_k: Optional[Tensor] = None
    mask: Optional[Tensor] = None  # [batch or 1, heads or 1, q_len or 1, k_len]
    key_bounds: Optional[Tensor] = None  # [batch, 2]


def mask_lacks(mask: Tensor, q: Tensor, k: Tensor) -> Optional[str]:
    """Why a mask does not go with q and k; None if it does."""
    if mask.dtype not in MASK_DTYPES and mask.dtype != torch.float64:
        return f"mask is {mask.dtype}, but must be torch.bool or floating"
    if mask.device != q.device:
        return f"mask is on {mask.device}, but must be on {q.device} as q is"
    want = (*q.shape[:3], k.shape[2])
    have = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(have) != 4 or not all(h == w or h == 1 for h, w in zip(have, want)):
        return f"mask is {list(mask.shape)}, but must broadcast to {list(want)}"
    return None


def mask_of_four(mask: Tensor) -> Tensor:
    """With four dimensions, in a type that the kernels read."""
    mask = mask.float() if mask.dtype == torch.float64 else mask
    return mask[(None,) * (4 - mask.dim())]


def _in_bounds(bounds: Tensor, k_len: int) -> Tensor:
    """[batch, k_len]"""
    key = torch.arange(k_len, device=bounds.device)
    return (key >= bounds[:, :1]) & (key < bounds[:, 1:])


def _shown(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else ~(mask <= HIDDEN)


def allowed(seen: Seen, q_len: int, k_len: int, device: torch.device) -> Optional[Tensor]:
    """Bool, broadcasts to [batch, heads, q_len, k_len]: which keys a row sees; None = all."""
    result = None
    if seen.of_q is not None or seen.causal or seen.window:
        row = torch.arange(q_len, device=device)[:, None]
        key = torch.arange(k_len, device=device)[None, :]
        result = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
        last = row + (k_len - q_len)
        if seen.of_q is not None and seen.of_k is not None:
            mine = torch.bucketize(row, seen.of_q[1:], right=True)
            result = mine == torch.bucketize(key, seen.of_k[1:], right=True)
            last = row + (seen.of_k[1:] - seen.of_q[1:])[mine]  # Both end at the same position.
        if seen.causal:
            result = result & (key <= last)
        if seen.window:
            result = result & (key > last - seen.window)
    if seen.key_bounds is not None:
        inside = _in_bounds(seen.key_bounds, k_len)[:, None, None]
        result = inside if result is None else inside & result
    if seen.mask is not None:
        shown = _shown(seen.mask)
        result = shown if result is None else shown & result
    return result


def as_mask(seen: Seen, q: Tensor, k: Tensor) -> Optional[Tensor]:
    """All parts as one mask, bool or added to the scores; None = all keys."""
    shown = allowed(seen, q.shape[2], k.shape[2], q.device)
    if shown is None or seen.mask is None or seen.mask.dtype == torch.bool:
        return shown
    return seen.mask.masked_fill(~shown, -torch.inf)


def sdpa_mask(seen: Seen, q: Tensor, k: Tensor) -> dict[str, Any]:
    """The same in the words of scaled_dot_product_attention, whose causal aligns the first
    rows."""
    plain = seen.of_q is None and not seen.window and seen.mask is None and seen.key_bounds is None
    if plain and (not seen.causal or q.shape[2] == k.shape[2]):
        return {"is_causal": seen.causal}
    mask = as_mask(seen, q, k)
    if mask is None or mask.dtype == torch.bool:
        return {"attn_mask": mask}
    return {"attn_mask": mask.to(q.dtype)}  # Not all of PyTorch's kernels read another type.


def visible(seen: Seen, q: Tensor, k: Tensor) -> Optional[Tensor]:
    """Bool, broadcasts to [batch, kv_heads, k_len]: what center_keys() takes; None = all keys."""
    result = None
    if seen.mask is not None:
        window_left = seen.window - 1 if seen.window else None
        mask = ProbeMask(causal=seen.causal, window_left=window_left, tensor=seen.mask)
        result = visible_keys(mask, q, k.shape[2])
        if result.shape[1] > 1:
            groups = (result.shape[0], k.shape[1], -1, k.shape[2])
            result = result.view(groups).any(2)
    if seen.key_bounds is not None:
        inside = _in_bounds(seen.key_bounds, k.shape[2])[:, None]
        result = inside if result is None else inside & result
    return result
