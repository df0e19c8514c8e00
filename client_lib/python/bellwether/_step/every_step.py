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

from .frames import local, number_at_hand
from .lag_of_steps import LagOfSteps
from .phases import Phases
from .since_sample import CLIPPED_TO, SKIPPED, Lags

_CLIPS_MAX = 8  # Calls in one step, each of other parameters.


class EveryStep:
    """model  gives the model, None once it is gone;  on  whether any of this is measured"""

    def __init__(self, model: Callable[[], Optional[nn.Module]], on: bool) -> None:
        self.on, self._model = on, model
        self.phases = Phases()
        self.lags = LagOfSteps(model)
        self._skipped = 0  # Of the running step: tries that the optimizer did not take.
        self._norms: dict[int, Any] = {}  # By the id of the first parameter of those clipped.
        self._limit: Optional[float] = None
        self._own: set[int] = set()  # Parameters of the model.
        self._strangers = 0

    def skips(self) -> None:
        """The optimizer does not take the running step, or this try of it."""
        self._skipped += 1

    def clips(self, parameters: Sequence[Tensor], limit: Any, norm: Any) -> None:
        """torch clips their gradients, whose norm is a number on some device."""
        if not parameters or not self._trained(parameters[0]):
            return
        if len(self._norms) < _CLIPS_MAX or id(parameters[0]) in self._norms:
            self._norms[id(parameters[0])] = norm
        self._limit = number_at_hand(limit)

    def _trained(self, parameter: Tensor) -> bool:
        if id(parameter) not in self._own:
            self._strangers += 1
            if self._strangers & (self._strangers - 1) == 0:  # Not looked for each time.
                model = self._model()
                self._own = {id(p) for p in model.parameters()} if model is not None else set()
        return id(parameter) in self._own

    def _norm(self) -> Optional[Tensor]:
        """Of all gradients that were clipped; None: of none, or no rank has it whole."""
        try:
            norms: list[Tensor] = [local(norm.detach()) for norm in self._norms.values()]
        except (AttributeError, ValueError):
            return None
        if len(norms) < 2:
            return norms[0] if norms else None
        device = norms[0].device
        if any(norm.device != device for norm in norms):
            return None
        with torch.no_grad():
            whole: Tensor = torch.linalg.vector_norm(torch.stack([n.float() for n in norms]))
        return whole

    def of_frame(self, values: dict[str, Any]) -> None:
        """Adds to a frame's values what is known of its step alone."""
        if self._norms:
            norm = values.get("grad_norm", self._norm())
            if norm is not None:
                values["grad_norm"] = norm
                if self._limit is not None:
                    values[CLIPPED_TO] = self._limit
            self._norms.clear()
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
