#!/usr/bin/env python3
"""Writes the tables of what is supported into the documents, from the trainings that ran.

    support_table.py CELLS.jsonl PACKAGES.jsonl   takes what matrix.py and packages/test_packages.py
                                                  found into support.json, then writes the tables
    support_table.py GPU.jsonl                    takes what ran on a GPU (packages/gpu_results.py)
    support_table.py                              only writes the tables of support.json anew

Exit code: 0, or 2 for wrong arguments.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Optional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DATA = HERE / "support.json"
HOW = "python tests/matrix/support_table.py writes the tables anew"
WAYS = ("sdpa", "eager", "flex_attention", "bellwether")
_BEGIN, _END = "<!-- from tests/matrix/support.json -->\n", "<!-- end -->"


def gather(cells: Path, packages: Path) -> dict[str, Any]:
    """Of the results for what is here now; without torch.compile, which is another question."""
    import architectures
    import matrix

    by_way: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in matrix.Results(cells).found.values():
        name, way, _, mode, _ = result["cell"].split()
        if mode != "compile":
            by_way.setdefault((name, way), []).append(result)
    found: dict[str, Any] = {"versions": matrix.versions(), "architectures": {}, "packages": {}}
    for architecture in architectures.ALL:
        ways = {}
        for way in architecture.implementations:
            of_way = by_way.get((architecture.name, way), [])
            if of_way:
                missing = {group for r in of_way if matrix.passed(r) for group in r["missing"]}
                ways[way] = {
                    "cells": len(of_way),
                    "passed": sum(map(matrix.passed, of_way)),
                    "without": sorted(missing),
                }
        if ways:
            found["architectures"][architecture.name] = {
                "family": architecture.family, "kind": architecture.kind, "ways": ways,
            }  # fmt: skip
    for line in packages.read_text().splitlines():
        result = json.loads(line)
        found["packages"][result["cell"]] = {
            name: result[name] for name in ("package", "version", "outcome", "passed")
        }
    return found


def gather_gpu(path: Path) -> dict[str, dict[str, Any]]:
    """What ran on GPUs by its name; the last result of each counts."""
    wanted = ("package", "version", "machine", "outcome", "missing", "passed")
    lines = map(json.loads, path.read_text().splitlines())
    return {line["cell"]: {name: line[name] for name in wanted} for line in lines}


def _without(groups: list[str]) -> str:
    if len(groups) > 2:
        return "not seen"
    return "full, no " + ", ".join(groups) if groups else "full"


def _state(way: Optional[dict[str, Any]]) -> str:
    if way is None:
        return ""
    if way["passed"] < way["cells"]:
        return f"{way['passed']} of {way['cells']}"
    return _without(way["without"])


def _rows(*rows: Iterable[str]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def architectures_table(data: dict[str, Any]) -> str:
    """One row for each architecture."""
    head = "Torch {torch}, transformers {transformers}, on the CPU:\n\n".format(**data["versions"])
    rows = [
        [name, ", ".join(filter(None, (entry["family"], entry["kind"]))),
         *(_state(entry["ways"].get(way)) for way in WAYS)]
        for name, entry in data["architectures"].items()
    ]  # fmt: skip
    columns = ["architecture", "its attention", *(f"`{way}`" for way in WAYS)]
    table = head + _rows(columns, ["---"] * len(columns), *rows)
    return "\n".join((table, packages_table(data), gpu_table(data)))


def packages_table(data: dict[str, Any]) -> str:
    """One row for each training by the loop of a package."""
    rows = [
        [name.replace("_", " "), f"{entry['package']} {entry['version']}",
         entry["outcome"] if entry["passed"] else f"not as it should be: {entry['outcome']}"]
        for name, entry in data["packages"].items()
    ]  # fmt: skip
    return _rows(["training", "package", "state"], ["---"] * 3, *rows)


def gpu_table(data: dict[str, Any]) -> str:
    """One row for each package and state of what ran on GPUs."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, entry in sorted(data.get("gpu", {}).items()):
        first, *case = re.split("[-_ ]", name)
        state = _without(sorted(entry["missing"])) if entry["passed"] else "not as it should be"
        what = f"{first} ({entry['package']} {entry['version']})"
        groups.setdefault((what, entry["machine"], state), []).append(" ".join(case) or "plain")
    rows = [
        [what, ", ".join(cases), machine, state] for (what, machine, state), cases in groups.items()
    ]
    columns = ["package", "ways", "machine", "state"]
    return "### Packages on GPUs\n\n" + _rows(columns, ["---"] * len(columns), *rows)


def summary_table(data: dict[str, Any]) -> str:
    """One row for each implementation of attention."""
    rows = []
    for way in WAYS:
        states = [e["ways"][way] for e in data["architectures"].values() if way in e["ways"]]
        whole = sum(s["passed"] == s["cells"] and not s["without"] for s in states)
        less = sum(s["passed"] == s["cells"] and bool(s["without"]) for s in states)
        rows.append([f"`{way}`", str(len(states)), str(whole), str(less)])
    title = "transformers {transformers}, torch {torch}".format(**data["versions"])
    columns = [title, "architectures", "every signal", "less, and said"]
    return _rows(columns, ["---"] * len(columns), *rows)


TABLES: dict[Path, Callable[[dict[str, Any]], str]] = {
    ROOT / "README.md": summary_table,
    ROOT / "docs" / "frameworks.md": architectures_table,
}


def within(text: str) -> str:
    """What stands between the marks."""
    begin = text.index(_BEGIN) + len(_BEGIN)
    return text[begin : text.index(_END, begin)]


def main(arguments: list[str]) -> int:
    if arguments in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if len(arguments) > 2 or not all(Path(path).is_file() for path in arguments):
        print(f"support_table.py: up to two files are legal, not {arguments}", file=sys.stderr)
        return 2
    data = json.loads(DATA.read_text())
    if len(arguments) == 2:
        data |= gather(*map(Path, arguments))
    elif arguments:
        data["gpu"] = data.get("gpu", {}) | gather_gpu(Path(arguments[0]))
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    for path, write in TABLES.items():
        text = path.read_text()
        path.write_text(text.replace(_BEGIN + within(text) + _END, _BEGIN + write(data) + _END))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
