"""Which attention of a module a call is, where one forward of the module makes several."""

from __future__ import annotations

from typing import Any

from torch import Tensor

SITES_MAX = 64  # Of one module; each is a layer of its own.
MORE = "more calls in one forward than in the first step: not measured"


class Forward:
    """One run of a module's forward."""

    __slots__ = ("_queries", "hooks", "recording", "traced")

    def __init__(self, hooks: Any, recording: bool) -> None:
        """hooks      on saved tensors, in force when it began
        recording  whether a graph was made then"""
        self.hooks, self.recording = hooks, recording
        self._queries: list[Tensor] = []
        self.traced: list[None] = []  # One for each call that torch.compile has traced.

    def site(self, q: Tensor) -> int:
        """0, 1, 2, ... in the order of the calls.  Calls with parts of one tensor, as a vision
        tower makes them for one image after the other, are one."""
        for number, earlier in enumerate(self._queries):
            if _other_tokens_of(earlier, q):
                return number
        self._queries.append(q)
        return len(self._queries) - 1


def _other_tokens_of(a: Tensor, b: Tensor) -> bool:
    """Whether they are different tokens of one tensor [..., heads, tokens, dim], and not different
    heads."""
    if a.dim() < 3 or a.stride() != b.stride() or a.shape[-3] != b.shape[-3]:
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    apart = abs(int(a.storage_offset()) - int(b.storage_offset()))
    token, head = a.stride(-2), a.stride(-3)
    return apart > 0 and token > 0 and apart % token == 0 and (token > head or apart < head)
