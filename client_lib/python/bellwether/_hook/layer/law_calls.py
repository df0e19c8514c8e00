"""The laws of one layer's calls: what exact arithmetic makes equal in a backward pass.

A call is held from the gradient of its output on until dq, dk and dv have come out of its kernel.
Its tensors live that long anyway, for the kernel's own backward.  At most one call of a layer is
held.  What the laws are not asked about is counted, with the reason (`lacks`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import torch
from torch import Tensor

from ..._kernels import laws
from ..._kernels.memory import capturing
from ..._kernels.probe import ProbeMask, Unsupported
from ..calls import known_kernels
from ..calls.call import COMPOSED, FUSED, NOT_TOLD, AttentionCall
from ..hosts import Sampling
from .kept import Asked, Kept
from .notes import Notes
from .seen_calls import SeenCalls
from .taps import same_place

# Kernels that round the scores, too, as matrix products in the type do; and those that keep dk and
# dv in the type.  All others round as fused kernels are known to.
_COMPOSED = frozenset(
    {"sdpa", "math", "eager", "composed", "written out", "custom", "DotProductAttention",
     "nn.MultiheadAttention"}
)  # fmt: skip
# Of those, what may round otherwise: math computes halves in fp32 since torch 2.5, and the others
# are names of any kernel.  The laws then get the wider limits, and no shadow check is made: with
# the reference of the wrong arithmetic a sound kernel of fp32 had 50 times its variance.
_UNSURE = _COMPOSED - {"eager", "composed", "written out"}
_COMPOSED_ON_CPU = frozenset({"flex_attention"})
_ACCUMULATED_ON_CPU = "flash"
# Rows of a head that tell what rounds inside a kernel: with fewer the limits are wider.
ROWS_MAX = 32
KEYS = 16  # Of each head, that are compared to a reference.
KEY_SCORES_MAX = {"cpu": 1 << 20, "cuda": 1 << 26}


def arithmetic_of(kernel: str, device: str) -> str:
    """How a kernel rounds, by its name."""
    if device == "cpu" and kernel == _ACCUMULATED_ON_CPU:
        return "accumulated"
    composed = kernel in _COMPOSED or (device == "cpu" and kernel in _COMPOSED_ON_CPU)
    return COMPOSED if composed else FUSED


def _rounding(call: AttentionCall, device: str) -> tuple[str, bool]:
    """How the kernel of a call rounds, and whether that is known."""
    if call.arithmetic is not None:
        known = call.arithmetic != NOT_TOLD
        return (call.arithmetic if known else COMPOSED), known
    kernel = known_kernels.kernel(call)  # As autocast has its tensors.
    return arithmetic_of(kernel, device), kernel not in _UNSURE


def _lacking(call: AttentionCall) -> Optional[str]:
    """Why the laws of a call are not asked about; None where they are."""
    lacking = call.without_laws()
    if lacking is not None:
        return lacking
    pairs = ((call.q, call.k), (call.k, call.v), (call.q, call.v))
    if not call.packed and any(same_place(a, b) for a, b in pairs):
        return "two of q, k and v are one tensor"
    return None


def _copied(of: Any, **more: Any) -> Any:
    """A dataclass with copies of its tensors."""
    tensors = {name: t.clone() for name, t in vars(of).items() if isinstance(t, Tensor)}
    return dataclasses.replace(of, **tensors, **more)


@dataclasses.dataclass
class Given:
    """Of a call whose gradients are under way, [batch, heads, tokens, dim]; what the probe was
    told of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    d_o: Tensor
    mask: ProbeMask
    sinks: Optional[Tensor]
    rows: int
    seed: int

    def copied(self) -> Given:
        copied: Given = _copied(self, mask=_copied(self.mask))
        return copied

    def law_rows(self) -> int:
        """How many the laws take.  A mask of the sampled rows alone is one of all of those."""
        return self.rows if self.mask.by_sample else min(self.rows, ROWS_MAX)

    def keys(self) -> int:
        """How many of each head are compared to a reference: it costs as all rows do."""
        scores = self.q.shape[0] * self.q.shape[1] * self.q.shape[2] * self.k.shape[2]
        few = scores <= KEY_SCORES_MAX[self.q.device.type]
        return KEYS if few and not self.mask.by_sample else 0


