"""What people and other programs read of a model under watch: Monitor.status()."""

from __future__ import annotations

from typing import Optional, TypedDict

from .._hook.capturing import CaptureStatus
from .._hook.layer.layer import Layer
from .._native.run_client import Counters
from .balances import EMBEDDING, GATE, NORM, ROUTER
from .own_log import reporting_ranks
from .replicas import NO_SIGMA
from .sequence_losses import LossesStatus
from .steps import Steps


class LayerStatus(TypedDict):
    """One attention module."""

    name: str  # In its model.
    index: int  # In the run; -1 where it is not reported.
    watched: bool  # `layers=` names it.
    attention: bool  # False: it is called like one, and has no softmax.
    calls: int  # Of scaled_dot_product_attention, with gradients on.
    fired: int  # Backward passes that were seen.
    heads: int
    kv_heads: int
    head_dim: int
    weights: Optional[str]  # How W_Q and W_K were found.
    notes: dict[str, int]  # Why something was not measured, and how often.
    without_laws: dict[str, int]  # Why the laws of a call were not asked about, and how often.
    not_judged_by: list[str]  # Families of rules that have no numbers of it.
    known_faults: list[str]  # Ids of known_kernels.json that its calls fit: hints.
    lends: bool  # It is no attention: its projections are those of one beside it.
    unused: str  # How the job does not train it: its forward never ran; "" = it does.


class AnswerStatus(TypedDict):
    """What was answered to an action."""

    applied: bool
    step: int
    reason: str


class ActionsStatus(TypedDict):
    """The actions that the server may ask for, and those it has asked for, by their ids."""

    allowed: list[str]
    possible: dict[str, Optional[str]]  # By kind: None, or why it cannot be carried out here.
    ranks_agree: bool
    waiting: list[str]
    in_force: list[str]
    answers: dict[str, AnswerStatus]


class LawRowsStatus(TypedDict):
    """The rows that laws outside attention, activations and tensors in 8 bits are sent in."""

    rows: int
    refused: int  # The times one had no place, or too long a name.
    not_sent: int  # The times one came while the frame was full, or its name waited.


class VolumeStatus(TypedDict):
    """Bytes of frames, by what is handed to the sender."""

    sample: int  # The newest one.
    second: float  # From the sample before it to it; 0 while that is not known.
    budget: int  # A second; 0 = none.
    rarer: int  # How often samples became rarer, since they had more.


class LinearStatus(TypedDict):
    """The laws of linear layers."""

    modules: int  # That have their turn.
    norms: int  # That have their turn, too.
    embeddings: int  # Likewise, as all below.
    gates: int
    routers: int
    recomputed: int  # Inputs that were the same in a checkpoint's recomputation.
    heads: list[str]  # Layers that make logits of words, whose loss has laws, too.
    not_measured: Optional[str]  # Why none has.
    left_out: dict[str, int]  # "module: why", how often.
    faults: dict[str, str]  # By module: what was wrong when it first was.


class RestStatus(TypedDict):
    """Whether weights change between an optimizer's step and the next forward."""

    elements: int  # That have their turn.
    compared: int  # Elements, over all samples.
    not_measured: Optional[str]  # Why none is, or is any more.
    flips: dict[str, str]  # By parameter: the first of each.


class TensorsStatus(TypedDict):
    """Statistics of each parameter, its gradient, its moments and its change."""

    rows: int  # Parameters that this rank names.
    elements: int  # Of those that it measures.
    copied: int  # At once, at most: elements from before a step.
    refused: int  # The times a parameter had no row.
    left_out: dict[str, str]  # By parameter: why it, or something of it, is not measured.


class ReplicasStatus(TypedDict):
    """Copies of parameters that ranks hold, and that the server compares."""

    tensors: int  # That have their turn.
    not_compared: Optional[str]  # Why none has.


class StepsStatus(TypedDict):
    """What is read in every step, for the lag of second moments."""

    on: bool  # Whether stats= names steps.
    parameters: int
    elements: int  # Of them in one step, at most.
    norm_left_out: dict[str, int]  # Why the norm that torch clips is not told, in how many steps.


