"""What `score` prints: each monitor on the runs of some folders, and our own beside its bars."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from . import bars
from .monitors import all_monitors
from .score import LABELS, Verdict, family_table, leaderboard, runs_of, scored, verdicts_of

OURS = "bellwether"  # Of monitors/.


@dataclass(frozen=True)
class Asked:
    """What the command is asked to do."""

    folders: list[Path]
    monitors: Optional[list[str]] = None  # None: all.
    severity: str = "warning"
    as_json: bool = False
    synthetic: bool = False  # Whether made-up runs are judged, too.
    bars: bool = False  # Whether a bar that is missed is a failure.


def _bars(asked: Asked, verdicts: dict[str, list[Verdict]]) -> list[bars.Bar]:
    """Of our own detectors."""
    found = bars.of_faults(verdicts.get(OURS, []))
    for folder in asked.folders:
        if (folder / LABELS).exists():
            found += bars.of_scorecard(str(folder))
    return found + (bars.of_scorecard("--synthetic") if asked.synthetic else [])


def main(asked: Asked) -> int:
    runs = [run for folder in asked.folders for run in runs_of(folder)]
    monitors = all_monitors()
    for name in asked.monitors or ():
        if name not in monitors:
            raise ValueError(f"monitor {name!r} is not one of {', '.join(monitors)}")
    chosen = {name: monitors[name] for name in asked.monitors or monitors}

    def progress(name: str) -> Callable[[int], None]:
        def say(done: int) -> None:
            if sys.stderr.isatty():
                end = "\n" if done == len(runs) else ""
                print(f"\r{name}: {done}/{len(runs)}\x1b[K", end=end, file=sys.stderr, flush=True)

        return say

    verdicts = {
        name: verdicts_of(runs, monitor, asked.severity, progress(name))
        for name, monitor in chosen.items()
    }
    scores = {name: scored(of) for name, of in verdicts.items()}
    held = _bars(asked, verdicts) if OURS in chosen else []
    missed = asked.bars and any(bar.met is False for bar in held)
    if asked.as_json:
        told = {
            name: {"splits": scores[name], "runs": [dataclasses.asdict(v) for v in verdicts[name]]}
            for name in chosen
        }
        every = {"severity": asked.severity, "monitors": told, "bars": bars.as_json(held)}
        print(json.dumps(every, indent=1))
        return int(missed)
    for split in sorted({known["split"] for _, known in runs}):
        first = next(iter(scores))
        quiet = scores[first][split]["healthy"]
        print(f"## {split} split\n\n{leaderboard(split, scores)}\n")
        print(f"### {first}\n\n{family_table(scores[first][split])}\n")
        left = scores[first][split]["all"]["time_left"]
        if left["told"]:
            print(
                f"Time left, told for {left['told']} slow faults: within its interval in "
                f"{left['in_interval']:.0f} %; expected over real {left['ratio'] or 0:.2f} in the "
                "median.\n"
            )
        print(
            f"{quiet['runs']} healthy runs of {quiet['steps']} steps: "
            f"{quiet['warnings']} warnings, {quiet['criticals']} criticals by {first}.\n"
        )
    if held:
        print(f"## Bars\n\n{bars.table(held)}\n")
        if not asked.synthetic:
            print("Those of made-up runs, in minutes: --synthetic.\n")
    return int(missed)
