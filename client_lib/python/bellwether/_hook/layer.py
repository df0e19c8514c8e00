"""One attention layer under watch: the taps, and when they measure.

    o = OutputTap(sdpa(q, KeyTap(k), v))

Both taps are identities.  All measuring is done in their backward, where q, k, v, o and dO are
at hand and exist once also under activation checkpointing.  The tap stays in the graph for a
whole step; the backward decides whether this micro-batch is sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad

from .._kernels.memory import capturing
from .._kernels.probe import DTYPES, ProbeMask, Sums, Unsupported, add_key_leak, add_probe
from .._util.guard import harmless, in_words
from .._weights import locate
from .._weights.names import KEY_NORMS, QUERY_NORMS, plain
from . import intercept
from .attention_masks import mask_of
from .compiled_taps import PARAMETERS, same_place, well_formed
from .hosts import StepHost
from .kernel_choice import autocast_dtype, kernel_of, unseen
from .layer_weights import LayerWeights
from .notes import NO_KEY_GRADIENT

# By them a checkpoint ends a recomputation early, or the backward: raised where a tensor is saved.
CHECKPOINTS: tuple[type[Exception], ...] = tuple(
    error
    for error in vars(torch.utils.checkpoint).values()
    if isinstance(error, type)
    and issubclass(error, Exception)
    and error.__module__ == "torch.utils.checkpoint"
)


class _Call:
    """What the taps of one call have to know; holds no activation."""

    __slots__ = ("causal", "delta", "host_reads", "layer", "scale", "statistics")

    def __init__(
        self, layer: Layer, scale: float, causal: bool, statistics: bool, delta: bool
    ) -> None:
        self.layer, self.scale, self.causal = layer, scale, causal
        self.statistics, self.delta = statistics, delta
        self.host_reads = intercept.host_reads_back()


class OutputTap(torch.autograd.Function):
    """Identity on the attention output; its backward measures q, k, v, o and dO."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        ctx.save_for_backward(o, q, k, v)  # The storages that the attention itself saves.
        ctx.call = call
        # Not a view to autograd: code that changes the output in place goes on working.
        return o.detach()

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> Any:
        call = ctx.call
        if call.layer.output_wanted(call):
            # Reading may run the host's forward again: its errors are its own, and not ours to
            # take, since it has counted what it recomputed until then.
            saved = ctx.saved_tensors if call.host_reads else call.layer.read(ctx)
            if saved is not None:
                call.layer.output_gradient(call, saved, d_o)
        return d_o, None, None, None, None


