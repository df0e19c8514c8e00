"""The forward that stands for a module's own: it says on a stack whose calls are made inside.

No instance is touched, so deepcopy, pickle and state_dict of a model see nothing.  What is traced
or exported is left alone.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import nn

from ..._util.guard import harmless
from .. import attention_switch
from ..calls.call_sites import Forward
from ..calls.contract import ATTRIBUTE as CONTRACT
from ..calls.contract import Contract
from ..calls.kernel_choice import SDPA
from ..compiled import compiled_taps
from ..running import Entry, being_traced, running, saved_tensor_hooks
from . import met_calls, registry, written_out

_ROOT = Entry(None, None, SDPA, None, "", True)


def forward_of(cls: type) -> Callable[..., Any]:
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


def patched(inherited: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a forward."""

    def bellwether_forward(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return _compiled_forward(inherited, self, args, kwargs)
        entry = _entering(self)
        if entry is None:
            return inherited(self, *args, **kwargs)
        contract = self.__dict__.get(CONTRACT)
        if contract is not None and entry.layer is not None and entry.sees:
            return _by_contract(contract, inherited, self, entry, args, kwargs)
        if not _entered(entry):
            return inherited(self, *args, **kwargs)
        try:
            looks = _looks(self, entry)
            if looks is None:
                return inherited(self, *args, **kwargs)
            with looks:
                found = inherited(self, *args, **kwargs)
            looks.ended()
            return found
        finally:
            _leaving(entry)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bellwether_forward(self, args, kwargs)

    # Among the names of the method that it stands for, where jit.script looks them up, and with
    # code of its own, for which torch.compile keeps what it has made.  By the file it decides
    # whether it takes a frame: torch's own modules it leaves to Python unless something that it
    # takes calls them.
    theirs = getattr(inherited, "__code__", forward.__code__)
    code = forward.__code__.replace(
        co_filename=theirs.co_filename, co_firstlineno=theirs.co_firstlineno
    )
    ours = types.FunctionType(
        code, getattr(inherited, "__globals__", globals()), "forward", None, forward.__closure__
    )
    return functools.wraps(inherited)(ours)


def look_closer() -> None:
    """Something of ours is used in the forward that runs: its calls are to be seen, though its
    step is not sampled."""
    entry = running.stack[-1] if running.stack else None
    if entry is None or entry.layer is None:
        return
    entry.layer.look_closer()
    if not entry.sees:
        entry.sees = True
        met_calls.see()


# ---- as it is written ----


@harmless("forward of an attention module")
def _entering(module: nn.Module) -> Optional[Entry]:
    """What to put on the stack while the module runs forward; None if there is nothing to do."""
    function = registry.function_in(module)
    own = module.__dict__  # What it has for other names (__getattr__) is its own code.
    word = own.get(attention_switch.ATTRIBUTE, "") if attention_switch.users else ""
    layer = registry.layer_of(module)
    if layer is not None and being_traced():
        layer = None
    if layer is not None:
        layer.runs()
    known = layer is not None or function is not SDPA or bool(word)
    if not known and not running.stack:
        seeks = registry.seekers and registry.is_root(module) and not being_traced()
        return _ROOT if seeks else None
    sees = function is not SDPA or bool(word) or (layer is not None and layer.expects())
    forward: Optional[Forward] = Forward(saved_tensor_hooks(), torch.is_grad_enabled())
    mark = own.get(compiled_taps.ATTRIBUTE)
    if running.stack:  # What this module leaves open, the one around it says.
        outer = running.stack[-1]
        if layer is None:
            layer, forward = outer.layer, outer.forward
        function = function if function is not SDPA else outer.function
        mark = mark if mark is not None else outer.mark
        word = word or outer.word
        sees = sees or outer.sees
    return Entry(layer, forward, function, mark, word, sees)


@harmless("forward of an attention module", lambda entry: False)
def _entered(entry: Entry) -> bool:
    if entry is _ROOT:
        running.roots += 1
        met_calls.see()
        return True
    outer = _of_outer(entry)
    _push(entry)
    if entry.layer is not None and not outer:
        entry.layer.listen()
    return True


@harmless("forward of an attention module")
def _leaving(entry: Entry) -> None:
    if entry is _ROOT:
        running.roots -= 1
        met_calls.leave()
        return
    _pop()
    if entry.layer is not None and not _of_outer(entry):
        entry.layer.heard()


@harmless("forward of an attention module")
def _looks(module: nn.Module, entry: Entry) -> Optional[written_out.WrittenOut]:
    """What sees the calls of torch that the module makes, if it writes its attention out."""
    if entry.layer is None or not entry.sees or entry.layer.module() is not module:
        return None
    return written_out.watching(module, entry.layer, entry.forward)


def _of_outer(entry: Entry) -> bool:
    """Whether its layer is that of the module around it, whose forward goes on."""
    return bool(running.stack) and running.stack[-1].forward is entry.forward


def _push(entry: Entry) -> None:
    if torch.compiler.is_dynamo_compiling():
        compiled_taps.unseen(running.stack.append, entry)
        return
    running.stack.append(entry)
    if entry.sees:
        met_calls.see()


def _pop() -> None:
    if torch.compiler.is_dynamo_compiling():
        compiled_taps.unseen(running.stack.pop)
    elif running.stack.pop().sees:
        met_calls.leave()


# ---- as torch.compile traces it ----


def _compiled_forward(
    inherited: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """It knows a layer by its mark."""
    # Not asked for where there is none: id() of a module would tie a graph to it.
    function = registry.function_in(module) if registry.functions else SDPA
    mark = getattr(module, compiled_taps.ATTRIBUTE, None)
    word = getattr(module, attention_switch.ATTRIBUTE, "") if attention_switch.users else ""
    if (mark is not None or word) and compiled_taps.exporting():
        mark, word = None, ""  # What leaves the process is the model alone.
    contract = getattr(module, CONTRACT, None)
    if mark is None and contract is None and function is SDPA and not word:
        return inherited(module, *args, **kwargs)
    forward: Optional[Forward] = Forward(None, True)
    if running.stack:
        outer = running.stack[-1]
        function = function if function is not SDPA else outer.function
        if mark is None:
            forward, mark = outer.forward, outer.mark
        word = word or outer.word
    entry = Entry(None, forward, function, mark, word, True)
    if contract is not None and mark is not None:
        return _by_contract(contract, inherited, module, entry, args, kwargs)
    return compiled_inside(entry, inherited, module, args, kwargs)


def compiled_inside(
    entry: Entry, inherited: Callable[..., Any], module: nn.Module, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """A frame of it says that the call which is traced lies in a module of ours."""
    _push(entry)
    try:
        return inherited(module, *args, **kwargs)
    finally:
        _pop()


# ---- of a module that is attention itself ----


def _by_contract(
    contract: Contract, inherited: Callable[..., Any], module: nn.Module,
    entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Its forward is a call, between the taps."""
    layer = entry.layer

    def forward(*inner: Any, **named: Any) -> Any:
        _push(Entry(None, None, SDPA, None, "", False))  # It may call the function, too.
        try:
            return inherited(module, *inner, **named)
        finally:
            _pop()

    if torch.compiler.is_compiling():
        return compiled_taps.tapped(contract, forward, entry.mark, [], *args, **kwargs)
    if layer is None:
        return forward(*args, **kwargs)
    _push(Entry(layer, entry.forward, entry.function, entry.mark, "", False))
    try:
        return layer.attention(
            lambda: contract.read(forward, args, kwargs), lambda: forward(*args, **kwargs), None
        )
    finally:
        _pop()
