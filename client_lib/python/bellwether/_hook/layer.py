"""One attention layer under watch: the taps, and when they measure.

    o = OutputTap(function(q, KeyTap(k), v))

Both taps are identities on tensors as the call has them.  All measuring is done in their backward,
where q, k, v, o and dO are at hand and exist once also under activation checkpointing.  The tap
stays in the graph for a whole step; the backward decides whether this micro-batch is sampled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional, Union, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad

from .._kernels.memory import capturing
from .._kernels.probe import DTYPES, Sums, Unsupported, add_key_leak, add_probe
from .._util.guard import harmless, in_words
from .._weights import locate
from .._weights.names import KEY_NORMS, QUERY_NORMS, plain
from . import intercept
from .call import AttentionCall
from .call_sites import MORE, SITES_MAX, Forward
from .candidates import is_attention
from .compiled_taps import same_place
from .hosts import StepHost
from .kept import Kept, tensors_of
from .kernel_choice import unseen
from .layer_weights import NO_WEIGHTS, LayerWeights
from .notes import CALLED_AGAIN, NO_KEY_GRADIENT, NO_LEAK
from .probe_mask import Sampled, first_sequences, probe_mask

# By them a checkpoint ends a recomputation early, or the backward: raised where a tensor is saved.
CHECKPOINTS: tuple[type[Exception], ...] = tuple(
    error
    for error in vars(torch.utils.checkpoint).values()
    if isinstance(error, type)
    and issubclass(error, Exception)
    and error.__module__ == "torch.utils.checkpoint"
)


# A call, what is kept of it, and its keys behind their tap.
_Tapped = tuple[AttentionCall, Kept, Tensor]


class OutputTap(torch.autograd.Function):
    """Identity on the attention output; its backward measures q, k, v, o and dO."""

    @staticmethod
    def forward(ctx: Any, kept: Kept, *saved: Tensor) -> Tensor:
        """saved  o, q, k, v and what `kept` names"""
        ctx.save_for_backward(*saved)  # The storages that the attention itself saves.
        ctx.kept = kept
        o = saved[0]
        # Not a view to autograd: code that changes the output in place goes on working.
        return o.detach()

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> Any:
        kept = ctx.kept
        if kept.layer.output_wanted(kept):
            # Reading may run the host's forward again: its errors are its own, and not ours to
            # take, since it has counted what it recomputed until then.
            saved = ctx.saved_tensors if kept.host_reads else kept.layer.read(ctx)
            if saved is not None:
                kept.layer.output_gradient(kept, saved, d_o)
        return None, d_o, *([None] * (3 + len(kept.names)))


class KeyTap(torch.autograd.Function):
    """Identity on the keys; its backward sees dK as the attention kernel returned it."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, kept: Kept) -> Tensor:
        ctx.kept = kept
        return k.detach()

    @staticmethod
    def backward(ctx: Any, d_k: Tensor) -> Any:
        ctx.kept.layer.key_gradient(ctx.kept, d_k)
        return d_k, None


def _apart() -> AbstractContextManager[Any]:
    """In it our own calls of torch are none of those that a mode of the host sees."""
    if torch._C._len_torch_function_stack() > 0:
        return torch._C.DisableTorchFunction()
    return nullcontext()


def _tapped(tap: Any, *inputs: Any) -> Any:
    with unseen():
        return tap.apply(*inputs)


def _output_tap(call: AttentionCall, kept: Kept, output: Tensor) -> Tensor:
    saved = output, call.q, call.k, call.v, *tensors_of(call).values()
    return cast(Tensor, _tapped(OutputTap, kept, *saved))


def _as_cast(call: AttentionCall) -> AttentionCall:
    """What autocast would do inside the call, done before it: the taps then see what the kernel
    sees."""
    if call.cast is None:
        return call
    q, k, v = (t.to(call.cast) for t in (call.q, call.k, call.v))
    return dataclasses.replace(call, q=q, k=k, v=v)


