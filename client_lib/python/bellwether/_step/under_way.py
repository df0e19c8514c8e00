"""The optimizers whose step() has begun and has not ended.

Some compute the loss several times within one step, by a closure, and change the weights in
between (LBFGS, SAM).  Some call the step of another one that they hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.optim.optimizer import Optimizer

_DEPTH_MAX = 8  # Of optimizers within one another.


class UnderWay:
    def __init__(self) -> None:
        self._known: list[weakref.ref[Optimizer]] = []  # From the outermost on.

    def begins(self, optimizer: Optimizer) -> None:
        self.ends(optimizer)  # If its step before has raised.
        self._known = [*self._known, weakref.ref(optimizer)][:_DEPTH_MAX]

    def ends(self, optimizer: Optimizer) -> None:
        """And with it those that have begun within it."""
        for depth, known in enumerate(self._known):
            if known() is optimizer:
                del self._known[depth:]
                return

    def any(self, of: Callable[[Optimizer], bool] = lambda _: True) -> bool:
        """Whether there is one, of a kind."""
        return any(found is not None and of(found) for found in (k() for k in self._known))
