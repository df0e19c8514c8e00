"""Whether the three products of a linear layer agree: y = x W^T + b, dx = dy W, dW = dy^T x.

In exact arithmetic <y - b, dy> = <x, dx> = <W, dW>, whatever the loss.  Where two of the three
agree and the third does not, its tensor is wrong.  What may differ is rounding, which is known:

  its results    of y, dx and dW, ulp^2 / 12 for each element times the square of its partner's,
                 twice, since a sum may be rounded in parts
  equal rows     rows of y or dx that are equal bit for bit were rounded alike: tokens that come
                 again.  Their variance counts as often as a row has its equals, on average
  sums in fp32   of K terms: a share of the result of sqrt(K) 2^-24.  Tensor cores add 16 terms or
                 more at once and cut off what is beyond fp32: K / 16 times 2^-24, all of one sign
  lm_head's dx   has most of its terms in common with all other rows: those of likely words.  So on
                 a GPU what its partial sums lose is alike in all rows: a share of the absolute
                 values, not of the sum.  cuBLAS keeps partial sums in 16 bits if it may
  fp32           its products may be made in TF32: all six tensors count, in TF32's grid

A difference that no rounding makes is broken, from one sample.  ALARMS is what a run of any length
may give by chance: the k-th sample has 6 / (pi k)^2 of it, which its questions share.  Z_MIN is for
what this does not know of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from statistics import NormalDist

Y, X, W = "y", "x", "w"
SIDES = (Y, X, W)
PAIRS = ((Y, X), (X, W), (W, Y))
TENSORS = {Y: "y", X: "dx", W: "dW"}  # What a side's product has made.
ALARMS = 1e-3
Z_MIN = 6.0
_TIMES = 2  # That each rounding counts.
_FP32 = 2.0**-24
_AT_ONCE = 16  # Terms that a tensor core adds at least, before it cuts the sum off.
# Of the absolute values, where partial sums of lm_head's dx have 16 bits.  Three times it was seen.
_ALIKE_16 = 2.0**-11
# Of |W dW|, |x dx| and |y dy| for each product of two numbers, on average.  Below it the products
# come near 2^-126, where kernels may flush them and their operands to zero.
_UNDERFLOW = 2.0**-102


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the three sums."""

    sum: float
    size: float  # Sum of absolute values.
    result_variance: float  # By the rounding of the product's result.
    operand_variance: float  # By that of the other tensor.
    terms: int  # K of the product.
    equals: float = 1.0  # Rows that were rounded as a row is, itself included, on average.
    partner_nonfinite: int = 0
    result_nonfinite: int = 0
    alike: float = 0.0  # Share of the size that may be lost alike in all rows: alike_share().

    def own_variance(self) -> float:
        rounding = _TIMES * self.result_variance * max(1.0, self.equals)
        return rounding + self._sum_variance()

    def alike_variance(self) -> float:
        """That part of it which may be the same on other ranks: of rows that come again, which do
        so there, too, and of sums in fp32."""
        again = _TIMES * self.result_variance * (max(1.0, self.equals) - 1.0)
        return again + self._sum_variance()

    def _sum_variance(self) -> float:
        sums = (self.terms + (self.terms / _AT_ONCE) ** 2) * (_FP32 * self.sum) ** 2
        return sums + (self.alike * self.size) ** 2


def alike_share(terms: int, in_16_bits: bool) -> float:
    """Of dx of lm_head on a GPU.  in_16_bits  partial sums may be"""
    return terms / _AT_ONCE * _FP32 + (_ALIKE_16 if in_16_bits else 0.0)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Between two sides."""

    value: float
    variance: float
    alike_variance: float = 0.0  # Of it, what may be the same on all ranks.

    def z(self) -> float:
        """nan where something was not finite."""
        if self.value == 0 or not math.isfinite(self.value):
            return 0.0 * self.value
        return self.value / math.sqrt(self.variance) if self.variance > 0 else math.inf


def differences(
    sides: Mapping[str, Side], by_operands: bool, products: int = 0
) -> dict[tuple[str, str], Difference]:
    """Of each pair that was measured; none where gradients are so small that products underflow.

    by_operands  operands may have been rounded, too, within each product: fp32
    products     of two numbers, in each of the three
    """
    if all(side.size < _UNDERFLOW * products for side in sides.values()):
        return {}
    operands = 0.0
    if by_operands:
        operands = sum(s.result_variance + s.operand_variance for s in sides.values())
    found = {}
    for a, b in PAIRS:
        if a in sides and b in sides:
            variance = sides[a].own_variance() + sides[b].own_variance() + _TIMES * operands
            alike = sides[a].alike_variance() + sides[b].alike_variance() + _TIMES * operands
            found[a, b] = Difference(sides[a].sum - sides[b].sum, variance, alike)
    return found


def limit(sample: int, questions: int) -> float:
    """The z beyond which a difference is broken in the run's sample of this number, from 1 on."""
    chance = ALARMS * 6 / (math.pi * sample) ** 2 / max(1, questions)
    return max(Z_MIN, -NormalDist().inv_cdf(chance / 2))


def suspects(broken: set[tuple[str, str]]) -> str:
    """The tensors that the broken pairs leave."""
    common = [s for s in SIDES if all(s in pair for pair in broken)] if len(broken) > 1 else []
    named = common or [s for s in SIDES if any(s in pair for pair in broken)]
    return " or ".join(TENSORS[s] for s in named)


def fault(
    sides: Mapping[str, Side], found: Mapping[tuple[str, str], Difference], z: float,
    overflows: bool,
) -> str:  # fmt: skip
    """What is wrong with a call, in words; "" if nothing is, or if it cannot be told.

    z          limit() of the sample
    overflows  a result beyond the range of its type is the loss scale's affair: fp16
    """
    if any(side.partner_nonfinite for side in sides.values()):
        return ""
    bad = [s for s in SIDES if s in sides and sides[s].result_nonfinite]
    if bad:
        if overflows or len(sides) < len(SIDES):
            return ""
        count = sum(sides[s].result_nonfinite for s in bad)
        names = " and ".join(TENSORS[s] for s in bad)
        return f"{names}: {count} elements are not finite, and dy, x and W are"
    broken = {pair for pair, law in found.items() if not abs(law.z()) <= z}
    if not broken:
        return ""
    told = ", ".join(f"{TENSORS[a]} and {TENSORS[b]} {d.z():.3g}" for (a, b), d in found.items())
    return f"{suspects(broken)} is wrong: z {told}; rounding gives {z:.2g} at most"
