"""Whether a module's code has a softmax, by the names in it.

A recurrent layer, or attention that is linear, holds projections that are called like those of
attention.  It is told apart by its code, where it never made a call that was seen.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ..._weights import locate
from .own_code import functions_of, mentions

# Parts of names of functions and classes; the first stands for itself, too, as a method's name.
_SOFTMAX = ("softmax", "attention", "attn")
_OTHERS = ("linear", "lightning", "delta", "mask", "config", "dropout", "norm")
_written: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def _says(name: str, value: Any, own: bool) -> bool:
    plain = name.lower()
    if _SOFTMAX[0] in plain:
        return True
    kernel = any(part in plain for part in _SOFTMAX) and not any(o in plain for o in _OTHERS)
    # A class is a module's own part, and looked at by itself.
    return kernel and value is not None and not isinstance(value, type) and not own


def has_softmax(module: nn.Module) -> bool:
    """Of the module's own code and that of its parts."""
    if any(isinstance(part, (nn.Softmax, nn.MultiheadAttention)) for part in module.modules()):
        return True
    return any(mentions(function, _says) for function in functions_of(module.modules()))


def _computes(name: str, value: Any, own: bool) -> bool:
    return _SOFTMAX[0] in name.lower()


def _takes_a_kernel(name: str, value: Any, own: bool) -> bool:
    return value is not None and _SOFTMAX[0] not in name.lower() and _says(name, value, own)


def said_heads(owner: object) -> list[int]:
    """The numbers of an object itself that are called like one of heads."""
    return [value for name, value in vars(owner).items() if type(value) is int and "head" in name]


def shows_heads(module: nn.Module, heads: int, dim: int) -> bool:
    """Whether the module says that it has so many heads of `dim`.  A number of it is called like
    one of heads, or all heads together are as wide as one of its matrices, such as the output's."""
    owners = (module, vars(module).get("config", object))
    return any(heads in said_heads(owner) for owner in owners) or locate.has_side(
        module, heads * dim
    )


def shows_one_head(module: nn.Module, dim: int) -> bool:
    """Whether queries of three dimensions are those of one head: its projections give no more, and
    the module says nothing of others."""
    told = (number for number in said_heads(module) if number != dim)
    return locate.one_head(module, dim) and all(number == 1 for number in told)


def writes_attention(module: nn.Module) -> bool:
    """The same of a module that has heads: a router of experts has a softmax, too."""
    return bool(said_heads(module)) and writes_softmax(module)


def writes_softmax(module: nn.Module) -> bool:
    """Whether methods of its class name a softmax, and no function that computes attention."""
    cls = type(module)
    if cls not in _written:
        functions = list(functions_of([module]))
        _written[cls] = any(mentions(f, _computes, depth=0) for f in functions) and not any(
            mentions(f, _takes_a_kernel, depth=0) for f in functions
        )
    return _written[cls]