@dataclasses.dataclass
class _Held:
    kept: Kept
    given: Given
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class LawCalls:
    """Of one layer."""

    def __init__(self, host: Sampling, seen: SeenCalls) -> None:
        self._host, self._seen = host, seen
        self.lacks = Notes()  # Why the laws of a call were left out, and how often.
        self.index = -1  # Of the layer among those that report.
        self._held: Optional[_Held] = None

    # ---- in the forward ----

    def asked(self, call: AttentionCall) -> Optional[Asked]:
        """None: the gradients of the call are not wanted."""
        if not self._host.measures("laws"):
            return None
        device = call.q.device.type
        lacking = None if device in laws.DEVICES else f"no laws on {device} devices yet"
        lacking = lacking or _lacking(call)
        if lacking is None and capturing():
            lacking = "in a CUDA graph"
        if lacking is not None:
            self.lacks.add(lacking)
            return None
        if self._host.capture is None and not self._host.law_turn(self.index, device).asked:
            return None
        arithmetic, sure = _rounding(call, device)
        return Asked(
            arithmetic, frozenset(call.groups()), call.weights_go_on, sure, call.narrowed,
            call.others,
        )  # fmt: skip

    # ---- in the backward ----

    def hold(self, kept: Kept, given: Given) -> None:
        """A call was probed, and its dq, dk and dv are to come."""
        asked = kept.laws
        if asked is None or capturing():
            return
        self._let_go()
        if asked.others:
            self.lacks.add(f"the scores go on {asked.others[0]}")
        else:
            self._held = _Held(kept, given.copied() if kept.fleeting else given)

    def add(self, kept: Kept, gradient: Tensor, of: str, alone: bool) -> None:
        """One of them has come."""
        held = self._held
        if held is None or held.kept is not kept or kept.laws is None:
            return
        if not alone:
            self.lacks.add("several calls of one product of queries and keys")
            self._held = None
            return
        held.gradients[of] = gradient
        if held.gradients.keys() < kept.laws.gradients:
            return
        self._held = None
        try:
            with self._host.lock, torch.no_grad():
                self._measure(held, kept.laws)
        except Unsupported as e:
            self.lacks.add(str(e))

    def lost(self, kept: Kept, reason: str) -> None:
        """One of them will not come to a tap."""
        if self._held is not None and self._held.kept is kept:
            self.lacks.add(reason)
            self._held = None

    def begin_step(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            self.lacks.add("a backward pass without all of dq, dk and dv")
            self._held = None

    def _measure(self, held: _Held, asked: Asked) -> None:
        kept, given = held.kept, held.given
        views = {"q": kept.q_view, "k": kept.k_view, "v": kept.v_view}
        found: dict[str, Tensor] = {}
        for of, gradient in held.gradients.items():
            found.update((f"d{name}", views[name](gradient)) for name in of)
        found = {name: t[: given.q.shape[0]] for name, t in found.items()}
        if asked.narrowed is given.q.dtype:  # What autocast has widened: nothing is lost.
            found = {name: t.to(asked.narrowed) for name, t in found.items()}
        types = {t.dtype for t in (given.q, *found.values())}
        if len(types) > 1:
            names = ", ".join(sorted(str(dtype) for dtype in types))
            self.lacks.add(f"tensors and gradients of several types ({names})")
            return
        call = laws.Graded(
            given.q, given.k, given.v, given.o, given.d_o, found["dq"], found["dk"], found["dv"],
            kept.scale, given.mask, kept.group, kept.softcap, given.sinks, asked.arithmetic,
        )  # fmt: skip
        if self._host.capture is not None and not asked.weights_go_on:
            self._host.capture.offer(lambda: self.index, call, self._seen.kernel)
        turn = self._host.law_turn(self.index, given.q.device.type)
        if not turn.asked:
            return
        sums = self._seen.sums
        assert sums is not None
        laws.add_laws(sums, call, rows=given.law_rows(), seed=given.seed)
        if turn.compared and asked.arithmetic_is_sure and not asked.weights_go_on:
            keys = given.keys() if turn.with_keys else 0
            laws.add_shadow(sums, call, rows=given.law_rows(), keys=keys, seed=given.seed)
