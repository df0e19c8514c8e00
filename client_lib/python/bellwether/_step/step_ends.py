"""When a step of a model ends, as seen from its passes, its optimizers and mon.step().

Optimizers that hold other tensors than the model's parameters (master weights, ZeRO), and those
that are none of torch, are seen by what they do: the parameters have changed at the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Optional

import torch
from torch.optim.optimizer import Optimizer

from .._hook.model import already_compiled
from .._hook.running import checkpointed
from .._kernels.memory import capturing
from .._util import log
from .boundaries import Boundaries
from .changes import Changes
from .trainers import Trainers
from .under_way import UnderWay

PASSES_MAX = 64  # Forward or backward passes without a step, then one warning.
_QUIET = 2  # So many times as many passes as a step ever had are no longer one.
_LOOKS_MAX = 8  # At values that are on a device, for which it is waited.


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class StepEnds:
    """parameters  those that the model has now"""

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.explicit = False  # mon.step() is called: the optimizer's hook is not the step.
        self.pending = False  # An optimizer step ended that is not closed yet.
        self.between = False  # mon.step() has ended a step, and the next has not begun.
        self.graphed = False  # optimizer.step() was captured in a CUDA graph.
        self.hooks_called = 0  # Of optimizers, of any model.
        self.warned = False
        self.endless = False  # So many passes without a step that none may ever be seen.
        self.under_way = UnderWay()
        self.trainers = Trainers(parameters)
        self._boundaries = Boundaries()
        self._changes = Changes(parameters)
        self._looked = 0  # Passes of the running step before which it was looked for changes.
        self._looks = [0, 0]  # At values on a device; where an optimizer of others has stepped.
        self._held = False  # A change was once taken for a part of the step, not for its end.
        self._within_backward = False  # An optimizer has stepped while gradients were computed.
        self._backward = -1  # That of a compiled module that was seen last.
        self.unheard = 0  # Steps in a row that ended, and no optimizer of the model was heard.
        self._heard = False  # One was, in the running step.
        self._quiet = False  # The parameters are looked at though it was heard before.
        self._passes_max = 1  # Of a step in which one was heard.

    def forward_begins(self) -> bool:
        """Whether the step before it is over and has to be closed."""
        self._boundaries.computes()
        if in_backward() and (not self.pending or self._within_backward or checkpointed()):
            return False  # A recomputation of the running step.
        # Of a reentrant checkpoint nothing else is seen: its forward makes no graph.
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

    def passes(self, count: int) -> bool:
        """The pass of that number of the running step is under way in some layer: between samples
        an eager model has no taps, so its backwards are not seen.  Whether the step before is over
        and has to be closed."""
        if count > self._looked:
            self._looked = count
            if self.over():
                self._looked = 1
                return True
        self._warn(count)
        return False

    def over(self) -> bool:
        """Whether the running step has ended, though no optimizer that is known to train the model
        has said so: its parameters have changed since the last pass began."""
        if self.explicit or self.pending or capturing():
            return False
        if self.trainers.owned() and not self._gone_quiet():
            return False
        if self.under_way.any():  # Its closure makes passes, between changes of its own.
            return False
        strangers = self.trainers.stepped_strangers()
        by_value = self._looks[bool(strangers)] < _LOOKS_MAX
        self._looks[bool(strangers)] += by_value
        changed, at_hand = self._changes.look(by_value)
        if not changed:
            return False
        adopted = self.trainers.adopt(strangers)
        if not adopted and not self._held:
            self._held = True
            # One that perturbs the weights first has a hook that is yet to be called.
            if self.trainers.one_has_not_stepped():
                return False
        if not adopted and not at_hand:
            self._say_how("the parameters change, and no optimizer of torch.optim steps")
        return adopted or at_hand

    def _gone_quiet(self) -> bool:
        """Whether the optimizer may step without being heard, though it was heard before: its step
        is compiled since."""
        if self._heard:
            return False
        if self.unheard > 0 or self._quiet:
            return True
        self._quiet = self._looked > _QUIET * self._passes_max
        if self._quiet:
            self._changes.look(True)  # What it has changed until now, it was heard doing.
        return False

    def _warn(self, count: int) -> None:
        if self.explicit or count <= PASSES_MAX:
            return
        self.endless = not self.trainers.owned()
        sampled = ": no further ones are sampled until it is seen" if self.endless else ""
        self._say_how(f"{PASSES_MAX} passes without an optimizer step{sampled}")

    def _say_how(self, what: str) -> None:
        if not self.warned:
            log.warning(
                f"{what}; if the optimizer is not from torch.optim, call mon.step() once per step"
            )
        self.warned = True

    def is_last(self, optimizer: Optimizer) -> Optional[bool]:
        """Whether no other is expected to step behind it; None: that is not known yet."""
        return self._boundaries.is_last(id(optimizer))

    def optimizer_stepped(self, optimizer: Optimizer) -> tuple[bool, Optional[int]]:
        """(whether that ends the model's step; if it is a boundary for actions, how many steps the
        next forward pass is ahead of the running one)"""
        self.hooks_called += 1
        self._within_backward = in_backward()
        self.under_way.ends(optimizer)
        if not self.trainers.trains(optimizer) or self.under_way.any(self.trainers.trains):
            return False, None  # A part of the step of another is no step.
        self._heard, self._quiet = True, False
        ahead = self._boundaries.optimizer_stepped(id(optimizer), self.explicit)
        return self.trainers.ends_step(optimizer), ahead

    def skipped(self) -> bool:
        """Whether the job ends a step that no optimizer took, though one was heard before."""
        if not self.explicit or self._heard or self.graphed or not self.trainers.owned():
            return False
        return not already_compiled.optimizer_step()

    def closed(self) -> bool:
        """The step is closed.  Whether that is a boundary for actions."""
        if self._heard:
            self._passes_max = max(self._passes_max, self._looked)
        self.unheard = 0 if self._heard else self.unheard + 1
        self._heard = False
        self._looked = min(self._looked, 1)
        self.endless = False
        return self._boundaries.closed(self.explicit, self.graphed)
