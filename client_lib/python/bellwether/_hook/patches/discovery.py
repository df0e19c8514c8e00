"""Modules that call attention and are not known to: found where they call, in the first step.

While the model runs, Python's stack says which module a call belongs to: the innermost one.  It is
patched when the step has ended, so that no recomputation finds taps that its forward did not have.
Where torch.compile traces, its own stack says it, and the taps are put into the graph at once.  One
graph serves all modules of a class, so all of them get what the taps need.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Optional

from torch import nn

from ..compiled import compiled_taps
from ..hosts import PatchedLayer, StepHost
from . import intercept

_DEPTH_MAX = 1000  # Frames that are looked at.


def calling_modules(frame: Optional[types.FrameType]) -> Iterator[nn.Module]:
    """The modules that run, the innermost first."""
    call = nn.Module._call_impl.__code__
    for _ in range(_DEPTH_MAX):
        if frame is None:
            return
        if frame.f_code is call:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                yield module
        frame = frame.f_back


class Discovery:
    def __init__(
        self, host: StepHost, model: nn.Module, make: Callable[[str, nn.Module], PatchedLayer]
    ) -> None:
        """make  the layer of a module, by its name in the model"""
        self._host, self._make = host, make
        self._places = {id(module): i for i, module in enumerate(model.modules())}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._found: dict[int, PatchedLayer] = {}
        # Some call only parts of the model, as a LightningModule's training_step does.
        parts = [m for m in model.children() if not type(m).__module__.startswith("torch.")]
        roots = [model, *parts]
        self._traced: list[PatchedLayer] = []
        self._roots = [weakref.ref(module) for module in roots]
        self._classes = [type(module) for module in roots]
        self._patched: list[PatchedLayer] = []

    def begin(self) -> None:
        intercept.seek(self, self._alive())

    def _alive(self) -> list[nn.Module]:
        return [module for root in self._roots if (module := root()) is not None]

    def owner(self) -> Optional[PatchedLayer]:
        """The layer of the call that is being made."""
        for module in calling_modules(sys._getframe(1)):
            layer = self._found.get(id(module))
            if layer is None and id(module) in self._names and not self._host.numbered():
                layer = self._found[id(module)] = self._make(self._names[id(module)], module)
                self._host.add_layer(layer, self._before)
            if layer is not None:
                return layer if layer.module() is module else None
        return None

    def traced(self, module: nn.Module) -> None:
        """A call of the module is being traced."""
        model = self._host.model()
        if model is None or self._host.numbered() or id(module) not in self._names:
            return
        if not compiled_taps.supported() or compiled_taps.ATTRIBUTE in vars(module):
            return
        for other in model.modules():
            known = id(other) in self._found or self._host.layer_of(other) is not None
            if type(other) is type(module) and not known:
                layer = self._make(self._names[id(other)], other)
                self._found[id(other)] = layer
                self._traced.append(layer)
                self._host.add_layer(layer, self._before)
                compiled_taps.put(other, layer)

    def _before(self, other: PatchedLayer, layer: PatchedLayer) -> bool:
        """Whether a layer stands before another in the model."""
        places = (self._places.get(id(x.module()), len(self._places)) for x in (other, layer))
        return next(places) <= next(places)

    def end(self) -> None:
        """The first step has ended, and no forward runs: what was found is patched."""
        intercept.seek_no_more(self)
        found = [layer for layer in self._found.values() if layer not in self._traced]
        if found:
            intercept.install(found)
        self._patched = found

    def take_back(self) -> None:
        intercept.seek_no_more(self)
        intercept.uninstall(self._patched)
        for layer in self._traced:
            compiled_taps.take(layer.module(), layer)
        intercept.forget_roots(self._alive(), self._classes)
