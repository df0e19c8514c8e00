"""Bellwether's own detectors, as `bellwether replay` runs them over the recording."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from . import SEVERITIES, Alarm, Run

NAME = "bellwether"
TIMEOUT = 600  # Seconds.


def alarm_of(line: dict[str, Any]) -> Alarm:
    """Of one transition that fires."""
    layer = line.get("layer")
    experts, ranks = line.get("experts") or [], line.get("ranks") or []
    heads = [head for of, head in line.get("heads", ()) if of == layer and head is not None]
    return Alarm(
        step=int(line["step"]),
        severity=str(line["severity"]),
        cause=str(line.get("cause") or "unknown"),
        layer=layer,
        heads=tuple(heads),
        tensors=tuple(line.get("tensors") or ()),
        expert=experts[0][1] if experts else None,
        rank=ranks[0] if ranks else None,
        eta=None if line.get("eta_steps") is None else (
            float(line["eta_steps"]), float(line["eta_lower_steps"]), float(line["eta_upper_steps"])
        ),
        key=str(line.get("key", "")),
        text=str(line.get("summary", "")),
        more={"rule": line.get("rule"), "advice": line.get("advice", "")},
    )


def alarms_in(printed: str) -> list[Alarm]:
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return [
        alarm_of(line)
        for line in lines
        # What watching costs is no illness of the training: on a loaded machine it says anything.
        if line.get("state") == "firing"
        and line.get("severity") in SEVERITIES
        and line.get("rule") != "overhead"
    ]


def alarms(run: Run) -> list[Alarm]:
    """Raises OSError, or ValueError with what the command has said."""
    from bellwether._native import c_api

    tool = c_api.find("bellwether") or "bellwether"
    said = subprocess.run(
        [str(tool), "replay", str(run.recording), "--json"],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    if said.returncode:
        raise ValueError(f"bellwether replay {run.recording}: {said.stderr.strip()[-500:]}")
    return alarms_in(said.stdout)
