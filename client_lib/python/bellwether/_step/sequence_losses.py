"""Losses of single sequences (mon.losses), from the call to the frame of their step.

Sums and the largest ones are computed where the losses are, and copied without waiting.  Ids of the
job name the largest; they are hashed if not said otherwise.  An event tells them where the largest
is far beyond what losses have been.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Optional, TypedDict

import torch
from torch import Tensor

from .._kernels.memory import capturing
from .._native.run_client import Block
from .tapped_modules import Arriving

SEQUENCES_MAX = 65536  # Of one call.
LABELS_MAX = 1 << 28
LARGEST = 8
ID_MAX = 64  # Characters.
# Each limit holds for losses that are not finite, and once more for all others: the harmless ones,
# which are frequent, must not hide them.
EVENTS_MAX = 256  # Of a run.
EVENT_EVERY = 50  # Steps from one to the next, or more.
KNOWN_AFTER = 20  # Steps until it is known what losses are.
FAR = 8.0  # Standard deviations.
_DECAY = 0.98
_DEVICES = ("cpu", "cuda")


class LargestLoss(TypedDict):
    """A sequence's."""

    id: str  # Hashed, if not said otherwise; "" where none was given.
    loss: float


class LossesStatus(TypedDict):
    """The losses of sequences."""

    step: int  # The newest that has some, -1 = none.
    largest: list[LargestLoss]  # Of it; those that are not finite, of either sign, come first.
    events: int  # That told of a loss far beyond the others.


def shown_id(value: Any, plain: bool) -> str:
    """An id as it is sent: 16 hexadecimal digits of its text's BLAKE2b, or its first characters."""
    text = str(value)
    if plain:
        return "".join(c if c.isprintable() else " " for c in text[:ID_MAX])
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


class ToldLosses:
    """What one call said: a micro-batch."""

    name = "losses"

    def __init__(
        self, losses: Tensor, ids: Any, labels: Optional[Tensor], ignored: int, plain: bool
    ) -> None:
        self.carried = False  # Of the step before, whose frame was gone.
        self.count = losses.numel()
        self._plain = plain
        flat = losses.detach().reshape(-1).double()
        # What is not finite comes first, of either sign: topk takes NaN for the largest.
        shown = flat.masked_fill(flat.isinf(), math.inf).topk(min(LARGEST, self.count)).indices
        sums = torch.stack([flat.sum(), flat.square().sum(), flat.amax()])
        self._ids: Optional[Sequence[Any]] = None
        arriving = [torch.cat([sums, flat.index_select(0, shown)]), shown]
        if isinstance(ids, Tensor) and ids.device.type != "cpu":
            arriving.append(ids.detach().reshape(-1).index_select(0, shown))
        elif ids is not None:
            self._ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        self._ids_arrive = len(arriving) == 3
        if labels is not None:
            arriving.append(_of_labels(labels.detach(), ignored))
        self.labels = 0 if labels is None else labels.numel()
        self._arriving = Arriving(arriving)

    def ready(self) -> bool:
        return self._arriving.ready()

    def values(self) -> tuple[float, float, float, list[LargestLoss], tuple[float, float]]:
        """Their sum, that of their squares, the largest one, those to show, and of the labels how
        many count and how many of those repeat the one before.  Must be ready."""
        numbers, at, *more = self._arriving.values()
        ids: list[Any] = [""] * len(at)
        if self._ids_arrive:
            ids = [shown_id(each, self._plain) for each in more.pop(0)]
        elif self._ids is not None:
            ids = [shown_id(self._ids[i], self._plain) for i in at]
        largest = [LargestLoss(id=i, loss=loss) for i, loss in zip(ids, numbers[3:])]
        counted, repeated = more[0] if more else (0.0, 0.0)
        return numbers[0], numbers[1], numbers[2], largest, (counted, repeated)


