"""The detectors' thresholds, from the rules file of what is built in, so that a board has no number of its own."""

from __future__ import annotations

import re
from pathlib import Path

BUILT_IN = Path(__file__).resolve().parents[2] / "deploy/rules/builtin.yml"


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