class RankNormsStatus(TypedDict):
    """The norm of this rank's own gradients."""

    parameters: int  # Whose gradients are read.
    passes: int  # Backward passes of the newest sample.
    not_measured: Optional[str]  # Why there is no norm.
    left_out: dict[str, str]  # By parameter: why the norm is without it.


class ModulesStatus(TypedDict):
    """Activations at the boundaries of transformer blocks."""

    blocks: int
    rows: int  # Activations that are named.
    turns: int  # Samples until each of them had its turn.
    # By what the ranks' gradients are divided when they are added up, and so those told; None: that
    # is not known, and they are of the rank's own loss.
    divided_by: Optional[float]
    not_measured: Optional[str]  # Why none is.
    left_out: dict[str, int]  # "activation: why", how often.


class ExpertsStatus(TypedDict):
    """Routers and their experts."""

    routers: dict[str, int]  # By their names: the layer of the run that each is told as.
    experts: int  # Of a layer, at most.
    not_measured: Optional[str]  # Why none is.
    left_out: dict[str, int]  # "router: why", how often.


class Fp8Status(TypedDict):
    """Tensors in 8 bits."""

    modules: int  # That may have products in 8 bits, and have their turn.
    seen: int  # Those among them of which something was measured.
    not_measured: Optional[str]  # Why none is.
    left_out: dict[str, int]  # "module: why", how often.


class RanksStatus(TypedDict):
    """Those that tell the job's own numbers and the losses of its sequences."""

    reporting: int
    of: int  # Ranks; what others log is left out.


class _AlwaysThere(TypedDict):
    live: bool
    why_off: str  # "" while it watches.
    run: str
    errors: int  # Of Bellwether itself.
    last_error: str
    layers: list[LayerStatus]
    samples: int  # That were taken.
    numbers_left_out: dict[str, int]  # What the trainer gave and could not be read, how often.


class Status(_AlwaysThere, total=False):
    """What Monitor.status() returns.  After an error only the first part may be there."""

    step: int
    stats: list[str]  # The parts that are measured.
    server: Optional[str]
    record: Optional[str]  # The .bwrun file.
    page_url: str
    sampling_period: int  # Steps.
    overhead: float  # Share of the training time.
    link: Optional[str]  # None without a server or a file.
    counters: Counters  # Of the link, where there is one.
    linear: LinearStatus
    law_rows: LawRowsStatus
    volume: VolumeStatus
    rest: RestStatus
    tensors: TensorsStatus
    replicas: ReplicasStatus
    modules: ModulesStatus
    steps: StepsStatus
    experts: ExpertsStatus
    fp8: Fp8Status
    rank_norms: RankNormsStatus
    losses: LossesStatus
    ranks: RanksStatus
    capture: Optional[CaptureStatus]  # None without capture_dir.
    actions: Optional[ActionsStatus]  # None before attach() and after detach().


def _layer_status(layer: Layer, not_judged_by: list[str]) -> LayerStatus:
    return {
        "name": layer.name,
        "index": layer.index,
        "watched": layer.watched,
        "attention": layer.is_attention(),
        "calls": layer.calls,
        "fired": layer.fired,
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "weights": layer.weights.in_words(),
        "notes": dict(layer.notes),
        "without_laws": dict(layer.laws.lacks),
        "not_judged_by": not_judged_by,
        "known_faults": list(layer.seen.known.found),
        "lends": layer.search.lends,
        "unused": layer.unused(),
    }


def least_status(steps: Steps) -> Status:
    """What can be said whatever has failed."""
    return {
        "live": steps.health.live,
        "why_off": steps.health.why_off,
        "run": steps.settings.run,
        "errors": steps.health.errors,
        "last_error": steps.health.last_error or steps.reporter.link.why_not,
        "layers": [],
        "samples": 0,
        "numbers_left_out": {},
    }


