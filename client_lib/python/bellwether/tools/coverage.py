"""What samples of a model under watch cover, part by part, and what they leave out: lines of the
report of doctor, each from its part of Monitor.status().
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

from .._native import c_api
from .._step.fp8 import TURNS as FP8_TURNS
from .._step.replicas import ALONE
from .._step.tensors import TURNS
from .._util.counted import counted

_LEFT_OUT_NAMED = 8  # Parameters.
_OPTIONAL = {
    "tensors": "parameters", "modules": "activations", "experts": "experts",
    "fp8": "tensors in 8 bits", "steps": "every step", "rank_norms": "each rank's own gradients",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report; `ok` None = for information."""

    ok: Optional[bool]
    text: str

    def __str__(self) -> str:
        return {True: "ok    ", False: "FAILED", None: "      "}[self.ok] + " " + self.text


def tensor_findings(status: dict[str, Any]) -> list[Finding]:
    """What a sample covers of the parameters, where stats= names tensors."""
    told = status.get("tensors") or {"rows": 0, "refused": 0, "left_out": {}}
    found = []
    if told["rows"]:
        turn = -(-told["rows"] // TURNS)
        found.append(
            Finding(
                None,
                f"{told['rows']} parameters tell their gradient, and whether they moved, in every "
                f"sample; the size of the change, moments, and most spectral norms, {turn} of them "
                "a sample, in turn",
            )
        )
    if told["refused"]:
        most = f"{c_api.NAMED_ROWS_MAX} parameters of {c_api.ROW_NAME_MAX} bytes at most"
        found.append(Finding(False, f"some parameters are not told: {most}"))
    left_out = list(told["left_out"].items())
    for name, reason in left_out[:_LEFT_OUT_NAMED]:
        found.append(Finding(None, f"{name}: not told, or not all of it: {reason}"))
    if len(left_out) > _LEFT_OUT_NAMED:
        more = f"{len(left_out) - _LEFT_OUT_NAMED} or more further parameters"
        found.append(Finding(None, f"{more} are not told, or not all of them"))
    return found


def _left_out(what: str, told: dict[str, Any]) -> list[Finding]:
    """The first of what a part of the status leaves out, by name."""
    names = list(told["left_out"])[:_LEFT_OUT_NAMED]
    return [Finding(None, f"{what} {name}") for name in names]


def fp8_findings(status: dict[str, Any]) -> list[Finding]:
    """What a sample covers of tensors in FP8, where stats= names fp8."""
    told = status.get("fp8") or {"modules": 0, "seen": 0, "not_measured": None, "left_out": {}}
    found = []
    if told["not_measured"]:
        found.append(Finding(None, f"no tensors in FP8 are told: {told['not_measured']}"))
    elif told["modules"]:
        turn = -(-told["modules"] // FP8_TURNS)
        text = f"{told['modules']} modules may multiply in FP8, {turn} of them a sample, in turn"
        found.append(Finding(None, f"{text}; of {told['seen']} it was seen so far"))
    return found + _left_out("FP8,", told)


def module_findings(status: dict[str, Any]) -> list[Finding]:
    """What a sample covers of activations, where stats= names modules."""
    told = status.get("modules") or {"rows": 0, "blocks": 0, "not_measured": None, "left_out": {}}
    found = []
    if told["not_measured"]:
        found.append(Finding(None, f"no activations are told: {told['not_measured']}"))
    elif told["rows"]:
        turns = told.get("turns", 1)
        when = "in every sample" if turns == 1 else f"in turn, each once in {turns} samples"
        text = f"{told['rows']} activations at {told['blocks']} blocks are told {when}"
        found.append(Finding(None, text))
        if told.get("divided_by", 1.0) is None and status["samples"]:
            text = "gradients at blocks are of this rank's own loss: how the ranks' are added up is"
            found.append(Finding(None, f"{text} not known, as it is of DDP and FSDP2"))
    return found + _left_out("activation", told)


def expert_findings(status: dict[str, Any]) -> list[Finding]:
    """What a sample covers of routers, where stats= names experts."""
    told = status.get("experts") or {
        "routers": {}, "experts": 0, "not_measured": None, "left_out": {},
    }  # fmt: skip
    found = []
    if told["not_measured"]:
        found.append(Finding(None, f"no routers are told: {told['not_measured']}"))
    elif told["routers"]:
        text = f"{len(told['routers'])} routers of {told['experts']} experts at most"
        found.append(Finding(None, f"{text} are told in every sample"))
    return found + _left_out("router", told)


def law_findings(status: dict[str, Any]) -> list[Finding]:
    """What a sample covers of the laws of modules other than attention, and of weights at rest."""
    told, rest = status.get("linear"), status.get("rest")
    found = []
    if told is not None and told["not_measured"]:
        found.append(Finding(None, f"no laws of modules are asked: {told['not_measured']}"))
    elif told is not None:
        counts = [
            f"{told[kind]} {words}"
            for kind, words in (
                ("modules", "linear layers"), ("norms", "norms"), ("embeddings", "embeddings"),
                ("gates", "gated MLPs"), ("routers", "routers"),
            )
            if told[kind]
        ]  # fmt: skip
        if counts:
            heads = ", ".join(told["heads"])
            logits = (
                f"; logits are made by {heads}" if heads else "; no layer makes logits of words"
            )
            text = f"laws of {', '.join(counts)} are asked, in turn"
            found.append(Finding(None, text + logits))
    if told is not None:
        found += [Finding(False, f"{name}: {fault}") for name, fault in told["faults"].items()]
        found += _left_out("laws,", told)
        more = len(told["left_out"]) - _LEFT_OUT_NAMED
        if more > 0:
            found.append(Finding(None, f"laws of {more} or more further modules are not asked"))
    if rest is not None:
        if rest["not_measured"]:
            found.append(Finding(None, f"no weights at rest are compared: {rest['not_measured']}"))
        elif rest["elements"]:
            text = f"{rest['elements']} elements of weights at rest are compared, in turn"
            found.append(Finding(None, text))
        found += [Finding(False, f"{name}: {flip}") for name, flip in rest["flips"].items()]
    return found


def replica_findings(status: dict[str, Any]) -> list[Finding]:
    """Which copies of parameters are compared, where there are several ranks."""
    told = status.get("replicas") or {"tensors": 0, "not_compared": ALONE}
    if told["not_compared"] == ALONE:
        return []
    if told["not_compared"]:
        why = told["not_compared"]
        return [Finding(None, f"copies of parameters at other ranks are not compared: {why}")]
    text = f"copies of {told['tensors']} parameters are compared between ranks, in turn"
    return [Finding(None, f"{text}; buffers and copies of tensor parallelism are not")]


def given_findings(status: dict[str, Any]) -> list[Finding]:
    """What is off, and what only the job can give."""
    found = []
    off = [part for part in _OPTIONAL if part not in status.get("stats", _OPTIONAL)]
    if off:
        words = ", ".join(_OPTIONAL[part] for part in off)
        how = "stats= (or BELLWETHER_STATS) that names them beside the other parts switches them on"
        found.append(Finding(None, f"off: {words}; {', '.join(off)}: {how}"))
    losses = status.get("losses")
    if losses is not None:
        if losses["step"] < 0:
            text = "no losses of single sequences: monitor.losses() takes them"
        else:
            text = f"losses of single sequences are told, the newest of step {losses['step']}"
        found.append(Finding(None, text))
    return found


def volume_findings(status: dict[str, Any]) -> list[Finding]:
    """How many bytes a sample has."""
    told = status.get("volume") or {"sample": 0}
    if not told["sample"]:
        return []
    text = f"a sample has {told['sample'] / 1024:.0f} KiB"
    if told["second"]:
        text += f", {told['second'] / 1024:.0f} KiB a second"
    if told["budget"]:
        text += f" of byte_budget's {told['budget'] / 1024:.0f}"
    if told["rarer"]:
        text += f": samples became rarer {told['rarer']} times"
    return [Finding(None, text)]


def step_findings(status: dict[str, Any]) -> list[Finding]:
    """What is read in every step, where stats= names steps."""
    told = status.get("steps") or {"on": False}
    if not told["on"]:
        return []
    found = [
        Finding(None, f"the gradient norm was not told in {counted(times, 'step')}: {reason}")
        for reason, times in told["norm_left_out"].items()
    ]
    if not told["parameters"]:
        reason = "no optimizer was seen to step twice with second moments of the model's parameters"
        found.append(Finding(None, f"the largest lag of second moments is not told: {reason}"))
        return found
    count, elements = told["parameters"], told["elements"]
    text = f"{elements} elements of {count} parameters are read in every step"
    found.append(Finding(None, f"{text}, for the largest lag of second moments"))
    return found


def rank_norm_findings(status: dict[str, Any]) -> list[Finding]:
    """What a sample covers of this rank's own gradients, where stats= names rank_norms."""
    told = status.get("rank_norms")
    if told is None or "rank_norms" not in status["stats"]:
        return []
    what = "the norm of this rank's own gradients is"
    found = []
    if told["not_measured"]:
        found.append(Finding(None, f"{what} not told: {told['not_measured']}"))
    elif told["parameters"]:
        text = f"{what} read of {told['parameters']} parameters, in {told['passes']} passes"
        found.append(Finding(None, text))
        ranks = status["ranks"]
        if ranks["reporting"] < ranks["of"]:
            text = f"{ranks['reporting']} of {ranks['of']} ranks tell it"
            found.append(Finding(None, f'{text}: attach(ranks="all") makes all tell it'))
    for name, why in list(told["left_out"].items())[:_LEFT_OUT_NAMED]:
        found.append(Finding(None, f"{name}: the norm is without it: {why}"))
    return found


def coverage_findings(status: dict[str, Any]) -> list[Finding]:
    """All of them, in the order of the report."""
    found = tensor_findings(status) + module_findings(status) + expert_findings(status)
    found += fp8_findings(status) + step_findings(status) + rank_norm_findings(status)
    if status["live"]:
        found += law_findings(status) + replica_findings(status) + given_findings(status)
    return found + volume_findings(status)
