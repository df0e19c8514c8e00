"""Keeps broken calls of attention of a running job, for a report.

Off unless `capture_dir` is set.  One sequence of a call is kept: where q, k, v and dO are finite
and dq, dk or dv is not, or of a layer that was asked for.  The calls are those that the laws are
asked about (layer/law_calls.py).

The training thread waits for no GPU.  Whether a sequence is broken is a number on the device; there
the sequence is copied aside if that number says so.  When the step ends a thread waits for it, and
writes.  Files and bytes are bounded for a process, and what was refused is counted.
"""

from __future__ import annotations

import dataclasses
import queue
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Optional, TypedDict

import torch
from torch import Tensor

from .._kernels.memory import capturing
from .._util import log
from .._util.guard import in_words
from .capture import Call, Refused, about, bytes_of, sequence_at, tensors_of, write

_CAME_IN, _GRADIENTS = ("q", "k", "v", "d_o"), ("dq", "dk", "dv")
STAGES_MAX = 4  # Shapes of calls that are watched in one step.
CALLS_MAX = 4096  # That are watched in one step.
WAITING_MAX = 2  # Steps whose calls the thread has not looked at.
REASONS_MAX = 16  # Of refusals that are told apart.
CLOSE_SECONDS = 2.0
NOT_FINITE, ASKED_FOR = "not finite", "asked for"


class CaptureStatus(TypedDict):
    """Of Monitor.status()."""

    directory: str
    written: list[str]
    refused: dict[str, int]  # Why calls were not kept, and how often.
    last_error: str


def _finite(t: Tensor) -> Tensor:
    return torch.isfinite(t).flatten(1).all(1)


