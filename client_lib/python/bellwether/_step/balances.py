"""The laws outside attention whose sums are zero, in a running job: those of lm_head and its loss.

_hook/layer/head_tap.py says what is measured, _laws/balance.py what must hold.  In each sample all
heads are asked: there are few, and the sums of one take less than its products by far.

Left out, and said in Monitor.status(): what linears.py leaves out, sparse gradients, weights with
hooks of their own, and what _laws/balance.py takes for another loss.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import nn

from .._hook.hosts import LinearHost
from .._hook.layer.head_tap import HeadTap, Lookups, RowsMeasured
from .._hook.layer.linear_tap import Held, Taps
from .._hook.model.parallel import is_fully_sharded
from .._laws.balance import (
    AGAINST,
    OTHER,
    OTHER_LOSS,
    Z_LOSS,
    Balance,
    of_classes,
    of_rows,
    tolerance,
    unlike_a_softmax,
)  # fmt: skip
from .._laws.linear import limit
from . import linears
from .law_rows import LawRow
from .linears import COMPILED, GPU, HELD_BYTES_MAX, LEFT_OUT_MAX, SHARDED, Arriving, why_not

HEADS_MAX = 8
SOFTCAP = "its model caps the logits, or has a z-loss, and its loss is not seen"
WORDS = {
    "dz": "the gradients of the logits do not add up to 0 over the classes",
    "dW": "the rows of dW do not add up to 0, as behind a softmax and its cross entropy",
}
SEEN = "the rows of dW do not add up to those of x by the gradients of the logits"


class HeadLaws:
    """What one head gave."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused
        self.laws: dict[str, Balance] = {}  # By the tensor that is wrong where it breaks.
        self.not_judged: dict[str, str] = {}  # By the law: why.


class BalanceSample:
    """What the heads of one step gave, perhaps still on its way from a GPU."""

    def __init__(
        self, names: list[str], measured: list[RowsMeasured], not_judged: Callable[[str, str], None]
    ) -> None:
        self._names, self._measured, self._not_judged = names, measured, not_judged
        self._arriving = Arriving([t for m in measured for t in m.tensors()])
        self._found: Optional[dict[str, HeadLaws]] = None

    def ready(self) -> bool:
        return self._arriving.ready()

    def laws(self) -> dict[str, HeadLaws]:
        """By the module's name.  Must be ready."""
        if self._found is None:
            tensors = iter(self._arriving.tensors())
            self._found = {}
            for m in self._measured:
                given = [next(tensors) for _ in m.tensors()]
                found = self._found[self._names[m.row]] = _laws_of(m, given)
                for why in found.not_judged.values():
                    self._not_judged(self._names[m.row], why)
        return self._found

    def faults(self, sample: int) -> dict[str, str]:
        """What is wrong, in words, by the module's name.  sample  its number in the run."""
        found: dict[str, str] = {}
        laws = self.laws()
        z = limit(sample, sum(len(head.laws) for head in laws.values()))
        for name, head in laws.items():
            for tensor, law in head.laws.items():
                if law.z() > z and tensor not in head.not_judged:
                    text = SEEN if tensor == "dW" and not head.fused else WORDS[tensor]
                    found.setdefault(
                        name,
                        f"{text}: {law.times():.3g} times what rounding gives, "
                        f"{law.share:.2g} of the absolute values",
                    )
        return found

    def law_rows(self) -> list[LawRow]:
        """Each law's norm is of several sums in units of their roundings, so its variance is 1."""
        return [
            LawRow(name, f"{tensor}:classes", law.norm, 1.0, law.alike())
            for name, head in self.laws().items()
            for tensor, law in head.laws.items()
            if tensor not in head.not_judged
        ]

    def summary(self) -> dict[str, float]:
        """How many times what rounding gives, for people and other loggers."""
        return {
            f"{name}/{tensor}_classes": law.times()
            for name, head in self.laws().items()
            for tensor, law in head.laws.items()
        }


def _laws_of(measured: RowsMeasured, given: list[Any]) -> HeadLaws:
    sums, some, equals = given[:3]
    found = HeadLaws(measured.fused)
    alike = max((b / a if a else 1.0 for a, b in equals.tolist()), default=1.0)
    law = found.laws["dW"] = of_rows(sums[0], sums[2], sums[1], some, alike)
    if measured.fused:
        if law.share > OTHER_LOSS:
            found.not_judged["dW"] = OTHER
        elif law.along > AGAINST and law.z() > 0:
            found.not_judged["dW"] = Z_LOSS
    if measured.classes is not None:
        classes = given[3]
        law = found.laws["dz"] = of_classes(classes[0], classes[3], classes[1], classes[2])
        if law.z() > 0 and measured.logits is not None:
            at = (
                torch.arange(len(given[4]), dtype=torch.int64, device="cpu")
                * classes.shape[1]
                // len(given[4])
            )
            over = tolerance(classes[3], classes[1], classes[2])
            largest = float((classes[0].abs() - over).max())
            why = unlike_a_softmax(classes[0][at], over[at], given[4], given[5], largest)
            if why is None and law.share > OTHER_LOSS:  # Small p of sigmoids are as a softmax's.
                why = OTHER
            if why is not None:
                found.not_judged["dz"] = why
    return found


