"""What monitors say of the runs of a folder, held against the truth.

    detected   an alarm by the second sample that covers the place, from the first bad step on
    at all     an alarm at any step from there on
    cause      that alarm says the family's cause; "unknown" is wrong
    place      it names the layer (and the head among its first three), the tensor or the expert
    in time    of slow faults whose loss goes up (5 % above the twin's): an alarm before that
    lead       steps from the alarm to that, the median of those in time
    time left  of slow faults: what the first alarm that tells it expected, held against that
    steps      from the first bad step to the alarm, the median of those that came

Shares are of all faults that count: what is not detected has no cause right.  One that does no harm
(truth.py) counts in families that are wrong whatever the loss does (causes.py), else it stands
apart.  Alarms before the first bad step are false ones, as all of a healthy run.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from . import truth as truths
from .causes import FAMILIES, UNKNOWN
from .monitors import SEVERITIES, Alarm, Monitor, Run

HEADS_NAMED = 3
LABELS = "labels.json"


@dataclass(frozen=True)
class Verdict:
    """Of one monitor on one run."""

    run: str
    family: str
    split: str
    kind: str
    counts: bool  # It does harm, or is a fault whatever the loss does.
    steps: int  # That were healthy, for the rate of false alarms.
    warnings: int  # False ones, of the severity that counts.
    criticals: int  # False ones.
    alarm: Optional[Alarm] = None  # What is held against the truth.
    detected: bool = False
    after: Optional[int] = None  # Steps from the first bad one.
    cause: bool = False
    place: Optional[bool] = None  # None: the fault has no place.
    loss_up: Optional[int] = None  # None: it is not slow, or the loss never went up.
    lead: Optional[int] = None  # From the alarm to there; below 1: too late.  None: no alarm.
    # Expected steps to there over the real ones, and whether these are in the interval.  None: not
    # told, or the run ended before it can be said.
    eta_ratio: Optional[float] = None
    eta_covers: Optional[bool] = None


def deadline(truth: dict[str, Any]) -> int:
    """The step of the second sample, from the first bad step on, that covers the place."""
    every = int(truth["every"])
    in_turn = FAMILIES[truth["family"]].in_turn
    samples = 2 * in_turn * int(truth["setting"]["layers"]) if in_turn else 2
    return -(-int(truth["onset"]) // every) * every + (samples - 1) * every


def is_right_place(alarm: Alarm, truth: dict[str, Any]) -> Optional[bool]:
    """None where the truth has no place."""
    if all(truth[name] is None for name in truths.PLACES):
        return None
    if truth["expert"] is not None:
        return alarm.expert == truth["expert"] and alarm.layer in (None, truth["layer"])
    if truth["tensor"] is not None and truth["tensor"] in alarm.tensors:
        return True
    if truth["layer"] is None or alarm.layer != truth["layer"]:
        return False
    named = alarm.heads[:HEADS_NAMED]
    return truth["head"] is None or not named or truth["head"] in named


def _time_left(told: list[Alarm], truth: dict[str, Any]) -> dict[str, Any]:
    """eta_ratio and eta_covers of a verdict, by the first alarm that tells the time left."""
    first = next((alarm for alarm in told if alarm.eta is not None), None)
    if truth["kind"] != "slow" or first is None or first.eta is None:
        return {}
    expected, low, high = first.eta
    if truth["loss_up"] is None:  # It was to be later than the run's end, or the interval is wrong.
        return {"eta_covers": False} if first.step + high < truth["steps"] else {}
    real = truth["loss_up"] - first.step
    if real <= 0:
        return {}
    return {"eta_ratio": expected / real, "eta_covers": low <= real <= high}


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity)


def _episodes(alarms: Iterable[Alarm]) -> list[Alarm]:
    """Each illness once, and again where it becomes more severe."""
    worst: dict[str, int] = {}
    found = []
    for number, alarm in enumerate(alarms):
        key = alarm.key or f"alarm {number}"
        if _rank(alarm.severity) > worst.get(key, -1):
            worst[key] = _rank(alarm.severity)
            found.append(alarm)
    return found


def judged(
    run: str, truth: dict[str, Any], alarms: list[Alarm], severity: str = "warning"
) -> Verdict:
    """`alarms` may be in any order, and of any severity."""
    ordered = sorted(alarms, key=lambda alarm: alarm.step)
    counted = [a for a in _episodes(ordered) if _rank(a.severity) >= _rank(severity)]
    onset = truth["onset"]
    false = [a for a in counted if onset is None or a.step < onset]
    common = Verdict(
        run=run, family=truth["family"], split=truth["split"], kind=truth["kind"],
        counts=not truth["harmless"] or FAMILIES[truth["family"]].always,
        steps=truth["steps"] if onset is None else onset,
        loss_up=truth["loss_up"] if truth["kind"] == "slow" else None,
        warnings=len({a.key or id(a) for a in false}),
        criticals=sum(a.severity == "critical" for a in false),
        place=False if any(truth[name] is not None for name in truths.PLACES) else None,
    )  # fmt: skip
    told = [a for a in counted if onset is not None and a.step >= onset]
    if onset is None or not told:
        return common
    until = max(deadline(truth), told[0].step)
    # A person looks at the most severe first, and at one that says something.
    # An illness is judged by all that was said of it until then.
    keys = {a.key for a in told if a.step <= until and a.key}
    said = [a for a in ordered if onset <= a.step <= until and (a in told or a.key in keys)]
    alarm = max(said, key=lambda a: (_rank(a.severity), a.cause != UNKNOWN, -a.step))
    return dataclasses.replace(
        common, alarm=alarm, detected=told[0].step <= deadline(truth), after=told[0].step - onset,
        cause=alarm.cause == truth["cause"], place=is_right_place(alarm, truth),
        lead=None if common.loss_up is None else common.loss_up - told[0].step,
        **_time_left(told, truth),
    )  # fmt: skip


# ---- a folder ----


def runs_of(folder: Path) -> list[tuple[Run, dict[str, Any]]]:
    """Raises ValueError for a truth that is none, or a run without a recording; OSError."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if path.name == LABELS:
            continue  # Of recordings without truths: bars.py.
        known = truths.read(path)
        recording = path.with_suffix(".bwrun")
        if not recording.exists():
            raise ValueError(f"{path}: {recording.name} is missing")
        found.append((Run(recording), known))
    if not found and not (folder / LABELS).exists():
        raise ValueError(f"{folder}: no runs (NAME.json and NAME.bwrun)")
    return found


