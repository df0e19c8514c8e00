"""What attach() puts into the process for one model, and detach() takes back."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from .._hook import compiling
from .._hook.hosts import StepHost
from .._hook.layer.layer import Layer
from .._hook.model.candidates import find_candidates
from .._hook.patches import intercept
from .._hook.patches.discovery import Discovery
from .._util.guard import harmless
from .._util.presence import Presence
from .._weights import names
from . import backward_calls, clipping, grad_scale
from .steps import Steps


def layers_of(
    host: StepHost, model: nn.Module, overrides: dict[str, tuple[str, str]]
) -> list[Layer]:
    """The model's attention modules, those included that `settings.layers` leaves out.

    overrides  {regular expression on module names: (path of W_Q, path of W_K)}
    """

    def named(name: str, module: nn.Module) -> bool:
        return names.named(module) or names.override_for(overrides, name) is not None

    found = find_candidates(model, named)
    return [layer_of(host, name, module, overrides) for name, module in found]


def layer_of(
    host: StepHost, name: str, module: nn.Module, overrides: dict[str, tuple[str, str]]
) -> Layer:
    pattern = host.settings.layers
    watched = pattern is None or re.search(pattern, name) is not None
    return Layer(host, name, module, watched, names.override_for(overrides, name))


class Patches:
    def __init__(self, host: StepHost) -> None:
        self.host = host
        self._undo: list[Callable[[], None]] = []

    @property
    def installed(self) -> bool:
        """Whether there is anything to take back."""
        return bool(self._undo)

    def add(self, *undo: Callable[[], None]) -> None:
        """undo  each is called once by take_back(), in the order of these calls"""
        self._undo += undo

    def see_scaling(self) -> None:
        """From now on the host is told what a GradScaler does."""
        host = self.host
        self.add(lambda: grad_scale.uninstall(host))
        grad_scale.install(host)

    def see_clipping(self, host: clipping.ClipHost) -> None:
        """From now on the host is told before torch clips gradients."""
        self.add(lambda: clipping.uninstall(host))
        clipping.install(host)

    def see_backwards(self, host: backward_calls.BackwardHost) -> None:
        """From now on the host is told when a backward pass begins and ends."""
        self.add(lambda: backward_calls.uninstall(host))
        backward_calls.install(host)

    def see_compiling(self, told: Callable[[], None]) -> None:
        """From now on it is called when torch.compile is asked for something."""
        self.add(compiling.listen(told))

    def see_forwards(self, layers: list[Layer]) -> None:
        """From now on the layers see the attention calls of their modules."""
        intercept.install(layers)
        self.add(lambda: intercept.uninstall(layers))

    def discover(
        self, steps: Steps, model: nn.Module, overrides: dict[str, tuple[str, str]]
    ) -> None:
        """Until the first step ends, other modules that call attention become layers."""
        steps.discovery = discovery = Discovery(
            steps, model, lambda name, module: layer_of(steps, name, module, overrides)
        )
        self.add(discovery.take_back)
        discovery.begin()

    def show_presence(self) -> None:
        self.add(Presence().end)

    def take_back(self) -> None:
        for undo in list(self._undo):
            self._take_back(undo)

    @harmless("detach()")
    def _take_back(self, undo: Callable[[], None]) -> None:
        """One of them, whatever becomes of the others."""
        try:
            self._undo.remove(undo)
        except ValueError:  # Another call of take_back() has begun it.
            return
        undo()
