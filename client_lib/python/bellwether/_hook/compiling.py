"""Listeners that learn that torch.compile is asked for something.

Where a compiled model is first called, hooks on all modules would be traced.  torch warns of that,
and makes anew without them what it has made with them.  So they are taken away when anything is
given to torch.compile, before it is called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .._util.guard import harmless

_listeners: list[Callable[[], None]] = []
_undo: list[Callable[[], None]] = []


def listen(listener: Callable[[], None]) -> Callable[[], None]:
    """From now on it is called; returns what ends that."""
    _listeners.append(listener)
    look()

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
        while _undo and not _listeners:
            _undo.pop()()

    return end


def look() -> None:
    """torch._dynamo may have been imported since: nothing is imported for this."""
    context = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizeContext", None)
    if context is None or _undo or not _listeners:
        return
    theirs = vars(context).get("__init__")
    if theirs is None:
        return

    @functools.wraps(theirs)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _tell()
        theirs(self, *args, **kwargs)

    def undo() -> None:
        if vars(context).get("__init__") is init:  # Else what is left tells nobody.
            context.__init__ = theirs

    context.__init__ = init
    _undo.append(undo)


@harmless("torch.compile()")
def _tell() -> None:
    for listener in list(_listeners):
        listener()
