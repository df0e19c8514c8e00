"""When a step of a model ends, as seen from its passes, its optimizers and mon.step()."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Optional

import torch
from torch.optim.optimizer import Optimizer

from .._kernels.memory import capturing
from .._util import log
from .boundaries import Boundaries
from .trainers import Trainers

PASSES_MAX = 64  # Forward or backward passes without a step, then one warning.


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class StepEnds:
    """parameters  those that the model has now"""

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.explicit = False  # mon.step() is called: the optimizer's hook is not the step.
        self.pending = False  # An optimizer step ended that is not closed yet.
        self.graphed = False  # optimizer.step() was captured in a CUDA graph.
        self.hooks_called = 0  # Of optimizers, of any model.
        self.warned = False
        self.trainers = Trainers(parameters)
        self._boundaries = Boundaries()
        self._backward = -1  # That of a compiled module that was seen last.

    def forward_begins(self) -> bool:
        """Whether the step before it is over and has to be closed."""
        self._boundaries.computes()
        if in_backward():  # A recomputation.
            return False
        self.trainers.forward()
        return self.pending and not capturing()

    def backward_begins(self) -> bool:
        """The same for a compiled module, whose forward is not seen."""
        self._boundaries.computes()
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # An optimizer may step within one, after each weight.
            self._backward = backward
            self.trainers.forward()
        return self.pending and not capturing()

    def passes(self, count: int) -> None:
        """Forward or backward passes of a layer were counted: between samples an eager model has
        no taps, so its backwards are not seen."""
        if self.warned or self.explicit or count <= PASSES_MAX:
            return
        self.warned = True
        log.warning(
            f"{PASSES_MAX} passes without an optimizer step; if the optimizer is "
            "not from torch.optim, call mon.step() once per step"
        )

    def optimizer_stepped(self, optimizer: Optimizer) -> tuple[bool, Optional[int]]:
        """(whether that ends the model's step; if it is a boundary for actions, how many steps the
        next forward pass is ahead of the running one)"""
        self.hooks_called += 1
        if not self.trainers.trains(optimizer):
            return False, None
        ahead = self._boundaries.optimizer_stepped(id(optimizer), self.explicit)
        return self.trainers.ends_step(optimizer), ahead

    def closed(self) -> bool:
        """The step is closed.  Whether that is a boundary for actions."""
        return self._boundaries.closed(self.explicit, self.graphed)
