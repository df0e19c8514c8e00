"""Gets between a model and scaled_dot_product_attention without touching any instance or name.

`forward` of the classes of the attention modules is patched, so that deepcopy, pickle and
state_dict of the model see nothing.  It notes on a thread-local stack which layer is running and
what the function means inside it.  A monitor wants the layer (`install`), stabilize() another
function (`install_function`), and one module may have both.  What a monitor switches in flight is
in attention_switch.py.

While such a forward runs the function of C itself calls `_seen` (native_call.py), by whatever name
it was reached.  What is traced or exported is left alone.  What installs also uninstalls, and the
last one leaves nothing behind.  torch.compile traces functions of ours where it meets attention
inside such a forward (dynamo_calls.py).  The one thing that hangs on an instance is what its taps
need (compiled_taps.py).
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ..._util.guard import harmless
from ..._util.torch_version import TORCH_MIN, dotted
from .. import attention_switch
from ..calls import sdpa_call
from ..calls.call import Reader
from ..calls.call_sites import Forward
from ..calls.contract import ATTRIBUTE as CONTRACT
from ..calls.contract import Contract
from ..compiled import compiled_taps, dynamo_calls, traced_forward
from ..functions import function_calls
from ..functions.native_call import NativeCall
from ..hosts import PatchedLayer, Seeker
from ..running import Entry, being_traced, checkpointed, saved_tensor_hooks
from ..running import running as _running

_lock = threading.RLock()
_original = traced_forward.ORIGINAL
_ROOT: Entry = (None, None, _original, None, "", True)
_layers: dict[int, PatchedLayer] = {}  # id(module) -> layer
_functions: dict[int, tuple[weakref.ref[nn.Module], Callable[..., Any]]] = {}  # id(module) -> ...
_seekers: list[Seeker] = []  # They find whose a call is, ...
_roots: dict[int, weakref.ref[nn.Module]] = {}  # ... while one of these runs; by id().
_class_users: dict[type, int] = {}
_class_forwards: dict[type, tuple[Optional[Any], Any]] = {}  # Theirs, ours; None = inherited


def _push(entry: Entry) -> None:
    if torch.compiler.is_dynamo_compiling():
        compiled_taps.unseen(_running.stack.append, entry)
        return
    _running.stack.append(entry)
    if entry[5]:
        _calls.divert()
        function_calls.see()


def _pop() -> None:
    if torch.compiler.is_dynamo_compiling():
        compiled_taps.unseen(_running.stack.pop)
    elif _running.stack.pop()[5]:
        function_calls.leave()
        _calls.restore()


def look_closer() -> None:
    """Something of ours is used in the forward that runs: its calls are to be seen, though its
    step is not sampled."""
    if not _running.stack:
        return
    layer, forward, function, mark, word, sees = _running.stack[-1]
    if layer is None:
        return
    layer.look_closer()
    if not sees:
        _running.stack[-1] = (layer, forward, function, mark, word, True)
        _calls.divert()
        function_calls.see()


def _tried(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a compiler tries out what it has traced."""
    return any(isinstance(x, (FakeTensor, FunctionalTensor)) for x in (*args, *kwargs.values()))


def _seen(*args: Any, **kwargs: Any) -> Any:
    """What a call of the function comes to while it is diverted."""
    if not _running.sees() or _tried(args, kwargs):
        return _calls.plain(*args, **kwargs)
    _running.inside = True
    try:
        if not _running.stack:
            return _of_layer(None, None, _calls.plain, sdpa_call.read, args, kwargs)
        return _attention(args, kwargs)
    finally:
        _running.inside = False


_calls = NativeCall(_original, _seen)


