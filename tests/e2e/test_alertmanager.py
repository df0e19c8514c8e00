"""Goal: people get an alert, and its end, by both ways: bellwetherd sends it to an Alertmanager
itself, and Prometheus does by the committed rules.  Alerts of a recording that is imported are sent
only if that is asked for.
Method: real Alertmanager, real Prometheus, a sink behind them.  A recorded failing run is
imported; of a run of two ranks one falls silent and reports again.  The rules look back five
seconds instead of five minutes, so that an end is one within the test.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, wait_for
from scraping import DASHBOARDS, Trainer, prometheus_of
from telling import alertmanager, receiver

FAILING = "gpt-flash-s4"
SLACK = ROOT / "deploy/webhook/slack.json"


class Sink:
    """What people would have been told: (status, labels) of each alert of each notification."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, str]]] = []
        self.chat: list[dict[str, Any]] = []

    def take(self, path: str, body: dict[str, Any]) -> None:
        if path == "/chat":
            self.chat.append(body)
        else:
            self.told.extend((alert["status"], alert["labels"]) for alert in body["alerts"])

    def heard(self, status: str, by_prometheus: bool, **labels: str) -> bool:
        return any(
            said == status and labels.items() <= of.items() and ("instance" in of) == by_prometheus for said, of in self.told
        )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Sink, str]]:
    folder = tmp_path_factory.mktemp("server")
    sink = Sink()
    rules = folder / "rules.yml"
    rules.write_text((DASHBOARDS / "alerts/rules.yml").read_text().replace("[5m]", "[5s]"))
    with receiver(sink.take) as url, alertmanager(folder, url) as address:
        # Longer than a flush waits for a busy disk: else whoever reports would fall silent at each.
        config = (
            "ingest:\n  step_deadline_ms: 1000\n  silence_ms_min: 3000\n"
            f"alerting:\n  alertmanagers:\n    - {{url: 'http://{address}', severity: info, resend_seconds: 1}}\n"
            f"  webhooks:\n    - {{url: '{url}chat', name: chat, template_file: {SLACK}, severity: critical}}\n"
        )
        with Server(folder, config) as server, prometheus_of(server, folder, alertmanager=address, rules=rules):
            yield server, sink, address


def is_slacks_message(message: dict[str, Any]) -> None:
    """https://api.slack.com/reference/messaging/attachments"""
    assert message.keys() == {"text", "attachments"} and 1 <= len(message["attachments"]) <= 10
    for alert in message["attachments"]:
        texts = {"color", "title", "title_link", "fallback", "text"}
        assert alert.keys() == {*texts, "fields"} and all(isinstance(alert[name], str) and alert[name] for name in texts)
        assert alert["title_link"].startswith("http") and re.fullmatch("#[0-9a-f]{6}", alert["color"])
        assert {field["title"] for field in alert["fields"]} >= {"Do", "Runbook"}
        for field in alert["fields"]:
            assert field.keys() == {"title", "value", "short"} and field["value"] and field["short"] is False


def test_a_failing_run_is_told_by_both_ways(told: tuple[Server, Sink, str]) -> None:
    server, sink, address = told
    recording = str(ROOT / f"tests/testdata/runs/{FAILING}.bwrun")
    server.run("run", "import", recording, "--name", "looked-at")
    server.run("run", "import", "--notify", recording)
    for by_prometheus in (False, True):
        wait_for(
            f"told, by Prometheus: {by_prometheus}",
            lambda by_prometheus=by_prometheus: sink.heard(
                "firing", by_prometheus, run=FAILING, alertname="BellwetherDriftGrowing"
            ),
            120,
        )
    with urllib.request.urlopen(f"http://{address}/api/v2/alerts?filter=run%3D{FAILING}", timeout=10) as answer:
        alerts: list[dict[str, Any]] = json.load(answer)
    ours = [alert for alert in alerts if "instance" not in alert["labels"]]
    assert ours and all(alert["annotations"]["summary"] and f"/#/run/{FAILING}" in alert["generatorURL"] for alert in ours)
    critical = f"CRITICAL {FAILING}: "
    wait_for("the chat is told", lambda: any(message["text"].startswith(critical) for message in sink.chat))
    for message in sink.chat:
        is_slacks_message(message)
    assert server.json("alert", "list", "--run", "looked-at", "--firing")["alerts"], "it is judged all the same"
    assert not [said for said in (*sink.told, *sink.chat) if "looked-at" in str(said)]
    metrics = server.get("/metrics")
    assert 'bellwether_notifications_total{channel="alertmanager",result="delivered"}' in metrics
    assert 'bellwether_notifications_total{channel="alertmanager",result="failed"} 0' in metrics


def test_import_notifies_only_on_request_and_stays_marked(tmp_path: Path) -> None:
    sink = Sink()
    recording = str(ROOT / f"tests/testdata/runs/{FAILING}.bwrun")
    with (
        receiver(sink.take) as url,
        Server(tmp_path, f"alerting: {{webhooks: [{{url: '{url}', severity: info}}]}}\n") as server,
    ):
        server.run("run", "import", recording, "--name", "looked-at")
        server.stop()
        server.start()
        server.run("run", "import", "--notify", recording, "--name", "asked-for")
        wait_for("the other is told", lambda: sink.heard("firing", False, run="asked-for", rule="drift"))
        runs = {run["description"]["name"]: run for run in server.json("run", "list")["runs"]}
        assert {name: (run["imported"], run.get("import_notifies", False)) for name, run in runs.items()} == {
            "looked-at": (True, False),
            "asked-for": (True, True),
        }
        assert server.json("run", "get", "looked-at")["imported"]
        assert ", imported" in server.run("run", "list") and ", imported" in server.run("run", "get", "looked-at")
        alerts = server.json("alert", "list", "--run", "looked-at")["alerts"]
        assert alerts and all(alert["last"]["imported"] for alert in alerts)
        page = server.get("/metrics")
        assert 'run="asked-for"' in page and 'run="looked-at"' not in page
        server.stop()
    assert {labels["run"] for _, labels in sink.told} == {"asked-for"}


def test_an_end_is_told_by_both_ways(told: tuple[Server, Sink, str]) -> None:
    server, sink, _ = told
    missing = {"run": "silent", "alertname": "BellwetherRanksMissing"}
    with Trainer(server, "silent", rank=0, world=2) as talker, Trainer(server, "silent", rank=1, world=2) as other:
        for _ in range(20):
            talker.report()
            other.report()

        def told_of_silence(by_prometheus: bool) -> bool:
            talker.report()
            return sink.heard("firing", by_prometheus, **missing)

        for way in (False, True):
            wait_for(f"the silence is told, by Prometheus: {way}", lambda way=way: told_of_silence(way), 120)

        def told_of_its_end(by_prometheus: bool) -> bool:
            other.step = talker.step
            talker.report()
            other.report()
            return sink.heard("resolved", by_prometheus, **missing)

        for way in (False, True):
            wait_for(f"its end is told, by Prometheus: {way}", lambda way=way: told_of_its_end(way), 120)
