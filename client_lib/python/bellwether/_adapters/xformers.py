"""xformers' memory_efficient_attention: [batch, tokens, heads, dim], [batch, tokens, dim] or
[batch, tokens, groups, heads, dim], and its classes of masks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

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
from .arguments import Arguments, are_tensors, reader, scale_of
from .imported import imported

NAME = "xformers"
TRIED = ("xformers 0.0.32 (its signature)",)

_MODULE, _FUNCTION = "xformers.ops.fmha", "memory_efficient_attention"
_READ = ("query", "key", "value", "attn_bias", "p", "scale", "op")

# Class -> (causal, from the top left, documents).  The windows are told by their objects.
_CLASSES = {
    "LowerTriangularMask": (True, True, False),
    "LowerTriangularMaskWithTensorBias": (True, True, False),
    "LowerTriangularFromBottomRightMask": (True, False, False),
    "LowerTriangularFromBottomRightLocalAttentionMask": (True, False, False),
    "LocalAttentionFromBottomRightMask": (False, False, False),
    "BlockDiagonalMask": (False, False, True),
    "BlockDiagonalCausalMask": (True, True, True),
    "BlockDiagonalCausalLocalAttentionMask": (True, True, True),
    "BlockDiagonalCausalFromBottomRightMask": (True, False, True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (True, False, True),
}


def functions() -> Iterator[tuple[Callable[..., Any], Reader]]:
    function = imported(_MODULE, _FUNCTION)
    if function is not None:
        yield function, read


def _one_head(x: Tensor) -> Tensor:
    return x.unsqueeze(1)


def _grouped(x: Tensor) -> Tensor:
    return x.flatten(2, 3).transpose(1, 2)


_VIEWS: dict[int, View] = {3: _one_head, 4: VIEWS["bthd"], 5: _grouped}
# Of a bias [batch, heads, rows, keys], as it lies beside such a q.
_BIAS: dict[int, View] = {3: _one_head, 4: VIEWS["bhtd"], 5: lambda x: x.flatten(1, 2)}


def _offsets(info: Any) -> Optional[Tensor]:
    found = getattr(info, "seqstart", None)
    return found if found is not None else getattr(info, "cu_seqlen", None)


def _mask(bias: Any, dims: int) -> Union[Mask, str]:
    if bias is None:
        return Mask()
    if isinstance(bias, Tensor):
        if not bias.is_floating_point() or bias.dim() != dims:
            return f"attn_bias of {bias.dim()} dimensions, {bias.dtype}"
        return Mask(tensor=_BIAS[dims](bias.detach()))
    name = type(bias).__name__
    if name not in _CLASSES:
        return f"{name} as attn_bias"
    causal, top_left, documents = _CLASSES[name]
    left: Optional[int] = getattr(bias, "window_left", None)
    right: Optional[int] = getattr(bias, "window_right", None)
    if "LocalAttention" in name and left is None:
        window = getattr(bias, "_window_size", None)
        if not isinstance(window, int):
            return f"{name} without a window that is known here"
        left = window - 1
    tensor = None
    if "TensorBias" in name:
        tensor = getattr(bias, "_bias", getattr(bias, "bias", None))
        if not isinstance(tensor, Tensor) or tensor.dim() != dims:
            return f"{name} without a tensor that is known here"
        tensor = _BIAS[dims](tensor.detach())
    in_q = in_k = None
    if documents:
        in_q, in_k = _offsets(bias.q_seqinfo), _offsets(bias.k_seqinfo)
        if in_q is None or in_k is None:
            return f"{name} without offsets that are known here"
    return Mask(causal=causal, top_left=top_left, left=left, right=right, tensor=tensor,
                q_offsets=in_q, k_offsets=in_k)  # fmt: skip


@reader
def read(given: Arguments) -> CallRead:
    q, k, v = (given.get(name) for name in ("query", "key", "value"))
    if not isinstance(q, Tensor) or not are_tensors(q.dim(), k, v):
        return None
    if q.dim() not in _VIEWS:
        return f"q of {q.dim()} dimensions: not measured"
    other = given.unusual(_READ)
    unread = f"{other} given" if other is not None else None
    mask = _mask(given.get("attn_bias"), q.dim())
    if isinstance(mask, str):
        unread, mask = mask, Mask()
    scale, wrong = scale_of(given.get("scale"), q.shape[-1])
    view = _VIEWS[q.dim()]

    return AttentionCall(
        q, k, v, view, view, view, view, given.run("query", "key", "value"), scale, mask,
        dropout=float(given.get("p") or 0.0),
        one_head=q.dim() == 3,
        kernel=functools.partial(str, NAME),
        unread=unread or wrong,
        output=first_of,
        with_output=with_first,
    )  # fmt: skip
