"""torch.autograd.backward(), which Tensor.backward() calls, tells when it begins and ends.

It is told to all hosts.  A backward pass within another one, as of a checkpoint, is a part of it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Optional, Protocol

import torch

from .._util.guard import harmless
from .._util.stands_for import stands_for
from .step_ends import in_backward


class BackwardHost(Protocol):
    def backward_called(self) -> None: ...

    def backward_returned(self) -> None: ...


_lock = threading.Lock()
_hosts: weakref.WeakSet[Any] = weakref.WeakSet()
_replaced: Optional[tuple[Any, Any]] = None  # Theirs, ours.


def _telling(original: Any) -> Any:
    @stands_for(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or in_backward():
            return original(*args, **kwargs)
        _begins()
        try:
            return original(*args, **kwargs)
        finally:
            _ends()

    return backward


@harmless("backward()")
def _begins() -> None:
    for host in list(_hosts):
        host.backward_called()


@harmless("backward()")
def _ends() -> None:
    for host in list(_hosts):
        host.backward_returned()


def install(host: BackwardHost) -> None:
    global _replaced
    with _lock:
        _hosts.add(host)
        if _replaced is None:
            theirs = torch.autograd.backward
            _replaced = theirs, _telling(theirs)
            torch.autograd.backward = _replaced[1]


def uninstall(host: BackwardHost) -> None:
    """With the last monitor nothing of ours is left, unless somebody has patched over it."""
    global _replaced
    with _lock:
        _hosts.discard(host)
        if not _hosts and _replaced is not None and torch.autograd.backward is _replaced[1]:
            torch.autograd.backward = _replaced[0]
            _replaced = None
