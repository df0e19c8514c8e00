"""W_Q and W_K of one attention module under watch: where they are, and when they are measured.

At the optimizer step, behind it; where the weights are sharded, in the backward, the only time at
which they are whole.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._kernels.memory import capturing
from ..._kernels.probe import Spectrum, Unsupported
from ..._util.guard import harmless
from ..._weights import locate, split_check
from ..._weights.adapters import NotWhole, Unreadable
from ..._weights.location import Location
from ..._weights.low_rank import Factors
from ..._weights.parametrized import of_parameters
from ..._weights.projection import resolve
from ..hosts import StepHost
from .notes import NO_PROJECTION, OTHER_CALL

NO_WEIGHTS = ("", "")  # Paths of a layer that is another call of the same module.
_NOT_FOUND = "W_Q and W_K not found: no spectral signals (give weights=)"
_CHECKS_MAX = 3  # Forwards in which the order of the rows is checked, until one tells it.
_CHECKED = 1 << 30  # One has.


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
        self.lends = False  # Its projections are those of an attention elsewhere.
        self._factors = Factors(), Factors()
        # Whole for their own forward only: hooks on them, once that is known.
        self._in_forward: Optional[list[Any]] = None

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
        elif self.paths == NO_WEIGHTS:  # By what is heard alone.
            pass
        elif root is not None and not locate.has_all(module, self.paths):
            holder = root
        self._holder = weakref.ref(holder)
        return holder

    def set_layout(self, heads: int, kv_heads: int, dim: int, v_dim: int = 0) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim
        holder = self._look_around()
        if holder is None:
            return
        if self.paths != NO_WEIGHTS:
            self._places = locate.candidates(
                holder, self._prefix, heads, kv_heads, dim, self.paths, v_dim
            )
        if self._places:
            self._place(self._places[0], holder)
        elif not self._listens():  # Else what is heard may tell.
            self._not_found()

    def _not_found(self) -> None:
        if NO_PROJECTION in self.notes:
            return
        other = self.paths == NO_WEIGHTS
        self.note(OTHER_CALL if other else _NOT_FOUND)

    def look_for_parameters(self, q: Tensor, k: Tensor) -> None:
        """Whether the weights were not found since there are none."""
        if self.location is None and (of_parameters(q) or of_parameters(k)):
            self.notes.pop(_NOT_FOUND, None)
            self.note(NO_PROJECTION)

    def _listens(self) -> bool:
        return self._listening is not None and self._listening.active

    @property
    def _checked(self) -> bool:
        return self._checks >= _CHECKED

    def _lenders(self, place: Location, holder: nn.Module) -> list[LayerWeights]:
        """Candidates whose projections these are, since they lie beside the attention."""
        found: list[LayerWeights] = []
        for path in dict.fromkeys((place.query.path, place.key.path)):
            owner = path.removesuffix(".weight").rpartition(".")[0]
            other = self.host.layer_of(holder.get_submodule(owner)) if owner else None
            if isinstance(other, LayerWeights) and other is not self:
                found.append(other)
        return found

    def _place(self, place: Location, holder: nn.Module) -> None:
        self.location = place
        for other in self._lenders(place, holder):
            other.lends = True
        device = locate.device_of(holder, place)
        missing = self.host.cannot_measure_on(device.type)
        if missing is not None:
            self.note(f"{missing}: no spectral signals")
            return
        memory = self.host.memories.of(device)
        self.wq = Spectrum(memory, device, place.heads, place.dim)
        self.wk = Spectrum(memory, device, place.kv_heads, place.dim)

    def watch_weights(self) -> None:
        """Watches the weights alone, without ever having seen a call."""
        module, holder = self.module(), self._look_around()
        layout = None
        if module is not None and holder is not None:
            layout = locate.layout_of(module, holder, self._prefix, self.paths)
        if layout is None:
            self._not_found()
            return
        if not layout.told:
            self.note("the module does not say its heads: W_Q and W_K are taken as one head each")
        self.set_layout(layout.heads, layout.kv_heads, layout.dim)

    # ---- whether their rows are those of the heads ----

    @harmless("forward of an attention module")
    def listen(self) -> None:
        """The module's forward begins."""
        if not torch.is_grad_enabled():
            return
        if self._in_forward is not None:
            self.host.forward_begins()  # Before a weight is measured for the step before.
        if not self.host.samples_step() or capturing():
            return
        if self._in_forward is not None:
            self._wait_for_projections()
        if self._listens() or self._checks >= _CHECKS_MAX:
            return
        self._checks += 1
        module, holder = self.module(), self._look_around()
        if module is None or holder is None:
            return
        if self._listening is not None:
            self._listening.close()
        paths, around = self._projection_paths(holder), locate.around(self.name, self.host.model())
        self._listening = split_check.listen(module, holder, paths, around)

    def _projection_paths(self, holder: nn.Module) -> list[str]:
        """Of all that q and k may come from."""
        paths = locate.projection_paths(holder, self._prefix, self.paths)
        others = locate.matrices_in(holder) if self.paths is None else []
        return paths + [path for path in others if path not in paths]

    def unsure_projections(self, heads: int, kv_heads: int, dim: int) -> dict[str, nn.Module]:
        """By their paths, those whose rows a call can show; none where each has its own."""
        holder = self._look_around()
        if holder is None or self._checked or self.paths == NO_WEIGHTS:
            return {}
        places = locate.candidates(holder, self._prefix, heads, kv_heads, dim, self.paths)
        if places and places[0].sure and places[0].query.path != places[0].key.path:
            return {}
        return split_check.modules_of(holder, self._projection_paths(holder))

    def listen_with(self, other: LayerWeights) -> None:
        """To the same forward."""
        self._listening = None if self._checked else other._listening

    @harmless("forward of an attention module")
    def heard(self) -> None:
        """It is over."""
        if self._listening is not None:
            self._listening.end()
        for hook in self._in_forward or ():
            hook.remove()

    @harmless("end of the watching")
    def ends(self) -> None:
        """Nothing of the module is heard any more."""
        if self._listening is not None:
            self._listening.close()

    @harmless("forward of an attention module")
    def check_split(self, q: Tensor, k: Tensor) -> None:
        """At a call: q [batch, heads, tokens, dim] and k, which may have copies of key heads, as
        attention is given them."""
        place, heard, holder = self.location, self._listening, self.holder()
        if holder is None or self._checked:
            return
        lenders = self._lenders(place, holder) if place is not None else []
        if lenders and heard is None:  # In its first forward the module is not known yet.
            heard = split_check.Listening({}, {})
        if heard is None or not heard.active:
            return
        for other in lenders:
            for rows in (place.query, place.key) if place is not None else ():
                if other._listening is not None:
                    heard.take(holder, rows.path, other._listening)
        with torch.no_grad():
            self._check_by(split_check.evidence(heard, q, k), holder)

    def check_by(self, shown: Optional[split_check.Evidence]) -> None:
        """The same by what was found while the call was traced."""
        holder = self.holder()
        if shown is not None and holder is not None and not self._checked:
            self._check_by(shown, holder)

    def _check_by(self, shown: split_check.Evidence, holder: nn.Module) -> None:
        place = self.location
        if place is None:
            self._search(shown, holder)
            return
        if shown.heads != place.heads or shown.key_heads % place.kv_heads:
            return
        verdict = split_check.check(self._places, shown, place.kv_heads)
        if verdict.checked:
            self._checks = _CHECKED
        if verdict.location is None:
            self.note(
                f"the rows of {place.how} are not those of the heads that attention is given: "
                "no spectral signals (give weights=)"
            )
            self._checks, self.location, self.wq, self.wk = _CHECKED, None, None, None
        elif self.wq is not None and self.wq.samples == 0:
            self.location = verdict.location

    def _search(self, shown: split_check.Evidence, holder: nn.Module) -> None:
        """Without a name that is known: by what the module's matrices return."""
        place = split_check.search(shown, self.kv_heads)
        if place is None:
            self._not_found()
            return
        self._checks = _CHECKED
        for told in (_NOT_FOUND, OTHER_CALL):  # Of a call before this one.
            self.notes.pop(told, None)
        self._place(place, holder)

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
        try:
            self._measure_weights()
        except NotWhole as e:
            self.note(f"{e}: no spectral signals")

    def measure_whole_weights(self) -> None:
        """In the backward, where weights are whole for a time."""
        if not self.host.measures("sigma") or self.wq is None or self.wk is None:
            return
        if self.wq.measured and self.wk.measured:
            return
        try:
            self._measure_sharded()
        except NotWhole as e:  # From the next sample on they are looked for in the forward.
            if self._in_forward is not None:
                self.note(f"{e}: no spectral signals")
            self._in_forward = self._in_forward or []

    def _measure_sharded(self) -> None:
        if self._measure_weights():
            self.note("sharded weights: sigma is that of before the step")

    @harmless("forward of a projection")
    def _projected(self, *_: Any) -> None:
        """A projection has run, and its weight is not given back yet."""
        with contextlib.suppress(NotWhole):  # The other one's, which runs later.
            self._measure_sharded()

    def _wait_for_projections(self) -> None:
        place, holder = self.location, self.holder()
        self._in_forward = []
        if place is None or holder is None:
            return
        for path in dict.fromkeys((place.query.path, place.key.path)):
            module = resolve(holder, path)
            if isinstance(module, nn.Module):
                hook = module.register_forward_hook(self._projected, prepend=True)
                self._in_forward.append(hook)

    def _measure_weights(self) -> bool:
        """Of W_Q and W_K what is not measured yet.  Raises NotWhole if one is elsewhere."""
        place, holder = self.location, self.holder()
        if place is None or holder is None or self.wq is None or self.wk is None:
            return False
        if not (place.sure or self._checked):
            self.note(
                f"models differ in the order of the rows of {place.how}, and no call has shown "
                "it: no spectral signals (give weights=)"
            )
            return False
        missing: Optional[NotWhole] = None
        try:
            for spectrum, rows, factors in zip(
                (self.wq, self.wk), (place.query, place.key), self._factors
            ):
                if spectrum.measured:
                    continue
                try:
                    weight = rows.spanning(holder, factors)
                except NotWhole as e:  # The other one may be.
                    missing = e
                    continue
                if weight.device != spectrum.device:
                    self.note("the weights moved to another device: no spectral signals")
                    return False
                spectrum.measure(weight)
            if missing is not None:
                raise missing
        except NotWhole:
            raise
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
