"""The numbers that a type can hold: distances between them, and the rounding to the nearest."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Grid:
    """The numbers of a floating type."""

    bits: int  # Of the significand, with the leading one.
    exponent_min: int  # Below 2 to this power the distances stay the same.
    largest: float

    def ulp(self, x: Tensor) -> Tensor:
        """The distance between neighbours at x, in fp64."""
        exponent = (x.double().view(torch.int64) >> 52) & 0x7FF  # Of fp64, with its bias.
        exponent = exponent.clamp(min=self.exponent_min + 1023) - (self.bits - 1)
        return (exponent << 52).view(torch.float64)

    def variance(self, x: Tensor) -> Tensor:
        """Of what rounding to the nearest has added to x."""
        return self.variance_of(self.ulp(x))

    @staticmethod
    def variance_of(ulp: torch.Tensor) -> torch.Tensor:
        return ulp.square().div_(12)

    def rounded(self, x: Tensor) -> Tensor:
        """To the nearest, even where two are as near; in fp64."""
        ulp = self.ulp(x)
        return torch.round(x / ulp) * ulp

    def added(self, x: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """What rounding adds to numbers inside of a kernel, and the variance of it.

        factor: some kernels round factor * x.  Where that is a subnormal number the distances are
        the least one over the factor.  What comes out as 0 has lost no more than itself.
        """
        factor = min(1.0, factor)
        subnormal = (x * factor).abs() < 2.0**self.exponent_min
        least = 2.0 ** (self.exponent_min - (self.bits - 1)) / factor
        ulp = self.ulp(x).masked_fill_(subnormal, least)
        error = torch.round(x / ulp).mul_(ulp).sub_(x)
        return error, torch.minimum(self.variance_of(ulp), x.square())


BF16 = Grid(8, -126, torch.finfo(torch.bfloat16).max)
F16 = Grid(11, -14, torch.finfo(torch.float16).max)
# Operands of a matrix product in fp32 may be rounded so, and nothing in the result says it.
TF32 = Grid(11, -126, torch.finfo(torch.float32).max)

# A type of the tensors, and what the products inside of a kernel may round to.
GRIDS = {torch.bfloat16: BF16, torch.float16: F16, torch.float32: TF32}
