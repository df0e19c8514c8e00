"""How many bytes a rank's frames have, by what is handed to the sender: 4 for each value."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Optional

from .._util import log


class Rate(NamedTuple):
    """Bytes a second, over the steps from one sample to the next."""

    samples: float
    others: float  # Frames of steps between them.


class Volume:
    """budget  bytes a second, 0 = none"""

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget, self._clock = budget, clock
        self.of_sample = 0  # The newest one that was handed over.
        self.rate: Optional[Rate] = None  # The newest.
        self.rarer = 0  # How often samples became rarer for their bytes.
        self._samples = self._others = 0  # Since the last sample was closed.
        self._since: Optional[float] = None

    def add(self, size: int, sampled: bool) -> None:
        """A frame was handed over.  On a GPU that is some steps behind its own."""
        if sampled:
            self.of_sample = size
            self._samples += size
        else:
            self._others += size

    def closed(self) -> Optional[Rate]:
        """A sampled step is over.  None: it is the first."""
        now, before = self._clock(), self._since
        samples, others = self._samples, self._others
        self._since, self._samples, self._others = now, 0, 0
        if before is None:
            return None
        seconds = max(now - before, 1e-9)
        self.rate = Rate(samples / seconds, others / seconds)
        return self.rate

    def is_rarer(self, period: int) -> None:
        """Samples are `period` steps apart now, since they have too many bytes."""
        self.rarer += 1
        if self.rarer == 1:
            log.info(
                f"a sample has {self.of_sample / 1024:.0f} KiB, and byte_budget allows "
                f"{self._budget / 1024:.0f} KiB a second: a sample every {period} steps"
            )
