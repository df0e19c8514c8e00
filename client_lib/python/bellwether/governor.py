"""Keeps the price of watching within its budget by sampling more rarely."""

from __future__ import annotations

import collections
import statistics
from typing import Optional

PERIOD_MAX = 10_000  # steps
_WINDOW = 5  # samples


class Governor:
    """The sampling period in steps.

    After each sample it is told which share of the training time watching costs.  When the median
    over five samples is above the budget the period grows in proportion; when it is below a half
    of the budget the period shrinks again, never below the base.
    """

    def __init__(self, base: int, budget: float) -> None:
        self.base = self.period = base
        self.budget = budget
        self._shares: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._next = 0  # The step of the next sample.

    def set_base(self, period: int) -> None:
        """Another period was asked for, by the server or by a person."""
        before, self.base = self.period, max(1, min(period, PERIOD_MAX))
        self.period = self.base
        self._next -= before - self.period  # One period behind the last sample.
        self._shares.clear()

    def due(self, step: int) -> bool:
        """Whether `step` is sampled: the first, then one in every period."""
        return step >= self._next

    def sampled(self, step: int, share: Optional[float]) -> None:
        """`share`: None while it is not known."""
        if share is not None:
            self._shares.append(share)
        if len(self._shares) == _WINDOW:
            usual = statistics.median(self._shares)
            if usual > self.budget and self.period < PERIOD_MAX:
                factor = min(4.0, usual / self.budget)
                self.period = min(PERIOD_MAX, max(self.period + 1, round(self.period * factor)))
                self._shares.clear()
            elif usual < self.budget / 2 and self.period > self.base:
                self.period = max(self.base, self.period // 2)
                self._shares.clear()
        self._next = step + self.period

    def restart(self, step: int) -> None:
        """The step count jumped, after a rollback: sample at once."""
        self._next = step


class RateWatch:
    """Tells a jump of the learning rate from its warm-up."""

    FACTOR = 1.5

    def __init__(self) -> None:
        self._last = 0.0
        self._warm = False  # The rate has stopped rising once.

    def jumped(self, rate: float) -> bool:
        before, self._last = self._last, rate
        if before <= 0 or not rate > 0:
            return False
        if not self._warm:
            self._warm = rate <= before
            return False
        return rate >= before * self.FACTOR or rate <= before / self.FACTOR
