"""Weights that are kept in fewer bits than they are computed with, unpacked for one reading.

Known by their structure: what packed them is not imported here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

UNPACKED_BYTES_MAX = 1 << 28  # Of one projection, for as long as it is read.


@dataclasses.dataclass(frozen=True)
class Packed:
    shape: tuple[int, int]
    unpack: Callable[[], Tensor]

    def bytes(self) -> int:
        """Of the matrix once it is unpacked, at most."""
        return self.shape[0] * self.shape[1] * 4


def _in_four_bits(state: Any, weight: Tensor) -> Optional[Packed]:
    """As bitsandbytes' Linear4bit has it."""
    shape = getattr(state, "shape", None)
    if shape is None or len(shape) != 2:
        return None

    def unpack() -> Tensor:
        functional: Any = sys.modules["bitsandbytes.functional"]  # It has packed the weight.
        matrix: Tensor = functional.dequantize_4bit(weight.data, state)
        return matrix

    return Packed((int(shape[0]), int(shape[1])), unpack)


def _in_eight_bits(scales: Tensor, weight: Tensor) -> Optional[Packed]:
    """As bitsandbytes' Linear8bitLt has it: a scale for each row."""
    if weight.dim() != 2 or scales.numel() != weight.shape[0]:
        return None
    steps = 127.0
    shape = int(weight.shape[0]), int(weight.shape[1])
    return Packed(shape, lambda: weight.data * (scales.float() / steps).view(-1, 1))


def packed(module: Optional[nn.Module], weight: Tensor) -> Optional[Packed]:
    """How to unpack the weight of a module; None if it is not packed, or not in a known way."""
    state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
    if state is not None and "bitsandbytes.functional" in sys.modules:
        return _in_four_bits(state, weight)
    if weight.dtype == torch.int8:
        scales = getattr(weight, "SCB", None)
        if scales is None:
            scales = getattr(getattr(module, "state", None), "SCB", None)
        return _in_eight_bits(scales, weight) if isinstance(scales, Tensor) else None
    own = getattr(type(weight), "dequantize", None)
    if own is not None and own is not Tensor.dequantize and weight.dim() == 2:
        shape = int(weight.shape[0]), int(weight.shape[1])
        return Packed(shape, lambda: weight.dequantize())
    return None
