"""lr.scale and sampling.deepen.

The learning rate is multiplied while optimizer.step() runs and put back behind it, to the bit.  So
a scheduler never sees the factor, whether it computes from its base rates or from the rate that it
finds.  Nor does a loop that sets the rate itself, or a checkpoint of the optimizer.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch.optim.optimizer import Optimizer

from .._hook.model import already_compiled
from ..actions import Action
from .applier import Applier
from .host import ActionHost

_COMPILED = "optimizer.step() is compiled: no hook is called"


class RateScale(Applier):
    def __init__(self, host: ActionHost) -> None:
        super().__init__(host)
        self._factors: dict[str, float] = {}  # By the action's id; they multiply.
        self._asked: Optional[tuple[int, bool]] = None  # (steps unheard then, whether compiled)
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []  # (group, its rate, ours)

    @property
    def factor(self) -> float:
        product = 1.0
        for factor in self._factors.values():
            product *= factor
        return product

    # ---- around optimizer.step() ----

    def before_step(self, optimizer: Optimizer) -> None:
        self.after_step()  # If the step before has raised, its rate is still ours.
        factor = self.factor
        if factor == 1.0:
            return
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is None:  # The optimizer sets its own (Adafactor).
                continue
            if isinstance(rate, torch.Tensor):
                # In place: what was captured or compiled knows it by its address.
                self._scaled.append((group, rate, rate.clone()))
                rate.mul_(factor)
            else:
                group["lr"] = rate * factor
                self._scaled.append((group, group["lr"], rate))

    def after_step(self) -> None:
        for group, ours, rate in self._scaled:
            if isinstance(ours, torch.Tensor):
                ours.copy_(rate)
            elif group["lr"] is ours:  # Not if somebody has set another one since.
                group["lr"] = rate
        self._scaled.clear()

    # ---- the action ----

    def impossible(self, kind: str) -> Optional[str]:
        if self.host.graphed_step:
            return "optimizer.step() was captured in a CUDA graph, which replays its rate"
        if self.host.steps_unheard > 1 and self._compiled():
            return _COMPILED
        if not self.host.optimizers():
            return "no optimizer of torch.optim has stepped"
        return None

    def _compiled(self) -> bool:
        """Whether optimizer.step() is compiled; a GradScaler may have skipped it as well.  All
        objects of the process are looked at, once for each time that it has gone quiet."""
        unheard = self.host.steps_unheard
        if self._asked is None or unheard <= self._asked[0]:
            self._asked = unheard, already_compiled.optimizer_step()
        return self._asked[1]

    def refusal(self, action: Action) -> Optional[str]:
        return self.impossible(action.kind)

    def apply(self, action: Action, step: int) -> str:
        self._factors[action.id] = action.value
        self._tell(step)
        return f"factor {self.factor:g}"

    def undo(self, action: Action, step: int) -> None:
        self._factors.pop(action.id, None)
        self._tell(step)

    def holds(self, action: Action) -> bool:
        return self.impossible(action.kind) is None

    def _tell(self, step: int) -> None:
        rate = self.host.own_rate()
        rate = rate * self.factor if rate is not None else 0.0
        text = f"the learning rate is multiplied by {self.factor:g} from here on"
        self.host.tell(step, "learning_rate", text, rate)

    def end(self) -> None:
        self.after_step()
        self._factors.clear()


class Deepen(Applier):
    def __init__(self, host: ActionHost) -> None:
        super().__init__(host)
        self._before: dict[str, int] = {}  # The action's id -> the period that it replaced.

    def impossible(self, kind: str) -> Optional[str]:
        return None

    def refusal(self, action: Action) -> Optional[str]:
        return None

    def apply(self, action: Action, step: int) -> str:
        governor = self.host.governor
        self._before[action.id] = governor.base
        governor.set_base(int(action.value))
        governor.restart(step)
        return f"a sample every {governor.period} steps"

    def undo(self, action: Action, step: int) -> None:
        before = self._before.pop(action.id, None)
        if before is not None:
            self.host.governor.set_base(before)
