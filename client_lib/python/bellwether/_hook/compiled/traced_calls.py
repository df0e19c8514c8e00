"""Calls of attention that torch.compile traces: the taps around each, and the recipe by which it is
read when it runs (recipes.py).

All here runs in the compiler, once a graph.  Arguments are dynamo's trackers of variables.  A
reader is asked once with the compiler's own stand-ins for tensors, which have shapes and no values.
Its answer tells which of them are q, k and v, and whether the gradients of the keys add up to 0.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..._kernels import laws
from ..._util.guard import harmless, in_words
from ..._weights import split_check
from ..calls.call import AttentionCall, Reader, View
from ..calls.contract import Contract
from ..functions import function_calls
from ..hosts import PatchedLayer
from . import compiled_taps, traced_rows
from .recipes import UNKNOWN, Recipe, Slot, Submodule, number_of

T = TypeVar("T")
_DEPTH_MAX = 4  # Of tuples in tuples.
NOT_APART = "q, k and v of a compiled call are not apart from each other: not measured"
_NO_TENSORS = "q, k and v of a compiled call are none of its arguments: not measured"


class Tensors:
    """The tensors that a recipe needs: each once, as its tracker and as the compiler's stand-in."""

    def __init__(self) -> None:
        self.trackers: list[Any] = []
        self.fakes: list[Tensor] = []

    def slot(self, tracker: Any, fake: Tensor) -> Slot:
        for place, known in enumerate(self.fakes):
            if known is fake:
                return Slot(place)
        self.trackers.append(tracker)
        self.fakes.append(fake)
        return Slot(len(self.fakes) - 1)


@harmless("torch.compile of the attention")
def _report(error: Exception) -> None:
    raise error


def guarded(make: Callable[[], T], instead: T) -> T:
    """What it makes; `instead` after an error, which ends the watching and not the compiling."""
    from torch._dynamo.exc import RestartAnalysis

    try:
        return make()
    except RestartAnalysis:  # It begins anew, and comes by again.
        raise
    except Exception as e:
        _report(e)
        return instead


class Place(NamedTuple):
    """Whose call it is."""

    mark: Any  # Its tracker.
    earlier: Any = None  # That of a list with an item for each call of the forward before it; ...
    number: int = 0  # ... or how many there were.


class Plan(NamedTuple):
    number: int  # Of the recipe; below 0 the call is left alone.
    tensors: list[Any]  # Their trackers.
    qkv: tuple[int, ...] = ()  # Places among them; none: the recipe says why nothing is measured.
    taps: Mapping[int, str] = {}  # Of them, whose gradient is asked for: "q", "k", "v", several.
    cast: Optional[torch.dtype] = None


# (The call, the trackers of q and k) -> how these are made of what projections return.
Shown = Callable[[AttentionCall, Any, Any], Optional[split_check.Evidence]]


def _inline(tx: Any, function: Callable[..., Any], *args: Any) -> Any:
    from torch._dynamo.variables.functions import UserFunctionVariable

    return tx.inline_user_function_return(UserFunctionVariable(function), [*args], {})  # type: ignore[arg-type]


def _constant(value: Any) -> Any:
    from torch._dynamo.variables import ConstantVariable

    return ConstantVariable.create(value)


def fake_of(tracker: Any) -> Optional[Tensor]:
    """The compiler's stand-in for a tensor."""
    from torch._dynamo.variables import TensorVariable

    if not isinstance(tracker, TensorVariable):
        return None
    fake = tracker.as_proxy().node.meta.get("example_value")
    return fake if isinstance(fake, Tensor) else None


def apart(qkv: list[Tensor]) -> bool:
    """Whether q, k and v are three tensors."""
    return len({id(t) for t in qkv}) == 3


def _realized(tracker: Any) -> Any:
    realize = getattr(tracker, "realize", None)
    return realize() if realize is not None else tracker


def _module_of(tx: Any, tracker: Any) -> Optional[nn.Module]:
    from torch._dynamo.variables import NNModuleVariable, UnspecializedNNModuleVariable

    if isinstance(tracker, NNModuleVariable):
        found = tx.output.get_submodule(tracker.module_key)
    else:
        found = tracker.value if isinstance(tracker, UnspecializedNNModuleVariable) else None
    return found if isinstance(found, nn.Module) else None


def _path_in(owner: nn.Module, module: nn.Module) -> Optional[str]:
    return next((path for path, m in owner.named_modules() if m is module), None)


def _kind(tracker: Any) -> Optional[type]:
    from torch._dynamo.variables import ListVariable, TupleVariable

    return {TupleVariable: tuple, ListVariable: list}.get(type(tracker))


