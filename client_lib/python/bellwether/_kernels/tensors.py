"""Norms, extremes and counts of many tensors in one call of the kernels library.

kernels/include/bellwether/kernels/tensor_stats.h is the specification.
"""

from __future__ import annotations

import ctypes
import dataclasses
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


def _fill(slot: c_api.TensorOfStep, entry: Entry) -> None:
    for name in _PARTS:
        tensor = getattr(entry, name)
        if tensor is not None:
            slot.elements = tensor.numel()
            part = getattr(slot, name)
            part.data, part.dtype = tensor.data_ptr(), DTYPES[tensor.dtype]
    if entry.second is not None:
        slot.beta2, slot.eps, slot.steps = entry.beta2, entry.eps, entry.steps
        if entry.steps_at is not None:
            slot.steps_at = entry.steps_at.data_ptr()


def statistics(
    memory: Memory, entries: Sequence[Entry], device: torch.device, scale: Optional[Tensor] = None
) -> Tensor:
    """float64 [entries, TENSOR_STATS], where they are.  On a GPU kernels on the current stream.
    scale  float32, what the gradients are divided by.  Raises KernelError for what the library
    refuses."""
    found = torch.empty(len(entries), len(c_api.TENSOR_STATS), dtype=torch.float64, device=device)
    each = (c_api.TensorOfStep * len(entries))()
    for slot, entry in zip(each, entries):
        _fill(slot, entry)
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