class KeyTap(torch.autograd.Function):
    """Identity on the keys; its backward sees dK as the attention kernel returned it."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return k.detach()

    @staticmethod
    def backward(ctx: Any, d_k: Tensor) -> Any:
        ctx.call.layer.key_gradient(d_k)
        return d_k, None


def _apart() -> AbstractContextManager[Any]:
    """In it our own calls of torch are none of those that a mode of the host sees."""
    if torch._C._len_torch_function_stack() > 0:
        return torch._C.DisableTorchFunction()
    return nullcontext()


def _tapped(tap: Any, *inputs: Any) -> Any:
    with unseen():
        return tap.apply(*inputs)


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
        self.masked = self.dropped = False  # Some call had a mask; dropout.
        self.normalizes = bool(names & QUERY_NORMS) and bool(names & KEY_NORMS)
        self.group = 1  # Copies of each key head that the kernel is given.
        self.sums: Optional[Sums] = None

    def __deepcopy__(self, memo: Any) -> Layer:
        return self  # Reached through a live graph only; there is one per module.

    def unmeasured(self) -> bool:
        """Whether it is attention that is trained, given that it reports nothing."""
        module = self.module()
        if not self.watched or module is None or not intercept.is_attention(module):
            return False
        trained = [p.requires_grad for p in module.parameters()]
        return any(trained) or (not trained and self.calls > 0)

    # ---- forward ----

    def expects(self) -> bool:
        """Whether the calls of the module, whose forward begins, are to be seen."""
        # A recomputation must find the taps exactly if the forward had them, whatever has
        # happened since: in a checkpointed region they are always there, even if we are off.
        return self.host.live() or intercept.checkpointed()

    def attention(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        centred: bool = False,
    ) -> Any:
        """Calls `function` between the taps; by itself if there is nothing to measure.
        `centred`: the keys were centred by a switch (attention_switch.py)."""
        call, args, kwargs = self._before(args, kwargs, centred)
        output = function(*args, **kwargs)
        return output if call is None else self._after(output, args, call)

    def _untapped(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], centred: bool
    ) -> tuple[Optional[_Call], tuple[Any, ...], dict[str, Any]]:
        """After an error: taps that measure nothing, where a recomputation may look for them."""
        try:
            return self._inert(args, kwargs)
        except Exception:
            return None, args, kwargs

    def _inert(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Optional[_Call], tuple[Any, ...], dict[str, Any]]:
        if not well_formed(args, kwargs):
            return None, args, kwargs
        given = {**dict(zip(PARAMETERS, args)), **kwargs}
        tensors = tuple(given.get(name) for name in PARAMETERS[:3])
        plain = all(type(t) in (Tensor, nn.Parameter) for t in tensors)
        if not plain or not torch.is_grad_enabled() or not intercept.checkpointed():
            return None, args, kwargs
        q, k, v = tensors
        dtype = autocast_dtype(q) if "kernel" not in given else None  # type: ignore[arg-type]
        if dtype is not None:
            q, k, v = (t.to(dtype) for t in (q, k, v))  # type: ignore[union-attr]
        rest = {name: value for name, value in given.items() if name not in PARAMETERS[:3]}
        return _Call(self, 1.0, False, False, False), (q, k, v), rest

    @harmless("forward of the attention", _untapped)
    def _before(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], centred: bool
    ) -> tuple[Optional[_Call], tuple[Any, ...], dict[str, Any]]:
        """(what the taps of this call have to know, or None; the call's arguments)"""
        host = self.host
        # Taps are also in a CUDA graph, which runs in steps that are not known yet.
        in_graph = capturing()
        self.graphed = self.graphed or in_graph
        always = intercept.checkpointed() or (host.live() and in_graph)
        if not host.live() and not always:
            return None, args, kwargs
        start = time.perf_counter()
        with _apart():
            prepared = self._prepare(args, kwargs, always, centred)
        host.hook_seconds += time.perf_counter() - start
        return (None, args, kwargs) if prepared is None else prepared

    def _still_tapped(self, output: Any, args: tuple[Any, ...], call: _Call) -> Any:
        """After an error: what a recomputation will look for."""
        if type(output) is not Tensor or not intercept.checkpointed():
            return output
        try:
            return _tapped(OutputTap, output, args[0], args[1], args[2], call)
        except CHECKPOINTS:
            raise
        except Exception:
            return output

    @harmless("forward of the attention", _still_tapped, passes=CHECKPOINTS)
    def _after(self, output: Any, args: tuple[Any, ...], call: _Call) -> Any:
        if type(output) is not Tensor:
            self.note(f"{type(output).__name__} as the output: not measured")
            return output
        start = time.perf_counter()
        try:
            with _apart():
                tapped = _tapped(OutputTap, output, args[0], args[1], args[2], call)
        except Exception as e:
            if isinstance(e, CHECKPOINTS) or not intercept.checkpointed():
                raise
            self.note(f"a hook on saved tensors fails ({in_words(e)}): not measured")
            return output
        self.host.hook_seconds += time.perf_counter() - start
        return tapped

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], always: bool, centred: bool
    ) -> Optional[tuple[_Call, tuple[Any, ...], dict[str, Any]]]:
        if not torch.is_grad_enabled():
            return None
        host = self.host
        host.forward_begins()
        self.calls += 1
        if not host.in_backward():  # No recomputation.
            self.calls_in_step += 1
            host.passes(max(self.fired_in_step, self.calls_in_step))
        if not well_formed(args, kwargs):
            return None  # The function itself says what is wrong with it.
        given = {**dict(zip(PARAMETERS, args)), **kwargs}
        q, k, v = given.get("query"), given.get("key"), given.get("value")
        if not self._plain(q, k, v):
            return None
        assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
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
            if self._observe(q, k, v, given):
                self.check_split(q, k)
            return None
        dtype = autocast_dtype(q)
        if dtype is not None and "kernel" not in given:  # A module of one's own casts itself.
            cached = torch.is_autocast_cache_enabled()
            if cached and any(t.is_leaf and t.requires_grad for t in (q, k, v)):
                # It casts a parameter once for all calls, and adds up the gradients in 16 bits.
                self.note("a parameter as q, k or v under autocast: not measured")
                return None
            # What autocast would do inside the call, done before it: the taps then see what
            # the kernel sees.
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if not self._observe(q, k, v, given):
            return None
        self.check_split(q, k)
        causal, unread = mask_of(given.get("attn_mask"), given.get("is_causal"), q, k)
        statistics = unread is None
        if unread is not None:
            self.note(f"{unread}: only the key-gradient leak is measured")
        delta = not given.get("dropout_p", 0.0)
        if not delta:
            self.note("dropout in the attention: its delta statistics are not measured")
        scale = given.get("scale")
        if isinstance(scale, Tensor):
            scale = scale.detach()
        scale = float(scale) if scale is not None else q.shape[3] ** -0.5
        if not 0 < scale < math.inf:
            self.note("scale is not above 0, or not finite: only the key-gradient leak is measured")
            scale, statistics = 1.0, False
        call = _Call(self, scale, causal, statistics, delta)
        if not k.requires_grad:
            self.note(NO_KEY_GRADIENT)
        elif same_place(k, q) or same_place(k, v):
            self.note("the keys are the queries or the values: their gradient is not apart")
        elif host.measures("leak"):
            k = _tapped(KeyTap, k, call)
        rest = {name: value for name, value in given.items() if name not in PARAMETERS[:3]}
        return call, (q, k, v), rest

    def _plain(self, *tensors: Any) -> bool:
        """Whether these are tensors that the kernels can read."""
        for t in tensors:
            if type(t) not in (Tensor, nn.Parameter):
                self.note(f"{type(t).__name__} instead of a plain tensor: not measured")
                return False
            if t.is_nested:
                self.note("a nested tensor: not measured")
                return False
            if t.dim() != 4:
                self.note(f"{t.dim()} dimensions instead of [batch, head, token, dim]")
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

    def _observe(self, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> bool:
        """Learns the layout from the first call; False if this call does not fit it."""
        host = self.host
        heads, seen, dim = q.shape[1], k.shape[1], q.shape[3]
        if q.shape[0] != k.shape[0] or heads % seen or v.shape[1] != seen:
            self.note("batch or heads of q, k and v do not fit: not measured")
            return False
        if self.heads == 0:
            module = self.module()
            kv_heads, group = seen, 1
            if module is not None:
                by_weight = locate.kv_heads_of(module, heads, dim)
                if by_weight is not None and seen % by_weight == 0 and by_weight < seen:
                    copies = seen // by_weight
                    if torch.equal(k[:, 0].detach(), k[:, copies - 1].detach()):
                        kv_heads, group = by_weight, copies
            self.group = group
            self.sums = Sums(host.memories.of(q.device), heads, kv_heads)
            self.kernel = str(given.get("kernel") or kernel_of(q, k, v, given))
            if host.numbered():
                self.note("first called after the first step: not reported")
            self.set_layout(heads, kv_heads, dim)
        elif self.sums is None or self.sums.memory is not host.memories.of(q.device):
            self.note("another device than that of the first call: not measured")
            return False
        elif (heads, seen, dim) != (self.heads, self.kv_heads * self.group, self.head_dim):
            self.note("heads differ from those of the first call: not measured")
            return False
        self.seq_len = max(self.seq_len, k.shape[2])
        self.masked = self.masked or given.get("attn_mask") is not None
        self.dropped = self.dropped or bool(given.get("dropout_p", 0.0))
        self.causal = (
            self.causal or mask_of(given.get("attn_mask"), given.get("is_causal"), q, k)[0]
        )
        self.dtype = autocast_dtype(q) or q.dtype  # As the kernel gets it.
        return True

    # ---- backward ----

    @harmless("backward of the attention", lambda self, call: False)
    def output_wanted(self, call: _Call) -> bool:
        """A call's backward begins: whether its statistics are to be measured."""
        return self._heard(call, lambda: True)

    def read(self, ctx: Any) -> Optional[tuple[Tensor, ...]]:
        """o, q, k and v; None if they are not what they were."""
        try:
            saved: tuple[Tensor, ...] = ctx.saved_tensors
            return saved
        except Exception as e:  # The attention may be one that does without them.
            changed = "modified by an inplace operation" in str(e)
            reason = "was changed in place" if changed else f"cannot be read ({in_words(e)})"
            self.note(f"q, k, v or the output {reason}: only the key-gradient leak is measured")
            return None

    @harmless("backward of the attention")
    def output_gradient(self, call: _Call, saved: tuple[Tensor, ...], d_o: Tensor) -> None:
        """Measures them; `saved` are o, q, k and v."""
        start = time.perf_counter()
        if self._is_batched(d_o):
            return
        try:
            self._add(call, saved, d_o)
        except Unsupported as e:
            self.note(str(e))
        self.host.hook_seconds += time.perf_counter() - start

    @harmless("backward of a compiled attention")
    def compiled_backward(
        self, saved: tuple[Tensor, Tensor, Tensor, Tensor], d_o: Tensor,
        scale: float, causal: bool, statistics: bool, delta: bool, kernel: str,
    ) -> None:  # fmt: skip
        """The same for a module that was compiled: the first that is heard of its forward."""
        if not self.watched:
            return
        call = _Call(self, scale, causal, statistics, delta)
        given = {"is_causal": causal, "kernel": kernel}
        if self._heard(call, lambda: self._first_heard(call, saved, given)):
            self.output_gradient(call, saved, d_o)

    def _heard(self, call: _Call, fits: Callable[[], bool]) -> bool:
        """Counts a backward pass; `fits` is asked first."""
        host = self.host
        if not host.live():
            return False
        start = time.perf_counter()
        measured = False
        try:
            good = fits()
            self.fired += 1
            self.fired_in_step += 1
            in_graph = capturing()
            self.graphed = self.graphed or in_graph
            self.captured = self.captured + 1 if in_graph else 0
            host.passes(max(self.fired_in_step, self.calls_in_step))
            measured = good and self._samples(call)
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

    def _first_heard(self, call: _Call, saved: tuple[Tensor, ...], given: dict[str, Any]) -> bool:
        self.host.backward_begins()
        self.calls += 1
        _, q, k, v = saved
        if not self._plain(q, k, v) or not self._observe(q, k, v, given):
            return False
        self.compiled = True
        self._note_call(call.statistics, call.delta)
        self.masked = self.masked or not call.statistics
        self.dropped = self.dropped or not call.delta
        return True

    def _note_call(self, statistics: bool, delta: bool) -> None:
        if not statistics:
            self.note("a mask, or causal with other keys: only the key-gradient leak is measured")
        if not delta:
            self.note("dropout in the attention: its delta statistics are not measured")

    def _samples(self, call: _Call) -> bool:
        sums = self.sums
        return sums is not None and call.statistics and self._samples_call(sums.probed)

    def _samples_call(self, calls_before: int) -> bool:
        if capturing():
            return self.host.captures_call(self.captured - 1)
        return self.host.samples_call(calls_before)

    def _add(self, call: _Call, saved: tuple[Tensor, ...], d_o: Tensor) -> None:
        """Adds one call's statistics; `saved` are o, q, k and v."""
        host, sums = self.host, self.sums
        assert sums is not None
        o, q, k, v = saved
        if o.dtype not in DTYPES:
            self.note(f"{o.dtype}: not measured")
            return
        # A module of one's own may compute in another type than it is given.
        q, k, v = (t if t.dtype == o.dtype else t.to(o.dtype) for t in (q, k, v))
        if host.settings.sequences:
            o, q, k, v, d_o = (t[: host.settings.sequences] for t in (o, q, k, v, d_o))
        drift_only = not (host.measures("ties") or host.measures("delta"))
        gradient: Optional[Tensor] = None
        if call.delta and host.measures("delta"):
            gradient = d_o if d_o.dtype == o.dtype else d_o.to(o.dtype)
        with host.lock, torch.no_grad():
            add_probe(
                sums, q, k, v, o, gradient,
                scale=call.scale, mask=ProbeMask(causal=call.causal), rows=host.settings.rows,
                seed=host.row_seed(self.index), group=self.group, drift_only=drift_only,
            )  # fmt: skip

    @harmless("backward of the attention")
    def key_gradient(self, d_k: Tensor) -> None:
        host = self.host
        if not host.live() or self._is_batched(d_k):
            return
        start = time.perf_counter()
        try:
            sums = self.sums
            if sums is not None and host.measures("leak") and self._samples_call(sums.leaked):
                with host.lock, torch.no_grad():
                    add_key_leak(sums, d_k, self.group)
        except Unsupported as e:
            self.note(str(e))
        host.hook_seconds += time.perf_counter() - start
