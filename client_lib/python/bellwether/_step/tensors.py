"""Statistics of each parameter, of its gradient, its moments and its change, in a sampled step.

Gradients are read when torch clips them, else when the optimizer's step begins.  So are the
optimizer's moments, and a sum of the weight's bits.  It is made again behind the step: where it is
the same nothing has moved.  That is done for every parameter in every sample.  The rest costs more
and takes turns: how large the change is, since that needs a copy of the weight, and what the
moments say.  A turn copies a piece of each of its parameters, a hundredth of all elements together,
or COPIED_LEAST where that is more.

Each rank tells its part of a tensor, and the server adds them up.  Of copies one rank tells: the
first that holds it.
"""

from __future__ import annotations

import array
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .._hook.model.parallel import Parallel, is_dtensor, is_fully_sharded
from .._kernels.memory import Memories
from .._kernels.probe import DTYPES
from .._kernels.tensors import Entry, dense, statistics
from .._native import c_api
from .._native.run_client import Block
from .._util.ranks import rank_and_world
from .frames import number_at_hand

TURNS = 25  # Samples until each parameter had its turn, or fewer.
COPIED_LEAST = 1 << 16  # Elements.
LEFT_OUT_MAX = 64  # Parameters whose reason is remembered.

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
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_BLOCK = re.compile(r"(^|\.)(layers|blocks|h)\.(\d+)(?=\.)")
_NOT_MEASURED_BITS = 0x7FC0BE11

ELSEWHERE = 'its parts lie at ranks that do not report: attach(ranks="all")'
FLAT = "the weights are whole in the passes only (FSDP1, ZeRO-3)"
_COPY = ""  # Another rank tells it.

# What optimizers call their first and second moments, in the order of preference.
_MOMENTS = ("exp_avg", "momentum_buffer", "state1")
_SECONDS = ("exp_avg_sq", "state2")


class _Part:
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
class _Parts:
    grads: list[_Part] = dataclasses.field(default_factory=list)
    before: list[_Part] = dataclasses.field(default_factory=list)  # The step, with its moments.
    after: list[_Part] = dataclasses.field(default_factory=list)
    pieces: list[_Part] = dataclasses.field(default_factory=list)

    def all(self) -> Iterator[_Part]:
        yield from (*self.grads, *self.before, *self.after, *self.pieces)


