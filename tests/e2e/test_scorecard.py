"""Goal: `bellwether scorecard` is what a script can rely on.  It prints lines of JSON, its exit
code shows whether every run was scored, errors name the file or the flag, and its picture can be
drawn.
Method: the real programs on recorded runs, whole, cut off and empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT

RUNS = ROOT / "tests/testdata/runs"
KEYS = {"run", "t_sigma", "t_loss", "first_warning", "first_critical", "named_heads", "first_bad_head", "eta_error",
        "false_warnings", "false_criticals", "steps"}  # fmt: skip


def scorecard(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / "bellwether"), "scorecard", *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for run in ("gpt-flash-s17", "gpt-hp-s4"):
        shutil.copy(RUNS / f"{run}.bwrun", tmp_path)
    shutil.copy(RUNS / "labels.json", tmp_path)
    return tmp_path


def test_each_run_is_a_line_and_the_set_follows(folder: Path) -> None:
    done = scorecard(folder, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # A bar is for terminals.
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [run["run"] for run in runs] == ["gpt-flash-s17", "gpt-hp-s4", None]
    # What more there is stands in docs/concepts/detection.md.
    assert all(set(run) == KEYS | {"family", "peers"} for run in runs[:-1])
    assert runs[0]["t_sigma"] == 4120 and runs[0]["t_sigma"] - runs[0]["first_warning"] >= 500
    assert runs[1]["first_warning"] is None and runs[1]["false_warnings"] == 0
    assert all(rule["ns_per_step"] > 0 for rule in runs[2]["rules"]) and len(runs[2]["rules"]) == 7


def test_eta_is_right_within_a_third() -> None:
    runs = [json.loads(line) for line in scorecard(RUNS, "--json").stdout.splitlines()]
    errors = {run["run"]: run["eta_error"] for run in runs if run["run"] and run["eta_error"] is not None}
    assert len(errors) >= 3 and all(abs(error) <= 0.35 for error in errors.values()), errors


def test_a_test_that_is_switched_off_warns_of_nothing(folder: Path) -> None:
    everything = ("drift.growth", "drift.level", "drift.common_mode", "drift.leak", "ties", "norm", "logits", "loss",
                  "gradient", "nonfinite")  # fmt: skip
    flags = [word for test in everything for word in ("--without", test)]
    done = scorecard(*flags, "--json", folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["first_warning"] is None
    wrong = scorecard(folder, "--without", "drift.all")
    assert wrong.returncode == 2 and "drift.growth" in wrong.stderr and '"drift.all"' in wrong.stderr


def test_unreadable_files_are_named_and_set_the_exit_code(folder: Path) -> None:
    (folder / "empty.bwrun").touch()
    whole = (folder / "gpt-hp-s4.bwrun").read_bytes()
    (folder / "cut.bwrun").write_bytes(whole[: len(whole) // 3])
    done = scorecard(folder, "--json")
    assert done.returncode == 1
    assert "empty.bwrun: " in done.stderr and "cut.bwrun: " in done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [run["run"] for run in runs] == ["gpt-flash-s17", "gpt-hp-s4", None]
    assert len(runs[-1]["failures"]) == 2


def test_a_folder_of_traces_is_told_how_they_become_runs(tmp_path: Path) -> None:
    (tmp_path / "a.npz").touch()
    done = scorecard(tmp_path)
    assert done.returncode == 1 and "python -m bellwether npz2run" in done.stderr
    assert scorecard().returncode == 2
    assert scorecard(tmp_path, "--synthetic").returncode == 2
    assert scorecard(tmp_path, "--ablate", "--tune").returncode == 2


def test_each_test_is_switched_off_in_turn(folder: Path) -> None:
    done = scorecard(folder, "--ablate")
    assert done.returncode == 0, done.stderr
    assert "| nothing | 0 | 1 of 1 |" in done.stdout and "| drift.growth | 1 |" in done.stdout


def test_a_terminal_sees_a_bar(folder: Path) -> None:
    master, slave = pty.openpty()
    done = subprocess.run([str(BIN / "bellwether"), "scorecard", str(folder)], stdout=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    assert done.returncode == 0
    seen = b""
    with contextlib.suppress(OSError):  # EIO: all was read.  One read gives what the kernel has passed on by then.
        while part := os.read(master, 65536):
            seen += part
    assert b"2 of 2 runs" in seen
    os.close(master)


def test_the_picture_is_drawn(folder: Path) -> None:
    script = ROOT / "tests/bench/scorecard_plot.py"
    drawn = subprocess.run([sys.executable, str(script), "-", str(folder / "a.png")], text=True, capture_output=True,
                           input=scorecard(folder, "--json").stdout)  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert (folder / "a.png").read_bytes()[:4] == b"\x89PNG"
    refused = subprocess.run([sys.executable, str(script), str(RUNS / "README.md"), str(folder / "b.png")],
                             text=True, capture_output=True)  # fmt: skip
    assert refused.returncode == 1 and "line 1" in refused.stderr and "Traceback" not in refused.stderr
