"""What a GradScaler does to the running step: its factor, and whether the step is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch.optim.optimizer import Optimizer

from .._hook.layer.layer import Layer
from .._kernels.memory import capturing
from . import grad_scale
from .frames import FOUND_INF, GRAD_SCALE, OVERFLOWS_MAX
from .trainers import Trainers


class LossScaling:
    def __init__(self) -> None:
        self._factor: Optional[torch.Tensor] = None  # Of the running step's loss.
        self._graph_factor: Optional[torch.Tensor] = None  # Where a CUDA graph has it.
        self._found_inf: Union[torch.Tensor, float, None] = None  # Of the step's gradients.
        self._hookless = False  # A GradScaler's optimizer steps without calling hooks.
        self._dropped = 0  # Samples in a row that were dropped because the step was skipped.

    def begin_step(self, sampled: bool) -> None:
        self._factor = self._graph_factor if sampled else None
        self._found_inf = None

    def scaled(self, factor: torch.Tensor, sampled: bool) -> None:
        """The loss of the next backward was multiplied.  A copy is kept, since the factor may
        change before the step ends."""
        if capturing():
            self._graph_factor = factor.detach().clone()  # Made anew by each replay.
        elif sampled and self._factor is None:
            self._factor = factor.detach().clone()

    def skips(
        self, scaler: Any, optimizer: Any, trainers: Trainers, layers: Sequence[Layer]
    ) -> bool:
        """GradScaler.step() has called no hook: whether it has skipped the running step."""
        if self._hookless or capturing():
            return False
        ours = isinstance(optimizer, Optimizer) and trainers.trains(optimizer)
        if ours and not trainers.owned():
            ours = grad_scale.found_inf(scaler, optimizer)
            self._hookless = not ours
        # Nothing of the running step: it was told before its optimizer.
        return ours and any(layer.passes.in_step() for layer in layers)

    def skipped(self) -> None:
        self._found_inf = 1.0

    def drop_sample(self) -> None:
        self._dropped += 1

    def drops_too_many(self) -> bool:
        """No accident any more: the samples would be made up for at their price."""
        return self._dropped > OVERFLOWS_MAX

    def stepped(self, optimizer: Optimizer, explicit: bool) -> None:
        """A fused optimizer is called in any case and told by a number on its device to skip."""
        self._dropped = 0
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            self._found_inf = found.detach().clone()  # The scaler adds others' to it.
        elif not explicit:
            self._found_inf = None  # The retry.

    def values(self) -> dict[str, Union[torch.Tensor, float]]:
        """What a frame is told beside its signals."""
        told = {GRAD_SCALE: self._factor, FOUND_INF: self._found_inf}
        return {name: value for name, value in told.items() if value is not None}
