"""What a torch.amp.GradScaler multiplies the loss by, so that gradients are told unscaled.

GradScaler.scale() is called between the forward and the backward of every micro-batch; while a
monitor is installed it tells the factor on the way.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import torch

if TYPE_CHECKING:
    from .monitor import Monitor

# Signals that grow with the gradients, and the power in which they do.
POWERS = {
    "delta_bias_sum": 1,
    "delta_bias_sumsq": 2,
    "delta_abs_sum": 1,
    "delta_error_abs_sum": 1,
    "key_leak_sum": 1,
    "key_gradient_sum": 1,
}

_lock = threading.Lock()
_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
_replaced: Optional[tuple[Callable[..., Any], Callable[..., Any]]] = None  # (theirs, ours)


def _patched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if not torch.compiler.is_compiling():
            for monitor in list(_monitors):
                monitor.loss_scaled(getattr(self, "_scale", None))
        return scaled

    return scale


def install(monitor: Monitor) -> None:
    global _replaced
    with _lock:
        _monitors.add(monitor)
        if _replaced is None:
            theirs = torch.amp.GradScaler.scale
            _replaced = theirs, _patched(theirs)
            torch.amp.GradScaler.scale = _replaced[1]  # type: ignore[method-assign]


def uninstall(monitor: Monitor) -> None:
    """With the last monitor nothing of ours is left, unless somebody has patched over it: then
    what is left does nothing."""
    global _replaced
    with _lock:
        _monitors.discard(monitor)
        if _monitors or _replaced is None:
            return
        theirs, ours = _replaced
        if torch.amp.GradScaler.scale is ours:
            torch.amp.GradScaler.scale = theirs  # type: ignore[method-assign]
            _replaced = None
