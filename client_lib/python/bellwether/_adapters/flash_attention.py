"""FlashAttention's functions of all versions: dense, of packed q, k and v, and of documents that
are laid end to end.

They differ in their parameters, not in what a parameter means.  So a call is read by the names,
and one that is not known here is said.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .._hook.calls.call import (
    VIEWS,
    AttentionCall,
    CallRead,
    Mask,
    Reader,
    View,
    first_of,
    with_first,
)
from .arguments import Arguments, reader, scale_of
from .imported import imported

NAME = "flash_attn"
# flash_attn 2; flash_attn_interface, 3; flash_attn.cute, 4; what transformers takes from a hub.
TRIED = ("flash-attn 2.8.3 (its signatures)", "flash-attn-4 4.0.0b36")

_MODULES = (
    "flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface",
    "flash_attn_3.flash_attn_interface", "flash_attn.cute", "flash_attn.cute.interface",
)  # fmt: skip
_FUNCTIONS = tuple(
    f"flash_attn_{varlen}{packed}func"
    for varlen in ("", "varlen_")
    for packed in ("", "qkvpacked_", "kvpacked_")
)
# transformers keeps what it has loaded, also from a hub, under names of its own.
_TRANSFORMERS = "transformers.modeling_flash_attention_utils"
_ITS_FUNCTIONS = ("_flash_fn", "_flash_varlen_fn")

_OF_NO_CONSEQUENCE = (
    "max_seqlen", "max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "deterministic", "num_splits",
    "pack_gqa", "sm_margin", "return_attn_probs", "return_softmax", "return_lse",
    "return_softmax_lse", "scheduler_metadata", "seqlen_k_per_split",
    "disable_scheduler_metadata", "zero_tensors",
)  # fmt: skip
_READ = (
    "q", "k", "v", "kv", "qkv", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "dropout_p",
    "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "learnable_sink",
    "s_aux", "attention_chunk",
)  # fmt: skip


def functions() -> Iterator[tuple[Callable[..., Any], Reader]]:
    places = [(place, name) for place in _MODULES for name in _FUNCTIONS]
    for place, name in places + [(_TRANSFORMERS, name) for name in _ITS_FUNCTIONS]:
        function = imported(place, name)
        if function is not None:
            yield function, read


def window_of(window: Any) -> tuple[Optional[int], Optional[int]]:
    """Keys before and after the diagonal that a row may see, None = all of them."""
    left, right = window if window is not None else (None, None)
    return (
        None if left is None or left < 0 else int(left),
        None if right is None or right < 0 else int(right),
    )


def linear_bias(mask: Mask, slopes: Tensor, q_len: int, k_len: int) -> Mask:
    """The mask with the bias of ALiBi, - slope |diagonal - key|; slopes [heads] or [batch, heads].
    It hides no key."""

    def function(rows: Tensor, scores: Tensor) -> Tensor:
        diagonal = rows + (k_len - q_len)
        if mask.q_offsets is not None and mask.k_offsets is not None:
            in_q, in_k = (x.to(rows.dtype) for x in (mask.q_offsets, mask.k_offsets))
            document = torch.searchsorted(in_q.contiguous(), rows.contiguous(), right=True)
            document = document.clamp(1, in_q.shape[0] - 1)  # One behind the row's own.
            diagonal = rows + in_k[document] - in_q[document]
        key = torch.arange(k_len, device=rows.device)
        slope = slopes.float().reshape(-1, slopes.shape[-1], 1, 1)[: rows.shape[0]]
        return -slope * (diagonal[..., None] - key).abs()

    return dataclasses.replace(mask, function=function, hides=False)


def _part(index: int, view: View) -> View:
    """Of a packed tensor [..., parts, heads, dim]."""
    return lambda x: view(x.select(-3, index))


def _heads_of(begin: int, count: int, view: View) -> View:
    """Of one whose heads lie side by side: q's, k's, v's."""
    return lambda x: view(x.narrow(-2, begin, count))


_Tensors = tuple[tuple[str, str, str], tuple[Tensor, Tensor, Tensor], tuple[View, View, View]]


def _tensors(given: Arguments, view: View) -> Union[_Tensors, str]:
    """The names of q, k and v among the arguments, the tensors, their views."""
    if "qkv" in given:
        qkv = given.get("qkv")
        own = given.get("num_heads_q")
        if own is not None and qkv.dim() == 4:
            of_k = (qkv.shape[2] - own) // 2
            places = ((0, own), (own, of_k), (own + of_k, of_k))
            parts = [_heads_of(begin, count, view) for begin, count in places]
        else:
            parts = [_part(i, view) for i in range(3)]
        return ("qkv", "qkv", "qkv"), (qkv, qkv, qkv), (parts[0], parts[1], parts[2])
    if "kv" in given:
        q, kv = given.get("q"), given.get("kv")
        return ("q", "kv", "kv"), (q, kv, kv), (view, _part(0, view), _part(1, view))
    q, k, v = given.get("q"), given.get("k"), given.get("v")
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or not isinstance(v, Tensor):
        return "q, k and v are not three tensors: not measured"
    return ("q", "k", "v"), (q, k, v), (view, view, view)


@reader
def read(given: Arguments) -> CallRead:
    in_q = given.first("cu_seqlens_q", "cu_seqlens")
    in_k = given.first("cu_seqlens_k", "cu_seqlens")
    layout = "bthd" if in_q is None and in_k is None else "thd"
    view = VIEWS[layout]
    found = _tensors(given, view)
    if isinstance(found, str):
        return found
    names, (q, k, v), views = found
    packed = names[1] in ("kv", "qkv")
    if q.dim() != len(layout) + (1 if "qkv" in given and given.get("num_heads_q") is None else 0):
        return f"q of {q.dim()} dimensions: not measured"
    other = given.unusual((*_READ, *_OF_NO_CONSEQUENCE, "num_heads_q"))
    unread = f"{other} given" if other is not None else None
    if (in_q is None) != (in_k is None):
        unread = "cu_seqlens of q or k alone"
    with torch.no_grad():
        of_q, of_k = views[0](q), views[1](k)
    scale, wrong = scale_of(given.get("softmax_scale"), of_q.shape[-1])
    left, right = window_of(given.get("window_size"))
    mask = Mask(
        causal=bool(given.get("causal")), left=left, right=right,
        chunk=given.get("attention_chunk") or None, q_offsets=in_q, k_offsets=in_k,
    )  # fmt: skip
    slopes = given.get("alibi_slopes")
    if slopes is not None:
        mask = linear_bias(mask, slopes.detach(), of_q.shape[2], of_k.shape[2])

    return AttentionCall(
        q, k, v, *views, view, given.run(*names), scale, mask,
        softcap=float(given.get("softcap") or 0.0),
        sinks=given.first("learnable_sink", "s_aux"),
        dropout=float(given.get("dropout_p") or 0.0),
        packed=packed,
        kernel=functools.partial(str, given.function.__module__),
        unread=unread or wrong,
        output=first_of,
        with_output=with_first,
    )  # fmt: skip
