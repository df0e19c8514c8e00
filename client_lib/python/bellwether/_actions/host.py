"""What actions ask of the monitor that they change.

A protocol, so that what applies an action neither takes nor imports a Monitor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Protocol

from torch import nn
from torch.optim.optimizer import Optimizer

from .._hook.layer.layer import Layer
from .._hook.model.parallel import Parallel
from .._native.run_client import RunClient
from .._step.governor import Governor
from ..settings import Settings


class ActionHost(Protocol):
    """A model under watch.  Called on the training thread, at step boundaries."""

    settings: Settings
    silent: bool  # It reports nothing, and only does what all ranks do.
    parallel: Parallel

    @property
    def graphed_step(self) -> bool:
        """Whether optimizer.step() was captured in a CUDA graph."""

    @property
    def steps_unheard(self) -> int:
        """Steps in a row that ended, and no hook of an optimizer of the model was called."""

    @property
    def layers(self) -> Sequence[Layer]: ...

    @property
    def governor(self) -> Governor: ...

    def model(self) -> Optional[nn.Module]: ...

    def client(self) -> Optional[RunClient]: ...

    def optimizers(self) -> list[Optimizer]:
        """Those that were seen to train the model."""

    def current_step(self) -> int: ...

    def own_rate(self) -> Optional[float]:
        """The learning rate of the first group, as the trainer has set it."""

    # ---- what an action has done ----

    def tell(self, step: int, kind: str, text: str = "", value: float = 0.0) -> None:
        """An event of `step`, the running one or the next."""

    def centring_changed(self, step: Optional[int] = None) -> None: ...

    def weights_changed(self) -> None:
        """What differs from before is not the optimizer's doing."""
