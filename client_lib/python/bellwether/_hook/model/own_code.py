"""The names in the code of a module's classes, and in the functions of its file that it calls."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

DEPTH = 2  # Functions of the same file that are looked into, one from within the other.


def functions_of(classes: Iterable[type]) -> Iterator[Any]:
    """What hangs on those that are not torch's own, without what wraps or binds it."""
    for cls in classes:
        if cls.__module__.split(".")[0] != "torch":
            for value in vars(cls).values():
                yield getattr(value, "__wrapped__", getattr(value, "__func__", value))


def mentions(function: Any, says: Callable[[str, Any, bool], bool]) -> bool:
    """Whether a name in the function's code is one for which `says` is true.  It gets the name,
    what that is in the function's file, and whether it is a function of that file."""
    if not isinstance(function, types.FunctionType):
        return False
    return _mentions(function.__code__, function.__globals__, says, DEPTH)


def _mentions(
    code: types.CodeType, around: dict[str, Any], says: Callable[[str, Any, bool], bool], depth: int
) -> bool:
    for name in code.co_names:
        value = around.get(name)
        own = value if isinstance(value, types.FunctionType) else None
        if own is not None and own.__globals__ is not around:
            own = None
        if says(name, value, own is not None):
            return True
        if own is not None and depth and _mentions(own.__code__, around, says, depth - 1):
            return True
    return any(
        _mentions(constant, around, says, depth)
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    )
