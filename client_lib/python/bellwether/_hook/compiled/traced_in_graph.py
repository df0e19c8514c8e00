"""Functions of torch that torch.compile puts into its graph whole: attention is met in their midst.

What traces a model does not look into them.  What later makes kernels of the graph runs them, with
stand-ins for tensors.  So the graph gets another function, which runs the same code between taps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from ..calls.call import Met, Reader
from ..functions import function_calls
from . import compiled_taps, traced_calls
from .recipes import UNKNOWN
from .traced_calls import Place, Plan, Taps, Tensors, guarded, plan_of, planned, untraced

_CONSTANTS = (type(None), bool, int, float, str)


@functools.cache
def with_taps(function: Callable[..., Any], reader: Any) -> Callable[..., Any]:
    """The function, which gets the tensor of a mark and the number of the call first.

    reader  has `between` (function_calls.py)
    """

    def made(mark: Tensor, site: int, *args: Any, **kwargs: Any) -> Any:
        # A mode of the compiler's own would get the function, and call it without taps.
        with torch._C.DisableTorchFunction():
            return reader.between(functools.partial(_begin, mark, site), function, args, kwargs)

    made.__name__ = made.__qualname__ = function.__name__  # By it the graph names its node.
    return made


def between(
    tx: Any, place: Place, read: Any, tracker: Any, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """traced_calls.between(), for such a function, too."""
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def inside() -> Optional[tuple[Any, list[Any]]]:
        function, reader = untraced(tracker), untraced(read)
        reader = reader or function_calls.traced_reader(function)
        if not hasattr(reader, "between") or type(tracker) is not TorchInGraphFunctionVariable:
            return None
        if not torch.is_grad_enabled() or tracker.torch_function_override_enabled(tx, args, kwargs):
            return None
        made: Any = TorchInGraphFunctionVariable(with_taps(function, reader))
        return made, [*Taps(tx, place).known_by(), *args]

    found = guarded(inside, None)
    if found is None:
        return traced_calls.between(tx, place, read, tracker, args, kwargs)
    return found[0].call_function(tx, found[1], kwargs)


def _begin(
    mark: Tensor, site: int, reader: Reader, function: Callable[..., Any], args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Optional[Met]:  # fmt: skip
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return None
    name = getattr(function, "__name__", "attention")

    def met() -> Optional[Met]:
        plan = planned(lambda: _plan(reader, function, args, kwargs), name)
        return _behind_taps(mark, site, args, plan) if plan.number >= 0 else None

    return guarded(met, None)


def _plan(
    reader: Reader, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Plan:
    tensors = Tensors()

    def both(value: Any) -> tuple[Any, Any]:
        if isinstance(value, Tensor):
            return value, tensors.slot(value, value)
        known = type(value) in _CONSTANTS
        return (value, value) if known else (UNKNOWN, UNKNOWN)

    given, named = [both(x) for x in args], {name: both(x) for name, x in kwargs.items()}
    return plan_of(tensors, function, reader, given, named, lambda *_: None)


def _behind_taps(mark: Tensor, site: int, args: tuple[Any, ...], plan: Plan) -> Met:
    """args  those of the call: q, k, v, ..."""
    tensors: list[Tensor] = list(plan.tensors)
    for place in reversed(plan.qkv):  # As autocast does: kernels are made in that order.
        if plan.cast is not None:
            tensors[place] = compiled_taps.cast_to(tensors[place], plan.cast)
        if place in plan.taps:
            tensors[place] = compiled_taps.tap_input(tensors[place], mark, plan.taps[place], site)
    q, k, v = (tensors[place] for place in plan.qkv) if len(plan.qkv) == 3 else args[:3]

    def finish(o: Tensor) -> Tensor:
        tapped = compiled_taps.tap_output
        made: Tensor = guarded(lambda: tapped(o, mark, plan.number, site, *tensors), o)
        return made

    return (q, k, v), finish
