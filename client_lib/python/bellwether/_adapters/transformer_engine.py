"""Transformer Engine's DotProductAttention, whichever of its kernels it takes.

Its parameters go before what its module was made with.  The heads of its output lie side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .._hook.calls.call import VIEWS, AttentionCall, CallRead, Mask, Reader
from .arguments import Arguments, are_tensors, reader, scale_of
from .flash_attention import linear_bias, window_of
from .megatron import forward_of, side_by_side

NAME = "transformer_engine"
TRIED = ("Transformer Engine 2.8 (its signature)",)

_MODULES = (
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
    "transformer_engine.pytorch.attention",
)
_CLASS = "DotProductAttention"
_LAYOUTS = {"sbhd": "sbhd", "bshd": "bthd", "thd": "thd"}
_READ = (
    "self", "query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format",
    "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded",
    "max_seqlen_q", "max_seqlen_kv", "attn_mask_type", "window_size", "core_attention_bias_type",
    "core_attention_bias", "alibi_slopes", "fast_zero_fill", "pad_between_seqs", "num_splits",
)  # fmt: skip


def functions() -> Iterator[tuple[Callable[..., Any], Reader]]:
    for place in _MODULES:
        yield from forward_of(place, _CLASS, read)


def _kind(told: str) -> str:
    """In the order that its own code gives the words."""
    told = told.replace(",", "_")
    return "padding_causal" if told == "causal_padding" else told


def _documents(given: Arguments) -> Union[tuple[Tensor, Tensor], str]:
    in_q, in_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_kv")
    if not isinstance(in_q, Tensor) or not isinstance(in_k, Tensor):
        return "documents without cu_seqlens"
    padded = given.get("cu_seqlens_q_padded"), given.get("cu_seqlens_kv_padded")
    between = given.get("pad_between_seqs")
    if between or any(p is not None and p is not c for p, c in zip(padded, (in_q, in_k))):
        return "padding between documents"
    return in_q, in_k


def _shown(mask: Mask, hidden_q: Tensor, hidden_k: Tensor) -> Mask:
    """With padding, [batch, 1, 1, tokens] and true: hidden as keys, and no rows."""
    rows_q = ~hidden_q.reshape(hidden_q.shape[0], -1)
    keys = ~hidden_k.reshape(hidden_k.shape[0], 1, -1)

    def function(rows: Tensor, scores: Tensor) -> Tensor:
        batch = rows.shape[0]
        real = rows_q[:batch, None].expand(-1, rows.shape[1], -1).gather(2, rows)
        shown = real[..., None] & keys[:batch, :, None]
        return torch.zeros_like(scores).masked_fill(~shown, -torch.inf)

    return dataclasses.replace(mask, function=function, visible=keys)


def _mask(module: Any, given: Arguments, layout: str, q_len: int, k_len: int) -> Union[Mask, str]:
    kind = _kind(given.get("attn_mask_type") or module.attn_mask_type)
    window = given.get("window_size")
    left, right = window_of(window if window is not None else module.window_size)
    causal, bottom = "causal" in kind, "bottom_right" in kind
    if not causal and (left, right) == (None, 0):
        right = None  # It takes (-1, 0) for no window.
    mask = Mask(causal=causal, top_left=causal and not bottom, left=left,
                right=None if causal else right)  # fmt: skip
    hides: Any = given.get("attention_mask")
    if layout == "thd":
        documents = _documents(given)
        if isinstance(documents, str):
            return documents
        return dataclasses.replace(mask, q_offsets=documents[0], k_offsets=documents[1])
    if q_len != k_len and (mask.left, mask.right) != (None, None) and not bottom:
        return "a window, with other keys than queries"
    if kind == "arbitrary":
        if not isinstance(hides, Tensor) or hides.dtype != torch.bool:
            return "attention_mask is no boolean tensor"
        return Mask(left=left, right=mask.right, tensor=~hides)
    if "padding" not in kind:
        return mask
    if bottom and q_len != k_len:
        return "padding from the bottom right, with other keys than queries"
    pair = hides if isinstance(hides, tuple) else (hides, hides)
    if len(pair) == 2 and all(isinstance(x, Tensor) and x.dtype == torch.bool for x in pair):
        return _shown(mask, pair[0], pair[1])
    in_q, in_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_kv")
    if hides is None and in_q is not None and in_q is in_k:
        return dataclasses.replace(mask, ends=in_k[1:] - in_k[:-1], padded_rows=True)
    return "padding that is not told by a mask"


def _biased(given: Arguments, mask: Mask, heads: int, q_len: int, k_len: int) -> Union[Mask, str]:
    kind, bias = given.get("core_attention_bias_type", "no_bias"), given.get("core_attention_bias")
    if kind == "no_bias":
        return mask
    plain = mask.function is None and mask.tensor is None
    if kind == "post_scale_bias" and isinstance(bias, Tensor) and plain:
        return dataclasses.replace(mask, tensor=bias.detach())
    slopes = given.get("alibi_slopes")
    if kind == "alibi" and isinstance(slopes, Tensor) and plain:
        return linear_bias(mask, slopes.detach(), q_len, k_len)
    return f"core_attention_bias_type {kind}"


@reader
def read(given: Arguments) -> CallRead:
    module = given.get("self")
    q, k, v = (given.get(f"{name}_layer") for name in ("query", "key", "value"))
    layout = _LAYOUTS.get(given.get("qkv_format") or module.qkv_format)
    if layout is None:
        return "an unknown qkv_format: not measured"
    if not are_tensors(len(layout), q, k, v):
        return f"q, k and v are not three tensors of {len(layout)} dimensions: not measured"
    group = module.cp_group
    if group is not None and (isinstance(group, list) or group.size() > 1):
        return "context parallel: the keys of other processes are not here: not measured"
    if given.get("checkpoint_core_attention"):
        return "checkpoint_core_attention: not measured"
    other = given.unusual(_READ)
    unread = f"{other} given" if other is not None else None
    if getattr(module, "fp8", False):
        unread = "q, k and v in 8 bits"
    view = VIEWS[layout]
    with torch.no_grad():
        q_len, k_len = view(q).shape[2], view(k).shape[2]
    heads = q.shape[-2]
    scale, wrong = scale_of(module.unfused_attention.softmax_scale, 1)
    mask = _mask(module, given, layout, q_len, k_len)
    if not isinstance(mask, str):
        mask = _biased(given, mask, heads, q_len, k_len)
    if isinstance(mask, str):
        unread, mask = mask, Mask()
    sinks: Optional[Tensor] = None
    softmax = getattr(module, "softmax_type", "vanilla")
    if softmax == "learnable":
        sinks = module.softmax_offset.detach().reshape(-1)
    elif softmax == "off-by-one":
        sinks = torch.zeros(heads, dtype=torch.float32, device=q.device)
    elif softmax != "vanilla":
        unread = f"softmax_type {softmax}"

    return AttentionCall(
        q, k, v, view, view, view, side_by_side(heads, view),
        given.run("query_layer", "key_layer", "value_layer"), scale, mask,
        sinks=sinks,
        dropout=float(module.attention_dropout) if module.training else 0.0,
        kernel=functools.partial(str, _CLASS),
        module=module,
        unread=unread or wrong,
    )  # fmt: skip
