"""The backward of one attention module that torch.compile has compiled: the first that is heard of
its forward.

What its graph hands over is read as a call is, and measured as one (compiled/compiled_taps.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from ..._kernels.memory import capturing
from ..calls.call import AttentionCall, CallRead, View
from .gradients import Gradients
from .kept import Kept, tensors_of
from .notes import NO_KEY_GRADIENT, NO_LEAK, Notes
from .passes import Passes
from .seen_calls import SeenCalls
from .weight_search import WeightSearch


class CompiledBackward:
    """Of one layer's calls."""

    def __init__(
        self, notes: Notes, passes: Passes, seen: SeenCalls, search: WeightSearch,
        gradients: Gradients, without_laws: Callable[[], None],
    ) -> None:  # fmt: skip
        """without_laws  told of each call that is measured"""
        self._notes, self._passes, self._seen = notes, passes, seen
        self._search, self._gradients, self._without_laws = search, gradients, without_laws
        # Of the call whose output's gradient came last: how its keys are read.
        self._keys: Optional[tuple[View, int]] = None

    def output_gradient(self, read: Callable[[], tuple[CallRead, list[Tensor]]]) -> None:
        """read  gives the call, its output and the gradient of that; none of them with a reason"""
        notes, passes, seen = self._notes, self._passes, self._seen
        passes.calls += 1
        seen.compiled = True
        self._keys = None
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
        if not call.keys_train:
            notes.add(NO_KEY_GRADIENT)
        elif not call.key_gradients_cancel():
            notes.add(NO_LEAK)
        else:
            self._keys = call.k_view, group
        if self._gradients.arrived(call.unread is None):
            self._without_laws()
            kept = Kept(self._gradients, call, group, compiled=True)
            o, d_o = outputs
            saved = (o, call.q, call.k, call.v, *tensors_of(call).values())
            self._gradients.output_gradient(kept, saved, d_o)

    def _wanted(self) -> bool:
        """Whether anything of this pass is measured; the step before may end by it."""
        count = self._passes.fired_in_step + 1
        if self._passes.only_counted(count):
            return False
        self._passes.begins(count)
        return self._gradients.wants()

    def key_gradient(self, d_k: Callable[[], Tensor]) -> None:
        if self._keys is None:
            return
        view, group = self._keys
        self._gradients.add_keys(lambda: view(d_k()), group)
