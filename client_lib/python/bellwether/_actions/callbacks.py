"""on_action(): actions that only the training loop itself can carry out.

    @bellwether.on_action("checkpoint.now")
    def save(action):
        torch.save(model.state_dict(), f"step-{action.step}.pt")

A callback is called on the training thread at a step boundary, with a bellwether.Action whose
`step` is the next one.  What it raises, or False, is a refusal.  For a kind that Bellwether can
apply itself it is called instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Optional

from ..actions import KINDS, Action, Refused
from .applier import Applier
from .host import ActionHost

Callback = Callable[[Action], Any]

_everywhere: dict[str, Callback] = {}


def check_kind(kind: str) -> None:
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is not one of {', '.join(KINDS)}")


def on_action(kind: str, callback: Optional[Callback] = None) -> Any:
    """`callback` carries out actions of this kind, in all models of the process that are watched
    and for which `attach(allow=...)` names it.

    kind      "checkpoint.now", "batch.skip", "stop", or any other
    callback  takes a bellwether.Action; returns False, or raises, to refuse it

    To be registered before the first step ends, when the run says what it can do.  Without
    `callback` a decorator.  The last one registered counts.  Raises ValueError for a kind that
    does not exist.
    """
    check_kind(kind)
    if callback is None:
        return lambda function: on_action(kind, function) and function
    _everywhere[kind] = callback
    return callback


class Callbacks(Applier):
    def __init__(self, host: ActionHost) -> None:
        super().__init__(host)
        self._own: dict[str, Callback] = {}  # Of this monitor.
        self._framework: dict[str, Callback] = {}  # Where the loop is not the user's.

    def register(self, kind: str, callback: Callback) -> None:
        self._own[kind] = callback

    def offer(self, kind: str, callback: Callback) -> None:
        """What the training framework does, if the user has registered nothing."""
        self._framework[kind] = callback

    def of(self, kind: str) -> Optional[Callback]:
        return self._own.get(kind) or _everywhere.get(kind) or self._framework.get(kind)

    def impossible(self, kind: str) -> Optional[str]:
        if self.of(kind) is not None:
            return None
        return f"nothing here carries it out: bellwether.on_action({kind!r}, ...)"

    def refusal(self, action: Action) -> Optional[str]:
        return self.impossible(action.kind)

    def _call(self, action: Action, step: int, undoes: str) -> str:
        callback = self.of(action.kind)
        if callback is None:
            raise Refused(str(self.impossible(action.kind)))
        answer = callback(dataclasses.replace(action, step=step, undoes=undoes))
        if answer is False:
            raise Refused("the callback refused it")
        return answer[:200] if isinstance(answer, str) else ""

    def apply(self, action: Action, step: int) -> str:
        return self._call(action, step, "")

    def undo(self, action: Action, step: int) -> None:
        self._call(action, step, action.id)