def _elsewhere(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type != "cpu"


def _of_labels(labels: Tensor, ignored: int) -> Tensor:
    """float64 [2]: how many count, and how many of those are the same as the one before."""
    counts = labels != ignored
    same = (labels[..., 1:] == labels[..., :-1]) & counts[..., 1:]
    return torch.stack([counts.sum(), same.sum()]).double()


def read(losses: Any, ids: Any, labels: Any, ignored: int, plain: bool) -> ToldLosses:
    """Raises ValueError or TypeError for what cannot be read."""
    for name, several in (("losses", losses), ("ids", ids)):
        if isinstance(several, (list, tuple)) and any(_elsewhere(x) for x in several):
            raise TypeError(f"{name}: tensors on a GPU must be one tensor, which is not waited for")
    if not isinstance(losses, Tensor):
        losses = torch.as_tensor(losses, dtype=torch.float64, device="cpu")
    for name, t in (("losses", losses), ("labels", labels)):
        if t is None:
            continue
        if not isinstance(t, Tensor) or t.device.type not in _DEVICES:
            raise TypeError(f"{name} must be a tensor on {' or '.join(_DEVICES)}")
        if t.device.type == "cuda" and capturing():
            raise ValueError("a CUDA graph is being captured")
    if not losses.is_floating_point() or not 1 <= losses.numel() <= SEQUENCES_MAX:
        raise ValueError(
            f"losses: {losses.numel()} of {losses.dtype}, must be 1..{SEQUENCES_MAX} floats"
        )
    if isinstance(ids, (str, bytes)):
        raise TypeError("ids must be a sequence with one for each loss, and is a text")
    count = None if ids is None else ids.numel() if isinstance(ids, Tensor) else len(ids)
    if count is not None and count != losses.numel():
        raise ValueError(f"ids: {count}, must be as many as losses, {losses.numel()}")
    if isinstance(ids, Tensor) and (ids.is_floating_point() or ids.device.type not in _DEVICES):
        raise TypeError("ids: a tensor must have integers")
    if labels is not None and (
        labels.dim() == 0 or labels.is_floating_point() or labels.numel() > LABELS_MAX
    ):
        raise ValueError(f"labels must be integers [..., tokens], at most {LABELS_MAX}")
    with torch.no_grad():
        return ToldLosses(losses, ids, labels, int(ignored), plain)


class _Events:
    """Of one kind: how many there were, and when the newest."""

    def __init__(self) -> None:
        self._count, self._at = 0, -EVENT_EVERY

    def room(self, step: int) -> bool:
        """Whether step may have one, which is then counted.  Steps go back in a rollback."""
        if self._count >= EVENTS_MAX or 0 <= step - self._at < EVENT_EVERY:
            return False
        self._count, self._at = self._count + 1, step
        return True


class SequenceLosses:
    """Of a run."""

    def __init__(self) -> None:
        self.status: LossesStatus = {"step": -1, "largest": [], "events": 0}
        self._steps = 0  # That are part of the past.
        self._mean = self._square = 0.0  # Of a sequence's loss, over some fifty steps.
        self._events = {finite: _Events() for finite in (True, False)}

    def of_frame(
        self, step: int, told: list[ToldLosses]
    ) -> tuple[list[Block], Optional[tuple[str, float]]]:
        """Its blocks, and an event: text and value.  All must be ready."""
        afresh = [one for one in told if not one.carried] or told
        if not afresh:
            return [], None
        found = [(one, *one.values()) for one in afresh]
        count = sum(one.count for one in afresh)
        total, squares = sum(f[1] for f in found), sum(f[2] for f in found)
        largest = sorted((x for f in found for x in f[4]), key=_worst_first)[:LARGEST]
        tops = [f[3] for f in found]
        batches = [f[1] / f[0].count for f in found]
        self.status["step"], self.status["largest"] = step, largest
        numbers = {
            "loss_sequences": float(count),
            "loss_sequence_sum": total,
            "loss_sequence_max": math.nan if any(map(math.isnan, tops)) else max(tops),
            "loss_microbatch_max": math.nan if math.isnan(total) else max(batches),
        }
        labels = sum(one.labels for one in afresh)
        if labels:
            counted = sum(f[5][0] for f in found)
            numbers["loss_tokens"], numbers["loss_given_tokens"] = counted, float(labels)
            numbers["loss_masked_tokens"] = labels - counted
            numbers["loss_repeated_tokens"] = sum(f[5][1] for f in found)
        event = self._event(step, largest)
        self._remember(total / count, squares / count)
        return [Block(name, [value]) for name, value in numbers.items()], event

    def _event(self, step: int, largest: list[LargestLoss]) -> Optional[tuple[str, float]]:
        loss = largest[0]["loss"]
        spread = math.sqrt(max(self._square - self._mean**2, 0.0))
        finite = math.isfinite(loss)
        far = not finite or loss > self._mean + FAR * spread
        if not far or self._steps < KNOWN_AFTER or not self._events[finite].room(step):
            return None
        self.status["events"] += 1
        each = (f"{x['loss']:.4g} {x['id']}".strip() for x in largest)
        return "largest losses of sequences: " + ", ".join(each), loss

    def _remember(self, mean: float, square: float) -> None:
        if not math.isfinite(square):
            return
        keep = _DECAY if self._steps >= KNOWN_AFTER else self._steps / (self._steps + 1)
        self._mean = keep * self._mean + (1 - keep) * mean
        self._square = keep * self._square + (1 - keep) * square
        self._steps += 1


def _worst_first(x: LargestLoss) -> tuple[bool, float]:
    """No number, then infinity of either sign, then the largest."""
    loss = x["loss"]
    return not math.isnan(loss), -abs(loss) if math.isinf(loss) else -loss
