"""One attention layer under watch: its forward, in which the taps are put around the call
(taps.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional, Union, cast

import torch
from torch import Tensor, nn

from ..._kernels.memory import capturing
from ..._util.guard import harmless, in_words
from ..calls.call import AttentionCall
from ..calls.call_sites import MORE, SITES_MAX, Forward
from ..hosts import StepHost
from ..running import checkpoint_inside, checkpointed, host_reads_back
from .kept import Kept, tensors_of
from .layer_backward import LayerBackward
from .layer_weights import NO_WEIGHTS
from .notes import FROZEN, NO_KEY_GRADIENT, NO_LEAK, TRANSFORMED
from .taps import (
    CHECKPOINTS,
    KeyTap,
    Tapped,
    apply_tap,
    as_cast,
    behind_tap,
    output_tap,
    same_place,
)


def _apart() -> AbstractContextManager[Any]:
    """In it our own calls of torch are none of those that a mode of the host sees."""
    if torch._C._len_torch_function_stack() > 0:
        return torch._C.DisableTorchFunction()
    return nullcontext()


class Layer(LayerBackward):
    """One attention module of a monitored model."""

    def __init__(
        self,
        host: StepHost,
        name: str,
        module: nn.Module,
        watched: bool,
        paths: Optional[tuple[str, str]],
    ) -> None:
        super().__init__(host, name, module, watched, paths)
        self._sites: list[Layer] = []  # Of the other calls that one forward makes.
        self._quiet = False  # The forward that runs is counted, and its calls are not seen.
        self._looks_closer = False  # They are, though the step is not sampled.

    # ---- forward ----

    def expects(self) -> bool:
        """Whether the calls of the module, whose forward begins, are to be seen."""
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
        self._quiet = self._passes_by(False, self._forwards())
        return not self._quiet

    def look_closer(self) -> None:
        self._quiet, self._looks_closer = False, True

    @harmless("forward of an attention module")
    def heard(self) -> None:
        super().heard()
        if self._quiet:
            self._count()
        self._quiet = self._looks_closer = False

    def _passes_by(self, centred: bool, count: int) -> bool:
        """Whether a call is only counted: its step is not sampled, and what a call is was read
        and is read again in the next step that is.  count  the pass that it is, of this step"""
        host = self.host
        if self.heads == 0 or centred != self.centred or not host.numbered():
            return False
        if host.samples_step() or self._looks_closer:
            return False
        self._pass_begins(count)  # The step before may end by it.
        return not host.samples_step()

    def attention(
        self,
        read: Callable[[], Union[AttentionCall, str, None]],
        bare: Callable[[], Any],
        forward: Optional[Forward],
        centred: bool = False,
    ) -> Any:
        """Makes the call between the taps; by itself, as `bare` does, if there is nothing to
        measure.  `centred`: the keys were centred by a switch (attention_switch.py)."""
        tapped = self._before(read, forward, centred)
        if tapped is None:
            return bare()
        call, kept, _ = tapped
        return kept.layer._after(call.run(*behind_tap(tapped)), call, kept)

    def begin(
        self,
        read: Callable[[], Union[AttentionCall, str, None]],
        forward: Optional[Forward],
    ) -> Optional[tuple[tuple[Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]]]:
        """The same in two parts, for a function that is met where it has q, k and v, and where it
        has its output: (q, k and v for it, what the output passes through)."""
        tapped = self._before(read, forward, False)
        if tapped is None:
            return None
        call, kept, _ = tapped
        return behind_tap(tapped), lambda o: cast(Tensor, kept.layer._after(o, call, kept))

    @harmless("forward of the attention")
    def meet(self, read: Callable[[], Union[AttentionCall, str, None]]) -> None:
        """Takes notice of a call that is made without taps."""
        if not self.host.live():
            return
        with _apart():
            if torch.is_grad_enabled():
                self.host.forward_begins()
                self._count()
            elif not self._trains():
                return
            call = read()
            if isinstance(call, AttentionCall) and self._plain(call.q, call.k, call.v):
                self._observe(call)

    def _untapped(
        self,
        read: Callable[[], Union[AttentionCall, str, None]],
        forward: Optional[Forward],
        centred: bool,
    ) -> Optional[Tapped]:
        """After an error: taps that measure nothing, where a recomputation may look for them."""
        try:
            return self._inert(read())
        except Exception:
            return None

    def _inert(self, call: Union[AttentionCall, str, None]) -> Optional[Tapped]:
        if not isinstance(call, AttentionCall):
            return None
        plain = all(type(t) in (Tensor, nn.Parameter) for t in (call.q, call.k, call.v))
        if not plain or not torch.is_grad_enabled() or not checkpointed():
            return None
        call = as_cast(call)
        call.unread, call.dropout = "an error", 0.0
        return call, Kept(self, call, 1), call.k

    @harmless("forward of the attention", _untapped)
    def _before(
        self,
        read: Callable[[], Union[AttentionCall, str, None]],
        forward: Optional[Forward],
        centred: bool,
    ) -> Optional[Tapped]:
        """The call and its keys behind their tap; None if there is nothing to measure."""
        host = self.host
        # Taps are also in a CUDA graph, which runs in steps that are not known yet.
        in_graph = capturing()
        self.graphed = self.graphed or in_graph
        always = checkpointed() or (host.live() and in_graph)
        if not host.live() and not always:
            return None
        start = time.perf_counter()
        with _apart():
            tapped = self._prepare(read, forward, always, centred)
        host.hook_seconds += time.perf_counter() - start
        return tapped

    def _still_tapped(self, result: Any, call: AttentionCall, kept: Kept) -> Any:
        """After an error: what a recomputation will look for."""
        output = call.output(result)
        if type(output) is not Tensor or not checkpointed():
            return result
        try:
            return call.with_output(result, output_tap(call, kept, output))
        except CHECKPOINTS:
            raise
        except Exception:
            return result

    @harmless("forward of the attention", _still_tapped, passes=CHECKPOINTS)
    def _after(self, result: Any, call: AttentionCall, kept: Kept) -> Any:
        output = call.output(result)
        if type(output) is not Tensor:
            self.note(f"{type(output).__name__} as the output: not measured")
            return result
        start = time.perf_counter()
        try:
            with _apart():
                tapped = output_tap(call, kept, output)
        except Exception as e:
            if isinstance(e, CHECKPOINTS) or not checkpointed():
                raise
            self.note(f"a hook on saved tensors fails ({in_words(e)}): not measured")
            return result
        self.host.hook_seconds += time.perf_counter() - start
        return call.with_output(result, tapped)

    def _prepare(
        self,
        read: Callable[[], Union[AttentionCall, str, None]],
        forward: Optional[Forward],
        always: bool,
        centred: bool,
    ) -> Optional[Tapped]:
        if not torch.is_grad_enabled():
            return None
        self.host.forward_begins()
        if not always and self._passes_by(centred, self._forwards()):
            self._count()
            return None
        call = read()
        layer = self._at_site(call, forward)
        return None if layer is None else layer._prepare_call(call, always, centred)

    def _at_site(
        self, call: Union[AttentionCall, str, None], forward: Optional[Forward]
    ) -> Optional[Layer]:
        """This layer for the first attention of a forward, others for the next ones."""
        if forward is None or not isinstance(call, AttentionCall) or type(call.q) is not Tensor:
            return self
        site = self._site(forward.site(call.q))
        if site is not None and site is not self:
            site.listen_with(self)
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

    def _prepare_call(
        self, call: Union[AttentionCall, str, None], always: bool, centred: bool
    ) -> Optional[Tapped]:
        host = self.host
        self._count()
        if isinstance(call, str):  # What is transformed has other dimensions, too.
            self.note(TRANSFORMED if torch._C._are_functorch_transforms_active() else call)
        if not isinstance(call, AttentionCall) or not self._plain(call.q, call.k, call.v):
            return None
        q, k, v = call.q, call.k, call.v
        if checkpoint_inside():
            self.note("checkpoint() inside the attention module: not measured")
            return None
        centred = centred or (k.grad_fn is not None and "center_keys" in k.grad_fn.name())
        if centred != self.centred:
            self.centred = centred
            host.centring_changed()
        if not (q.requires_grad or k.requires_grad or v.requires_grad):
            self.note(FROZEN)
            return None
        if not (host.samples_step() or always) or not self.watched:
            self._observe(call)
            return None
        if call.cast is not None:
            cached = torch.is_autocast_cache_enabled()
            if cached and any(t.is_leaf and t.requires_grad for t in (q, k, v)):
                # It casts a parameter once for all calls, and adds up the gradients in 16 bits.
                self.note("a parameter as q, k or v under autocast: not measured")
                return None
            call = as_cast(call)
        group = self._observe(call)
        if group is None:
            return None
        self._note_call(call)
        self.look_for_parameters(q, k)
        kept = Kept(self, call, group, host_reads_back())
        return call, kept, self._key_tap(call, kept)

    def _key_tap(self, call: AttentionCall, kept: Kept) -> Tensor:
        """The keys, behind their tap if there is a leak to measure."""
        k = call.k
        if not k.requires_grad:
            self.note(NO_KEY_GRADIENT)
        elif not call.packed and (same_place(k, call.q) or same_place(k, call.v)):
            self.note("the keys are the queries or the values: their gradient is not apart")
        elif call.softcap or call.sinks is not None or not call.cancels:
            self.note(NO_LEAK)
        elif self.host.measures("leak"):
            return cast(Tensor, apply_tap(KeyTap, k, kept))
        return k

    # ---- backward of a compiled forward ----

    @harmless("backward of a compiled attention")
    def compiled_backward(
        self, read: Callable[[], Union[AttentionCall, str, None]], o: Tensor, d_o: Tensor, site: int
    ) -> None:
        """The same for a module that was compiled: the first that is heard of its forward."""
        if not self.watched or not self.host.live():
            return
        self.host.backward_begins()
        layer = self._site(site)
        if layer is not None:
            layer._compiled_backward(read, o, d_o)

    def _compiled_backward(
        self, read: Callable[[], Union[AttentionCall, str, None]], o: Tensor, d_o: Tensor
    ) -> None:
        self.calls += 1
        self.compiled = True
        self._compiled_keys = None
        if not capturing() and self._passes_by(self.centred, self.fired_in_step + 1):
            self._heard(False)
            return
        with torch.no_grad():
            call = read()
        if isinstance(call, str):
            self.note(call)
        group = None
        if isinstance(call, AttentionCall) and self._plain(call.q, call.k, call.v):
            group = self._observe(call)
        if not isinstance(call, AttentionCall) or group is None:
            self._heard(False)
            return
        self.check_by(call.shown)
        self._note_call(call)
        if not call.keys_train:
            self.note(NO_KEY_GRADIENT)
        elif call.softcap or call.sinks is not None or not call.cancels:
            self.note(NO_LEAK)
        else:
            self._compiled_keys = call.k_view, group
        if self._heard(call.unread is None):
            kept = Kept(self, call, group, compiled=True)
            self.output_gradient(kept, (o, call.q, call.k, call.v, *tensors_of(call).values()), d_o)

    @harmless("backward of a compiled attention")
    def compiled_key_gradient(self, d_k: Tensor, site: int) -> None:
        layer = self if site == 0 else self._sites[site - 1] if site <= len(self._sites) else None
        if layer is None or layer._compiled_keys is None:
            return
        view, group = layer._compiled_keys
        with torch.no_grad():
            layer._key_gradient(view(d_k), group)