def _caps(model: nn.Module) -> bool:
    """Whether a model says that its loss is more than a softmax of what lm_head gives."""
    config = getattr(model, "config", None)
    names = [n for n in vars(config) if "z_loss" in n and "router" not in n] if config else []
    names.append("final_logit_softcapping")
    return any(bool(getattr(config, name, None)) for name in names)


class Balances:
    """
    host   of the taps
    model  gives the model, None once it is gone
    """

    def __init__(self, host: LinearHost, model: Callable[[], Optional[nn.Module]]) -> None:
        self._host, self._model = host, model
        self.names: list[str] = []
        self.left_out: Counter[tuple[str, str]] = Counter()  # Name of the module, why.
        self.not_measured: Optional[str] = None  # Why none is.
        self._heads: Optional[list[weakref.ref[nn.Module]]] = None
        self._words: list[weakref.ref[nn.Embedding]] = []
        self._capped = False
        self._watching = False
        self._taps = Taps(host)
        self._measured: list[RowsMeasured] = []

    def watch(self) -> None:
        """From the next sampled step on."""
        self._watching = True

    def leave_out(self, name: str, why: str) -> None:
        if (name, why) in self.left_out or len(self.left_out) < LEFT_OUT_MAX:
            self.left_out[name, why] += 1

    def _find(self, model: nn.Module) -> None:
        self._heads = []
        if is_fully_sharded(model):
            self.not_measured = SHARDED
            return
        words = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        self._words = [weakref.ref(m) for m in words]
        self._capped = _caps(model)
        sizes = {m.num_embeddings for m in words}
        output = getattr(model, "get_output_embeddings", lambda: None)()
        for name, module in model.named_modules():
            rows = getattr(module, "out_features", None)
            if (rows not in sizes and module is not output) or len(self._heads) >= HEADS_MAX:
                continue
            why = why_not(module)
            if why is None:
                self._heads.append(weakref.ref(module))
                self.names.append(name or "the model")
            elif why:
                self.leave_out(name, why)

    def begin_step(self, sampled: bool) -> None:
        """What was measured before is forgotten; in a sampled step the heads get their taps."""
        self.stop()
        self._measured = []
        model = self._model() if sampled and self._watching else None
        if model is None or torch.compiler.is_compiling():
            return
        if self._heads is None:
            self._find(model)
        if self.not_measured not in (None, GPU) or not self._heads:
            return
        if linears.compiles(model):
            self.not_measured = COMPILED
            return
        heads = [head() for head in self._heads]
        if not all(head is None or self._measures_on(head) for head in heads):
            return
        held = Held(HELD_BYTES_MAX)
        lookups: list[tuple[nn.Embedding, Lookups]] = []
        weights = {id(head.weight) for head in heads if head is not None}
        for of in self._words:
            embedding = of()
            if embedding is not None:
                tied_too = id(embedding.weight) in weights
                lookups.append((embedding, Lookups(self._host, tied_too)))
                self._taps.add(embedding, lookups[-1][1])
        for row, head in enumerate(heads):
            if head is not None:
                tied = [tap for embedding, tap in lookups if embedding.weight is head.weight]
                tap = HeadTap(
                    self._host, row, head, held, [tap for _, tap in lookups], tied,
                    self._finished, self._left_out_row,
                )  # fmt: skip
                self._taps.add(head, tap)

    def _finished(self, measured: RowsMeasured) -> None:
        if measured.fused and self._capped:
            self.leave_out(self.names[measured.row], SOFTCAP)
        else:
            self._measured.append(measured)

    def _left_out_row(self, row: int, why: str) -> None:
        self.leave_out(self.names[row], why)

    def _measures_on(self, module: nn.Module) -> bool:
        device = next(module.parameters()).device
        if device.type != "cpu" and not linears.ON_GPUS:
            self.not_measured = GPU
            return False
        return self._host.cannot_measure_on(device.type) is None

    def compiled(self) -> None:
        """torch.compile is asked for something: nothing is measured any more."""
        if self._watching:
            self.not_measured = COMPILED
            self.stop()

    def stop(self) -> None:
        """No module is looked at any more."""
        self._taps.close()

    def sample(self) -> Optional[BalanceSample]:
        """What was measured in this step."""
        measured, self._measured = self._measured, []
        return BalanceSample(self.names, measured, self.leave_out) if measured else None
