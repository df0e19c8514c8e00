#!/usr/bin/env python3
"""Writes the tables of what is supported into the documents, from the trainings that ran.

    support_table.py FILE.jsonl ...   takes what matrix.py, packages/test_packages.py and
                                      packages/gpu_results.py found, on this machine or another,
                                      into support.json, then writes the tables
    support_table.py                  only writes the tables of support.json anew

What was found with other versions before stays.

Exit code: 0, or 2 for wrong arguments.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DATA = HERE / "support.json"
HOW = "python tests/matrix/support_table.py writes the tables anew"
_VERSIONS = ("python", "torch", "transformers", "device")
_TOLD = ("package", "version", "outcome", "passed")
_TOLD_OF_GPUS = ("machine", "missing")
WAYS = ("sdpa", "eager", "flex_attention", "bellwether")
_BEGIN, _END = "<!-- from tests/matrix/support.json -->\n", "<!-- end -->"


def take(data: dict[str, Any], lines: Iterable[str]) -> None:
    """Into `data`: cells, those of the newest state of the code; packages; what ran on GPUs."""
    results = [json.loads(line) for line in lines]
    cells = [r for r in results if "key" in r]
    newest = [r for r in cells if r["key"] == cells[-1]["key"]]
    if newest:
        versions = dict(zip(_VERSIONS, newest[0]["key"].split("/")))
        others = [t for t in data["trained"] if t["versions"] != versions]
        data["trained"] = [*others, {"versions": versions, "architectures": _by_name(newest)}]
    for result in results:
        if "machine" in result:
            data["gpu"][result["cell"]] = {name: result[name] for name in (*_TOLD, *_TOLD_OF_GPUS)}
        elif "package" in result:
            data["packages"][result["cell"]] = {name: result[name] for name in _TOLD}


def _by_name(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Without torch.compile, which is another question, and what does not train there at all."""
    import matrix

    by_way: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        name, way, _, mode, _ = result["cell"].split()
        if mode != "compile" and result["outcome"] != "invalid":
            by_way.setdefault((name, way), []).append(result)
    found: dict[str, Any] = {}
    for architecture in matrix.architectures.ALL:
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
            found[architecture.name] = {
                "family": architecture.family, "kind": architecture.kind, "ways": ways,
            }  # fmt: skip
    return found


def _without(groups: list[str]) -> str:
    if len(groups) > 2:
        return "not seen"
    return "full, no " + ", ".join(groups) if groups else "full"


def _state(way: dict[str, Any]) -> str:
    if way["passed"] < way["cells"]:
        return f"{way['passed']} of {way['cells']}"
    return _without(way["without"])


def _states(entries: list[dict[str, Any]], way: str) -> str:
    """Of one architecture in each training that has it."""
    return " / ".join(dict.fromkeys(_state(e["ways"][way]) for e in entries if way in e["ways"]))


def _in_words(trained: dict[str, Any]) -> str:
    ways = [way for entry in trained["architectures"].values() for way in entry["ways"].values()]
    cells = sum(way["cells"] for way in ways)
    told = "torch {torch}, transformers {transformers}, Python {python}, {device}"
    return told.format(**trained["versions"]) + f": {cells} cells"


def _rows(*rows: Iterable[str]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def architectures_table(data: dict[str, Any]) -> str:
    """One row for each architecture."""
    entries: dict[str, list[dict[str, Any]]] = {}
    for trained in data["trained"]:
        for name, entry in trained["architectures"].items():
            entries.setdefault(name, []).append(entry)
    rows = [
        [name, ", ".join(filter(None, (of[0]["family"], of[0]["kind"]))),
         *(_states(of, way) for way in WAYS)]
        for name, of in entries.items()
    ]  # fmt: skip
    columns = ["architecture", "its attention", *(f"`{way}`" for way in WAYS)]
    head = "".join(f"* {_in_words(trained)}\n" for trained in data["trained"])
    table = _rows(columns, ["---"] * len(columns), *rows)
    return "\n".join((head, table, packages_table(data), gpu_table(data)))


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
    for name, entry in sorted(data["gpu"].items()):
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
    """One row for each implementation of attention, for each training."""
    rows = []
    for trained in data["trained"]:
        title = "transformers {transformers}, torch {torch}".format(**trained["versions"])
        for way in WAYS:
            of = [e["ways"][way] for e in trained["architectures"].values() if way in e["ways"]]
            passed = [state for state in of if state["passed"] == state["cells"]]
            less = sum(bool(state["without"]) for state in passed)
            rows.append([title, f"`{way}`", *map(str, (len(of), len(passed) - less, less))])
    columns = ["with", "by", "architectures", "every signal", "less, and said"]
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
    missing = [path for path in arguments if not Path(path).is_file()]
    if missing:
        print(f"support_table.py: no such file: {', '.join(missing)}", file=sys.stderr)
        return 2
    data = json.loads(DATA.read_text())
    for path in arguments:
        take(data, Path(path).read_text().splitlines())
    DATA.write_text(json.dumps(data, indent=1) + "\n")
    for path, write in TABLES.items():
        text = path.read_text()
        path.write_text(text.replace(_BEGIN + within(text) + _END, _BEGIN + write(data) + _END))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
