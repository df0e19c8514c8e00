"""What torch.compile puts in the place of a function while it traces.

No name of a package is changed.  Methods of dynamo's own are, while somebody watches: so a call is
met by whatever name it was reached, and the guards of the graph stay those of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from ..._util import guard, log
from ..calls import sdpa_call
from ..calls.call import Reader
from ..functions import function_calls
from . import compiled_taps, traced_calls, traced_flex, traced_in_graph, written_anyway


@dataclasses.dataclass(frozen=True, eq=False)
class Replacements:
    """What is traced instead of a call, where `applies`, which is asked with the frames that are
    being traced, says so.  What the replacement itself calls is left alone."""

    applies: Callable[[Any], bool]
    sdpa: Any  # A function of torch, ...
    instead_of_sdpa: Any
    instead_of_function: Any  # ... and of those that have a reader; it gets the function first.
    place: Any  # Traced: (the mark of the module that is traced, its earlier calls), or None.
    discovered: Callable[[nn.Module], bool]  # A module makes a call: whether it is met.


_HOME = str(Path(__file__).parents[2]) + os.sep
_FOR_USERS = os.path.join(_HOME, "_attention") + os.sep  # They may compile it.


class _Tracing(threading.local):
    active = complained = False


_tracing = _Tracing()
_undo: list[Callable[[], None]] = []


def _if_possible(function: Callable[..., None]) -> Callable[..., None]:
    """All this is private to torch: with one that has another, eager models are watched."""

    @functools.wraps(function)
    def tried(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as e:
            if not _tracing.complained:
                _tracing.complained = True
                reason = f"{type(e).__name__}: {e}"
                log.warning(f"torch.compile takes nothing of ours with this torch: {reason}")

    return tried


@contextlib.contextmanager
def _left_alone() -> Iterator[None]:
    _tracing.active = True
    try:
        yield
    finally:
        _tracing.active = False


@_if_possible
def begin(instead: Replacements) -> None:
    """Until end(), torch.compile traces the replacements."""
    _leave_ours_to_python()
    _replace_functions(instead)
    _replace_flex(instead)
    _after_joint_passes()


@_if_possible
def end() -> None:
    while _undo:
        _undo.pop()()


def _method(cls: Any, name: str, ours: Callable[..., Any]) -> None:
    before = vars(cls)[name]
    setattr(cls, name, functools.wraps(before)(ours))
    _undo.append(lambda: setattr(cls, name, before))


@_if_possible
def _leave_ours_to_python() -> None:
    """Where a frame of the host is run by Python, the functions of ours that it calls would be
    compiled, each by itself, and what these call.  Inside a graph they are traced as before."""
    from torch._dynamo import trace_rules
    from torch._dynamo import types as frame_types

    kinds: Any = frame_types
    frames: Any = torch._C._dynamo.eval_frame
    rules: Any = trace_rules
    theirs = getattr(rules, "check", None)
    if theirs is None or not hasattr(frames, "set_code_exec_strategy"):
        return  # An older torch: more is compiled than without us, and all is watched as before.
    alone = kinds.FrameExecStrategy(kinds.FrameAction.SKIP, kinds.FrameAction.SKIP)
    frames.set_code_exec_strategy(guard.CODE, alone)

    @functools.wraps(theirs)
    def check(asked: Any, *args: Any, **kwargs: Any) -> bool:
        ours = type(asked) is types.CodeType and asked.co_filename.startswith(_HOME)
        if ours and not asked.co_filename.startswith(_FOR_USERS):
            return True
        return bool(theirs(asked, *args, **kwargs))

    rules.check = check
    _undo.append(lambda: setattr(rules, "check", theirs))


def _replace_functions(instead: Replacements) -> None:
    """Calls of functions of Python come to one method of dynamo's, and calls of torch's own, which
    it does not look into, to another."""
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def reader_of(function: Any, args: Any, kwargs: Any) -> Optional[Reader]:
        if function is instead.sdpa:
            return sdpa_call.read
        reader = function_calls.traced_reader(function)
        if reader is None or not traced_calls.applies(function, reader, args, kwargs):
            return None
        return reader

    def inlined(theirs: Any, self: Any, function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours: Any = None
        if not _tracing.active:
            ours = traced_calls.guarded(lambda: reader_of(function, args, kwargs), None)
        if ours is None:
            return theirs(self, tx, args, kwargs)
        if not instead.applies(tx):
            place = traced_calls.guarded(
                lambda: traced_calls.discovered(tx, instead.discovered), None
            )
            if place is None:
                return theirs(self, tx, args, kwargs)
            with _left_alone():
                return traced_in_graph.between(tx, place, ours, self, list(args), kwargs)
        made: Any = UserFunctionVariable(instead.instead_of_function)
        before = [self]
        if function is instead.sdpa:
            made, before = UserFunctionVariable(instead.instead_of_sdpa), []
        with _left_alone():
            return tx.inline_user_function_return(made, [*before, *args], kwargs)

    of_users: Any = UserFunctionVariable.call_function
    of_torch: Any = TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is compiled_taps.tapped:
            read, tracker, mark, earlier, *given = args
            place = traced_calls.Place(mark, earlier)
            return traced_in_graph.between(tx, place, read, tracker, given, kwargs)
        if type(self) is not UserFunctionVariable:  # A method.
            return of_users(self, tx, args, kwargs)
        return inlined(of_users, self, self.fn, tx, args, kwargs)

    def call_torch_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return inlined(of_torch, self, self.value, tx, args, kwargs)

    _method(UserFunctionVariable, "call_function", call_function)
    _method(TorchInGraphFunctionVariable, "call_function", call_torch_function)


def _replace_flex(instead: Replacements) -> None:
    """flex_attention comes to one operator, with the graphs of what changes its scores."""
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.higher_order_ops import FlexAttentionHigherOrderVariable

    name = "_call_function"
    if name not in vars(FlexAttentionHigherOrderVariable):
        name = "call_function"
    theirs: Any = vars(FlexAttentionHigherOrderVariable)[name]

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        def plain(args: Any) -> Any:
            return theirs(self, tx, args, kwargs)

        reader = function_calls.traced_reader(self.value)
        if _tracing.active or reader is None:
            return plain(args)
        with _left_alone():
            place = traced_calls.guarded(lambda: found(tx), None)
            if place is None:
                return plain(args)
            return traced_flex.call(tx, place, self.value, reader, plain, list(args))

    def found(tx: Any) -> Optional[traced_calls.Place]:
        if not instead.applies(tx):
            return traced_calls.discovered(tx, instead.discovered)
        ours: Any = UserFunctionVariable(instead.place)
        told = tx.inline_user_function_return(ours, [], {})
        return traced_calls.Place(*told.items) if hasattr(told, "items") else None

    _method(FlexAttentionHigherOrderVariable, name, call_function)


@_if_possible
def _after_joint_passes() -> None:
    """From the first graph on: inductor takes a second to load, and most jobs compile nothing."""
    from torch._dynamo.output_graph import OutputGraph

    name = "call_user_compiler"
    theirs: Any = vars(OutputGraph).get(name)
    if theirs is None or "torch._inductor.compile_fx" in sys.modules:
        _read_joint_graphs()
        return
    asked = False

    def call_user_compiler(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        if not asked:
            asked = True
            _read_joint_graphs()
        return theirs(*args, **kwargs)

    _method(OutputGraph, name, call_user_compiler)


@_if_possible
def _read_joint_graphs() -> None:
    """inductor has no other place for a pass of one's own but its configuration, which users see,
    and which names what it has cached."""
    from torch._inductor import compile_fx

    name = "_recursive_joint_graph_passes"
    theirs: Any = vars(compile_fx)[name]

    @functools.wraps(theirs)
    def passes(*args: Any, **kwargs: Any) -> Any:
        module = theirs(*args, **kwargs)
        traced_calls.guarded(lambda: written_anyway.read_what_is_written(module), None)
        return module

    setattr(compile_fx, name, passes)
    _undo.append(lambda: setattr(compile_fx, name, theirs))


def frames(tx: Any) -> Any:
    """The codes of the functions that are being traced, the innermost first."""
    while tx is not None:
        yield getattr(tx, "f_code", None)
        tx = getattr(tx, "parent", None)


@_if_possible
def forget() -> None:
    """What was compiled before is compiled anew when it is called next: it holds the modules as
    they were traced, and does not look whether their class has another `forward` now."""
    from torch._dynamo import convert_frame

    home, eval_frame = torch.__path__[0], torch._C._dynamo.eval_frame
    for known in list(convert_frame.input_codes.seen):
        code = known()
        if code is not None and not code.co_filename.startswith(home):
            eval_frame.reset_code(code)
