"""What is measured when gradients pass the taps of one attention module's calls.

The taps stay in the graph for a whole step; the backward decides whether this micro-batch is
sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from ..._kernels.memory import capturing
from ..._kernels.probe import DTYPES, Unsupported, add_key_leak, add_probe
from ..._util.guard import harmless, in_words
from ..hosts import Sampling
from ..made_once import are_made
from .kept import Kept
from .law_calls import Given, LawCalls
from .notes import Notes
from .passes import Passes
from .probe_mask import Sampled, first_sequences, probe_mask
from .seen_calls import SeenCalls


class Gradients:
    """A TapListener."""

    def __init__(
        self, host: Sampling, notes: Notes, passes: Passes, seen: SeenCalls, laws: LawCalls,
        weights_are_whole: Callable[[], None],
    ) -> None:  # fmt: skip
        """weights_are_whole  called in a sampled backward, where that is the only time"""
        self.host, self._notes, self._passes, self._seen = host, notes, passes, seen
        self.laws, self._weights_are_whole = laws, weights_are_whole
        self.index = -1  # Of the layer among those that report: its rows differ from the others'.

    @harmless("backward of the attention", lambda self, kept: False)
    def output_wanted(self, kept: Kept) -> bool:
        return self.arrived(kept.statistics)

    def read(self, ctx: Any) -> Optional[tuple[Tensor, ...]]:
        try:
            saved: tuple[Tensor, ...] = ctx.saved_tensors
            return saved
        except Exception as e:  # The attention may be one that does without them.
            if "modified by an inplace operation" in str(e):
                self.changed()
            else:
                self._only_leak(f"cannot be read ({in_words(e)})")
            return None

    @harmless("backward of the attention")
    def changed(self) -> None:
        self._only_leak("was changed in place")

    def _only_leak(self, reason: str) -> None:
        self._notes.add(
            f"q, k, v, the mask or the output {reason}: only the key-gradient leak is measured"
        )

    @harmless("backward of the attention")
    def output_gradient(self, kept: Kept, saved: tuple[Tensor, ...], d_o: Tensor) -> None:
        start = time.perf_counter()
        if self._is_batched(d_o):
            return
        try:
            with self.host.lock, torch.no_grad():
                self._add(kept, saved, d_o)
        except Unsupported as e:
            self._notes.add(str(e))
        self.host.hook_seconds += time.perf_counter() - start

    @harmless("backward of the attention")
    def input_gradient(self, kept: Kept, gradient: Tensor, of: str, alone: bool) -> None:
        if self._is_batched(gradient):
            return
        if "k" in of and kept.leaks:
            self.add_keys(lambda: kept.k_view(gradient), kept.group)
        if kept.laws is not None and self.host.live():
            start = time.perf_counter()
            self.laws.add(kept, gradient, of, alone)
            self.host.hook_seconds += time.perf_counter() - start

    def arrived(self, measurable: bool) -> bool:
        """Counts a backward pass; whether its statistics are to be measured."""
        host = self.host
        if not host.live():
            return False
        start = time.perf_counter()
        measured = False
        try:
            in_graph = capturing()
            self._passes.backward(in_graph)
            self._seen.graphed = self._seen.graphed or in_graph
            sums = self._seen.sums
            measured = measurable and sums is not None and self._samples_call(sums.probed)
            if host.samples_step() and not in_graph and host.weights_in_backward():
                self._weights_are_whole()
        except Unsupported as e:
            self._notes.add(str(e))
        host.hook_seconds += time.perf_counter() - start
        return measured

    def wants(self) -> bool:
        """Whether a call that comes now would be measured: of a sampled step perhaps only the first
        micro-batch is."""
        sums = self._seen.sums
        if sums is None or self._samples_call(sums.probed):
            return True
        return self.host.measures("leak") and self._samples_call(sums.leaked)

    def add_keys(self, d_k: Callable[[], Tensor], group: int) -> None:
        """d_k    gives [batch, key heads, tokens, dim]; called if it is measured
        group  copies of each of the layer's key heads among them"""
        host = self.host
        if not host.live():
            return
        start = time.perf_counter()
        try:
            sums = self._seen.sums
            if sums is not None and host.measures("leak") and self._samples_call(sums.leaked):
                with host.lock, torch.no_grad():
                    add_key_leak(sums, d_k(), group)
        except Unsupported as e:
            self._notes.add(str(e))
        host.hook_seconds += time.perf_counter() - start

    def _is_batched(self, gradient: Tensor) -> bool:
        """Several gradients at once (is_grads_batched, jacobian): a tensor without memory."""
        functorch: Any = torch._C._functorch
        batched = functorch.is_functorch_wrapped_tensor(gradient) or (
            functorch.is_legacy_batchedtensor(gradient)
        )
        if batched:
            self._notes.add("several gradients at once: not measured")
        return bool(batched)

    def _samples_call(self, calls_before: int) -> bool:
        if capturing():
            return self.host.captures_call(self._passes.captured - 1)
        return self.host.samples_call(calls_before)

    def _add(self, kept: Kept, saved: tuple[Tensor, ...], d_o: Tensor) -> None:
        """Adds one call's statistics."""
        host, sums = self.host, self._seen.sums
        assert sums is not None
        o, q, k, v = saved[:4]
        if o.dtype not in DTYPES:
            self._notes.add(f"{o.dtype}: not measured")
            return
        given = dict(zip(kept.names, saved[4:]))
        # A module of one's own may compute in another type than it is given.
        q, k, v, d_o = (t if t.dtype == o.dtype else t.to(o.dtype) for t in (q, k, v, d_o))
        q, k, v = kept.q_view(q), kept.k_view(k), kept.v_view(v)
        o, d_o = kept.o_view(o), kept.o_view(d_o)
        mask = kept.mask(given)
        if host.settings.sequences:
            mask = first_sequences(mask, host.settings.sequences, q.shape[0])
            o, q, k, v, d_o = (t[: host.settings.sequences] for t in (o, q, k, v, d_o))
        rows, seed = host.settings.rows, host.row_seed(self.index)
        sampled = Sampled(kept.scale, rows, seed)
        shared = not kept.compiled or are_made(mask.tensors().values())
        of_rows = probe_mask(mask, q, k, sampled, kept.cast, shared)
        add_probe(
            sums, q, k, v, o, d_o if kept.delta and host.measures("delta") else None,
            scale=kept.scale, rows=rows, seed=seed, group=kept.group, mask=of_rows,
            drift_only=not (host.measures("ties") or host.measures("delta")),
            softcap=kept.softcap, sinks=given.get("sinks"),
        )  # fmt: skip
        self.laws.hold(kept, Given(q, k, v, o, d_o, of_rows, given.get("sinks"), rows, seed))
