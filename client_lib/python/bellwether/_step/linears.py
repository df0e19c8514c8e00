"""The laws of linear layers in a running job, a few layers at each sample.

Each sample looks at some of the modules, in turn, so that a sampled step stays cheap and all have
had their turn within TURNS_MAX samples.  _hook/layer/linear_tap.py says what is measured of a call,
_laws/linear.py what must agree.

Left out, and said in Monitor.status(): models with compiled code, fully sharded and tensor parallel
weights, quantised and parametrized weights, modules whose forward is not that of nn.Linear or of
transformers' Conv1D.  The base layer of an adapter (LoRA) is such a module itself.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .._hook.hosts import LinearHost
from .._hook.layer.linear_tap import Held, LinearTap, Measured
from .._hook.model.heads import find_heads
from .._hook.model.parallel import is_dtensor
from .._kernels.probe import DTYPES
from .._laws.balance import SMALL
from .._laws.linear import PAIRS, TENSORS, Difference, Side, alike_share, differences, fault, limit
from .._native import c_api
from .law_rows import LawRow
from .tapped_modules import Arriving, TappedModules

SPLIT = "the weight is a DTensor"
QUANTISED = "the weight is of another type"
PARAMETRIZED = "the weight is made anew at each use"
NOT_THE_SAME = "a checkpointed region does not compute the same a second time"
DIFFERS = "its input was not the same, bit for bit, when its checkpointed region ran again"
RECOMPUTED = "x:recomputed"
OTHER_FORWARD = "its forward is not that of nn.Linear"
OWN_PRODUCTS = "its products are written otherwise"
LENT = "the module that has it takes its weight, and does not call it"


def why_not(module: nn.Module) -> Optional[str]:
    """Why a linear layer is left out; None if it is not, "" if it is none."""
    conv1d = type(module).__name__ == "Conv1D" and type(module).__module__.startswith(
        "transformers."
    )
    if not isinstance(module, nn.Linear) and not conv1d:
        matrices = any(p is not None and p.dim() > 1 for p in module._parameters.values())
        return OWN_PRODUCTS if matrices and _EXPERTS.search(type(module).__name__) else ""
    if not conv1d and type(module).forward is not nn.Linear.forward:
        return OTHER_FORWARD
    if "forward" in vars(module):
        return OTHER_FORWARD
    if isinstance(module, NonDynamicallyQuantizableLinear):  # Of nn.MultiheadAttention.
        return LENT
    weight = vars(module).get("_parameters", {}).get("weight")
    if weight is None:
        return PARAMETRIZED
    if is_dtensor(weight):
        return SPLIT
    if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in DTYPES:
        return QUANTISED
    return None


class Recomputations:
    """What checkpointed regions gave the second time, in a run.

    Some do not compute the same twice by intention: random numbers that are not kept, weights that
    change in the backward.  So a layer counts once it was the same.  A difference is a fault only
    behind SAME_LEAST inputs that were; one that comes before them ends the comparing.  Of regions
    that differ now and then, in one call of ten, one in 800 comes that far.
    """

    SAME_LEAST = 64

    def __init__(self) -> None:
        self.same = 0
        self.ended = False
        self._known: set[str] = set()  # Layers that were the same.

    def judged(self, found: dict[str, bool]) -> dict[str, bool]:
        """By the layer's name: whether its input was the same; those of a step that are judged."""
        judged = {name: same for name, same in found.items() if same or name in self._known}
        differ = not all(judged.values())
        self.ended = self.ended or (differ and self.same < self.SAME_LEAST)
        if self.ended:
            return {}
        self.same += sum(judged.values())
        self._known |= {name for name, same in judged.items() if same}
        return judged


# Modules whose weights are those of many linear layers, or that choose among them.
_EXPERTS = re.compile("Expert|Router|GLU")
_STATS = {name: at for at, name in enumerate(c_api.LAW_PRODUCT_STATS)}


