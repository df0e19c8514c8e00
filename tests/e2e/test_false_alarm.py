"""Goal: an illness that was called a false alarm is not told again in that run, whatever key it
has, after a restart too.  Other illnesses and a worse one are told.  Nothing is proposed for it, and
watchers of the run are told at once.  The mark can be taken back, and stays to be seen.  The run
becomes a healthy case of the benchmark.
Method: a job that reports losses of its own choice to a real bellwetherd with three rules and a
webhook; a recorded run, which `bellwether alert false-alarm` exports and `instabilities` scores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, wait_for
from telling import receiver

from bellwether.client import Block, RunClient, RunOptions

RECORDED = "gpt-flash-s4"
RUN = "job/1"
RULES = "".join(
    f"- {{name: {name}, signal: {signal}, detector: level, above: {above}, stage: 5, "
    f"severity: {severity}, cause: {cause}, batch_steps: 1, hold_batches: 1, "
    "resolve_steps: 3, cooldown_steps: 0}\n"
    for name, signal, above, severity, cause in (
        ("loss_high", "loss", 3, "warning", "high loss"),
        ("loss_lost", "loss", 6, "critical", "high loss"),
        ("norm_high", "grad_norm", 5, "warning", "high norm"),
    )
)


POLICY = "{mode: propose, rules: [{confirm_steps: 0, ladder: [{do: checkpoint.now}]}]}\n"


class Job:
    """Reports a loss and a gradient norm."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = RunClient(RunOptions(RUN, layers=1, heads=1, server=server.grpc))
        self._step = 0

    def report(self, loss: float, norm: float = 1.0, steps: int = 10) -> None:
        for _ in range(steps):
            assert self._client.push(
                self._step, [Block("loss", [loss]), Block("grad_norm", [norm])]
            )
            self._step += 1
        assert self._client.flush(60)
        wait_for(
            "it is judged",
            lambda: int(self._server.call("GetRun", run=RUN)["step"]) == self._step - 1,
        )

    def close(self) -> None:
        self._client.close()