class _Reading:
    """What a reader gets while a call is traced, and what the recipe keeps of it."""

    def __init__(self, tx: Any, owner: nn.Module) -> None:
        self._tx, self._owner = tx, owner
        self.tensors = Tensors()

    def of(self, tracker: Any, depth: int = 0) -> tuple[Any, Any]:
        """(the value that the reader gets, the recipe's word for it)"""
        tracker = _realized(tracker)
        fake = fake_of(tracker)
        if fake is not None:
            return fake, self.tensors.slot(tracker, fake)
        module = _module_of(self._tx, tracker)
        if module is not None:
            path = _path_in(self._owner, module)
            return (UNKNOWN, UNKNOWN) if path is None else (module, Submodule(path))
        kind = _kind(tracker)
        if kind is not None and depth < _DEPTH_MAX:
            both = [self.of(item, depth + 1) for item in tracker.items]
            return kind(a for a, _ in both), kind(b for _, b in both)
        if tracker.is_python_constant():
            value = tracker.as_python_constant()
            return value, value
        return UNKNOWN, UNKNOWN


def _names(function: Any) -> Optional[frozenset[str]]:
    """Of the parameters that a function of Python has."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return None
    return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _plan(
    tx: Any, layer: PatchedLayer, owner: nn.Module, function: Any, reader: Reader,
    names: Optional[frozenset[str]], args: list[Any], kwargs: dict[str, Any],
) -> Plan:  # fmt: skip
    """names  of the parameters that may be looked at; None = all.  What goes into **kwargs a
    function ignores, and a guard on what differs between layers would compile each of them."""
    reading = _Reading(tx, owner)
    given = [reading.of(tracker) for tracker in args]
    named = {
        name: reading.of(tracker) if names is None or name in names else (UNKNOWN, UNKNOWN)
        for name, tracker in kwargs.items()
    }

    def shown(call: AttentionCall, q: Any, k: Any) -> Optional[split_check.Evidence]:
        with torch.no_grad():
            v_dim = call.v_view(call.v).shape[-1]
        return shown_by(layer, q, k, (call.q_view, call.k_view), v_dim)

    return plan_of(reading.tensors, function, reader, given, named, shown)


def plan_of(
    tensors: Tensors, function: Any, reader: Reader, given: Sequence[tuple[Any, Any]],
    named: dict[str, tuple[Any, Any]], shown: Shown,
) -> Plan:  # fmt: skip
    """given, named  the arguments: what the reader gets, and the recipe's word for it"""
    with torch.no_grad():
        call = reader(
            function, tuple(value for value, _ in given), {n: v for n, (v, _) in named.items()}
        )
    if not isinstance(call, AttentionCall):
        return untapped(call or "")
    fakes, trackers = tensors.fakes, tensors.trackers
    places = [i for t in (call.q, call.k, call.v) for i, fake in enumerate(fakes) if fake is t]
    if not any(t.requires_grad for t in (call.q, call.k, call.v)):
        return untapped("")
    if len(places) < 3:
        return untapped(_NO_TENSORS)
    if not (call.packed or apart([call.q, call.k, call.v])):
        return untapped(NOT_APART)
    recipe = Recipe(
        function, reader, tuple(spec for _, spec in given),
        tuple((name, spec) for name, (_, spec) in named.items()), call.cast, call.narrowed,
        call.dropout,
        call.trained(), shown(call, trackers[places[0]], trackers[places[1]]),
        kernel=_chosen(call),
        mask_trains=call.mask.tensor is not None and call.mask.tensor.requires_grad,
    )  # fmt: skip
    taps = dict(zip(dict.fromkeys(places), _tapped(call)))
    return Plan(
        number_of(recipe), trackers, tuple(taps), {place: of for place, of in taps.items() if of},
        call.cast,
    )  # fmt: skip


def _chosen(call: AttentionCall) -> str:
    """What PyTorch chooses for a call of scaled_dot_product_attention, where it is traced: in its
    backward another choice may be in force."""
    if call.options is None or not isinstance(call.q, FakeTensor):
        return ""
    name = call.kernel()
    return "" if name == "sdpa" else name


def _tapped(call: AttentionCall) -> list[str]:
    """What each of the call's tensors is, or "" where its gradient is not asked for.  This does not
    look at settings: calls of several models share a graph."""
    lawful = call.q.device.type in laws.DEVICES and call.without_laws() is None
    leaks = "k" in call.trained() and call.key_gradients_cancel()
    return [of if lawful or (leaks and "k" in of) else "" for of in call.groups()]


def untapped(reason: str) -> Plan:
    return Plan(number_of(Recipe(reason=reason)) if reason else -1, [])


def planned(make: Callable[[], Plan], name: str) -> Plan:
    try:
        return make()
    except Exception as e:
        return untapped(f"a compiled call of {name} cannot be read ({in_words(e)}): not measured")


def _is(tracker: Any, known: Any) -> bool:
    """(What has not been asked for yet stays so: it would be guarded.)"""
    lazy = hasattr(tracker, "is_realized")
    return (tracker.is_realized() and tracker.realize() is known) if lazy else tracker is known


def _replaced(values: Any, old: Any, new: Any) -> Any:
    """args or kwargs with another tracker where the old one was."""
    if isinstance(values, dict):
        return {name: new if _is(v, old) else v for name, v in values.items()}
    return [new if _is(v, old) else v for v in values]


