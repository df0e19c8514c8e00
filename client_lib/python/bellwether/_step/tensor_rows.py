"""Which parameters this rank tells of, under which names and rows.

Each rank tells its part of a tensor, and the server adds them up.  Of copies one rank tells: the
first that holds it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor, nn

from .._hook.model.parallel import Parallel, is_dtensor, is_fully_sharded
from .._kernels.probe import DTYPES
from .._kernels.tensors import dense
from .._native import c_api
from .._util.ranks import rank_and_world

LEFT_OUT_MAX = 64  # Parameters whose reason is remembered.
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_BLOCK = re.compile(r"(^|\.)(layers|blocks|h)\.(\d+)(?=\.|$)")

ELSEWHERE = 'its parts lie at ranks that do not report: attach(ranks="all")'
MOMENTS_ELSEWHERE = 'its moments lie at a rank that does not report: attach(ranks="all")'
HELD_AS_COPIES = "the optimizer holds copies of the parameters, and its gradients are in them"
SPARSE = "its gradient is sparse"
UNHEARD = "no optimizer of torch.optim is heard to step: the job's is of another kind, or compiled"
FLAT = "the weights are whole in the passes only (FSDP1, ZeRO-3)"
_COPY = ""  # Another rank tells it.
_Form = tuple[Any, ...]  # Of a parameter: what decides whether, and under which name, it is told.


def global_name(name: str, placed: Parallel) -> str:
    """Of a module or parameter in the whole model, without wrappers."""
    name = _WRAPPERS.sub("", name).removeprefix("module.")
    first = placed.first_layer if placed.pipeline[1] > 1 else 0
    if first:
        name = _BLOCK.sub(lambda m: f"{m[1]}{m[2]}.{int(m[3]) + first}", name, count=1)
    return name


@dataclasses.dataclass
class Row:
    """A parameter here: its part of the tensor, dense, without autograd."""

    number: int  # -1: a copy that another rank tells, and nothing of it was told here.
    of: Tensor  # The parameter itself, by which optimizers know it.
    weight: Tensor
    name: str
    position: int  # Among the trained parameters, the same at all ranks that have parts of it.

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


class TensorRows:
    """
    model       gives the model, None once it is gone
    first_names names that have the first rows, in order; asked once
    all_report  ranks of all copies report
    """

    def __init__(
        self, model: Callable[[], Optional[nn.Module]], placed: Parallel, all_report: bool,
        first_names: Callable[[], list[str]],
    ) -> None:  # fmt: skip
        self.model, self._placed = model, placed
        self.all_report, self._first_names = all_report, first_names
        self.names: list[str] = []
        self.left_out: dict[str, str] = {}  # By parameter: why something of it is not measured.
        self.refused = 0  # Parameters without a place among NAMED_ROWS_MAX.
        self.elements = 0  # That are measured.
        self.trained = 0  # Parameters here, with those that other ranks tell.
        self.sharded = False  # Other ranks have parts of the same tensors.
        self.copies: dict[int, Row] = {}  # That another rank tells, by the id of the parameter.
        self._numbers: dict[str, int] = {}
        self._places: dict[str, tuple[_Form, Optional[str], str]] = {}

    def leave_out(self, name: str, why: str) -> None:
        if name in self.left_out or len(self.left_out) < LEFT_OUT_MAX:
            self.left_out.setdefault(name, why)

    def leave_out_all(self, why: str) -> None:
        model = self.model() if not self.left_out else None
        for name, p in model.named_parameters() if model is not None else ():
            if p.requires_grad:
                self.leave_out(global_name(name, self._placed), why)

    def heard(self) -> None:
        """An optimizer is, after all."""
        self.left_out = {name: why for name, why in self.left_out.items() if why != UNHEARD}

    def number_copy(self, row: Row) -> bool:
        """This rank has something to tell of it.  False: there is no row for it."""
        if row.number < 0:
            number = self._number(row.name)
            row.number = -1 if number is None else number
        return row.number >= 0

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
                elif not self.all_report and mesh.size(dimension) != placed.tensor[1]:
                    return ELSEWHERE
                self.sharded = True
            return None
        if flat:
            return FLAT
        if self.all_report and placed.shards == 1 and placed.data[1] == 1:
            first = rank_and_world()[0] == 0
        else:
            first = placed.data[0] == 0
        whole = placed.tensor[1] > 1 and not getattr(p, "tensor_model_parallel", False)
        if not first or placed.context[0] > 0 or (whole and placed.tensor[0] > 0):
            return _COPY
        self.sharded = self.sharded or placed.tensor[1] > 1
        return None

    def _place(
        self, own_name: str, p: Tensor, local: Tensor, flat: bool
    ) -> tuple[Optional[str], str]:
        """Why this rank does not tell it, None: it does; and its name."""
        name = global_name(own_name, self._placed)
        why = self._why_not(p, flat)
        if why not in (None, _COPY):
            return why, name
        if type(local) not in (Tensor, nn.Parameter) or local.dtype not in DTYPES:
            return f"it is a {type(local).__name__} of {local.dtype}", name
        if local.device.type not in ("cpu", "cuda") or not dense(local):
            return f"it lies in pieces, or on {local.device}", name
        return why, name

    def find(self) -> dict[int, Row]:
        """By the id of the parameter."""
        found: dict[int, Row] = {}
        self.copies = {}
        model = self.model()
        flat = model is not None and is_fully_sharded(model)
        self.elements, position = 0, -1
        for own_name, p in model.named_parameters() if model is not None else ():
            if not p.requires_grad:
                continue
            position += 1
            weight: Any = p
            if is_dtensor(p):
                weight = weight.to_local()
            # From sample to sample a parameter is the same, and what is asked of it takes longer.
            placed = (
                getattr(p, "placements", None), getattr(p, "tensor_model_parallel", None), flat
            )  # fmt: skip
            lies = weight.dtype, weight.device, weight.shape, weight.stride()
            form = (type(p), type(weight), *placed, *lies)
            known = self._places.get(own_name)
            if known is None or known[0] != form:
                known = self._places[own_name] = (form, *self._place(own_name, p, weight, flat))
            _, why, name = known
            if why not in (None, _COPY):
                self.leave_out(name, str(why))
            elif why == _COPY:
                self.copies[id(p)] = Row(-1, p, weight.detach(), name, position)
            elif (number := self._number(name)) is not None:
                found[id(p)] = Row(number, p, weight.detach(), name, position)
                self.elements += weight.numel()
        self.trained = position + 1
        return found
