"""What a tap keeps of a call until its backward, and what hears of its gradients then."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from ..calls.call import AttentionCall, Mask, View


def tensors_of(call: AttentionCall) -> dict[str, Tensor]:
    """Those of a call besides q, k, v and o that its statistics need, by their names here."""
    given = call.mask.tensors()
    if call.sinks is not None:
        given["sinks"] = call.sinks
    return given


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the laws are told of a call besides its tensors."""

    arithmetic: str  # _laws/reference.py names those that are known.
    # The gradients that come to taps: each "q", "k" or "v", or of a packed tensor several.
    gradients: frozenset[str]
    # The probabilities may be used elsewhere: dq and dk are then more than the output's.
    weights_go_on: bool = False
    # The arithmetic is known, so that a tensor can be compared to what it should be.
    arithmetic_is_sure: bool = True
    # What autocast made of q, k and v inside the call (AttentionCall).
    narrowed: Optional[torch.dtype] = None
    # What the scores went into besides the softmax; it may grow until the forward is over.
    others: Sequence[str] = ()


class TapListener(Protocol):
    """Hears of the gradients that pass a call's taps."""

    def output_wanted(self, kept: Kept) -> bool:
        """A call's backward begins: whether its statistics are to be measured."""

    def read(self, ctx: Any) -> Optional[tuple[Tensor, ...]]:
        """What OutputTap has saved; None if that is not what it was."""

    def changed(self) -> None:
        """What OutputTap has saved was changed in place, and read without an error."""

    def output_gradient(self, kept: Kept, saved: tuple[Tensor, ...], d_o: Tensor) -> None:
        """Measures them; `saved` are o, q, k, v and what `kept` names."""

    def input_gradient(self, kept: Kept, gradient: Tensor, of: str, alone: bool) -> None:
        """gradient  as the function returned it
        of        which of "q", "k" and "v" it is of
        alone     it is of this call, and of no other"""


class Kept:
    """It holds no tensor of the call: those are saved by autograd, which knows whether they have
    changed, and which hooks of the host see."""

    __slots__ = (
        "_mask", "cast", "compiled", "delta", "fleeting", "group", "host_reads", "k_view",
        "laws", "leaks", "listener",
        "names", "o_view", "q_view", "scale", "softcap", "statistics", "v_view",
    )  # fmt: skip

    def __init__(
        self, listener: TapListener, call: AttentionCall, group: int, host_reads: bool = False,
        compiled: bool = False, fleeting: bool = False,
    ) -> None:  # fmt: skip
        """group  copies of each key head that the function is given
        compiled  whether torch.compile made the call
        fleeting  the memory of its tensors may hold others before its gradients come"""
        self.listener, self.group, self.host_reads = listener, group, host_reads
        self.compiled, self.fleeting = compiled, fleeting
        self.q_view: View = call.q_view
        self.k_view: View = call.k_view
        self.v_view: View = call.v_view
        self.o_view: View = call.o_view
        self.scale, self.softcap = call.scale, call.softcap
        self.cast: Optional[torch.dtype] = call.cast
        self.statistics, self.delta = call.unread is None, not call.dropout
        self.leaks = False  # The keys have a tap, for the leak.
        self.laws: Optional[Asked] = None  # What is asked of its gradients, if they come to taps.
        self.names = tuple(tensors_of(call))
        without: dict[str, Any] = dict.fromkeys(call.mask.tensors())
        self._mask = dataclasses.replace(call.mask, **without) if without else call.mask

    def measured(self) -> None:
        """Its mask is not asked for any more: a function in it may hold tensors."""
        self._mask = Mask()

    def mask(self, given: dict[str, Tensor]) -> Mask:
        """The call's mask, with its tensors as they came back."""
        own: dict[str, Any] = {name: t for name, t in given.items() if name != "sinks"}
        return dataclasses.replace(self._mask, **own) if own else self._mask
