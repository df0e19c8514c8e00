"""The laws outside attention whose sums are zero, in a running job: lm_head and its loss, norms,
embeddings, gated MLPs, routers.

_hook/layer/head_tap.py, norm_laws.py and the files *_law.py beside them say what is measured,
_laws/balance.py what must hold.  In each sample all heads are asked: there are few, and the sums of
one take less than its products by far.  On GPUs, where samples are to cost next to nothing, a head
has its turn in one of HEADS_EVERY_ON_GPUS.  The others take turns, as linear layers do.

Left out, and said in Monitor.status(): what linears.py leaves out, sparse gradients, weights with
hooks of their own, and what _laws/balance.py takes for another loss.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Optional, Union

import torch
from torch import nn

from .._hook.hosts import LinearHost
from .._hook.layer import lookup_law
from .._hook.layer.edge_tap import EdgeTap, VectorsMeasured
from .._hook.layer.gate_law import GateTap, gate_children, gate_laws
from .._hook.layer.head_tap import HeadTap, Lookups, RowsMeasured
from .._hook.layer.linear_tap import Held
from .._hook.layer.lookup_law import LookupTap
from .._hook.layer.norm_laws import is_norm, norm_laws
from .._hook.layer.router_law import RouterTap, is_router
from .._hook.model.heads import find_heads
from .._laws.balance import (
    AGAINST,
    FORM,
    OTHER,
    OTHER_FORM,
    OTHER_LOSS,
    SMALL,
    UNDERFLOW,
    Z_LOSS,
    Balance,
    loss_weights,
    of_classes,
    of_rows,
    of_vector,
    tolerance,
    unlike_a_softmax,
)  # fmt: skip
from .._laws.linear import limit
from .._native import c_api
from .law_rows import LawRow
from .linears import why_not
from .tapped_modules import Arriving, TappedModules

HEADS_MAX = 8
HEADS_EVERY_ON_GPUS = 16  # A head is asked in one of so many samples there, with all its logits.
NORM, EMBEDDING, GATE, ROUTER = "norms", "embeddings", "gates", "routers"
SOFTCAP = "its model caps the logits, or has a z-loss, and its loss is not seen"
DZ, DW = "dz:classes", "dW:classes"
CAPPED = "its model caps the logits, or has a z-loss: their gradients are not judged"
WORDS = {
    DZ: "the gradients of the logits do not add up to 0 over the classes",
    DW: "the rows of dW do not add up to 0, as behind a softmax and its cross entropy",
    "dx:scale": "dx is wrong: it is not the gradient of what does not change with the scale of x",
    "dx:mean": "dx is wrong: its rows do not add up to 0",
    **dict.fromkeys(lookup_law.LAWS, "dW is wrong: it is not that of the tokens, row by row"),
    "dlogits:experts": "dlogits is wrong: a router's rows do not add up to 0 over the experts",
    "y=du": "y or du is wrong: of a gate, u times the one is not dy times the other",
    "y=dg": "y or the gain's gradient is wrong: the one times dy is not the gain times the other",
}
NONFINITE = "numbers of what it computed are not finite, and what it was given is"
SEEN = "the rows of dW do not add up to those of x by the gradients of the logits"


class ModuleLaws:
    """What one module gave."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused
        self.laws: dict[str, Balance] = {}  # By their names, as LawRow has them.
        self.not_judged: dict[str, str] = {}  # By the law: why.
        # Elements that are not finite in what it was given, and in what it computed of finite ones.
        self.given_nonfinite: Optional[int] = None
        self.made_nonfinite: Optional[int] = None

    def nonfinite(self) -> int:
        """Those that it alone has made."""
        return 0 if self.given_nonfinite else self.made_nonfinite or 0


