"""torch.nn.utils.clip_grad_norm_ tells before it changes the gradients.

It is told to all hosts.  Trainers that clip in another way are not seen: their gradients are read
when the optimizer's step begins.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any, Optional, Protocol

import torch
from torch.nn.utils import clip_grad

from .._util.guard import harmless
from .._util.stands_for import stands_for
from .frames import number_at_hand

_NAME = "_clip_grads_with_norm_"  # Since torch 2.6, whatever name it was imported by.


class ClipHost(Protocol):
    def gradients_clip(
        self, parameters: list[torch.Tensor], limit: Any, norm: Any, order: Optional[float]
    ) -> None:
        """limit, norm  what torch clips to, and the norm that it has computed
        order  of that norm; None: not known"""


_lock = threading.Lock()
_hosts: weakref.WeakSet[Any] = weakref.WeakSet()
_replaced: Optional[tuple[Any, Any]] = None  # Theirs, ours.


def _telling(original: Any) -> Any:
    @stands_for(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            if not isinstance(parameters, (torch.Tensor, list, tuple)):
                parameters = list(parameters)  # It can be gone through once.
            _tell(sys._getframe(1), parameters, *args, **kwargs)
        return original(parameters, *args, **kwargs)

    return clip


def _order(caller: types.FrameType) -> Optional[float]:
    """Of the norm that the function computes which clips."""
    if caller.f_code.co_name != "clip_grad_norm_":
        return None
    return number_at_hand(caller.f_locals.get("norm_type"))


@harmless("clip_grad_norm_()")
def _tell(
    caller: types.FrameType, parameters: Any, max_norm: Any = None, total_norm: Any = None,
    *_: Any, **__: Any,
) -> None:  # fmt: skip
    order = _order(caller)
    given: Iterable[Any] = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    for host in list(_hosts):
        host.gradients_clip(list(given), max_norm, total_norm, order)


def install(host: ClipHost) -> None:
    global _replaced
    with _lock:
        _hosts.add(host)
        theirs = getattr(clip_grad, _NAME, None)
        if _replaced is None and theirs is not None:
            _replaced = theirs, _telling(theirs)
            setattr(clip_grad, _NAME, _replaced[1])


def uninstall(host: ClipHost) -> None:
    """With the last monitor nothing of ours is left, unless somebody has patched over it."""
    global _replaced
    with _lock:
        _hosts.discard(host)
        if not _hosts and _replaced is not None and getattr(clip_grad, _NAME) is _replaced[1]:
            setattr(clip_grad, _NAME, _replaced[0])
            _replaced = None
