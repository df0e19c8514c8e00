"""When weights, rates and attention may change: behind a step's last optimizer, before the next
forward pass.  Anywhere else a change would meet a graph that still has to run backwards.

Whether mon.step() comes before or after optimizer.step() is the trainer's choice, and whether it
comes at all; so the boundary is now at the optimizer's hook, now at the end of the step.
"""

from __future__ import annotations

from typing import Optional


class Boundaries:
    def __init__(self) -> None:
        self._between = False  # An optimizer has stepped, and nothing has run forward since.
        self._told_after = False  # mon.step() was once seen to follow optimizer.step().
        self._owed = False  # The step was told before its optimizer: the hook is the boundary.
        self._seen: list[int] = []  # ids of the optimizers of the running step, in order.
        self._last: Optional[int] = None  # The one that came last in the step before.
        self._unheard = 0  # Steps in a row that were told, and no optimizer has stepped.

    def computes(self) -> None:
        """A forward or backward pass has begun."""
        self._between = False

    def optimizer_stepped(self, optimizer: int, explicit: bool) -> Optional[int]:
        """None if this is no boundary, else how many steps the next forward pass is ahead of the
        running one.  `explicit`: mon.step() is called."""
        self._between, self._unheard = True, 0
        if optimizer not in self._seen:
            self._seen.append(optimizer)
        if self._last is not None and optimizer != self._last:
            return None
        if not explicit:
            return 1
        owed, self._owed = self._owed, False
        return 0 if owed else None

    def is_last(self, optimizer: int) -> Optional[bool]:
        """Whether it was the one that came last in the step before; None: there is none."""
        return None if self._last is None else optimizer == self._last

    def closed(self, explicit: bool, graphed: bool) -> bool:
        """Whether the end of a step is a boundary.  `graphed`: optimizers step in a CUDA graph,
        where no hook is called."""
        known = self._last is not None or bool(self._seen)
        if self._seen:
            self._last = self._seen[-1]
            self._seen = []
        if not explicit:
            return False
        if self._between:
            self._told_after = True
            return True
        if graphed or not known:
            return True
        # Told after the step and nothing stepped: a GradScaler has skipped it, or the optimizer's
        # step is compiled since, and will never be heard again.
        self._owed = not self._told_after
        self._unheard += 1
        return self._told_after and self._unheard > 1
