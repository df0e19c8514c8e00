"""W_Q and W_K of one attention module under watch: where they are, and when they are measured.

At the optimizer step, behind it; where the weights are sharded, in the backward, the only time at
which they are whole.
"""

from __future__ import annotations

import weakref
from typing import Optional

import torch
from torch import Tensor, nn

from .._kernels.memory import capturing
from .._kernels.probe import Spectrum, Unsupported
from .._util.guard import harmless
from .._weights import locate, split_check
from .._weights.adapters import Unreadable
from .._weights.location import Location
from .._weights.low_rank import Factors
from .hosts import StepHost
from .notes import OTHER_CALL

NO_WEIGHTS = ("", "")  # Paths of a layer that is another call of the same module.
_CHECKS_MAX = 3  # Calls by which the order of the rows is checked, until one tells it.


class LayerWeights:
    """What a Layer knows of its module and the module's weights."""

    def __init__(
        self, host: StepHost, name: str, module: nn.Module, paths: Optional[tuple[str, str]]
    ) -> None:
        self.host = host
        self.name = name
        self.module: weakref.ref[nn.Module] = weakref.ref(module)
        self.module_class = type(module)
        self.paths = paths
        self.notes: dict[str, int] = {}  # Why something was not measured, how often.
        self.heads = self.kv_heads = self.head_dim = 0
        self.location: Optional[Location] = None
        self.wq: Optional[Spectrum] = None
        self.wk: Optional[Spectrum] = None
        # From which module on the location's paths go, and what they begin with.
        self._holder: weakref.ref[nn.Module] = self.module
        self._prefix = ""
        self._places: list[Location] = []  # All that fit, the likeliest first.
        self._listening: Optional[split_check.Listening] = None
        self._checks = 0
        self._checked = False
        self._factors = Factors(), Factors()

    def note(self, reason: str) -> None:
        self.notes[reason] = self.notes.get(reason, 0) + 1

    # ---- where they are ----

    def holder(self) -> Optional[nn.Module]:
        """From which module on the location's paths go."""
        return self._holder()

    def _look_around(self) -> Optional[nn.Module]:
        """Finds the module that holds the weights: the attention, or one around it."""
        module, root = self.module(), self.host.model()
        if module is None:
            return None
        holder, self._prefix = module, ""
        if self.paths is None:
            holder, self._prefix = locate.holder_of(module, self.name, root)
        elif root is not None and not locate.has_all(module, self.paths):
            holder = root
        self._holder = weakref.ref(holder)
        return holder

    def set_layout(self, heads: int, kv_heads: int, dim: int) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim
        if self.paths == NO_WEIGHTS:
            self.note(OTHER_CALL)
            return
        holder = self._look_around()
        if holder is not None:
            self._places = locate.candidates(holder, self._prefix, heads, kv_heads, dim, self.paths)
        if holder is None or not self._places:
            self.note("W_Q and W_K not found: no spectral signals (give weights=)")
            return
        self.location = self._places[0]
        device = locate.device_of(holder, self.location)
        missing = self.host.cannot_measure_on(device.type)
        if missing is not None:
            self.note(f"{missing}: no spectral signals")
            return
        memory = self.host.memories.of(device)
        self.wq = Spectrum(memory, device, heads, self.location.dim)
        self.wk = Spectrum(memory, device, kv_heads, self.location.dim)

    def watch_weights(self) -> None:
        """Watches the weights alone, without ever having seen a call."""
        module, holder = self.module(), self._look_around()
        layout = None
        if module is not None and holder is not None:
            layout = locate.layout_of(module, holder, self._prefix, self.paths)
        if layout is None:
            self.note("W_Q and W_K not found: no spectral signals (give weights=)")
            return
        if not layout.told:
            self.note("the module does not say its heads: W_Q and W_K are taken as one head each")
        self.set_layout(layout.heads, layout.kv_heads, layout.dim)

    # ---- whether their rows are those of the heads ----

    @harmless("forward of an attention module")
    def listen(self) -> None:
        """The module's forward begins."""
        done = self._checked or self._checks >= _CHECKS_MAX
        if done or self._listening is not None or not self.host.samples_step() or capturing():
            return
        module, holder = self.module(), self._look_around()
        if module is None or holder is None:
            return
        paths = locate.projection_paths(holder, self._prefix, self.paths)
        self._listening = split_check.listen(module, holder, paths)

    @harmless("forward of an attention module")
    def heard(self) -> None:
        """It is over."""
        if self._listening is not None:
            self._listening.end()
            self._listening = None

    @harmless("forward of an attention module")
    def check_split(self, q: Tensor, k: Tensor) -> None:
        """At a call: q [batch, heads, tokens, dim] and k, which may have copies of key heads, as
        attention is given them."""
        if self._listening is None or self.location is None:
            return
        place = self.location
        if q.shape[1] != place.heads or k.shape[1] % place.kv_heads:
            return
        self._checks += 1
        with torch.no_grad():
            keys = k[:, :: k.shape[1] // place.kv_heads]
            verdict = split_check.check(self._places, self._listening, q, keys)
        self.heard()
        self._checked = self._checked or verdict.checked
        if verdict.location is None:
            self.note(
                f"the rows of {place.how} are not those of the heads that attention is given: "
                "no spectral signals (give weights=)"
            )
            self._checked, self.location, self.wq, self.wk = True, None, None, None
        elif self.wq is not None and self.wq.samples == 0:
            self.location = verdict.location

    def weights_in_words(self) -> Optional[str]:
        """Where they are, for people."""
        if self.location is None:
            return None
        return self.location.how + ("" if self._checked else ", not checked against q")

    # ---- when they are measured ----

    def measure_weights(self) -> None:
        if self.wq is None or self.wk is None or self.wq.measured:
            return
        if self.host.weights_in_backward():
            return
        self._measure_weights()

    def measure_whole_weights(self) -> None:
        if not self.host.measures("sigma") or self.wq is None or self.wq.measured:
            return
        if self._measure_weights():
            self.note("sharded weights: sigma is that of before the step")

    def _measure_weights(self) -> bool:
        place, holder = self.location, self.holder()
        if place is None or holder is None or self.wq is None or self.wk is None:
            return False
        if not (place.sure or self._checked):
            self.note(
                f"models differ in the order of the rows of {place.how}, and no call has shown "
                "it: no spectral signals (give weights=)"
            )
            return False
        try:
            wq = place.query.spanning(holder, self._factors[0])
            wk = place.key.spanning(holder, self._factors[1])
            if any(w.device != self.wq.device for w in (wq, wk)):
                self.note("the weights moved to another device: no spectral signals")
                return False
            self.wq.measure(wq)
            self.wk.measure(wk)
        except Unreadable as e:
            self.note(f"{e}: no spectral signals")
            return False
        except Unsupported as e:
            self.note(str(e))
            return False
        return True

    def _readable(self) -> Optional[tuple[Location, nn.Module]]:
        holder = self.holder()
        known = self.location is not None and (self.location.sure or self._checked)
        return (self.location, holder) if known and holder is not None else None  # type: ignore[return-value]

    def weight_copies(self) -> Optional[tuple[Tensor, Tensor]]:
        """fp32 copies of W_Q and W_K of one width, for the rank of their change until the next
        sample."""
        where = self._readable()
        views = where[0].views(where[1]) if where is not None else None
        if views is None or any(w.device.type != "cpu" for w in views):
            return None
        width = max(w.shape[2] for w in views)
        wq, wk = (
            nn.functional.pad(w.detach().to(torch.float32, copy=True), (0, width - w.shape[2]))
            for w in views
        )
        return wq.contiguous(), wk.contiguous()

    def head_weights(self, head: int) -> Optional[tuple[Tensor, Tensor]]:
        """[dim, width] of W_Q of a head and of W_K of its key head; None if they cannot be read."""
        where = self._readable()
        if where is None:
            return None
        place, holder = where
        try:
            key = head * place.kv_heads // place.heads
            return place.query.matrix(holder, head), place.key.matrix(holder, key)
        except Unreadable:
            return None
