"""What torch.compile traces in the place of a call of attention, inside the forward of a module.

It says whose call it is.  The taps around it are put there by traced_calls.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import attention_switch
from ..calls import sdpa_call
from ..calls.kernel_choice import SDPA
from ..running import Entry, running
from . import compiled_taps


def sdpa(*args: Any, **kwargs: Any) -> Any:
    """(Behind a graph break the stack may be another.)"""
    if not running.stack:
        return SDPA(*args, **kwargs)
    entry = running.stack[-1]
    function = entry.function
    if entry.word:
        function, args, kwargs, _ = attention_switch.call(entry.word, function, args, kwargs)
    return _tapped(sdpa_call.read, function, entry, args, kwargs)


def function_with_reader(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same for another function that has a reader."""
    if not running.stack:
        return function(*args, **kwargs)
    return _tapped(None, function, running.stack[-1], args, kwargs)


def _tapped(
    read: Any, function: Callable[..., Any], entry: Entry, args: Any, kwargs: dict[str, Any]
) -> Any:
    if entry.mark is None:
        return function(*args, **kwargs)
    earlier = entry.forward.traced if entry.forward is not None else []
    return compiled_taps.tapped(read, function, entry.mark, earlier, *args, **kwargs)


def place() -> Any:
    """(the mark of the module that is traced, its earlier calls)"""
    if not running.stack:
        return None
    entry = running.stack[-1]
    if entry.mark is None or entry.forward is None:
        return None
    return entry.mark, entry.forward.traced
