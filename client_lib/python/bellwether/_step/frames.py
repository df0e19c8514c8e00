"""The frames of the steps, and those that wait for a device.

A number that is still being computed on a device is copied to pinned memory without waiting, as
are the statistics of a sampled step.  The frame, and those behind it, are pushed once the copies
have arrived.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Optional, Union

import torch

from .._hook.model.parallel import is_dtensor
from .._native import c_api
from .._native.run_client import Block, ClientError, RunClient
from .._util import log
from . import rollouts
from .law_rows import LawRows
from .own_numbers import TOLD_MAX, OwnNumbers, Told, ToldOnce
from .rollouts import ToldRollout
from .sample import Sample
from .sequence_losses import SequenceLosses, ToldLosses
from .since_sample import Lags, SinceSample

LATE_FRAMES_MAX = 64  # Frames that wait for a device; beyond it their numbers are left out.
FAULTS_MAX = 64  # Modules whose faults are told.
LEFT_OUT_MAX = 16  # Reasons that are remembered.
OTHER_REASONS = "for other reasons, which are not named any more"
_POLL_SECONDS = 0.001
OVERFLOWS_MAX = 32  # Samples in a row that are made up for; a scaler needs 16 to find its factor.
# Among a step's values, but no signals: what its gradients are divided by; above 0 if they are
# not finite and a GradScaler has therefore skipped the step.
GRAD_SCALE, FOUND_INF = "grad_scale", "found_inf"


class _Late:
    """A number on its way from a device."""

    def __init__(self, value: torch.Tensor) -> None:
        self.host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
        self.host.copy_(value.detach().reshape(()).float(), non_blocking=True)
        self.event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record()

    def ready(self) -> bool:
        return bool(self.event.query())

    def value(self) -> float:
        return float(self.host)


def number_at_hand(value: Any) -> Optional[float]:
    """What is known without asking a device or another rank; None for everything else."""
    if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or is_dtensor(value)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # None, no number, several.
        return None


def local(value: Any) -> Any:
    """A DTensor's part here, if that is all of it.  Raises ValueError where the ranks would have
    to exchange something: not all of them may be here."""
    if not is_dtensor(value):
        return value
    for dimension, placement in enumerate(value.placements):
        if not placement.is_replicate() and value.device_mesh.size(dimension) > 1:
            raise ValueError(f"a DTensor that no rank has whole, {placement}: give .full_tensor()")
    return value.to_local()


def _now_or_late(value: Any) -> Union[float, _Late]:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return _Late(value)
        return float(value.detach())
    return float(value)


@dataclasses.dataclass
class _Frame:
    step: int
    values: dict[str, Union[float, _Late]]  # The run's own numbers.
    sample: Optional[Sample]
    own: list[ToldOnce] = dataclasses.field(default_factory=list)
    lags: Optional[Lags] = None  # Since the sample before.

    def ready(self) -> bool:
        late = (v for v in self.values.values() if isinstance(v, _Late))
        arrived = all(v.ready() for v in late) and all(told.ready() for told in self.own)
        parts = (self.sample, self.lags)
        return arrived and all(part.ready() for part in parts if part is not None)


class Frames:
    """Frames in the order of their steps; the newest numbers, for people and other loggers."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self.device_seconds = 0.0  # What the kernels of a sample took on GPUs.
        self.partial_rows = False  # Samples are of a context-parallel shard's rows.
        self._overflows = 0  # Samples in a row without gradients.
        self._sample_again = False
        self.left_out: dict[str, int] = {}  # Numbers that could not be read: why, how often.
        self._waiting: collections.deque[_Frame] = collections.deque()
        self.law_rows = LawRows()
        self._law_samples = 0
        self.own = OwnNumbers(self.leave_out)
        self.losses = SequenceLosses()
        # What is logged behind mon.step() is of the step that it ended: the newest frame waits.
        self.keeps_newest = False
        self.since: Optional[SinceSample] = None  # Where steps between samples are told of.
        self.handed_over: Callable[[int, bool], None] = lambda size, sampled: None
        self.faults: dict[str, str] = {}  # Of modules, by their names: the first of each.
        self.said: dict[str, Any] = {}  # Of the running step, by mon.numbers().

    def readable(self, told: dict[str, Any]) -> dict[str, Any]:
        """Those of a step's numbers that are given and that this rank can read by itself."""
        found: dict[str, Any] = {}
        for name, value in told.items():
            if value is None:
                continue
            try:
                # Beyond a float's range there are integers, which all that follows would trip over.
                found[name] = float(value) if isinstance(value, int) else local(value)
            except Exception as e:
                self.leave_out(name, e)
        return found

    def leave_out(self, name: str, error: Exception) -> None:
        """An unreadable number costs that number, not the frame."""
        reason = f"{name}: {type(error).__name__}: {error}"
        known = any(each.startswith(f"{name}: ") for each in self.left_out)
        counted = self.count_left_out(reason)
        if self.left_out[counted] == 1 and (counted == OTHER_REASONS or not known):
            log.warning(f"a number of the step is left out: {counted}")

    def count_left_out(self, reason: str) -> str:
        """What it was counted as: beyond LEFT_OUT_MAX reasons, one that stands for all others."""
        if reason not in self.left_out and len(self.left_out) >= LEFT_OUT_MAX:
            reason = OTHER_REASONS
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        return reason

    def push(
        self,
        client: Optional[RunClient],
        step: int,
        values: dict[str, Any],
        sample: Optional[Sample],
        lags: Optional[Lags] = None,
    ) -> None:
        """Queues the frame of `step` and pushes all frames whose numbers have arrived."""
        late: dict[str, Union[float, _Late]] = {}
        for name, value in values.items():
            try:
                late[name] = _now_or_late(value)
            except Exception as e:
                self.leave_out(name, e)
        self._waiting.append(_Frame(step, late, sample, self.own.take(), lags))
        self.drain(client, everything=False)

    def add_to(self, step: int, told: ToldOnce) -> bool:
        """To a step that has ended.  False: its frame is gone.
        Raises ValueError beyond TOLD_MAX."""
        newest = self._waiting[-1] if self._waiting else None
        if newest is None or newest.step != step:
            return False
        if sum(one.name == told.name for one in newest.own) >= TOLD_MAX:
            raise ValueError(f"told {TOLD_MAX} times in one step")
        newest.own.append(told)
        return True

    def sample_again(self) -> bool:
        """Whether the newest sample lacks its gradients and the next step should make up for it;
        asked for once."""
        again, self._sample_again = self._sample_again, False
        return again

    def drain(
        self, client: Optional[RunClient], timeout: float = 0.0, everything: bool = True
    ) -> bool:
        """Pushes what is ready, in order; waits for the rest for at most `timeout` seconds.
        Whether all was pushed.  `everything`: the newest frame, too, also where it is kept."""
        deadline = time.monotonic() + timeout
        kept = 1 if self.keeps_newest and not everything else 0
        while len(self._waiting) > kept:
            frame = self._waiting[0]
            arrived = frame.ready()
            if not arrived and len(self._waiting) <= LATE_FRAMES_MAX:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_SECONDS)
                continue
            self._waiting.popleft()
            self._push(client, frame, arrived)
        return True

    def _push(self, client: Optional[RunClient], frame: _Frame, arrived: bool) -> None:
        run = {}
        for name, value in frame.values.items():
            if not isinstance(value, _Late):
                run[name] = value
            elif arrived:
                run[name] = value.value()
        known_scale = run.pop(GRAD_SCALE, None)
        scale = 1.0 if known_scale is None else known_scale
        gradients = not run.pop(FOUND_INF, 0.0)
        if not gradients:  # What a scaler throws away says nothing about the run.
            run.pop("grad_norm", None)
        if self.since is not None:
            self.since.add(run, not gradients)
            if frame.sample is not None:
                run.update(self._since_sample(frame, scale, arrived))
        self.last.update(run)
        blocks = [Block(name, [value]) for name, value in run.items()]
        told = [one for one in frame.own if arrived or one.ready()]
        blocks += self._of_losses(client, frame.step, told)
        if frame.sample is not None and arrived:
            blocks += frame.sample.blocks(scale if scale else 1.0, gradients)
            if gradients:
                blocks += frame.sample.tensor_blocks()
                if frame.sample.rank_norms is not None:
                    blocks += self._kept(frame.sample.rank_norms.blocks(known_scale))
                room = c_api.BLOCKS_MAX - len(blocks)
                laws = frame.sample.law_rows()
                blocks += self.law_rows.blocks(client, laws, scale if scale else 1.0, room)
            if frame.sample.activations is not None:
                room = c_api.BLOCKS_MAX - len(blocks)
                blocks += frame.sample.activations.blocks(
                    client, self.law_rows, scale if scale else 1.0, gradients, room
                )
            if frame.sample.fp8 is not None:
                room = c_api.BLOCKS_MAX - len(blocks)
                blocks += frame.sample.fp8.blocks(client, self.law_rows, frame.step, room)
            self.last.update(frame.sample.summary(gradients))
            self._overflows = 0 if gradients else self._overflows + 1
            self._sample_again = 0 < self._overflows <= OVERFLOWS_MAX
            seconds = frame.sample.device_seconds()
            if seconds is not None:
                self.device_seconds = seconds
            if gradients:
                self._tell_faults(client, frame.step, frame.sample)
        if client is not None:
            before = client.queued_bytes
            if frame.sample is not None and arrived and frame.sample.grams is not None:
                frame.sample.grams.push(client, frame.step)
            own = self.own.of_frame(self._own(told))
            blocks = self._within(blocks)
            try:
                client.push(frame.step, blocks, partial_rows=self.partial_rows, own=own)
            except ClientError as e:
                if not own:
                    raise
                self.leave_out("log()", e)  # The job's own numbers cost no frame.
                client.push(frame.step, blocks, partial_rows=self.partial_rows)
            self.handed_over(client.queued_bytes - before, frame.sample is not None)

    def _kept(self, blocks: list[Block]) -> list[Block]:
        """They are among the newest numbers, too."""
        self.last.update({block.signal: block.values[0] for block in blocks})
        return blocks

    def _since_sample(self, frame: _Frame, scale: float, arrived: bool) -> dict[str, float]:
        found = self.since.take() if self.since is not None else {}
        if GRAD_SCALE in frame.values:
            found["loss_scale"] = scale
        if frame.lags is not None and arrived:
            found.update(frame.lags.values())
        return found

    def _within(self, blocks: list[Block]) -> list[Block]:
        """What a frame takes of them.  Rows of modules count themselves what they leave out."""
        most = c_api.BLOCKS_MAX
        if len(blocks) > most:
            first = blocks[most].signal
            self.leave_out("frame", ValueError(f"{most} blocks at most: none from {first} on"))
        return blocks[:most]

    def _own(self, told: list[ToldOnce]) -> list[Told]:
        of_rollouts = [one for one in told if isinstance(one, ToldRollout)]
        found = [one for one in told if isinstance(one, Told)]
        return found + list(rollouts.of_frame(of_rollouts, self.own, self.leave_out))

    def _of_losses(
        self, client: Optional[RunClient], step: int, told: list[ToldOnce]
    ) -> list[Block]:
        losses = [one for one in told if isinstance(one, ToldLosses)]
        blocks, event = self.losses.of_frame(step, losses)
        if event is not None and client is not None:
            client.push_event(step, "annotation", *event)
        self.last.update({block.signal: block.values[0] for block in blocks})
        return blocks

    def _tell_faults(self, client: Optional[RunClient], step: int, sample: Sample) -> None:
        """Once for each layer, to the log and the server."""
        if sample.linears is None and sample.balances is None:
            return
        self._law_samples += 1
        found: list[tuple[str, str, str]] = []  # The module's name, the subject, what is wrong.
        if sample.linears is not None:
            for name, text in sample.linears.faults(self._law_samples).items():
                found.append((name, f"the linear layer {name} computes wrongly", text))
        if sample.balances is not None:
            for name, text in sample.balances.faults(self._law_samples).items():
                found.append((name, name, text))
        for name, subject, text in found:
            if name in self.faults or len(self.faults) >= FAULTS_MAX:
                continue
            self.faults[name] = text
            sentence = f"{subject}: {text}"
            log.warning(f"step {step}: {sentence}")
            if client is not None:
                client.push_event(step, "annotation", sentence)
