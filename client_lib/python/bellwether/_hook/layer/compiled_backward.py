"""The backward of one attention module that torch.compile has compiled: the first that is heard of
its forward.

What its graph hands over is read as a call is, and measured as one (compiled/compiled_taps.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from ..._kernels.memory import capturing
from ..._kernels.probe import Unsupported
from ..calls.call import AttentionCall, CallRead
from .gradients import Gradients
from .kept import Kept, tensors_of
from .law_calls import LawCalls
from .notes import NO_KEY_GRADIENT, NO_LEAK, Notes
from .passes import Passes
from .seen_calls import SeenCalls
from .weight_search import WeightSearch

KEYS_NOT_WRITTEN = "torch.compile does not write the keys' gradient: no leak is measured"
NOT_WRITTEN = "torch.compile does not write all of dq, dk and dv"


class CompiledBackward:
    """Of one layer's calls."""

    def __init__(
        self, notes: Notes, passes: Passes, seen: SeenCalls, search: WeightSearch,
        gradients: Gradients, laws: LawCalls,
    ) -> None:  # fmt: skip
        self._notes, self._passes, self._seen = notes, passes, seen
        self._search, self._gradients, self._laws = search, gradients, laws
        self._kept: Optional[Kept] = None  # Of the call whose output's gradient came last.

    def output_gradient(
        self, read: Callable[[], tuple[CallRead, list[Tensor]]], at_once: bool
    ) -> None:
        """read  gives the call, its output and the gradient of that; none of them with a reason
        at_once  the gradients of q, k and v have come, too"""
        notes, passes, seen = self._notes, self._passes, self._seen
        passes.calls += 1
        seen.compiled = True
        self._kept = None
        if not capturing() and seen.heads and not self._wanted():
            self._gradients.arrived(False)
            return
        with torch.no_grad():
            call, outputs = read()
        if isinstance(call, str):
            notes.add(call)
        group = None
        if isinstance(call, AttentionCall) and seen.readable(call.q, call.k, call.v):
            group = seen.observe(call)
        if not isinstance(call, AttentionCall) or group is None:
            self._gradients.arrived(False)
            return
        self._search.check_by(call.shown)
        notes.add_parts_of(call)
        kept = self._kept = Kept(self._gradients, call, group, compiled=True, fleeting=not at_once)
        if "k" not in call.trained():
            notes.add(NO_KEY_GRADIENT)
        elif not call.key_gradients_cancel():
            notes.add(NO_LEAK)
        else:
            kept.leaks = self._gradients.host.measures("leak")
        if self._gradients.arrived(call.unread is None):
            kept.laws = self._laws.asked(call)
            o, d_o = outputs
            saved = (o, call.q, call.k, call.v, *tensors_of(call).values())
            self._gradients.output_gradient(kept, saved, d_o)
        kept.measured()  # PyTorch's CUDA graphs refuse memory of theirs that is held.

    def _wanted(self) -> bool:
        """Whether anything of this pass is measured; the step before may end by it."""
        count = self._passes.fired_in_step + 1
        if self._passes.only_counted(count):
            return False
        self._passes.begins(count)
        return self._gradients.wants()

    def input_gradients(self, read: Callable[[], dict[str, Tensor]], lost: str) -> None:
        """read  gives those of q, k and v that have come, by what they are of
        lost  those that will not"""
        kept = self._kept
        if kept is None or not (kept.leaks or kept.laws):
            return
        if lost:
            self._laws.lost(kept, NOT_WRITTEN)
            if kept.leaks and "k" in lost:
                self._notes.add(KEYS_NOT_WRITTEN)
        start = time.perf_counter()
        gradients: dict[str, Tensor] = {}
        try:
            with torch.no_grad():
                gradients = read()
        except Unsupported as e:
            self._notes.add(str(e))
            self._laws.lost(kept, str(e))
        self._gradients.host.hook_seconds += time.perf_counter() - start
        for of, gradient in gradients.items():
            self._gradients.input_gradient(kept, gradient, of, True)
        if not kept.fleeting:
            self._laws.lost(kept, NOT_WRITTEN)  # Of those that are missing no more will come.
