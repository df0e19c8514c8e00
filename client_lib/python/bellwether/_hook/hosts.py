"""What the hooks ask of the monitor that they serve, and the patches of the layers they run.

These are protocols, so that layers, patches and hooks neither take nor import a Monitor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Optional, Protocol

import torch
from torch import Tensor, nn

from .._kernels.memory import Memories
from ..settings import Settings


class StepHost(Protocol):
    """The running step, as layers and hooks see it.  Called on the training thread."""

    settings: Settings
    memories: Memories
    hook_seconds: float  # Of the running step; who takes time adds it.

    @property
    def hooks_called(self) -> int:
        """Of optimizers, of any model."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while sums are added to a memory, or read."""

    def live(self) -> bool: ...

    def model(self) -> Optional[nn.Module]:
        """None once it is gone."""

    def measures(self, part: str) -> bool:
        """part  one of settings.STATS"""

    def cannot_measure_on(self, device: str) -> Optional[str]:
        """None if the kernels run on devices of this type, else why not."""

    def numbered(self) -> bool:
        """Whether the layout was told: layers that call attention later are left out."""

    # ---- what is measured in the running step ----

    def samples_step(self) -> bool: ...

    def samples_call(self, calls_before: int) -> bool: ...

    def captures_call(self, calls_before: int) -> bool:
        """Whether a CUDA graph measures a call, after so many that were captured in one go."""

    def row_seed(self, layer: int) -> int: ...

    def weights_in_backward(self) -> bool:
        """Whether the weights are whole only while gradients are computed."""

    # ---- what is told ----

    def forward_begins(self) -> None: ...

    def backward_begins(self) -> None: ...

    def in_backward(self) -> bool: ...

    def passes(self, count: int) -> None:
        """count  forward or backward passes of one layer in the running step"""

    def centring_changed(self, step: Optional[int] = None) -> None: ...

    def loss_scaled(self, factor: Optional[torch.Tensor]) -> None:
        """A GradScaler has multiplied the loss of the next backward."""

    def step_withheld(self, scaler: Any, optimizer: Any) -> None:
        """GradScaler.step() has called no hook."""


class PatchedLayer(Protocol):
    """An attention module whose forward is patched, and what sees its calls."""

    host: StepHost
    module: weakref.ref[nn.Module]
    module_class: type[nn.Module]
    name: str  # Of the module in its model.
    watched: bool

    def note(self, reason: str) -> None: ...

    def listen(self) -> None:
        """The module's forward begins: what its projections return may be asked for."""

    def heard(self) -> None:
        """It is over."""

    def expects(self) -> bool:
        """Whether the calls of the module, whose forward begins, are to be seen."""

    def attention(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        centred: bool = False,
    ) -> Any:
        """Calls `function` between the taps."""

    def compiled_backward(
        self, saved: tuple[Tensor, Tensor, Tensor, Tensor], d_o: Tensor,
        scale: float, causal: bool, statistics: bool, delta: bool, kernel: str,
    ) -> None:  # fmt: skip
        """saved  o, q, k, v of a module that was compiled"""

    def key_gradient(self, d_k: Tensor) -> None: ...
