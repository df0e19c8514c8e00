"""What a monitor is held to, and whether it gets there.

Of faults with a truth it is judged here, by what score.py says of them.  Of labelled recordings and of
made-up runs `bellwether scorecard` judges its own detectors, and says so in its JSON.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

from .score import Verdict, false_alarms, summary

TIMEOUT = 3600  # Seconds.  Made-up runs take minutes.

DETECTED, CAUSE, PLACE, IN_TIME = 95.0, 90.0, 90.0, 90.0  # Per cent.
WARNINGS_PER_1000 = 0.1


@dataclass(frozen=True)
class Bar:
    bar: str
    figure: Optional[float]  # None: no such runs, so it is not judged.
    limit: float
    at_least: bool = True  # Else at most.
    goal: Optional[float] = None  # Beyond the limit; what is aimed at.

    @property
    def met(self) -> Optional[bool]:
        if self.figure is None:
            return None
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def row(self) -> str:
        state = {True: "met", False: "missed", None: "not judged: no such runs"}[self.met]
        goal = "" if self.goal is None else f", goal {self.goal:g}"
        figure = "-" if self.figure is None else f"{self.figure:.3g}"
        if self.figure is not None and abs(self.figure) >= 100:
            figure = f"{self.figure:.0f}"
        bound = "least" if self.at_least else "most"
        return f"| {self.bar} | {figure} | at {bound} {self.limit:g}{goal} | {state} |"


def of_faults(verdicts: list[Verdict]) -> list[Bar]:
    injected = summary([v for v in verdicts if v.kind == "injected"])
    slow = summary([v for v in verdicts if v.kind == "slow"])
    quiet = false_alarms(verdicts)
    judged = quiet["steps"] > 0
    return [
        Bar("injected faults: detected by the second sample that covers them, %",
            injected["detected"], DETECTED),
        Bar("injected faults: cause right, %", injected["cause"], CAUSE),
        Bar("injected faults: place right, %", injected["place"], PLACE),
        Bar("slow faults: told before the loss is 5 % up, %", slow["in_time"], IN_TIME),
        Bar("healthy runs and steps before faults: false warnings per 1,000 steps, all families "
            "together", quiet["warnings_per_1000"], WARNINGS_PER_1000, at_least=False),
        Bar("healthy runs and steps before faults: false criticals",
            float(quiet["criticals"]) if judged else None, 0, at_least=False),
    ]  # fmt: skip


def _of_json(bar: dict[str, Any]) -> Bar:
    return Bar(**{field.name: bar[field.name] for field in dataclasses.fields(Bar)})


def told_by_scorecard(printed: str) -> list[Bar]:
    """Of the JSON lines of `bellwether scorecard`: those of the line that has bars."""
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return [_of_json(bar) for line in lines for bar in line.get("bars", ())]


def of_scorecard(*arguments: str) -> list[Bar]:
    """Raises OSError, or ValueError with what the command has said."""
    from bellwether._native import c_api

    tool = c_api.find("bellwether") or "bellwether"
    said = subprocess.run(
        [str(tool), "scorecard", "--json", *arguments],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    if said.returncode:
        what = said.stderr.strip()[-500:]
        raise ValueError(f"bellwether scorecard {' '.join(arguments)}: {what}")
    return told_by_scorecard(said.stdout)


def table(bars: Iterable[Bar]) -> str:
    return "\n".join(["| what | figure | bar | |", "| --- | --- | --- | --- |"]
                     + [bar.row() for bar in bars])  # fmt: skip


def as_json(bars: Iterable[Bar]) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(bar), "met": bar.met} for bar in bars]
