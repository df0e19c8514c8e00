"""W_Q and W_K of one attention module: their spectral norms, and when they are measured.

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
from ..._kernels.probe import Spectra, Spectrum
from ..._util.guard import harmless
from ..._weights import locate
from ..._weights.adapters import NotWhole, Unreadable
from ..._weights.location import Location
from ..._weights.low_rank import Factors
from ..._weights.projection import resolve
from ..hosts import WeightsHost
from .notes import Notes


class Weights:
    """Of one layer, once they are found (weight_search.py)."""

    def __init__(self, host: WeightsHost, notes: Notes) -> None:
        self.host, self._notes = host, notes
        self.location: Optional[Location] = None
        self.checked = False  # A call has shown that their rows are those of the heads.
        self.wq: Optional[Spectrum] = None
        self.wk: Optional[Spectrum] = None
        self._holder: Optional[weakref.ref[nn.Module]] = None
        self._factors = Factors(), Factors()
        # Whole for their own forward only: hooks on them, once that is known.
        self._in_forward: Optional[list[Any]] = None

    def __deepcopy__(self, memo: Any) -> Weights:
        return self  # A hook of ours on a projection, which somebody copies.

    # ---- where they are ----

    def place(self, location: Location, holder: nn.Module) -> None:
        """From now on they are these; `location` has paths from `holder` on."""
        self.location, self._holder = location, weakref.ref(holder)
        device = locate.device_of(holder, location)
        missing = self.host.cannot_measure_on(device.type)
        if missing is not None:
            self._notes.add(f"{missing}: no spectral signals")
            return
        memory = self.host.memories.of(device)
        self.wq = Spectrum(memory, device, location.heads, location.dim)
        self.wk = Spectrum(memory, device, location.kv_heads, location.dim)

    def correct(self, location: Location) -> None:
        """Their rows lie in another order, if nothing was measured in the wrong one."""
        if self.wq is not None and self.wq.samples == 0:
            self.location = location

    def give_up(self) -> None:
        self.location, self.wq, self.wk = None, None, None

    def found(self) -> Optional[tuple[nn.Module, Location]]:
        """Where they are, and the module from which on the location's paths go; None if they were
        not found, or are gone."""
        holder = self._holder() if self._holder is not None else None
        return None if holder is None or self.location is None else (holder, self.location)

    def in_words(self) -> Optional[str]:
        """Where they are, for people."""
        if self.location is None:
            return None
        return self.location.how + ("" if self.checked else ", not checked against q")

    # ---- when they are measured ----

    def measure(self, together: Spectra) -> None:
        """Behind the optimizer's step."""
        if self.wq is None or self.wk is None or self.wq.measured:
            return
        if self.host.weights_in_backward():
            return
        try:
            self._measure(together)
        except NotWhole as e:
            self._notes.add(f"{e}: no spectral signals")

    def measure_whole(self) -> None:
        """In the backward, where weights are whole for a time."""
        if not self.host.measures("sigma") or self.wq is None or self.wk is None:
            return
        if self.wq.measured and self.wk.measured:
            return
        try:
            self._measure_sharded()
        except NotWhole as e:  # From the next sample on they are looked for in the forward.
            if self._in_forward is not None:
                self._notes.add(f"{e}: no spectral signals")
            self._in_forward = self._in_forward or []

    def forward_begins(self) -> None:
        """The module's; with gradients on."""
        if self._in_forward is None:
            return
        self.host.forward_begins()  # Before a weight is measured for the step before.
        if self.host.samples_step() and not capturing():
            self._wait_for_projections()

    def forward_ends(self) -> None:
        for hook in self._in_forward or ():
            hook.remove()

    def _measure_sharded(self) -> None:
        together = Spectra()
        try:
            if self._measure(together):
                self._notes.add("sharded weights: sigma is that of before the step")
        finally:  # One of them, if the other is elsewhere.
            together.measure()

    @harmless("forward of a projection")
    def _projected(self, *_: Any) -> None:
        """A projection has run, and its weight is not given back yet."""
        with contextlib.suppress(NotWhole):  # The other one's, which runs later.
            self._measure_sharded()

    def _wait_for_projections(self) -> None:
        found = self.found()
        self._in_forward = []
        if found is None:
            return
        holder, place = found
        for path in dict.fromkeys((place.query.path, place.key.path)):
            module = resolve(holder, path)
            if isinstance(module, nn.Module):
                hook = module.register_forward_hook(self._projected, prepend=True)
                self._in_forward.append(hook)

    def _measure(self, together: Spectra) -> bool:
        """Of W_Q and W_K what is not measured yet.  Raises NotWhole if one is elsewhere."""
        found = self.found()
        if found is None or self.wq is None or self.wk is None:
            return False
        holder, place = found
        if not (place.sure or self.checked):
            self._notes.add(
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
                    self._notes.add("the weights moved to another device: no spectral signals")
                    return False
                together.add(spectrum, weight, self._notes.add)
            if missing is not None:
                raise missing
        except NotWhole:
            raise
        except Unreadable as e:
            self._notes.add(f"{e}: no spectral signals")
            return False
        return True

    # ---- the matrices themselves ----

    def _readable(self) -> Optional[tuple[nn.Module, Location]]:
        found = self.found()
        return found if found is not None and (found[1].sure or self.checked) else None

    def copies(self) -> Optional[tuple[Tensor, Tensor]]:
        """fp32 copies of W_Q and W_K of one width, for the rank of their change until the next
        sample."""
        if self.wq is None or self.wq.device.type != "cpu":
            return None
        where = self._readable()
        views = where[1].views(where[0]) if where is not None else None
        if views is None or any(w.device.type != "cpu" for w in views):
            return None
        width = max(w.shape[2] for w in views)
        wq, wk = (
            nn.functional.pad(w.detach().to(torch.float32, copy=True), (0, width - w.shape[2]))
            for w in views
        )
        return wq.contiguous(), wk.contiguous()

    def of_head(self, head: int) -> Optional[tuple[Tensor, Tensor]]:
        """[dim, width] of W_Q of a head and of W_K of its key head; None if they cannot be read."""
        where = self._readable()
        if where is None:
            return None
        holder, place = where
        try:
            key = head * place.kv_heads // place.heads
            return place.query.matrix(holder, head), place.key.matrix(holder, key)
        except Unreadable:
            return None
