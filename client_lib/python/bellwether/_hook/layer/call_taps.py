"""Puts the taps around a call of attention, where there is something to measure (taps.py)."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Optional, cast

import torch
from torch import Tensor, nn

from ..._util.guard import harmless, in_words
from ..calls.call import AttentionCall, CallRead
from ..hosts import Sampling
from ..running import apart, checkpoint_inside, checkpointed, host_reads_back
from .kept import Kept, TapListener
from .law_calls import LawCalls
from .notes import FROZEN, NO_KEY_GRADIENT, NO_LEAK, TRANSFORMED, Notes
from .seen_calls import SeenCalls
from .taps import CHECKPOINTS, InputTap, apply_tap, output_tap, same_place


class TappedCall:
    """A call between its taps.  They are where `inputs` go in, and where the output comes out."""

    __slots__ = ("_call", "_kept", "_notes", "_tapped", "host")

    def __init__(
        self, host: Sampling, notes: Notes, call: AttentionCall, kept: Kept,
        tapped: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """tapped  of the call's groups() those that are behind a tap"""
        self.host, self._notes = host, notes
        self._call, self._kept, self._tapped = call, kept, tapped

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        call = self._call
        behind = {name: t for names, t in self._tapped.items() for name in names}
        return behind.get("q", call.q), behind.get("k", call.k), behind.get("v", call.v)

    def run(self) -> Any:
        return self.output(self._call.run(*self.inputs()))

    def _still_tapped(self, result: Any) -> Any:
        """After an error: what a recomputation will look for."""
        call, output = self._call, self._call.output(result)
        if type(output) is not Tensor or not checkpointed():
            return result
        try:
            return call.with_output(result, output_tap(call, self._kept, output))
        except CHECKPOINTS:
            raise
        except Exception:
            return result

    @harmless("forward of the attention", _still_tapped, passes=CHECKPOINTS)
    def output(self, result: Any) -> Any:
        """What the call returned, its output behind the tap."""
        call, output = self._call, self._call.output(result)
        if type(output) is not Tensor:
            self._notes.add(f"{type(output).__name__} as the output: not measured")
            return result
        start = time.perf_counter()
        try:
            with apart():
                tapped = output_tap(call, self._kept, output)
        except Exception as e:
            if isinstance(e, CHECKPOINTS) or not checkpointed():
                raise
            self._notes.add(f"a hook on saved tensors fails ({in_words(e)}): not measured")
            return result
        self.host.hook_seconds += time.perf_counter() - start
        return call.with_output(result, tapped)


def _as_cast(call: AttentionCall) -> AttentionCall:
    """What autocast would do inside the call, done before it: the taps then see what the kernel
    sees."""
    if call.cast is None:
        return call
    q, k, v = (t.to(call.cast) for t in (call.q, call.k, call.v))
    return dataclasses.replace(call, q=q, k=k, v=v)


class CallTaps:
    """Those of one layer's calls."""

    def __init__(
        self, host: Sampling, notes: Notes, seen: SeenCalls, laws: LawCalls, listener: TapListener,
        watched: bool,
    ) -> None:  # fmt: skip
        """watched  False: calls are observed, and not measured"""
        self._host, self._notes, self._seen, self._laws = host, notes, seen, laws
        self._listener, self._watched = listener, watched

    def inert(self, read: CallRead) -> Optional[TappedCall]:
        """After an error: taps that measure nothing, where a recomputation may look for them."""
        if not isinstance(read, AttentionCall):
            return None
        plain = all(type(t) in (Tensor, nn.Parameter) for t in (read.q, read.k, read.v))
        if not plain or not torch.is_grad_enabled() or not checkpointed():
            return None
        call = _as_cast(read)
        call.unread, call.dropout = "an error", 0.0
        return TappedCall(self._host, self._notes, call, Kept(self._listener, call, 1), {})

    def around(self, read: CallRead, always: bool, centred: bool) -> Optional[TappedCall]:
        """The call between its taps; None if there is nothing to measure.

        always   they are put there whatever is measured in the running step
        centred  the keys were centred by a switch (attention_switch.py)"""
        host, notes, seen = self._host, self._notes, self._seen
        if isinstance(read, str):  # What is transformed has other dimensions, too.
            notes.add(TRANSFORMED if torch._C._are_functorch_transforms_active() else read)
        if not isinstance(read, AttentionCall) or not seen.readable(read.q, read.k, read.v):
            return None
        call = read
        q, k, v = call.q, call.k, call.v
        if checkpoint_inside():
            notes.add("checkpoint() inside the attention module: not measured")
            return None
        centred = centred or (k.grad_fn is not None and "center_keys" in k.grad_fn.name())
        if centred != seen.centred:
            seen.centred = centred
            host.centring_changed()
        if not (q.requires_grad or k.requires_grad or v.requires_grad):
            notes.add(FROZEN)
            return None
        if not (host.samples_step() or always) or not self._watched:
            seen.observe(call)
            return None
        if call.cast is not None:
            cached = torch.is_autocast_cache_enabled()
            if cached and any(t.is_leaf and t.requires_grad for t in (q, k, v)):
                # It casts a parameter once for all calls, and adds up the gradients in 16 bits.
                notes.add("a parameter as q, k or v under autocast: not measured")
                return None
            call = _as_cast(call)
        group = seen.observe(call)
        if group is None:
            return None
        notes.add_parts_of(call)
        kept = Kept(self._listener, call, group, host_reads_back())
        kept.leaks, kept.laws = self._leaks(call), self._laws.asked(call)
        return TappedCall(host, notes, call, kept, self._behind_taps(call, kept))

    def _leaks(self, call: AttentionCall) -> bool:
        """Whether there is a leak to measure."""
        k = call.k
        if not k.requires_grad:
            self._notes.add(NO_KEY_GRADIENT)
        elif not call.packed and (same_place(k, call.q) or same_place(k, call.v)):
            self._notes.add("the keys are the queries or the values: their gradient is not apart")
        elif not call.key_gradients_cancel():
            self._notes.add(NO_LEAK)
        else:
            return self._host.measures("leak")
        return False

    def _behind_taps(self, call: AttentionCall, kept: Kept) -> dict[str, Tensor]:
        """Of the call's groups() those whose gradient is measured."""
        wanted = {n: t for n, t in call.groups().items() if kept.laws or (kept.leaks and "k" in n)}
        if call.tapped is not None and wanted:  # q and k have their taps already.
            call.tapped.append(kept)
            wanted = {names: t for names, t in wanted.items() if names == "v"}
        return {
            names: cast(Tensor, apply_tap(InputTap, t, [kept], names))
            for names, t in wanted.items()
        }
