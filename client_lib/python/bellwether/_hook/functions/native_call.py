"""A function of C that calls a function of ours while a monitor wants it to.

The object stays what it is under every name, by identity, hash and self.  So code that compares it
(subclasses in __torch_function__, modes, torch.compile, fx, jit, pickle) finds what it expects.
Two other ways fail.  A wrapper under its name is not what PyTorch hands to __torch_function__.  A
TorchFunctionMode around a module is in the way of whatever is compiled inside it, since
torch.compile cannot trace all of torch's own functions under a mode.

CPython looks into a function object for the address of a quick way to call it (PEP 590), and calls
the function's method where there is none.  A function that takes a tuple and keywords has none, so
that word of the object is free.  While calls are diverted it holds the address of bw_python_call in
libbellwether_client, which calls ours.  The word is read and written with the interpreter locked.
Before anything is written, what lies around it is compared with the answers of CPython's own
functions.  With an interpreter of another layout nothing is written, and `why_not` has the reason.
"""

from __future__ import annotations

import ctypes
import threading
import types
from collections.abc import Callable
from typing import Any, Optional

from ..._native import c_api

_WORD = ctypes.sizeof(ctypes.c_void_p)
_TUPLE_AND_KEYWORDS = 0x0001 | 0x0002  # METH_VARARGS | METH_KEYWORDS


class _Method(ctypes.Structure):  # PyMethodDef
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("method", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class _Function(ctypes.Structure):  # PyCFunctionObject behind PyObject
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("method", "self", "module", "weak", "vectorcall")
    )


def asked(name: str, result: Any, *arguments: Any) -> Any:
    """A function of CPython's C API."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


def address(function: Any) -> Optional[int]:
    return ctypes.cast(function, ctypes.c_void_p).value


class NativeCall:
    def __init__(self, function: Any, target: Callable[..., Any]) -> None:
        """`plain` is the function of C by itself, whatever `function` calls; there are calls for
        one NativeCall in a process."""
        self.plain: Callable[..., Any] = function
        self._function, self._target = function, target
        self._lock = threading.Lock()
        self._users = 0
        self._there: Optional[_Function] = None
        self._ours: Optional[int] = None

    def why_not(self) -> Optional[str]:
        """None if calls can be diverted, else why they cannot."""
        with self._lock:
            try:
                if self._ours is None:
                    self._prepare(self._function)
            except Exception as e:
                return f"calls cannot be seen with this Python: {e}"
        return None

    def _prepare(self, function: Any) -> None:
        if type(function) is not types.BuiltinFunctionType:
            raise RuntimeError(f"{function!r} is no function of C")
        there = _Function.from_address(id(function) + object.__basicsize__)
        its_self = asked("PyCFunction_GetSelf", ctypes.c_void_p, ctypes.py_object)(function)
        its_method = asked("PyCFunction_GetFunction", ctypes.c_void_p, ctypes.py_object)(function)
        flags = asked("PyCFunction_GetFlags", ctypes.c_int, ctypes.py_object)(function)
        if its_self is None or there.self != its_self or not there.method:
            raise RuntimeError("its self lies elsewhere")
        method = _Method.from_address(there.method)
        if method.flags != flags or method.method != its_method:
            raise RuntimeError("its method lies elsewhere")
        if flags != _TUPLE_AND_KEYWORDS or there.vectorcall:
            raise RuntimeError("it is called in another way")
        library = c_api.client()
        twin = asked(
            "PyCFunction_NewEx", ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.py_object,
        )  # fmt: skip
        plain = twin(there.method, its_self, function.__module__)
        library.bw_python_call_to.argtypes = (ctypes.py_object, ctypes.c_void_p)
        library.bw_python_call_to.restype = None
        library.bw_python_call_to(self._target, address(ctypes.pythonapi.PyObject_Vectorcall))
        asked("Py_IncRef", None, ctypes.py_object)(self._target)  # For good: C has its address.
        self.plain, self._there = plain, there
        self._ours = address(library.bw_python_call)

    def divert(self) -> None:
        """From now on calls reach the target, in all threads; as often as restore() will come."""
        with self._lock:
            self._users += 1
            if self._there is not None:
                self._there.vectorcall = self._ours

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._there is not None:
                self._there.vectorcall = None
