"""A call of scaled_dot_product_attention, read from its arguments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .call import VIEWS, AttentionCall, CallRead, Mask
from .kernel_choice import autocast_dtype, kernel_of

try:
    from torch.nn.attention.bias import CausalBias, CausalVariant
except ImportError:  # Another torch: no such mask can come.
    CausalBias = CausalVariant = None  # type: ignore[assignment,misc]

PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# The last two are what torch.compile traces with.
_PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)
NOT_TOLD = "which are batch and which are heads is not told: not measured"
BAD_SCALE = "scale is not above 0, or not finite"


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[dict[str, Any]]:
    """By their names; None unless each parameter is given once."""
    if len(args) > len(PARAMETERS) or any(name in kwargs for name in PARAMETERS[: len(args)]):
        return None
    return {**dict(zip(PARAMETERS, args)), **kwargs}


def mask_of(mask: Any, is_causal: Any, q_len: int, k_len: int) -> tuple[Mask, Optional[str]]:
    """(the call's mask, what of it is not understood)."""
    if CausalBias is not None and type(mask) is CausalBias:
        top_left = mask.seq_len_q == mask.seq_len_kv or mask.variant == CausalVariant.UPPER_LEFT
        if not top_left and (mask.seq_len_q, mask.seq_len_kv) != (q_len, k_len):
            return Mask(causal=True), "a causal mask of another length"
        return Mask(causal=True, top_left=top_left and q_len != k_len), None
    causal = bool(is_causal)
    plain = Mask(causal=causal, top_left=causal and q_len != k_len)
    if mask is None:
        return plain, None
    if type(mask) not in _PLAIN:
        return plain, f"{type(mask).__name__} as attn_mask"
    if mask.dim() > 4 or mask.layout is not torch.strided:
        return plain, f"attn_mask of {mask.dim()} dimensions"
    return Mask(causal=causal, top_left=plain.top_left, tensor=mask), None


def scale_of(scale: Any, dim: int) -> Optional[float]:
    """None if the function refuses it."""
    if scale is None:
        return float(dim**-0.5) if dim else math.inf
    if isinstance(scale, Tensor) and scale.numel() == 1:
        return float(scale.detach())
    return float(scale) if isinstance(scale, (int, float)) else None


def _layout(q: Tensor, k: Tensor) -> Optional[str]:
    """The name of the order in call.VIEWS.  The function takes [..., heads, tokens, dim], as its
    own documentation has it; None where that does not say which are the heads."""
    if q.dim() != k.dim() or q.dim() < 3:
        return None
    if q.dim() == 3:
        return "btd"
    if q.dim() == 4:
        return "bhtd"
    if q.dim() == 5 and k.shape[2] == 1 and q.shape[2] > 1 and k.shape[1] == q.shape[1]:
        return "bghtd"
    return "...htd" if q.shape[:-3] == k.shape[:-3] else None


def read(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRead:
    """A Reader (call.py)."""
    given = arguments(args, kwargs)
    if given is None:
        return None
    q, k, v = (given.pop(name, None) for name in PARAMETERS[:3])
    for t in (q, k, v):  # Nothing is asked of another: a subclass would see it.
        if type(t) not in _PLAIN:
            return f"{type(t).__name__} instead of a plain tensor: not measured"
        if t.is_nested:
            return "a nested tensor: not measured"
    layout = _layout(q, k)
    if layout is None or (layout == "btd" and given.get("enable_gqa")):
        return f"{q.dim()} dimensions: {NOT_TOLD}"
    view = VIEWS[layout]
    scale, dropout = scale_of(given.get("scale"), q.shape[-1]), given.get("dropout_p", 0.0)
    if scale is None or not isinstance(dropout, (int, float)):
        return None
    mask, unread = mask_of(given.get("attn_mask"), given.get("is_causal"), q.shape[-2], k.shape[-2])
    if mask.tensor is not None and mask.tensor.dim() == 4 and q.dim() > 4:
        unread = "attn_mask over several batch dimensions"
    if mask.tensor is not None and mask.tensor.dim() == q.dim() == 3:
        mask = dataclasses.replace(mask, tensor=mask.tensor.unsqueeze(1))
    if not 0 < scale < math.inf:
        scale, unread = 1.0, BAD_SCALE
    return AttentionCall(
        q, k, v, view, view, view, view,
        lambda query, key, value: function(query, key, value, **given),
        scale,
        mask,
        dropout=float(dropout),
        cast=autocast_dtype(q, k, v),
        one_head=layout == "btd",
        kernel=lambda: kernel_of(q, k, v, given),
        unread=unread,
        options=given,
    )  # fmt: skip
