"""How often the calls of one attention module have gone forward and backward."""

from __future__ import annotations

from typing import Optional

from ..hosts import Passing
from .notes import CALLED_AGAIN, Notes


class Passes:
    def __init__(self, host: Passing, notes: Notes) -> None:
        self.host, self._notes = host, notes
        self.ran: Optional[bool] = None  # The module's forward; False = without gradients only.
        self.calls = 0  # Of attention, with gradients on.
        self.fired = 0  # Backward passes through the output tap.
        self.calls_in_step = self.fired_in_step = 0
        self.captured = 0  # Of them, those in a row that went into a CUDA graph.

    def module_runs(self, with_gradients: bool) -> None:
        """Its forward does, whether or not it calls attention."""
        self.ran = bool(self.ran) or with_gradients

    def in_step(self) -> bool:
        """Whether there was one in the running step."""
        return bool(self.calls_in_step or self.fired_in_step)

    def begin_step(self) -> None:
        self.calls_in_step = self.fired_in_step = self.captured = 0

    def step_again(self) -> None:
        """The running step begins anew."""
        self.calls_in_step = self.fired_in_step = 0

    def forwards(self) -> int:
        """Of this step, with the one that runs: a recomputation is none."""
        return self.calls_in_step + (not self.host.in_backward())

    def begins(self, count: int) -> None:
        """count  the pass that it is, of this step: the step before may end by it"""
        self.host.passes(max(self.fired_in_step, count))

    def only_counted(self, count: int) -> bool:
        """Whether nothing is asked of a pass, since its step is not sampled."""
        if self.host.reads_calls():
            return False
        self.begins(count)  # The step before may end by it.
        return not self.host.reads_calls()

    def forward(self) -> None:
        """Counts a call."""
        self.calls += 1
        if not self.host.in_backward():
            one = self.host.settings.microbatches == "first" and self.host.samples_step()
            if one and self.calls_in_step > self.fired_in_step:
                self._notes.add(CALLED_AGAIN)
            self.begins(self.forwards())
            self.calls_in_step += 1

    def backward(self, in_graph: bool) -> None:
        """Counts a backward pass; in_graph  it is captured in a CUDA graph"""
        self.host.passes(max(self.fired_in_step + 1, self.calls_in_step))
        self.fired += 1
        self.fired_in_step += 1
        self.captured = self.captured + 1 if in_graph else 0