class BalanceSample:
    """What the heads of one step gave, perhaps still on its way from a GPU."""

    def __init__(
        self, names: list[str], measured: list[Union[RowsMeasured, VectorsMeasured]],
        not_judged: Callable[[str, str], None], forms: Optional[dict[int, int]] = None,
    ) -> None:  # fmt: skip
        """forms  by the row: which form of a law the module has, once it is known"""
        self._names, self._measured, self._not_judged = names, measured, not_judged
        self._forms = {} if forms is None else forms
        self._arriving = Arriving([t for m in measured for t in m.tensors()])
        self._found: Optional[dict[str, ModuleLaws]] = None

    def ready(self) -> bool:
        return self._arriving.ready()

    def laws(self) -> dict[str, ModuleLaws]:
        """By the module's name.  Must be ready."""
        if self._found is None:
            tensors = iter(self._arriving.tensors())
            self._found = {}
            for m in self._measured:
                given = [next(tensors) for _ in m.tensors()]
                if isinstance(m, RowsMeasured):
                    found = _laws_of(m, given)
                else:
                    found = _of_vectors(m, given, self._forms)
                self._found[self._names[m.row]] = found
                for why in found.not_judged.values():
                    self._not_judged(self._names[m.row], why)
        return self._found

    def faults(self, sample: int) -> dict[str, str]:
        """What is wrong, in words, by the module's name.  sample  its number in the run."""
        found: dict[str, str] = {}
        laws = self.laws()
        z = limit(sample, sum(len(head.laws) for head in laws.values()))
        for name, head in laws.items():
            if head.nonfinite():
                found[name] = f"{head.nonfinite()} {NONFINITE}"
            for kind, law in head.laws.items():
                if law.z() > z and kind not in head.not_judged:
                    text = SEEN if kind == DW and not head.fused else WORDS[kind]
                    times = max(law.times(), law.largest)
                    share = f", {law.share:.2g} of the absolute values" if law.share else ""
                    found.setdefault(name, f"{text}: {times:.3g} times what rounding gives{share}")
        return found

    def law_rows(self) -> list[LawRow]:
        """A law's z is of several sums in units of their roundings, so its variance is 1."""
        return [
            LawRow(
                name,
                kind,
                max(law.z(), 0.0) if law.z() == law.z() else law.z(),
                1.0,
                in_nonfinite=head.given_nonfinite,
                out_nonfinite=head.made_nonfinite,
            )
            for name, head in self.laws().items()
            for kind, law in head.laws.items()
            if kind not in head.not_judged
        ]

    def summary(self) -> dict[str, float]:
        """How many times what rounding gives, for people and other loggers."""
        return {
            f"{name}/{kind.replace(':', '_').replace('=', '_')}": law.times()
            for name, head in self.laws().items()
            for kind, law in head.laws.items()
        }


def _laws_of(measured: RowsMeasured, given: list[Any]) -> ModuleLaws:
    sums, some, equals = given[:3]
    found = ModuleLaws(measured.fused)
    alike = max((b / a if a else 1.0 for a, b in equals.tolist()), default=1.0)
    law = found.laws[DW] = of_rows(sums[0], sums[2], sums[1], some, alike)
    if bool((sums[1] < UNDERFLOW).all()):
        found.not_judged[DW] = SMALL
    elif measured.fused:
        if law.share > OTHER_LOSS:
            found.not_judged[DW] = OTHER
        elif law.along > AGAINST and law.z() > 0:
            found.not_judged[DW] = Z_LOSS
    if measured.classes is not None:
        classes = given[3]
        weights = loss_weights(classes[1], classes[4])
        law = found.laws[DZ] = of_classes(
            classes[0], classes[3], classes[1], classes[2], weights, classes[5]
        )
        if law.z() > 0 and measured.logits is not None:
            at = (
                torch.arange(len(given[4]), dtype=torch.int64, device="cpu")
                * classes.shape[1]
                // len(given[4])
            )
            over = tolerance(classes[3], weights, classes[2])
            largest = float((classes[0].abs() - over).max())
            why = unlike_a_softmax(
                classes[0][at], over[at], given[4], given[5], largest, measured.bits is not None
            )
            if why is None and law.share > OTHER_LOSS:  # Small p of sigmoids are as a softmax's.
                why = OTHER
            if why is not None:
                found.not_judged[DZ] = why
    return found


def _of_vectors(measured: VectorsMeasured, given: list[Any], forms: dict[int, int]) -> ModuleLaws:
    found, form = ModuleLaws(False), 0
    if measured.unlike is not None:
        unlike = given.pop(0)
        form = int(unlike.argmin())
        if not float(unlike[form]) <= FORM[measured.in_16_bits]:
            found.not_judged["y"] = OTHER_FORM
            forms.pop(measured.row, None)
            return found
        if len(measured.laws) > 1:
            forms[measured.row] = form
    if measured.counts is not None:
        found.given_nonfinite, made = (int(n) for n in given.pop(0))
        found.made_nonfinite = None if measured.overflows else made
    numbers = iter(given)
    for at, laws in enumerate(measured.laws):
        for law in laws:
            vectors = next(numbers)
            if at == form:
                found.laws[law.law] = of_vector(*vectors)
    return found


