"""Monitors that are scored: each module here, in which `alarms(run)` returns what it says of a run.

    def alarms(run: Run) -> list[Alarm]: ...

It may read the run's series and its recording.  The truth is not given to it.
"""

from __future__ import annotations

import csv
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

SEVERITIES = ("info", "warning", "critical")


@dataclass(frozen=True)
class Alarm:
    step: int
    severity: str = "warning"
    cause: str = "unknown"  # One of causes.py.
    layer: Optional[int] = None
    heads: tuple[int, ...] = ()  # Of that layer, the most suspect first.
    tensors: tuple[str, ...] = ()
    expert: Optional[int] = None
    rank: Optional[int] = None
    # Steps until the loss is 5 % higher, or a head is lost: expected, and an 80 % interval.
    eta: Optional[tuple[float, float, float]] = None
    key: str = ""  # Alarms of one key are one illness; "": an illness of its own.
    text: str = ""  # For people.
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    recording: Path

    @property
    def series(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of each step."""
        with self.recording.with_suffix(".csv").open() as opened:
            return [
                (int(row["step"]), float(row["loss"]), float(row["grad_norm"]))
                for row in csv.DictReader(opened)
            ]


Monitor = Callable[[Run], list[Alarm]]


def all_monitors() -> dict[str, Monitor]:
    """Name -> function; the module's NAME, or its name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            loaded = importlib.import_module(f"{__name__}.{module.name}")
            found[getattr(loaded, "NAME", module.name)] = loaded.alarms
    # Ours first, then by name.
    return dict(sorted(found.items(), key=lambda item: (item[0] != "bellwether", item[0])))