class TensorSample:
    """Of one step.

    turn  rows whose moments and changes were measured
    """

    def __init__(
        self, parts: _Parts, rows: int, turn: range, moments: set[int], lags: set[int]
    ) -> None:
        self._parts, self._rows, self._turn = parts, rows, turn
        self._moments, self._lags = moments, lags

    def ready(self) -> bool:
        return all(part.ready() for part in self._parts.all())

    def blocks(self, named: int, room: int) -> list[Block]:
        """For at most so many blocks, of the first `named` rows.  Must be ready."""
        table = self._table()
        turn = range(self._turn.start, min(self._turn.stop, named))
        everywhere = range(min(self._rows, named))
        found = []
        for signal in (*SIGNALS, *TURN_SIGNALS):
            of = everywhere if signal in SIGNALS else turn
            values = table[signal][of.start : of.stop]
            if len(of) == 0 or bool((values.view(torch.int32) == _NOT_MEASURED_BITS).all()):
                continue
            found.append(Block(signal, array.array("f", values.tolist()), of.start, len(of)))
        return found[: max(room, 0)]

    def _table(self) -> dict[str, Tensor]:
        """float32 [rows] by signal."""
        missing = torch.full((self._rows,), _NOT_MEASURED_BITS, dtype=torch.int32, device="cpu")
        table = {
            signal: missing.clone().view(torch.float32) for signal in (*SIGNALS, *TURN_SIGNALS)
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
            self._put_moments(part, put)
        for part in parts.after:
            put("tensor_elements", part.rows, part.column("elements"))
            whole = part.column("weight_nonfinite") == 0
            squares = torch.where(whole, part.column("weight_sumsq"), torch.nan)
            put("tensor_weight_sumsq", part.rows, squares)
            known = bits[part.rows] >= 0
            moved = (bits[part.rows] != part.column("weight_bits"))[known]
            put("tensor_moved", [r for r, k in zip(part.rows, known.tolist()) if k], moved)
        for part in parts.pieces:
            put("tensor_change_sumsq", part.rows, part.column("change_sumsq"))
            put("tensor_change_weight_sumsq", part.rows, part.column("weight_sumsq"))
        return table

    def _put_moments(self, part: _Part, put: Callable[[str, list[int], Tensor], None]) -> None:
        lagging = [i for i, row in enumerate(part.rows) if row in self._lags]
        moving = [i for i, row in enumerate(part.rows) if row in self._moments]
        put("tensor_lag_sum", [part.rows[i] for i in lagging], part.column("lag_sum")[lagging])
        rows = [part.rows[i] for i in moving]
        norms = (part.column("grad_sumsq") * part.column("moment_sumsq")).sqrt()
        put("tensor_momentum_dot", rows, part.column("dot")[moving])
        put("tensor_momentum_norms", rows, norms[moving])


@dataclasses.dataclass
class _Row:
    """A parameter here: its part of the tensor, dense, without autograd."""

    number: int
    of: Tensor  # The parameter itself, by which optimizers know it.
    weight: Tensor

    def grad(self) -> Optional[Tensor]:
        grad = self.of.grad
        if grad is None or grad.is_sparse:
            return None
        if is_dtensor(grad):
            if not is_dtensor(self.of) or grad.placements != self.of.placements:  # type: ignore[attr-defined]
                return None
            grad = grad.to_local()  # type: ignore[attr-defined]
        usable = type(grad) is Tensor and grad.dtype in DTYPES and dense(grad)
        return grad if usable and grad.device == self.weight.device else None

    def beside(self, tensor: Any) -> Optional[Tensor]:
        """A tensor of the optimizer's state that has an element for each of the weight's."""
        if is_dtensor(tensor):
            tensor = tensor.to_local()
        if type(tensor) is not Tensor or tensor.dtype not in DTYPES:
            return None
        there = tensor.device == self.weight.device and tensor.shape == self.weight.shape
        return tensor if there and tensor.stride() == self.weight.stride() else None


class Tensors:
    """
    model       gives the model, None once it is gone
    first_names names that have the first rows, in order; asked once
    all_report  ranks of all copies report
    """

    def __init__(
        self, model: Callable[[], Optional[nn.Module]], memories: Memories, placed: Parallel,
        all_report: bool, first_names: Callable[[], list[str]],
    ) -> None:  # fmt: skip
        self._model, self._memories, self._placed = model, memories, placed
        self._all_report, self._first_names = all_report, first_names
        self.names: list[str] = []
        self.left_out: dict[str, str] = {}  # By parameter: why something of it is not measured.
        self.refused = 0  # Parameters without a place among NAMED_ROWS_MAX.
        self.elements = 0  # That are measured.
        self.copied_max = 0  # Elements of the largest turn.
        self._numbers: dict[str, int] = {}
        self._sampled = False
        self._turns_taken = 0
        self._step = 0
        self._sharded = False
        self._parts = _Parts()
        self._rows: Optional[dict[int, _Row]] = None  # In the running step, by id of the parameter.
        self._turn = range(0)
        self._pieces: dict[int, tuple[int, int, Tensor]] = {}  # By row: begin, end, copy.
        self._moments: set[int] = set()
        self._lags: set[int] = set()
        self._done: set[int] = set()  # Rows whose step has begun.
        self._late: set[int] = set()  # Of those: rows whose gradients a closure is yet to make.
        self._clipped: set[int] = set()

    # ---- what has a row ----

    def _leave_out(self, name: str, why: str) -> None:
        if name in self.left_out or len(self.left_out) < LEFT_OUT_MAX:
            self.left_out.setdefault(name, why)

    def _number(self, name: str) -> Optional[int]:
        if not self._numbers:
            self.names = list(self._first_names())
            self._numbers = {known: i for i, known in enumerate(self.names)}
        number = self._numbers.get(name)
        if number is None:
            too_long = len(name.encode()) > c_api.ROW_NAME_MAX
            if too_long or len(self.names) >= c_api.NAMED_ROWS_MAX:
                self.refused += 1
                return None
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def _global_name(self, name: str) -> str:
        name = _WRAPPERS.sub("", name).removeprefix("module.")
        first = self._placed.first_layer if self._placed.pipeline[1] > 1 else 0
        if first:
            name = _BLOCK.sub(lambda m: f"{m[1]}{m[2]}.{int(m[3]) + first}", name, count=1)
        return name

    def _why_not(self, p: Tensor, flat: bool) -> Optional[str]:
        """None: this rank tells it."""
        placed = self._placed
        if is_dtensor(p):
            for dimension, placement in enumerate(p.placements):  # type: ignore[attr-defined]
                mesh = p.device_mesh  # type: ignore[attr-defined]
                if mesh.size(dimension) == 1:
                    continue
                if placement.is_replicate():
                    if mesh.get_local_rank(dimension) != 0:
                        return _COPY
                elif not placement.is_shard():
                    return f"it is placed as {placement}"
                elif not self._all_report and mesh.size(dimension) != placed.tensor[1]:
                    return ELSEWHERE
                self._sharded = True
            return None
        if flat:
            return FLAT
        if self._all_report and placed.shards == 1 and placed.data[1] == 1:
            first = rank_and_world()[0] == 0
        else:
            first = placed.data[0] == 0
        whole = placed.tensor[1] > 1 and not getattr(p, "tensor_model_parallel", False)
        if not first or placed.context[0] > 0 or (whole and placed.tensor[0] > 0):
            return _COPY
        self._sharded = self._sharded or placed.tensor[1] > 1
        return None

    def _find(self) -> dict[int, _Row]:
        found: dict[int, _Row] = {}
        model = self._model()
        flat = model is not None and is_fully_sharded(model)
        self.elements = 0
        for own_name, p in model.named_parameters() if model is not None else ():
            if not p.requires_grad:
                continue
            name = self._global_name(own_name)
            why = self._why_not(p, flat)
            if why is not None:
                if why != _COPY:
                    self._leave_out(name, why)
                continue
            weight: Any = p
            if is_dtensor(p):
                weight = weight.to_local()
            if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in DTYPES:
                self._leave_out(name, f"it is a {type(weight).__name__} of {weight.dtype}")
            elif weight.device.type not in ("cpu", "cuda") or not dense(weight):
                self._leave_out(name, f"it lies in pieces, or on {weight.device}")
            elif (number := self._number(name)) is not None:
                found[id(p)] = _Row(number, p, weight.detach())
                self.elements += weight.numel()
        return found

    # ---- what happens in a step ----

    def begin_step(self, step: int, sampled: bool) -> None:
        self._sampled, self._step = sampled, step
        self._forget()

    def _forget(self) -> None:
        self._parts, self._rows = _Parts(), None
        self._pieces, self._moments, self._lags = {}, set(), set()
        self._done, self._late, self._clipped = set(), set(), set()

    def _here(self) -> dict[int, _Row]:
        if self._rows is None:
            self._rows = self._find()
            self._take_turn()
        return self._rows

    def _take_turn(self) -> None:
        count = len(self.names)
        size = -(-count // TURNS)
        turns = -(-count // size) if size else 0
        if not turns:
            self._turn = range(0)
            return
        if self._sharded:  # The same at all ranks that have parts: it follows from the step.
            taken = ((self._step * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 33) % (turns << 16)
        else:
            taken = self._turns_taken
        self._turns_taken += 1
        begin = taken % turns * size
        self._turn = range(begin, min(begin + size, count))
        self._visit, self._room = taken // turns, max(COPIED_LEAST, self.elements // 100)

    def clips(self, parameters: Iterable[Tensor]) -> None:
        """Their gradients are about to be clipped."""
        if not self._sampled:
            return
        with torch.no_grad():
            here = self._here()
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
            self._measure_before(optimizer, rows, scale, closure)
            self._copy(rows)
            self._done |= {row.number for row in rows}

    def _rows_of(self, optimizer: Optimizer, known: list[Optimizer]) -> list[_Row]:
        """What it holds, and what no optimizer that is known holds; once a step."""
        here = self._here()
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        held = {id(p) for o in known for group in o.param_groups for p in group["params"]}
        rows = [row for key, row in here.items() if key in own or key not in held]
        return [row for row in rows if row.number not in self._done]

    def _measure(
        self, into: list[_Part], rows: list[tuple[_Row, Entry]], scale: Optional[Tensor] = None
    ) -> None:
        devices: dict[torch.device, list[tuple[_Row, Entry]]] = {}
        for row, entry in rows:
            devices.setdefault(row.weight.device, []).append((row, entry))
        for device, of in devices.items():
            here = None if scale is None or scale.device != device else scale
            memory = self._memories.of(device)
            found = statistics(memory, [entry for _, entry in of], device, here)
            into.append(_Part([row.number for row, _ in of], found))

    def _measure_grads(self, rows: list[_Row], scale: Optional[Tensor]) -> None:
        grads = [(row, Entry(grad=grad)) for row in rows if (grad := row.grad()) is not None]
        self._measure(self._parts.grads, grads, scale)

    def _measure_before(
        self, optimizer: Optimizer, rows: list[_Row], scale: Optional[Tensor], closure: bool
    ) -> None:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        found = []
        for row in rows:
            entry = Entry(weight=row.weight)
            group = groups.get(id(row.of))
            if row.number in self._turn and group is not None and not closure:
                self._add_moments(entry, row, group, optimizer.state.get(row.of) or {})
            found.append((row, entry))
        self._measure(self._parts.before, found, scale)

    def _add_moments(
        self, entry: Entry, row: _Row, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        grad = row.grad()
        if grad is None or grad.stride() != row.weight.stride() or not state:
            return
        moment = next((m for n in _MOMENTS if (m := row.beside(state.get(n))) is not None), None)
        second = next((v for n in _SECONDS if (v := row.beside(state.get(n))) is not None), None)
        if moment is not None:
            entry.grad, entry.moment = grad, moment
            self._moments.add(row.number)
        betas, eps = group.get("betas"), number_at_hand(group.get("eps"))
        beta2 = number_at_hand(betas[1]) if isinstance(betas, (tuple, list)) and betas else None
        if second is None or beta2 is None or eps is None or not 0 <= beta2 < 1:
            self._leave_out(self.names[row.number], "no second moment of its own that is known")
            return
        steps = state.get("step")
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
        self._lags.add(row.number)

    def _copy(self, rows: list[_Row]) -> None:
        """The smallest ones whole, as far as there is room."""
        in_turn = [row for row in rows if row.number in self._turn and row.weight.numel() > 0]
        in_turn.sort(key=lambda row: row.weight.numel())
        for left, row in zip(range(len(in_turn), 0, -1), in_turn):
            count, size = row.weight.numel(), max(self._room // left, 1)
            begin = self._visit * size % count if size < count else 0
            end = min(begin + size, count)
            self._pieces[row.number] = begin, end, _flat(row.weight)[begin:end].clone()
            self._room -= end - begin
        copied = sum(end - begin for begin, end, _ in self._pieces.values())
        self.copied_max = max(self.copied_max, copied)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        if not self._sampled or self._rows is None:
            return
        stepped = {part_row for part in self._parts.after for part_row in part.rows}
        rows = [row for row in self._rows.values() if row.number in self._done - stepped]
        with torch.no_grad():
            late = [row for row in rows if row.number in self._late - self._clipped]
            self._measure_grads(late, None)
            self._measure(self._parts.after, [(row, Entry(weight=row.weight)) for row in rows])
            pieces = []
            for row in rows:
                if row.number in self._pieces:
                    begin, end, before = self._pieces.pop(row.number)
                    weight = _flat(row.weight)[begin:end]
                    pieces.append((row, Entry(weight=weight, before=before)))
            self._measure(self._parts.pieces, pieces)

    def sample(self) -> Optional[TensorSample]:
        """What was measured in this step."""
        parts = self._parts
        measured = any(True for _ in parts.all())
        found = TensorSample(parts, len(self.names), self._turn, self._moments, self._lags)
        self._forget()
        return found if measured else None


def _flat(t: Tensor) -> Tensor:
    """Its elements as they lie."""
    return t.as_strided((t.numel(),), (1,))
