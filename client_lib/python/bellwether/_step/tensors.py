"""Statistics of each parameter, of its gradient, its moments and its change, in a sampled step.

Gradients are read when torch clips them, else when the optimizer's step begins.  So are the
optimizer's moments, and a sum of the weight's bits.  It is made again behind the step: where it is
the same nothing has moved.  That is done for every parameter in every sample.  The rest costs more
and takes turns: how large the change is, since that needs a copy of the weight, and what the
moments say.  A turn copies a piece of each of its parameters, a hundredth of all elements together,
or COPIED_LEAST where that is more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .._kernels.large_tensors import cpu_statistics, flat
from .._kernels.memory import Memories
from .._kernels.tensors import Entry, statistics
from .frames import number_at_hand
from .tensor_kinds import Kinds
from .tensor_rows import MOMENTS_ELSEWHERE, SPARSE, Row, TensorRows
from .tensor_sample import Part, Parts, TensorSample
from .weight_sample import WeightSamples

TURNS = 25  # Samples until each parameter had its turn, or fewer.
COPIED_LEAST = 1 << 16  # Elements.

# What optimizers call their first and second moments, in the order of preference.
_MOMENTS = ("exp_avg", "momentum_buffer", "state1")
_SECONDS = ("exp_avg_sq", "state2")
_NO_SECOND = "no second moment of its own that is known"
_IN_8_BITS = "its moments are in 8 bits: neither their lag nor the momentum's alignment is measured"


class Tensors:
    def __init__(self, rows: TensorRows, memories: Memories) -> None:
        self.rows, self._memories = rows, memories
        self.copied_max = 0  # Elements of the largest turn.
        self._sampled = False
        self._turns_taken = 0
        self._samples = 0
        self._parts = Parts()
        self._here: Optional[dict[int, Row]] = None  # In the running step, by id of the parameter.
        self._turn = range(0)  # Of positions.
        self._pieces: dict[int, tuple[int, int, Tensor]] = {}  # By row: begin, end, copy.
        self._moments: set[int] = set()
        self._lags: set[int] = set()
        self._done: set[int] = set()  # Rows whose step has begun.
        self._unheld: set[int] = set()  # Of those: rows that no optimizer is known to hold.
        self._late: set[int] = set()  # Of those: rows whose gradients a closure is yet to make.
        self._clipped: set[int] = set()
        self._weights = WeightSamples(Kinds(rows.model))

    def begin_step(self, sampled: bool, samples: int) -> None:
        """samples  before it, as all ranks count them that have to sample the same steps"""
        self._sampled, self._samples = sampled, samples
        self._forget()

    def _forget(self) -> None:
        self._parts, self._here = Parts(), None
        self._pieces, self._moments, self._lags = {}, set(), set()
        self._done, self._unheld, self._late, self._clipped = set(), set(), set(), set()

    def _found(self) -> dict[int, Row]:
        if self._here is None:
            self._here = self.rows.find()
            self._take_turn()
        return self._here

    def _take_turn(self) -> None:
        """Of a tensor in parts all ranks that have some take the same turn."""
        count = self.rows.trained
        size = -(-count // TURNS)
        turns = -(-count // size) if size else 0
        if not turns:
            self._turn = range(0)
            return
        self._turns_taken += 1
        self._visit, turn = divmod(self._turns_before(), turns)
        if self.rows.sharded:
            # Where samples are further apart than they were to be, no turn is left out for good.
            self._visit = (self._visit * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 40
            turn = (turn + self._visit) % turns
        self._turn = range(turn * size, min((turn + 1) * size, count))
        self._room = max(COPIED_LEAST, self.rows.elements // 100)

    def _turns_before(self) -> int:
        """Before the running one; where other ranks have parts, as all of them count."""
        if self.rows.sharded:
            return self._samples
        return max(self._turns_taken - 1, 0)

    def stepped(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the running step, as far as it is told, has moved one of them."""
        after = {number for part in self._parts.after for number in part.rows}
        here = self._here or {}
        return any(here[id(p)].number in after for p in parameters if id(p) in here)

    def clips(self, parameters: Iterable[Tensor]) -> None:
        """Their gradients are about to be clipped."""
        if not self._sampled:
            return
        with torch.no_grad():
            here = self._found()
            rows = [here[id(p)] for p in parameters if id(p) in here]
            rows = [row for row in rows if row.number not in self._done]
            self._measure_grads(rows, None)
            self._clipped |= {row.number for row in rows}

    def optimizer_steps(self, optimizer: Optimizer, known: list[Optimizer], closure: bool) -> None:
        """closure  the step computes the gradients itself"""
        if not self._sampled:
            return
        with torch.no_grad():
            rows = self._rows_of(optimizer, known)
            scale = getattr(optimizer, "grad_scale", None)
            scale = scale if isinstance(scale, Tensor) and scale.dtype == torch.float32 else None
            if closure:
                self._late |= {row.number for row in rows}
            else:
                read = [row for row in rows if row.number not in self._clipped]
                self._measure_grads(read, scale)
            weights = [(row, Entry(weight=row.weight)) for row in rows]
            self._measure(self._parts.before, weights, bits_only=True)
            if not closure:
                self._measure_moments(optimizer, rows, scale)
            self._copy(rows)
            self._done |= {row.number for row in rows}

    def _rows_of(self, optimizer: Optimizer, known: list[Optimizer]) -> list[Row]:
        """What it holds, and what no optimizer that is known holds; once a step.  One that was not
        known when another one's step began measures again: its gradients may be unscaled since."""
        here = self._found()
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        held = {id(p) for o in known for group in o.param_groups for p in group["params"]}
        mine = {row.number for key, row in here.items() if key in own}
        rows = [row for key, row in here.items() if key in own or key not in held]
        rows = [r for r in rows if r.number not in self._done or r.number in self._unheld & mine]
        self._unheld = (self._unheld | {row.number for row in rows}) - mine
        return rows

    def _measure(
        self, into: list[Part], rows: list[tuple[Row, Entry]], scale: Optional[Tensor] = None,
        bits_only: bool = False,
    ) -> None:  # fmt: skip
        devices: dict[torch.device, list[tuple[Row, Entry]]] = {}
        for row, entry in rows:
            devices.setdefault(row.weight.device, []).append((row, entry))
        for device, of in devices.items():
            here = None if scale is None or scale.device != device else scale
            memory, entries = self._memories.of(device), [entry for _, entry in of]
            if device.type == "cpu":
                found = cpu_statistics(memory, entries, here, bits_only)
            else:
                found = statistics(memory, entries, device, here)
            into.append(Part([row.number for row, _ in of], found))

    def _measure_grads(self, rows: list[Row], scale: Optional[Tensor]) -> None:
        grads = [(row, Entry(grad=grad)) for row in rows if (grad := row.grad()) is not None]
        for row in rows if len(grads) < len(rows) else ():
            if row.of.grad is not None and row.of.grad.is_sparse:
                self.rows.leave_out(row.name, SPARSE)
        self._measure(self._parts.grads, grads, scale)

    def _measure_moments(
        self, optimizer: Optimizer, rows: list[Row], scale: Optional[Tensor]
    ) -> None:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        holder, states = optimizer, optimizer.state
        if _shares_states(optimizer):
            holder, states = optimizer.optim, optimizer.optim.state  # type: ignore[attr-defined]
            rows = rows + self._copies_of(holder)
        here = {id(p) for group in holder.param_groups for p in group["params"]}
        found = []
        for row in rows:
            group = groups.get(id(row.of))
            if row.position not in self._turn or group is None:
                continue
            if id(row.of) not in here and not self.rows.all_report:
                self.rows.leave_out(row.name, MOMENTS_ELSEWHERE)
            entry = Entry()
            self._add_moments(entry, row, group, states.get(row.of) or {})
            if entry.grad is not None and self.rows.number_copy(row):
                found.append((row, entry))
        self._moments |= {row.number for row, entry in found if entry.moment is not None}
        self._lags |= {row.number for row, entry in found if entry.second is not None}
        self._measure(self._parts.moments, found, scale)

    def _copies_of(self, holder: Optimizer) -> list[Row]:
        """Of which this rank has the moments, and another tells the rest."""
        if not self.rows.all_report:
            return []
        held = (p for group in holder.param_groups for p in group["params"])
        return [self.rows.copies[id(p)] for p in held if id(p) in self.rows.copies]

    def _add_moments(
        self, entry: Entry, row: Row, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        grad = row.grad()
        if grad is None or grad.stride() != row.weight.stride() or not state:
            return
        moment = next((m for n in _MOMENTS if (m := row.beside(state.get(n))) is not None), None)
        second = next((v for n in _SECONDS if (v := row.beside(state.get(n))) is not None), None)
        if moment is not None:
            entry.grad, entry.moment = grad, moment
        betas, eps = group.get("betas"), number_at_hand(group.get("eps"))
        beta2 = number_at_hand(betas[1]) if isinstance(betas, (tuple, list)) and betas else None
        if second is None or beta2 is None or eps is None or not 0 <= beta2 < 1:
            in_8_bits = any(_in_8_bits(state.get(name)) for name in _SECONDS)
            self.rows.leave_out(row.name, _IN_8_BITS if in_8_bits else _NO_SECOND)
            return
        steps = state.get("step", group.get("k"))  # Of schedule-free ones, for all at once.
        if isinstance(steps, Tensor) and steps.device == row.weight.device != torch.device("cpu"):
            if steps.dtype != torch.float32:
                return
            entry.steps, entry.steps_at = 1.0, steps
        else:
            taken = number_at_hand(steps)
            if taken is None or taken < 0:
                return
            entry.steps = taken + 1
        entry.grad, entry.second, entry.beta2, entry.eps = grad, second, beta2, eps

    def _copy(self, rows: list[Row]) -> None:
        """The smallest ones whole, as far as there is room."""
        in_turn = [row for row in rows if row.position in self._turn and row.weight.numel() > 0]
        in_turn.sort(key=lambda row: row.weight.numel())
        for left, row in zip(range(len(in_turn), 0, -1), in_turn):
            count, size = row.weight.numel(), max(self._room // left, 1)
            begin = self._visit * size % count if size < count else 0
            end = min(begin + size, count)
            self._pieces[row.number] = begin, end, flat(row.weight)[begin:end].clone()
            self._room -= end - begin
        copied = sum(end - begin for begin, end, _ in self._pieces.values())
        self.copied_max = max(self.copied_max, copied)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Its step has ended, and is no part of another one's."""
        if not self._sampled or self._here is None:
            return
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._measure_after([row for row in self._here.values() if id(row.of) in own])

    def _measure_after(self, of: list[Row]) -> None:
        stepped = {number for part in self._parts.after for number in part.rows}
        rows = [row for row in of if row.number in self._done - stepped]
        with torch.no_grad():
            late = [row for row in rows if row.number in self._late - self._clipped]
            self._measure_grads(late, None)
            self._measure(self._parts.after, [(row, Entry(weight=row.weight)) for row in rows])
            pieces = []
            for row in rows:
                if row.number in self._pieces:
                    begin, end, before = self._pieces.pop(row.number)
                    weight = flat(row.weight)[begin:end]
                    pieces.append((row, Entry(weight=weight, before=before)))
            self._measure(self._parts.pieces, pieces)
            self._parts.weights += self._weights.measure(rows, self._turn, self._turns_before())

    def sample(self) -> Optional[TensorSample]:
        """What was measured in this step."""
        if self._here is not None:  # What no optimizer holds, as far as is known.
            self._measure_after(list(self._here.values()))
        if not self._parts.after:  # Clipped, and then no step: the job has skipped it.
            self._forget()
            return None
        parts = self._parts
        measured = any(True for _ in parts.all())
        found = TensorSample(parts, len(self.rows.names), self._moments, self._lags)
        self._forget()
        return found if measured else None


def _in_8_bits(moment: Any) -> bool:
    """As bitsandbytes has them, beside `absmax` of blocks, and torchao, as tensors of its own."""
    if not isinstance(moment, Tensor):
        return False
    return moment.dtype.itemsize == 1 or "8bit" in type(moment).__name__


def _shares_states(optimizer: Optimizer) -> bool:
    """Whether each rank has the moments of some parameters, in an optimizer within this one."""
    home = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    kind = getattr(home, "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)
