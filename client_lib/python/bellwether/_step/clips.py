"""What torch clips gradients by in one step: their norm, and the factor.

Groups of parameters may be clipped by calls of their own.  Their norms make one where all are
Euclidean and no gradient is in two of them.  What might be another number is left out, and said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from .frames import local, number_at_hand
from .since_sample import CLIPPED_BY, CLIPPED_TO, LEAST_NORM

CALLS_MAX = 8  # In one step.
_EUCLIDEAN = 2.0


@dataclasses.dataclass
class _Call:
    norm: Any
    limit: Optional[float]  # None: it is on a device.
    order: Optional[float]  # None: not known.
    parameters: Optional[frozenset[int]]  # Their ids; None: nobody asked.


class Clips:
    def __init__(self) -> None:
        self.left_out: dict[str, int] = {}  # Why a step's norm is not told, how often.
        self._calls: list[_Call] = []  # Of the running step.
        self._count = 0  # Also of those beyond the limit.
        self._several = True  # Steps may have several calls, as far as is known.

    def add(
        self, parameters: Sequence[Tensor], limit: Any, norm: Any, order: Optional[float]
    ) -> None:
        """order  of the norm"""
        self._count += 1
        if self._count <= CALLS_MAX:
            ids = frozenset(map(id, parameters)) if self._several or self._calls else None
            self._calls.append(_Call(norm, number_at_hand(limit), order, ids))

    def forget(self) -> None:
        """What was clipped is not used."""
        self._calls, self._count = [], 0

    def of_frame(self, values: dict[str, Any]) -> None:
        """Adds to a frame's values what is known of its step."""
        calls, count = self._calls, self._count
        self.forget()
        if not calls:
            return
        several, self._several = self._several, len(calls) > 1
        told = "grad_norm" in values
        try:
            norms: list[Tensor] = [local(call.norm.detach()).float() for call in calls]
        except (AttributeError, ValueError):
            return self._leave_out("no rank has the norm whole")
        if count > CALLS_MAX:
            return self._leave_out(f"more than {CALLS_MAX} calls of clip_grad_norm_ in a step")
        if any(norm.device != norms[0].device for norm in norms):
            return self._leave_out("norms on several devices")
        if len(calls) > 1 and not several:
            return self._leave_out("the first step with several calls of clip_grad_norm_")
        if len(set().union(*(c.parameters or () for c in calls))) < sum(
            len(c.parameters or ()) for c in calls
        ):
            return self._leave_out("calls of clip_grad_norm_ with the same parameters")
        euclidean = all(call.order == _EUCLIDEAN for call in calls)
        if not euclidean and not told:
            orders = {"not known" if c.order is None else f"{c.order:g}" for c in calls}
            self._leave_out(f"norms of other orders than 2: {', '.join(sorted(orders))}")
        if euclidean and not told:
            values["grad_norm"] = norms[0] if len(norms) == 1 else _together(norms)
        if len(calls) == 1 and euclidean:
            if calls[0].limit is not None:
                values[CLIPPED_TO] = calls[0].limit
        elif all(call.limit is not None for call in calls):
            values[CLIPPED_BY] = _by(norms, [call.limit or 0.0 for call in calls])
        return None

    def _leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1


def _together(norms: list[Tensor]) -> Tensor:
    with torch.no_grad():
        whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


def _by(norms: list[Tensor], limits: list[float]) -> Tensor:
    """What the gradients were divided by that were clipped most; 1 or less: none was."""
    with torch.no_grad():
        parts = torch._foreach_div(torch._foreach_add(norms, LEAST_NORM), limits)
        most: Tensor = torch.stack(list(parts)).max()
    return most
