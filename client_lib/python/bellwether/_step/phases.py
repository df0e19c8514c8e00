"""What a step's time goes into, by the host's clock: data, forward, backward, optimizer.

On a GPU the host only enqueues, and waits where the job asks for a number.  So its times say where
the job waits: a long time for data leaves the GPU without work only where it is longer than what
is queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_BETWEEN, _FORWARD, _BACKWARD, _OPTIMIZER = range(4)
NAMES = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")


class Phases:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._in = _BETWEEN
        self._behind = _BETWEEN  # What comes behind the optimizer's step.
        self._since = 0.0  # 0: nothing is known of what came before.
        self._seconds = [0.0] * len(NAMES)  # By phase, since the sample before.
        self._entered = [0] * len(NAMES)
        self._steps, self._whole = 0, 0.0  # Since the sample before, and their seconds.

    @property
    def waits(self) -> bool:
        """Whether a forward pass would end the time for data."""
        return self._in == _BETWEEN

    def forward_begins(self) -> None:
        if self._in == _BETWEEN:
            self._enters(_FORWARD)

    def backward_begins(self) -> None:
        """Of the outermost backward pass."""
        if self._in == _BETWEEN:
            self._since = 0.0  # Its forward was not seen.
        if self._in != _OPTIMIZER:  # Within its step it is a part of that.
            self._enters(_BACKWARD)

    def backward_ends(self) -> None:
        if self._in == _BACKWARD:
            self._enters(_BETWEEN)

    def optimizer_begins(self) -> None:
        if self._in == _OPTIMIZER:
            return
        if self._in != _BACKWARD:
            # Clipping, and what else belongs to nothing of these; a backward that was not seen.
            self._since = 0.0
        self._behind = _BACKWARD if self._in == _BACKWARD else _BETWEEN
        self._enters(_OPTIMIZER)

    def optimizer_ends(self) -> None:
        """Of one that steps within the backward pass, as one for each parameter does, that pass
        goes on."""
        if self._in == _OPTIMIZER:
            self._enters(self._behind)

    def step_is_told(self) -> None:
        """mon.step(): what comes is the next step's."""
        if self._in == _BETWEEN:
            self._since = self._clock()

    def _enters(self, phase: int) -> None:
        now = self._clock()
        if self._since:
            self._seconds[self._in] += now - self._since
            self._entered[self._in] += 1
        self._in, self._since = phase, now

    def step_ends(self, seconds: float) -> None:
        self._steps += 1
        self._whole += seconds

    def take(self) -> dict[str, float]:
        """Means of the steps since this was asked last, of what was seen."""
        found: dict[str, float] = {}
        if self._steps:
            for name, seconds, entered in zip(NAMES, self._seconds, self._entered):
                if entered:
                    found[name] = seconds / self._steps
            if self._entered[_BETWEEN] and self._whole > 0:
                found["data_share"] = min(1.0, self._seconds[_BETWEEN] / self._whole)
        self._seconds, self._entered = [0.0] * len(NAMES), [0] * len(NAMES)
        self._steps, self._whole = 0, 0.0
        return found
