"""nn.MultiheadAttention that is asked for its weights: it writes its attention out.  (Without, it
calls scaled_dot_product_attention, where it is seen.)

Its function is run by its own code.  Two names that the code calls mean functions of ours there:
what projects the inputs, where q, k and v are met, and what projects the output.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Union

from torch import Tensor
from torch.nn import functional

from .._hook.calls.call import AttentionCall, Reader, View
from .._hook.functions.function_calls import Begin
from .._util.guard import in_words
from .arguments import Arguments, scale_of
from .terms import mask_of

NAME = "nn.MultiheadAttention"
TRIED = ("torch 2.13.0",)

_PROJECTIONS = ("_in_projection_packed", "_in_projection")
_OUTPUT = "linear"
_OTHER_KEYS = ("bias_k", "bias_v", "static_k", "static_v")


def functions() -> Iterator[tuple[Callable[..., Any], Reader]]:
    function = functional.multi_head_attention_forward
    if {*_PROJECTIONS, _OUTPUT} <= set(function.__code__.co_names):
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
    return [term if term.is_floating_point() else ~term for term in found]


def _call(given: Arguments, q: Tensor, k: Tensor, v: Tensor) -> Union[AttentionCall, str]:
    """q, k, v  [tokens, batch, width]"""
    batch, heads = q.shape[1], given.get("num_heads")
    scale, unread = scale_of(None, q.shape[-1] // heads)
    other = [name for name in _OTHER_KEYS if given.get(name) is not None]
    if other or given.get("add_zero_attn"):
        unread = f"{other[0] if other else 'add_zero_attn'} given"
    view = _view(heads, batch)
    return AttentionCall(
        q, k, v, view, view, view, view, lambda *_: None, scale,
        mask_of(_terms(given, batch, heads)),
        cancels=unread is None,
        dropout=float(given.get("dropout_p") or 0.0) if given.get("training") else 0.0,
        kernel=functools.partial(str, NAME),
        unread=unread,
    )  # fmt: skip


def _read(given: Arguments, q: Tensor, k: Tensor, v: Tensor) -> Union[AttentionCall, str]:
    try:
        return _call(given, q, k, v)
    except Exception as e:
        return f"a call of {NAME} cannot be read ({in_words(e)}): not measured"


def _between(begin: Begin, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call, with the taps in the midst of it."""
    given = Arguments(function, args, kwargs)
    finish: list[Callable[[Tensor], Tensor]] = []

    def projected(name: str, *inputs: Any) -> Any:
        q, k, v = function.__globals__[name](*inputs)
        met = begin(lambda: _read(given, q, k, v))
        if met is None:
            return q, k, v
        finish.append(met[1])
        return met[0]

    def linear(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        return functional.linear(finish.pop()(x) if finish else x, weight, bias)

    names: dict[str, Any] = {name: functools.partial(projected, name) for name in _PROJECTIONS}
    return _with(function, {**names, _OUTPUT: linear})(*args, **kwargs)


class _Reader:
    """A Reader (_hook/calls/call.py) of calls that are met in their midst."""

    between = staticmethod(_between)

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """torch.compile asks it, which cannot be met in the midst of a function."""
        return f"{NAME} is asked for its weights, and compiled: not measured"

    @staticmethod
    def applies(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the function writes its attention out."""
        try:
            given = Arguments(function, args, kwargs)
        except TypeError:
            return False
        return bool(given.get("need_weights"))


read = _Reader()