def seen(
    plain: Callable[..., Any], read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a call of another function comes to, which an adapter diverts.

    plain  the function as it is without us
    """
    if not _running.sees() or _tried(args, kwargs):
        return plain(*args, **kwargs)
    _running.inside = True
    outer = _running.stack[-1] if _running.stack else None
    if outer is not None and outer[3] is not None:
        # What is compiled of the function has taps too, if it was traced where nothing saw the
        # call: they hear nothing of this one.
        _running.stack[-1] = (*outer[:3], outer[3].deaf(), *outer[4:])
    try:
        layer, forward = outer[:2] if outer is not None else (None, None)
        if outer is not None and outer[4]:
            plain, read = _function_switched(outer[4], plain, read)
        return _of_layer(layer, forward, plain, read, args, kwargs)
    finally:
        if outer is not None:
            _running.stack[-1] = outer
        _running.inside = False


def _of_layer(
    layer: Optional[PatchedLayer], forward: Optional[Forward], function: Callable[..., Any],
    read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any], centred: bool = False,
) -> Any:  # fmt: skip
    """A call of the layer's module; layer  None where it is not known yet."""
    known = layer is not None
    layer = layer if known or not _seekers else _owner(args, kwargs)
    if layer is None:
        return function(*args, **kwargs)
    # A recomputation may come when the module is patched, and would tap it.
    untapped = not known and (checkpointed() or not torch.is_grad_enabled())
    between = getattr(read, "between", None)  # A function that is met in its midst.
    if between is not None and not untapped:

        def begin(its_reader: Reader, *call: Any) -> Optional[function_calls.Met]:
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
    owners = (seeker.owner() for seeker in list(_seekers))
    return next((layer for layer in owners if layer is not None), None)


def seek(seeker: Seeker, roots: Sequence[nn.Module]) -> None:
    """From now on it is asked for the layer of a call that no known module makes, while one of the
    roots runs."""
    with _lock:
        for module in roots:
            patch_forward(type(module))
            _roots[id(module)] = weakref.ref(module)
        _seekers.append(seeker)


def seek_no_more(seeker: Seeker) -> None:
    """The patches stay, since torch.compile may have seen them."""
    with _lock:
        if seeker in _seekers:
            _seekers.remove(seeker)


def forget_roots(modules: Sequence[nn.Module], classes: Sequence[type]) -> None:
    with _lock:
        for key in [key for key, of in _roots.items() if of() is None or of() in modules]:
            del _roots[key]
        for cls in classes:
            restore_forward(cls)


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call inside the module that runs."""
    layer, forward, function, _, word, _ = _running.stack[-1]
    centred = False
    if word:
        function, args, kwargs, centred = _switched(word, function, args, kwargs)
    return _of_layer(layer, forward, function, sdpa_call.read, args, kwargs, centred)


def _as_written(
    word: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], bool]:
    return function, args, kwargs, False


_switched = harmless("a switch of the attention", _as_written)(attention_switch.call)
_function_switched = harmless(
    "a switch of the attention", lambda text, function, read: (function, read)
)(attention_switch.function_in_mode)


def _can_see() -> None:
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)


def too_old() -> Optional[str]:
    """Why this torch is none to be used.  One before 2.8 does not tell whether a region is
    checkpointed, and a tap that a recomputation does not find would end the backward."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version >= TORCH_MIN:
        return None
    return f"torch {torch.__version__} is here: {dotted(TORCH_MIN)} or newer is needed"


def unavailable() -> Optional[str]:
    """Why calls cannot be seen in this process; None if they can."""
    return too_old() or _calls.why_not()


def original() -> Callable[..., Any]:
    return _original


def _function_in(module: nn.Module) -> Callable[..., Any]:
    entry = _functions.get(id(module))
    # An id may be that of another module by now, or of a copy's original.
    return entry[1] if entry is not None and entry[0]() is module else _original


def is_plain(module: nn.Module) -> bool:
    """Whether no other function was put in the place of the module's attention."""
    return _function_in(module) is _original


def _is_root(module: nn.Module) -> bool:
    of = _roots.get(id(module))
    return of is not None and of() is module


@harmless("forward of an attention module")
def _entering(module: nn.Module) -> Optional[Entry]:
    """What to put on the stack while the module runs forward; None if there is nothing to do."""
    function = _function_in(module) if _functions else _original
    own = module.__dict__  # What it has for other names (__getattr__) is its own code.
    word = own.get(attention_switch.ATTRIBUTE, "") if attention_switch.users else ""
    layer = _layers.get(id(module))
    if layer is not None and (layer.module() is not module or being_traced()):
        layer = None
    known = layer is not None or function is not _original or bool(word)
    if not known and not _running.stack:
        return _ROOT if _seekers and _is_root(module) and not being_traced() else None
    sees = function is not _original or bool(word) or (layer is not None and layer.expects())
    state: Optional[Forward] = Forward(saved_tensor_hooks(), torch.is_grad_enabled())
    mark = own.get(compiled_taps.ATTRIBUTE)
    if _running.stack:  # What this module leaves open, the one around it says.
        outer = _running.stack[-1]
        layer, state = (layer, state) if layer is not None else outer[:2]
        function = function if function is not _original else outer[2]
        mark = mark if mark is not None else outer[3]
        word = word or outer[4]
        sees = sees or outer[5]
    return layer, state, function, mark, word, sees


@harmless("forward of an attention module")
def _leaving(entry: Entry) -> None:
    if entry is _ROOT:
        _running.roots -= 1
        function_calls.leave()
        _calls.restore()
        return
    _pop()
    if entry[0] is not None and not _of_outer(entry):
        entry[0].heard()


@harmless("forward of an attention module", lambda entry: False)
def _entered(entry: Entry) -> bool:
    if entry is _ROOT:
        _running.roots += 1
        _calls.divert()
        function_calls.see()
        return True
    outer = _of_outer(entry)
    _push(entry)
    if entry[0] is not None and not outer:
        entry[0].listen()
    return True


def _of_outer(entry: Entry) -> bool:
    """Whether its layer is that of the module around it, whose forward goes on."""
    return bool(_running.stack) and _running.stack[-1][1] is entry[1]


def _forward_of(cls: type) -> Callable[..., Any]:
    """The class's forward as a function of the module and its arguments."""
    found = inspect.getattr_static(cls, "forward")
    if isinstance(found, types.FunctionType):
        return found
    bind = getattr(type(found), "__get__", None)  # A staticmethod has none of the module, ...

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # ... and a function of C is called as it is.
        bound: Any = found if bind is None else bind(found, self, type(self))
        return bound(*args, **kwargs)

    return forward


def _patched_forward(inherited: Callable[..., Any]) -> Callable[..., Any]:
    def bellwether_forward(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return _compiled_forward(inherited, self, args, kwargs)
        entry = _entering(self)
        if entry is None:
            return inherited(self, *args, **kwargs)
        contract = self.__dict__.get(CONTRACT)
        if contract is not None and entry[0] is not None and entry[5]:
            return _by_contract(contract, inherited, self, entry, args, kwargs)
        if not _entered(entry):
            return inherited(self, *args, **kwargs)
        try:
            return inherited(self, *args, **kwargs)
        finally:
            _leaving(entry)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bellwether_forward(self, args, kwargs)

    # Among the names of the method that it stands for, where jit.script looks them up, and with
    # code of its own, for which torch.compile keeps what it has made.
    ours = types.FunctionType(
        forward.__code__.replace(), getattr(inherited, "__globals__", globals()), "forward",
        None, forward.__closure__,
    )  # fmt: skip
    return functools.wraps(inherited)(ours)


def _compiled_forward(
    inherited: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What torch.compile traces: it knows a layer by its mark."""
    # Not asked for where there is none: id() of a module would tie a graph to it.
    function = _function_in(module) if _functions else _original
    mark = getattr(module, compiled_taps.ATTRIBUTE, None)
    word = getattr(module, attention_switch.ATTRIBUTE, "") if attention_switch.users else ""
    if (mark is not None or word) and compiled_taps.exporting():
        mark, word = None, ""  # What leaves the process is the model alone.
    contract = getattr(module, CONTRACT, None)
    if mark is None and contract is None and function is _original and not word:
        return inherited(module, *args, **kwargs)
    forward: Optional[Forward] = Forward(None, True)
    if _running.stack:
        outer = _running.stack[-1]
        function = function if function is not _original else outer[2]
        forward, mark = (forward, mark) if mark is not None else (outer[1], outer[3])
        word = word or outer[4]
    entry: Entry = (None, forward, function, mark, word, True)
    if contract is not None and mark is not None:
        return _by_contract(contract, inherited, module, entry, args, kwargs)
    return _compiled_inside(entry, inherited, module, args, kwargs)


def _compiled_inside(
    entry: Entry, inherited: Callable[..., Any], module: nn.Module, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    _push(entry)
    try:
        return inherited(module, *args, **kwargs)
    finally:
        _pop()


def _by_contract(
    contract: Contract, inherited: Callable[..., Any], module: nn.Module,
    entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """The forward of a module that is attention itself, between the taps."""
    layer, state, function, mark, _, _ = entry

    def forward(*inner: Any, **named: Any) -> Any:
        _push((None, None, _original, None, "", False))  # It may call the function, too.
        try:
            return inherited(module, *inner, **named)
        finally:
            _pop()

    if torch.compiler.is_compiling():
        return compiled_taps.tapped(contract, forward, mark, [], *args, **kwargs)
    if layer is None:
        return forward(*args, **kwargs)
    _push((layer, state, function, mark, "", False))
    try:
        return layer.attention(
            lambda: contract.read(forward, args, kwargs), lambda: forward(*args, **kwargs), None
        )
    finally:
        _pop()


def _applies(tx: Any) -> bool:
    """Whether torch.compile is inside the forward of an attention module of ours, be it traced or
    running."""
    if _running.inside:  # It is met already, around what is compiled.
        return False
    return bool(_running.stack) or _compiled_inside.__code__ in dynamo_calls.frames(tx)


def _discovered(module: nn.Module) -> bool:
    """torch.compile traces a call of a module whose forward is not patched.  Whether it is met
    here."""
    if _running.inside:
        return False
    for seeker in list(_seekers):
        seeker.traced(module)
    return compiled_taps.ATTRIBUTE in vars(module)


_traced = dynamo_calls.Replacements(
    _applies,
    _original,
    traced_forward.sdpa,
    traced_forward.function_with_reader,
    traced_forward.place,
    _discovered,
)


def patch_forward(cls: type) -> None:
    if not _class_users:
        dynamo_calls.begin(_traced)
        function_calls.begin(seen)
    _class_users[cls] = _class_users.get(cls, 0) + 1
    if _class_users[cls] == 1:
        ours = _patched_forward(_forward_of(cls))
        _class_forwards[cls] = vars(cls).get("forward"), ours
        cls.forward = ours  # type: ignore[attr-defined]


def restore_forward(cls: type) -> None:
    if cls not in _class_users:
        return
    _class_users[cls] -= 1
    if _class_users[cls] == 0:
        del _class_users[cls]
        if not _class_users:
            dynamo_calls.end()
            function_calls.end()
        before, ours = _class_forwards.pop(cls)
        if vars(cls).get("forward") is not ours:
            return  # Somebody has patched over us since: below theirs, ours only passes on.
        if before is None:
            del cls.forward  # type: ignore[attr-defined]
        else:
            cls.forward = before  # type: ignore[attr-defined]


def own_forward(cls: type) -> Optional[Any]:
    """What the class itself has as its forward, without us; None = it inherits one."""
    known = _class_forwards.get(cls)
    return vars(cls).get("forward") if known is None else known[0]


def watched_in(model: nn.Module) -> list[PatchedLayer]:
    """Layers of live monitors whose modules are in the model."""
    found = [_layers[id(m)] for m in model.modules() if id(m) in _layers]
    return [x for x in found if x.module() is not None and x.watched and x.host.live()]


def install(layers: Sequence[PatchedLayer]) -> None:
    """Patches for one monitor.  `layers` are those of its modules.  If it raises, nothing is."""
    done: list[PatchedLayer] = []
    _can_see()
    with _lock:
        try:
            for layer in layers:
                module = layer.module()
                if module is None:
                    continue
                patch_forward(type(module))
                done.append(layer)
                _layers[id(module)] = layer
                compiled_taps.put(module, layer)
            dynamo_calls.forget()
        except Exception:
            uninstall(done)
            raise


def uninstall(layers: Sequence[PatchedLayer]) -> None:
    """Takes one monitor's patches back; with the last user nothing of ours is left."""
    with _lock:
        for layer in layers:
            for key in [k for k, value in _layers.items() if value is layer]:
                del _layers[key]
            compiled_taps.take(layer.module(), layer)
            restore_forward(layer.module_class)
            layer.ends()


def install_function(modules: list[nn.Module], function: Callable[..., Any]) -> Callable[[], None]:
    """From now on scaled_dot_product_attention means `function` inside these modules.

    Returns what takes it back; to be called once.  Raises RuntimeError if calls cannot be seen.
    """
    _can_see()
    with _lock:
        for module in modules:
            _functions[id(module)] = (weakref.ref(module), function)
            patch_forward(type(module))
        dynamo_calls.forget()
    keys, classes = [id(m) for m in modules], [type(m) for m in modules]

    def uninstall_function() -> None:
        with _lock:
            for key, cls in zip(keys, classes):
                if key in _functions and _functions[key][1] is function:
                    del _functions[key]
                restore_forward(cls)

    return uninstall_function
