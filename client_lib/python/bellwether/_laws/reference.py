"""Attention and its gradients in fp64, on some rows or on all, with what rounding may add.

Plain torch operations, on the device of the call's tensors, in pieces of at most SCORES scores.

A kernel in bf16 or fp16 rounds in few places: the probabilities P and the gradients dS of the
scores before they enter a matrix product, and its results o, dq, dk, dv.  From the exact values
follows what each of them adds:

  variance   of independent roundings to the nearest, ulp^2 / 12 each.  Kernels differ in whether
             they round P once or twice, and results at random: each counts twice.  Some round dS
             times the scale, which makes a difference where that underflows.
  channels   what the sums hold when all of them are rounded as such a kernel does: in broad rows
             all P are alike, so their roundings are, too.  One more is delta = dO . o of the
             rounded o.  A kernel may do so or not, hence each channel counts from 0 to 1 times.
             The last is an exponential that is approximated, and a little off for all P.

That is FUSED.  More kinds of arithmetic are known to be in use:

  COMPOSED     attention that is written out of matrix products: scores and dP are rounded, too,
               and scores once more by each operation behind the product
  EITHER_SIDE  the same, and where a score or dP lies in the middle of two numbers its sum in fp32
               may fall on the other side than the exact one: in a row that sees few keys that is
               more than all else.  The kernels library does not know this one
  ACCUMULATED  dk and dv are kept in the type, and rounded each time some rows are added to them
"""

from __future__ import annotations

import dataclasses
import math
from typing import Optional

import torch
from torch import Tensor

from .._kernels.probe import mixed
from .call import GradedCall
from .rounding import GRIDS, Grid

FUSED, COMPOSED, ACCUMULATED = "fused", "composed", "accumulated"
EITHER_SIDE = "composed, either side"
WRITTEN_OUT = (COMPOSED, EITHER_SIDE)
PROJECTIONS = 8
SCORES = 1 << 21
KEPT_MAX = 4  # References that are kept for the same inputs: kinds of arithmetic, rows left out.
_FP32 = 2.0**-24  # Half of what a sum in fp32 may lose, of its size.
EXP = 2.0**-13  # An exponential that is approximated may be so far off, for all P alike.
_SUM = 8  # Such halves that a dot product may lose, of the sum of its absolute values.
_TIMES = 2  # That each rounding counts.
_SCORE_ROUNDINGS = 4  # Of scores in fp32, per channel of q and k.
_SCORE_VARIANCE_MAX = 14.0  # How large their variance is taken to be at most.


def accumulated_rows(q_len: int) -> int:
    """How many rows PyTorch's flash attention for CPUs adds at a time."""
    return 256 if q_len >= 768 else 64 if q_len >= 192 else 32


def signs(dim: int, device: torch.device) -> Tensor:
    """The fixed projections of a vector: [PROJECTIONS, dim] of 1 and -1, in fp64."""
    at = torch.arange(PROJECTIONS * dim, dtype=torch.int64).view(PROJECTIONS, dim)
    return ((mixed(at) & 1) * 2 - 1).double().to(device)


@dataclasses.dataclass
class Expected:
    """Of one tensor: what it is in exact arithmetic, and what rounding may add."""

    exact: Tensor
    variance: Tensor
    channels: list[Tensor]

    def reaches(self, largest: float) -> bool:
        return bool((self.exact.abs().amax() if self.exact.numel() else 0) >= largest)


@dataclasses.dataclass
class Inside:
    """Of one law: what the roundings inside of the kernel add to it, [batch, kv_heads, ...]."""

    variance: Tensor
    channels: list[Tensor]


@dataclasses.dataclass
class Reference:
    """o and dq [batch, kv_heads, group, rows, dim] are of `rows`; dk and dv [batch, kv_heads,
    k_len, dim] are there if those are all."""

    rows: Tensor
    o: Expected
    dq: Expected
    dk: Optional[Expected]
    dv: Optional[Expected]
    weight: Tensor  # [batch, kv_heads, group, rows] sum of a row's P.
    key_gradient: Tensor  # [batch, kv_heads, PROJECTIONS] what sum_j dk_j is: 0 but for sinks.
    inside: dict[str, Inside]  # By law; projections of A1 and A2.
    roundings: int  # How often the last rounding of a result counts.
    left_out: int  # Rows that see nothing and came out as NaN.
    largest: float  # dS, without its sign.


