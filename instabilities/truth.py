"""What is known of a run: NAME.json beside NAME.bwrun.  Nothing that judges a run may read it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Optional

from .causes import CAUSES, HEALTHY, family
from .settings import SPLITS

KINDS = ("injected", "slow", "healthy")
FIELD = "field"  # The split of runs that were not made here.
PLACES = ("layer", "head", "tensor", "expert", "rank")
# Field -> what it may be; None where it may be null.
_FIELDS: dict[str, tuple[Any, ...]] = {
    "cause": (str,),
    "family": (str,),
    "variant": (str,),
    "split": (str,),
    "kind": (str,),
    "onset": (int, None),  # The first bad step.
    "until": (int, None),  # The first step that is right again.
    "strength": (float, None),
    "harmless": (bool,),  # Never 5 % above the twin, and at the end within noise or below.
    "layer": (int, None),
    "head": (int, None),
    "tensor": (str, None),
    "expert": (int, None),
    "rank": (int, None),
    "loss_up": (int, None),  # The first step from the onset on with a smoothed loss 5 % too high.
    "steps": (int,),
    "every": (int,),
    "seed": (int,),
    "architecture": (str,),
    "optimizer": (str,),
    "setting": (dict,),
    "stats": (str,),
    "versions": (dict,),
}
# Of a run whose alerts people called false alarms: which, who and why.
_OPTIONAL: dict[str, tuple[Any, ...]] = {"false_alarms": (list,)}

SMOOTHED = 20  # Steps of which a loss is the mean.
UP = 1.05
NOISE = 0.02  # A run whose loss ends above the twin's by less has ended as well.
SIGMA_UP = 3.0  # Of classes, whose loss hardly shows it: sigma(W_Q).


def check(truth: dict[str, Any]) -> None:
    """Raises ValueError that names the field, and what is legal."""
    if not isinstance(truth, dict):
        raise ValueError(f"an object is legal, not {truth!r:.80}")
    for name, kinds in _FIELDS.items():
        if name not in truth:
            raise ValueError(f"{name} is missing")
        _check_type(name, truth[name], kinds)
    for name in _OPTIONAL.keys() & truth.keys():
        _check_type(name, truth[name], _OPTIONAL[name])
    unknown = sorted(truth.keys() - _FIELDS.keys() - _OPTIONAL.keys())
    if unknown:
        raise ValueError(f"{unknown[0]} is no field")
    legal = {"cause": CAUSES, "split": {*SPLITS, FIELD}, "kind": set(KINDS)}
    for name, values in legal.items():
        if truth[name] not in values:
            raise ValueError(f"{name} is {truth[name]!r}, legal are {', '.join(sorted(values))}")
    if family(truth["family"]).cause != truth["cause"]:
        raise ValueError(f"family {truth['family']} has not the cause {truth['cause']!r}")
    if (truth["kind"] == HEALTHY) != (truth["cause"] == HEALTHY):
        raise ValueError(f"kind is {truth['kind']}, but the cause {truth['cause']!r}")
    if (truth["onset"] is None) != (truth["cause"] == HEALTHY):
        raise ValueError(f"onset is {truth['onset']}, but the cause {truth['cause']!r}")
    for name in ("onset", "until", "loss_up"):
        value = truth[name]
        if value is not None and not 0 <= value <= truth["steps"] + 20:
            raise ValueError(f"{name} is {value}, must be within the {truth['steps']} steps")


def _check_type(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    for kind in kinds:
        if kind is None and value is None:
            return
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return
        if kind is not None and type(value) is kind:
            return
    shown = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
    raise ValueError(f"{name} is {value!r:.80}, {shown} is legal")


def read(path: Path) -> dict[str, Any]:
    """Raises ValueError with the file's name, OSError."""
    try:
        found = json.loads(path.read_text())
        check(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return dict(found)


def smoothed(values: list[float]) -> list[float]:
    """The mean of each value and those before it, SMOOTHED at most; infinite after one that is."""
    found, total = [], 0.0
    for at, value in enumerate(values):
        total += value
        if at >= SMOOTHED:
            total -= values[at - SMOOTHED]
        mean = total / min(at + 1, SMOOTHED)
        found.append(mean if math.isfinite(mean) else math.inf)
    return found


def limits(task: str) -> tuple[float, float]:
    """For `up` and `noise`, by the setting's task."""
    return (SIGMA_UP, SIGMA_UP - 1) if task == "classes" else (UP, NOISE)


def loss_up(run: list[float], twin: list[float], onset: int, up: float = UP) -> Optional[int]:
    """Against what it was beside the twin's just before the onset, if that is more: what a fault
    comes with may cost something by itself.  All losses are positive: those of reinforcement
    learning are 1 - reward."""
    pairs = list(zip(smoothed(run), smoothed(twin)))
    usual = max(pairs[onset - 1][0] / pairs[onset - 1][1], 1.0) if onset else 1.0
    high = (step for step, (a, b) in enumerate(pairs) if step >= onset and a > up * usual * b)
    return next(high, None)


def is_harmless(
    run: list[float], twin: list[float], onset: int, up: float = UP, noise: float = NOISE
) -> bool:
    end = max(len(run) // 10, 1)
    a, b = (sum(values[-end:]) / end for values in (run, twin))
    return loss_up(run, twin, onset, up) is None and a - b <= noise * abs(b)
