"""Goal: the commands make the slice's runs and score them; a second call makes nothing again; ranks
become one recording that names the tensor whose copies differ.
Method: the slice as a user makes it, each run a few seconds; `bellwether replay` over each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bellwether._native import c_api

from instabilities import truth as truths
from instabilities.plan import PLANS, read
from instabilities.run import Request, run

from conftest import ROOT


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "instabilities", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def test_the_slice_is_made_once_and_scored(tmp_path: Path) -> None:
    made = command("make", "slice", "--out", str(tmp_path))
    assert made.returncode == 0, made.stderr
    names = {request.name for request in read("slice")}
    for name in names:
        known = truths.read(tmp_path / f"{name}.json")
        assert (tmp_path / f"{name}.bwrun").stat().st_size > 1000
        assert len((tmp_path / f"{name}.csv").read_text().splitlines()) == known["steps"] + 1
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert command("make", "slice", "--out", str(tmp_path)).returncode == 0
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    told = command("score", str(tmp_path), "--json")
    assert told.returncode == 0, told.stderr
    monitors: dict[str, Any] = json.loads(told.stdout)["monitors"]
    assert "bellwether" in monitors and len(monitors) >= 6
    for of in monitors.values():
        assert {verdict["run"] for verdict in of["runs"]} == names
    kernel = next(v for v in monitors["bellwether"]["runs"] if v["family"] == "faulty-kernel")
    assert kernel["detected"] and kernel["cause"] and kernel["place"]
    assert "| bellwether |" in command("score", str(tmp_path)).stdout


def test_copies_that_differ_are_named(tmp_path: Path) -> None:
    changes = json.dumps({"width": 32, "tokens": 16, "layers": 2, "steps": 30})
    (tmp_path / "replicas-apart-train-1.bwrun").write_bytes(b"of a run that was interrupted")
    known = run(Request("replicas-apart", "train", 1, changes), tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".bwrun", ".csv", ".json"}
    told = command("score", str(tmp_path), "--json", "--monitor", "bellwether")
    (verdict,) = json.loads(told.stdout)["monitors"]["bellwether"]["runs"]
    assert verdict["detected"] and known["tensor"] in verdict["alarm"]["tensors"]


def test_a_run_without_a_recording_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = c_api.find
    monkeypatch.setattr(c_api, "find", lambda name: None if name == c_api.SENDER else find(name))
    changes = json.dumps({"width": 32, "tokens": 16, "layers": 2, "steps": 20})
    with pytest.raises(RuntimeError, match="bellwether-sender was not found"):
        run(Request("stall", "train", 1, changes), tmp_path)
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("plan", sorted(path.stem for path in PLANS.glob("*.json")))
def test_plans_name_runs_that_can_be_made(plan: str) -> None:
    requests = read(plan)
    for request in requests:
        request.made()
    if plan == "test":
        named = [request.family for request in requests]
        assert min(named.count(name) for name in set(named)) >= 20


def test_a_plan_with_a_slip_is_refused(tmp_path: Path) -> None:
    for row, said in (
        ({"family": "gremlins", "split": "train", "seeds": [1, 2]}, "gremlins"),
        ({"family": "stall", "split": "tran", "seeds": [1, 2]}, "tran"),
        ({"family": "stall", "split": "train", "seeds": [1, 2], "step": 3}, "step"),
        ({"family": "stall", "split": "train"}, "seeds"),
    ):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({"runs": [row]}))
        with pytest.raises(ValueError, match=said):
            read(str(path))
