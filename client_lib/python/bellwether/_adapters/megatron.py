"""Megatron-Core's own core attention, DotProductAttention: q [tokens, batch, heads, dim], k and v
with one head for each group, the heads of the output side by side.

What it computes is told by its module: the scale, which a scaling by layers divides and multiplies
again, the softmax and the mask of its `scale_mask_softmax`, and its sinks.  A kernel of Megatron's
for masked softmax leaves out what the other way applies, so the same question is asked here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from .._hook.calls.call import VIEWS, AttentionCall, CallRead, Mask, Reader, View
from .._hook.patches.class_patches import own_forward
from .arguments import Arguments, are_tensors, reader, scale_of
from .imported import imported

NAME = "megatron-core"
TRIED = ("megatron-core 0.16.1",)

_MODULE = "megatron.core.transformer.dot_product_attention"
_CLASS = "DotProductAttention"


def functions() -> Iterator[tuple[Callable[..., Any], Reader]]:
    yield from forward_of(_MODULE, _CLASS, read)


def forward_of(
    place: str, name: str, its_reader: Reader
) -> Iterator[tuple[Callable[..., Any], Reader]]:
    """That of a class of modules, if it is imported."""
    cls = imported(place, name)
    forward = own_forward(cls) if isinstance(cls, type) else None
    if forward is not None:
        yield forward, its_reader


def side_by_side(heads: int, view: View) -> View:
    """Of an output whose heads lie side by side."""
    return lambda o: view(o.view(*o.shape[:-1], heads, -1))


def _mask(module: nn.Module, q: Tensor, k: Tensor, given: Optional[Tensor]) -> Union[Mask, str]:
    """What FusedScaleMaskSoftmax makes of the mask that it is given."""
    softmax: Any = module.scale_mask_softmax
    q_len, batch, heads = q.shape[:3]
    k_len = k.shape[0]
    kind = str(getattr(softmax.attn_mask_type, "name", softmax.attn_mask_type))
    fused = softmax.is_kernel_available(given, batch, heads, q_len, k_len)
    if fused and module.softmax_offset is None:
        if kind == "causal":
            return Mask(causal=True)
    elif softmax.window_size is not None:
        left, right = softmax.window_size
        return Mask(left=None if left < 0 else left, right=None if right < 0 else right)
    elif kind == "causal" and given is None and q_len > 1:
        return Mask(causal=True)
    if given is None:
        return Mask()
    if not isinstance(given, Tensor) or given.dtype != torch.bool or given.dim() > 4:
        return "attention_mask is no boolean tensor"
    return Mask(tensor=~given)  # Theirs is true where a key is hidden.


@reader
def read(given: Arguments) -> CallRead:
    module = given.get("self")
    q, k, v = (given.get(name) for name in ("query", "key", "value"))
    if not are_tensors(4, q, k, v):
        return "q, k and v are not three tensors of four dimensions: not measured"
    other = given.unusual(("self", "query", "key", "value", "attention_mask", "attn_mask_type"))
    unread = f"{other} given" if other is not None else None
    try:
        mask = _mask(module, q, k, given.get("attention_mask"))
        scale, wrong = scale_of(module.softmax_scale * (module.scale_mask_softmax.scale or 1), 1)
        sinks: Optional[Tensor] = module.softmax_offset
        dropout = module.attention_dropout.p if module.training else 0.0
    except AttributeError as e:
        return f"a DotProductAttention that is not known here ({e}): not measured"
    if isinstance(mask, str):
        unread, mask = mask, Mask()
    view = VIEWS["sbhd"]

    return AttentionCall(
        q, k, v, view, view, view, side_by_side(q.shape[2], view),
        given.run("query", "key", "value"), scale, mask,
        sinks=None if sinks is None else sinks.detach(),
        dropout=float(dropout),
        kernel=functools.partial(str, _CLASS),
        module=module,
        unread=unread or wrong,
    )  # fmt: skip
