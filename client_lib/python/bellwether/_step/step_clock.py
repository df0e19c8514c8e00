"""How long steps take, and how much longer the sampled ones.

A sampled step is held against the steps without a sample around it, before and behind: a step
time that drifts cancels, and an evaluation or a checkpoint among them is no median.  The two
steps right behind a sample count to it.  Work may be late; and a GPU at its power limit runs
them faster, since a sample draws less power than training does.

What the hook does on the CPU costs a GPU job nothing while the GPU has work queued.  So there an
event marks the end of each step, and the times between the marks are the GPU's.  Nothing waits:
they are read once the GPU has passed them.
"""

from __future__ import annotations

import collections
import statistics
from typing import Any, Optional

import torch

_PLAIN_STEPS = 32  # The newest steps without a sample, of which the median counts
_LATE = 2  # Steps right behind a sample that count to it, while any other is left
_NEIGHBOURS = 4  # On each side of them
_PAIRS = 64  # The newest samples that count
_MARKS_MAX = 256  # Beyond them the oldest are forgotten.
# Of the median of a normal sample: its standard error against the median distance from it.
_ERROR_OF_DISTANCE = 1.2533 * 1.4826


class StepClock:
    def __init__(self) -> None:
        self._marks: collections.deque[tuple[Any, bool]] = collections.deque(maxlen=_MARKS_MAX)
        self._plain: collections.deque[float] = collections.deque(maxlen=_PLAIN_STEPS)
        self._before: list[float] = []  # Steps before the sampled one ...
        self._sampled: Optional[float] = None  # ... whose other side is not known yet
        self._behind: list[float] = []
        self._pairs: collections.deque[float] = collections.deque(maxlen=_PAIRS)

    def mark(self, device: torch.device, sampled: bool) -> None:
        """The end of a step, on the current stream of `device`."""
        with torch.cuda.device(device):
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        self._marks.append((event, sampled))
        while len(self._marks) >= 2 and self._marks[1][0].query():
            begin, _ = self._marks.popleft()
            end, was_sampled = self._marks[0]
            self.add(begin.elapsed_time(end) / 1e3, was_sampled)

    def add(self, seconds: float, sampled: bool) -> None:
        """A step's time."""
        if sampled:
            self._pair()
            # The steps right behind the sample before were that one's.
            self._before = self._behind[self._late() :]
            self._sampled, self._behind = seconds, []
            return
        self._plain.append(seconds)
        self._behind.append(seconds)
        if len(self._behind) > _NEIGHBOURS + _LATE:
            self._pair()
            del self._behind[_LATE]  # The first ones stay, as the sample's.

    def _late(self) -> int:
        """How many of the steps behind the sample count to it."""
        return max(0, min(_LATE, len(self._behind) - 1))

    def _pair(self) -> None:
        """Holds the sampled step against both sides, once they are known."""
        seconds, self._sampled = self._sampled, None
        late, before = self._behind[: self._late()], self._before[-_NEIGHBOURS:]
        behind = self._behind[len(late) :][:_NEIGHBOURS]
        if seconds is None or not before or not behind:
            return
        plain = (statistics.median(before) + statistics.median(behind)) / 2
        if plain > 0:
            self._pairs.append((seconds + sum(late)) / plain - 1 - len(late))

    def step_seconds(self) -> Optional[float]:
        """A step without a sample; None while none is known."""
        return statistics.median(self._plain) if self._plain else None

    def pairs(self) -> int:
        """Samples that sample_steps() is of."""
        return len(self._pairs)

    def sample_steps(self) -> tuple[float, float]:
        """What a sample costs, in steps, and the standard error of that.  Needs a pair."""
        cost = statistics.median(self._pairs)
        distance = statistics.median(abs(pair - cost) for pair in self._pairs)
        return cost, _ERROR_OF_DISTANCE * distance / len(self._pairs) ** 0.5
