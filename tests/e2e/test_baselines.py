"""Goal: what healthy runs looked like is learned by the real server, said in the alerts of a
failing sibling, on every face, and kept over kill -9.
Method: recorded runs imported into the real bellwetherd by the real command, which is killed
right after, before anything was flushed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, wait_for

from bellwether.client import Block, OwnValues, RunClient, RunOptions

RUNS = ROOT / "tests/testdata/runs"
HEALTHY = ("gpt-flash-lr3e4-s5", "gpt-flash-lr1e3-s15")
ILL = "gpt-flash-s11"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running


def learned(server: Server) -> list[str]:
    kinds = server.json("baseline", "list").get("baselines", [])
    return sorted(run["run"] for kind in kinds for run in kind["runs"])


def alerts(server: Server) -> list[Any]:
    """All transitions of the failing run, with all that is said of them."""
    found = []
    for alert in server.call("ListAlerts", run=ILL, limit=1000)["alerts"]:
        found += server.call("GetAlert", run=ILL, key=alert["last"]["key"])["alert"]["history"]
    return sorted(found, key=lambda t: int(t["id"]))


def test_a_failing_run_against_its_siblings_and_after_a_kill(server: Server) -> None:
    for name in HEALTHY:
        server.run("run", "import", str(RUNS / f"{name}.bwrun"))
    wait_for("both are learned", lambda: learned(server) == sorted(HEALTHY))
    server.kill()
    server.start()
    assert learned(server) == sorted(HEALTHY)

    server.run("run", "import", str(RUNS / f"{ILL}.bwrun"))
    before = alerts(server)
    drift = next(t for t in before if t["rule"] == "drift")
    evidence = drift["evidence"][0]
    assert evidence["siblings"]["runs"] == 2
    assert evidence["value"] > evidence["siblings"]["p99"] > evidence["siblings"]["p50"]
    assert "2 earlier healthy runs" in drift["siblings"]
    text = server.run("alert", "get", ILL, drift["key"])
    assert re.search(
        r"(?m)^siblings +\S.* 2 earlier healthy runs of this architecture, kernel and dtype", text
    )
    assert re.search(rf"(?m)^{evidence['signal']} .* in 2 runs ", text)
    bands = server.call("GetBaseline", run=ILL, signal=evidence["signal"])["bands"]
    assert evidence["siblings"] in [band["band"] for band in bands]
    wait_for(
        "the failing run was looked at",
        lambda: 'baseline_runs_total{result="ill"} 1' in server.get("/metrics"),
    )

    server.kill()
    server.start()
    assert alerts(server) == before
    assert learned(server) == sorted(HEALTHY)
    assert server.call("GetBaseline", run=HEALTHY[0])["baseline"]["runs"][0]["run"] == HEALTHY[1]


def test_a_signal_of_the_jobs_own_against_its_siblings(server: Server) -> None:
    def train(name: str, kl: float) -> None:
        with_own = RunClient(RunOptions(name, layers=2, heads=2, server=server.grpc))
        for step in range(1200):
            values = [OwnValues("train/kl", [kl + step % 10 / 1000], high=0.5)] if step % 3 == 0 else []
            assert with_own.push(step, [Block("loss", [2.0 + step % 3 / 1000])], own=values)
            if step % 100 == 0:
                assert with_own.flush(30)
        with_own.close()

    train("calm", 0.1)
    wait_for("it is learned", lambda: learned(server) == ["calm"])
    train("wild", 0.9)
    (alert,) = server.call("ListAlerts", run="wild", limit=10)["alerts"]
    told = server.call("GetAlert", run="wild", key=alert["last"]["key"])["alert"]["history"][0]
    assert told["rule"] == "own" and told["evidence"][0]["signal"] == "train/kl"
    assert told["siblings"].startswith("train/kl 0.9; 1 earlier healthy run of this architecture")
    band = server.call("GetBaseline", run="wild", signal="train/kl")["bands"][0]  # Of the first steps.
    assert 0.1 <= band["band"]["min"] <= band["band"]["max"] < 0.11 and band["run"]["p50"] >= 0.9
    assert "train/kl" in server.run("baseline", "get", "wild", "--signal", "train/kl")
