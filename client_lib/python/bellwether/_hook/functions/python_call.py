"""Functions of Python whose calls reach a function of ours while a watched module runs.

As with functions of C (native_call.py) the object stays what it is under every name: identity,
code, signature and attributes.  What changes is a word behind it, the address of the way in which
CPython calls it (PEP 590).  While calls are diverted it holds that of bw_python_function_call in
libbellwether_client.  This calls ours where the thread has asked for it, see(), and CPython's own
way elsewhere.  torch.compile takes the function's code, and never looks at the word; what it has
made calls the function as it is.  A function whose code it leaves to Python is seen in any case.

How CPython comes to read the word depends on its version:
* up to 3.10 each call does.
* 3.11 runs a function that Python calls without it, unless somebody else runs the frames (PEP
  523).  So while calls are seen, a function of ours runs them that only calls CPython's own.
* from 3.12 on PyFunction_SetVectorcall writes it, and specialised calls (PEP 659) give up.

Before anything is written, the word is compared with the address that it must hold.  Then a call of
a function of ours must have reached its target, from a place that CPython has specialised.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Optional

from ..._native.c_api import python_calls
from .native_call import address, asked

Target = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_WORD = ctypes.sizeof(ctypes.c_void_p)
_WARM_CALLS = 64  # Enough for CPython to specialise a call.

_lock = threading.RLock()
_library: Any = None
_reason: Optional[str] = None  # Why nothing can be diverted.
_offset = 0  # Of the word in a function object.
_users: dict[int, int] = {}  # id(function) -> how often it was diverted
_targets: dict[int, Callable[..., Any]] = {}  # What C has; never taken away.


def _word_of(function: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(id(function) + _offset)


def _find_word() -> int:
    """Where a function object has the word, by the type's own account of itself."""
    kind = types.FunctionType
    head = object.__basicsize__ + _WORD  # PyVarObject
    basic, item, _, offset = (ctypes.c_ssize_t * 4).from_address(id(kind) + head + _WORD)
    if (basic, item) != (kind.__basicsize__, kind.__itemsize__) or not 0 < offset < basic:
        raise RuntimeError("function objects are laid out differently")
    return int(offset)


def _is_plain(function: Any) -> bool:
    return _word_of(function).value == address(ctypes.pythonapi._PyFunction_Vectorcall)


def _write(function: Any, way: Optional[int]) -> None:
    if sys.version_info >= (3, 12):
        asked("PyFunction_SetVectorcall", None, ctypes.py_object, ctypes.c_void_p)(function, way)
    else:
        _word_of(function).value = way


def _prepare() -> None:
    global _library, _offset
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise RuntimeError("its interpreter runs without a lock")
    library, api = python_calls(), ctypes.pythonapi
    _offset = _find_word()
    library.bw_python_functions(
        address(api._PyFunction_Vectorcall), address(api.PyObject_Vectorcall)
    )
    by_frames = sys.version_info[:2] == (3, 11)
    library.bw_python_frames(
        asked("PyInterpreterState_Get", ctypes.c_void_p)(), address(api._PyEval_EvalFrameDefault),
        address(api._PyInterpreterState_GetEvalFrameFunc),
        address(api._PyInterpreterState_SetEvalFrameFunc) if by_frames else None,
    )  # fmt: skip
    _library = library
    try:
        _try_out()
    except Exception:
        _library = None
        raise


def _try_out() -> None:
    def function(x: int) -> int:
        return x

    def called() -> int:
        return function(1)

    seen: list[int] = []

    def target(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        seen.append(args[0])
        return function(2)

    for _ in range(_WARM_CALLS):
        called()
    _divert(function, target)
    try:
        outside = called()
        see()
        try:
            inside = called()
        finally:
            leave()
    finally:
        _restore(function)
    if (outside, inside, called(), seen) != (1, 2, 1, [1]) or not _is_plain(function):
        raise RuntimeError("a call of a function did not reach its target")


def too_early() -> bool:
    """Whether it cannot be tried out now, since torch.compile runs the frames: what it traces and
    runs sees no other calls."""
    if _library is not None or _reason is not None or "torch._dynamo" not in sys.modules:
        return False
    interpreter = asked("PyInterpreterState_Get", ctypes.c_void_p)()
    frames = asked("_PyInterpreterState_GetEvalFrameFunc", ctypes.c_void_p, ctypes.c_void_p)
    return bool(frames(interpreter) != address(ctypes.pythonapi._PyEval_EvalFrameDefault))


def why_not() -> Optional[str]:
    """None if calls can be diverted, else why they cannot."""
    global _reason
    with _lock:
        if _library is None and _reason is None:
            try:
                _prepare()
            except Exception as e:
                _reason = f"calls of Python functions cannot be seen with this Python: {e}"
    return _reason


def _left_to_python(function: types.FunctionType) -> bool:
    """Whether torch.compile runs no frames of the function by itself: False where this torch does
    not say so."""
    check: Any = getattr(sys.modules.get("torch._dynamo.trace_rules"), "check", None)
    try:
        return check is not None and bool(check(function.__code__))
    except Exception:
        return False


def _divert(function: Any, target: Target) -> None:
    key = id(function)
    if _users.get(key, 0) == 0:
        if type(function) is not types.FunctionType or not _is_plain(function):
            raise RuntimeError(f"{function!r} is called in another way than other functions")
        if key not in _targets:
            reached = _targets[key] = functools.partial(_reached, function, target)
            asked("Py_IncRef", None, ctypes.py_object)(function)  # For good, as its address is.
            _library.bw_python_function_to(key, id(reached))
            if _left_to_python(function):
                _library.bw_python_function_left(key)
        _write(function, address(_library.bw_python_function_call))
    _users[key] = _users.get(key, 0) + 1


def _reached(function: Any, target: Target, /, *args: Any, **kwargs: Any) -> Any:
    return target(function, args, kwargs)


def _restore(function: Any) -> None:
    key = id(function)
    _users[key] -= 1
    if _users[key] == 0:
        del _users[key]
        _write(function, address(ctypes.pythonapi._PyFunction_Vectorcall))


def divert(function: types.FunctionType, target: Target) -> None:
    """From now on a call that is seen comes to target(function, args, kwargs), in which nothing is
    seen: there `function` is itself.  As often as restore() will come; a function has one target
    in a process.  Raises RuntimeError with the reason if it cannot be."""
    reason = why_not()
    with _lock:
        if reason is not None:
            raise RuntimeError(reason)
        _divert(function, target)


def restore(function: types.FunctionType) -> None:
    with _lock:
        _restore(function)


def call_plainly(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For a target: the function's own call, in which others, of the same function too, are
    seen."""
    _library.bw_python_plainly(id(function))
    return function(*args, **kwargs)


def see() -> None:
    """Calls of this thread are seen, until leave() has come as often.  Neither does anything where
    nothing can be diverted."""
    if _library is not None:
        _library.bw_python_see()


def leave() -> None:
    if _library is not None:
        _library.bw_python_leave()
