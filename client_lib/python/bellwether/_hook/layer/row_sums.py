"""Sums over the rows, and over the columns, of a gradient, with what rounding has added to them."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..._kernels.memory import Memory
from ..._kernels.modules import sure_rows
from ..._kernels.sums import sums_along

CHUNK = 1 << 21  # Elements that are taken at once: what is made of them is memory.
CHUNK_ON_GPUS = 1 << 24  # Each kernel costs a CPU's time there.
SOME_ROWS = 64
# By the type: bits of the exponent, those of the significand behind the leading one, the least
# power of two that is not subnormal.
_GRIDS = {
    torch.bfloat16: (torch.int16, 0x7F80, 7, 2.0**-126),
    torch.float16: (torch.int16, 0x7C00, 10, 2.0**-14),
    torch.float32: (torch.int32, 0x7F800000, 23, 2.0**-126),
}


def chunk(t: Tensor) -> int:
    """Elements that are taken at once where a tensor is."""
    return CHUNK_ON_GPUS if t.is_cuda else CHUNK


def power_of_two(t: Tensor) -> Tensor:
    """The largest that is not above |t|, in float32; that of the least normal number below it."""
    integers, exponent, _, least = _GRIDS[t.dtype]
    return (t.view(integers) & exponent).view(t.dtype).float().clamp(min=least)


def least_normal(t: Tensor) -> float:
    """The least power of two of its type that is not subnormal."""
    return _GRIDS[t.dtype][3]


def significand_bits(t: Tensor) -> int:
    """Of its type, behind the leading one."""
    return _GRIDS[t.dtype][2]


def largest_power(t: Tensor) -> Tensor:
    """That of the largest element.  By it squares of small gradients stay in a float32's range."""
    return power_of_two(t.abs().amax() if t.numel() else t.new_ones(()))


def over_rows(memory: Memory, t: Tensor, coarse: int) -> Tensor:
    """float64 [3, d]: the sum of the rows, that of their absolute values, and the variance that
    rounding the elements has added to the first.  t [n, d], of a type in _GRIDS.

    coarse  bits behind the leading one that a float32 may have been rounded to
    """
    sums, sizes, _, variance, low_bits = sums_along(memory, t, 0)
    if t.dtype == torch.float32:  # One that holds bfloat16 alone was rounded to it.
        fine = significand_bits(t)
        as_bf16 = (low_bits == 0).all()
        variance = variance * torch.where(as_bf16, 4.0 ** (fine - 7), 4.0 ** (fine - coarse))
    return torch.stack([sums, sizes, variance])


def over_columns(memory: Memory, t: Tensor) -> Tensor:
    """float64 [4, n]: the sum of each row, that of its absolute values, that of the distances of
    neighbours in the type, and the variance of the first by rounding to it."""
    return sums_along(memory, t, 1)[:4]


def some_rows(t: Tensor, count: int = SOME_ROWS) -> Tensor:
    """A copy of rows at equal distances."""
    n = t.shape[0]
    at = (
        torch.arange(min(count, n), dtype=torch.int64, device=t.device) * n // max(1, min(count, n))
    )
    return t.index_select(0, at)


def of_logits(memory: Memory, z: Tensor, bits: Optional[int]) -> Tensor:
    """float64 [2, n]: 1 - p of the likeliest class, however small, and what all p of a row may be
    off where log p was rounded, too.  z [n, classes]

    bits  behind the leading one of the type of log p; None = float32, which rounds it to nothing

    Roundings of log p add the entropy by that of their type.  Kernels for CPUs keep the sum of the
    exponentials in that type, too, and its logarithm.
    """
    found = sure_rows(memory, z)
    found[1].mul_(0.0 if bits is None else 2.0 ** -(bits + 1))
    return found
