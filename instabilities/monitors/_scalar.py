"""What rules of one number have in common; the same as tools/lab/peer_rules.h has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import fmean, pstdev

from . import Alarm

SILENT = 100  # Values at the start of which no rule speaks.
QUIET = 100  # Steps without evidence after which evidence is a new alarm.


def alarms_of(series: Iterable[tuple[int, float]], judge: Callable[[float], bool]) -> list[Alarm]:
    """`judge` is given each finite value once; what is not finite fires."""
    found, fired = [], -math.inf
    for number, (step, value) in enumerate(series):
        fires = not math.isfinite(value) or judge(value)
        if fires and number >= SILENT:
            if step - fired > QUIET:
                found.append(Alarm(step))
            fired = step
    return found


class Window:
    """The last values, never the one that is judged."""

    def __init__(self, size: int) -> None:
        self.size, self.values = size, list[float]()

    def add(self, value: float) -> None:
        self.values = [*self.values, value][-self.size :]

    def full(self) -> bool:
        return len(self.values) == self.size

    def mean(self) -> float:
        return fmean(self.values)

    def deviation(self) -> float:
        return pstdev(self.values)


def twice_mean(size: int, times: int) -> Callable[[float], bool]:
    """Above twice the mean of the last `size`, `times` in a row."""
    window, above = Window(size), 0

    def judge(value: float) -> bool:
        nonlocal above
        above = above + 1 if window.full() and value > 2 * window.mean() else 0
        if above == 0:
            window.add(value)  # What is off its course is no measure.
        return above >= times

    return judge