def _reduces_in_16_bits(dtype: torch.dtype) -> bool:
    """Whether cuBLAS may add up the parts of a product in its own type."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    setting = f"allow_{name}_reduced_precision_reduction"
    return name is not None and bool(getattr(torch.backends.cuda.matmul, setting, True))


def sides_of(measured: Measured, sums: list[list[float]], equals: list[Any]) -> dict[str, Side]:
    """The sums of law_products.h as what the laws compare."""
    of = {
        side: {name: row[at] for name, at in _STATS.items()}
        for side, row in zip(measured.sides, sums)
    }
    tokens, width, out = measured.shape
    terms = {"y": width, "x": out, "w": tokens}
    # Where the product's result stands: y dy, x dx, W dW.
    result = {"y": "x", "x": "y", "w": "y"}
    alike = [max((b / a if a else 1.0 for a, b in groups), default=1.0) for groups in equals]
    bias = of.pop("b", None)
    of.pop("c", None)
    found = {}
    lost = 0.0
    if "c" in measured.sides and measured.sums.is_cuda:
        lost = alike_share(out, _reduces_in_16_bits(measured.dtype))
    for side, stats in of.items():
        mine, other = (result[side], "y" if result[side] == "x" else "x")
        total, size, variance = stats["sum"], stats["abs_sum"], stats[f"{mine}_variance"]
        if side == "y" and bias is not None:
            total -= bias["sum"]
            size += bias["abs_sum"]
            variance += bias["x_variance"]  # Where it was added behind a rounding.
        found[side] = Side(
            sum=total, size=size, result_variance=variance,
            operand_variance=stats[f"{other}_variance"], terms=terms[side],
            equals={"y": alike[0], "x": alike[1], "w": 1.0}[side],
            partner_nonfinite=int(stats[f"{other}_nonfinite"]),
            result_nonfinite=int(stats[f"{mine}_nonfinite"]),
            alike=lost if side == "x" else 0.0,
        )  # fmt: skip
    return found


def class_sum_of(measured: Measured, sums: list[list[float]]) -> Optional[tuple[float, float]]:
    """The sum of the logits' gradients over that of their absolute values, and over what rounding
    them gives; both 0 behind a softmax and its cross entropy, in exact arithmetic."""
    if "c" not in measured.sides:
        return None
    row = sums[measured.sides.index("c")]
    total, size, variance = (row[_STATS[name]] for name in ("sum", "abs_sum", "y_variance"))
    return total / size if size else 0.0, Difference(total, variance).z()


class LinearSample:
    """What the layers of one step gave, perhaps still on its way from a GPU."""

    def __init__(
        self,
        names: list[str],
        measured: list[Measured],
        not_judged: Callable[[str, str], None],
        again: Sequence[tuple[int, Tensor]] = (),
        recomputations: Optional[Recomputations] = None,
    ) -> None:
        """again  rows of layers, and whether their input was the same a second time"""
        self._names, self._measured, self._not_judged = names, measured, not_judged
        self._again, self._recomputations = again, recomputations
        self._recomputed: Optional[dict[str, bool]] = None
        sums = [t for m in measured for t in (m.sums, m.equals)]
        self._arriving = Arriving([*sums, *(same for _, same in again)])
        self._laws: dict[int, tuple[dict[str, Side], dict[tuple[str, str], Difference]]] = {}

    def ready(self) -> bool:
        return self._arriving.ready()

    def recomputed(self) -> dict[str, bool]:
        """By the layer's name: whether its input was the same a second time.  Must be ready."""
        if self._recomputed is None:
            told = self._arriving.values()[2 * len(self._measured) :]
            found = {self._names[row]: bool(same) for (row, _), same in zip(self._again, told)}
            judged = found if self._recomputations is None else self._recomputations.judged(found)
            for name in found.keys() - judged.keys():
                self._not_judged(name, NOT_THE_SAME)
            self._recomputed = judged
        return self._recomputed

    def laws(self) -> dict[int, tuple[dict[str, Side], dict[tuple[str, str], Difference]]]:
        """By the module's row: its sides, and what they differ by.  Must be ready."""
        if not self._laws:
            values = self._arriving.values()
            for at, measured in enumerate(self._measured):
                sides = sides_of(measured, values[2 * at], values[2 * at + 1])
                fp32 = measured.dtype == torch.float32
                laws = differences(sides, fp32, math.prod(measured.shape))
                if not laws:
                    self._not_judged(self._names[measured.row], SMALL)
                self._laws[measured.row] = sides, laws
        return self._laws

    def law_rows(self) -> list[LawRow]:
        """A row for each pair of products, as "NAME dx=dW", and for what was recomputed."""
        # Bits that differ where none should: the variance is no rounding's.
        found = [
            LawRow(name, RECOMPUTED, 0.0 if same else 1.0, 1e-12)
            for name, same in self.recomputed().items()
        ]
        for measured, (sides, laws) in zip(self._measured, self.laws().values()):
            given = sum(side.partner_nonfinite for side in sides.values())
            # In fp16 a result that is not finite is the loss scale's affair; without all
            # partners it is not known what the others were given.
            counted = measured.dtype != torch.float16 and len(sides) == len(PAIRS)
            for (a, b), law in laws.items():
                computed = sides[a].result_nonfinite + sides[b].result_nonfinite
                found.append(
                    LawRow(
                        self._names[measured.row], f"{TENSORS[a]}={TENSORS[b]}",
                        law.value, law.variance, 0.0, given, computed if counted else None,
                        math.sqrt(law.alike_variance),
                    )
                )  # fmt: skip
        return found

    def faults(self, sample: int) -> dict[str, str]:
        """What is wrong, in words, by the module's name.  sample  its number in the run."""
        z = limit(sample, len(PAIRS) * len(self._measured))
        found = {name: DIFFERS for name, same in self.recomputed().items() if not same}
        for measured, (sides, laws) in zip(self._measured, self.laws().values()):
            text = fault(sides, laws, z, measured.dtype == torch.float16)
            if text:
                found[self._names[measured.row]] = text
        return found

    def summary(self) -> dict[str, float]:
        """The largest z of each module, for people and other loggers."""
        found = {
            f"{self._names[row]}/linear_z": max(
                (d.z() for d in laws.values()), key=lambda z: abs(z) if z == z else float("inf")
            )
            for row, (_, laws) in self.laws().items()
            if laws
        }
        values = self._arriving.values()
        for at, measured in enumerate(self._measured):
            classes = class_sum_of(measured, values[2 * at])
            if classes is not None:
                name = self._names[measured.row]
                found[f"{name}/class_sum"], found[f"{name}/class_sum_z"] = classes
        return found


