"""bellwether.attention, and what computes where no kernel does: attn_implementation="bellwether" of
transformers calls them, and modules may."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .._hook.calls.call import VIEWS, AttentionCall, CallRead, Mask, Ours, Reader, same
from .._hook.calls.kernel_choice import narrowed_dtype
from .arguments import Arguments, are_tensors, reader, scale_of
from .imported import imported

NAME = "bellwether"
TRIED = ("this version",)

_READ = ("q", "k", "v", "causal", "mode", "center", "window", "softcap", "scale", "enable_gqa",
         "cu_seqlens", "mask", "key_lengths", "sinks")  # fmt: skip
_BESIDES = tuple(name for name in _READ if name not in ("q", "k", "v", "mode"))


def functions() -> Iterator[tuple[Callable[..., Any], Reader]]:
    for function, its_reader in (
        (imported("bellwether._attention.dispatch", "attention"), read),
        (imported("bellwether._attention.composed", "composed"), read_composed),
    ):
        if function is not None:
            yield function, its_reader


@reader
def read(given: Arguments) -> CallRead:
    q, k, v = (given.get(name) for name in ("q", "k", "v"))
    window, offsets = given.get("window"), given.get("cu_seqlens")
    if not are_tensors(4, q, k, v) or window < 0:
        return None
    scale, unread = scale_of(given.get("scale"), q.shape[-1])
    other = given.unusual(_READ)
    in_q, in_k = (offsets, offsets) if isinstance(offsets, Tensor) else (offsets or (None, None))
    added, lengths, sinks = (given.get(name) for name in ("mask", "key_lengths", "sinks"))
    begins, ends = (None, lengths)
    if lengths is not None and lengths.dim() == 2:
        begins, ends = lengths.unbind(1)
    view = VIEWS["bhtd"]
    mask = Mask(
        causal=bool(given.get("causal")), left=window - 1 if window else None,
        begins=begins, ends=ends, q_offsets=in_q, k_offsets=in_k,
        tensor=None if added is None else added.detach(),
    )  # fmt: skip
    return AttentionCall(
        q, k, v, view, view, view, view, given.run("q", "k", "v"), scale, mask,
        softcap=float(given.get("softcap")),
        sinks=None if sinks is None else sinks.detach(),
        cast=narrowed_dtype(q, k, v),  # As dispatch.cast_as_autocast does.
        kernel=functools.partial(str, f"bellwether {given.get('mode')}"),
        unread=unread if other is None else f"{other} given",
        ours=Ours({name: given.get(name) for name in _BESIDES}, same, str(given.get("mode"))),
    )  # fmt: skip


@reader
def read_composed(given: Arguments) -> CallRead:
    q, k, v = (given.get(name) for name in ("q", "k", "v"))
    if not are_tensors(4, q, k, v):
        return None
    scale, wrong = scale_of(given.get("scale"), q.shape[-1])
    mask, sinks = given.get("mask"), given.get("sinks")
    view = VIEWS["bhtd"]
    return AttentionCall(
        q, k, v, view, view, view, view, given.run("q", "k", "v"), scale,
        Mask(tensor=None if mask is None else mask.detach()),
        softcap=float(given.get("softcap")),
        sinks=None if sinks is None else sinks.detach().reshape(-1),
        dropout=float(given.get("dropout")),
        narrowed=narrowed_dtype(q, k, v),
        kernel=functools.partial(str, "composed"),
        unread=wrong,
    )  # fmt: skip
