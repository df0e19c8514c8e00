"""The listeners of optimizer.step(): one hook of each kind, from the first monitor on for good.

PyTorch walks along its hooks while it calls them: one that comes or goes meanwhile (detach() in a
callback, a watched model that the garbage collector takes) would raise into the training job.
The listeners are therefore in a list of ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._util.guard import harmless

Listener = Callable[[Optimizer, Any, Any], None]

_numbers = itertools.count()


class _Hook:
    def __init__(self, register: Callable[[Listener], Any]) -> None:
        self._register = register
        self._registered = False
        self._listeners: dict[int, Listener] = {}

    def add(self, listener: Listener) -> Callable[[], None]:
        """Returns what ends it; safe at any time, also from within a listener."""
        number = next(_numbers)
        self._listeners[number] = listener
        if not self._registered:
            self._registered = True
            self._register(self)

        def remove() -> None:
            self._listeners.pop(number, None)

        return remove

    @harmless("optimizer hook")
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # A step that is compiled is seen by the weights that change.
        for listener in list(self._listeners.values()):
            listener(optimizer, args, kwargs)


before_step = _Hook(register_optimizer_step_pre_hook)
after_step = _Hook(register_optimizer_step_post_hook)
