"""qk.clip: W_Q and W_K of single heads made smaller, their biases and the optimizer's memory too.

gamma > 0   the head's rows of W_Q and of W_K are both multiplied by sqrt(gamma), so its scores
            by gamma.  A key head that heads out of scope share stays as it is: W_Q alone gets
            gamma then.
gamma = 0   the head is brought down to the others.  Every singular value of its W_Q that is above
            the median sigma of the model's other heads becomes that median, and the others stay.
            The same is done for W_K.  What the head has learned in its healthy directions it keeps,
            where one factor for all rows would shrink it with the sick one.

Both are a matrix A applied to the head's output, q -> A q: rows of W -> A W, bias -> A b.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Optional

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .._hook.layer.layer import Layer
from .._hook.model.parallel import is_fully_sharded
from .._util.counted import counted
from .._weights.location import Location
from ..actions import Action, Refused
from . import head_rows
from .applier import Applier, layer_number, layers_in, unknown_place
from .head_rows import Part
from .host import ActionHost

# What optimizers remember of gradients, by the names that torch and its kin use.
#
# First moments are of the gradient at the old weights: the very push that made the head grow.
# The next 1 / (1 - beta1) steps would go on in that direction, at a size (m / sqrt(v) is blind to
# scale) that is now large against the smaller rows.  So they start again at 0.
# Second moments are of its size, and stay.  By the scale alone they would be multiplied by gamma,
# as a gradient through rows sqrt(gamma) as large is; but softmax is no longer saturated then, and
# gradients behind it grow by more than that.  Too large a v errs to short steps, and forgets in
# 1 / (1 - beta2) steps; too small a v makes the first step after the clip the longest of all.
_FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer", "grad_avg", "mu", "m"})


@dataclasses.dataclass(frozen=True)
class _Place:
    module: nn.Module
    location: Location
    query: bool
    head: int  # Of W_Q's heads, or of W_K's, in this process.

    def parts(self) -> list[Part]:
        return list(head_rows.parts(self.module, self.location, self.query, self.head))


class QKClip(Applier):
    def __init__(self, host: ActionHost) -> None:
        super().__init__(host)
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}  # Of the running action.

    # ---- what can be had ----

    def impossible(self, kind: str) -> Optional[str]:
        model = self.host.model()
        if model is not None and is_fully_sharded(model):
            return "sharded weights (FSDP, ZeRO): no process holds a head's rows"
        layers = [layer for layer in self.host.layers if layer.index >= 0]
        reasons = [self._unfit(layer) for layer in layers] or ["no layer calls attention here"]
        return None if None in reasons else reasons[0]

    def _unfit(self, layer: Layer) -> Optional[str]:
        found, place = layer.weights.found(), f"layer {layer_number(self.host, layer)}"
        if found is None:
            return f"{place}: W_Q and W_K were not found"
        module, location = found
        if location.dim != layer.head_dim:
            return f"{place}: W_Q and W_K hold a part of each query and key only"
        if layer.search.normalizes:
            return f"{place} normalizes queries and keys: the size of W_Q and W_K does not count"
        why = head_rows.unchangeable(module, location)
        if why is not None:
            return f"{place}: {why}"
        for query in (True, False):
            for part in head_rows.parts(module, location, query, 0):
                held = self._optimizer_of(part.owner)
                if held is None:
                    return f"{place}: no optimizer of torch.optim holds its weights"
                master = [name for name in held.state.get(part.owner, {}) if "master" in name]
                if master:
                    return f"{place}: {type(held).__name__} keeps weights of its own ({master[0]})"
                quantized = [
                    name
                    for name, state in held.state.get(part.owner, {}).items()
                    if isinstance(state, Tensor) and state.dim() and not state.is_floating_point()
                ]
                if quantized:
                    return f"{place}: {type(held).__name__} keeps quantized {quantized[0]}"
        return None

    def _optimizer_of(self, weight: Tensor) -> Optional[Optimizer]:
        for optimizer in self.host.optimizers():
            for group in optimizer.param_groups:
                if any(p is weight for p in group["params"]):
                    return optimizer
        return None

    def refusal(self, action: Action) -> Optional[str]:
        why = unknown_place(self.host, action)
        if why is not None:
            return why
        model = self.host.model()
        if model is not None and is_fully_sharded(model):
            return self.impossible(action.kind)
        scope = self._scope(action)
        for layer, _ in scope:
            why = self._unfit(layer)
            if why is not None:
                return why
        if action.value == 0 and scope and not self._others(scope):
            return "value = 0: there is no other head to compare with"
        return None

    # ---- which heads ----

    def _scope(self, action: Action) -> list[tuple[Layer, list[int]]]:
        """Layers of this process and their heads here that the action is about."""
        found = []
        for layer in layers_in(self.host, action):
            number, first = layer_number(self.host, layer), self._first_head(layer)
            if number in action.layers or not (action.layers or action.heads):
                heads = list(range(layer.heads))
            else:
                heads = [head - first for where, head in action.heads if where == number]
            heads = [head for head in heads if 0 <= head < layer.heads]
            if heads:
                found.append((layer, heads))
        return found

    def _first_head(self, layer: Layer) -> int:
        return self.host.parallel.tensor[0] * layer.heads

    def _others(self, scope: list[tuple[Layer, list[int]]]) -> list[tuple[Layer, list[int]]]:
        chosen = {id(layer): set(heads) for layer, heads in scope}
        found = []
        for layer in self.host.layers:
            if layer.index >= 0 and layer.weights.found() is not None:
                heads = [h for h in range(layer.heads) if h not in chosen.get(id(layer), set())]
                if heads:
                    found.append((layer, heads))
        return found

    # ---- what is done ----

    def apply(self, action: Action, step: int) -> str:
        scope = self._scope(action)
        if not scope:
            return "no head of this process"
        with torch.no_grad():
            self._norms.clear()
            changes = self._to_median(scope) if action.value == 0 else []
            for layer, heads in scope if action.value else ():
                changes += self._by_gamma(layer, heads, action.value)
            before = [(part, part.of(part.owner).clone()) for part in self._touched(changes)]
            try:
                left = self._change(changes)
            except Exception:
                for part, rows in before:
                    part.of(part.owner).copy_(rows)
                raise
        count = sum(len(heads) for _, heads in scope)
        self.host.tell(step, "annotation", f"qk.clip of {counted(count, 'head')}", action.value)
        self.host.weights_changed()
        return counted(count, "head") + (f"; {left} stayed as it was" if left else "")

    def undo(self, action: Action, step: int) -> None:
        raise AssertionError("qk.clip is not among UNDOABLE: nobody asks")

    @staticmethod
    def _touched(changes: list[tuple[_Place, Tensor]]) -> list[Part]:
        return [part for place, _ in changes for part in place.parts()]

    def _by_gamma(
        self, layer: Layer, heads: list[int], gamma: float
    ) -> list[tuple[_Place, Tensor]]:
        module, location = _found(layer)
        share = location.heads // location.kv_heads
        changes = []
        for key in sorted({head // share for head in heads}):
            sharing = [head for head in heads if head // share == key]
            whole = len(sharing) == share
            size = math.sqrt(gamma) if whole else gamma
            factor = torch.tensor(size, dtype=torch.float32, device="cpu")
            for head in sharing:
                changes.append((_Place(module, location, True, head), factor))
            if whole:
                changes.append((_Place(module, location, False, key), factor))
        return changes

    def _sigma(self, layer: Layer) -> tuple[Tensor, Tensor]:
        found = self._norms.get(id(layer))
        if found is None:
            module, location = _found(layer)
            norms = head_rows.spectral_norms(module, location)
            if norms is None:
                raise Refused("the weights changed their shape")
            found = self._norms[id(layer)] = norms
        return found

    def _to_median(self, scope: list[tuple[Layer, list[int]]]) -> list[tuple[_Place, Tensor]]:
        """The others of this process: what tensor or pipeline parallelism holds elsewhere is not
        asked for."""
        others = self._others(scope)
        targets = []
        for which in (0, 1):
            values = []
            for layer, heads in others:
                sigma = self._sigma(layer)[which]
                share = layer.heads // len(sigma)
                values += [float(sigma[h]) for h in sorted({head // share for head in heads})]
            finite = torch.tensor(
                [x for x in values if math.isfinite(x)], dtype=torch.float32, device="cpu"
            )
            if not len(finite):
                raise Refused("value = 0: there is no other head to compare with")
            targets.append(float(finite.quantile(0.5)))
        changes = []
        for layer, heads in scope:
            module, location = _found(layer)
            share = location.heads // location.kv_heads
            places = [_Place(module, location, True, head) for head in heads]
            for key in sorted({head // share for head in heads}):
                if all(head in heads for head in range(key * share, (key + 1) * share)):
                    places.append(_Place(module, location, False, key))
            for place in places:
                rows = place.parts()[0]
                matrix = _clamp(rows.of(rows.owner), targets[0 if place.query else 1])
                if matrix is not None:
                    changes.append((place, matrix))
        return changes

    def _change(self, changes: list[tuple[_Place, Tensor]]) -> str:
        """Rows -> A rows; the name of a state that is not known, or ""."""
        left = ""
        for place, matrix in changes:
            for part in place.parts():
                rows = part.of(part.owner)
                if matrix.dim() == 0:
                    new = rows.double() * float(matrix)
                else:
                    new = matrix.to(rows.device) @ rows.double()
                if not bool(torch.isfinite(new).all()):
                    raise Refused("the head's weights are not finite")
                rows.copy_(new)
                optimizer = self._optimizer_of(part.owner)
                state = optimizer.state.get(part.owner, {}) if optimizer is not None else {}
                for name, tensor in state.items():
                    if not isinstance(tensor, Tensor) or tensor.shape != part.owner.shape:
                        continue
                    if name in _FIRST_MOMENTS:
                        part.of(tensor).zero_()
                    elif not _second_moment(name):
                        left = name
        return left


def _found(layer: Layer) -> tuple[nn.Module, Location]:
    found = layer.weights.found()
    assert found is not None  # Of a layer of the scope.
    return found


def _second_moment(name: str) -> bool:
    return any(word in name for word in ("sq", "sum", "acc", "norm", "hessian", "prev", "step"))


def _clamp(rows: Tensor, sigma_max: float) -> Optional[Tensor]:
    """A with A @ rows = rows with singular values of at most sigma_max; None if they are."""
    wide = rows.double()
    if not bool(torch.isfinite(wide).all()):
        raise Refused("the head's weights are not finite")
    squares, basis = torch.linalg.eigh(wide @ wide.mT)
    sigma = squares.clamp(min=0).sqrt()
    if not bool((sigma > sigma_max).any()):
        return None
    shrink = torch.where(sigma > sigma_max, sigma_max / sigma, torch.ones_like(sigma))
    matrix: Tensor = (basis * shrink) @ basis.mT
    return matrix
