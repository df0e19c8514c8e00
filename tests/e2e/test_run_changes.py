"""Goal: a run that has ended can be deleted, and then nothing of it is left: no series, alert,
action or metric, after a crash and for a new run of its name.  A run can be renamed while it lives,
and keeps its new name over a crash and a resume.
Method: jobs that report losses of their own choice to a real bellwetherd, which is killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, wait_for

from bellwether.client import Block, RunClient, RunOptions

RULES = (
    "thresholds: {context: {warmup_steps: 0}}\n"
    "rules:\n- {name: loss_high, signal: loss, detector: level, above: 3, stage: 5, "
    "severity: warning, cause: high loss, batch_steps: 1, hold_batches: 1, "
    "resolve_steps: 3, cooldown_steps: 0}\n"
)
UUID = "0123456789abcdef"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "rules.yml").write_text(RULES)
    with Server(tmp_path, "", f"--rules.file={tmp_path / 'rules.yml'}") as started:
        yield started


def job(server: Server, name: str, uuid: str = UUID, attempt: int = 0) -> RunClient:
    options = RunOptions(
        name, layers=1, heads=1, run_uuid=uuid.encode().hex(), attempt=attempt, server=server.grpc
    )
    return RunClient(options)


def report(client: RunClient, first: int, loss: float = 4) -> None:
    for step in range(first, first + 20):
        assert client.push(step, [Block("loss", [loss])])
    assert client.flush(60)


def names(server: Server) -> list[str]:
    return [run["description"]["name"] for run in server.call("ListRuns")["runs"]]


def refused(server: Server, *words: str) -> str:
    command = [*server.program("bellwether"), "--server", server.grpc, *words]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode not in (0, None), done.stdout
    return done.stderr


def test_deleted_run_is_gone_for_good(server: Server) -> None:
    client = job(server, "old/1")
    report(client, 0)
    wait_for("it is ill", lambda: server.call("ListAlerts", firing_only=True)["alerts"])
    assert "has not ended" in refused(server, "run", "delete", "old/1", "--yes")
    assert "--yes is required" in refused(server, "run", "delete", "old/1")
    client.close()
    server.await_end("old/1")
    other = job(server, "other", "fedcba9876543210")
    report(other, 0)
    server.run("run", "delete", "old/1", "--yes")

    def gone() -> None:
        assert names(server) == ["other"]
        assert "no run has this name" in refused(server, "run", "get", "old/1")
        assert {alert["last"]["run"] for alert in server.call("ListAlerts")["alerts"]} == {"other"}
        assert 'run="old/1"' not in server.get("/metrics")

    gone()
    server.kill()
    server.start()
    gone()
    # Its job is resumed after all: a new run, of which nothing is known.
    client = job(server, "old/1", attempt=1)
    report(client, 100)
    wait_for("it is there", lambda: server.call("GetRun", run="old/1")["step"] == "119")
    assert min(server.series("old/1", "loss")) == 100
    client.close()
    other.close()


def test_renamed_run_keeps_its_name(server: Server) -> None:
    client = job(server, "train-20261125-210719-6635")
    report(client, 0)
    other = job(server, "other", "fedcba9876543210")
    report(other, 0)
    server.run("run", "rename", "train-20261125-210719-6635", "baseline")
    assert sorted(names(server)) == ["baseline", "other"]
    for name, why in (
        ("other", "another run has it"),
        ("no spaces", "must match"),
        ("0" * 32, "must not look like a uuid"),
    ):
        assert why in refused(server, "run", "rename", "baseline", name)
    report(client, 20)
    server.kill()
    server.start()
    report(client, 40)
    wait_for("it goes on", lambda: server.call("GetRun", run="baseline")["step"] == "59")
    client.close()
    server.await_end("baseline")
    client = job(server, "train-20261125-210719-6635", attempt=1)
    report(client, 60)
    wait_for("it is resumed", lambda: server.call("GetRun", run="baseline")["step"] == "79")
    assert sorted(names(server)) == ["baseline", "other"]
    alerts = server.call("ListAlerts")["alerts"]
    assert {alert["last"]["run"] for alert in alerts} == {"baseline", "other"}
    for alert in alerts:
        assert "train-2026" not in alert["last"]["summary"]
    client.close()
    other.close()
