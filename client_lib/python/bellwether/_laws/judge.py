"""Whether one call of attention is right: the laws, the shadow check, and what both together say.

broken      a difference that no rounding makes: beyond what independent roundings give with the
            probability that is left for one question, and beyond what roundings give that are all
            alike.  It is of a law, of rows of a tensor, or of the factor by which all rows of one
            are too large.  Or elements that are not finite where the reference is.
biased      beyond the first, not beyond the second: evidence of a bias in rounding, no fault.
right       neither.
not judged  and why.

No threshold comes from other runs.  ALARMS is what all questions of one run of doctor may give
together by chance; each has its part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, Optional

import torch

from .attention import GRADIENTS, Law, laws, row_weights, tensor_sums
from .call import TENSORS, GradedCall
from .reference import (
    ACCUMULATED,
    COMPOSED,
    EITHER_SIDE,
    FUSED,
    PROJECTIONS,
    Reference,
    References,
)
from .rounding import F16, GRIDS
from .shadow import Shadow, shadow

ALARMS = 1e-3
_WRITTEN_OUT = "scores are rounded to the type, as in attention out of matrix products"
OTHERS = {
    COMPOSED: _WRITTEN_OUT,
    EITHER_SIDE: _WRITTEN_OUT,
    ACCUMULATED: "dk and dv are added up in the type, not in fp32",
}
RIGHT, BIASED, BROKEN, NOT_JUDGED = "right", "biased", "broken", "not judged"


@dataclasses.dataclass(frozen=True)
class Limits:
    """How far chance goes in one of so many questions."""

    questions: int

    @property
    def chance(self) -> float:
        return ALARMS / max(1, self.questions)

    @property
    def z(self) -> float:
        return NormalDist().inv_cdf(1 - self.chance / 2)

    def excess(self, degrees: torch.Tensor) -> torch.Tensor:
        """The bound of Laurent and Massart on a mean of squares of normal numbers."""
        x = math.log(1 / self.chance) / degrees.clamp(min=1.0)
        return 1 + 2 * x.sqrt() + 2 * x


def questions(batch: int, heads: int, kv_heads: int, q_len: int, k_len: int) -> int:
    """What judge() asks of a call of this shape.  Of a tensor: its rows, their mean, its factor."""
    of_laws = batch * kv_heads * (2 * PROJECTIONS + 2)
    return of_laws + 2 * batch * (heads * (q_len + 2) + kv_heads * (k_len + 2))


@dataclasses.dataclass
class Finding:
    """One thing that is wrong, or a hint at it."""

    what: str  # A tensor, or the set that the laws leave.
    batch: int
    head: int  # Of the queries for o and dq, else of the keys.
    text: str


@dataclasses.dataclass
class Verdict:
    verdict: str
    why: str = ""
    findings: list[Finding] = dataclasses.field(default_factory=list)
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    left_out: int = 0  # Rows that see nothing and came out as NaN.


def suspects(broken: Sequence[str]) -> str:
    """The set that broken laws name."""
    of = set(broken)
    if of == {"A1"}:
        return "delta"
    if of == {"A1", "A4"}:
        return "o"
    if "A1" in of and "A3" in of:
        return "dk, keys not written"
    if of == {"A3"}:
        return "dq or dk, by a factor or of exchanged heads"
    if "A2" in of:
        return "dv, or P of the backward pass (its logsumexp)"
    return "o or dv"


def _worst(x: torch.Tensor) -> tuple[int, int, float]:
    """(sequence, head, value) of the largest of [batch, heads, ...]."""
    flat = x.flatten(2).amax(-1) if x.dim() > 2 else x
    at = int(flat.argmax())
    return at // flat.shape[1], at % flat.shape[1], float(flat.flatten()[at])


def _nonfinite(call: GradedCall, known_of: References) -> Optional[Verdict]:
    """The verdict where some element is not finite."""
    bad = {name: tensor_sums(getattr(call, name)).nonfinite for name in ("o", *GRADIENTS)}
    if not any(bool(count.any()) for count in bad.values()):
        return None
    for name in ("q", "k", "v", "d_o"):
        if not torch.isfinite(getattr(call, name)).all():
            return Verdict(NOT_JUDGED, f"{name} is not finite as it comes in")
    left_out = 0 if call.sinks is not None else row_weights(call)[1]
    findings = []
    known = known_of.of(call)
    in_half = GRIDS[call.q.dtype] is F16
    if in_half and known.largest >= F16.largest:
        return Verdict(NOT_JUDGED, "dS is beyond the range of fp16 in exact arithmetic")
    for name in TENSORS:
        expected = getattr(known, name)
        if in_half and expected.reaches(F16.largest):
            return Verdict(NOT_JUDGED, f"{name} is beyond the range of fp16 in exact arithmetic")
        batch, head, count = _worst(bad[name].double())
        if count:
            heads = int((bad[name] > 0).any(0).sum())
            text = f"{int(count)} elements are not finite, in {heads} of {bad[name].shape[1]} heads"
            findings.append(Finding(name, batch, head, text))
    why = "not finite where the reference is"
    if left_out:
        why += f"; {left_out} rows see no key and came out as NaN"
    counts = {name: int(count.sum()) for name, count in bad.items()}
    return Verdict(BROKEN, why, findings, {"nonfinite": counts}, left_out)


def _by_shadow(name: str, s: Shadow, limits: Limits, by_factor: bool) -> Optional[Finding]:
    """What is wrong with one tensor, at its worst place."""
    of_head = s.excess / limits.excess(s.degrees)
    one = limits.excess(torch.ones((), dtype=torch.float64, device=s.excess.device))
    apart = torch.maximum(of_head, s.worst_row / one)
    of_factor = s.factor_z() / limits.z if by_factor else torch.zeros_like(apart)
    over = torch.maximum(apart, of_factor)
    batch, head, worst = _worst(over)
    if worst <= 1:
        return None
    at = (batch, head)
    text = f"cosine {float(s.cosine[at]):.6f}, norm {float(s.norms[at]):.4f} of the reference's"
    if float(apart[at]) <= 1:
        text = f"{1 + float(s.factors()[at]):.4f} times the reference"
    elif float(of_head[at]) <= 1 and float(of_factor[at]) <= 1:
        row = "row" if name in ("o", "dq") else "key"
        text += f", {row} {int(s.row_at[at])} alone"
    heads = int((over > 1).any(0).sum())
    return Finding(name, batch, head, f"{text}, in {heads} of {over.shape[1]} heads")


def _shadow_findings(checked: dict[str, Shadow], limits: Limits, by_factor: bool) -> list[Finding]:
    found = [
        _by_shadow(name, checked[name], limits, by_factor) for name in TENSORS if name in checked
    ]
    return [finding for finding in found if finding is not None]


def _over(law: Law, limits: Limits) -> tuple[tuple[int, int, float], tuple[int, int, float]]:
    """Where a law differs most: from independent roundings, and from those that are alike."""
    return _worst(law.z().abs()), _worst(law.beyond().abs())


def _sums(call: GradedCall) -> dict[str, Any]:
    """Of the gradients, by sequence and head."""
    told = {}
    for name in GRADIENTS:
        of = dataclasses.asdict(tensor_sums(getattr(call, name)))
        told[name] = {what: values.tolist() for what, values in of.items()}
    return told


def _numbers(
    call: GradedCall, found: dict[str, Law], checked: dict[str, Shadow], by_factor: bool
) -> dict[str, Any]:
    numbers: dict[str, Any] = {"sums": _sums(call)}
    for name, law in found.items():
        numbers[name] = {
            "z": round(float(law.z().abs().max()), 2),
            "z_beyond_rounding": round(float(law.beyond().abs().max()), 2),
        }
    for name, s in checked.items():
        numbers[name] = {
            "cosine_min": float(s.cosine.min()),
            "norm_min": float(s.norms.min()), "norm_max": float(s.norms.max()),
            "excess_max": float(s.excess.max()), "row_excess_max": float(s.worst_row.max()),
        }  # fmt: skip
        if by_factor:
            numbers[name] |= {
                "factor_off_max": float(s.factors().abs().max()),
                "factor_z_beyond_rounding": round(float(s.factor_z().max()), 2),
            }
    return numbers


def _judged(call: GradedCall, known: Reference, limits: Limits, arithmetic: str) -> Verdict:
    found = laws(call, known)
    checked = shadow(call, known)
    by_z = call.q.dtype != torch.float32  # Nothing says whether its products were cut to TF32.
    numbers = _numbers(call, found, checked, by_z) | {"arithmetic": arithmetic}
    of_tensors = _shadow_findings(checked, limits, by_z)
    broken, biased = [], []
    for name, law in found.items() if by_z else ():
        (batch, head, z), (at, of, beyond) = _over(law, limits)
        if beyond > limits.z:
            broken.append(Finding(name, at, of, f"z {beyond:.0f} beyond all rounding"))
        elif z > limits.z:
            biased.append(Finding(name, batch, head, f"z {z:.0f}, within what rounding can give"))
    if of_tensors or broken:
        findings = list(of_tensors)
        if broken:
            first = broken[0]
            names = [f.what for f in broken]
            laws_say = "; ".join(f"{f.what}: {f.text}" for f in broken)
            findings.append(Finding(suspects(names), first.batch, first.head, laws_say))
        return Verdict(BROKEN, "", findings, numbers, known.left_out)
    if biased:
        return Verdict(BIASED, "", biased, numbers, known.left_out)
    why = "" if by_z else "fp32: by the shadow check alone, within the precision of TF32"
    return Verdict(RIGHT, why, [], numbers, known.left_out)


def _scores_outlast_the_mask(call: GradedCall) -> bool:
    """Whether some row sees no key, and its scores show all the same: in fp16 the least number is
    -65504, and sums are rounded to multiples of 32.  What such a row comes to is not known."""
    if GRIDS[call.q.dtype] is not F16:
        return False
    k = call.k.double().unsqueeze(2)
    for rows in torch.split(torch.arange(call.q.shape[2], device=call.q.device), 256):
        unseen = call.unseen(rows, call.bias(rows))
        blank, is_nan = call.outcome(rows, unseen)
        scores = call.scale * (call.grouped(call.q[:, :, rows]).double() @ k.mT)
        large = scores.abs().amax(-1) >= F16.largest * 2.0**-F16.bits / 2
        if bool((unseen & ~blank & ~is_nan & large).any()):
            return True
    return False


@torch.no_grad()
def judge(call: GradedCall, limits: Limits, known_of: Optional[References] = None) -> Verdict:
    """The verdict on a call whose scores all fit into the time that there is.

    known_of: of several kernels on the same inputs, to save time."""
    known_of = known_of or References()
    early = _nonfinite(call, known_of)
    if early is not None:
        return early
    verdict = _judged(call, known_of.of(call), limits, FUSED)
    for arithmetic, why in OTHERS.items() if verdict.verdict == BROKEN else ():
        other = _judged(call, known_of.of(call, arithmetic), limits, arithmetic)
        if other.verdict != BROKEN:
            other.why = why
            return other
        if len(other.findings) < len(verdict.findings):  # It explains some of them.
            verdict = other
    if verdict.verdict == BROKEN and _scores_outlast_the_mask(call):
        return Verdict(NOT_JUDGED, "scores outlast the mask's least number where no key is seen")
    return verdict
