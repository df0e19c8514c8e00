"""What the frames of the steps between two samples say together, told with the next sample."""

from __future__ import annotations

import math
from typing import Optional

from torch import Tensor

from .tapped_modules import Arriving

# Of a frame, and no signals: what its gradients were clipped to, or divided by, and steps that the
# optimizer did not take.
CLIPPED_TO, CLIPPED_BY, SKIPPED = "clipped_to", "clipped_by", "skipped"
LEAST_NORM = 1e-6  # What torch adds to a norm.


def _largest(a: Optional[float], b: float) -> float:
    """NaN wins."""
    return b if a is None or math.isnan(b) or b > a else a


class Lags:
    """Of one sample: numbers that are perhaps still on their way from a GPU."""

    def __init__(self, found: list[Tensor]) -> None:
        self._arriving = Arriving(found)

    def ready(self) -> bool:
        return self._arriving.ready()

    def values(self) -> dict[str, float]:
        """Must be ready."""
        parts = [part for found in self._arriving.values() for part in found]
        return {
            "moment_lag_max": math.sqrt(max(lag for lag, _ in parts)),
            "grad_saturated": sum(count for _, count in parts),
        }


class SinceSample:
    def __init__(self) -> None:
        self._loss: Optional[float] = None
        self._norm: Optional[float] = None
        self._factor: Optional[float] = None
        self._skipped = 0.0

    def add(self, run: dict[str, float], withheld: bool) -> None:
        """A frame, of which what is no signal is taken out.  withheld  its step was skipped"""
        to, by = run.pop(CLIPPED_TO, None), run.pop(CLIPPED_BY, None)
        skipped = run.pop(SKIPPED, 0.0)
        if "loss" in run:
            self._loss = _largest(self._loss, run["loss"])
        self._skipped += max(skipped, float(withheld))
        norm = run.get("grad_norm")
        if norm is not None:
            self._norm = _largest(self._norm, norm)
            if to is not None:
                self._clipped((norm + LEAST_NORM) / to if to else math.inf)
        if by is not None and not withheld:
            self._clipped(by)

    def _clipped(self, by: float) -> None:
        factor = 1.0 / by if by > 1.0 or math.isnan(by) else 1.0
        before = 1.0 if self._factor is None else self._factor
        self._factor = math.nan if math.isnan(before + factor) else min(factor, before)

    def take(self) -> dict[str, float]:
        """Signals, since this was asked last."""
        found = {"skipped_steps": self._skipped}
        for name, value in (
            ("loss_max", self._loss), ("grad_norm_max", self._norm), ("clip_factor", self._factor),
        ):  # fmt: skip
            if value is not None:
                found[name] = value
        self.__init__()  # type: ignore[misc]
        return found