def _caps(model: nn.Module) -> bool:
    """Whether a model says that its loss is more than a softmax of what lm_head gives."""
    config = getattr(model, "config", None)
    names = [n for n in vars(config) if "z_loss" in n and "router" not in n] if config else []
    names.append("final_logit_softcapping")
    return any(bool(getattr(config, name, None)) for name in names)


def _kind(module: nn.Module) -> Optional[str]:
    """What of the laws is asked of it, in turn."""
    if is_norm(module):
        return NORM
    if gate_children(module) is not None:
        return GATE
    if is_router(module):
        return ROUTER
    return EMBEDDING if isinstance(module, nn.Embedding) else None


class Balances(TappedModules[Union[RowsMeasured, VectorsMeasured]]):
    def __init__(self, host: LinearHost, model: Callable[[], Optional[nn.Module]]) -> None:
        super().__init__(host, model)
        self.heads = 0  # The first so many of the rows; behind them are the others.
        self._heads: list[weakref.ref[nn.Module]] = []
        self._others: list[weakref.ref[nn.Module]] = []
        self.kinds: list[str] = []  # Of the others.
        self._words: list[weakref.ref[nn.Embedding]] = []
        self._capped = False
        self._samples = 0
        self._forms: dict[int, int] = {}  # Of norms, by their rows, once they are known.

    def _find(self, model: nn.Module) -> None:
        words = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        self._words = [weakref.ref(m) for m in words]
        self._capped = _caps(model)
        for name, module in find_heads(model):
            if len(self._heads) >= HEADS_MAX:
                break
            why = why_not(module)
            if why is None:
                self._heads.append(weakref.ref(module))
                self.names.append(name or "the model")
            elif why:
                self.leave_out(name, why)
        self.heads = len(self._heads)
        for name, module in model.named_modules():
            kind = _kind(module)
            if kind is not None and len(self.names) < c_api.NAMED_ROWS_MAX:
                self._others.append(weakref.ref(module))
                self.kinds.append(kind)
                self.names.append(name or "the model")

    def _tap(self, held: Held) -> None:
        heads = [head() for head in self._heads]
        if not all(head is None or self._measures_on(head) for head in heads):
            return
        self._tap_others(held)
        self._samples += 1
        asked = [
            (row, head)
            for row, head in enumerate(heads)
            if head is not None and self._asks(row, head)
        ]
        if not asked:
            return
        lookups: list[tuple[nn.Embedding, Lookups]] = []
        weights = {id(head.weight) for _, head in asked}
        for of in self._words:
            embedding = of()
            if embedding is not None:
                tied_too = id(embedding.weight) in weights
                lookups.append((embedding, Lookups(self._host, tied_too)))
                self._taps.add(embedding, lookups[-1][1])
        for row, head in asked:
            tied = [tap for embedding, tap in lookups if embedding.weight is head.weight]
            tap = HeadTap(
                self._host, row, head, held, [tap for _, tap in lookups], tied,
                self._finished, self._left_out_row,
            )  # fmt: skip
            self._taps.add(head, tap)

    def _asks(self, row: int, head: nn.Module) -> bool:
        return self._on_cpu(head) or (self._samples + row) % HEADS_EVERY_ON_GPUS == 1

    @staticmethod
    def _on_cpu(module: nn.Module) -> bool:
        return all(p.device.type == "cpu" for p in module.parameters())

    def _tap_others(self, held: Held) -> None:
        for at, module in self._in_turn(self._others):
            row = self.heads + at
            given = self._host, row, module, held
            then = self._measured.append, self._left_out_row
            if self.kinds[at] == EMBEDDING:
                self._taps.add(module, LookupTap(self._host, row, *then))
            elif self.kinds[at] == ROUTER:
                self._taps.add(module, RouterTap(self._host, row, *then))
            elif self.kinds[at] == GATE:
                GateTap(*given, gate_laws, *then).listen(self._taps, module)
            else:
                measure = functools.partial(norm_laws, form=self._forms.get(row))
                self._taps.add(module, EdgeTap(*given, measure, *then))

    def _finished(self, measured: RowsMeasured) -> None:
        if measured.fused and self._capped:
            self.leave_out(self.names[measured.row], SOFTCAP)
            return
        if self._capped:
            self.leave_out(self.names[measured.row], CAPPED)
            measured.classes = measured.logits = None
        self._measured.append(measured)

    def sample(self) -> Optional[BalanceSample]:
        """What was measured in this step."""
        measured = self._taken()
        if not measured:
            return None
        return BalanceSample(self.names, measured, self.leave_out, self._forms)
