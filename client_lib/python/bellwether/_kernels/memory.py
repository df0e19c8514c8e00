"""Where the kernels add up what they measure: one place for all layers of a device.

A region is taken once, for good, so that its address never changes.  At the end of a sampled
step collect() hands out a copy of everything and starts anew.  On a GPU that is one copy into
pinned memory on the current stream: nothing waits for it.  Not thread-safe.
"""

from __future__ import annotations

import abc
import array
import bisect
import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Optional

import torch

from .._native import c_api

FLOAT_BYTES = 4
CHUNK_FLOATS = 1 << 18  # Of the memory of a GPU: 1 MiB, more than most models need.


def floats(count: int, value: float = 0.0) -> array.array[float]:
    return array.array("f", [value]) * count


def capturing() -> bool:
    """Whether what is enqueued now goes into a CUDA graph: then nothing may be asked of the GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.cuda.is_current_stream_capturing())


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # A fifth of the other's time.


def stream_of(device: torch.device) -> int:
    """The handle of a GPU's current stream."""
    if _raw_stream is not None and device.index is not None:
        return int(_raw_stream(device.index))
    return int(torch.cuda.current_stream(device).cuda_stream)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """`device` is the current GPU within it.  Nothing is done where it is already."""
    if device.index is not None and torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


class Copy:
    """What a memory held at the end of a step.  On a GPU it may still be on its way."""

    def __init__(self, values: Optional[array.array[float]] = None) -> None:
        self._values = values

    def ready(self) -> bool:
        return True

    def seconds(self) -> Optional[float]:
        """What the kernels took on a GPU, or None if they were not timed; it must be ready."""
        return 0.0

    def read(self, begin: int, count: int) -> array.array[float]:
        """Part of it; it must be ready."""
        assert self._values is not None
        return self._values[begin : begin + count]


