"""Gets between a model and scaled_dot_product_attention without touching any instance.

Two things are patched, both on the level of modules and classes, so that deepcopy, pickle and
state_dict of the model see nothing: the names under which Python code finds
scaled_dot_product_attention, and `forward` of the classes of the attention modules, which only
notes on a thread-local stack which layer is running and what the function means inside it: a
monitor wants the layer (`install`), stabilize() another function (`install_function`), and one
module may have both; what a monitor switches in flight is in switching.py.  What installs also
uninstalls, and the last one leaves nothing behind.
The one thing that hangs on an instance is what torch.compile needs (compiled_taps.py).
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import torch
import torch.nn.functional as functional
from torch import nn

from . import compiled_taps, switching, wrapping

if TYPE_CHECKING:
    from .layer import Layer

NAME = "scaled_dot_product_attention"


class _Running(threading.local):
    def __init__(self) -> None:
        # (layer or None, what autograd was to do when its forward began, what
        # scaled_dot_product_attention means inside, the module's mark for torch.compile, its word
        # of switching.py)
        self.stack: list[_Entry] = []


_Entry = tuple[Optional["Layer"], Any, Callable[..., Any], Any, str]
_running = _Running()
_lock = threading.RLock()
_original: Callable[..., Any] = functional.scaled_dot_product_attention
_layers: dict[int, Layer] = {}  # id(module) -> layer
_functions: dict[int, tuple[weakref.ref[nn.Module], Callable[..., Any]]] = {}  # id(module) -> ...
_class_users: dict[type, int] = {}
_class_forwards: dict[type, tuple[Optional[Any], Any]] = {}  # Theirs, ours; None = inherited
_names: list[tuple[Any, str, Any]] = []  # (namespace, name, what stood there)
_users = 0


def _push(entry: _Entry) -> None:
    if torch.compiler.is_compiling():
        compiled_taps.unseen(_running.stack.append, entry)
    else:
        _running.stack.append(entry)


def _pop() -> None:
    if torch.compiler.is_compiling():
        compiled_taps.unseen(_running.stack.pop)
    else:
        _running.stack.pop()


def _saved_tensor_hooks() -> Any:
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False)
    except (AttributeError, TypeError):  # A private function: another torch, another signature.
        return None


def _autograd_state() -> tuple[Any, bool]:
    """(the saved-tensor hooks in force, whether a graph is made)."""
    return _saved_tensor_hooks(), torch.is_grad_enabled()


def checkpointed() -> bool:
    """Whether saved tensors are being intercepted: a checkpointed region, in its forward or in
    its recomputation, which must do the same operations, or offloading."""
    return _saved_tensor_hooks() is not None


def checkpoint_inside() -> bool:
    """Whether a checkpointed region was opened inside the running attention module: its
    recomputation would not pass through the module, so nothing may be added to it."""
    if not _running.stack:
        return False
    hooks, recording = _running.stack[-1][1] or (None, False)
    # A reentrant one has no hooks, but computes without a graph at first.
    return hooks != _saved_tensor_hooks() or (recording and not torch.is_grad_enabled())


@functools.wraps(_original)
def _attention(*args: Any, **kwargs: Any) -> Any:
    if not _running.stack:
        return _original(*args, **kwargs)
    layer, _, function, mark, word = _running.stack[-1]
    centred = False
    if word:
        function, args, kwargs, centred = switching.call(word, function, args, kwargs)
    if torch.compiler.is_compiling():
        if mark is None:
            return function(*args, **kwargs)
        return compiled_taps.attention(function, mark.tensor, args, kwargs)
    if layer is None:
        return function(*args, **kwargs)
    return layer.attention(function, args, kwargs, centred)


# While it is installed it is what this name means, also to pickle.
_attention.__module__ = functional.__name__
_attention.__qualname__ = _attention.__name__ = NAME


def original() -> Callable[..., Any]:
    return _original


def _function_in(module: nn.Module) -> Callable[..., Any]:
    entry = _functions.get(id(module))
    # An id may be that of another module by now, or of a copy's original.
    return entry[1] if entry is not None and entry[0]() is module else _original


def is_plain(module: nn.Module) -> bool:
    """Whether nobody has put another function in the place of the module's attention."""
    return _function_in(module) is _original


