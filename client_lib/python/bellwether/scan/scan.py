"""One sample per checkpoint: the spectral signals of every head, in the order of the steps.

What was sent is remembered in the user's state folder once it is durable, so that a scan that
ended, however it did, goes on where it stopped and sends nothing twice.
"""

from __future__ import annotations

import array
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch

from .._kernels import probe
from .._kernels.memory import Copy, HostMemory, Memory
from .._kernels.probe import Spectrum
from .._native.run_client import Block, RunClient, RunOptions
from .._server.state_file import StateFile
from .._step.sample import Sample
from .._util import integers
from ..settings import ATTEMPT_MAX
from . import checkpoints, scan_layout
from .checkpoints import Checkpoint
from .scan_layout import ScanLayer, Told

_STATS = frozenset({"sigma"})
_SIGNALS = ("wq_sigma", "wk_sigma", "wq_stable_rank", "qk_increment_rank")


class NotSent(RuntimeError):
    """The server did not take a sample in time; it is still kept by the sender."""


class Progress:
    """Which checkpoints of a folder a run has had, kept in a file."""

    def __init__(self, directory: Path, run: str, sink: str) -> None:
        self._file = StateFile("scans", str(directory.resolve()), run, sink)
        self.attempt = 0
        self.step = -1  # The newest one that was sent in this attempt.
        self.sent: dict[str, str] = {}  # File name -> signature.
        self.newest = ""  # The file of that step.
        self.trouble = ""  # Why the file could not be written.
        try:
            told = self._file.read() or {}
            attempt = integers.whole("attempt", told["attempt"], 0, ATTEMPT_MAX)
            step = integers.whole("step", told["step"], -1, integers.STEP_MAX)
            self.sent, self.newest = dict(told["sent"]), str(told["newest"])
            self.attempt, self.step = attempt, step
        except (ValueError, KeyError, TypeError):
            pass  # Nothing was sent yet.

    def forget(self) -> None:
        """Everything goes again, as another attempt."""
        if self.sent:
            self.back()
            self.sent, self.newest = {}, ""

    def back(self) -> None:
        """The training went back to an earlier step: a new attempt begins."""
        self.attempt, self.step = self.attempt + 1, -1

    def has(self, path: Path, signature: str) -> bool:
        return self.sent.get(path.name) == signature

    def add(self, path: Path, signature: str, step: Optional[int]) -> None:
        """It was sent as `step`; None = it needed not be."""
        self.sent[path.name] = signature
        if step is not None:
            self.step, self.newest = step, path.name
        try:
            self._file.write({n: getattr(self, n) for n in ("attempt", "step", "newest", "sent")})
        except OSError as e:  # It was sent all the same.
            self.trouble = str(e)


class _Measured:
    """A layer of the run, over all checkpoints: a MeasuredLayer."""

    sums: Optional[probe.Sums] = None

    def __init__(self, index: int, layer: ScanLayer, memory: Memory) -> None:
        device = torch.device("cpu")
        place = layer.location
        self.index, self.layer = index, layer
        self.heads, self.kv_heads = place.heads, place.kv_heads
        self.wq = Spectrum(memory, device, place.heads, place.dim)
        self.wk = Spectrum(memory, device, place.kv_heads, place.dim)

    def measure(
        self, now: Checkpoint, before: Optional[Checkpoint]
    ) -> Optional[array.array[float]]:
        """The rank of the change since the checkpoint before, where there is one.  Raises
        Unreadable."""
        views = self.layer.views(now)
        if views is None:
            raise checkpoints.Unreadable(f"{now.path}: {self.layer.name} has another shape")
        self.wq.measure(views[0])
        self.wk.measure(views[1])
        try:
            old = self.layer.views(before) if before is not None else None
        except checkpoints.Unreadable:  # It was deleted since: no rank this time.
            old = None
        if old is None:
            return None
        (q, k), (q0, k0) = (
            tuple(w.to(torch.float32).contiguous() for w in pair) for pair in (views, old)
        )
        return probe.increment_rank(q, q0, k, k0)


@dataclasses.dataclass(frozen=True)
class Result:
    """What one checkpoint gave."""

    path: Path
    step: int
    values: dict[str, list[list[float]]]  # Signal -> [layers][heads]
    layers: list[str]

    def largest(self, signal: str) -> tuple[float, int, int]:
        """(value, layer, head) of the largest finite one."""
        every = (
            (value, layer, head)
            for layer, row in enumerate(self.values[signal])
            for head, value in enumerate(row)
        )
        return max((each for each in every if each[0] == each[0]), default=(float("nan"), -1, -1))

    def median(self, signal: str) -> float:
        every = [value for row in self.values[signal] for value in row if value == value]
        return statistics.median(every) if every else float("nan")


