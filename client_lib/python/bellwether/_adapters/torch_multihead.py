"""nn.MultiheadAttention.  Asked for its weights it writes its attention out; else it calls
scaled_dot_product_attention, where it is seen, but not by torch.compile.

Its function is run by its own code.  Some names that the code calls mean functions of ours there.
Where attention is written out these are what projects the inputs, where q, k and v are met, and
what projects the output.  Where keys are added (add_bias_kv, add_zero_attn) it is what joins them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Union

import torch
from torch import Tensor
from torch.nn import functional

from .._hook.calls import sdpa_call
from .._hook.calls.call import AttentionCall, Reader, View
from .._hook.calls.mask_terms import mask_of
from .._hook.functions.function_calls import Begin
from .._util.guard import in_words
from .arguments import Arguments, scale_of

NAME = "nn.MultiheadAttention"
TRIED = ("torch 2.13.0",)

_PROJECTIONS = ("_in_projection_packed", "_in_projection")
_OUTPUT = "linear"
_CALLED = "scaled_dot_product_attention"
# What is read of the arguments, besides q, k and v.
_READ = (
    "num_heads", "bias_k", "bias_v", "static_k", "static_v", "add_zero_attn", "dropout_p",
    "training", "key_padding_mask", "attn_mask",
)  # fmt: skip
_OTHER_KEYS = ("static_k", "static_v")


def functions() -> Iterator[tuple[Callable[..., Any], Reader]]:
    function = functional.multi_head_attention_forward
    if {*_PROJECTIONS, _OUTPUT, _CALLED} <= set(function.__code__.co_names):
        yield function, read


def _with(function: Any, names: dict[str, Any]) -> types.FunctionType:
    """The function's code, to which some names mean something else."""
    made = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _view(heads: int, batch: int) -> View:
    """Of [tokens, batch, width] or [tokens * batch, width]."""
    return lambda x: x.reshape(-1, batch, heads, x.shape[-1] // heads).permute(1, 2, 0, 3)


def _added(given: Arguments) -> int:
    """Keys of a sequence that are none of the projected ones, behind them: a learned one, zeros."""
    return (given.get("bias_k") is not None) + bool(given.get("add_zero_attn"))


def _joined_view(given: Arguments, heads: int, batch: int) -> View:
    """Of keys to which the last one was added."""
    if given.get("add_zero_attn"):  # By then each head is a sequence: [batch * heads, keys, dim].
        return lambda x: x.view(batch, heads, *x.shape[1:])
    return _view(heads, batch)


def _value_view(given: Arguments, heads: int, batch: int) -> View:
    """Of values as they were projected: with those that belong to the added keys."""
    learned, zeros = given.get("bias_v"), bool(given.get("add_zero_attn"))
    learned = None if learned is None else learned.detach().clone()

    def view(x: Tensor) -> Tensor:
        if learned is not None:
            x = torch.cat([x, learned.to(x.dtype).expand(1, batch, -1)])
        return functional.pad(_view(heads, batch)(x), (0, 0, 0, zeros))

    return view


def _terms(given: Arguments, batch: int, heads: int) -> list[Tensor]:
    """The masks; where they are boolean they are true where a key is hidden."""
    found = []
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if mask is not None:
        mask = mask.detach()
        found.append(mask.view(batch, heads, *mask.shape[1:]) if mask.dim() == 3 else mask)
    if padding is not None:
        padding = padding.detach()
        found.append(padding[:, None, None] if padding.dim() == 2 else padding)
    if _added(given):
        found = [functional.pad(term, (0, _added(given))) for term in found]
    return [term if term.is_floating_point() else ~term for term in found]


def _call(given: Arguments, q: Tensor, k: Tensor, v: Tensor) -> Union[AttentionCall, str]:
    """q, v  [tokens, batch, width]
    k  the same, or as it is when the last key was added"""
    batch, heads = q.shape[1], given.get("num_heads")
    scale, unread = scale_of(None, q.shape[-1] // heads)
    other = [name for name in _OTHER_KEYS if given.get(name) is not None]
    if other:
        unread = f"{other[0]} given"
    view, k_view, v_view = _view(heads, batch), _view(heads, batch), _view(heads, batch)
    if _added(given):
        k_view, v_view = _joined_view(given, heads, batch), _value_view(given, heads, batch)
    return AttentionCall(
        q, k, v, view, k_view, v_view, view, lambda *_: None, scale,
        mask_of(_terms(given, batch, heads)),
        cancels=unread is None,
        dropout=float(given.get("dropout_p") or 0.0) if given.get("training") else 0.0,
        laws_lack="keys are added to those that are projected" if _added(given) else None,
        weights_go_on=True,
        kernel=functools.partial(str, NAME),
        unread=unread,
    )  # fmt: skip


def _read_written_out(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Union[AttentionCall, str]:
    """A Reader of (q, k, v) as _call() has them, and of what else is read."""
    try:
        return _call(Arguments(function, (), kwargs), *args)
    except Exception as e:
        return f"a call of {NAME} cannot be read ({in_words(e)}): not measured"


class _Torch:
    """The module torch, with another way to join tensors."""

    def __init__(self, cat: Callable[..., Tensor]) -> None:
        self.cat = cat

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _WrittenOut:
    """One call that writes its attention out: what some names of its code mean."""

    def __init__(self, begin: Begin, function: Any, given: Arguments) -> None:
        self._begin, self._function, self._given = begin, function, given
        self._q_and_v: list[Tensor] = []  # As they were projected, where keys are to be added.
        self._joins_left = 2 * _added(given) - 1  # Keys are joined, then values; the last keys.
        self._finish: list[Callable[[Tensor], Tensor]] = []

    def names(self) -> dict[str, Any]:
        found = {name: functools.partial(self._projected, name) for name in _PROJECTIONS}
        found[_OUTPUT] = self._linear  # type: ignore[assignment]
        return {**found, "torch": _Torch(self._cat)} if self._joins_left > 0 else found

    def _met(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        named = {name: self._given.get(name) for name in _READ}
        both = self._begin(_read_written_out, self._function, (q, k, v), named)
        if both is None:
            return q, k, v
        self._finish.append(both[1])
        return both[0]

    def _projected(self, name: str, *inputs: Any) -> Any:
        q, k, v = self._function.__globals__[name](*inputs)
        if self._joins_left < 0:
            return self._met(q, k, v)
        self._q_and_v = [q, v]
        return q, k, v

    def _cat(self, tensors: list[Tensor], dim: int = 0) -> Tensor:
        whole = torch.cat(tensors, dim)
        self._joins_left -= 1
        if self._joins_left or not self._q_and_v:
            return whole
        q, v = self._q_and_v
        return self._met(q, whole, v)[1]

    def _linear(self, x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        return functional.linear(self._finish.pop()(x) if self._finish else x, weight, bias)


def _between(begin: Begin, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call, with the taps in the midst of it."""
    try:
        given = Arguments(function, args, kwargs)
    except TypeError:
        return function(*args, **kwargs)  # It says itself what is wrong.

    def sdpa(*inputs: Any) -> Any:
        called = functional.scaled_dot_product_attention
        met = begin(sdpa_call.read, called, inputs, {})
        return called(*inputs) if met is None else met[1](called(*met[0], *inputs[3:]))

    names: dict[str, Any] = {_CALLED: sdpa}
    if given.get("need_weights"):
        names = _WrittenOut(begin, function, given).names()
    return _with(function, names)(*args, **kwargs)


class _Reader:
    """A Reader (_hook/calls/call.py) of calls that are met in their midst."""

    between = staticmethod(_between)

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """torch.compile asks it, where the function is not met in its midst."""
        return f"{NAME} is compiled by another way than is known: not measured"

    @staticmethod
    def applies(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the function writes its attention out."""
        try:
            given = Arguments(function, args, kwargs)
        except TypeError:
            return False
        return bool(given.get("need_weights"))


read = _Reader()