class Taps:
    """Those of one call."""

    def __init__(self, tx: Any, place: Place) -> None:
        self._tx, self._mark = tx, _inline(tx, compiled_taps.tensor_of, place.mark)
        if place.earlier is None:
            self._site = _constant(place.number)
        else:
            self._site = _inline(tx, compiled_taps.next_site, place.earlier)

    def known_by(self) -> tuple[Any, Any]:
        """(the tensor of the mark, the number of the call)"""
        return self._mark, self._site

    def input(self, tracker: Any, of: str) -> Any:
        if not tracker.requires_grad:  # As it was made: it has been written to since.
            tracker = _inline(self._tx, compiled_taps.alias, tracker)
        tap = compiled_taps.tap_input
        return _inline(self._tx, tap, tracker, self._mark, _constant(of), self._site)

    def arguments(
        self, plan: Plan, args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Those that the call is made with; the plan's tensors become those that it sees."""
        for place in reversed(plan.qkv):  # As autocast does: kernels are made in that order.
            old = new = plan.tensors[place]
            if plan.cast is not None:
                new = _inline(self._tx, compiled_taps.cast_to, new, _constant(plan.cast))
            if place in plan.taps:
                new = self.input(new, plan.taps[place])
            if new is not old:
                args, kwargs = _replaced(args, old, new), _replaced(kwargs, old, new)
                plan.tensors[place] = new
        return args, kwargs

    def output(self, result: Any, plan: Plan) -> Any:
        if plan.number < 0:
            return result
        return _inline(
            self._tx, compiled_taps.tap_output, result, self._mark, _constant(plan.number),
            self._site, *plan.tensors,
        )  # fmt: skip


def untraced(tracker: Any) -> Any:
    """What a tracker of something that has a value stands for."""
    if callable(tracker) or tracker is None:
        return tracker  # It is no tracker.
    tracker = _realized(tracker)
    for name in ("fn", "value"):
        if getattr(tracker, name, None) is not None:
            return getattr(tracker, name)
    return tracker.as_python_constant() if tracker.is_python_constant() else None


def applies(function: Any, reader: Reader, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one for its function's reader; else what it calls is met."""
    asks = getattr(reader, "applies", None)
    if asks is None or hasattr(reader, "between"):  # In its midst it is met in any case.
        return True
    values = tuple(map(untraced, args))
    return bool(asks(function, values, {name: untraced(value) for name, value in kwargs.items()}))


def layer_of(mark: Any) -> Optional[PatchedLayer]:
    """mark  the tracker of a Mark"""
    found = untraced(mark)
    return found.layer() if isinstance(found, compiled_taps.Mark) else None


def shown_by(
    layer: PatchedLayer, q: Any, k: Any, views: tuple[View, View], v_dim: int
) -> Optional[split_check.Evidence]:
    """q, k   trackers, of tensors that these views give as [batch, heads, tokens, dim]
    v_dim  of a head's values"""
    fakes = fake_of(q), fake_of(k)
    if fakes[0] is None or fakes[1] is None:
        return None
    with torch.no_grad():
        queries, keys = views[0](fakes[0]), views[1](fakes[1])
    modules = layer.unsure_projections(queries.shape[1], keys.shape[1], queries.shape[3], v_dim)
    if not modules:
        return None
    return traced_rows.evidence(modules, views, q.as_proxy().node, k.as_proxy().node)


_calls_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # Frames -> calls.


def discovered(tx: Any, met: Callable[[nn.Module], bool]) -> Optional[Place]:
    """That of a call which is traced, and which no patched forward makes: the innermost module's.

    met  whether a call of the module is met
    """
    if not torch.is_grad_enabled() or compiled_taps.exporting():
        return None
    frame = tx
    while frame is not None:
        tracker = _realized(getattr(frame, "symbolic_locals", {}).get("self"))
        module = _module_of(tx, tracker) if tracker is not None else None
        if module is not None:
            if not met(module):
                return None
            call = _calls_of.get(frame, 0)
            _calls_of[frame] = call + 1
            mark = tracker.var_getattr(tx, compiled_taps.ATTRIBUTE)
            return Place(mark, number=call)
        frame = getattr(frame, "parent", None)
    return None


def between(
    tx: Any, place: Place, read: Any, tracker: Any, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """A call of a function, whose tracker is given, between its taps.

    read  the tracker of a Reader, of a Contract, or of None: that which the function has
    """

    def plan() -> Plan:
        function, found, names = untraced(tracker), untraced(read), None
        if found is None:
            found, names = function_calls.traced_reader(function), _names(function)
        elif isinstance(found, Contract):
            found = found.read
        layer = layer_of(place.mark)
        owner = layer.module() if layer is not None else None
        if layer is None or owner is None or found is None or not torch.is_grad_enabled():
            return untapped("")
        name = getattr(function, "__name__", "attention")
        return planned(lambda: _plan(tx, layer, owner, function, found, names, args, kwargs), name)

    made = guarded(plan, untapped(""))
    taps = guarded(lambda: Taps(tx, place), None) if made.number >= 0 else None
    if taps is None:
        return tracker.call_function(tx, args, kwargs)
    args, kwargs = guarded(lambda: taps.arguments(made, args, kwargs), (args, kwargs))
    result = tracker.call_function(tx, args, kwargs)
    return guarded(lambda: taps.output(result, made), result)