def _behind_tap(tapped: _Tapped) -> tuple[Tensor, Tensor, Tensor]:
    call, _, k = tapped
    return k if call.q is call.k else call.q, k, k if call.v is call.k else call.v


def _copies(k: Tensor, heads: int) -> bool:
    """Whether k [batch, heads, tokens, dim] is so many heads, each repeated in a row."""
    copies, left = divmod(k.shape[1], heads)
    if left or not copies:
        return False
    return copies == 1 or torch.equal(k[:, 0].detach(), k[:, copies - 1].detach())


class Layer(LayerWeights):
    """One attention module of a monitored model."""

    def __init__(
        self,
        host: StepHost,
        name: str,
        module: nn.Module,
        watched: bool,
        paths: Optional[tuple[str, str]],
    ) -> None:
        super().__init__(host, name, module, paths)
        self.watched = watched
        self.index = -1  # Set once it is known which modules really call.
        self.calls = 0  # Of scaled_dot_product_attention, with gradients on.
        self.fired = 0  # Backward passes through the output tap.
        self.fired_in_step = self.calls_in_step = 0
        self.captured = 0  # Of them, those in a row that went into a CUDA graph.
        self.seq_len = 0
        self.causal = False
        self.dtype: Optional[torch.dtype] = None
        self.kernel = "sdpa"  # Which implementation PyTorch picks, as far as it says.
        names = {plain(n) for n, _ in module.named_children()}
        self.centred = False  # The keys come from center_keys(), as the last call had them.
        self.graphed = False  # A CUDA graph was captured with it inside.
        self.compiled = False  # Its forward is known by what torch.compile made of it.
        # Some call had another mask than causal with as many keys as queries; dropout.
        self.masked = self.dropped = False
        self.normalizes = bool(names & QUERY_NORMS) and bool(names & KEY_NORMS)
        # Key heads that a call is given -> copies of each of the layer's own among them.
        self._groups: dict[int, int] = {}
        self._sites: list[Layer] = []  # Of the other calls that one forward makes.
        self.sums: Optional[Sums] = None

    def __deepcopy__(self, memo: Any) -> Layer:
        return self  # Reached through a live graph only; there is one per module.

    def unmeasured(self) -> bool:
        """Whether it is attention that is trained, given that it reports nothing."""
        module = self.module()
        if not self.watched or module is None or not self.is_attention():
            return False
        return self._trains() or (self.calls > 0 and next(module.parameters(), None) is None)

    def _trains(self) -> bool:
        module = self.module()
        return module is not None and any(p.requires_grad for p in module.parameters())

    def is_attention(self) -> bool:
        """Whether it is more than called like one."""
        module = self.module()
        if self.calls > 0 or module is None:
            return True
        return not self.lends and is_attention(module)

    # ---- forward ----

    def expects(self) -> bool:
        """Whether the calls of the module, whose forward begins, are to be seen."""
        # A recomputation must find the taps exactly if the forward had them, whatever has
        # happened since: in a checkpointed region they are always there, even if we are off.
        return self.host.live() or intercept.checkpointed()

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
        return kept.layer._after(call.run(*_behind_tap(tapped)), call, kept)

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
        return _behind_tap(tapped), lambda o: cast(Tensor, kept.layer._after(o, call, kept))

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
    ) -> Optional[_Tapped]:
        """After an error: taps that measure nothing, where a recomputation may look for them."""
        try:
            return self._inert(read())
        except Exception:
            return None

    def _inert(self, call: Union[AttentionCall, str, None]) -> Optional[_Tapped]:
        if not isinstance(call, AttentionCall):
            return None
        plain = all(type(t) in (Tensor, nn.Parameter) for t in (call.q, call.k, call.v))
        if not plain or not torch.is_grad_enabled() or not intercept.checkpointed():
            return None
        call = _as_cast(call)
        call.unread, call.dropout = "an error", 0.0
        return call, Kept(self, call, 1), call.k

    @harmless("forward of the attention", _untapped)
    def _before(
        self,
        read: Callable[[], Union[AttentionCall, str, None]],
        forward: Optional[Forward],
        centred: bool,
    ) -> Optional[_Tapped]:
        """The call and its keys behind their tap; None if there is nothing to measure."""
        host = self.host
        # Taps are also in a CUDA graph, which runs in steps that are not known yet.
        in_graph = capturing()
        self.graphed = self.graphed or in_graph
        always = intercept.checkpointed() or (host.live() and in_graph)
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
        if type(output) is not Tensor or not intercept.checkpointed():
            return result
        try:
            return call.with_output(result, _output_tap(call, kept, output))
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
                tapped = _output_tap(call, kept, output)
        except Exception as e:
            if isinstance(e, CHECKPOINTS) or not intercept.checkpointed():
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
    ) -> Optional[_Tapped]:
        if not torch.is_grad_enabled():
            return None
        self.host.forward_begins()
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

    def _count(self) -> None:
        self.calls += 1
        if not self.host.in_backward():  # No recomputation.
            one = self.host.settings.microbatches == "first" and self.host.samples_step()
            if one and self.calls_in_step > self.fired_in_step:
                self.note(CALLED_AGAIN)
            self.host.passes(max(self.fired_in_step, self.calls_in_step + 1))
            self.calls_in_step += 1

    def _prepare_call(
        self, call: Union[AttentionCall, str, None], always: bool, centred: bool
    ) -> Optional[_Tapped]:
        host = self.host
        self._count()
        if isinstance(call, str):
            self.note(call)
        if not isinstance(call, AttentionCall) or not self._plain(call.q, call.k, call.v):
            return None
        q, k, v = call.q, call.k, call.v
        if intercept.checkpoint_inside():
            self.note("checkpoint() inside the attention module: not measured")
            return None
        centred = centred or (k.grad_fn is not None and "center_keys" in k.grad_fn.name())
        if centred != self.centred:
            self.centred = centred
            host.centring_changed()
        if not (q.requires_grad or k.requires_grad or v.requires_grad):
            self.note("no gradient reaches the attention (frozen upstream)")
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
            call = _as_cast(call)
        group = self._observe(call)
        if group is None:
            return None
        self._note_call(call)
        kept = Kept(self, call, group, intercept.host_reads_back())
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
            return cast(Tensor, _tapped(KeyTap, k, kept))
        return k

    def _note_call(self, call: AttentionCall) -> None:
        if call.unread is not None:
            self.note(f"{call.unread}: only the key-gradient leak is measured")
        if call.dropout:
            self.note("dropout in the attention: its delta statistics are not measured")

    def _plain(self, *tensors: Any) -> bool:
        """Whether these are tensors that the kernels can read."""
        for t in tensors:
            if type(t) not in (Tensor, nn.Parameter):
                self.note(f"{type(t).__name__} instead of a plain tensor: not measured")
                return False
            if t.is_nested:
                self.note("a nested tensor: not measured")
                return False
            missing = self.host.cannot_measure_on(t.device.type)
            if missing is not None:
                self.note(f"{missing}: not measured")
                return False
            if t.dtype not in DTYPES:
                self.note(f"{t.dtype}: not measured")
                return False
            if t.numel() == 0:
                self.note("an empty tensor: not measured")
                return False
        if len({t.device for t in tensors}) > 1:
            self.note("q, k and v on several devices: not measured")
            return False
        if capturing() and self.sums is None:
            self.note("first called while a CUDA graph was captured: not measured")
            return False
        if torch._C._are_functorch_transforms_active():
            self.note("torch.func transforms: not measured")
            return False
        if forward_ad._current_level >= 0:
            self.note("forward-mode differentiation: not measured")
            return False
        return True

    def _observe(self, call: AttentionCall) -> Optional[int]:
        """Learns the layout from the first call.  How many copies of each key head the call has;
        None if it does not fit the layout."""
        host = self.host
        with torch.no_grad(), unseen():
            q, k, v = call.q_view(call.q), call.k_view(call.k), call.v_view(call.v)
        if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
            self.note("q, k and v are not [batch, heads, tokens, dim]: not measured")
            return None
        heads, seen, dim = q.shape[1], k.shape[1], q.shape[3]
        if q.shape[0] != k.shape[0] or heads % seen or v.shape[1] != seen:
            self.note("batch or heads of q, k and v do not fit: not measured")
            return None
        if self.heads == 0:
            kv_heads = self._kv_heads(heads, k, dim)
            self._groups[seen] = seen // kv_heads
            self.sums = Sums(host.memories.of(q.device), heads, kv_heads)
            self.kernel = call.kernel() or "custom"
            if host.numbered():
                self.note("first called after the first step: not reported")
            self.set_layout(heads, kv_heads, dim)
        elif self.sums is None or self.sums.memory is not host.memories.of(q.device):
            self.note("another device than that of the first call: not measured")
            return None
        elif heads != self.heads or (seen not in self._groups and not self._repeats(k)):
            self.note("heads differ from those of the first call: not measured")
            return None
        self.seq_len = max(self.seq_len, k.shape[2])
        self.masked = self.masked or not call.mask.simple()
        self.dropped = self.dropped or bool(call.dropout)
        self.causal = self.causal or call.mask.causal
        self.dtype = call.cast or q.dtype  # As the kernel gets it.
        self.check_split(q, k)
        return self._groups[seen]

    def _kv_heads(self, heads: int, k: Tensor, dim: int) -> int:
        """Key heads that are apart, of those that the first call is given."""
        module, seen = self.module(), k.shape[1]
        by_weight = locate.kv_heads_of(module, heads, dim) if module is not None else None
        if by_weight is not None and by_weight < seen and _copies(k, by_weight):
            return by_weight
        return seen

    def _repeats(self, k: Tensor) -> bool:
        """Whether these are the layer's key heads, repeated; or, if the first call had them
        repeated, without."""
        if capturing() or not _copies(k, self.kv_heads):
            return False
        self._groups[k.shape[1]] = k.shape[1] // self.kv_heads
        return True

    # ---- backward ----

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

    @harmless("backward of a compiled attention")
    def compiled_backward(self, call: AttentionCall, o: Tensor, d_o: Tensor, site: int) -> None:
        """The same for a module that was compiled: the first that is heard of its forward."""
        if not self.watched or not self.host.live():
            return
        self.host.backward_begins()
        layer = self._site(site)
        if layer is not None:
            layer._compiled_backward(call, o, d_o)

    def _compiled_backward(self, call: AttentionCall, o: Tensor, d_o: Tensor) -> None:
        self.calls += 1
        self.compiled = True
        group = self._observe(call) if self._plain(call.q, call.k, call.v) else None
        if group is not None:
            self._note_call(call)
        if self._heard(group is not None and call.unread is None) and group is not None:
            kept = Kept(self, call, group)
            self.output_gradient(kept, (o, call.q, call.k, call.v, *tensors_of(call).values()), d_o)

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
        add_probe(
            sums, q, k, v, o, d_o if kept.delta and host.measures("delta") else None,
            scale=kept.scale, rows=rows, seed=seed, group=kept.group,
            mask=probe_mask(mask, q, k, Sampled(kept.scale, rows, seed), kept.cast),
            drift_only=not (host.measures("ties") or host.measures("delta")),
            softcap=kept.softcap, sinks=given.get("sinks"),
        )  # fmt: skip

    @harmless("backward of the attention")
    def key_gradient(self, kept: Kept, d_k: Tensor) -> None:
        """d_k  as the function returned it"""
        with torch.no_grad():
            self._key_gradient(kept.k_view(d_k), kept.group)

    @harmless("backward of a compiled attention")
    def compiled_key_gradient(self, d_k: Tensor, site: int) -> None:
        layer = self if site == 0 else self._sites[site - 1] if site <= len(self._sites) else None
        group = layer._groups.get(d_k.shape[1]) if layer is not None else None
        if layer is not None and group is not None:
            layer._key_gradient(d_k, group)

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
