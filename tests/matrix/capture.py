"""What calls of attention got and returned, taken without Bellwether while a model trains.

Functions of transformers' attention interface are seen where a module asks for them; calls of
scaled_dot_product_attention by its name.  Values are copied at once, gradients arrive in
the backward.  Of a recomputed call the one whose gradient arrives is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Optional
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from definitions import Call, rule


def copied(x: Tensor) -> Tensor:
    """On the CPU, where all that is compared is computed."""
    return x.detach().to("cpu", copy=True)


def _rule(mask: Optional[Tensor], keys: int) -> tuple[Optional[Tensor], Optional[Tensor]]:
    return rule(None if mask is None else copied(mask)[..., :keys])


def _both(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    return b if a is None else a if b is None else a & b


def _top_left(rows: int, keys: int, window: Optional[int] = None) -> Tensor:
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    allowed = key <= row
    return allowed if window is None else allowed & (key > row - window)


class Calls:
    """All calls of a model while `watching()`."""

    def __init__(self, model: nn.Module, written: bool = False) -> None:
        """written  the model's modules write their attention out"""
        self.written = _Written(self, model) if written else None
        self.names = {id(module): name for name, module in model.named_modules()}
        self.found: list[Call] = []
        self.running: list[str] = []
        self._inside = 0
        self._kv_heads = 0

    def taken(self) -> list[Call]:
        """Those whose gradients have arrived, and forgets them all."""
        found, self.found = self.found, []
        return [call for call in found if call.d_o is not None]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        from transformers.modeling_utils import AttentionInterface

        get = AttentionInterface.get_interface

        def get_interface(interface: Any, name: str, default: Any) -> Any:
            return self._seen(name, get(interface, name, default))

        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enters)
        after = hooks.register_module_forward_hook(self._leaves, always_call=True)
        plain = nn.functional.scaled_dot_product_attention

        def sdpa(*args: Any, **kwargs: Any) -> Any:
            return self._sdpa(plain, args, kwargs)

        try:
            with (
                mock.patch.object(AttentionInterface, "get_interface", get_interface),
                mock.patch.object(nn.functional, plain.__name__, sdpa),
            ):
                yield
        finally:
            before.remove()
            after.remove()

    def _enters(self, module: nn.Module, _: Any) -> None:
        if self.written is not None and not self.running:  # Also in a checkpoint's second forward.
            self.written.__enter__()
        self.running.append(self.names.get(id(module), ""))

    def _leaves(self, *_: Any) -> None:
        self.running.pop()
        if self.written is not None and not self.running:
            self.written.__exit__(None, None, None)

    def _seen(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def seen(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any,
                 *args: Any, **given: Any) -> Any:  # fmt: skip
            mask, self._kv_heads = attention_mask, k.shape[1]
            if name == "sdpa":  # The kernel's own arguments are seen below.
                try:
                    return function(module, q, k, v, mask, *args, **given)
                finally:
                    self._kv_heads = 0
            assert not args, args
            if not torch.is_grad_enabled():
                return function(module, q, k, v, mask, **given)
            call = _READERS.get(name, _eager)(module, q, k, v, mask, given)
            call.module, call.kv_heads = self.running[-1], k.shape[1]
            with as_given(call, k) as own:
                self._inside += 1
                try:
                    result = function(module, q, own, v, mask, **given)
                finally:
                    self._inside -= 1
            o = result[0]
            call.o = copied(o.transpose(1, 2))
            o.register_hook(lambda gradient: self._arrived(call, gradient.transpose(1, 2)))
            self.found.append(call)
            return result

        return seen

    def _sdpa(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args)), **kwargs}
        if self._inside or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        q, k, v = (given.pop(name) for name in names[:3])
        autocast = torch.is_autocast_enabled(q.device.type)
        seen = [copied(t.to(torch.bfloat16) if autocast else t) for t in (q, k, v)]
        scale = given.get("scale")
        call = Call(
            self.running[-1], *seen, seen[0], q.shape[-1] ** -0.5 if scale is None else scale
        )
        call.allowed, call.bias = _rule(given.get("attn_mask"), k.shape[2])
        if given.get("is_causal"):
            call.allowed = _both(call.allowed, _top_left(q.shape[2], k.shape[2]))
        call.dropout = given.get("dropout_p", 0.0)
        call.kv_heads = self._kv_heads or k.shape[1]
        with as_given(call, k) as own:
            o = function(q, own, v, **given)
        call.o = copied(o)
        o.register_hook(lambda gradient: self._arrived(call, gradient))
        self.found.append(call)
        return o

    @staticmethod
    def _arrived(call: Call, gradient: Tensor) -> None:
        call.d_o = copied(gradient)


