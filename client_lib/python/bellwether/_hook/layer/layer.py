"""One attention module under watch: what its parts know and do, put together.

passes     how often its calls have gone forward and backward
seen       what is known of these calls: their layout, and where their statistics are added up
weights    W_Q and W_K, and when they are measured; they are found by `search`
taps       are put around each call in the forward; in the backward they tell `gradients`
laws       what the gradients of q, k and v are asked together
compiled   the same for what torch.compile has made of the module
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Optional, cast

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from ..._kernels.memory import capturing
from ..._kernels.probe import Spectrum, Sums
from ..._util.guard import harmless
from ..calls.call import AttentionCall, CallRead, Met
from ..calls.call_sites import MORE, SITES_MAX, Forward
from ..hosts import StepHost
from ..model.candidates import is_attention
from ..running import apart, checkpointed
from .call_taps import CallTaps, TappedCall
from .compiled_backward import CompiledBackward
from .gradients import Gradients
from .law_calls import LawCalls
from .notes import Notes
from .passes import Passes
from .seen_calls import SeenCalls
from .taps import InputTap, apply_tap, same_place
from .weight_search import NO_WEIGHTS, WeightSearch
from .weights import Weights


class Layer:
    """One attention module of a monitored model."""

    def __init__(
        self, host: StepHost, name: str, module: nn.Module, watched: bool,
        paths: Optional[tuple[str, str]],
    ) -> None:  # fmt: skip
        """paths  of W_Q and W_K, where somebody has told them"""
        self.host, self.name, self.watched = host, name, watched
        self.module: weakref.ref[nn.Module] = weakref.ref(module)
        self.module_class = type(module)
        self.index = -1  # Set once it is known which modules really call.
        self.heads = self.kv_heads = self.head_dim = 0
        self.notes = notes = Notes()
        self.passes = Passes(host, notes)
        self.weights = Weights(host, notes)
        self.search = WeightSearch(
            host, notes, name, self.module, paths, self.weights, self._search_of
        )
        self.seen = SeenCalls(host, notes, self.module, self._laid_out, self.search.check)
        laws = LawCalls(host, self.seen)
        self.gradients = Gradients(
            host, notes, self.passes, self.seen, laws, self.weights.measure_whole
        )
        self.taps = CallTaps(host, notes, self.seen, laws, self.gradients, watched)
        self.compiled = CompiledBackward(
            notes, self.passes, self.seen, self.search, self.gradients, laws
        )
        self._sites: list[Layer] = []  # Of the other calls that one forward makes.
        self._quiet = False  # The forward that runs is counted, and its calls are not seen.
        self._looks_closer = False  # They are, though the step is not sampled.

    def __deepcopy__(self, memo: Any) -> Layer:
        return self  # There is one per module.

    # ---- what it is ----

    @property
    def calls(self) -> int:
        """Of attention, with gradients on."""
        return self.passes.calls

    @property
    def fired(self) -> int:
        """Backward passes through its calls."""
        return self.passes.fired

    @property
    def sums(self) -> Optional[Sums]:
        """Where the statistics of its calls are added up."""
        return self.seen.sums

    @property
    def laws(self) -> LawCalls:
        return self.gradients.laws

    @property
    def wq(self) -> Optional[Spectrum]:
        """Of W_Q, where it was found."""
        return self.weights.wq

    @property
    def wk(self) -> Optional[Spectrum]:
        return self.weights.wk

    def note(self, reason: str) -> None:
        self.notes.add(reason)

    def begin_step(self) -> None:
        self.passes.begin_step()
        self.laws.begin_step()

    def step_again(self) -> None:
        """The running step begins anew."""
        self.passes.step_again()
        self.laws.begin_step()

    def number(self, index: int) -> None:
        """Its place among the layers that report, from 0."""
        self.index = self.gradients.index = self.laws.index = index

    def watch_weights(self) -> None:
        """Watches the weights alone, without ever having seen a call."""
        layout = self.search.layout()
        if layout is not None:
            self._laid_out(*layout)

    def _laid_out(self, heads: int, kv_heads: int, dim: int, v_dim: int = 0) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim
        self.search.begin(heads, kv_heads, dim, v_dim)

    def _search_of(self, module: nn.Module) -> Optional[WeightSearch]:
        other = self.host.layer_of(module)
        return other.search if isinstance(other, Layer) else None

    def unsure_projections(
        self, heads: int, kv_heads: int, dim: int, v_dim: int
    ) -> dict[str, nn.Module]:
        return self.search.unsure_projections(heads, kv_heads, dim, v_dim)

    def is_attention(self) -> bool:
        """Whether it is more than called like one."""
        module = self.module()
        if self.calls > 0 or module is None:
            return True
        return not self.search.lends and is_attention(module)

    def unmeasured(self) -> bool:
        """Whether it is attention that is trained, given that it reports nothing."""
        module = self.module()
        if not self.watched or module is None or not self.is_attention():
            return False
        return self._trains() or (self.calls > 0 and next(module.parameters(), None) is None)

    def _trains(self) -> bool:
        module = self.module()
        return module is not None and any(p.requires_grad for p in module.parameters())

    def unused(self) -> str:
        """How this job does not train it, in words; "" if it does, or if that cannot be seen."""
        module = self.module()
        if module is None or self.calls > 0 or self.passes.ran:
            return ""
        never = self.passes.ran is None
        if never and ("forward" in vars(module) or isinstance(module, ScriptModule)):
            return ""  # Its forward may run and not come by.
        return "its forward never ran" if never else "it runs without gradients only"

    # ---- the forward of its module ----

    def runs(self) -> None:
        self.passes.module_runs(torch.is_grad_enabled())

    def expects(self) -> bool:
        # A recomputation must find the taps exactly if the forward had them, whatever has
        # happened since: in a checkpointed region they are always there, even if we are off.
        if checkpointed():
            return True
        if not self.host.live():
            return False
        # Without a graph it may be a reentrant checkpoint's: its recomputation will be seen.
        if not torch.is_grad_enabled() or capturing():
            return True
        self.host.forward_begins()
        self._quiet = self._only_counts(False)
        return not self._quiet

    def look_closer(self) -> None:
        self._quiet, self._looks_closer = False, True

    @harmless("forward of an attention module")
    def listen(self) -> None:
        if not torch.is_grad_enabled():
            return
        self.weights.forward_begins()
        if self.host.samples_step() and not capturing():
            self.search.listen()

    @harmless("forward of an attention module")
    def heard(self) -> None:
        self.search.heard()
        self.weights.forward_ends()
        if self._quiet:
            self.passes.forward()
        self._quiet = self._looks_closer = False

    @harmless("end of the watching")
    def ends(self) -> None:
        self.search.ends()

    def _only_counts(self, centred: bool) -> bool:
        """Whether a call of the forward that runs is not read: what a call is was read before, and
        is read again in the next step that is sampled."""
        if self.seen.heads == 0 or centred != self.seen.centred or self._looks_closer:
            return False
        return self.passes.only_counted(self.passes.forwards())

    # ---- a call in it ----

    def attention(
        self, read: Callable[[], CallRead], bare: Callable[[], Any], forward: Optional[Forward],
        centred: bool = False,
    ) -> Any:  # fmt: skip
        tapped = self._before(read, forward, centred)
        return bare() if tapped is None else tapped.run()

    def begin(self, read: Callable[[], CallRead], forward: Optional[Forward]) -> Optional[Met]:
        tapped = self._before(read, forward, False)
        return None if tapped is None else (tapped.inputs(), tapped.output)

    @harmless("forward of the attention", lambda self, q, k: (q, k, []))
    def tap_early(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, list[Any]]:
        """Perhaps queries and keys of a call that is not known yet, behind taps; and
        AttentionCall.tapped of that call."""
        calls: list[Any] = []
        if not (torch.is_grad_enabled() and k.requires_grad) or type(k) is not Tensor:
            return q, k, calls
        if same_place(q, k):
            return q, k, calls
        if not (self.watched and (self.host.live() or checkpointed())):
            return q, k, calls
        with apart():
            queries = q.requires_grad and type(q) is Tensor and self.host.measures("laws")
            tapped = cast(Tensor, apply_tap(InputTap, q, calls, "q")) if queries else q
            return tapped, cast(Tensor, apply_tap(InputTap, k, calls, "k")), calls

    @harmless("forward of the attention")
    def meet(self, read: Callable[[], CallRead]) -> None:
        if not self.host.live():
            return
        with apart():
            if torch.is_grad_enabled():
                self.host.forward_begins()
                self.passes.forward()
            elif not self._trains():
                return
            call = read()
            if isinstance(call, AttentionCall) and self.seen.readable(call.q, call.k, call.v):
                self.seen.observe(call)

    def _untapped(
        self, read: Callable[[], CallRead], forward: Optional[Forward], centred: bool
    ) -> Optional[TappedCall]:
        """After an error."""
        try:
            return self.taps.inert(read())
        except Exception:
            return None

    @harmless("forward of the attention", _untapped)
    def _before(
        self, read: Callable[[], CallRead], forward: Optional[Forward], centred: bool
    ) -> Optional[TappedCall]:
        """The call between its taps; None if there is nothing to measure."""
        host = self.host
        # Taps are also in a CUDA graph, which runs in steps that are not known yet.
        in_graph = capturing()
        self.seen.graphed = self.seen.graphed or in_graph
        always = checkpointed() or (host.live() and in_graph)
        if not host.live() and not always:
            return None
        start = time.perf_counter()
        with apart():
            tapped = self._prepare(read, forward, always, centred)
        host.hook_seconds += time.perf_counter() - start
        return tapped

    def _prepare(
        self, read: Callable[[], CallRead], forward: Optional[Forward], always: bool, centred: bool
    ) -> Optional[TappedCall]:
        if not torch.is_grad_enabled():
            return None
        self.host.forward_begins()
        if not always and self._only_counts(centred):
            self.passes.forward()
            return None
        call = read()
        layer = self._at_site(call, forward)
        if layer is None:
            return None
        layer.passes.forward()
        tapped = layer.taps.around(call, always, centred)
        if tapped is not None and isinstance(call, AttentionCall):
            layer.search.look_for_parameters(call.q, call.k)
        return tapped

    def _at_site(self, call: CallRead, forward: Optional[Forward]) -> Optional[Layer]:
        """This layer for the first attention of a forward, others for the next ones."""
        if forward is None or not isinstance(call, AttentionCall) or type(call.q) is not Tensor:
            return self
        site = self._site(forward.site(call.q))
        if site is not None and site is not self:
            site.search.listen_with(self.search)
        return site

    def _site(self, number: int) -> Optional[Layer]:
        """The layer of one call of a forward, counted from 0."""
        while len(self._sites) < number:
            module = self.module()
            if module is None or self.host.numbered() or number >= SITES_MAX:
                self.note(MORE)
                return None
            behind = self._sites[-1] if self._sites else self
            name = f"{self.name} (call {len(self._sites) + 2})".strip()
            layer = Layer(self.host, name, module, self.watched, NO_WEIGHTS)
            self.host.add_layer(layer, lambda other, _, behind=behind: other is behind)  # type: ignore[misc]
            self._sites.append(layer)
        return self._sites[number - 1] if number else self

    # ---- the backward of a compiled forward ----

    @harmless("backward of a compiled attention")
    def compiled_backward(
        self, read: Callable[[], tuple[CallRead, list[Tensor]]], site: int, at_once: bool
    ) -> None:
        if not self.watched or not self.host.live():
            return
        self.host.backward_begins()
        layer = self._site(site)
        if layer is not None:
            layer.compiled.output_gradient(read, at_once)

    @harmless("backward of a compiled attention")
    def compiled_gradients(
        self, read: Callable[[], dict[str, Tensor]], lost: str, site: int
    ) -> None:
        layer = self if site == 0 else self._sites[site - 1] if site <= len(self._sites) else None
        if layer is not None:
            layer.compiled.input_gradients(read, lost)
