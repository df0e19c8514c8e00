"""What the hooks ask of the monitor that they serve, and the patches of the layers they run.

These are protocols, so that layers, patches and hooks neither take nor import a Monitor.  A part
takes the one that has what it needs, and no more: in a test a few lines stand for it.
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
from .calls.call import CallRead, Met
from .calls.call_sites import Forward
from .capturing import Capture
from .law_turns import LawTurn


class Devices(Protocol):
    """Where sums are added up."""

    memories: Memories

    def cannot_measure_on(self, device: str) -> Optional[str]:
        """None if the kernels run on devices of this type, else why not."""


class CallsHost(Devices, Protocol):
    def numbered(self) -> bool:
        """Whether the layout was told: layers that call attention later are left out."""


class Sampling(Protocol):
    """What is measured in the running step."""

    settings: Settings
    hook_seconds: float  # Of the running step; who takes time adds it.
    capture: Optional[Capture]  # What keeps broken calls, where that was asked for.

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while sums are added to a memory, or read."""

    def live(self) -> bool: ...

    def measures(self, part: str) -> bool:
        """part  one of settings.STATS"""

    def samples_step(self) -> bool: ...

    def samples_call(self, calls_before: int) -> bool: ...

    def captures_call(self, calls_before: int) -> bool:
        """Whether a CUDA graph measures a call, after so many that were captured in one go."""

    def row_seed(self, layer: int) -> int: ...

    def law_turn(self, layer: int, device: str) -> LawTurn:
        """Whether it is the turn of this layer to be asked about its laws; device  its type"""

    def weights_in_backward(self) -> bool:
        """Whether the weights are whole only while gradients are computed."""

    def centring_changed(self, step: Optional[int] = None) -> None: ...


class LinearHost(Devices, Sampling, Protocol):
    """Of the taps on linear layers."""

    def in_backward(self) -> bool: ...


class Passing(Protocol):
    """The passes of a layer, by which steps are told apart."""

    settings: Settings

    def reads_calls(self) -> bool:
        """Whether what a call is, is read in the running step."""

    def samples_step(self) -> bool: ...

    def in_backward(self) -> bool: ...

    def passes(self, count: int) -> None:
        """count  the pass of one layer that is under way, 1 for the first of the running step; the
        step before may end by it"""


class WeightsHost(Devices, Protocol):
    """When weights are measured."""

    def measures(self, part: str) -> bool: ...

    def samples_step(self) -> bool: ...

    def weights_in_backward(self) -> bool: ...

    def forward_begins(self) -> None: ...


class ModelHost(Protocol):
    def model(self) -> Optional[nn.Module]:
        """None once it is gone."""


class StepHost(CallsHost, Sampling, Passing, WeightsHost, ModelHost, Protocol):
    """The running step, as layers and hooks see it.  Called on the training thread."""

    def layer_of(self, module: nn.Module) -> Optional[PatchedLayer]:
        """That of a module of the model, if it has one."""

    def add_layer(self, layer: Any, before: Callable[[Any, Any], bool]) -> None:
        """One more layer, behind the last of those that stand `before` it.  While numbered() is
        false."""

    def backward_begins(self) -> None: ...

    # ---- what a GradScaler does ----

    @property
    def hooks_called(self) -> int:
        """Of optimizers, of any model."""

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

    @property
    def calls(self) -> int:
        """Of attention, with gradients on."""

    def note(self, reason: str) -> None: ...

    def listen(self) -> None:
        """The module's forward begins: what its projections return may be asked for."""

    def heard(self) -> None:
        """It is over."""

    def ends(self) -> None:
        """The monitor detaches: nothing of the module is heard any more."""

    def runs(self) -> None:
        """Its module's forward begins."""

    def expects(self) -> bool:
        """Whether the calls of the module, whose forward begins, are to be seen."""

    def look_closer(self) -> None:
        """The calls of the forward that runs are to be read in any case."""

    def attention(
        self,
        read: Callable[[], CallRead],
        bare: Callable[[], Any],
        forward: Optional[Forward],
        centred: bool = False,
    ) -> Any:
        """Makes the call that `read` reads between the taps; by itself, as `bare` does, if there
        is nothing to measure.  `forward`: of the module, that makes it."""

    def meet(self, read: Callable[[], CallRead]) -> None:
        """Takes notice of a call that is made without taps."""

    def begin(
        self,
        read: Callable[[], CallRead],
        forward: Optional[Forward],
    ) -> Optional[Met]:
        """The same in two parts."""

    def tap_early(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
        """Perhaps queries and keys of a call that is not known yet, behind taps; and
        AttentionCall.tapped of that call."""

    def unsure_projections(
        self, heads: int, kv_heads: int, dim: int, v_dim: int
    ) -> dict[str, nn.Module]:
        """By their paths, those whose rows a call can show; none where each has its own."""

    def compiled_backward(
        self, read: Callable[[], tuple[CallRead, list[Tensor]]], site: int, at_once: bool
    ) -> None:
        """Of a module that was compiled.

        read  gives the call, its output and the gradient of that; none of them with a reason
        site  which call of its forward, from 0
        at_once  the gradients of q, k and v are told in the same moment
        """

    def compiled_gradients(
        self, read: Callable[[], dict[str, Tensor]], lost: str, site: int
    ) -> None:
        """Of that call.

        read  gives gradients, by what they are of: "q", "k" or "v", of a packed tensor several
        lost  those that the graph does not write, with a comma between
        """


class Seeker(Protocol):
    """Finds the modules that call attention and are not known to."""

    def owner(self) -> Optional[PatchedLayer]:
        """The layer of the call that is being made."""

    def traced(self, module: nn.Module) -> None:
        """torch.compile traces a call that the module makes."""