@contextlib.contextmanager
def as_given(
    call: Call, k: Tensor, view: Callable[[Tensor], Tensor] = lambda x: x
) -> Iterator[Tensor]:
    """The keys as an identity of their own: their gradient is then that of this call alone.
    `view` gives it as [batch, heads, tokens, dim]."""
    own = k.view_as(k)
    if own.requires_grad:

        def arrived(gradient: Tensor) -> None:
            call.d_k = copied(view(gradient))

        own.register_hook(arrived)
    yield own


class _Written(TorchFunctionMode):
    """Attention that is written out: the last product before a softmax, and the first one behind it
    that takes as many weights.  What the scores have besides the product is the mask."""

    def __init__(self, calls: Calls, model: nn.Module) -> None:
        super().__init__()
        self.calls = calls
        self.heads: int = model.config.num_attention_heads  # type: ignore[union-attr,assignment]
        self.call: Optional[Call] = None
        self.scores: Optional[Tensor] = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if not torch.is_grad_enabled() or name not in ("matmul", "bmm", "baddbmm", "softmax"):
            return func(*args, **kwargs)
        if name == "softmax":
            self.scores = copied(args[0])
            return func(*args, **kwargs)
        a, b = args if name != "baddbmm" else (kwargs["batch1"], kwargs["batch2"])
        if not (a.requires_grad and b.requires_grad):
            return func(*args, **kwargs)
        if self.call is not None and self.scores is not None and a.numel() == self.scores.numel():
            return self._ends(func(a, b), b)
        q, k = self._apart(a), self._apart(b).mT
        call = Call(self.calls.running[-1], copied(q), copied(k), copied(k), copied(q),
                    q.shape[-1] ** -0.5, kv_heads=self.heads)  # fmt: skip
        self.call, self.scores = call, None
        with as_given(call, b, lambda gradient: self._apart(gradient).mT) as own:
            return func(a, own) if name != "baddbmm" else func(*args, **{**kwargs, "batch2": own})

    def _apart(self, x: Tensor) -> Tensor:
        return x if x.dim() == 4 else x.reshape(-1, self.heads, *x.shape[1:])

    def _ends(self, o: Tensor, v: Tensor) -> Tensor:
        call = self.call
        assert call is not None and self.scores is not None
        call.v, call.o = copied(self._apart(v)), copied(self._apart(o))
        product = call.scale * call.q.double() @ call.k.double().mT
        added = self._apart(self.scores).double() - product
        noise = 2.0**-20 * (1 + product.abs())
        call.allowed, call.bias = rule(torch.where(added.abs() < noise, 0.0, added))
        o.register_hook(lambda d_o: self.calls._arrived(call, self._apart(d_o)))
        self.calls.found.append(call)
        self.call = self.scores = None
        return o


# ---- what the functions of transformers mean ----


def _plain(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Call:
    scale = given.get("scaling")
    if scale is None:
        scale = getattr(module, "head_dim", q.shape[-1]) ** -0.5
    autocast = torch.is_autocast_enabled(q.device.type)
    q, k, v = (copied(t.to(torch.bfloat16) if autocast else t) for t in (q, k, v))
    call = Call("", q, k, v, q, float(scale), softcap=given.get("softcap") or 0.0)
    call.dropout = given.get("dropout") or 0.0
    return call


def _eager(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict[str, Any]
) -> Call:
    call = _plain(module, q, k, v, given)
    call.allowed, call.bias = _rule(mask, k.shape[2])
    bias = given.get("position_bias")
    if bias is not None:
        hidden, more = _rule(bias, k.shape[2])
        call.allowed = _both(call.allowed, hidden)
        call.bias = more if call.bias is None else call.bias + more
    sinks = given.get("s_aux")
    sinks = getattr(module, "sinks", None) if sinks is None else sinks
    call.sinks = None if sinks is None else copied(sinks)
    return call


def _flex(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict[str, Any]
) -> Call:
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    if not isinstance(mask, BlockMask):
        return _eager(module, q, k, v, mask, given)
    call = _eager(module, q, k, v, None, given)
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    call.allowed = _both(call.allowed, create_mask(mask.mask_mod, *sizes, q.device.type).cpu())
    return call


def _ours(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict[str, Any]
) -> Call:
    call = _eager(module, q, k, v, mask, given)
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if mask is None and causal and q.shape[2] > 1:
        call.allowed = _both(
            call.allowed, _top_left(q.shape[2], k.shape[2], given.get("sliding_window"))
        )
    return call


_READERS = {"flex_attention": _flex, "bellwether": _ours}
