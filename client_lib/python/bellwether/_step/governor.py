"""Keeps the price of watching within its budgets by sampling more rarely."""

from __future__ import annotations

import collections
import statistics
from typing import Optional

from .volume import Rate

PERIOD_MAX = 10_000  # steps
_WINDOW = 5  # samples
# Of the budget: what samples may cost where each step costs it all.  Sampling more rarely does
# not help there, and would only make a job blind.
_FOR_SAMPLES_MIN = 0.25


class Governor:
    """The sampling period in steps.

    There are two budgets, of time and of bytes.  After each sample it is told which share of the
    training time watching costs, and which part of that every step pays, sampled or not.  It is
    told the same of the bytes a second that are sent.  Samples have what is left of a budget, a
    quarter of it at least.  When the median over five of them is above that the period grows in
    proportion to the budget that is exceeded most.  When it is below a half of both the period
    shrinks again, never below the base.

    Ranks whose values are added up have to sample the same steps, though each has its own price.
    There the period is the base times a power of two, and samples are at its multiples.  Ranks of
    one period take the same steps, and a rank that samples more rarely takes some of another's.
    """

    def __init__(
        self, base: int, budget: float, in_step: bool = False, byte_budget: int = 0
    ) -> None:
        """in_step  with other ranks;  byte_budget  a second, 0 = none"""
        self.base = self.period = base
        self.budget, self._in_step, self._byte_budget = budget, in_step, byte_budget
        # 1: all of a budget.
        self._used: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._bytes_used: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._next = 0  # The step of the next sample.

    def set_base(self, period: int) -> None:
        """Another period was asked for, by the server or by a person."""
        before, self.base = self.period, max(1, min(period, PERIOD_MAX))
        self.period = self.base
        self._next -= before - self.period  # One period behind the last sample.
        if self._in_step:
            self._next = -(-self._next // self.period) * self.period
        self._begin_anew()

    def due(self, step: int) -> bool:
        """Whether `step` is sampled: the first, then one in every period."""
        return step >= self._next

    def samples_before(self, step: int, taken: int) -> int:
        """How many came before the sample of `step`, as all ranks count them that sample in step.
        taken  by this rank"""
        return step // self.base if self._in_step else taken

    def sampled(
        self, step: int, share: Optional[float], every_step: float = 0.0,
        sent: Optional[Rate] = None,
    ) -> bool:  # fmt: skip
        """Whether the period has grown for the bytes.

        share       None while it is not known
        every_step  the part of it that each step pays
        sent        None while it is not known
        """
        if share is not None:
            left = max(self.budget - every_step, _FOR_SAMPLES_MIN * self.budget)
            self._used.append((share - every_step) / left)
        if sent is not None and self._byte_budget:
            room = max(self._byte_budget - sent.others, _FOR_SAMPLES_MIN * self._byte_budget)
            self._bytes_used.append(sent.samples / room)
        grown_for_bytes = self._adapt()
        self._next = step + self.period - (step % self.period if self._in_step else 0)
        return grown_for_bytes

    def _adapt(self) -> bool:
        time, size = (
            statistics.median(used) if len(used) == _WINDOW else None
            for used in (self._used, self._bytes_used)
        )
        most = max(time or 0.0, size or 0.0)
        if most > 1 and self.period < PERIOD_MAX:
            self.period = self._grown(min(4.0, most))
            self._begin_anew()
            return size == most
        known = time is not None and (size is not None or not self._byte_budget)
        if known and most < 0.5 and self.period > self.base:
            self.period = max(self.base, self.period // 2)
            self._begin_anew()
        return False

    def _begin_anew(self) -> None:
        self._used.clear()
        self._bytes_used.clear()

    def _grown(self, factor: float) -> int:
        if not self._in_step:
            return min(PERIOD_MAX, max(self.period + 1, round(self.period * factor)))
        wanted = self.period
        while wanted < self.period * factor and 2 * wanted <= PERIOD_MAX:
            wanted *= 2
        return wanted

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
