"""What torch.compile traces in the place of a call of attention, inside the forward of a module.

It says whose call it is.  The taps around it are put there by traced_calls.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as functional

from .. import attention_switch
from ..calls import sdpa_call
from ..running import running
from . import compiled_taps

ORIGINAL: Callable[..., Any] = functional.scaled_dot_product_attention


def sdpa(*args: Any, **kwargs: Any) -> Any:
    """(Behind a graph break the stack may be another.)"""
    if not running.stack:
        return ORIGINAL(*args, **kwargs)
    _, forward, function, mark, word, _ = running.stack[-1]
    if word:
        function, args, kwargs, _ = attention_switch.call(word, function, args, kwargs)
    if mark is None:
        return function(*args, **kwargs)
    earlier = forward.traced if forward is not None else []
    return compiled_taps.tapped(sdpa_call.read, function, mark, earlier, *args, **kwargs)


def function_with_reader(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same for another function that has a reader."""
    if not running.stack:
        return function(*args, **kwargs)
    _, forward, _, mark, _, _ = running.stack[-1]
    if mark is None:
        return function(*args, **kwargs)
    earlier = forward.traced if forward is not None else []
    return compiled_taps.tapped(None, function, mark, earlier, *args, **kwargs)


def place() -> Any:
    """(the mark of the module that is traced, its earlier calls)"""
    if not running.stack:
        return None
    _, forward, _, mark, _, _ = running.stack[-1]
    if mark is None or forward is None:
        return None
    return mark, forward.traced
