"""Goal: a policy file is checked, explained and tried on recordings by the command alone.
Method: the real command and bellwetherd; recorded runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT

RUNS = ROOT / "tests/testdata/runs"
BUILT_IN = ROOT / "deploy/policy/default.yml"


def bellwether(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "bellwether", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_built_in_policy_is_printed_checked_and_explained() -> None:
    printed = subprocess.run(
        [BIN / "bellwetherd", "policy", "defaults"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == BUILT_IN.read_text()
    checked = bellwether("policy", "check", BUILT_IN)
    assert (checked.returncode, checked.stdout) == (0, f"{BUILT_IN}: good, mode observe, 4 rules\n")
    explained = bellwether("policy", "explain")
    assert explained.returncode == 0
    assert "1. attention.center_k, the whole model, judged after 1000 steps" in explained.stdout
    assert bellwether("policy", "explain", BUILT_IN).stdout == explained.stdout


def test_findings_in_a_bad_file_name_their_place(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yml"
    bad.write_text("mode: on\nrules:\n- ladder: [{do: qk.clip, gamma: 2}]\n")
    for command in (["check", bad], ["explain", bad], ["dry-run", bad, RUNS / "labels.json"]):
        refused = bellwether("policy", *command)
        assert refused.returncode == 3
        assert refused.stderr.splitlines() == [
            f"{bad}:1:7: mode = on: must be one of observe, propose, enforce",
            f"{bad}:3:33: rules[0].ladder[0].gamma = 2: must be a number in [0, 1]",
        ]
    missing = bellwether("policy", "check", tmp_path / "none.yml")
    assert missing.returncode == 2


def test_dry_run_lists_actions_and_their_steps() -> None:
    healthy, failing = RUNS / "gpt-live-centred-s13.bwrun", RUNS / "gpt-live-flash-s4.bwrun"
    tried = bellwether("policy", "dry-run", BUILT_IN, healthy, failing, "--mode", "enforce")
    assert tried.returncode == 0, tried.stderr
    assert tried.stdout.startswith("Dry run: every action is taken for applied at the next step")
    assert "gpt-live-centred-s13: 3621 steps, 0 alerts, 0 actions" in tried.stdout
    assert "attention.center_k of the whole model  for a1" in tried.stdout
    as_json = bellwether(
        "policy", "dry-run", BUILT_IN, healthy, failing, "--mode", "enforce", "--json"
    )
    first, second = map(json.loads, as_json.stdout.splitlines())
    assert first["actions"] == [] and first["first_applied_step"] is None
    assert second["actions"][0]["do"] == "attention.center_k"
    assert second["actions"][0]["scope"] == {"layers": [], "heads": []}
    assert second["first_applied_step"] < 4300  # When its weights are lost: labels.json.
    observing = bellwether("policy", "dry-run", BUILT_IN, failing)
    assert "0 actions; mode observe does nothing" in observing.stdout


def test_dry_run_names_files_other_than_recordings() -> None:
    tried = bellwether(
        "policy", "dry-run", BUILT_IN, RUNS / "labels.json", RUNS / "gpt-live-centred-s13.bwrun"
    )
    assert tried.returncode == 1
    assert "labels.json" in tried.stderr and "1 of 2 files could not be judged" in tried.stderr
    assert "gpt-live-centred-s13" in tried.stdout
