"""Products of tensors in 8 bits by torch._scaled_mm, and torch.nn.functional.scaled_mm, are told to
listeners, once they are made.  Without a listener nothing of ours is in torch.

A product that code of torch.compile makes, or torch.ops.aten._scaled_mm by itself, is not seen.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

# (a, its scales, b, its scales) of a @ b.
Told = Callable[[Any, Any, Any, Any], None]

_NAMES = {"_scaled_mm": (2, 3), "_scaled_mm_v2": (2, 5)}  # Where the scales of a and of b stand.
_lock = threading.Lock()
_listeners: tuple[Told, ...] = ()
_replaced: dict[str, tuple[Any, Any]] = {}  # By the name: theirs, ours.


def _telling(original: Any, at: tuple[int, int]) -> Any:
    @functools.wraps(original)
    def scaled_mm(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if _listeners and not torch.compiler.is_compiling():
            a, b = (_given(args, kwargs, i, name) for i, name in enumerate(("self", "mat2")))
            scales = [_given(args, kwargs, i, f"scale_{x}") for i, x in zip(at, "ab")]
            for told in _listeners:
                told(a, scales[0], b, scales[1])
        return found

    return scaled_mm


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str) -> Any:
    if at < len(args):
        return args[at]
    return kwargs.get(name, kwargs.get("input") if name == "self" else None)


def listen(told: Told) -> Callable[[], None]:
    """told  must not raise.  Returns what ends it, which may be called again."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, told)
        for name, at in _NAMES.items():
            theirs = getattr(torch, name, None)
            if name not in _replaced and theirs is not None:
                _replaced[name] = theirs, _telling(theirs, at)
                setattr(torch, name, _replaced[name][1])
    return lambda: _end(told)


def _end(told: Told) -> None:
    """With the last one nothing of ours is left, unless somebody has patched over it."""
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not told)
        for name, (theirs, ours) in list(_replaced.items()):
            if not _listeners and getattr(torch, name) is ours:
                setattr(torch, name, theirs)
                del _replaced[name]
