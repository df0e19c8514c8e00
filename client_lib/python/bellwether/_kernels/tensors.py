"""Norms, extremes and counts of many tensors in one call of the kernels library.

kernels/include/bellwether/kernels/tensor_stats.h is the specification.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from .._native import c_api
from .memory import Memory
from .probe import DTYPES, call


@dataclasses.dataclass
class Entry:
    """Of one parameter: dense tensors of the same elements in the same order, of types in DTYPES.

    second    the optimizer's second moment from before the coming step, with its beta2 and eps
    steps     the number of the coming step, or what is added to the number that `steps_at` holds
    steps_at  float32, where the other tensors are
    """

    grad: Optional[Tensor] = None
    weight: Optional[Tensor] = None
    before: Optional[Tensor] = None
    moment: Optional[Tensor] = None
    second: Optional[Tensor] = None
    beta2: float = 0.0
    eps: float = 0.0
    steps: float = 0.0
    steps_at: Optional[Tensor] = None


_KEPT = 16  # Lists of tensors, of which C is told again without filling in its structs.
_PARTS = ("grad", "weight", "before", "moment", "second")


def dense(t: Tensor) -> bool:
    """Whether its elements lie together, in whatever order of dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


# What a slot of C is told: elements, then (name, address, type) of each part, then the numbers.
_Told = tuple[int, tuple[tuple[str, int, int], ...], Optional[tuple[float, float, float, int]]]


def _told(entry: Entry) -> _Told:
    elements, parts = 0, []
    for name in _PARTS:
        tensor = getattr(entry, name)
        if tensor is not None:
            elements = tensor.numel()
            parts.append((name, tensor.data_ptr(), DTYPES[tensor.dtype]))
    numbers = None
    if entry.second is not None:
        at = 0 if entry.steps_at is None else entry.steps_at.data_ptr()
        numbers = (entry.beta2, entry.eps, entry.steps, at)
    return elements, tuple(parts), numbers


@functools.lru_cache(maxsize=_KEPT)
def _slots(told: tuple[_Told, ...]) -> ctypes.Array[c_api.TensorOfStep]:
    """Kept: from sample to sample most tensors stay where they are, and filling costs more than
    all of a call."""
    each = (c_api.TensorOfStep * len(told))()
    for slot, (elements, parts, numbers) in zip(each, told):
        slot.elements = elements
        for name, data, dtype in parts:
            part = getattr(slot, name)
            part.data, part.dtype = data, dtype
        if numbers is not None:
            slot.beta2, slot.eps, slot.steps = numbers[:3]
            slot.steps_at = numbers[3] or None
    return each


def statistics(
    memory: Memory, entries: Sequence[Entry], device: torch.device, scale: Optional[Tensor] = None
) -> Tensor:
    """float64 [entries, TENSOR_STATS], where they are.  On a GPU kernels on the current stream.
    scale  float32, what the gradients are divided by.  Raises KernelError for what the library
    refuses."""
    found = torch.empty(len(entries), len(c_api.TENSOR_STATS), dtype=torch.float64, device=device)
    each = _slots(tuple(_told(entry) for entry in entries))
    params = c_api.struct(
        c_api.TensorStatsParams, count=len(entries), tensors=each, out=found.data_ptr(),
        scale=None if scale is None else scale.data_ptr(), **memory.call_fields(),
    )  # fmt: skip
    if device.type != "cpu":
        size = c_api.kernels().bw_tensor_stats_workspace_bytes(ctypes.byref(params))
        workspace = torch.empty(size // 8, dtype=torch.float64, device=device)
        params.workspace = workspace.data_ptr()
    with memory.running():
        call("bw_tensor_stats", params)
    return found
