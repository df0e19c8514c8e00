"""The names in a module's code: in its classes, in the functions that it holds, and in those that
they call.

Of the latter those are looked into that lie in the same file or in a closure, and what a
torch.autograd.Function or torch.jit.script holds.
"""

from __future__ import annotations

import functools
import re
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

DEPTH = 2  # Functions that are looked into, one from within the other.
_OPERATION = re.compile(r"aten::(\w+)")

# (a name, what that is where the code stands, whether it is looked into by itself) -> the answer
Says = Callable[[str, Any, bool], bool]


def functions_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What hangs on them and on their classes, but for torch's own, without what wraps or binds
    it."""
    seen: set[type] = set()
    for module in modules:
        yield from map(_bare, vars(module).values())
        for cls in type(module).__mro__:
            if cls not in seen and cls.__module__.split(".")[0] != "torch":
                yield from map(_bare, vars(cls).values())
            seen.add(cls)


def _bare(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return value.func
    if isinstance(value, (types.FunctionType, types.MethodType, staticmethod, classmethod)):
        return getattr(value, "__wrapped__", getattr(value, "__func__", value))
    return value


def mentions(function: Any, says: Says, depth: int = DEPTH) -> bool:
    """Whether a name in the function's code is one for which `says` is true."""
    if isinstance(function, torch.jit.ScriptFunction):
        return any(says(name, None, False) for name in _OPERATION.findall(str(function.graph)))
    return isinstance(function, types.FunctionType) and _mentions(function, says, depth)


def _mentions(function: types.FunctionType, says: Says, depth: int) -> bool:
    code, cells = function.__code__, function.__closure__ or ()
    enclosed: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, cells):
        try:
            enclosed[name] = cell.cell_contents
        except ValueError:  # It is empty yet.
            continue
    around = ChainMap(enclosed, function.__globals__)
    return _in_code(code, function, around, says, depth)


def _in_code(
    code: types.CodeType, function: types.FunctionType, around: Mapping[str, Any], says: Says,
    depth: int,
) -> bool:  # fmt: skip
    for name in dict.fromkeys((*code.co_names, *code.co_freevars)):
        value = around.get(name)
        inner = list(_looked_into(value, function, name in code.co_freevars))
        if says(name, value, bool(inner)):
            return True
        if depth and any(mentions(other, says, depth - 1) for other in inner):
            return True
    return any(
        _in_code(constant, function, around, says, depth)
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    )


def _looked_into(value: Any, function: types.FunctionType, enclosed: bool) -> Iterator[Any]:
    if isinstance(value, torch.jit.ScriptFunction):
        yield value
    elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
        yield from (f for f in map(_bare, vars(value).values()) if type(f) is types.FunctionType)
    elif isinstance(value, types.FunctionType) and (
        enclosed or value.__globals__ is function.__globals__
    ):
        yield value
