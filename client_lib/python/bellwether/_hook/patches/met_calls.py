"""What a call of attention comes to that is met while a module runs: one between the layer's taps.

While such a forward runs, the function of C itself calls `_sdpa` (native_call.py), by whatever name
it was reached, and functions of Python come to `function` (function_calls.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ..._util.guard import harmless
from .. import attention_switch
from ..calls import sdpa_call
from ..calls.call import Met, Reader
from ..calls.call_sites import Forward
from ..calls.kernel_choice import SDPA
from ..functions import function_calls
from ..functions.native_call import NativeCall
from ..hosts import PatchedLayer
from ..running import checkpointed, running
from . import registry


def _tried(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a compiler tries out what it has traced."""
    return any(isinstance(x, (FakeTensor, FunctionalTensor)) for x in (*args, *kwargs.values()))


def _sdpa(*args: Any, **kwargs: Any) -> Any:
    """What a call of scaled_dot_product_attention comes to while it is diverted."""
    if not running.sees() or _tried(args, kwargs):
        return sdpa.plain(*args, **kwargs)
    running.inside = True
    try:
        if not running.stack:
            return _of_layer(None, None, sdpa.plain, sdpa_call.read, args, kwargs)
        entry, centred = running.stack[-1], False
        meant = entry.function
        if entry.word:
            meant, args, kwargs, centred = _switched(entry.word, meant, args, kwargs)
        return _of_layer(entry.layer, entry.forward, meant, sdpa_call.read, args, kwargs, centred)
    finally:
        running.inside = False


sdpa = NativeCall(SDPA, _sdpa)


def see() -> None:
    """Calls of this thread come here, until leave() has come as often."""
    sdpa.divert()
    function_calls.see()


def leave() -> None:
    function_calls.leave()
    sdpa.restore()


def function(
    plain: Callable[..., Any], read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a call of another function comes to, which an adapter diverts.

    plain  the function as it is without us
    """
    if not running.sees() or _tried(args, kwargs):
        return plain(*args, **kwargs)
    running.inside = True
    entry = running.stack[-1] if running.stack else None
    mark = entry.mark if entry is not None else None
    try:
        if entry is None:
            return _of_layer(None, None, plain, read, args, kwargs)
        if mark is not None:
            # What is compiled of the function has taps too, if it was traced where nothing saw the
            # call: they hear nothing of this one.
            entry.mark = mark.deaf()
        if entry.word:
            plain, read = _function_switched(entry.word, plain, read)
        return _of_layer(entry.layer, entry.forward, plain, read, args, kwargs)
    finally:
        if entry is not None:
            entry.mark = mark
        running.inside = False


def _as_written(
    word: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], bool]:
    return function, args, kwargs, False


_switched = harmless("a switch of the attention", _as_written)(attention_switch.call)
_function_switched = harmless(
    "a switch of the attention", lambda text, function, read: (function, read)
)(attention_switch.function_in_mode)


def _of_layer(
    layer: Optional[PatchedLayer], forward: Optional[Forward], function: Callable[..., Any],
    read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any], centred: bool = False,
) -> Any:  # fmt: skip
    """A call of the layer's module; layer  None where it is not known yet."""
    known = layer is not None
    layer = layer if known or not registry.seekers else _owner(args, kwargs)
    if layer is None:
        return function(*args, **kwargs)
    # A recomputation may come when the module is patched, and would tap it.
    untapped = not known and (checkpointed() or not torch.is_grad_enabled())
    between = getattr(read, "between", None)  # A function that is met in its midst.
    if between is not None and not untapped:

        def begin(its_reader: Reader, *call: Any) -> Optional[Met]:
            return layer.begin(lambda: its_reader(*call), forward)

        return between(begin, function, args, kwargs)
    if untapped:
        layer.meet(lambda: read(function, args, kwargs))
        return function(*args, **kwargs)
    return layer.attention(
        lambda: read(function, args, kwargs), lambda: function(*args, **kwargs), forward, centred
    )


def _is_nested(kind: type) -> bool:
    return kind.__module__.startswith("torch.nested.")


@harmless("search for the module that calls attention")
def _owner(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[PatchedLayer]:
    """The layer of a call that no known module makes."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return None  # Of a compiler perhaps, which tries what it has written down.
    for given in (*args, *kwargs.values()):
        known = type(given) in (torch.Tensor, nn.Parameter)
        if isinstance(given, torch.Tensor) and not (known or _is_nested(type(given))):
            return None
    owners = (seeker.owner() for seeker in list(registry.seekers))
    return next((layer for layer in owners if layer is not None), None)
