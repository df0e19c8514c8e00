"""The frames of the steps, and those that wait for a device.

A number that is still being computed on a device is copied to pinned memory without waiting, as
are the statistics of a sampled step; the frame, and those behind it, are pushed once the copies
have arrived.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any, Optional, Union

import torch

from . import _native
from .client import Block, RunClient
from .sample import Sample

LATE_FRAMES_MAX = 64  # Frames that wait for a device; beyond it their numbers are left out.
_POLL_SECONDS = 0.001
GRAD_SCALE = "grad_scale"  # Among a step's values; no signal: what its gradients are divided by.


class _Late:
    """A number on its way from a device."""

    def __init__(self, value: torch.Tensor) -> None:
        self.host = torch.empty((), dtype=torch.float32, pin_memory=True)
        self.host.copy_(value.detach().reshape(()).float(), non_blocking=True)
        self.event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record()

    def ready(self) -> bool:
        return bool(self.event.query())

    def value(self) -> float:
        return float(self.host)


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

    def ready(self) -> bool:
        late = (v for v in self.values.values() if isinstance(v, _Late))
        return all(v.ready() for v in late) and (self.sample is None or self.sample.ready())


class Frames:
    """Frames in the order of their steps; the newest numbers, for people and other loggers."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self.device_seconds = 0.0  # What the kernels of a sample took on GPUs.
        self.partial_rows = False  # Samples are of a context-parallel shard's rows.
        self._waiting: collections.deque[_Frame] = collections.deque()

    def push(
        self,
        client: Optional[RunClient],
        step: int,
        values: dict[str, Any],
        sample: Optional[Sample],
    ) -> None:
        """Queues the frame of `step` and pushes all frames whose numbers have arrived."""
        late = {name: _now_or_late(value) for name, value in values.items()}
        self._waiting.append(_Frame(step, late, sample))
        self.drain(client)

    def drain(self, client: Optional[RunClient], timeout: float = 0.0) -> bool:
        """Pushes what is ready, in order; waits for the rest for at most `timeout` seconds.
        Whether all was pushed."""
        deadline = time.monotonic() + timeout
        while self._waiting:
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
        scale = run.pop(GRAD_SCALE, 1.0)
        self.last.update(run)
        blocks = [Block(name, [value]) for name, value in run.items()]
        if frame.sample is not None and arrived:
            blocks += frame.sample.blocks(scale if scale else 1.0)
            self.last.update(frame.sample.summary())
            seconds = frame.sample.device_seconds()
            if seconds is not None:
                self.device_seconds = seconds
        if client is not None:
            if frame.sample is not None and arrived and frame.sample.grams is not None:
                frame.sample.grams.push(client, frame.step)
            client.push(frame.step, blocks[: _native.BLOCKS_MAX], partial_rows=self.partial_rows)
