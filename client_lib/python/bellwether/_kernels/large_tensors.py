"""Statistics of large float32 tensors on a CPU, by reductions of torch: several times as fast as
the kernel.

Squares are added up in float32 along rows and in float64 over them, so what is not finite, or too
small for that, goes to the kernel.  Small tensors do, too: one call takes them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from .._native import c_api
from .bits import sum_of_words
from .memory import Memory
from .tensors import Entry, statistics

LEAST = 1 << 18  # Elements of a large tensor.
_ROW = 4096  # Elements.
_MEAN_SQUARE_MIN = 1e-24  # Squares far below it may be 0 in float32.
_CPU = torch.device("cpu")
_AT = {name: i for i, name in enumerate(c_api.TENSOR_STATS)}


def flat(t: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie."""
    return t.as_strided((t.numel(),), (1,))


def cpu_statistics(
    memory: Memory,
    entries: Sequence[Entry],
    scale: Optional[Tensor] = None,
    bits_only: bool = False,
) -> Tensor:
    """As statistics() gives them, on the CPU.  Bits of a large weight are summed up in another way,
    and its largest element is not asked for.  bits_only  of large weights nothing else is"""
    factor = 1.0 if scale is None else 1 / float(scale)
    of_large = [_of_large(entry, factor, bits_only) for entry in entries]
    rest = [i for i, (values, _) in enumerate(of_large) if values is None]
    found = torch.zeros(len(entries), len(_AT), dtype=torch.float64, device=_CPU)
    if rest:
        found[rest] = statistics(memory, [entries[i] for i in rest], _CPU, scale)
    for i, (values, bits) in enumerate(of_large):
        for name, value in values.items() if values is not None else ():
            found[i, _AT[name]] = value
        if bits is not None:
            found[i, _AT["weight_bits"]] = bits
    return found


def _of_large(
    entry: Entry, factor: float, bits_only: bool
) -> tuple[Optional[dict[str, float]], Optional[int]]:
    """Its statistics, None: the kernel's; the sum of its bits, None: the kernel's, or none."""
    grad, weight = entry.grad, entry.weight
    alone = entry.before is None and entry.moment is None and entry.second is None
    of = grad if grad is not None else weight
    if of is None or not alone or (grad is not None and weight is not None) or of.numel() < LEAST:
        return None, None
    bits = sum_of_words(flat(of)) if grad is None else None
    if bits_only and bits is not None:
        return {"elements": of.numel()}, bits
    sumsq = _sum_of_squares(flat(of)) if of.dtype == torch.float32 else None
    if sumsq is None:
        return None, bits
    values = {"elements": float(of.numel())}
    if grad is None:
        values["weight_sumsq"] = sumsq
        return (values if bits is not None else None), bits
    least, largest = (float(x) for x in torch.aminmax(flat(of)))
    values["grad_sumsq"] = sumsq * factor * factor
    values["grad_max"] = max(-least, largest) * factor
    values["grad_zeros"] = of.numel() - int(torch.count_nonzero(flat(of)))
    return values, None


def _sum_of_squares(of: Tensor) -> Optional[float]:
    """None: float32 cannot hold all of it."""
    whole = of.numel() // _ROW * _ROW
    norms = torch.linalg.vector_norm(of[:whole].view(-1, _ROW), dim=1)
    rest = torch.linalg.vector_norm(of[whole:])
    found = float(norms.double().square().sum()) + float(rest) ** 2
    return found if math.isfinite(found) and found >= _MEAN_SQUARE_MIN * of.numel() else None