def _patched_forward(inherited: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inherited)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Not asked for where there is none: id() of a module would tie a graph to it.
        function = _function_in(self) if _functions else _original
        layer: Optional[Layer] = None
        state = None
        mark = getattr(self, compiled_taps.ATTRIBUTE, None)
        word = getattr(self, switching.ATTRIBUTE, "") if switching.users else ""
        ours = mark is not None or word
        if ours and torch.compiler.is_compiling() and compiled_taps.exporting():
            mark, word = None, ""  # What leaves the process is the model alone.
        contract = getattr(self, wrapping.ATTRIBUTE, None)
        if not torch.compiler.is_compiling():
            layer = _layers.get(id(self))
            if layer is not None and layer.module() is not self:
                layer = None
            state = _autograd_state()
        plain = function is _original and not word
        if layer is None and mark is None and contract is None and plain:
            return inherited(self, *args, **kwargs)
        if _running.stack:  # What this module leaves open, the one around it says.
            outer = _running.stack[-1]
            layer, state = (layer, state) if layer is not None else outer[:2]
            function = function if function is not _original else outer[2]
            mark = mark if mark is not None else outer[3]
            word = word or outer[4]
        if contract is not None and (layer is not None or mark is not None):
            return _by_contract(contract, inherited, self, (layer, state, mark), args, kwargs)
        _push((layer, state, function, mark, word))
        try:
            return inherited(self, *args, **kwargs)
        finally:
            _pop()

    return forward