def status(steps: Steps, actions: Optional[ActionsStatus]) -> Status:
    reporter, found = steps.reporter, least_status(steps)
    unmeasured = reporter.unmeasured()
    found["layers"] = [
        _layer_status(layer, reporter.not_judged_by(layer, unmeasured)) for layer in steps.layers
    ]
    found["samples"] = reporter.samples
    found["numbers_left_out"] = dict(reporter.frames.left_out)
    found["linear"] = {
        "modules": len(reporter.linears.names),
        "heads": reporter.balances.names[: reporter.balances.heads],
        "norms": reporter.balances.kinds.count(NORM),
        "routers": reporter.balances.kinds.count(ROUTER),
        "gates": reporter.balances.kinds.count(GATE),
        "embeddings": reporter.balances.kinds.count(EMBEDDING),
        "recomputed": reporter.linears.recomputations.same,
        "not_measured": reporter.linears.not_measured,
        "left_out": {
            f"{name}: {why}": n
            for left_out in (reporter.linears.left_out, reporter.balances.left_out)
            for (name, why), n in left_out.items()
        },
        "faults": dict(reporter.frames.faults),
    }
    rows = reporter.frames.law_rows
    found["law_rows"] = {
        "rows": len(rows.names), "refused": rows.refused, "not_sent": rows.not_sent,
    }  # fmt: skip
    volume = reporter.cost.volume
    found["volume"] = {
        "sample": volume.of_sample, "second": sum(volume.rate or (0.0,)),
        "budget": steps.settings.byte_budget, "rarer": volume.rarer,
    }  # fmt: skip
    rest = reporter.rest
    found["rest"] = {
        "elements": rest.elements, "compared": rest.compared,
        "not_measured": rest.not_measured, "flips": dict(rest.flips),
    }  # fmt: skip
    copied, tensors = reporter.tensors.copied_max, reporter.tensors.rows
    found["tensors"] = {
        "rows": len(tensors.names), "elements": tensors.elements, "copied": copied,
        "refused": tensors.refused, "left_out": dict(tensors.left_out),
    }  # fmt: skip
    copies = steps.weights.copies
    lacks = NO_SIGMA if copies.names and not steps.measures("sigma") else None
    found["replicas"] = {"tensors": len(copies.names), "not_compared": lacks or copies.why_not}
    parts = reporter.every.lags.parts()
    elements = sum(read for _, read in parts)
    found["steps"] = {
        "on": reporter.every.on, "parameters": len(parts), "elements": elements,
        "norm_left_out": dict(reporter.every.clipped.left_out),
    }  # fmt: skip
    activations = reporter.activations
    found["modules"] = {
        "blocks": activations.blocks, "rows": len(activations.names),
        "turns": activations.turns, "not_measured": activations.not_measured,
        "divided_by": activations.divided_by,
        "left_out": {f"{name}: {why}": n for (name, why), n in activations.left_out.items()},
    }  # fmt: skip
    experts = reporter.experts
    found["experts"] = {
        "routers": dict(experts.layers), "experts": experts.most,
        "not_measured": experts.not_measured,
        "left_out": {f"{name}: {why}": n for (name, why), n in experts.left_out.items()},
    }  # fmt: skip
    fp8 = reporter.fp8
    found["fp8"] = {
        "modules": len(fp8.names), "seen": len(fp8.rows), "not_measured": fp8.not_measured,
        "left_out": {f"{name}: {why}": n for (name, why), n in fp8.left_out.items()},
    }  # fmt: skip
    norms = reporter.rank_norms
    found["rank_norms"] = {
        "parameters": norms.parameters, "passes": norms.passes,
        "not_measured": norms.not_measured, "left_out": dict(norms.left_out),
    }  # fmt: skip
    found["losses"] = reporter.frames.losses.status
    reporting, ranks = reporting_ranks(steps)
    found["ranks"] = {"reporting": reporting, "of": ranks}
    found["step"] = steps.current_step()
    found["stats"] = sorted(steps.settings.stats)
    found["server"] = reporter.link.server
    found["record"] = reporter.link.record_path
    found["page_url"] = reporter.link.page_url
    found["sampling_period"] = reporter.governor.period
    found["overhead"] = reporter.overhead()
    found["capture"] = steps.capture.status() if steps.capture is not None else None
    found["actions"] = actions
    found["link"] = None
    if reporter.link.client is not None:
        counters = reporter.link.client.counters()
        found["link"], found["counters"] = counters.link, counters
        found["page_url"] = counters.page_url or reporter.link.page_url
    return found
