"""How far gradients are beyond their second moments, of some elements of a few parameters, as a
maximum over calls.

kernels/include/bellwether/kernels/moment_lag.h is the specification.  Every step calls it, so its
structs are made once and written to in one go.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .._native import c_api
from .memory import on_device, stream_of
from .probe import call

_LAYOUT = struct.Struct("=QQIIqqdddQ")
assert _LAYOUT.size == ctypes.sizeof(c_api.MomentLagPart)
_NONE = bytes(_LAYOUT.size)


class Moments(NamedTuple):
    """A part for one step.

    steps     the number of the coming step, or what is added to the number that `steps_at` holds
    steps_at  address of a float32 where the tensors are; 0 = none
    """

    grad: int  # Address of its first element.
    second: int
    grad_dtype: int  # c_api's.
    second_dtype: int
    elements: int  # Each `stride` behind the one before.
    stride: int
    beta2: float
    eps: float
    steps: float
    steps_at: int


class MomentLags:
    """Of at most 16 parameters of one device.  Not thread-safe."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._parts = (c_api.MomentLagPart * count)()
        # [parts, (largest lag, saturated elements)]
        self._found = torch.zeros(count, 2, dtype=torch.float64, device=device)
        self._params = c_api.struct(
            c_api.MomentLagsParams, count=count, parts=self._parts, out=self._found.data_ptr()
        )

    def put(self, at: int, moments: Optional[Moments]) -> None:
        """None: it is left out of the next step."""
        if moments is None:
            ctypes.memmove(ctypes.byref(self._parts, at * _LAYOUT.size), _NONE, _LAYOUT.size)
        else:
            _LAYOUT.pack_into(self._parts, at * _LAYOUT.size, *moments)

    def add(self, scale: Optional[Tensor], skip: Optional[Tensor]) -> None:
        """One step, on the current stream.  float32, where the parts are:
        scale  what the gradients are divided by;  skip  above 0 if the step is not taken
        Raises KernelError for what the library refuses."""
        params = self._params
        params.scale = None if scale is None else scale.data_ptr()
        params.skip = None if skip is None else skip.data_ptr()
        if self._device.type == "cpu":
            call("bw_moment_lags", params)
            return
        with on_device(self._device):
            params.backend = c_api.CUDA
            params.stream = stream_of(self._device)
            call("bw_moment_lags", params)

    def take(self) -> Tensor:
        """A copy, where the parts are; all begins anew."""
        found = self._found.clone()
        self._found.zero_()
        return found
