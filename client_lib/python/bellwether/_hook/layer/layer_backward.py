"""The backward of one attention layer's calls: whether a call is sampled, and what the probe is
given.

The taps stay in the graph for a whole step; the backward decides whether this micro-batch is
sampled.
"""

from __future__ import annotations

import time
from typing import Any, Optional

import torch
from torch import Tensor

from ..._kernels.memory import capturing
from ..._kernels.probe import DTYPES, Unsupported, add_key_leak, add_probe
from ..._util.guard import harmless, in_words
from .kept import Kept
from .layer_calls import LayerCalls
from .probe_mask import Sampled, first_sequences, probe_mask


class LayerBackward(LayerCalls):
    """What a Layer does when gradients pass its taps."""

    @harmless("backward of the attention", lambda self, call: False)
    def output_wanted(self, kept: Kept) -> bool:
        """A call's backward begins: whether its statistics are to be measured."""
        return self._heard(kept.statistics)

    def read(self, ctx: Any) -> Optional[tuple[Tensor, ...]]:
        """What OutputTap has saved; None if that is not what it was."""
        try:
            saved: tuple[Tensor, ...] = ctx.saved_tensors
            return saved
        except Exception as e:  # The attention may be one that does without them.
            changed = "modified by an inplace operation" in str(e)
            reason = "was changed in place" if changed else f"cannot be read ({in_words(e)})"
            self.note(
                f"q, k, v, the mask or the output {reason}: only the key-gradient leak is measured"
            )
            return None

    @harmless("backward of the attention")
    def output_gradient(self, kept: Kept, saved: tuple[Tensor, ...], d_o: Tensor) -> None:
        """Measures them; `saved` are o, q, k, v and what `kept` names."""
        start = time.perf_counter()
        if self._is_batched(d_o):
            return
        try:
            with self.host.lock, torch.no_grad():
                self._add(kept, saved, d_o)
        except Unsupported as e:
            self.note(str(e))
        self.host.hook_seconds += time.perf_counter() - start

    def _heard(self, measurable: bool) -> bool:
        """Counts a backward pass; whether its statistics are to be measured."""
        host = self.host
        if not host.live():
            return False
        start = time.perf_counter()
        measured = False
        try:
            host.passes(max(self.fired_in_step + 1, self.calls_in_step))
            self.fired += 1
            self.fired_in_step += 1
            in_graph = capturing()
            self.graphed = self.graphed or in_graph
            self.captured = self.captured + 1 if in_graph else 0
            sums = self.sums
            measured = measurable and sums is not None and self._samples_call(sums.probed)
            if host.samples_step() and not in_graph and host.weights_in_backward():
                self.measure_whole_weights()
        except Unsupported as e:
            self.note(str(e))
        host.hook_seconds += time.perf_counter() - start
        return measured

    def _is_batched(self, gradient: Tensor) -> bool:
        """Several gradients at once (is_grads_batched, jacobian): a tensor without memory."""
        functorch: Any = torch._C._functorch
        batched = functorch.is_functorch_wrapped_tensor(gradient) or (
            functorch.is_legacy_batchedtensor(gradient)
        )
        if batched:
            self.note("several gradients at once: not measured")
        return bool(batched)

    def _samples_call(self, calls_before: int) -> bool:
        if capturing():
            return self.host.captures_call(self.captured - 1)
        return self.host.samples_call(calls_before)

    def _add(self, kept: Kept, saved: tuple[Tensor, ...], d_o: Tensor) -> None:
        """Adds one call's statistics."""
        host, sums = self.host, self.sums
        assert sums is not None
        o, q, k, v = saved[:4]
        if o.dtype not in DTYPES:
            self.note(f"{o.dtype}: not measured")
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
        add_probe(
            sums, q, k, v, o, d_o if kept.delta and host.measures("delta") else None,
            scale=kept.scale, rows=rows, seed=seed, group=kept.group,
            mask=probe_mask(mask, q, k, sampled, kept.cast, shared=not kept.compiled),
            drift_only=not (host.measures("ties") or host.measures("delta")),
            softcap=kept.softcap, sinks=given.get("sinks"),
        )  # fmt: skip

    @harmless("backward of the attention")
    def key_gradient(self, kept: Kept, d_k: Tensor) -> None:
        """d_k  as the function returned it"""
        with torch.no_grad():
            self._key_gradient(kept.k_view(d_k), kept.group)

    def _key_gradient(self, d_k: Tensor, group: int) -> None:
        host = self.host
        if not host.live() or self._is_batched(d_k):
            return
        start = time.perf_counter()
        try:
            sums = self.sums
            if sums is not None and host.measures("leak") and self._samples_call(sums.leaked):
                with host.lock, torch.no_grad():
                    add_key_leak(sums, d_k, group)
        except Unsupported as e:
            self.note(str(e))
        host.hook_seconds += time.perf_counter() - start