def _by_contract(
    contract: wrapping.Contract, inherited: Callable[..., Any], module: nn.Module,
    place: tuple[Optional[Layer], Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """The forward of a module that is attention itself, between the taps."""
    layer, state, mark = place

    def forward(*inner: Any, **named: Any) -> Any:
        _push((None, None, _original, None, ""))  # It may call the function, too.
        try:
            return inherited(module, *inner, **named)
        finally:
            _pop()

    read = contract.arguments(args, kwargs)
    if read is None:
        if layer is not None:
            layer.note("q, k and v are not three tensors of four dimensions: not measured")
        return forward(*args, **kwargs)
    tensors, rest, named = read
    extra: list[Any] = []
    function = contract.inside(forward, rest, named, extra)
    _push((layer, state, function, mark, ""))
    try:
        output = _attention(*tensors, **contract.told())
    finally:
        _pop()
    return contract.outside(output, extra)


def is_patched(cls: type) -> bool:
    return cls in _class_users


def _replace(namespace: Any, name: str, value: Any) -> None:
    before = namespace[name] if isinstance(namespace, dict) else namespace.__dict__[name]
    _names.append((namespace, name, before))
    _set(namespace, name, value)


def _set(namespace: Any, name: str, value: Any) -> None:
    if isinstance(namespace, dict):
        namespace[name] = value
    else:
        setattr(namespace, name, value)


def _patch_globals(model: nn.Module) -> None:
    """Every place where the function is reachable under a name of its own."""
    homes = {"__main__"}
    for module in model.modules():
        for cls in type(module).__mro__:
            homes.add(cls.__module__)
    for module_name, home in list(sys.modules.items()):
        if not isinstance(home, types.ModuleType):
            continue
        if module_name.split(".")[0] in ("torch", "bellwether"):
            continue
        names = vars(home)
        if module_name in homes:
            found = [n for n, value in names.items() if value is _original]
        else:
            found = [NAME] if names.get(NAME) is _original else []
        for name in found:
            _replace(home, name, _attention)


def _patch_attributes(model: nn.Module) -> None:
    """`self.attend = F.scaled_dot_product_attention`, and the same on a class."""
    seen: set[type] = set()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if value is _original:
                _replace(vars(module), name, _attention)
        for cls in type(module).__mro__:
            if cls in seen or cls.__module__.split(".")[0] == "torch":
                continue
            seen.add(cls)
            for name, value in list(vars(cls).items()):
                if value is _original or getattr(value, "__func__", None) is _original:
                    _replace(cls, name, staticmethod(_attention))


def patch_forward(cls: type) -> None:
    _class_users[cls] = _class_users.get(cls, 0) + 1
    if _class_users[cls] == 1:
        ours = _patched_forward(cls.forward)  # type: ignore[attr-defined]
        _class_forwards[cls] = vars(cls).get("forward"), ours
        cls.forward = ours  # type: ignore[attr-defined]


def restore_forward(cls: type) -> None:
    _class_users[cls] -= 1
    if _class_users[cls] == 0:
        del _class_users[cls]
        before, ours = _class_forwards.pop(cls)
        if vars(cls).get("forward") is not ours:
            return  # Somebody has patched over us since: below theirs, ours only passes on.
        if before is None:
            del cls.forward  # type: ignore[attr-defined]
        else:
            cls.forward = before  # type: ignore[attr-defined]


def _patch_names(model: nn.Module) -> None:
    global _users
    if _users == 0 and functional.scaled_dot_product_attention is _original:
        _replace(functional, NAME, _attention)
    _users += 1
    _patch_globals(model)
    _patch_attributes(model)


def _restore_names() -> None:
    global _users
    _users -= 1
    if _users > 0:
        return
    for namespace, name, before in reversed(_names):
        now = namespace.get(name) if isinstance(namespace, dict) else getattr(namespace, name, None)
        if now is _attention:  # Somebody patched over us since: leave theirs.
            _set(namespace, name, before)
    _names.clear()


def watched_in(model: nn.Module) -> list[Layer]:
    """Layers of live monitors whose modules are in the model."""
    found = [_layers[id(m)] for m in model.modules() if id(m) in _layers]
    return [x for x in found if x.module() is not None and x.watched and x.monitor.live()]


def install(model: nn.Module, layers: list[Layer]) -> None:
    """Patches for one monitor.  `layers` are those of its modules."""
    with _lock:
        _patch_names(model)
        for layer in layers:
            module = layer.module()
            if module is None:
                continue
            _layers[id(module)] = layer
            compiled_taps.put(module, layer)
            patch_forward(type(module))


def uninstall(layers: list[Layer]) -> None:
    """Takes one monitor's patches back; with the last user nothing of ours is left."""
    with _lock:
        for layer in layers:
            for key in [k for k, value in _layers.items() if value is layer]:
                del _layers[key]
            compiled_taps.take(layer.module(), layer)
            restore_forward(layer.module_class)
        _restore_names()


def install_function(
    model: nn.Module, modules: list[nn.Module], function: Callable[..., Any]
) -> Callable[[], None]:
    """From now on scaled_dot_product_attention means `function` inside these modules of `model`.

    Returns what takes it back; to be called once.
    """
    with _lock:
        _patch_names(model)
        for module in modules:
            _functions[id(module)] = (weakref.ref(module), function)
            patch_forward(type(module))
    keys, classes = [id(m) for m in modules], [type(m) for m in modules]

    def uninstall_function() -> None:
        with _lock:
            for key, cls in zip(keys, classes):
                if key in _functions and _functions[key][1] is function:
                    del _functions[key]
                restore_forward(cls)
            _restore_names()

    return uninstall_function


# ---- which modules are attention ----


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside the wrappers of torch."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _mentions(code: types.CodeType, names: dict[str, Any], depth: int = 2) -> bool:
    for name in code.co_names:
        if name == NAME:
            return True
        value = names.get(name)
        if value is _original or value is _attention:
            return True
        if not isinstance(value, types.FunctionType) or value.__globals__ is not names:
            continue
        if depth and _mentions(value.__code__, names, depth - 1):
            return True
    return any(
        _mentions(constant, names, depth)
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    )


def calls_attention(module: nn.Module) -> bool:
    """Whether code of the module's class, or a function it uses, names the function, or somebody
    has said that it is attention."""
    if wrapping.contract_of(module) is not None:
        return True
    for value in vars(module).values():
        if value is _original or value is _attention:
            return True
    for cls in type(module).__mro__:
        if cls.__module__.split(".")[0] == "torch":
            continue
        for value in vars(cls).values():
            function = getattr(value, "__wrapped__", getattr(value, "__func__", value))
            if function is _original or function is _attention:
                return True
            if isinstance(function, types.FunctionType) and _mentions(
                function.__code__, function.__globals__
            ):
                return True
    return False


def find_candidates(
    model: nn.Module, named: Callable[[str, nn.Module], bool]
) -> list[tuple[str, nn.Module]]:
    """Modules that stand for one attention layer each, in the model's order.

    A module qualifies because it holds query and key projections (`named`) or because its code
    calls the function.  Of two that lie inside each other, the one with the weights stands.
    """
    with_weights: list[tuple[str, nn.Module]] = []
    by_code: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if isinstance(module, nn.MultiheadAttention) or named(name, module):
            with_weights.append((name, module))
        elif calls_attention(module):
            by_code.append((name, module))

    def inside(inner: str, outer: str) -> bool:
        return outer == "" or inner == outer or inner.startswith(outer + ".")

    kept = set(id(m) for _, m in with_weights)
    for name, module in by_code:
        others = [n for n, _ in with_weights + by_code if n != name]
        if any(inside(other, name) for other in others):
            continue  # Holds another candidate: it is a block or the model.
        if any(inside(name, outer) for outer, _ in with_weights):
            continue  # The core inside a module that holds the weights.
        kept.add(id(module))
    return [(n, m) for n, m in model.named_modules() if id(m) in kept]