def verdicts_of(
    runs: list[tuple[Run, dict[str, Any]]], monitor: Monitor, severity: str,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Verdict]:  # fmt: skip
    found = []
    for number, (run, known) in enumerate(runs):
        found.append(judged(run.recording.stem, known, monitor(run), severity))
        progress(number + 1)
    return found


def _share(values: list[bool]) -> Optional[float]:
    return 100 * sum(values) / len(values) if values else None


def _median(values: list[int]) -> Optional[float]:
    return statistics.median(values) if values else None


def _time_left_of(verdicts: list[Verdict]) -> dict[str, Any]:
    covers = [v.eta_covers for v in verdicts if v.eta_covers is not None]
    ratios = [v.eta_ratio for v in verdicts if v.eta_ratio is not None]
    return {
        "told": len(covers), "in_interval": _share(covers),
        "ratio": statistics.median(ratios) if ratios else None,
    }  # fmt: skip


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    """Of runs with a fault."""
    harm = [v for v in verdicts if v.counts]
    slow = [v for v in harm if v.loss_up is not None]
    leads = [v.lead for v in slow if v.lead is not None and v.lead > 0]
    return {
        "runs": len(verdicts), "counted": len(harm),
        "harmless_alarmed": sum(v.alarm is not None for v in verdicts if not v.counts),
        "detected": _share([v.detected for v in harm]),
        "at_all": _share([v.alarm is not None for v in harm]),
        "cause": _share([v.cause for v in harm]),
        "place": _share([bool(v.place) for v in harm if v.place is not None]),
        "in_time": _share([v.lead is not None and v.lead > 0 for v in slow]),
        "lead": _median(leads),
        "steps": _median([v.after for v in harm if v.after is not None]),
        "time_left": _time_left_of(verdicts),
    }  # fmt: skip


def false_alarms(verdicts: list[Verdict]) -> dict[str, Any]:
    """Of healthy runs, and of the others before their fault."""
    steps = sum(v.steps for v in verdicts)
    warnings, criticals = sum(v.warnings for v in verdicts), sum(v.criticals for v in verdicts)
    return {
        "runs": len(verdicts), "steps": steps, "warnings": warnings, "criticals": criticals,
        "warnings_per_1000": 1000 * warnings / steps if steps else None,
    }  # fmt: skip


def scored(verdicts: list[Verdict]) -> dict[str, Any]:
    """By split: each family, all faults together, and false alarms."""
    found = {}
    for split in sorted({v.split for v in verdicts}):
        of = [v for v in verdicts if v.split == split]
        faults = [v for v in of if v.kind != "healthy"]
        named = [name for name in FAMILIES if any(v.family == name for v in faults)]
        healthy = [v for v in of if v.kind == "healthy"]
        found[split] = {
            "families": {name: summary([v for v in faults if v.family == name]) for name in named},
            "all": summary(faults),
            "healthy": false_alarms(healthy),
            "healthy_and_before": false_alarms(of),
        }
    return found


# ---- text ----

_COLUMNS = (
    ("detected", "detected %"), ("at_all", "at all %"), ("cause", "cause %"), ("place", "place %"),
    ("in_time", "in time %"), ("lead", "lead"), ("steps", "steps"),
)  # fmt: skip


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)


def _row(name: str, of: dict[str, Any]) -> str:
    harmless = of["runs"] - of["counted"]
    cells = [name, str(of["counted"]), f"{of['harmless_alarmed']} of {harmless}"]
    return "| " + " | ".join(cells + [_cell(of[key]) for key, _ in _COLUMNS]) + " |"


def family_table(of: dict[str, Any]) -> str:
    titles = ["family", "runs that count", "harmless told", *(title for _, title in _COLUMNS)]
    lines = ["| " + " | ".join(titles) + " |", "| " + " | ".join("---" for _ in titles) + " |"]
    lines += [_row(name, values) for name, values in of["families"].items()]
    return "\n".join([*lines, _row("all", of["all"])])


def leaderboard(split: str, scores: dict[str, dict[str, Any]]) -> str:
    titles = ["monitor", *(title for _, title in _COLUMNS)]
    titles += ["false warnings per 1,000 steps", "false criticals", "harmless told"]
    lines = ["| " + " | ".join(titles) + " |", "| " + " | ".join("---" for _ in titles) + " |"]
    for name, of in scores.items():
        faults, quiet = of[split]["all"], of[split]["healthy_and_before"]
        cells = [name, *(_cell(faults[key]) for key, _ in _COLUMNS)]
        rate = quiet["warnings_per_1000"]
        cells += ["-" if rate is None else f"{rate:.2f}", str(quiet["criticals"])]
        cells.append(f"{faults['harmless_alarmed']} of {faults['runs'] - faults['counted']}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
