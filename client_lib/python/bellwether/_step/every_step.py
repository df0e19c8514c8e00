"""What is seen in every step, sampled or not, and told with the next sample.

Nothing of it waits for a GPU.  Numbers of the host are added up here, those of frames in
since_sample.py, and what is on a device stays there until the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .clips import Clips
from .lag_of_steps import LagOfSteps
from .phases import Phases
from .since_sample import SKIPPED, Lags


class EveryStep:
    """model  gives the model, None once it is gone;  on  whether any of this is measured"""

    def __init__(self, model: Callable[[], Optional[nn.Module]], on: bool) -> None:
        self.on, self._model = on, model
        self.phases = Phases()
        self.lags = LagOfSteps(model)
        self._skipped = 0  # Of the running step: tries that the optimizer did not take.
        self.clipped = Clips()
        self._own: set[int] = set()  # Parameters of the model.
        self._strangers = 0

    def skips(self) -> None:
        """The optimizer does not take the running step, or this try of it."""
        self._skipped += 1
        self.clipped.forget()

    def clips(
        self, parameters: Sequence[Tensor], limit: Any, norm: Any, order: Optional[float]
    ) -> None:
        """torch clips their gradients, whose norm is a number on some device."""
        if parameters and self._trained(parameters[0]):
            self.clipped.add(parameters, limit, norm, order)

    def _trained(self, parameter: Tensor) -> bool:
        if id(parameter) not in self._own:
            self._strangers += 1
            if self._strangers & (self._strangers - 1) == 0:  # Not looked for each time.
                model = self._model()
                self._own = {id(p) for p in model.parameters()} if model is not None else set()
        return id(parameter) in self._own

    def of_frame(self, values: dict[str, Any]) -> None:
        """Adds to a frame's values what is known of its step alone."""
        self.clipped.of_frame(values)
        values[SKIPPED] = float(self._skipped)
        self._skipped = 0

    def of_sample(self, values: dict[str, Any], gpu: Optional[torch.device]) -> Optional[Lags]:
        """Adds the numbers of the host since the sample before; those of devices."""
        values.update(self.phases.take())
        if gpu is not None:
            try:
                held = torch.cuda.memory_stats_as_nested_dict(gpu).get("allocated_bytes", {})
            except RuntimeError:  # Another allocator than torch's has none.
                held = {}
            for name, kind in (("memory_allocated", "current"), ("memory_peak", "peak")):
                if kind in held.get("all", {}):
                    values[name] = float(held["all"][kind])
        return self.lags.take()

    def optimizer_steps(self, optimizer: Optimizer, closure: bool) -> None:
        """Before its step; closure  it computes the gradients itself"""
        self.phases.optimizer_begins()
        if not closure:
            with torch.no_grad():
                self.lags.optimizer_steps(optimizer)
