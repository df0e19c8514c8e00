"""The optimizers whose step() has begun and has not ended.

Some compute the loss several times within one step, by a closure, and change the weights in
between (LBFGS, SAM).  Some call the step of another one that they hold.

PyTorch wraps the step of each class.  So the hooks of a class whose step() calls that of its base
are called twice, one pair within the other.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

from torch.optim.optimizer import Optimizer

_DEPTH_MAX = 8  # Of optimizers within one another.
_code = getattr(Optimizer.profile_hook_step, "__code__", None)
_WRAPPED_IN = getattr(_code, "co_filename", "")


class UnderWay:
    def __init__(self) -> None:
        self._known: list[weakref.ref[Optimizer]] = []  # From the outermost on.

    def begins(self, optimizer: Optimizer) -> bool:
        """Called by a hook.  Whether it begins within a step of its own."""
        depths = self._depths(optimizer)
        within = bool(depths) and _is_within_its_own(optimizer)
        if depths and not within:
            del self._known[depths[0] :]  # Its step before has raised.
        self._known = [*self._known, weakref.ref(optimizer)][:_DEPTH_MAX]
        return within

    def ends(self, optimizer: Optimizer) -> None:
        """And with it those that have begun within it."""
        depths = self._depths(optimizer)
        if depths:
            del self._known[depths[-1] :]

    def _depths(self, optimizer: Optimizer) -> list[int]:
        return [depth for depth, known in enumerate(self._known) if known() is optimizer]

    def any(self, of: Callable[[Optimizer], bool] = lambda _: True) -> bool:
        """Whether there is one, of a kind."""
        return any(found is not None and of(found) for found in (k() for k in self._known))


def _is_within_its_own(optimizer: Optimizer) -> bool:
    """Whether PyTorch's wrapper of its step runs twice.  Asked only where it has begun before."""
    frame, count = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _WRAPPED_IN:
            count += frame.f_locals.get("self") is optimizer
    return count > 1
