"""Goal: a real training job that breaks is repaired by the loop alone: alert, policy, action,
trainer, verdict; and with a policy that observes not a bit of it is touched.
Method: examples/tiny_transformer.py in bf16, which fails, against a bellwetherd whose policy
enforces centring, or hp.  With BELLWETHER_LONG seeds 1 to 4 run over 8,000 steps, beside the fp32
twin and the unrepaired run, and sigma(W_Q) must hold with three of them.  On this model centring
does not hold it with every seed and processor (docs/concepts/actions.md).  Otherwise one seed runs
until hp is applied.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, wait_for

LONG = bool(os.environ.get("BELLWETHER_LONG"))
SEEDS = (1, 2, 3, 4) if LONG else (1,)
STEPS = 8000 if LONG else 2000  # Before 8,000 rounding decides which run is ahead, not the repair.
OBSERVED_STEPS = 2000  # The alert comes before.
# Of SEEDS, whose sigma(W_Q) must stay below twice the twin's.
REPAIRED_MIN = {"center": 3, "hp": 3} if LONG else {"hp": 0}
SICK_LAYER = 1
# Centring from the first stage on, or hp; no other rung, so that what is shown is theirs, and kept
# whatever the verdict after so few steps: both cost next to nothing, and without them the run fails.
POLICIES = {
    "center": "{do: attention.center_k, scope: layers, trial_steps: 400, undo: never}",
    "hp": "{do: attention.mode, mode: hp, scope: all, trial_steps: 400, undo: never}",
}
ALLOW = "attention.center_k,attention.mode"


def policy(rung: str, mode: str = "enforce") -> str:
    return (
        f"mode: {mode}\nlimits: {{min_steps_between: 0}}\nrules:\n"
        f"- when: {{severity: warning}}\n  ladder:\n  - {rung}\n"
    )


def train(server: Server, name: str, attention: str, seed: int, steps: int, *more: str) -> list[float]:
    """sigma(W_Q) by layer at the end."""
    environment = {**os.environ, "BELLWETHER_LIB_DIR": str(BIN), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples/tiny_transformer.py"), "--attention", attention, "--seed", str(seed)]
    command += ["--steps", str(steps), "--server", server.grpc, "--run", name, *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    (server.folder / f"{name}.log").write_text(done.stdout + done.stderr)
    said = re.search(r"seed \d+: sigma\(W_Q\) (.*?);", done.stdout)
    found = re.findall(r"layer \d ([\d.]+)", said[1] if said else "")
    assert len(found) == 2, done.stdout
    return [float(value) for value in found]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as running:
        yield running


def run_with(server: Server, repair: str, mode: str, seed: int, steps: int, *more: str) -> list[float]:
    """The failing example under a policy of its own; the run exists once it has begun."""
    name = f"{repair}-{mode}-{seed}"
    file = server.folder / f"{name}.yml"
    file.write_text(policy(POLICIES[repair], mode))
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, server, name, "bf16", seed, steps, "--allow", ALLOW, *more)

        def begun() -> bool:
            return training.done() or any(r["description"]["name"] == name for r in server.call("ListRuns").get("runs", []))

        wait_for(f"{name} has begun", begun, 200)
        server.run("policy", "set", name, str(file))
        return training.result()


def history(server: Server, name: str) -> list[dict[str, Any]]:
    return list(server.call("ListActions", run=name).get("actions", []))


def states(action: dict[str, Any]) -> list[str]:
    return [change["state"].removeprefix("ACTION_STATE_").lower() for change in action["history"]]


def test_the_loop_alone_repairs(server: Server) -> None:
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)) // 2)) as pool:
        twins = {seed: pool.submit(train, server, f"fp32-{seed}", "fp32", seed, STEPS) for seed in SEEDS if LONG}
        repaired = {
            (repair, seed): pool.submit(run_with, server, repair, "enforce", seed, STEPS)
            for seed in SEEDS
            for repair in REPAIRED_MIN
        }
        unrepaired = {seed: pool.submit(train, server, f"bf16-{seed}", "bf16", seed, STEPS) for seed in SEEDS if LONG}
    good = dict.fromkeys(REPAIRED_MIN, 0)
    for (repair, seed), sigma in repaired.items():
        mine = sigma.result()[SICK_LAYER]
        twin = twins[seed].result()[SICK_LAYER] if LONG else 0.0
        name = f"{repair}-enforce-{seed}"
        actions = history(server, name)
        wild = f", unrepaired {unrepaired[seed].result()[SICK_LAYER]}" if seed in unrepaired else ""
        print(f"{name}: sigma(W_Q) {mine}, fp32 {twin}{wild}; {[(a['kind'], states(a)) for a in actions]}")
        assert actions and "applied" in states(actions[0]), actions
        applied = next(c for c in actions[0]["history"] if c["state"] == "ACTION_STATE_APPLIED")
        print(f"{name}: applied at step {applied.get('step')}")
        log = (server.folder / f"{name}.log").read_text()
        assert re.search(r"action \S+ attention\.\S+ .*applied from step \d+ on", log)
        good[repair] += mine < 2 * twin
    assert all(good[repair] >= least for repair, least in REPAIRED_MIN.items()), good


@pytest.mark.skipif(not LONG, reason="two trainings of half a minute: BELLWETHER_LONG=1")
def test_a_policy_that_observes_touches_nothing(server: Server) -> None:
    losses = {}
    for how in ("allowed", "unwatched"):
        file = server.folder / f"{how}.txt"
        if how == "allowed":
            run_with(server, "center", "observe", 1, OBSERVED_STEPS, "--losses", str(file))
            assert history(server, "center-observe-1") == []
        else:
            train(server, "x", "bf16", 1, OBSERVED_STEPS, "--no-watch", "--losses", str(file))
        losses[how] = file.read_text()
    assert losses["allowed"] == losses["unwatched"] and len(losses["allowed"].splitlines()) == OBSERVED_STEPS
