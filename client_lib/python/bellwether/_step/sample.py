"""What was measured in one step, while it is perhaps still on its way from a GPU."""

from __future__ import annotations

import array
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional, Protocol

from .._hook.layer.judged import FAMILIES
from .._hook.model.parallel import Parallel
from .._kernels.memory import Copy, Memory
from .._kernels.probe import Spectrum, Sums
from .._native import c_api
from .._native.run_client import Block
from ..settings import STATS
from .at_rest import FlipSample
from .balances import BalanceSample
from .expert_sample import ExpertSample
from .grad_scale import POWERS
from .grams import GramBatch
from .law_rows import LawRow, NamedLaws
from .linears import LinearSample
from .replicas import ReplicaSample

if TYPE_CHECKING:
    from .activation_sample import ActivationSample
    from .fp8_sample import Fp8Sample
    from .rank_norms import RankNormSample
    from .tensor_sample import TensorSample

_DELTA = STATS["delta"]
_PER_KEY_HEAD = frozenset(
    {"sequences", "key_coherence_sum", "key_leak_sum", "key_gradient_sum", *c_api.LAW_KV_STATS,
     *c_api.SHADOW_KV_STATS, *c_api.FACTOR_KV_STATS}
)  # fmt: skip
_ROWS = ("rows", "nonfinite_rows")


class MeasuredLayer(Protocol):
    """What a sample asks of a layer."""

    index: int
    heads: int
    kv_heads: int

    @property
    def sums(self) -> Optional[Sums]: ...

    @property
    def wq(self) -> Optional[Spectrum]: ...

    @property
    def wk(self) -> Optional[Spectrum]: ...


class _Matrix:
    """[layers][heads] of one signal, filled with what means "not measured"."""

    def __init__(self, signal: str, layers: int, heads: int) -> None:
        fill = c_api.NOT_MEASURED
        if signal.endswith("_sum") or signal.endswith("_rows"):
            fill = 0.0
        if signal in ("rows", "sequences", *_DELTA) or signal.startswith("tied_"):
            fill = 0.0
        self.signal, self.layers, self.heads = signal, layers, heads
        self.values = array.array("f", [fill]) * (layers * heads)

    def put(self, layer: int, row: array.array[float]) -> None:
        self.values[layer * self.heads : layer * self.heads + len(row)] = row


@dataclasses.dataclass(frozen=True)
class _LayerSample:
    """What one layer had when the step ended; the numbers are in the copies."""

    index: int
    heads: int
    kv_heads: int
    sums: Optional[Sums]
    probed: bool
    with_delta: bool
    leaked: bool
    wq: Optional[Spectrum]  # None: not measured in this step.
    wk: Optional[Spectrum]
    turned: bool  # The direction of W_Q could be compared to an earlier one.
    increments: Optional[array.array[float]]
    laws: tuple[str, ...]  # Signals of STATS["laws"] that all calls have.
    copies: dict[Memory, Copy]

    def sum(self, signal: str) -> array.array[float]:
        assert self.sums is not None
        return self.sums.row(self.copies[self.sums.memory], signal)

    def spectrum(self, of: Spectrum, output: str) -> array.array[float]:
        return of.row(self.copies[of.memory], output)


def _laws_in(sums: Sums) -> tuple[str, ...]:
    calls = sums.lawful["sums"]
    if not calls:
        return ()
    whole = {f"law_{law}" for law, count in sums.lawful.items() if law != "sums" and count == calls}
    whole |= {"law_rows"} if whole else set()
    whole |= {f"shadow_{tensor}" for tensor, count in sums.shadowed.items() if count == calls}
    return tuple(
        signal
        for signal in STATS["laws"]
        if not signal.startswith(("law_", "shadow_")) or "_".join(signal.split("_")[:2]) in whole
    )


