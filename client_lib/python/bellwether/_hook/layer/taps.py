"""Identities around a call of attention, whose backward measures it.

    o = OutputTap(function(InputTap(q), InputTap(k), InputTap(v)))

The tensors are as the call has them.  q and v have their taps for the laws (law_calls.py).  All
measuring is done in the backward, where q, k, v, o and dO are at hand and exist once also under
activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from ..calls.call import AttentionCall
from ..calls.kernel_choice import unseen
from ..running import host_reads_back
from .kept import Kept, tensors_of

# By them a checkpoint ends a recomputation early, or the backward: raised where a tensor is saved.
CHECKPOINTS: tuple[type[Exception], ...] = tuple(
    error
    for error in vars(torch.utils.checkpoint).values()
    if isinstance(error, type)
    and issubclass(error, Exception)
    and error.__module__ == "torch.utils.checkpoint"
)


def _versions(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([t._version for t in tensors], dtype=torch.int64, device="cpu")


def _as_saved(tensors: Sequence[Tensor], versions: Tensor) -> bool:
    """Whether none was changed in place.  A checkpoint hands out what its recomputation has made,
    and does not look."""
    return all(t._version <= then for t, then in zip(tensors, versions.tolist()))


class OutputTap(torch.autograd.Function):
    """Identity on the attention output; its backward measures q, k, v, o and dO."""

    @staticmethod
    def forward(ctx: Any, kept: Kept, *saved: Tensor) -> Tensor:
        """saved  o, q, k, v and what `kept` names"""
        # As it was in the first forward, so it is in a recomputation, whatever failed in between.
        ctx.versioned = host_reads_back()
        versions = (_versions(saved),) if ctx.versioned else ()
        ctx.save_for_backward(*saved, *versions)  # The storages that the attention itself saves.
        ctx.kept = kept
        o = saved[0]
        # Not a view to autograd: code that changes the output in place goes on working.
        return o.detach()

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> Any:
        kept: Kept = ctx.kept
        if kept.listener.output_wanted(kept):
            # Reading may run the host's forward again: its errors are its own, and not ours to
            # take, since it has counted what it recomputed until then.
            saved = ctx.saved_tensors if kept.host_reads else kept.listener.read(ctx)
            if saved is not None and ctx.versioned and not _as_saved(saved[:-1], saved[-1]):
                kept.listener.changed()
            elif saved is not None:
                kept.listener.output_gradient(kept, saved, d_o)
        return None, d_o, *([None] * (3 + len(kept.names)))


class InputTap(torch.autograd.Function):
    """Identity on q, k or v; its backward sees the gradient as the attention kernel returned it.
    It may come before the call is known, and measures nothing where none follows: `calls` is empty
    then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: list[Kept], of: str) -> Tensor:
        """of  which of "q", "k" and "v" the tensor is: a packed one is several"""
        ctx.calls, ctx.of = calls, of
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Optional[Tensor]) -> Any:
        for kept in ctx.calls if gradient is not None else ():
            kept.listener.input_gradient(kept, gradient, ctx.of, len(ctx.calls) == 1)
        return gradient, None, None


def apply_tap(tap: Any, *inputs: Any) -> Any:
    with unseen():
        return tap.apply(*inputs)


def output_tap(call: AttentionCall, kept: Kept, output: Tensor) -> Tensor:
    saved = output, call.q, call.k, call.v, *tensors_of(call).values()
    return cast(Tensor, apply_tap(OutputTap, kept, *saved))


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether their gradients are added to each other where they come from.  With a tap on one of
    them they would be added in another order, and be rounded differently."""
    return a is b or (
        a.grad_fn is not None and a.grad_fn is b.grad_fn and a.output_nr == b.output_nr
    )
