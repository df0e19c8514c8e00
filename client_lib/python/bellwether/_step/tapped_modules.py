"""Modules of a model that get taps in sampled steps, some of them in each, in turn.  The laws of
linear layers and those of lm_head and norms ask them, and activations are measured of them.
"""

from __future__ import annotations

import sys
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Optional, TypeVar

import torch
from torch import Tensor, nn

from .._hook.hosts import LinearHost
from .._hook.layer.linear_tap import Held, Taps
from .._hook.model.parallel import is_fully_sharded
from .._kernels.memory import on_device

TURNS_MAX = 50
HELD_BYTES_MAX = 256 << 20  # Outputs kept from a sampled step's forward to its backward.
LEFT_OUT_MAX = 64  # Reasons that are remembered.

COMPILED = "the model, or a part of it, is compiled"
SHARDED = "the weights are whole in the passes only (FSDP, ZeRO-3)"

M = TypeVar("M")  # What is measured of a call.


def compiling() -> bool:
    """Whether torch.compile is at work in this process: hooks would be traced, or compile what is
    there anew."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if not counters:
        return False
    # Frames are not counted with fullgraph=True, graphs not where each frame breaks at once.
    return bool(counters["frames"]["total"] or counters["stats"]["unique_graphs"])


def compiles(model: nn.Module) -> bool:
    """The same, or whether a part of the model will be compiled.  Asked once of a model: what is
    given to torch.compile later is told to compiled()."""
    return compiling() or any(
        getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod")
        for m in model.modules()
    )


class Arriving:
    """Tensors on their way to the host."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._events: list[Any] = []
        self._host = tensors
        if any(t.is_cuda for t in tensors):
            self._host = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in tensors]
            for host, t in zip(self._host, tensors):
                host.copy_(t, non_blocking=True)
        for device in {t.device for t in tensors if t.is_cuda}:
            with on_device(device):  # Its stream has the copies from it.
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            self._events.append(event)

    def ready(self) -> bool:
        return all(event.query() for event in self._events)

    def values(self) -> list[Any]:
        return [t.tolist() for t in self._host]

    def tensors(self) -> list[Tensor]:
        return self._host


class TappedModules(Generic[M]):
    """
    host   of the taps
    model  gives the model, None once it is gone
    """

    whole_weights = True  # What is measured needs them.

    def __init__(self, host: LinearHost, model: Callable[[], Optional[nn.Module]]) -> None:
        self._host, self._model = host, model
        self.names: list[str] = []  # Of the modules, by their rows.
        self.left_out: Counter[tuple[str, str]] = Counter()  # Name of the module, why.
        self.not_measured: Optional[str] = None  # Why none is.
        self._found = False
        self._watching = False
        self._turn = 0
        self._taps = Taps(host)
        self._measured: list[M] = []

    @abstractmethod
    def _find(self, model: nn.Module) -> None:
        """Gives rows to what may be tapped."""

    @abstractmethod
    def _tap(self, held: Held) -> None:
        """A sampled step begins."""

    def watch(self) -> None:
        """From the next sampled step on."""
        self._watching = True

    def leave_out(self, name: str, why: str) -> None:
        if (name, why) in self.left_out or len(self.left_out) < LEFT_OUT_MAX:
            self.left_out[name, why] += 1

    def begin_step(self, sampled: bool) -> None:
        """What was measured before is forgotten; in a sampled step some modules get their taps."""
        self.stop()
        self._measured = []
        if sampled and self._taps_fit():
            self._tap(Held(HELD_BYTES_MAX))

    def _taps_fit(self) -> bool:
        """Whether modules may have taps now."""
        model = self._model() if self._watching else None
        if model is None or torch.compiler.is_compiling():
            return False
        if not self._found:
            self._found = True
            if compiles(model):
                self.not_measured = COMPILED
            elif self.whole_weights and is_fully_sharded(model):
                self.not_measured = SHARDED
            else:
                self._find(model)
        if self.not_measured is not None or not self.names:
            return False
        if compiling():
            self.not_measured = COMPILED
            return False
        return True

    def compiled(self) -> None:
        """torch.compile is asked for something: nothing is measured any more."""
        if self._watching:
            self.not_measured = COMPILED
            self.stop()

    def stop(self) -> None:
        """No module is looked at any more."""
        self._taps.close()

    def _in_turn(
        self, modules: Sequence[weakref.ref[nn.Module]]
    ) -> Iterator[tuple[int, nn.Module]]:
        """Those whose turn it is, with their places."""
        turns = min(TURNS_MAX, max(1, len(modules)))
        turn = self._turn % turns
        self._turn += 1
        for at in range(turn, len(modules), turns):
            module = modules[at]()
            if module is not None and self._measures_on(module):
                yield at, module

    def _left_out_row(self, row: int, why: str) -> None:
        self.leave_out(self.names[row], why)

    def _measures_on(self, module: nn.Module) -> bool:
        device = next((p.device for p in module.parameters()), None)
        return device is not None and self._host.cannot_measure_on(device.type) is None

    def _taken(self) -> list[M]:
        """What was measured in this step."""
        measured, self._measured = self._measured, []
        return measured
