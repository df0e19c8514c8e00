"""Thresholds of detectors and of alerts, from the files that have them, so that a board has no number of its own."""

from __future__ import annotations

import re
from pathlib import Path

BUILT_IN = Path(__file__).resolve().parents[2] / "deploy/rules/builtin.yml"
ALERTS = Path(__file__).resolve().parents[1] / "alerts/rules.yml"


def built_in(path: Path = BUILT_IN) -> dict[str, float]:
    """Section.name -> value; the file is generated, one threshold a line."""
    found: dict[str, float] = {}
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if begun := re.fullmatch(r"  (\w+):", line):
            section = begun[1]
        elif said := re.match(r"    (\w+): ([0-9.e+-]+)\b", line):
            found[f"{section}.{said[1]}"] = float(said[2])
    return found


def _expression(name: str, path: Path) -> str:
    found = re.search(rf"- alert: {name}\n    expr: (.*)\n", path.read_text(encoding="utf-8"))
    if not found:
        raise ValueError(f"{path} has no alert {name} on one line")
    return found[1]


def of_alert(name: str, path: Path = ALERTS) -> float:
    """The number that an alert of Prometheus' rules compares with."""
    found = re.search(r" [<>] ([0-9.e+-]+)(?= |$)", _expression(name, path))
    if not found:
        raise ValueError(f"{path}: {name} compares with no number")
    return float(found[1])


def quantile_of_alert(name: str, path: Path = ALERTS) -> float:
    """The quantile of a histogram that an alert looks at."""
    found = re.search(r"histogram_quantile\(([0-9.]+),", _expression(name, path))
    if not found:
        raise ValueError(f"{path}: {name} looks at no quantile")
    return float(found[1])
