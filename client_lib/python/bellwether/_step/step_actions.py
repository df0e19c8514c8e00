"""What the steps of a model ask of the actions that change it."""

from __future__ import annotations

from typing import Protocol

from torch.optim.optimizer import Optimizer


class StepActions(Protocol):
    """The actions that the server asks of this job.  Called on the training thread."""

    def ranks_agree(self) -> bool: ...

    def mask(self) -> int:
        """Bit k: the kind with number k can be carried out here."""

    def rate_factor(self) -> float:
        """What the learning rate is multiplied by."""

    def take(self, payload: bytes) -> None:
        """One action, as JSON."""

    def boundary(self, step: int) -> None:
        """Between two steps; the next one is `step`."""

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """An optimizer that trains the model begins its step."""

    def optimizer_stepped(self) -> None:
        """An optimizer, of whatever model, has ended its step."""
