"""Faults in PyTorch's flash attention for CPUs, planted below its dispatcher.

Its backward is one operator.  While a Planted is entered that operator runs as ever, and then what
it returned is damaged, as a wrong kernel would have returned it.  Autograd, hooks and taps see
nothing of that: the name of the kernel, its forward and its rounding are PyTorch's own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

OPERATOR = "_scaled_dot_product_flash_attention_for_cpu_backward"


@dataclasses.dataclass
class Returned:
    """Of one call, [batch, heads, tokens, dim]; without grouped heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    d_o: Tensor
    logsumexp: Tensor
    causal: bool
    scale: float
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def of_head(self, head: int) -> tuple[Tensor, Tensor]:
        """P and dS of a head, [batch, tokens, tokens], rounded as they enter the products."""
        q, k, v, o, d_o = (t[:, head].float() for t in (self.q, self.k, self.v, self.o, self.d_o))
        s = self.scale * (q @ k.mT)
        if self.causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        p = (s - self.logsumexp[:, head, :, None]).exp()
        d_s = p * (d_o @ v.mT - (d_o * o).sum(-1, keepdim=True))
        return p.to(self.q.dtype).float(), d_s.to(self.q.dtype).float()

    def change(self, name: str, head: int, by: Tensor) -> None:
        """Adds to a tensor of one head before it is rounded once more."""
        of = getattr(self, name)[:, head]
        of.copy_(of.float() + by)


@dataclasses.dataclass(frozen=True)
class Fault:
    """
    wrong      the tensors that are
    plant      damages what came out of the layer's call: (returned, head, strength)
    strengths  from the strongest on; the stated one is named `stated`
    """

    wrong: frozenset[str]
    plant: Callable[[Returned, int, float], None]
    stated: float
    strengths: tuple[float, ...]
    logsumexp: bool = False  # The strength is a factor of P, by the logsumexp that is given.
    of_all_heads: bool = False  # Of the layer, and not of one.


def _sequence_times(r: Returned, head: int, by: float) -> None:
    r.dq[-1] = (r.dq[-1].float() * by).to(r.dq.dtype)


def _negated(r: Returned, head: int, share: float) -> None:
    rows = max(1, round(share * r.dq.shape[2]))
    r.dq[:, head, -rows:] *= -1


def _exchanged(r: Returned, head: int, share: float) -> None:
    other, keys = (head + 1) % r.dk.shape[1], max(1, round(share * r.dk.shape[2]))
    r.dk[:, [head, other], :keys] = r.dk[:, [other, head], :keys]


def _tail(r: Returned, head: int, keys: float) -> None:
    r.dk[:, head, -int(keys) :] = 0


def _tile(r: Returned, head: int, keys: float) -> None:
    _, d_s = r.of_head(head)
    first = r.k.shape[2] // 4
    tile = slice(first, first + int(keys))
    r.change("dq", head, -r.scale * (d_s[..., tile] @ r.k[:, head, tile].float()))


def _times(*names: str) -> Callable[[Returned, int, float], None]:
    def times(r: Returned, head: int, by: float) -> None:
        for name in names:
            of = getattr(r, name)[:, head]
            of.copy_(of.float() * by)

    return times


def _scale_of_rows(r: Returned, head: int, by: float) -> None:
    """A block of 64 queries of dO in the product dv = P^T dO."""
    p, _ = r.of_head(head)
    rows = slice(64, 128)
    r.change("dv", head, (by - 1) * (p[:, rows].mT @ r.d_o[:, head, rows].float()))


def _nan(r: Returned, head: int, _: float) -> None:
    r.dq[0, head, 5, 1] = math.nan


def _nothing(r: Returned, head: int, _: float) -> None:
    pass


def _of(*names: str) -> frozenset[str]:
    return frozenset(names)


FAULTS: dict[str, Fault] = {
    "dq of a sequence, times": Fault(
        _of("dQ"), _sequence_times, 5, (5, 2, 1.5, 1.2, 1.1), of_all_heads=True
    ),
    "dq of a head negated, share of rows": Fault(_of("dQ"), _negated, 1, (1, 0.25, 0.05)),
    "dk of two heads exchanged, share of keys": Fault(_of("dK"), _exchanged, 1, (1, 0.25, 0.05)),
    "keys at the tail without dk": Fault(_of("dK"), _tail, 37, (37, 8, 2)),
    "a tile of keys left out of dq, keys": Fault(_of("dQ"), _tile, 64, (64, 32, 16)),
    "dv of a head, times": Fault(_of("dV"), _times("dv"), 1.01, (1.05, 1.02, 1.01, 1.005)),
    "dq of a head, times": Fault(_of("dQ"), _times("dq"), 1.02, (1.1, 1.05, 1.02, 1.01)),
    "P of a head in the backward, times": Fault(
        _of("dV", "P", "dQ", "dK"), _nothing, 1.02, (1.05, 1.02, 1.01, 1.005), logsumexp=True
    ),
    "NaN in dq of a head": Fault(_of("dQ"), _nan, 1, (1,)),
    "scale of dS of a head, times": Fault(_of("dQ", "dK"), _times("dq", "dk"), 2, (2,)),
    "scale of k of a head in dq, times": Fault(_of("dQ"), _times("dq"), 2, (2, 0.5)),
    "scale of 64 rows of dO in dv, times": Fault(_of("dV"), _scale_of_rows, 2, (2, 0.5)),
}


class Planted:
    """Enter it around backward passes.  `begin()` before each: calls are told apart by their
    order, the last layer's first."""

    def __init__(self, layers: int) -> None:
        self._layers, self._called = layers, 0
        self._fault: Optional[Fault] = None
        self._layer, self._head, self._strength = 0, 0, 0.0
        self._library: Any = None

    def plant(self, fault: Optional[Fault], layer: int, head: int, strength: float) -> None:
        self._fault, self._layer, self._head, self._strength = fault, layer, head, strength

    def begin(self) -> None:
        self._called = 0

    def __enter__(self) -> Planted:
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl(OPERATOR, self._backward, "AutogradCPU")
        return self

    def __exit__(self, *_: Any) -> None:
        self._library._destroy()

    def _backward(
        self, d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, logsumexp: Tensor,
        dropout: float, causal: bool, **given: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self._called += 1
        fault = self._fault if self._layers - self._called == self._layer else None
        of_kernel = logsumexp
        if fault is not None and fault.logsumexp:
            of_kernel = logsumexp.clone()
            of_kernel[:, self._head] -= math.log(self._strength)
        operator = getattr(torch.ops.aten, OPERATOR).default
        with torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
            dq, dk, dv = operator(d_o, q, k, v, o, of_kernel, dropout, causal, **given)
            if fault is not None:
                scale = given.get("scale") or q.shape[-1] ** -0.5
                of = Returned(q, k, v, o, d_o, logsumexp, causal, scale, dq, dk, dv)
                fault.plant(of, self._head, self._strength)
        return dq, dk, dv
