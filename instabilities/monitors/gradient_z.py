"""ZClip: gradient norm 2.5 standard deviations above its exponential mean; nothing is clipped."""

import math

from . import Alarm, Run
from ._scalar import alarms_of

NAME = "gradient z 2.5"
KEEP = 0.97
FIRST = 25  # Values whose plain mean and variance are the start.


class _Z:
    def __init__(self) -> None:
        self.first: list[float] = []
        self.mean = self.variance = 0.0

    def __call__(self, value: float) -> bool:
        if len(self.first) < FIRST:
            self.first.append(value)
            self.mean = sum(self.first) / len(self.first)
            self.variance = sum((x - self.mean) ** 2 for x in self.first) / len(self.first)
            return False
        limit = self.mean + 2.5 * math.sqrt(self.variance)
        counted = min(value, limit)  # As the clipped one would.
        self.variance = KEEP * self.variance + (1 - KEEP) * (counted - self.mean) ** 2
        self.mean = KEEP * self.mean + (1 - KEEP) * counted
        return value > limit


def alarms(run: Run) -> list[Alarm]:
    return alarms_of(((step, norm) for step, _, norm in run.series), _Z())
