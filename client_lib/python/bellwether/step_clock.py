"""How long steps take on a GPU, and how much longer the sampled ones.

What the hook does on the CPU costs a GPU job nothing while the GPU has work queued.  So an event
marks the end of each step, and a sampled step's price is what it took beyond the steps around it.
Nothing waits: times are read once the GPU has passed the marks.
"""

from __future__ import annotations

import collections
import statistics
from typing import Any, Optional

import torch

_PLAIN_STEPS = 32  # The newest steps without a sample, of which the median counts
_PLAIN_STEPS_MIN = 4
_MARKS_MAX = 256  # Beyond them the oldest are forgotten.


class StepClock:
    def __init__(self) -> None:
        self._marks: collections.deque[tuple[Any, bool]] = collections.deque(maxlen=_MARKS_MAX)
        self._plain: collections.deque[float] = collections.deque(maxlen=_PLAIN_STEPS)
        self._extra: Optional[float] = None

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
        if not sampled:
            self._plain.append(seconds)
        elif len(self._plain) >= _PLAIN_STEPS_MIN:
            self._extra = seconds - statistics.median(self._plain)

    def sample_seconds(self) -> Optional[float]:
        """What the newest sampled step took beyond the others; None while that is not known."""
        return self._extra
