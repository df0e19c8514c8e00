"""Which classes have the patched forward, and what they had before.

What patches also restores, and with the last one nothing of ours is left, in torch.compile neither.
"""

from __future__ import annotations

from typing import Any, Optional

from torch import nn

from ..calls.kernel_choice import SDPA
from ..compiled import compiled_taps, dynamo_calls, traced_forward
from ..functions import function_calls
from ..running import running
from . import met_calls, registry
from .patched_forward import compiled_inside, forward_of, patched

users: dict[type, int] = {}  # Of each class: patch() less restore().
_forwards: dict[type, tuple[Optional[Any], Any]] = {}  # Theirs, ours; None = inherited


def _applies(tx: Any) -> bool:
    """Whether torch.compile is inside the forward of an attention module of ours, be it traced or
    running."""
    if running.inside:  # It is met already, around what is compiled.
        return False
    return bool(running.stack) or compiled_inside.__code__ in dynamo_calls.frames(tx)


def _discovered(module: nn.Module) -> bool:
    """torch.compile traces a call of a module whose forward is not patched.  Whether it is met
    here."""
    if running.inside:
        return False
    for seeker in list(registry.seekers):
        seeker.traced(module)
    return compiled_taps.ATTRIBUTE in vars(module)


_traced = dynamo_calls.Replacements(
    _applies,
    SDPA,
    traced_forward.sdpa,
    traced_forward.function_with_reader,
    traced_forward.place,
    _discovered,
)


def patch(cls: type) -> None:
    if not users:
        dynamo_calls.begin(_traced)
        function_calls.begin(met_calls.function)
    users[cls] = users.get(cls, 0) + 1
    if users[cls] == 1:
        ours = patched(forward_of(cls))
        _forwards[cls] = vars(cls).get("forward"), ours
        cls.forward = ours  # type: ignore[attr-defined]


def restore(cls: type) -> None:
    if cls not in users:
        return
    users[cls] -= 1
    if users[cls] == 0:
        del users[cls]
        if not users:
            dynamo_calls.end()
            function_calls.end()
        before, ours = _forwards.pop(cls)
        if vars(cls).get("forward") is not ours:
            return  # Somebody has patched over us since: below theirs, ours only passes on.
        if before is None:
            del cls.forward  # type: ignore[attr-defined]
        else:
            cls.forward = before  # type: ignore[attr-defined]


def own_forward(cls: type) -> Optional[Any]:
    """What the class itself has as its forward, without us; None = it inherits one."""
    known = _forwards.get(cls)
    return vars(cls).get("forward") if known is None else known[0]