class _CopyFromDevice(Copy):
    def __init__(self, host: torch.Tensor, event: Any, timed: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self._host, self._event, self._timed = host, event, timed

    def ready(self) -> bool:
        return bool(self._event.query())

    def seconds(self) -> Optional[float]:
        if not self._timed:
            return None
        return sum(float(begin.elapsed_time(end)) for begin, end in self._timed) / 1e3

    def read(self, begin: int, count: int) -> array.array[float]:
        if self._values is None:
            raw = ctypes.string_at(self._host.data_ptr(), self._host.numel() * FLOAT_BYTES)
            self._values = array.array("f", raw)
        return self._values[begin : begin + count]


class Memory(abc.ABC):
    open = False  # Whether CUDA graphs that run in this step measure.

    @abc.abstractmethod
    def take(self, initial: array.array[float]) -> int:
        """Where a new region begins; `initial` is what it holds when a sample begins."""

    @abc.abstractmethod
    def address(self, at: int) -> int:
        """Of a float of a region."""

    @abc.abstractmethod
    def call_fields(self) -> dict[str, Any]:
        """What every call of the kernels library is told of where it runs."""

    @abc.abstractmethod
    def gate(self) -> Optional[int]:
        """What a call that is being captured into a CUDA graph must ask whenever the graph runs
        (bw_probe_params.gate); None outside of a capture: the call is made for this step."""

    @abc.abstractmethod
    def begin_step(self, sampled: bool, seed: int) -> None:
        """Opens or shuts the gate for the next step; `seed` is added to the rows' seeds."""

    @abc.abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """Around calls of the kernels library."""

    @abc.abstractmethod
    def collect(self, timed: bool) -> Copy:
        """The values now; afterwards all are the initial ones.  `timed`: what the next
        sample's kernels take is to be measured."""


class HostMemory(Memory):
    """On the CPU."""

    def __init__(self) -> None:
        self._regions: list[tuple[array.array[float], array.array[float]]] = []  # Now, at first.
        self._begins: list[int] = []
        self._size = 0

    def take(self, initial: array.array[float]) -> int:
        begin = self._size
        self._regions.append((initial[:], initial[:]))
        self._begins.append(begin)
        self._size += len(initial)
        return begin

    def address(self, at: int) -> int:
        region = bisect.bisect_right(self._begins, at) - 1
        values, _ = self._regions[region]
        return values.buffer_info()[0] + FLOAT_BYTES * (at - self._begins[region])

    def call_fields(self) -> dict[str, Any]:
        return {"backend": c_api.CPU, "threads": torch.get_num_threads()}

    def gate(self) -> Optional[int]:
        return None

    def begin_step(self, sampled: bool, seed: int) -> None:
        pass

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def collect(self, timed: bool) -> Copy:
        copy = floats(0)
        for values, initial in self._regions:
            copy.extend(values)
            values[:] = initial
        return Copy(copy)


class _Chunk:
    def __init__(self, capacity: int, device: torch.device) -> None:
        self.values = torch.zeros(capacity, dtype=torch.float32, device=device)
        self.initial = torch.zeros(capacity, dtype=torch.float32, device=device)
        self.used = 0


# What CUDA graphs write to and read from as long as they are replayed, which may be for good.
_captured: set[Memory] = set()


class DeviceMemory(Memory):
    """On a CUDA device; what is enqueued goes to its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._gate = torch.zeros(2, dtype=torch.int64, device=device)
        self._chunks: list[_Chunk] = []
        self._begins: list[int] = []
        self._timing = True
        self._timed: list[tuple[Any, Any]] = []

    def take(self, initial: array.array[float]) -> int:
        if not self._chunks or self._chunks[-1].used + len(initial) > len(self._chunks[-1].values):
            self._begins.append(self._capacity())
            self._chunks.append(_Chunk(max(CHUNK_FLOATS, len(initial)), self.device))
        chunk = self._chunks[-1]
        own = slice(chunk.used, chunk.used + len(initial))
        host = torch.tensor(initial.tolist(), dtype=torch.float32, device="cpu")
        chunk.initial[own].copy_(host)
        chunk.values[own].copy_(host)
        chunk.used = own.stop
        return self._begins[-1] + own.start

    def _capacity(self) -> int:
        return self._begins[-1] + len(self._chunks[-1].values) if self._chunks else 0

    def address(self, at: int) -> int:
        chunk = bisect.bisect_right(self._begins, at) - 1
        base = int(self._chunks[chunk].values.data_ptr())
        return base + FLOAT_BYTES * (at - self._begins[chunk])

    def call_fields(self) -> dict[str, Any]:
        return {"backend": c_api.CUDA, "stream": stream_of(self.device)}

    def gate(self) -> Optional[int]:
        if not capturing():
            return None
        _captured.add(self)
        return int(self._gate.data_ptr())

    def begin_step(self, sampled: bool, seed: int) -> None:
        if self not in _captured or not (sampled or self.open):
            return
        self.open = sampled
        self._gate[:1].fill_(int(sampled))
        if sampled:
            self._gate[1:].fill_(seed - (1 << 64) if seed >> 63 else seed)

    @contextmanager
    def running(self) -> Iterator[None]:
        with on_device(self.device):
            if not self._timing or capturing():
                yield
                return
            begin, end = self._event(), self._event()
            begin.record()
            yield
            end.record()
            self._timed.append((begin, end))

    @staticmethod
    def _event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def collect(self, timed: bool) -> Copy:
        with on_device(self.device):
            size = self._begins[-1] + self._chunks[-1].used if self._chunks else 0
            host = torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=True)
            for begin, chunk in zip(self._begins, self._chunks):
                values = chunk.values[: chunk.used]
                host[begin : begin + chunk.used].copy_(values, non_blocking=True)
                values.copy_(chunk.initial[: chunk.used], non_blocking=True)
            event = self._event()
            event.record()
        done, self._timed, self._timing = self._timed, [], timed
        return _CopyFromDevice(host, event, done)


class Memories:
    """The memory of each device that a model is on."""

    def __init__(self) -> None:
        self._of: dict[torch.device, Memory] = {}

    def of(self, device: torch.device) -> Memory:
        if device not in self._of:
            self._of[device] = HostMemory() if device.type == "cpu" else DeviceMemory(device)
        return self._of[device]

    def gpu(self) -> Optional[torch.device]:
        """The first one that something was measured on."""
        return next((device for device in self._of if device.type == "cuda"), None)

    def begin_step(self, sampled: bool, seed: int) -> None:
        for memory in self._of.values():
            memory.begin_step(sampled, seed)

    def collect(self, timed: bool) -> dict[Memory, Copy]:
        """By memory."""
        return {memory: memory.collect(timed) for memory in self._of.values()}