def _rows_at_once(call: GradedCall) -> int:
    batch, heads = call.q.shape[:2]
    return max(1, SCORES // max(1, batch * heads * call.k.shape[2]))


@dataclasses.dataclass
class _Block:
    """Some rows: [batch, kv_heads, group, rows, keys or dim]."""

    q: Tensor
    d_o: Tensor
    p: Tensor
    p_error: Tensor  # What rounding P adds.
    d_s: Tensor  # With delta in high precision.
    d_s_error: Tensor
    slope: Optional[Tensor]  # Of the softcap.
    delta: Tensor  # [..., rows, 1] In exact arithmetic, ...
    delta_variance: Tensor  # ... and what rounding P adds to it, once.
    p_variance: Tensor
    of_row: Tensor  # [..., rows, 1] The part of it that all P may have alike, over P^2.
    d_s_variance: Tensor
    d_p: Tensor

    def sloped(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dS, P, the error and the variance of dS, for the scores before a softcap."""
        if self.slope is None:
            return self.d_s, self.p, self.d_s_error, self.d_s_variance
        square = self.slope.square()
        return (self.d_s * self.slope, self.p * self.slope, self.d_s_error * self.slope,
                self.d_s_variance * square)  # fmt: skip


@dataclasses.dataclass
class _Rows:
    """Rows that see no key, by what came out of the kernel: [batch, kv_heads, group, rows, 1]."""

    unseen: Tensor
    blank: Tensor  # 0
    left_out: Tensor  # NaN

    def of(self, some: slice) -> _Rows:
        return _Rows(*(t[:, :, :, some] for t in (self.unseen, self.blank, self.left_out)))

    def same(self, other: _Rows) -> bool:
        return torch.equal(self.blank, other.blank) and torch.equal(self.left_out, other.left_out)


def _outcome(call: GradedCall, rows: Tensor, unseen: Tensor) -> _Rows:
    blank, left_out = (t.unsqueeze(-1) for t in call.outcome(rows, unseen.squeeze(-1)))
    return _Rows(unseen, blank, left_out)


def _unseen(call: GradedCall, rows: Tensor) -> Tensor:
    """Rows that see no key, [batch, kv_heads, group, rows, 1]."""
    parts = [call.unseen(some, call.bias(some)) for some in torch.split(rows, _rows_at_once(call))]
    return torch.cat(parts, -1).unsqueeze(-1)


def _probabilities(
    call: GradedCall, rows: Tensor, q: Tensor, k: Tensor, which: _Rows, rounds: Optional[Grid]
) -> tuple[Tensor, Optional[Tensor], Tensor]:
    """P of some rows, the slope of the softcap, and each row's largest score.  rounds: scores are
    rounded to it."""
    products = q @ k.mT
    s = call.scale * (rounds.rounded(products) if rounds is not None else products)
    slope = None
    if call.softcap:
        tanh = torch.tanh(s / call.softcap)
        s, slope = call.softcap * tanh, 1 - tanh.square()
    s = (s + call.bias(rows)).masked_fill_(which.blank | which.left_out, -torch.inf)
    top = s.amax(-1, keepdim=True)
    if call.sinks is not None:
        sink = call.grouped(call.sinks.double()[None, :, None, None])
        top = torch.maximum(top, sink)
    unseen = top == -torch.inf
    top = top.masked_fill(unseen, 0.0)
    p = s.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    if call.sinks is not None:
        total = total + torch.exp(sink - top)
    p = p.div_(total.masked_fill(unseen, 1.0))
    mean = unseen & ~which.blank & ~which.left_out
    return p.masked_fill_(mean, 1.0 / p.shape[-1]), slope, top


def _score_roundings(call: GradedCall) -> int:
    """How often scores are rounded once more, behind the product, where they are at all."""
    scaled = math.frexp(call.scale)[0] != 0.5  # By a power of two nothing is rounded.
    return int(scaled) + (3 if call.softcap else 0)  # Over the cap, tanh, times the cap.


def _flips(products: Tensor, sizes: Tensor, grid: Grid) -> Tensor:
    """Squares of how far products may fall on the other side when they are rounded to the type.

    That is a whole distance where they lie in the middle of two numbers, but for what a sum in
    fp32 may lose, and else 0.  sizes: sums of the absolute values"""
    ulp = grid.ulp(products)
    from_middle = (torch.frac(products.abs() / ulp) - 0.5).abs() * ulp
    return torch.where(from_middle <= _SUM * _FP32 * sizes, ulp.square(), 0.0)


def _in_fp32(score: Tensor, head_dim: int) -> Tensor:
    """What roundings of scores in fp32 give each P, as a variance over P^2."""
    ulp = torch.exp2(torch.floor(torch.log2(score)) - 23)
    variance = (_SCORE_ROUNDINGS * head_dim * Grid.variance_of(ulp)).clamp(max=_SCORE_VARIANCE_MAX)
    return torch.expm1(variance) * torch.exp(variance)


def _block(
    call: GradedCall, rows: Tensor, k: Tensor, v: Tensor, which: _Rows, grid: Grid, arithmetic: str
) -> _Block:
    composed, either = arithmetic in WRITTEN_OUT, arithmetic == EITHER_SIDE
    q, d_o = (call.grouped(t[:, :, rows]).double() for t in (call.q, call.d_o))
    p, slope, top = _probabilities(call, rows, q, k, which, grid if composed else None)
    d_o = d_o.masked_fill(which.left_out, 0.0)
    d_p = exact_d_p = d_o @ v.mT
    if composed:
        d_p = grid.rounded(d_p)
    delta = (p * d_p).sum(-1, keepdim=True)
    centred = d_p - delta
    d_s = p * centred
    p_error, p_variance = grid.added(p)
    # P moves with its score; those that count are near the largest.
    top = top.masked_fill(which.unseen, 0.0).abs() + 1
    of_row = _in_fp32(top, q.shape[-1])
    of_score = of_row + _score_roundings(call) * grid.variance(top) if composed else of_row
    p_variance = p_variance + of_score * p.square()
    if either:
        flips, square = call.scale**2 * _flips(q @ k.mT, q.abs() @ k.abs().mT, grid), p.square()
        # P of the other keys of the row moves, too.
        p_variance = p_variance + square * (flips + (square * flips).sum(-1, keepdim=True))
    d_s_error, own = grid.added(d_s, call.scale)
    if either:
        own = own.add_(p.square() * _flips(exact_d_p, d_o.abs() @ v.abs().mT, grid))
    own = own.add_(centred.square_().mul_(p_variance))
    square = d_p.square()
    # Of delta: from P rounded in the forward pass.
    delta_variance = (square * p_variance).sum(-1, keepdim=True)
    own = own.add_(square.add_(delta.square()).mul_((_FP32 * p).square_()))
    return _Block(
        q, d_o, p, p_error, d_s, d_s_error, slope, delta, delta_variance, _TIMES * p_variance,
        _TIMES * of_row, _TIMES * own, d_p,
    )  # fmt: skip


def _accumulated(parts: list[Tensor], grid: Grid) -> tuple[Tensor, Tensor]:
    """What becomes of parts [batch, kv_heads, group, k_len, dim] that are rounded at each addition,
    head by head of the group; and the variance of all roundings."""
    total = torch.zeros_like(parts[0][:, :, 0])
    variance = torch.zeros_like(total)
    for head in range(parts[0].shape[2]):
        for part in parts:
            total = grid.rounded(total + part[:, :, head])
            variance = variance + grid.variance(total)
    return total, variance


class _Totals:
    """Sums over blocks of rows, and what stays apart for each row.

    Names: "x" is exact, "x+" and "x++" are channels, "x^2" is a variance.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.parts: dict[str, list[Tensor]] = {}  # Of dk and dv: one for each block.
        self._rows: dict[str, list[Tensor]] = {}

    def add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def row(self, name: str, value: Tensor) -> None:
        self._rows.setdefault(name, []).append(value)

    def part(self, name: str, value: Tensor) -> None:
        self.parts.setdefault(name, []).append(value)

    def whole(self) -> dict[str, Tensor]:
        return {name: torch.cat(rows, 3) for name, rows in self._rows.items()} | self.sums


def _add_rows(to: _Totals, call: GradedCall, b: _Block, k: Tensor, v: Tensor) -> None:
    """o and dq."""
    d_s, p, error, variance = b.sloped()
    to.row("weight", b.p.sum(-1))
    to.row("delta", b.delta)
    to.row("delta^2", b.delta_variance)
    to.row("pk", p @ k)
    to.row("o", b.p @ v)
    to.row("o+", b.p_error @ v)
    to.row("o^2", b.p_variance @ v.square())
    to.row("dq++", call.scale * (error @ k))
    dq = call.scale * (d_s @ k)
    to.row("dq", dq)
    to.row("dq^2", call.scale**2 * (variance @ k.square()) + b.of_row * dq.square())


def _add_laws(to: _Totals, call: GradedCall, b: _Block, of_q: Tensor, of_v: Tensor) -> None:
    """What the roundings inside add to A1, A2 and A4; A1 itself is not 0 with sinks."""
    q8, o8 = call.scale * (b.q @ of_q.mT), b.d_o @ of_v.mT
    variance = b.d_s_variance.sum(-1, keepdim=True)
    to.add("A1", (q8 * b.d_s.sum(-1, keepdim=True)).sum((2, 3)))
    to.add("A1++", (q8 * b.d_s_error.sum(-1, keepdim=True)).sum((2, 3)))
    to.add("A1^2", (q8.square() * variance).sum((2, 3)))
    to.add("A2+", (o8 * b.p_error.sum(-1, keepdim=True)).sum((2, 3)))
    alike = b.of_row * b.p.sum(-1, keepdim=True).square()
    to.add("A2^2", (o8.square() * (b.p_variance.sum(-1, keepdim=True) + alike)).sum((2, 3)))
    to.add("A4+", (b.d_p * b.p_error).sum((2, 3, 4)))
    of_row = (b.of_row * b.delta.square()).sum((2, 3, 4))
    to.add("A4^2", 2 * (of_row + (b.d_p.square() * b.p_variance).sum((2, 3, 4))))


def _add_keys(to: _Totals, call: GradedCall, b: _Block, parts: bool) -> None:
    """dk and dv; with `parts` also what this block adds to them once it is rounded."""
    d_s, _, error, variance = b.sloped()
    q = call.scale * b.q
    to.add("dk", (d_s.mT @ q).sum(2))
    to.add("dk++", (error.mT @ q).sum(2))
    to.add("dk^2", (variance.mT @ q.square()).sum(2))
    to.add("dv", (b.p.mT @ b.d_o).sum(2))
    to.add("dv+", (b.p_error.mT @ b.d_o).sum(2))
    to.add("dv^2", (b.p_variance.mT @ b.d_o.square()).sum(2))
    if parts:
        to.part("dk", (d_s + error).mT @ q)
        to.part("dv", (b.p + b.p_error).mT @ b.d_o)


def _expected(name: str, whole: dict[str, Tensor], grid: Grid, times: int) -> Expected:
    exact = whole[name]
    channels = [whole[name + more] for more in ("+", "++", "+++") if name + more in whole]
    within = sum(channels, torch.zeros_like(exact))
    # The result's own rounding: of what is exact, and of what those inside leave.
    channels.append(grid.rounded(exact) - exact)
    channels.append(grid.rounded(exact + within) - exact - within)
    return Expected(exact, whole[name + "^2"] + times * grid.variance(exact), channels)


def _add_results(inside: dict[str, Inside], call: GradedCall, of: dict[str, Expected]) -> None:
    """What the roundings of the results add to each law; and an exponential that is off."""
    q, d_o = call.grouped(call.q).double(), call.grouped(call.d_o).double()
    k, v = call.k.double(), call.v.double()
    of_q, of_v = signs(k.shape[-1], k.device), signs(v.shape[-1], v.device)
    inside["A4"].channels += [(c * d_o).sum((2, 3, 4)) for c in of["o"].channels[1:]]
    inside["A3"].channels += [(c * q).sum((2, 3, 4)) for c in of["dq"].channels[2:]]
    inside["A1"].channels += [c.sum(2) @ of_q.mT for c in of["dk"].channels[2:]]
    inside["A3"].channels += [-(c * k).sum((2, 3)) for c in of["dk"].channels[2:]]
    inside["A2"].channels += [c.sum(2) @ of_v.mT for c in of["dv"].channels[1:]]
    inside["A4"].channels += [-(c * v).sum((2, 3)) for c in of["dv"].channels[1:]]
    for sign in (EXP, -EXP):
        inside["A2"].channels.append(sign * (of["dv"].exact.sum(2) @ of_v.mT))
        inside["A4"].channels.append(sign * (of["dv"].exact * v).sum((2, 3)))


@dataclasses.dataclass
class _Exact:
    """What does not depend on a kernel's output, but for `which`: most of a reference."""

    call: GradedCall  # It keeps the inputs alive.
    arithmetic: str
    rows: Tensor
    every: bool
    which: _Rows
    whole: dict[str, Tensor]
    parts: dict[str, list[Tensor]]
    largest: float

    def same_inputs(self, call: GradedCall, arithmetic: str) -> bool:
        """Whether it is of the same tensors, not of equal ones."""
        own = self.call
        return (
            self.arithmetic == arithmetic
            and all(
                a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
                for a, b in ((own.q, call.q), (own.k, call.k), (own.v, call.v), (own.d_o, call.d_o))
            )
            and (own.scale, own.softcap) == (call.scale, call.softcap)
            and own.sinks is call.sinks
            and all(
                a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
                for a, b in zip(vars(own.mask).values(), vars(call.mask).values())
            )
        )


def _exact(call: GradedCall, rows: Optional[Tensor], arithmetic: str, unseen: Tensor) -> _Exact:
    grid, every = GRIDS[call.q.dtype], rows is None
    rows = torch.arange(call.q.shape[2], device=call.q.device) if rows is None else rows
    which = _outcome(call, rows, unseen)
    k, v = (t.double().unsqueeze(2) for t in (call.k, call.v))
    of_q, of_v = signs(k.shape[-1], k.device), signs(v.shape[-1], v.device)
    accumulated = every and arithmetic == ACCUMULATED
    step = accumulated_rows(call.q.shape[2]) if accumulated else _rows_at_once(call)
    totals = _Totals()
    largest = torch.zeros((), dtype=torch.float64, device=k.device)
    for begin in range(0, rows.numel(), step):
        some = slice(begin, begin + step)
        b = _block(call, rows[some], k, v, which.of(some), grid, arithmetic)
        largest = torch.maximum(largest, b.d_s.abs().max())
        _add_rows(totals, call, b, k, v)
        _add_laws(totals, call, b, of_q, of_v)
        if every:
            _add_keys(totals, call, b, accumulated)
    return _Exact(
        call, arithmetic, rows, every, which, totals.whole(), totals.parts, float(largest)
    )


def _with_output(call: GradedCall, exact: _Exact, grid: Grid) -> dict[str, Tensor]:
    """What the kernel's delta = dO . o adds, that is of the rounded o."""
    whole, which, rows = dict(exact.whole), exact.which, exact.rows
    q, o, d_o = (call.grouped(t[:, :, rows]).double() for t in (call.q, call.o, call.d_o))
    o, d_o = (t.masked_fill(which.left_out, 0.0) for t in (o, d_o))
    products = d_o * o
    error = products.sum(-1, keepdim=True) - whole["delta"]
    # Of its sum in fp32; and a residual of o that is kept in the type leaves this much.
    variance = whole["delta^2"] + (_FP32 * products.abs().sum(-1, keepdim=True)).square()
    residual = (2.0**-grid.bits * d_o).square() * grid.variance(o)
    variance = _TIMES * (variance + residual.sum(-1, keepdim=True))
    pk, weight = whole["pk"], whole["weight"].unsqueeze(-1)
    whole["dq+"] = -call.scale * error * pk
    whole["dq^2"] = whole["dq^2"] + call.scale**2 * variance * pk.square()
    q8 = call.scale * (q @ signs(q.shape[-1], q.device).mT)
    whole["A1+"] = (q8 * -error * weight).sum((2, 3))
    whole["A1^2"] = whole["A1^2"] + (q8.square() * variance).sum((2, 3))
    if not exact.every:
        return whole
    k, step = call.k.double().unsqueeze(2), _rows_at_once(call)
    rounds = grid if exact.arithmetic in WRITTEN_OUT else None
    moved, spread = -call.scale * error * q, call.scale**2 * variance * q.square()
    whole["dk+"] = torch.zeros_like(whole["dk"])
    whole["dk^2"] = whole["dk^2"].clone()
    for begin in range(0, rows.numel(), step):
        some = slice(begin, begin + step)
        of = q[:, :, :, some]
        p, slope, _ = _probabilities(call, rows[some], of, k, which.of(some), rounds)
        p = p if slope is None else p * slope
        whole["dk+"] += (p.mT @ moved[:, :, :, some]).sum(2)
        whole["dk^2"] += (p.square_().mT @ spread[:, :, :, some]).sum(2)
    return whole


def _reference(call: GradedCall, exact: _Exact) -> Reference:
    grid, arithmetic, every = GRIDS[call.q.dtype], exact.arithmetic, exact.every
    composed, accumulated = arithmetic in WRITTEN_OUT, every and arithmetic == ACCUMULATED
    whole = _with_output(call, exact, grid)
    inside = {
        "A1": Inside(whole["A1^2"], [whole["A1+"], whole["A1++"]]),
        "A2": Inside(whole["A2^2"], [whole["A2+"]]),
        "A3": Inside(torch.zeros_like(whole["A4^2"]), []),
        "A4": Inside(whole["A4^2"], [whole["A4+"], -whole["A4+"]]),
    }
    for name, law in (("dk", "A1"), ("dv", "A2")) if accumulated else ():
        total, variance = _accumulated(exact.parts[name], grid)
        whole[name + "+++"] = total - whole[name]
        whole[name + "^2"] = whole[name + "^2"] + _TIMES * variance
        inside[law].variance = inside[law].variance + _TIMES * variance.sum((2, 3))[..., None]
    roundings = _TIMES * (2 if composed else 1)
    # Grouped gradients may be rounded for each query head before they are added.
    of_keys = roundings * (2 if call.group > 1 else 1)
    of = {name: _expected(name, whole, grid, roundings) for name in ("o", "dq")}
    if every:
        of |= {name: _expected(name, whole, grid, of_keys) for name in ("dk", "dv")}
        _add_results(inside, call, of)
    return Reference(
        exact.rows, of["o"], of["dq"], of.get("dk"), of.get("dv"), whole["weight"], whole["A1"],
        inside, roundings, int(exact.which.left_out.sum()), exact.largest,
    )  # fmt: skip


class References:
    """Of several kernels on the same inputs: what depends on the inputs alone is computed once."""

    def __init__(self) -> None:
        self._kept: list[_Exact] = []

    @torch.no_grad()
    def of(self, call: GradedCall, arithmetic: str = FUSED) -> Reference:
        """Of all rows."""
        same = [exact for exact in self._kept if exact.same_inputs(call, arithmetic)]
        for exact in same:
            if exact.which.same(_outcome(call, exact.rows, exact.which.unseen)):
                return _reference(call, exact)
        every = torch.arange(call.q.shape[2], device=call.q.device)
        unseen = same[0].which.unseen if same else _unseen(call, every)
        if len(self._kept) >= KEPT_MAX:
            self._kept.pop(0)
        self._kept.append(_exact(call, None, arithmetic, unseen))
        return _reference(call, self._kept[-1])


@torch.no_grad()
def reference(
    call: GradedCall, rows: Optional[Tensor] = None, arithmetic: str = FUSED
) -> Reference:
    """rows: ascending; None = all, and then dk and dv are there, too."""
    some = torch.arange(call.q.shape[2], device=call.q.device) if rows is None else rows
    return _reference(call, _exact(call, rows, arithmetic, _unseen(call, some)))