class Scan:
    """Measures checkpoints one after the other and streams them as one run."""

    def __init__(
        self,
        options: RunOptions,
        progress: Progress,
        told: Told,
        layout: Callable[[Checkpoint, Told], list[ScanLayer]],
        directory: Path,
        timeout: float,
    ) -> None:
        self._timeout = timeout  # Seconds, for the server to take a sample.
        self._options, self.progress = options, progress
        self._told, self._layout, self._directory = told, layout, directory
        self._memory = HostMemory()
        self._layers: list[_Measured] = []
        self._known = False  # The layers are those of a checkpoint that was measured.
        self._before: Optional[Checkpoint] = None
        self._before_signature = ""
        self._client: Optional[RunClient] = None

    def _open(self, path: Path) -> Checkpoint:
        checkpoint = checkpoints.read(path)
        told = self._told.before(scan_layout.told_by(checkpoint.config))
        found = self._layout(checkpoint, told.before(scan_layout.beside(path, self._directory)))
        if not self._known:  # None was measured so far that others had to be like.
            self._memory = HostMemory()
            self._layers = [_Measured(i, x, self._memory) for i, x in enumerate(found)]
            self._model = told.model
        elif [x.layer for x in self._layers] != found:
            raise scan_layout.UnknownLayout(
                f"{path}: its layers are not those of the first checkpoint; "
                "another model needs another run (--run)"
            )
        return checkpoint

    def _still_there(self) -> Optional[Checkpoint]:
        """The one before, if it was not written over: its files are mapped, not copied."""
        before = self._before
        try:
            if before is None or checkpoints.signature(before.path) != self._before_signature:
                return None
        except OSError:
            return None
        return before

    def _sample(self, checkpoint: Checkpoint) -> list[Block]:
        increments: dict[int, Any] = {}
        before = self._still_there()
        for layer in self._layers:
            rank = layer.measure(checkpoint, before)
            if rank is not None:
                increments[id(layer)] = rank
        copies: dict[Memory, Copy] = {self._memory: self._memory.collect(False)}
        sample = Sample(self._layers, _STATS, increments, copies)
        blocks = sample.blocks()
        for layer in self._layers:
            layer.wq.begin_sample()
            layer.wk.begin_sample()
        return blocks

    def _forget_sample(self) -> None:
        """What a checkpoint left that could not be measured to its end: nothing is compared with
        its directions."""
        for layer in self._layers:
            for spectrum in (layer.wq, layer.wk):
                spectrum.begin_sample()
                spectrum.samples = 0

    def resume(self) -> None:
        """Reads the checkpoint that was sent last once more, if it is still there, so that the
        change since then can be measured."""
        path = self._directory / self.progress.newest
        if not self.progress.newest or self._before is not None:
            return
        try:
            signature = checkpoints.signature(path)
            if self.progress.has(path, signature):
                checkpoint = self._open(path)
                self._sample(checkpoint)
                self._before, self._before_signature = checkpoint, signature
                self._known = True
        except Exception:  # It does not matter enough to be told.
            self._forget_sample()

    def take(self, path: Path, signature: str) -> Optional[Result]:
        """Measures and sends one checkpoint; None if its step was sent before.

        Returns when it is durable.  Raises NotSent; anything else is the checkpoint's, which is
        then as if it had not been there."""
        checkpoint = self._open(path)
        step = checkpoints.step_of(checkpoint)
        if step == self.progress.step:
            self.progress.add(path, signature, None)
            return None
        try:
            blocks = self._sample(checkpoint)
        except BaseException:
            self._forget_sample()
            raise
        if step < self.progress.step:
            self.close()
            self.progress.back()
        client = self._client or self._connect()
        self._known = True
        if self.progress.step < 0:
            client.push_event(step, "attach", f"checkpoints of {self._directory.name}")
        client.push(step, blocks)
        if not client.flush(self._timeout):
            why = client.counters().error or "no answer from the server"
            raise NotSent(f"{path}: it was not taken within {self._timeout:g} s: {why}")
        self.progress.add(path, signature, step)
        self._before, self._before_signature = checkpoint, signature
        values = {b.signal: _rows(b) for b in blocks if b.signal in _SIGNALS}
        return Result(path, step, values, [layer.layer.name for layer in self._layers])

    def _connect(self) -> RunClient:
        first = self._layers[0]
        kv_heads = {layer.kv_heads for layer in self._layers}
        heads = max(layer.heads for layer in self._layers)
        self._client = RunClient(
            dataclasses.replace(
                self._options,
                attempt=self.progress.attempt,
                layers=len(self._layers),
                heads=heads,
                kv_heads=first.kv_heads if len(kv_heads) == 1 else heads,
                head_dim=first.layer.location.dim,
                model=self._model or None,
            )
        )
        return self._client

    def page_url(self) -> str:
        return self._client.counters().page_url if self._client is not None else ""

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def _rows(block: Block) -> list[list[float]]:
    values, width = block.values, block.head_count
    return [list(values[i * width : (i + 1) * width]) for i in range(block.layer_count)]
