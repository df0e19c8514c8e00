"""What calls of attention got and returned inside what torch.compile makes of a model, without
Bellwether.

Operators that the compiler does not look into copy the values as they pass, so they are those of
that graph, bit for bit.  How a call is to be read stays the same, so an eager run says it
(capture.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional
from unittest import mock

import torch
from torch import Tensor, nn

from capture import copied
from definitions import Call, rule


@dataclasses.dataclass
class _Values:
    """Of one call."""

    heads_last: bool = False  # Whether its output is [batch, tokens, heads, dim].
    qkv: Sequence[Tensor] = ()
    o: Optional[Tensor] = None
    d_o: Optional[Tensor] = None
    d_k: Optional[Tensor] = None
    added: Sequence[Tensor] = ()  # To the scores: they follow the weights.
    sinks: Optional[Tensor] = None


_found: list[_Values] = []


# ---- the operators; a ticket is the number of a call in the micro-batch that runs ----


def _operator(schema: str) -> Callable[[Callable[..., Tensor]], Any]:
    def made(function: Callable[..., Tensor]) -> Any:
        name, rest = schema.split("(", 1)
        return torch.library.custom_op(
            f"matrix::{name}", function, mutates_args=(), schema=f"({rest}"
        )

    return made


@_operator("ticket(Tensor k) -> Tensor")
def _ticket(k: Tensor) -> Tensor:
    _found.append(_Values())
    return torch.tensor([len(_found) - 1])


@_operator(
    "output(Tensor o, Tensor[] qkv, Tensor[] added, Tensor[] sinks, bool heads_last, Tensor ticket)"
    " -> Tensor"
)
def _output(
    o: Tensor, qkv: list[Tensor], added: list[Tensor], sinks: list[Tensor], heads_last: bool,
    ticket: Tensor,
) -> Tensor:  # fmt: skip
    values = _found[int(ticket)]
    values.heads_last, values.o = heads_last, copied(o)
    values.qkv, values.added = [copied(t) for t in qkv], [copied(t) for t in added]
    values.sinks = copied(sinks[0]) if sinks else None
    return o.clone()


@_operator("gradient(Tensor gradient, Tensor ticket, bool of_keys) -> Tensor")
def _gradient(gradient: Tensor, ticket: Tensor, of_keys: bool) -> Tensor:
    setattr(_found[int(ticket)], "d_k" if of_keys else "d_o", copied(gradient))
    return gradient.clone()


_ticket.register_fake(lambda k: torch.empty(1, dtype=torch.int64))
_output.register_fake(lambda o, *_: torch.empty_like(o))
_gradient.register_fake(lambda gradient, *_: torch.empty_like(gradient))


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, ticket: Tensor) -> Tensor:
        ctx.save_for_backward(ticket)
        return k.view_as(k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ops.matrix.gradient(gradient, *ctx.saved_tensors, True), None


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o: Tensor, heads_last: bool, ticket: Tensor, added: list[Tensor],
        sinks: list[Tensor], q: Tensor, k: Tensor, v: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(ticket)
        made: Tensor = torch.ops.matrix.output(o, [q, k, v], added, sinks, heads_last, ticket)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ops.matrix.gradient(gradient, *ctx.saved_tensors, False), *([None] * 7)


# ---- where they are put ----


class CallsInGraph:
    """All calls of a compiled model while `watching()`; traced with it."""

    def __init__(self) -> None:
        self.inside = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        from transformers.modeling_utils import AttentionInterface

        get = AttentionInterface.get_interface
        plain = nn.functional.scaled_dot_product_attention

        def get_interface(interface: Any, name: str, default: Any) -> Any:
            function = get(interface, name, default)
            return function if name == "sdpa" else self._seen(function)

        def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *args: Any, **more: Any) -> Any:
            mask = more.pop("attn_mask", mask)
            if self.inside or not torch.is_grad_enabled():
                return plain(q, k, v, mask, *args, **more)
            ticket = torch.ops.matrix.ticket(k)
            own = _Keys.apply(k, ticket)
            o = plain(q, own, v, mask, *args, **more)
            return _Output.apply(o, False, ticket, _added(mask), [], q, k, v)

        with (
            mock.patch.object(AttentionInterface, "get_interface", get_interface),
            mock.patch.object(nn.functional, plain.__name__, sdpa),
        ):
            yield

    def _seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def seen(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any
        ) -> Any:
            if not torch.is_grad_enabled():
                return function(module, q, k, v, mask, **given)
            ticket = torch.ops.matrix.ticket(k)
            own = _Keys.apply(k, ticket)
            self.inside = True
            result = function(module, q, own, v, mask, **given)
            self.inside = False
            sinks = given.get("s_aux")
            sinks = getattr(module, "sinks", None) if sinks is None else sinks
            added = [*_added(mask), *_added(given.get("position_bias"))]
            o = _Output.apply(
                result[0], True, ticket, added, [] if sinks is None else [sinks], q, k, v
            )
            return o, *result[1:]

        return seen

    @staticmethod
    def taken(like: Sequence[Call]) -> list[Call]:
        """Those whose gradients have arrived, and forgets them all; `like`: of an eager run."""
        found = [values for values in _found if values.d_o is not None]
        _found.clear()
        assert len(found) == len(like), f"{len(found)} calls in the graph, {len(like)} when eager"
        return [_call(values, eager) for values, eager in zip(found, like)]


def _added(mask: Any) -> list[Tensor]:
    return [mask] if isinstance(mask, Tensor) and mask.is_floating_point() else []


def _call(values: _Values, eager: Call) -> Call:
    """The eager call's reading, of these values."""

    def by_heads(x: Optional[Tensor]) -> Tensor:
        assert x is not None
        return x.transpose(1, 2) if values.heads_last else x

    q, k, v = (x.to(eager.q.dtype) for x in values.qkv)  # As autocast has it.
    assert (q.shape, k.shape, v.shape) == (eager.q.shape, eager.k.shape, eager.v.shape)
    bias = eager.bias
    if values.added:
        parts = [rule(x[..., : k.shape[2]])[1] for x in values.added]
        bias = torch.stack(torch.broadcast_tensors(*parts)).sum(0)  # type: ignore[no-untyped-call]
    return dataclasses.replace(
        eager, q=q, k=k, v=v, o=by_heads(values.o), d_o=by_heads(values.d_o), d_k=values.d_k,
        bias=bias, sinks=values.sinks if eager.sinks is not None else None,
    )  # fmt: skip
