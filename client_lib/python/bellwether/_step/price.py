"""What watching costs a job, measured on the job itself.

Two things are known of a sample.  The hook's own clocks measure how long its code ran on the CPU
and its kernels on the GPU.  They do not know what of the CPU's time the GPU has hidden, nor what
ran slower because of them.  The job's steps show all of it, but as noisily as they vary.  So the
price comes from the steps, within the bounds of the clocks as far as the steps' noise allows.
"""

from __future__ import annotations

import collections
import statistics
from typing import Optional

from .step_clock import StepClock

SKIPPED = 2  # Samples at first, which load libraries and grow buffers
PAIRS_MIN = 5  # Before them the steps say nothing.
_KEPT = 64  # Samples, and steps between them
# Of the hook's clocks: what steps take longer beyond that is another's, which does something of
# its own at the same steps, as a trainer that logs.
_BEYOND_CLOCKS = 2.0


def _bounded(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))


class Price:
    def __init__(self) -> None:
        self.clock = StepClock()
        self.samples = 0  # That count
        self._skipped = 0
        self._on_gpu = False
        self._hook: collections.deque[float] = collections.deque(maxlen=_KEPT)  # CPU s of samples
        self._kernels: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._between: collections.deque[float] = collections.deque(maxlen=_KEPT)  # CPU s of others
        self._whole: collections.deque[float] = collections.deque(maxlen=_KEPT)  # Sampled steps
        self._sample: Optional[float] = None  # Seconds; None: not known
        self._exposed = 1.0  # Share of the hook's CPU time that the job waits for
        self._base = 0.0  # Seconds of each step

    def between(self, hook_seconds: float) -> None:
        """The hook's CPU time in a step without a sample."""
        self._between.append(hook_seconds)

    def sampled(
        self, hook_seconds: float, kernel_seconds: float, step_seconds: float, on_gpu: bool
    ) -> None:
        """Its CPU time in one with a sample, what its kernels took on a GPU, and the step's."""
        self._on_gpu = on_gpu
        if self._skipped < SKIPPED:
            self._skipped += 1
            return
        self.samples += 1
        self._hook.append(hook_seconds)
        self._kernels.append(kernel_seconds)
        self._whole.append(step_seconds)
        self._settle()

    def _settle(self) -> None:
        cpu, kernels = statistics.median(self._hook), statistics.median(self._kernels)
        step = self.clock.step_seconds()
        low = kernels if self._on_gpu else cpu
        self._sample, self._exposed = cpu + kernels, 1.0
        if self.by_steps() and step is not None:
            cost, error = (step * value for value in self.clock.sample_steps())
            likely = _bounded(cost, low, cpu + kernels)
            self._sample = _bounded(
                _bounded(likely, cost - error, cost + error), 0.0, _BEYOND_CLOCKS * (cpu + kernels)
            )
            if self._on_gpu and cpu > 0:
                self._exposed = _bounded((self._sample - kernels) / cpu, 0.0, 1.0)
        self._base = self._exposed * statistics.median(self._between) if self._between else 0.0

    def by_steps(self) -> bool:
        """Whether the job's steps say what a sample costs; else the hook's clocks do."""
        return self.clock.pairs() >= PAIRS_MIN

    def known(self) -> bool:
        """Whether the price is one to judge by.  What of its CPU time a GPU hides the hook's
        clocks cannot say; where each step has a sample nothing else can."""
        if self._sample is None:
            return False
        return self.by_steps() or not self._on_gpu or self.samples > 2 * PAIRS_MIN

    def measured(self) -> int:
        """Samples that it was measured over."""
        return self.clock.pairs() if self.by_steps() else self.samples

    def of_step(self, hook_seconds: float, kernel_seconds: float, sampled: bool) -> float:
        """Seconds that one step pays."""
        if not sampled:
            return self._exposed * hook_seconds
        return self._sample if self.known() and self._sample else hook_seconds + kernel_seconds

    def share(self, period: int) -> float:
        """Of the job's time with a sample every so many steps; 0 while nothing is known."""
        return self._of_period(period, period * self._base + (self._sample or 0.0))

    def seconds(self) -> tuple[Optional[float], float]:
        """(of a step between samples, of a sample); None: each step has one."""
        return self.clock.step_seconds(), self._sample or 0.0

    def every_step(self, period: int) -> float:
        """The part of share() that each step pays, sampled or not."""
        return self._of_period(period, period * self._base)

    def _of_period(self, period: int, seconds: float) -> float:
        if self._sample is None:
            return 0.0
        step = self.clock.step_seconds()
        if step is None:  # Each step has a sample.
            step = max(0.0, statistics.median(self._whole) - self._sample)
        whole = period * step + self._sample
        return min(1.0, seconds / whole) if whole > 0 else 0.0