def on_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of tensors of one device; the calling thread waits until they are there.

    It waits for an event, and not in .cpu(): torch may have been told to raise or to warn at each
    operation that waits (torch.cuda.set_sync_debug_mode), and that holds for all threads.
    """
    copies, event = [], None
    for t in tensors:
        copies.append(torch.empty_like(t, device="cpu").copy_(t, non_blocking=True))
        if t.device.type != "cpu" and event is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    if event is not None:
        event.record()
        event.synchronize()
    return copies


@dataclasses.dataclass
class _Stage:
    """Of one step and shape: the first broken sequence, if there is one."""

    parts: dict[str, Tensor]
    taken: Tensor  # int64 on the device: which of `calls` is in `parts`; -1 = none.
    sequence: Tensor  # int64
    # What is said of each call, and its layer in this process: known at the end of the first step.
    calls: list[tuple[Callable[[], int], dict[str, Any]]] = dataclasses.field(default_factory=list)


class Capture:
    """Of one process.  All but the thread's own part is called on the training thread."""

    def __init__(
        self, folder: str, files_max: int, bytes_max: int, prefix: str, first_layer: int = 0
    ) -> None:
        """prefix  of the files' names, without a folder"""
        self.folder = Path(folder)
        self.refused: dict[str, int] = {}  # Why calls were not kept, how often.
        self.written: list[str] = []
        self.last_error = ""
        self._files_max, self._bytes_left = files_max, bytes_max
        self._prefix = re.sub(r"[^\w.-]", "-", prefix)
        self._first_layer = first_layer
        self._asked: Optional[set[int]] = set()  # Layers; None = all, each once.
        self._done: set[int] = set()  # Of these.
        self._stages: dict[Any, _Stage] = {}
        self._jobs: queue.Queue[Optional[tuple[list[_Stage], int, Any]]] = queue.Queue()
        self._thread: Optional[threading.Thread] = None

    # ---- what is asked of it ----

    def ask(self, layers: Optional[Iterable[int]] = None) -> None:
        """Keeps the next sampled call of each of these layers of the model, broken or not; None =
        of all."""
        if layers is None:
            self._asked, self._done = None, set()
        else:
            wanted = set(layers)
            self._asked = wanted if self._asked is None else self._asked | wanted
            self._done -= wanted

    def full(self) -> bool:
        return len(self.written) >= self._files_max or self._bytes_left <= 0

    def status(self) -> CaptureStatus:
        return {
            "directory": str(self.folder), "written": list(self.written),
            "refused": dict(self.refused), "last_error": self.last_error,
        }  # fmt: skip

    def _refuse(self, why: str) -> None:
        if why in self.refused or len(self.refused) < REASONS_MAX:
            self.refused[why] = self.refused.get(why, 0) + 1

    # ---- a sampled step ----

    def offer(self, layer: Callable[[], int], call: Call, kernel: str) -> None:
        """A call whose gradients have all come.  layer: which one it is in this process, below 0
        while that is not known.  Raises nothing."""
        number = layer() + self._first_layer
        asked = (self._asked is None or number in self._asked) and number not in self._done
        asked = asked and layer() >= 0
        half = call.q.dtype == torch.float16  # Its overflow is a GradScaler's daily business.
        if self.full() or capturing() or (half and not asked):
            return
        if self._jobs.qsize() >= WAITING_MAX:
            self._refuse("the last ones are still being written")
            return
        try:
            with torch.no_grad():
                self._stage(layer, number if asked else None, call, kernel)
        except Refused as e:
            self._refuse(str(e))
        except Exception as e:  # No memory is left, or another torch: the watching goes on.
            self._refuse(in_words(e))

    def _stage(
        self, layer: Callable[[], int], asked: Optional[int], call: Call, kernel: str
    ) -> None:
        """asked: the layer's number in the model, if it was asked for"""
        tensors = tensors_of(call)
        first = {name: t[:1] for name, t in tensors.items()}
        key = (call.q.device, *((name, t.shape, t.dtype) for name, t in first.items()))
        stage = self._stages.get(key)
        if stage is None:
            if bytes_of(first.values()) > self._bytes_left:
                raise Refused("one sequence is larger than what is left of capture_bytes")
            if len(self._stages) >= STAGES_MAX:
                raise Refused(f"more than {STAGES_MAX} shapes of calls in a step")
            none = torch.full((1,), -1, dtype=torch.int64, device=call.q.device)
            parts = {name: torch.zeros_like(t) for name, t in first.items()}
            stage = self._stages[key] = _Stage(parts, none, none.clone())
        if len(stage.calls) >= CALLS_MAX:
            raise Refused(f"more than {CALLS_MAX} calls in a step")
        came_in = torch.stack([_finite(tensors[name]) for name in _CAME_IN]).all(0)
        broken = came_in & ~torch.stack([_finite(tensors[name]) for name in _GRADIENTS]).all(0)
        if call.q.dtype == torch.float16:
            broken = torch.zeros_like(broken)
        at = broken.to(torch.int64).argmax().view(1)
        certain = torch.ones_like(at, dtype=torch.bool)
        wanted = broken.any().view(1) if asked is None else certain
        new = wanted & (stage.taken < 0)
        for name, t in sequence_at(tensors, at).items():
            stage.parts[name].copy_(torch.where(new.view((1,) * t.dim()), t, stage.parts[name]))
        stage.taken = torch.where(new, len(stage.calls), stage.taken)
        stage.sequence = torch.where(new, at, stage.sequence)
        if asked is not None:
            self._done.add(asked)
        reason = NOT_FINITE if asked is None else ASKED_FOR
        stage.calls.append((layer, about(call, kernel=kernel, reason=reason)))

    def step_ends(self, step: int) -> None:
        """Hands over what this step has shown."""
        if not self._stages:
            return
        stages, self._stages = list(self._stages.values()), {}
        events = {}
        for stage in stages:
            device = stage.taken.device
            if device.type == "cuda" and device not in events:
                events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                events[device].record(torch.cuda.current_stream(device))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="bellwether-capture", daemon=True
            )
            self._thread.start()
        self._jobs.put((stages, step, events))

    def close(self) -> None:
        """Waits a little for what is being written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(CLOSE_SECONDS)

    # ---- the thread ----

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            stages, step, events = job
            for stage in stages:
                try:
                    event = events.get(stage.taken.device)
                    if event is None:
                        self._look(stage, step)
                    else:
                        event.synchronize()
                        side: Any = torch.cuda.Stream  # What the job enqueues is not waited for.
                        with torch.cuda.stream(side(stage.taken.device)):
                            self._look(stage, step)
                except Exception as e:  # A full disk, another torch: the job goes on without.
                    if not self.last_error:
                        log.warning(f"a call of attention was not captured: {in_words(e)}")
                    self.last_error = in_words(e)

    def _look(self, stage: _Stage, step: int) -> None:
        number, sequence = (int(t) for t in on_host([stage.taken, stage.sequence]))
        if number < 0:
            return
        layer, told = stage.calls[number]
        told["layer"] = layer() + self._first_layer
        told |= {"step": step, "sequence": sequence}
        size = bytes_of(stage.parts.values())
        if self.full() or size > self._bytes_left:
            self._refuse("capture_files or capture_bytes are used up")
            return
        path = self.folder / f"{self._prefix}-step{step}-layer{told['layer']}.pt"
        copies = on_host(t[0] for t in stage.parts.values())
        write(path, dict(zip(stage.parts, copies)), told)
        self._bytes_left -= size
        self.written.append(str(path))
        log.warning(
            f"a call of attention in layer {told['layer']} at step {step} ({told['reason']}) was "
            f"kept: python -m bellwether reproduce {path}"
        )
