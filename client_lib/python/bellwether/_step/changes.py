"""Whether the parameters of a model have changed since they were last looked at.

Where no optimizer of torch holds them, that is how a step is seen: between two passes, somebody has
written to them.  A few elements of a few parameters tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from torch import Tensor

_PARAMETERS = 4  # That are looked at, and of each of them
_ELEMENTS = 64


def _held(parameter: Tensor) -> Tensor:
    """What this process has of it."""
    part: Any = getattr(parameter, "ds_tensor", None)  # DeepSpeed's, of ZeRO-3.
    if part is None:
        local: Any = getattr(parameter, "to_local", None)
        part = parameter if local is None else local()
    held: Tensor = part.detach()
    return held


class _Sample:
    def __init__(self, parameter: Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._version = -1
        self._values: Optional[Tensor] = None

    def changed(self, by_value: bool) -> tuple[bool, bool]:
        """by_value  what is on a device is asked for, too, which waits for it"""
        parameter = self._parameter()
        if parameter is None:
            return False, True
        held = _held(parameter)
        # One that is gathered for each pass is written to by that.
        version = 0 if hasattr(parameter, "ds_tensor") else parameter._version
        changed, self._version = version != self._version, version
        on_device = held.device.type != "cpu"
        if on_device and not by_value:
            return changed, True
        flat = held.reshape(-1)
        values = flat[:: max(1, flat.numel() // _ELEMENTS)].clone()
        before, self._values = self._values, values
        same = before is not None and before.shape == values.shape and torch.equal(before, values)
        by_now = before is not None and not same
        return changed or by_now, changed or not on_device


class Changes:
    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._parameters = parameters
        self._samples: list[_Sample] = []

    def look(self, by_value: bool) -> tuple[bool, bool]:
        """(whether they have changed, False at first; whether that is seen without waiting)"""
        if not self._samples:
            trained = [p for p in self._parameters() if p.requires_grad and _fits(p)]
            each = max(1, len(trained) // _PARAMETERS)
            self._samples = [_Sample(p) for p in trained[::each][:_PARAMETERS]]
            for sample in self._samples:
                sample.changed(by_value)
            return False, True
        found = [sample.changed(by_value) for sample in self._samples]
        return any(changed for changed, _ in found), all(at_hand for _, at_hand in found)


def _fits(parameter: Tensor) -> bool:
    try:
        held = _held(parameter)
        return held.numel() > 0 and held.is_contiguous() and held.device.type != "meta"
    except Exception:  # A parameter of another kind.
        return False