def _layer_sample(
    layer: MeasuredLayer, increments: dict[int, Any], copies: dict[Memory, Copy]
) -> _LayerSample:
    sums, wq, wk = layer.sums, layer.wq, layer.wk
    replayed = sums is not None and sums.memory.open
    measured = wq is not None and wk is not None and wq.measured and wk.measured
    return _LayerSample(
        index=layer.index,
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        sums=sums,
        probed=sums is not None and (sums.probed > 0 or (replayed and sums.graph_probes)),
        with_delta=sums is not None
        and (sums.with_delta > 0 or (replayed and sums.graph_has_delta)),
        leaked=sums is not None and (sums.leaked > 0 or (replayed and sums.graph_leaks)),
        wq=wq if measured else None,
        wk=wk if measured else None,
        turned=wq is not None and wq.samples > 1,
        increments=increments.get(id(layer)),
        laws=() if sums is None else _laws_in(sums),
        copies=copies,
    )


class Sample:
    """One sampled step of all reporting layers."""

    def __init__(
        self,
        layers: Sequence[MeasuredLayer],
        stats: frozenset[str],
        increments: dict[int, Any],
        copies: dict[Memory, Copy],
        placed: Optional[Parallel] = None,
        grams: Optional[GramBatch] = None,
        replicas: Optional[ReplicaSample] = None,
        linears: Optional[LinearSample] = None,
        balances: Optional[BalanceSample] = None,
        flips: Optional[FlipSample] = None,
        tensors: Optional[TensorSample] = None,
        named: int = 0,
        activations: Optional[ActivationSample] = None,
        experts: Optional[ExpertSample] = None,
        fp8: Optional[Fp8Sample] = None,
        rank_norms: Optional[RankNormSample] = None,
    ) -> None:
        """named  rows of tensors whose names the server has"""
        self._tensors, self._named, self._experts = tensors, named, experts
        self.grams, self.replicas = grams, replicas
        self.linears, self.balances = linears, balances
        self.activations, self.fp8 = activations, fp8
        self.rank_norms = rank_norms
        named_laws: tuple[Optional[NamedLaws], ...] = (linears, balances, flips)
        self._named_laws = [laws for laws in named_laws if laws is not None]
        self._placed = placed or Parallel()
        self._layers = [_layer_sample(layer, increments, copies) for layer in layers]
        self._stats = stats
        self._copies = copies

    def ready(self) -> bool:
        parts = (
            self.grams,
            self.replicas,
            self._tensors,
            self.activations,
            self.fp8,
            self.rank_norms,
            self._experts,
            *self._named_laws,
            *self._copies.values(),
        )
        return all(part.ready() for part in parts if part is not None)

    def device_seconds(self) -> Optional[float]:
        """What the kernels took on GPUs, or None if that was not measured.  Must be ready."""
        timed = [copy.seconds() for copy in self._copies.values()]
        return None if None in timed else sum(t for t in timed if t is not None)

    def families(self) -> dict[int, set[str]]:
        """By layer, the rules whose signals are in it (judged.FAMILIES)."""
        found: dict[int, set[str]] = {}
        for layer in self._layers:
            parts = {"drift", "ties"} if layer.probed else set()
            if layer.leaked:
                parts.add("leak")
            if layer.wq is not None:
                parts.add("sigma")
            found[layer.index] = {family for family, part in FAMILIES.items() if part in parts}
        return found

    def blocks(self, grad_scale: float = 1.0, gradients: bool = True) -> list[Block]:
        """One block for each signal that any layer measured, over all layers here.  Must be
        ready.

        grad_scale  what the loss was multiplied by; gradients are told without it
        gradients   whether what comes from gradients is told
        """
        layers = self._layers
        others = self.replicas.blocks() if self.replicas is not None else []
        others += self._experts.blocks() if self._experts is not None else []
        if not layers:
            return others
        heads = max(layer.heads for layer in layers)
        same = len({(layer.heads, layer.kv_heads) for layer in layers}) == 1
        kv_heads = layers[0].kv_heads if same else heads
        matrices: dict[str, _Matrix] = {}

        def put(
            signal: str, layer: _LayerSample, row: array.array[float], per_key: bool = False
        ) -> None:
            power = POWERS.get(signal)
            if power is not None and not gradients:
                return
            matrix = matrices.get(signal)
            if matrix is None:
                matrix = _Matrix(signal, len(layers), kv_heads if per_key else heads)
                matrices[signal] = matrix
            if power is not None and grad_scale != 1 and math.isfinite(1 / grad_scale):
                row = array.array("f", [value / grad_scale**power for value in row])
            matrix.put(layer.index, row)

        parts = [part for part in ("drift", "ties", "delta") if part in self._stats]
        chosen = [signal for part in parts for signal in STATS[part]]
        for layer in layers:
            if layer.probed:
                for signal in (*_ROWS, *chosen):
                    if layer.with_delta or signal not in _DELTA:
                        put(signal, layer, layer.sum(signal), signal in _PER_KEY_HEAD)
            if layer.leaked and "leak" in self._stats:
                for signal in STATS["leak"]:
                    put(signal, layer, layer.sum(signal), per_key=True)
            for signal in layer.laws if "laws" in self._stats else ():
                put(signal, layer, layer.sum(signal), signal in _PER_KEY_HEAD)
            if layer.wq is not None and layer.wk is not None:
                put("wq_sigma", layer, layer.spectrum(layer.wq, "sigma"))
                put("wq_sigma_residual", layer, layer.spectrum(layer.wq, "residual"))
                put("wq_stable_rank", layer, layer.spectrum(layer.wq, "stable_rank"))
                if layer.turned:
                    put("wq_direction_overlap", layer, layer.spectrum(layer.wq, "overlap"))
                put("wk_sigma", layer, layer.spectrum(layer.wk, "sigma"), per_key=True)
                put("wk_sigma_residual", layer, layer.spectrum(layer.wk, "residual"), per_key=True)
            if layer.increments is not None:
                put("qk_increment_rank", layer, layer.increments)
        begin, part = self._placed.first_layer, self._placed.tensor[0]
        return [
            Block(m.signal, m.values, begin, m.layers, part * m.heads, m.heads)
            for m in matrices.values()
        ] + others

    def tensor_blocks(self) -> list[Block]:
        """Of parameters.  Must be ready."""
        return self._tensors.blocks(self._named) if self._tensors is not None else []

    def law_rows(self) -> list[LawRow]:
        """What the laws but for attention's gave.  Must be ready."""
        return [row for laws in self._named_laws for row in laws.law_rows()]

    def summary(self, gradients: bool = True) -> dict[str, float]:
        """One number for each layer and signal, for people and other loggers.  Must be ready."""
        found: dict[str, float] = {}
        for laws in self._named_laws if gradients else ():
            found.update(laws.summary())
        if self._experts is not None:
            found.update(self._experts.summary())
        for layer in self._layers:
            prefix = f"layer{layer.index}/"
            if layer.probed:
                pairs = zip(layer.sum("common_mode_sum"), layer.sum("spread_sum"))
                found[prefix + "drift_ratio_max"] = max(
                    (c / s if s else math.nan for c, s in pairs), default=math.nan
                )
                pairs = zip(layer.sum("tied_rows_bf16"), layer.sum("rows"))
                found[prefix + "tied_fraction_bf16_max"] = max(
                    (t / r if r else 0.0 for t, r in pairs), default=0.0
                )
                found[prefix + "logit_max"] = max(layer.sum("logit_max"))
            if layer.leaked and gradients:
                pairs = zip(layer.sum("key_leak_sum"), layer.sum("key_gradient_sum"))
                found[prefix + "key_leak_max"] = max(a / b if b else 0.0 for a, b in pairs)
            if layer.wq is not None and layer.wk is not None:
                found[prefix + "wq_sigma_max"] = max(layer.spectrum(layer.wq, "sigma"))
                found[prefix + "wk_sigma_max"] = max(layer.spectrum(layer.wk, "sigma"))
        return found
