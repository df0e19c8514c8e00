"""Four sums that exact arithmetic makes equal in the backward pass of attention.

For a sequence and a key head, with P the probabilities and w_T = sum_j P_Tj of row T:

  A1  sum_j dk_j = 0                          biased delta, wrong dk, keys not written
  A2  sum_j dv_j = sum_T w_T dO_T             rows of P that do not add up to w, wrong dv
  A3  sum_T q_T . dq_T = sum_j k_j . dk_j     dq or dk wrong by a factor, heads exchanged
  A4  sum_T o_T . dO_T = sum_j v_j . dv_j     wrong o, wrong dv

T runs over the rows of all query heads of the key head.  Source: a shift of all keys changes no
probability (A1); P and O are linear in V (A2, A4); q and k meet in their product alone (A3).

They hold for every mask, additive bias and for grouped queries.  Not so:
  a softcap    ends A1: the slope of a score depends on the key.  Left out.
  a sink       sum_j dk_j is scale sum_T P_T,sink delta_T q_T, and w is 1 - P_sink: both are taken
               from the fp64 reference of all rows.
  dropout      ends A2: left out; here no call has it.
  a gradient that reaches q and k through the logsumexp adds to A1: here no call has one.
A row that sees no key has w = 0 where its output is 0, and w = 1 where it is not; where it is NaN
it is left out and counted.

A1 and A2 are vectors: 8 fixed projections with signs of 1 and -1 keep the sign, and add up over
ranks.  Each difference comes with the variance that independent roundings give it: of the stored
elements, and of those inside of the kernel (reference.py).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .call import GradedCall
from .reference import Inside, Reference, signs
from .rounding import GRIDS

LAWS = ("A1", "A2", "A3", "A4")
GRADIENTS = ("d_o", "dq", "dk", "dv")


@dataclasses.dataclass
class Law:
    """By sequence and key head, and for A1 and A2 by projection: [batch, kv_heads(, 8)]."""

    difference: Tensor  # NaN where a tensor holds one.
    variance: Tensor
    low: Tensor  # What the roundings inside add if they are alike: between low and high.
    high: Tensor

    def z(self) -> Tensor:
        """In units of what independent roundings give; exactly 0 is no difference."""
        return self.difference / self.variance.sqrt().clamp(min=torch.finfo(torch.float64).tiny)

    def beyond(self) -> Tensor:
        """z of what lies outside of low to high."""
        inside = self.difference.clamp(self.low.double(), self.high.double())
        rest = dataclasses.replace(self, difference=self.difference - inside)
        return rest.z()


@dataclasses.dataclass
class TensorSums:
    """[batch, heads or kv_heads] of a gradient's elements."""

    total: Tensor
    absolute: Tensor
    squares: Tensor
    nonfinite: Tensor


def tensor_sums(x: Tensor) -> TensorSums:
    x = x.double()
    return TensorSums(
        x.sum((2, 3)), x.abs().sum((2, 3)), x.square().sum((2, 3)),
        (~torch.isfinite(x)).sum((2, 3)),
    )  # fmt: skip


def row_weights(call: GradedCall) -> tuple[Tensor, int]:
    """[batch, kv_heads, group, q_len] w of each row without sinks, and how many are left out."""
    weights, left_out = [], 0
    keys = call.q.shape[0] * call.q.shape[1] * call.k.shape[2]
    every = torch.arange(call.q.shape[2], device=call.q.device)
    for rows in torch.split(every, max(1, (1 << 22) // max(1, keys))):
        blank, is_nan = call.blank(rows, call.bias(rows))
        left_out += int(is_nan.sum())
        weights.append((~blank & ~is_nan).double())
    return torch.cat(weights, -1), left_out


def _law(difference: Tensor, variance: Tensor, inside: Inside, share: float) -> Law:
    """share: of the rows, of which `inside` tells."""
    zero = torch.zeros_like(difference)
    low, high = zero, zero
    for channel in inside.channels if share == 1.0 else []:
        low, high = low + channel.clamp(max=0), high + channel.clamp(min=0)
    return Law(difference, variance + inside.variance / share, low, high)


@torch.no_grad()
def laws(call: GradedCall, known: Reference) -> dict[str, Law]:
    """known: of some rows or of all; the variance inside is taken from them.

    Of some rows it leaves out A1 and A2 of a call with sinks.
    """
    grid = GRIDS[call.q.dtype]
    q, o, d_o, dq = (call.grouped(t).double() for t in (call.q, call.o, call.d_o, call.dq))
    k, v, dk, dv = (t.double() for t in (call.k, call.v, call.dk, call.dv))
    share = known.rows.numel() / max(1, call.q.shape[2])
    roundings = known.roundings
    of_keys = roundings * (2 if call.group > 1 else 1)
    variance = {"dq": roundings * grid.variance(dq), "dk": of_keys * grid.variance(dk),
                "dv": of_keys * grid.variance(dv), "o": roundings * grid.variance(o)}  # fmt: skip
    found = {}
    bare = call.sinks is None or share == 1.0
    if bare and not call.softcap:
        sums = dk.sum(2) @ signs(dk.shape[-1], dk.device).mT
        sums = sums - known.key_gradient if share == 1.0 else sums
        out = variance["dk"].sum((2, 3))[..., None]
        found["A1"] = _law(sums, out, known.inside["A1"], share)
    if bare:
        weights = known.weight if share == 1.0 else row_weights(call)[0]
        seen = weights[..., None] != 0
        of_rows = (weights[..., None] * d_o.masked_fill(~seen, 0.0)).sum((2, 3))
        sums = (dv.sum(2) - of_rows) @ signs(dv.shape[-1], dv.device).mT
        out = variance["dv"].sum((2, 3))[..., None]
        found["A2"] = _law(sums, out, known.inside["A2"], share)
    found["A3"] = _law(
        (q * dq).sum((2, 3, 4)) - (k * dk).sum((2, 3)),
        (q.square() * variance["dq"]).sum((2, 3, 4)) + (k.square() * variance["dk"]).sum((2, 3)),
        known.inside["A3"], share,
    )  # fmt: skip
    # Rows of dq may all be multiples of one key.  What others add is rounded away in all alike.
    sizes = (q * dq).sum((3, 4)).abs().sum(2) + (k * dk).sum((2, 3)).abs()
    alike = (sizes * 2.0**-grid.bits).nan_to_num(0.0, 0.0)
    a3 = found["A3"]
    found["A3"] = dataclasses.replace(a3, low=a3.low - alike, high=a3.high + alike)
    found["A4"] = _law(
        (o * d_o).sum((2, 3, 4)) - (v * dv).sum((2, 3)),
        (d_o.square() * variance["o"]).sum((2, 3, 4)) + (v.square() * variance["dv"]).sum((2, 3)),
        known.inside["A4"], share,
    )  # fmt: skip
    return found
