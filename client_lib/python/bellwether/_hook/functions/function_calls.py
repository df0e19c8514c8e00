"""Functions of Python that compute attention: those of packages that are imported, diverted while
somebody watches.

Which they are, and how their calls are read, an adapter says (_adapters/).  A package may be
imported at any time, so before a forward the modules that are imported are counted.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch

from ..._util import log
from ..._util.guard import harmless
from ..calls.call import Met, Reader
from . import python_call

Seen = Callable[[Callable[..., Any], Reader, tuple[Any, ...], dict[str, Any]], Any]
# A function that is met in its midst has a reader with `between`: (a Begin, the function, its
# arguments) -> its result.  There a Begin is called with q, k and v, first among the arguments of a
# call, with that call's Reader and function.  It returns None if there is nothing to measure.
Begin = Callable[[Reader, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Optional[Met]]
Source = Callable[[bool], Iterable[tuple[Callable[..., Any], Reader]]]

_lock = threading.RLock()
_source: Optional[Source] = None
_seen: Optional[Seen] = None  # Somebody watches, and gets the calls.
_modules = 0  # That were imported when functions were last looked for.
# id(function) -> its reader.  Each function is kept in one of the lists.
_readers: dict[int, Reader] = {}
_new: list[Any] = []  # Found, and not diverted yet.
_diverted: list[types.FunctionType] = []
_others: list[Any] = []  # That torch.compile alone meets.
_told: set[str] = set()


def use(source: Source) -> None:
    """source  the functions of packages that are imported, each with its reader; it is told
    whether this watch looks for the first time"""
    global _source
    _source = source


def _called(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    seen, reader = _seen, _readers.get(id(function))
    applies = getattr(reader, "applies", None)
    # It has ended in another thread, or what the function calls is to be seen instead.
    if (
        seen is None
        or reader is None
        or (applies is not None and not applies(function, args, kwargs))
    ):
        return function(*args, **kwargs)
    if hasattr(reader, "between") and torch._C._is_torch_function_mode_enabled():
        # Each mode gets the call and makes it once more: the last one is met in its midst.
        return python_call.call_plainly(function, args, kwargs)
    return seen(function, reader, args, kwargs)


def begin(seen: Seen) -> None:
    """From now on `seen` gets the calls that see() asks for."""
    global _seen
    with _lock:
        _seen = seen
        if not python_call.too_early():
            python_call.why_not()  # Forwards may run within what torch.compile has made.


def end() -> None:
    """Every function is as it was."""
    global _seen, _modules
    with _lock:
        _seen, _modules = None, 0
        _readers.clear()
        _new.clear()
        _others.clear()
        while _diverted:
            python_call.restore(_diverted.pop())


@harmless("search for functions of attention")
def _look() -> None:
    global _modules
    if _source is None or _seen is None or _modules == len(sys.modules):
        return
    first_look, _modules = _modules == 0, len(sys.modules)
    for function, reader in _source(first_look):
        if id(function) not in _readers:
            _readers[id(function)] = reader
            _new.append(function)


@harmless("functions of attention")
def _divert() -> None:
    """Those that were found.  (Not while torch.compile traces, which runs frames by itself.)"""
    if python_call.too_early():
        return
    reason = python_call.why_not()
    if reason is not None and reason not in _told:
        _told.add(reason)
        log.info(f"attention that is no scaled_dot_product_attention is not seen: {reason}")
    while _new:
        function = _new.pop()
        if reason is not None or type(function) is not types.FunctionType:
            _others.append(function)
            continue
        try:
            python_call.divert(function, _called)
            _diverted.append(function)
        except RuntimeError as e:  # Another package has taken its calls: those are left to it.
            _others.append(function)
            log.info(f"attention is not seen: {e}")


def _look_again(divert: bool) -> None:
    if _modules != len(sys.modules) or (divert and _new):
        with _lock:
            _look()
            if divert:
                _divert()


def see() -> None:
    """Calls of this thread are seen, until leave() has come as often."""
    _look_again(divert=True)
    python_call.see()


def traced_reader(function: Any) -> Optional[Reader]:
    """That of a function which torch.compile meets.  None where it has none, and where what the
    function calls is met instead."""
    _look_again(divert=False)
    reader = _readers.get(id(function)) if _seen is not None else None
    return None if reader is None or hasattr(reader, "inside_when_traced") else reader


leave = python_call.leave
