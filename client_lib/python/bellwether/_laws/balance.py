"""Sums over the rows of a gradient that exact arithmetic makes zero, a vector of them for a call.

A loss that is a softmax and its cross entropy does not change where all logits of a row grow by the
same number.  So the gradients of a row's logits add up to zero, with label smoothing and class
weights, too.  Hence the rows of dW of the layer that makes the logits, lm_head, add up to zero.

  roundings   of the stored elements: ulp^2 / 12 each, twice, as in linear.py.  Rows that are equal
              bit for bit were rounded alike; their variance counts as often as a row has its equals
  alike       the gradient of the logits is rounded before its product.  Where many p are nearly the
              same, so are their roundings, by which the sum moves along the mean feature.  The rows
              of words that did not come lie along it.  What lies along the first direction of some
              rows is left out
  ALIKE       what is left may be so many times its variance

What is left is a vector, in units of its own roundings.  Its norm is near the root of its degrees
of freedom, with a deviation of less than 1, so that limit() of linear.py holds for it as for a z.

docs/concepts/laws.md has what sound losses and others gave.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Optional

import torch
from torch import Tensor

from .linear import Z_MIN

ALIKE = 16.0
TIMES = 2  # That each rounding counts.
EXPONENTIAL = 2.0**-13  # What all p of a row may be off alike, as in reference.py.
# Beyond this share of the absolute values no rounding lies, but another loss.
OTHER_LOSS = 0.05
# Cosine with the rows of words that did not come, up to which it is no z-loss.  A z-loss adds to
# their rows; roundings lose a part of them, as they are small.
AGAINST = -0.25
# Of the squares of a row's gradients, that a softmax does not explain; True: they have 16 bits.
UNLIKE = {True: 1e-5, False: 1e-8}
UNLIKE_ROWS = 0.1
# Of the squares of a result, that what a module is taken for does not explain; True: it was given
# 16 bits, of which its mean may have been kept, or gives such.
FORM = {True: 0.01, False: 1e-6}
_LEAST = 1e-300
# Sums of absolute values below it are of gradients that may underflow, or whose products may.
UNDERFLOW = 2.0**-60
# Why nothing is judged.
OTHER = "its loss is not known to be a softmax and its cross entropy"
OTHER_FORM = "its result is not that of a norm that is known"
SMALL = "its gradients are so small that they may underflow"
Z_LOSS = "its loss has a z-loss, or what looks like one"


@dataclasses.dataclass(frozen=True)
class Balance:
    """One law: a vector of differences from zero."""

    norm: float  # Of the vector, in units of its roundings.
    degrees: float
    share: float  # Of the sum's norm in that of the sums of absolute values.
    along: float = 0.0  # Cosine with the mean row of words that did not come.
    largest: float = 0.0  # Of its elements, where each is a law.

    def alike(self) -> float:
        """What a norm may be where roundings are alike."""
        return math.sqrt(ALIKE * self.degrees)

    def largest_alike(self) -> float:
        """The same of the largest element: twice what so many normal numbers have."""
        return 2 * math.sqrt(2 * math.log(2 * max(1.0, self.degrees)))

    def times(self) -> float:
        """How many times what independent roundings give."""
        return math.sqrt(self.norm**2 / self.degrees)

    def z(self) -> float:
        """Beyond alike(); nan where something was not finite."""
        if not math.isfinite(self.norm):
            return math.nan
        return max(self.norm - self.alike(), self.largest - self.largest_alike())


def of_rows(sums: Tensor, variance: Tensor, sizes: Tensor, some: Tensor, equals: float) -> Balance:
    """
    sums      [d], of the rows
    variance  [d], of what their roundings add
    sizes     [d], of the rows' absolute values
    some      [n, d], rows of it
    equals    how many rows were rounded as a row is, itself included, on average
    """
    sums, some = sums.double(), some.double()
    deviation = (TIMES * max(1.0, equals) * variance.double()).sqrt()
    there = deviation > 0
    if not bool(there.any()):
        return Balance(0.0, 1.0, 0.0)
    share = float(sums.norm() / sizes.double().norm())
    if not math.isfinite(share):
        return Balance(math.nan, 1.0, math.nan)
    vector, rows = sums[there] / deviation[there], some[:, there] / deviation[there]
    values, vectors = torch.linalg.eigh(rows @ rows.t())
    along, degrees = 0.0, float(vector.numel())
    if float(values[-1]) > 0 and vector.numel() > 1:
        first = vectors[:, -1] @ rows / values[-1].sqrt()
        median = rows.median(0).values
        part = float(vector @ first)
        size = float(vector.norm())
        along = part / size * math.copysign(1.0, float(median @ first)) if size else 0.0
        vector, degrees = vector - part * first, degrees - 1
    return Balance(float(vector.norm()), degrees, share, along)


def loss_weights(sizes: Tensor, unsure: Tensor) -> Tensor:
    """At least what the losses of rows are multiplied by [n].  A row's gradients are p less its
    label, by that, and no label is likelier than the likeliest class: their absolute values add up
    to `unsure` of it at least.  unsure  [n], 1 - p of the likeliest class"""
    # Next to nothing is known where p of all other classes underflow.
    return sizes.double() / unsure.double().clamp(min=_LEAST)


def _alike(weights: Tensor, ulps: Tensor) -> Tensor:
    # p of a label near 1 is rounded before the 1 is taken off: the row's weight counts, not sizes.
    return ulps.double() / 2 + EXPONENTIAL * weights


def tolerance(variance: Tensor, weights: Tensor, ulps: Tensor) -> Tensor:
    """What rounding may make of the sums of some rows, each one.  weights  loss_weights()"""
    return _alike(weights, ulps) + Z_MIN * (TIMES * variance.double()).sqrt()


def of_classes(
    sums: Tensor, variance: Tensor, sizes: Tensor, ulps: Tensor, weights: Tensor, off: Tensor
) -> Balance:
    """Of the gradients of logits: a number for each row [n], where all roundings of a row may be
    alike: the half of an ulp each, and what an exponential is off.

    sizes, ulps  [n], of the absolute values, and of the distances of neighbours
    weights      [n], loss_weights()
    off          [n], what all p of a row may be off otherwise
    """
    total = float(sizes.double().norm())
    share = float(sums.double().norm()) / total if total else 0.0
    small = torch.where(sizes < UNDERFLOW, sizes.double(), 0.0)
    alike = _alike(weights, ulps) + off.double() * weights + small
    return of_vector(sums.double(), variance, alike, share)


def of_vector(differences: Tensor, variance: Tensor, alike: Tensor, share: float = 0.0) -> Balance:
    """Of differences that are zero, each a law [n].

    variance  by independent roundings
    alike     what each may be otherwise
    """
    variance = TIMES * variance.double()
    there = variance > 0
    count = int(there.sum())
    if count == 0:
        return Balance(0.0, 1.0, share)
    beyond = (differences.abs() - alike).clamp_(min=0)
    squares = torch.where(there, beyond.square_() / variance, 0.0)
    norm, largest = math.sqrt(float(squares.sum())), math.sqrt(float(squares.max()))
    return Balance(norm, float(count), share, largest=largest)


def unlike_a_softmax(
    sums: Tensor, tolerance: Tensor, z: Tensor, dz: Tensor, largest: float, in_16_bits: bool
) -> Optional[str]:
    """Why the gradients of some rows of logits need not add up to zero; None if their loss is a
    softmax and its cross entropy.

    sums       [n], of the gradients
    tolerance  [n], what rounding may make of them
    z, dz      [n, classes]
    largest    of what any row's sum is beyond its tolerance
    in_16_bits of what dz was rounded to
    """
    there = (dz != 0).any(1)
    if not bool(there.any()):
        return OTHER
    sums, tolerance, z, dz = (t[there].double() for t in (sums, tolerance, z, dz))
    logs, p = z.logsumexp(1), z.softmax(1)
    at = dz.argmin(1, keepdim=True)
    others = torch.ones_like(p).scatter(1, at, 0.0)
    # Of the other classes the gradient is a multiple of p, less a constant with label smoothing.
    count = others.sum(1, keepdim=True)
    flat = (p - (p * others).sum(1, keepdim=True) / count) * others
    got = (dz - (dz * others).sum(1, keepdim=True) / count) * others
    squares = flat.square().sum(1, keepdim=True).clamp(min=_LEAST)
    factor = (flat * got).sum(1, keepdim=True) / squares
    sizes = dz * others if in_16_bits else got  # Rounding is of what is there.
    rest = (got - factor * flat).square().sum(1) / sizes.square().sum(1).clamp(min=_LEAST)
    if float((rest > UNLIKE[in_16_bits]).double().mean()) > UNLIKE_ROWS:
        return OTHER
    # A z-loss adds a multiple of p log Z, the same one in all rows, or times the row's weight.
    weights = (factor * p.gather(1, at) - dz.gather(1, at)).squeeze(1)
    for of_row in (logs, logs * weights):
        share = (sums * of_row).sum() / of_row.square().sum().clamp(min=_LEAST)
        left = (sums - share * of_row).abs()
        made = (share * of_row).abs()
        if bool((left <= tolerance + 1e-3 * made).all()) and largest <= 2 * float(made.max()):
            return Z_LOSS
    return None
