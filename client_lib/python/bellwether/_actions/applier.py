"""What every way of applying actions is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Optional

from .._hook.layer.layer import Layer
from ..actions import Action
from .host import ActionHost


class Applier(ABC):
    """One or some kinds of action.  All is called on the training thread, at step boundaries;
    what is raised is caught by the caller."""

    def __init__(self, host: ActionHost) -> None:
        self.host = host

    @abstractmethod
    def impossible(self, kind: str) -> Optional[str]:
        """Why no action of this kind can be applied in this process; None if some can."""

    @abstractmethod
    def refusal(self, action: Action) -> Optional[str]:
        """Why this one cannot be applied now; None if it can.  Changes nothing."""

    @abstractmethod
    def apply(self, action: Action, step: int) -> str:
        """From `step` on it is in force; a word about it, or "".  What raises has changed
        nothing, as far as that can be had."""

    @abstractmethod
    def undo(self, action: Action, step: int) -> None:
        """`action` was applied, and is not any more."""

    def holds(self, action: Action) -> bool:
        """`action` was applied and not undone: whether it has an effect now."""
        return True

    def end(self) -> None:  # noqa: B027 (most hold nothing)
        """The monitor detaches: what can be taken back is."""


def layer_number(host: ActionHost, layer: Layer) -> int:
    """Its number in the whole model."""
    return layer.index + host.parallel.first_layer


def layers_in(host: ActionHost, action: Action) -> list[Layer]:
    """The layers of this process that the action is about."""
    wanted = {*action.layers, *(layer for layer, _ in action.heads)}
    found = [layer for layer in host.layers if layer.index >= 0]
    if not wanted:
        return found
    return [layer for layer in found if layer_number(host, layer) in wanted]


def unknown_place(host: ActionHost, action: Action) -> Optional[str]:
    """What in the scope lies outside of the model; None if nothing does."""
    here = [layer for layer in host.layers if layer.index >= 0]
    layers = host.parallel.layers or len(here)
    heads = max((layer.heads for layer in here), default=0) * host.parallel.tensor[1]
    for layer in (*action.layers, *(layer for layer, _ in action.heads)):
        if layer >= layers:
            return f"scope: layer {layer}, but the model has {layers}"
    for _, head in action.heads:
        if head >= heads:
            return f"scope: head {head}, but a layer has {heads}"
    return None
