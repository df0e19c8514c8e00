"""What a step becomes on the wire: blocks of the heads, and the run's own numbers.

A number that is still being computed on a device is copied to pinned memory without waiting;
its frame, and those behind it, are pushed once the copy has arrived.
"""

from __future__ import annotations

import array
import collections
import math
from typing import TYPE_CHECKING, Any, Union

import torch

from . import _native
from .client import Block, RunClient
from .settings import STATS

if TYPE_CHECKING:
    from .layer import Layer

LATE_FRAMES_MAX = 64  # Frames that wait for a device; beyond it their numbers are left out.

_DELTA = STATS["delta"]
_PER_KEY_HEAD = ("sequences", "key_coherence_sum", "key_leak_sum", "key_gradient_sum")
_ROWS = ("rows", "nonfinite_rows")


class _Matrix:
    """[layers][heads] of one signal, filled with what means "not measured"."""

    def __init__(self, signal: str, layers: int, heads: int) -> None:
        fill = 0.0 if signal.endswith("_sum") or signal.endswith("_rows") else math.nan
        if signal in ("rows", "sequences", *_DELTA) or signal.startswith("tied_"):
            fill = 0.0
        self.signal, self.layers, self.heads = signal, layers, heads
        self.values = array.array("f", [fill]) * (layers * heads)
        self.used = False

    def put(self, layer: int, row: array.array[float]) -> None:
        self.values[layer * self.heads : layer * self.heads + len(row)] = row
        self.used = True


def head_blocks(
    layers: list[Layer], stats: frozenset[str], increments: dict[int, Any]
) -> list[Block]:
    """One block for each signal that any layer measured, over all layers."""
    if not layers:
        return []
    count = len(layers)
    heads = max(layer.heads for layer in layers)
    same = len({(layer.heads, layer.kv_heads) for layer in layers}) == 1
    kv_heads = layers[0].kv_heads if same else heads
    matrices: dict[str, _Matrix] = {}

    def put(signal: str, layer: Layer, row: array.array[float], per_key: bool) -> None:
        matrix = matrices.get(signal)
        if matrix is None:
            matrix = _Matrix(signal, count, kv_heads if per_key else heads)
            matrices[signal] = matrix
        matrix.put(layer.index, row)

    chosen = [s for part in ("drift", "ties", "delta") if part in stats for s in STATS[part]]
    for layer in layers:
        sums = layer.sums
        if sums is not None and sums.probed:
            for signal in (*_ROWS, *chosen):
                if signal in _DELTA and not sums.with_delta:
                    continue
                put(signal, layer, sums.row(signal), signal in _PER_KEY_HEAD)
        if sums is not None and sums.leaked and "leak" in stats:
            for signal in STATS["leak"]:
                put(signal, layer, sums.row(signal), True)
        if layer.wq is not None and layer.wk is not None and layer.wq.samples:
            put("wq_sigma", layer, layer.wq.sigma, False)
            put("wq_sigma_residual", layer, layer.wq.residual, False)
            put("wq_stable_rank", layer, layer.wq.stable_rank, False)
            if layer.wq.samples > 1:
                put("wq_direction_overlap", layer, layer.wq.overlap, False)
            put("wk_sigma", layer, layer.wk.sigma, True)
            put("wk_sigma_residual", layer, layer.wk.residual, True)
        if id(layer) in increments:
            put("qk_increment_rank", layer, increments[id(layer)], False)
    return [Block(m.signal, m.values, 0, m.layers, 0, m.heads) for m in matrices.values()]


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


class Scalars:
    """The run's own numbers of each step, and the frames that wait for one of them."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._waiting: collections.deque[tuple[int, dict[str, Union[float, _Late]], list[Block]]]
        self._waiting = collections.deque()

    def last(self) -> dict[str, float]:
        return dict(self._last)

    def remember(self, values: dict[str, Any]) -> None:
        self._last.update({k: float(v) for k, v in values.items() if not torch.is_tensor(v)})

    def push(
        self, client: RunClient, step: int, values: dict[str, Any], blocks: list[Block]
    ) -> None:
        """Queues the frame of `step` and pushes all frames whose numbers have arrived."""
        self._waiting.append((step, {k: _now_or_late(v) for k, v in values.items()}, blocks))
        self.drain(client, wait=False)

    def drain(self, client: RunClient, wait: bool) -> None:
        """Pushes what is ready, in order; with `wait` everything."""
        while self._waiting:
            step, values, blocks = self._waiting[0]
            late = [v for v in values.values() if isinstance(v, _Late)]
            arrived = all(v.ready() for v in late)
            if not arrived and wait:
                for v in late:
                    v.event.synchronize()
                arrived = True
            if not arrived and len(self._waiting) <= LATE_FRAMES_MAX:
                return
            self._waiting.popleft()
            run = {}
            for name, value in values.items():
                if not isinstance(value, _Late):
                    run[name] = value
                elif arrived:
                    run[name] = value.value()
            self._last.update(run)
            whole = [Block(name, [value]) for name, value in run.items()] + blocks
            client.push(step, whole[: _native.BLOCKS_MAX])