class Linears(TappedModules[Measured]):
    def __init__(self, host: LinearHost, model: Callable[[], Optional[nn.Module]]) -> None:
        super().__init__(host, model)
        self._modules: list[weakref.ref[nn.Module]] = []
        self._classes: set[int] = set()  # Rows whose outputs are words.
        self._again: list[tuple[int, Tensor]] = []  # Of this step: a layer, and whether it did.
        self.recomputations = Recomputations()

    def _find(self, model: nn.Module) -> None:
        heads = {id(module) for _, module in find_heads(model)}
        for name, module in model.named_modules():
            why = why_not(module)
            if why is None and len(self.names) < c_api.NAMED_ROWS_MAX:
                self._modules.append(weakref.ref(module))
                if id(module) in heads:
                    self._classes.add(len(self.names))
                self.names.append(name or "the model")
            elif why:
                self.leave_out(name, why)

    def _tap(self, held: Held) -> None:
        self._again = []
        for row, module in self._in_turn(self._modules):
            tap = LinearTap(
                self._host,
                row,
                module,
                held,
                self._measured.append,
                self._left_out_row,
                row in self._classes,
                None if self.recomputations.ended else self._recomputed,
            )
            self._taps.add(module, tap)

    def _recomputed(self, row: int, same: Tensor) -> None:
        self._again.append((row, same))

    def sample(self) -> Optional[LinearSample]:
        """What was measured in this step."""
        measured, again = self._taken(), self._again
        self._again = []
        if not measured and not again:
            return None
        return LinearSample(self.names, measured, self.leave_out, again, self.recomputations)
