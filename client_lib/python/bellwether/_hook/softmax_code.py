"""Whether a module's code has a softmax, by the names in it.

A recurrent layer, or attention that is linear, holds projections that are called like those of
attention.  It is told apart by its code, where it never made a call that was seen.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn

# Parts of names of functions and classes; the first stands for itself, too, as a method's name.
_SOFTMAX = ("softmax", "attention", "attn")
_OTHERS = ("linear", "lightning", "delta", "mask", "config", "dropout", "norm")
_DEPTH = 2  # Functions of the module's own file that are looked into.


def _names(code: types.CodeType, around: dict[str, Any], depth: int) -> bool:
    for name in code.co_names:
        plain = name.lower()
        if _SOFTMAX[0] in plain:
            return True
        value = around.get(name)
        kernel = any(part in plain for part in _SOFTMAX) and not any(o in plain for o in _OTHERS)
        own = value if isinstance(value, types.FunctionType) else None
        if own is not None and own.__globals__ is not around:
            own = None
        # A class is a module's own part, and looked at by itself.
        if kernel and value is not None and not isinstance(value, type) and own is None:
            return True
        if own is not None and depth and _names(own.__code__, around, depth - 1):
            return True
    return any(
        _names(constant, around, depth)
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    )


def has_softmax(module: nn.Module) -> bool:
    """Of the module's own code and that of its parts."""
    classes = {cls for part in module.modules() for cls in type(part).__mro__}
    if nn.Softmax in classes or nn.MultiheadAttention in classes:
        return True
    for cls in classes:
        if cls.__module__.split(".")[0] == "torch":
            continue
        for value in vars(cls).values():
            function = getattr(value, "__wrapped__", getattr(value, "__func__", value))
            if isinstance(function, types.FunctionType) and _names(
                function.__code__, function.__globals__, _DEPTH
            ):
                return True
    return False
