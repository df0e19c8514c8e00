"""What was measured of the parameters in one step, as blocks of a frame."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._native import c_api
from .._native.run_client import Block
from .law_rows import told
from .weight_sample import SIGNALS as WEIGHT_SIGNALS
from .weight_sample import WeightPart

SIGNALS = (
    "tensor_elements",
    "tensor_grad_sumsq",
    "tensor_grad_max",
    "tensor_grad_nonfinite",
    "tensor_grad_zeros",
    "tensor_moved",
    "tensor_weight_sumsq",
)
TURN_SIGNALS = (
    "tensor_change_sumsq",
    "tensor_change_weight_sumsq",
    "tensor_lag_sum",
    "tensor_momentum_dot",
    "tensor_momentum_norms",
)
_AT = {name: i for i, name in enumerate(c_api.TENSOR_STATS)}


class Part:
    """Statistics of some rows, perhaps on their way from a GPU."""

    def __init__(self, rows: list[int], found: Tensor) -> None:
        self.rows, self._host = rows, found
        self._event: Any = None
        if found.is_cuda:
            self._host = torch.empty_like(found, device="cpu", pin_memory=True)
            self._host.copy_(found, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def column(self, stat: str) -> Tensor:
        """float64 [rows], must be ready."""
        return self._host[:, _AT[stat]]


@dataclasses.dataclass
class Parts:
    grads: list[Part] = dataclasses.field(default_factory=list)
    before: list[Part] = dataclasses.field(default_factory=list)
    moments: list[Part] = dataclasses.field(default_factory=list)
    after: list[Part] = dataclasses.field(default_factory=list)
    pieces: list[Part] = dataclasses.field(default_factory=list)
    weights: list[WeightPart] = dataclasses.field(default_factory=list)

    def all(self) -> Iterator[Part]:
        yield from (*self.grads, *self.before, *self.moments, *self.after, *self.pieces)


class TensorSample:
    """Of one step.

    moments, lags  rows of which there is a first, a second moment
    """

    def __init__(self, parts: Parts, rows: int, moments: set[int], lags: set[int]) -> None:
        self._parts, self._rows = parts, rows
        self._moments, self._lags = moments, lags

    def ready(self) -> bool:
        return all(part.ready() for part in self._parts.all()) and all(
            part.ready() for part in self._parts.weights
        )

    def blocks(self, named: int) -> list[Block]:
        """Of the first `named` rows.  Must be ready."""
        table = self._table()
        numbers = [n for part in (*self._parts.moments, *self._parts.pieces) for n in part.rows]
        begin, end = min(numbers, default=0), max(numbers, default=-1) + 1
        turn = range(begin, min(end, named))
        everywhere = range(min(self._rows, named))
        found = []
        for signal in (*SIGNALS, *TURN_SIGNALS):
            of = everywhere if signal in SIGNALS else turn
            values = table[signal][of.start : of.stop]
            if len(of) == 0 or bool((values.view(torch.int32) == c_api.NOT_MEASURED_BITS).all()):
                continue
            found.append(Block(signal, array.array("f", values.tolist()), of.start, len(of)))
        for signal in WEIGHT_SIGNALS:
            values = table[signal][:named]
            found += told(signal, array.array("f", values.tolist()), 0)
        return found

    def _table(self) -> dict[str, Tensor]:
        """float32 [rows] by signal."""
        missing = torch.full(
            (self._rows,), c_api.NOT_MEASURED_BITS, dtype=torch.int32, device="cpu"
        )
        table = {
            signal: missing.clone().view(torch.float32)
            for signal in (*SIGNALS, *TURN_SIGNALS, *WEIGHT_SIGNALS)
        }

        def put(signal: str, rows: list[int], values: Tensor) -> None:
            table[signal][rows] = values.to(torch.float32)

        parts = self._parts
        for part in parts.grads:
            for stat in ("grad_sumsq", "grad_max", "grad_nonfinite", "grad_zeros"):
                put(f"tensor_{stat}", part.rows, part.column(stat))
        bits = torch.full((self._rows,), -1.0, dtype=torch.float64, device="cpu")
        for part in parts.before:
            bits[part.rows] = part.column("weight_bits")
        for part in parts.moments:
            self._put_moments(part, put)
        for part in parts.after:
            put("tensor_elements", part.rows, part.column("elements"))
            whole = part.column("weight_nonfinite") == 0
            squares = torch.where(whole, part.column("weight_sumsq"), torch.nan)
            put("tensor_weight_sumsq", part.rows, squares)
            known = bits[part.rows] >= 0
            moved = (bits[part.rows] != part.column("weight_bits"))[known]
            put("tensor_moved", [r for r, k in zip(part.rows, known.tolist()) if k], moved)
        for of_weights in parts.weights:
            of_weights.put(put)
        for part in parts.pieces:
            put("tensor_change_sumsq", part.rows, part.column("change_sumsq"))
            put("tensor_change_weight_sumsq", part.rows, part.column("weight_sumsq"))
        return table

    def _put_moments(self, part: Part, put: Callable[[str, list[int], Tensor], None]) -> None:
        lagging = [i for i, row in enumerate(part.rows) if row in self._lags]
        moving = [i for i, row in enumerate(part.rows) if row in self._moments]
        put("tensor_lag_sum", [part.rows[i] for i in lagging], part.column("lag_sum")[lagging])
        rows = [part.rows[i] for i in moving]
        norms = (part.column("grad_sumsq") * part.column("moment_sumsq")).sqrt()
        put("tensor_momentum_dot", rows, part.column("dot")[moving])
        put("tensor_momentum_norms", rows, norms[moving])
