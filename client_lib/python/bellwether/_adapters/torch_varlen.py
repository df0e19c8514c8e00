"""PyTorch's varlen_attn: documents that are laid end to end, [tokens, heads, dim]."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from .._hook.calls.call import VIEWS, AttentionCall, CallRead, Mask, Reader, first_of, with_first
from .arguments import Arguments, are_tensors, reader, scale_of
from .flash_attention import window_of
from .imported import compiled, imported

NAME = "torch.nn.attention.varlen"
TRIED = ("torch 2.11.0", "torch 2.13.0 (its signature)")

_READ = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal",
         "return_aux", "scale", "window_size", "enable_gqa", "num_splits")  # fmt: skip


def functions() -> Iterator[tuple[Callable[..., Any], Reader]]:
    function = imported(NAME, "varlen_attn")
    if function is not None:
        yield function, read
    for around in compiled(function):
        yield around, read


@reader
def read(given: Arguments) -> CallRead:
    q, k, v = (given.get(name) for name in ("query", "key", "value"))
    in_q, in_k = given.get("cu_seq_q"), given.get("cu_seq_k")
    if not are_tensors(3, q, k, v):
        return "pages of keys: not measured"
    other = given.unusual(_READ)
    unread = f"{other} given" if other is not None else None
    if in_q is None or in_k is None:
        unread = "cu_seq of q or k alone"
    scale, wrong = scale_of(given.get("scale"), q.shape[-1])
    left, right = window_of(given.get("window_size"))
    view = VIEWS["thd"]

    return AttentionCall(
        q, k, v, view, view, view, view, given.run("query", "key", "value"), scale,
        Mask(
            causal=bool(given.get("is_causal")), left=left, right=right,
            q_offsets=in_q, k_offsets=in_k,
        ),
        kernel=functools.partial(str, "varlen_attn"),
        unread=unread or wrong,
        output=first_of,
        with_output=with_first,
    )  # fmt: skip
