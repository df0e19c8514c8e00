"""Goal: alerts of a failing run become actions as its policy says, by file, by call and by reload; the
alert tells of them, metrics count them, the command exports their audit; observing changes nothing.
Method: a recorded failing run is sent by the real client to the real server; the test is the trainer.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from bellwether_process import ROOT, Server, wait_for
from telling import receiver

from bellwether.client import Block, RunClient, RunOptions

from conftest import generated_protos as generated_protos
from recording import Recording

CENTER_K = 2  # ActionKind of actions.proto
POLICY = """\
mode: {mode}
rules:
- when: {{rule: [drift, ties, norm]}}
  confirm_steps: {confirm}
  ladder: [{{do: attention.center_k, scope: layers, trial_steps: 200}}]
"""


class Trainer:
    """Sends the recorded run, and applies at once what it is handed."""

    def __init__(self, server: Server, run: str, announces: bool = False) -> None:
        self.announces = announces  # What it applied, as the real one does.
        self.recorded = Recording(ROOT / "tests/testdata/tiny/bf16-1.bwrun")
        described = self.recorded.hello.run
        self.client = RunClient(
            RunOptions(
                run=run, layers=described.layout.layers, heads=described.layout.heads, server=server.grpc,
                attention_kernel=described.attention.kernel, score_dtype=described.attention.score_dtype,
                ring_frames=4096, actions_mask=1 << CENTER_K,
            )
        )  # fmt: skip
        self.got: list[dict[str, Any]] = []
        self.frames = iter(self.recorded.frames)
        self.step = 0

    def train(self, steps: int = 1_000_000) -> None:
        for _ in range(steps):
            frame = next(self.frames, None)
            if frame is None:
                break
            blocks = [
                Block(self.recorded.names[b.signal], list(b.values), b.layer_begin, b.layer_count, b.head_begin,
                      b.head_count)
                for b in frame.blocks
            ]  # fmt: skip
            assert self.client.push(frame.step, blocks, time_unix_ns=frame.time_unix_ns)
            self.step = frame.step
            if frame.step % 200 == 0:
                self.obey()
        self.obey()

    def obey(self) -> None:
        assert self.client.flush(60), self.client.counters()
        for payload in self.client.poll()[1]:
            self.got.append(json.loads(payload))
            if self.announces:
                assert self.client.push_event(self.step, "centring_on")
            self.client.push_action_result(self.got[-1]["id"], self.step, True, "")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def actions(server: Server, run: str) -> list[dict[str, Any]]:
    return list(server.call("ListActions", run=run)["actions"])


def await_judged(server: Server, run: str, step: int) -> None:
    """Acknowledged is in the log; what is concluded of it comes behind that."""
    wait_for(
        f"step {step} is judged",
        lambda: int(server.call("GetRun", run=run).get("step", -1)) == step,
    )


def without_advice(log: list[dict[str, Any]], run: str) -> list[dict[str, Any]]:
    for transition in log:
        transition.pop("advice")
        transition.pop("do_first")
        transition.pop("run")
        transition["summary"] = transition["summary"].replace(run, "")
        transition.pop("siblings", None)
    return log


def test_a_proposal_is_approved_applied_and_told_everywhere(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yml"
    policy.write_text(POLICY.format(mode="propose", confirm=0))
    with Server(tmp_path, "", f"--policy.file={policy}") as server:
        with Trainer(server, "ill") as trainer:
            trainer.train()
            await_judged(server, "ill", trainer.step)
            trainer.obey()
            assert trainer.got == [], "a person decides"
            waiting = wait_for("a proposal", lambda: actions(server, "ill"))
            action = waiting[0]
            assert action["state"] == "ACTION_STATE_PROPOSED"
            assert action["asked_by"] == "policy"
            # The alert says so, with its cost and how it is approved.
            alert = server.call("GetAlert", run="ill", key=action["alert_key"])
            assert [a["id"] for a in alert["actions"]] == [action["id"]]
            advice = " ".join(t["advice"] for t in alert["alert"]["history"])
            assert f"bellwether action approve ill {action['id']}" in advice
            assert action["cost"] in advice
            assert action["id"] in server.run("alert", "get", "ill", action["alert_key"])
            server.run("action", "approve", "ill", action["id"], "--by", "bob", "--reason", "go on")
            trainer.obey()
            wait_for("it is handed over", lambda: trainer.obey() or trainer.got)
            assert trainer.got[0]["id"] == action["id"]
            assert trainer.got[0]["kind"] == "ACTION_KIND_CENTER_K"
            assert trainer.client.flush(60)
            wait_for(
                "applied", lambda: actions(server, "ill")[0]["state"] == "ACTION_STATE_APPLIED"
            )
        exported = json.loads(server.run("action", "list", "ill", "-o", "json"))
        history = exported["actions"][0]["history"]
        assert [(c["state"].removeprefix("ACTION_STATE_"), c["by"]) for c in history[:2]] == [
            ("PROPOSED", "policy"), ("APPROVED", "bob")]  # fmt: skip
        for counted in (
            'bellwether_actions_total{kind="attention.center_k",result="applied"} 1',
            'bellwether_action_results_total{result="taken"} 1',
        ):
            # Counted once the action is as it was seen above.
            wait_for(counted, lambda counted=counted: counted in server.get("/metrics"))


def test_repair_that_disables_a_rule_keeps_its_alert(tmp_path: Path) -> None:
    """The head goes on growing as recorded, while the rule of drift finds nothing any more."""
    policy = tmp_path / "policy.yml"
    policy.write_text(POLICY.format(mode="enforce", confirm=0))
    with (
        Server(tmp_path, "", f"--policy.file={policy}") as server,
        Trainer(server, "ill", announces=True) as trainer,
    ):
        trainer.train()
        await_judged(server, "ill", trainer.step)
        assert [a["kind"] for a in trainer.got][:1] == ["ACTION_KIND_CENTER_K"]
        ill = server.call("GetAlert", run="ill", key=actions(server, "ill")[0]["alert_key"])["alert"]
        told = ill["history"]
        assert any("under repair since step" in t["summary"] for t in told)
        assert {t["state"] for t in told[:-1]} == {"ALERT_STATE_FIRING"}
        assert len({(t["first_step"], t["rule"]) for t in told}) == 1
        assert len({t["cause"] for t in told if t["state"] == "ALERT_STATE_FIRING"}) == 1
        ranks = ["SEVERITY_INFO", "SEVERITY_WARNING", "SEVERITY_CRITICAL"]
        severities = [ranks.index(t["severity"]) for t in told]
        assert severities == sorted(severities), "it does not fall because a rule is off"
        reasons = [c["reason"] for a in actions(server, "ill") for c in a["history"]]
        assert not [r for r in reasons if r.startswith("the alert is over;")]


def test_actions_of_an_ended_run_expire(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yml"
    policy.write_text(POLICY.format(mode="propose", confirm=0))
    with Server(tmp_path, "", f"--policy.file={policy}") as server:
        server.run("run", "import", str(ROOT / "tests/testdata/tiny/bf16-1.bwrun"), "--name", "imported")
        made = actions(server, "imported")
        assert {a["state"] for a in made} == {"ACTION_STATE_EXPIRED"}
        assert made[-1]["history"][-1]["reason"] in ("the run has ended", "the alert has resolved")
        for told in server.call("ListAlerts", run="imported")["alerts"]:
            key = told["last"]["key"]
            one = server.call("GetAlert", run="imported", key=key)["alert"]
            assert "action approve" not in told["last"]["advice"] + one["last"]["advice"]
        refused = server.run("action", "approve", "imported", made[0]["id"], exit_code=1)
        assert refused == ""
        server.run("policy", "set", "imported", "--mode", "propose")
        assert actions(server, "imported") == made
        server.kill()
        server.start()
        server.await_applied()
        assert actions(server, "imported") == made
        # Nor does a live one's proposal outlive its goodbye.
        with Trainer(server, "live") as trainer:
            trainer.train()
            await_judged(server, "live", trainer.step)
            assert "ACTION_STATE_PROPOSED" in [a["state"] for a in actions(server, "live")]
        server.await_end("live")
        assert "ACTION_STATE_PROPOSED" not in [a["state"] for a in actions(server, "live")]


def test_proposal_after_confirm_steps_reaches_the_webhooks(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yml"
    policy.write_text(POLICY.format(mode="propose", confirm=100))
    advice: list[str] = []

    def advise(_: str, body: dict[str, Any]) -> None:
        advice.append(" ".join(alert["annotations"]["advice"] for alert in body["alerts"]))

    with (
        receiver(advise) as url,
        Server(
            tmp_path, f"alerting:\n  webhooks:\n    - url: {url}\n", f"--policy.file={policy}"
        ) as server,
        Trainer(server, "ill") as trainer,
    ):
        trainer.train(10)
        while not server.call("ListActions", run="ill").get("actions"):
            assert trainer.step < 6000
            trainer.train(10)
            fires = [
                a["last"]["severity"]
                for a in server.call("ListAlerts", run="ill").get("alerts", [])
            ]
            if {"SEVERITY_WARNING", "SEVERITY_CRITICAL"} & set(fires):
                # Else a receiver that is slow would be told of the alert and its proposal at once.
                wait_for("the webhook is told that it fires", lambda: advice)
        action = actions(server, "ill")[0]
        approve = f"bellwether action approve ill {action['id']}"
        told = wait_for("the webhook is told", lambda: [a for a in advice if approve in a])
        assert action["cost"] in told[0]
        assert len(told) == 1
        assert approve not in advice[0], "the alert fired before"


def test_enforced_by_reload_and_observed_again_for_one_run(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yml"
    policy.write_text("mode: observe\n")
    with (
        Server(tmp_path, "", f"--policy.file={policy}") as server,
        Trainer(server, "ill") as trainer,
    ):
        trainer.train(50)
        assert server.call("GetPolicy", run="ill")["mode"] == "MODE_OBSERVE"
        policy.write_text("mode: whatever\n")
        assert server.process is not None
        server.process.send_signal(signal.SIGHUP)
        wait_for("it is refused", lambda: "policy stay" in server.log())
        policy.write_text(POLICY.format(mode="enforce", confirm=40))
        server.process.send_signal(signal.SIGHUP)
        wait_for(
            "it is in force", lambda: server.call("GetPolicy", run="ill")["mode"] == "MODE_ENFORCE"
        )
        trainer.train()
        wait_for("it is handed over", lambda: trainer.obey() or trainer.got)
        assert [a["kind"] for a in trainer.got][:1] == ["ACTION_KIND_CENTER_K"]
        server.run("policy", "set", "ill", "--mode", "observe")
        told = server.call("ListActions", run="ill")
        assert [e["what"] for e in told["audit"] if e["by"] != "server"] == ["set_policy"]
        server.kill()
        server.start()
        server.await_applied()
        assert server.call("GetPolicy", run="ill")["mode"] == "MODE_OBSERVE"
        assert server.call("GetPolicy", run="ill")["own"]


def test_observing_makes_nothing_and_acting_judges_nothing_else(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        for run, mode in (("observed", ""), ("proposed", "propose")):
            with Trainer(server, run) as trainer:
                trainer.train(1)
                if mode:
                    wait_for("the run is there", lambda: server.call("ListRuns")["total"] == 2)
                    server.run("policy", "set", run, "--mode", mode)
                trainer.train()
                await_judged(server, run, trainer.step)
                trainer.obey()
                assert trainer.got == []
        assert actions(server, "observed") == []
        assert actions(server, "proposed") != []
        logs = [without_advice(server.alert_log(run), run) for run in ("observed", "proposed")]
        assert logs[0] and logs[0] == logs[1]
