"""Goal: the page's types are those of the calls it makes.
Method: the types are made again from proto/ and compared, and once more of a proto/ with one thing changed.
assets_test.py shows that TypeScript refuses what they do not have.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = ROOT / "dashboards" / "console"
sys.path.insert(0, str(CONSOLE))
from wire_types import PROTO, wire_types


def test_the_committed_types_are_those_of_proto() -> None:
    assert wire_types() == (CONSOLE / "src/wire.ts").read_text(), "src/wire.ts is stale: run dashboards/console/wire_types.py"


def changed(folder: Path, file: str, old: str, new: str) -> str:
    """The types of proto/ with one thing otherwise."""
    shutil.copytree(PROTO, folder / "proto", ignore=shutil.ignore_patterns("include", "*.cc", "*.txt"))
    path = folder / "proto/bellwether/v1" / file
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    return wire_types(folder / "proto")


@pytest.mark.parametrize(
    ("file", "old", "new", "line"),
    [
        ("runs.proto", "uint32 stage = 3; ", "uint64 phase = 3; ", "  phase: string;"),
        ("runs.proto", "double loss = 13;", "repeated double loss = 13;", "  loss: Real[];"),
        ("runs.proto", "double loss = 13;", "optional double loss = 13;", "  loss?: Real;"),
        ("runs.proto", "double loss = 13;", "map<string, Eta> loss = 13;", "  loss: Record<string, Eta>;"),
        ("runs.proto", "bool imported = 17;", "Layout imported = 17;", "  imported?: Layout;"),
        ("alerts.proto", "SEVERITY_CRITICAL", "SEVERITY_FATAL", "'SEVERITY_WARNING' | 'SEVERITY_FATAL'"),
        ("query.proto", "rpc GetRun(", "rpc ReadRun(", "  ReadRun: { request: GetRunRequest; response: Run };"),
    ],
)
def test_proto_changes_change_the_types(tmp_path: Path, file: str, old: str, new: str, line: str) -> None:
    assert line in changed(tmp_path, file, old, new)
    assert line not in wire_types()


def test_a_field_that_is_always_set_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"Alert\.last"):
        changed(tmp_path, "alerts.proto", "Transition last = 1;", "Transition newest = 1;")
