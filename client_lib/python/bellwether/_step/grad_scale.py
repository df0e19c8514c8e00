"""What a torch.amp.GradScaler multiplies the loss by, so that gradients are reported unscaled, and
which steps it skips.

GradScaler.scale() is called between the forward and the backward of every micro-batch.
GradScaler.step() is called in the place of optimizer.step(), which it calls unless a gradient is
not finite.  While a monitor is installed they report the factor, and the skipping, on the way.
Skipping is its daily business: it begins with a factor that is too large, and tries a larger one
now and then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch

from .._hook.hosts import StepHost
from .._util.guard import harmless
from .._util.stands_for import stands_for
from ..settings import STATS

# Signals that grow with the gradients, and the power in which they do.
POWERS = {
    "delta_bias_sum": 1,
    "delta_bias_sumsq": 2,
    "delta_abs_sum": 1,
    "delta_error_abs_sum": 1,
    "key_leak_sum": 1,
    "key_gradient_sum": 1,
}
for _name in STATS["laws"]:
    if _name.endswith("_nonfinite") or _name.startswith("shadow_"):
        # Of the shadow check only ratios mean something; squares of the smallest would leave a
        # float's range.  o holds no gradient.
        POWERS[_name] = 0
    elif _name.endswith(("_variance", "_sumsq")):
        POWERS[_name] = 2
    elif _name != "law_rows_left_out":
        POWERS[_name] = 1

_lock = threading.Lock()
_hosts: weakref.WeakSet[StepHost] = weakref.WeakSet()
_replaced: dict[str, tuple[Any, Any]] = {}  # Name of a method -> theirs, ours.


def _telling_the_factor(original: Callable[..., Any]) -> Callable[..., Any]:
    @stands_for(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if not torch.compiler.is_compiling():
            _tell_the_factor(self)
        return scaled

    return scale


def _telling_what_it_skips(original: Callable[..., Any]) -> Callable[..., Any]:
    @stands_for(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, optimizer, *args, **kwargs)
        before = _hooks_called()
        result = original(self, optimizer, *args, **kwargs)
        _tell_what_it_skipped(self, optimizer, before)
        return result

    return step


@harmless("GradScaler.scale()")
def _tell_the_factor(scaler: Any) -> None:
    for host in list(_hosts):
        host.loss_scaled(getattr(scaler, "_scale", None))


@harmless("GradScaler.step()")
def _hooks_called() -> list[tuple[StepHost, int]]:
    return [(host, host.hooks_called) for host in list(_hosts)]


@harmless("GradScaler.step()")
def _tell_what_it_skipped(
    scaler: Any, optimizer: Any, before: Optional[list[tuple[StepHost, int]]]
) -> None:
    for host, called in before or []:
        if host.hooks_called == called:
            host.step_withheld(scaler, optimizer)


_PATCHES = {"scale": _telling_the_factor, "step": _telling_what_it_skips}


def found_inf(scaler: Any, optimizer: Any) -> bool:
    """Whether a gradient was not finite: the scaler itself has just asked, and waited for it."""
    states = getattr(scaler, "_per_optimizer_states", {})
    found = states[id(optimizer)]["found_inf_per_device"] if id(optimizer) in states else {}
    return any(bool(value.item()) for value in found.values())


def install(host: StepHost) -> None:
    with _lock:
        _hosts.add(host)
        for name, patch in _PATCHES.items():
            if name not in _replaced:
                theirs = getattr(torch.amp.GradScaler, name)
                _replaced[name] = theirs, patch(theirs)
                setattr(torch.amp.GradScaler, name, _replaced[name][1])


def uninstall(host: StepHost) -> None:
    """With the last monitor nothing of ours is left, unless somebody has patched over it: then
    what is left does nothing."""
    with _lock:
        _hosts.discard(host)
        if _hosts:
            return
        for name, (theirs, ours) in list(_replaced.items()):
            if getattr(torch.amp.GradScaler, name) is ours:
                setattr(torch.amp.GradScaler, name, theirs)
                del _replaced[name]