class Told:
    """The rules whose alerts each notification has, as firing and as resolved."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, set[str]]] = []
        self.others = 0  # That fire, and have not changed.

    def take(self, _: str, body: dict[str, Any]) -> None:
        told: dict[str, set[str]] = {"firing": set(), "resolved": set()}
        for alert in body["alerts"]:
            told[alert["status"]].add(alert["labels"]["rule"])
        self.others = body["otherAlertsFiring"]
        self.bodies.append(told)

    def of(self, state: str) -> set[str]:
        return set().union(*(body[state] for body in self.bodies))

    def await_firing(self, *rules: str) -> None:
        def told() -> bool:
            firing = self.bodies[-1]["firing"] if self.bodies else {""}
            return firing <= set(rules) and len(firing) + self.others == len(rules)

        wait_for(f"{rules} are told", told)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[Server, Told]]:
    told = Told()
    (tmp_path / "rules.yml").write_text(
        "thresholds: {context: {warmup_steps: 0}}\n"
        f"off: [loss, gradient, learning, parameters, silent, overhead]\nrules:\n{RULES}"
    )
    (tmp_path / "policy.yml").write_text(POLICY)
    with receiver(told.take) as url:
        config = f"alerting:\n  webhooks:\n    - {{url: '{url}', severity: info}}\n"
        files = (f"--{name}.file={tmp_path / name}.yml" for name in ("rules", "policy"))
        with Server(tmp_path, config, *files) as server:
            yield server, told


def firing(server: Server) -> dict[str, dict[str, Any]]:
    """By rule."""
    alerts = server.call("ListAlerts", run=RUN, firing_only=True)["alerts"]
    return {alert["last"]["rule"]: alert for alert in alerts}


def test_marked_illness_is_not_told_again(told: tuple[Server, Told]) -> None:
    server, heard = told
    job = Job(server)
    job.report(2)
    job.report(4)
    heard.await_firing("loss_high")
    first = firing(server)["loss_high"]["last"]["key"]
    server.run("alert", "false-alarm", RUN, first, "--reason", "new data", "--by", "ann")
    run = server.call("GetRun", run=RUN)
    assert (run["stage"], run["alerts_firing"]) == (0, 0)
    job.report(2)
    server.kill()
    server.start()
    job.report(4)
    again = firing(server)["loss_high"]
    assert again["last"]["key"] != first and again["muted"]
    assert (again["false_alarm"]["by"], again["false_alarm"]["reason"]) == ("ann", "new data")
    assert again["false_alarm"]["key"] == first
    # Another illness is told, without the one that is muted.
    job.report(4, norm=9)
    heard.await_firing("norm_high")
    assert server.call("ListRuns")["runs"][0]["alerts_firing"] == 1
    assert heard.of("resolved") == set()
    # It is worse than what was judged.
    job.report(9, norm=9)
    heard.await_firing("norm_high", "loss_lost")
    job.report(2)
    heard.await_firing()
    # Taken back.
    server.run("alert", "false-alarm", RUN, again["last"]["key"], "--undo", "--by", "bob")
    job.report(4)
    heard.await_firing("loss_high")
    shown = server.run("alert", "get", RUN, firing(server)["loss_high"]["last"]["key"])
    assert "new data" in shown and "undone" in shown and "bob" in shown
    job.close()


def proposals(server: Server) -> list[tuple[str, str]]:
    """State and last reason of each action."""
    actions = server.call("ListActions", run=RUN)["actions"]
    return [(action["state"][13:], action["history"][-1]["reason"]) for action in actions]


def test_nothing_is_proposed_for_a_false_alarm(told: tuple[Server, Told]) -> None:
    server, _ = told
    job = Job(server)
    job.report(2)
    job.report(4)
    key = firing(server)["loss_high"]["last"]["key"]
    assert [state for state, _ in proposals(server)] == ["PROPOSED"]
    server.run("alert", "false-alarm", RUN, key, "--reason", "new data", "--by", "ann")
    withdrawn = ("EXPIRED", "a false alarm: new data")
    assert proposals(server) == [withdrawn]
    assert "action approve" not in server.run("alert", "get", RUN, key)
    job.report(2)
    server.kill()
    server.start()
    job.report(4)
    again = firing(server)["loss_high"]["last"]
    assert again["key"] != key and "the policy proposes" not in again["advice"]
    assert proposals(server) == [withdrawn]
    # Taken back it is as before.
    server.run("alert", "false-alarm", RUN, again["key"], "--undo")
    assert [state for state, _ in proposals(server)] == ["EXPIRED", "PROPOSED"]
    assert server.call("ListActions", run=RUN)["actions"][1]["alert_key"] == again["key"]
    job.close()


def test_watchers_are_told_of_a_mark_at_once(told: tuple[Server, Told]) -> None:
    server, _ = told
    job = Job(server)
    job.report(4)
    key = firing(server)["loss_high"]["last"]["key"]
    watch = [*server.program("bellwether"), "--server", server.grpc, "run", "watch", RUN]
    stages: list[int] = []
    with subprocess.Popen(
        [*watch, "--interval", "100ms", "-o", "json"], stdout=subprocess.PIPE, text=True
    ) as watcher:

        def read() -> None:
            for line in watcher.stdout or ():
                stages.append(json.loads(line)["run"]["stage"])

        reader = threading.Thread(target=read)
        reader.start()
        try:
            # No sample comes meanwhile.
            wait_for("it is ill", lambda: stages and stages[-1] == 5)
            server.run("alert", "false-alarm", RUN, key, "--reason", "new data")
            wait_for("the mark is told", lambda: stages[-1] == 0)
            server.run("alert", "false-alarm", RUN, key, "--undo")
            wait_for("the undoing is told", lambda: stages[-1] == 5)
        finally:
            watcher.kill()
            reader.join()
    job.close()


def test_exported_case_has_the_sampling_of_its_job(told: tuple[Server, Told]) -> None:
    server, _ = told
    job = {"layers": 1, "heads": 1, "server": server.grpc}
    # The loss is told in each step.
    for run, every in (("told", 20), ("seen", 10), ("each", 1)):
        with RunClient(RunOptions(run, **job)) as client:
            for step in range(100):
                blocks = [Block("loss", [4 if step > 50 else 2])]
                if step % 10 == 0 and run != "each":
                    blocks.append(Block("wq_sigma", [3]))
                if step % 10 == 0 and run == "told":
                    blocks.append(Block("sampling_period", [20 if step > 30 else 10]))
                assert client.push(step, blocks)
            assert client.flush(60)
        wait_for("it fires", lambda run=run: server.call("ListAlerts", run=run)["alerts"])
        [alert] = server.call("ListAlerts", run=run)["alerts"]
        cases = server.folder / run
        words = ("false-alarm", run, alert["last"]["key"], "--reason", "new", "--export")
        server.run("alert", *words, str(cases))
        [truth] = cases.glob("*.json")
        assert json.loads(truth.read_text())["every"] == every


def test_export_is_a_healthy_case_of_the_benchmark(tmp_path: Path) -> None:
    cases = tmp_path / "cases"
    with Server(tmp_path) as server:
        server.run("run", "import", str(ROOT / f"tests/testdata/runs/{RECORDED}.bwrun"))
        alert = server.call("ListAlerts", run=RECORDED)["alerts"][0]["last"]
        words = (
            "alert",
            "false-alarm",
            RECORDED,
            alert["key"],
            "--reason",
            "a test of the kernel",
            "--by",
            "ann",
        )
        server.run(*words, "--export", str(cases))
        series = server.series(RECORDED, "loss", 0, 0)
        run = server.call("GetRun", run=RECORDED)
        assert run["alerts_firing"] < len(server.call("ListAlerts", run=RECORDED)["alerts"])
    [truth_file] = cases.glob("*.json")
    assert sorted(path.suffix for path in cases.iterdir()) == [".bwrun", ".csv", ".json"]
    assert truth_file.stem.startswith(RECORDED)
    truth = json.loads(truth_file.read_text())
    assert (truth["cause"], truth["onset"]) == ("healthy", None)
    [said] = truth["false_alarms"]
    assert (said["by"], said["reason"]) == ("ann", "a test of the kernel")
    assert (said["key"], said["step"]) == (alert["key"], int(alert["step"]))
    lines = truth_file.with_suffix(".csv").read_text().splitlines()
    assert lines[0] == "step,loss,grad_norm"
    losses = {int(step): float(loss) for step, loss, _ in (line.split(",") for line in lines[1:])}
    assert losses == pytest.approx(series, nan_ok=True)

    scored = subprocess.run(
        [sys.executable, "-m", "instabilities", "score", str(cases), "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert scored.returncode == 0, scored.stderr
    ours = json.loads(scored.stdout)["monitors"]["bellwether"]
    healthy = ours["splits"]["field"]["healthy"]
    assert healthy["runs"] == 1 and healthy["steps"] == truth["steps"]
    assert healthy["warnings"] >= 1, "what was told of it is a false alarm"
    assert ours["runs"][0]["family"] == "healthy"
