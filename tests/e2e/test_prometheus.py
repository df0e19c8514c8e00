"""Goal: every query of the dashboards and every alert rule has data from a real Prometheus that
scrapes the real bellwetherd.  What the server concludes fires the rule that is made for it, with
the server's labels.  What it reports as information is no warning there, and nothing becomes
critical.
Method: recorded runs that fail by drift, norm, logits and loss are imported.  Of two runs that
live, one drifts and is restarted, and of the other nearly all is wrong.  The loss of a third has a
spike, and a rule of our own finds it too.  Rules are asked without their threshold, so that those
that rightly stay quiet show that their series exist.  The page of metrics is too small for all
heads, so that an alert of the server itself fires; its rules are read again, and it is asked.
"""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, wait_for
from scraping import DASHBOARDS, Prometheus, Trainer, prometheus_of
from telling import receiver

RECORDED = ("gpt-flash-s4", "gpt-flash-hp-at-sigma30-s4")
SERIES = 2900  # Of some 3,080: not all single heads fit.
VARIABLES = {"$__rate_interval": "20s", "$__interval": "15s", "$__range": "5m", "$run": "drifts", "$layer": ".*", "$instance": ".*"}


def dashboard_queries() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted((DASHBOARDS / "grafana").glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            targets = panel.get("targets", [])  # Headings have none.
            found |= {f"{path.stem}: {panel['title']} {t['refId']}": t["expr"] for t in targets}
        found |= {f"{path.stem}: annotation {a['name']}": a["expr"] for a in board["annotations"]["list"]}
    for name, expr in found.items():
        for variable, value in VARIABLES.items():
            expr = expr.replace(variable, value)
        found[name] = expr
    return found


def without_threshold(expr: str) -> str:
    measured = re.fullmatch(r"(.*?) (?:==|[<>]=?) [0-9.e+]+(?: unless .*)?", expr, re.DOTALL)
    assert measured, expr
    return measured[1]


# Runs with one illness each, by the rule that names it: what is wrong from the second step on, and what is late.
ILL: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "ties": ({"tied_rows_bf16": 950.0}, {}),
    "gradient": ({}, {"grad_norm": 12.0}),
    "frozen": ({"tensor_moved": 0.0}, {}),
    "sequences": ({"loss_sequence_max": 3.0}, {"loss_sequence_max": 90.0}),
    "parameters": ({"tensor_moved": 1.0}, {"tensor_grad_sumsq": 1e6}),
    "corruption": ({}, {"wq_sigma": 2e5}),
    "learning": ({"loss": 2.0}, {}),
    "nonfinite": ({}, {"loss": math.nan}),
    "logits": ({}, {"logit_max": 5000.0}),
}
LATE, END = 3400, 3500


@contextmanager
def breaking(server: Server) -> Iterator[None]:
    """Those of ILL, and a run of two ranks whose hook is slow, whose kernel and lm_head break a law and whose
    ranks disagree.  An expert loses its tokens, a number of its own is beyond its limit, and one rank falls silent."""
    without = ("key_leak_sum", "key_gradient_sum")
    for rule, (always, late) in ILL.items():
        with Trainer(server, rule, without) as alone:
            alone.report()  # What the first sample has is how the run was found.
            while alone.step < END:
                alone.report(**{**always, **(late if alone.step >= LATE else {})})
    with (
        Trainer(server, "breaks", without, rank=0, world=2, experts=2) as talker,
        Trainer(server, "breaks", without, rank=1, world=2, experts=2) as other,
    ):
        while other.step < END:
            load = 0.0 if other.step >= LATE else 100.0
            for trainer, wq_sigma in ((talker, 2.0), (other, 3.0)):
                trainer.report(wq_sigma=wq_sigma, hook_seconds=0.005, law_a3=100.0, law_difference=100.0, clip_share=2.0, expert_load=load)
        talker.report()
        yield


@contextmanager
def spiking(server: Server) -> Iterator[None]:
    """A run whose loss has one spike: information, by the server's own rule and by ours."""
    with Trainer(server, "spikes") as trainer:
        while trainer.step < 1500:
            trainer.report()
        trainer.report(loss=4.0)
        trainer.report(loss=4.0)
        yield


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Trainer, Server]]:
    folder = tmp_path_factory.mktemp("server")
    with receiver(lambda path, body: None) as webhook:
        config = (
            "ingest:\n  step_deadline_ms: 1000\n  silence_ms_min: 500\n"
            f"limits:\n  exported_series_max: {SERIES}\n"
            f"alerting:\n  webhooks:\n    - url: {webhook}\n"
        )
        yield from failing_runs(folder, config)


def failing_runs(folder: Path, config: str) -> Iterator[tuple[Prometheus, Trainer, Server]]:
    (folder / "own_rules.yml").write_text(
        "rules:\n- {name: our_rule, signal: loss, detector: level, above: 2.5, hold_batches: 1, stage: 1, severity: info, advice: look}\n"
    )
    with Server(folder, config, f"--rules.file={folder / 'own_rules.yml'}") as server, prometheus_of(server, folder) as prometheus:
        for name in RECORDED:
            server.run("run", "import", "--notify", str(ROOT / f"tests/testdata/runs/{name}.bwrun"))
        with Trainer(server, "drifts", experts=2) as first:
            first.report()
            wait_for("the first attempt is scraped", lambda: prometheus.has('bellwether_run_attempt{run="drifts"}'))
            with Trainer(server, "drifts", attempt=1, experts=2) as second:
                while second.step < 1500:
                    second.drift()
                with breaking(server), spiking(server):
                    yield prometheus, second, server


def test_every_query_of_the_dashboards_has_data(scraped: tuple[Prometheus, Trainer, Server]) -> None:
    prometheus, trainer, server = scraped
    assert server.process is not None
    missing = dashboard_queries()
    assert len(missing) > 60

    def all_have_data() -> bool:
        trainer.drift()  # Rates are of what goes on.
        server.run("run", "list")
        # Granted or refused, it counts.
        propose = [*server.program("bellwether"), "--server", server.grpc, "action", "propose", "drifts", "stop"]
        subprocess.run(propose, capture_output=True, check=False)
        server.process.send_signal(signal.SIGHUP)
        for name, expr in list(missing.items()):
            if prometheus.has(expr):
                del missing[name]
        return not missing

    try:
        wait_for("data", all_have_data, 120)
    except AssertionError:
        pytest.fail(f"no data: {missing}")
    assert not prometheus.has("bellwether_no_such_metric")


def test_every_rule_has_data_and_server_alerts_fire(scraped: tuple[Prometheus, Trainer, Server]) -> None:
    prometheus, *_ = scraped
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    queries = {rule["name"]: without_threshold(rule["query"]) if rule["type"] == "alerting" else rule["name"] for rule in rules}
    # This server has no certificate and is of no cluster: tests/fault/test_tls.py and
    # tests/cluster/test_two_databases.py ask those that are.
    for absent in ("BellwetherCertificateExpiring", "BellwetherDatabaseAway"):
        del queries[absent]
    concluded = {name for name, expr in queries.items() if "bellwether_alert_active" in expr}
    assert len(queries) > 15 and len(concluded) == 20

    def quiet() -> dict[str, str]:
        firing = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"}
        return {name: expr for name, expr in queries.items() if not prometheus.has(expr) or name in concluded - firing}

    try:
        wait_for("data", lambda: not quiet(), 120)
    except AssertionError:
        pytest.fail(f"no data, or does not fire: {quiet()}")


def test_firing_alerts_have_the_servers_labels_and_severity(scraped: tuple[Prometheus, Trainer, Server]) -> None:
    prometheus, _, server = scraped

    def told_by_server() -> set[frozenset[tuple[str, str]]]:
        active = re.findall(r"bellwether_alert_active\{(.*)\} 1", server.get("/metrics"))
        return {frozenset(re.findall(r'(\w+)="([^"]*)"', labels)) for labels in active}

    def told_by_prometheus() -> set[frozenset[tuple[str, str]]]:
        alerts = [alert["labels"] for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"]
        own = ("alertname", "instance", "job")
        return {frozenset((name, of[name]) for name in of if name not in own) for of in alerts if "rule" in of}

    def told_before() -> set[tuple[str, str, str]]:
        told = set()
        for alert in server.call("ListAlerts", limit=1000)["alerts"]:
            run, key = alert["last"]["run"], alert["last"]["key"]
            for transition in server.call("GetAlert", run=run, key=key)["alert"]["history"]:
                told.add((run, transition["rule"], transition["severity"].removeprefix("SEVERITY_").lower()))
        return told

    def fire_alike() -> bool:
        told, fires = told_by_server(), told_by_prometheus()
        # What was told before fires as well: the rules look back five minutes.
        severities = {(dict(of)["run"], dict(of)["rule"], dict(of)["severity"]) for of in fires}
        return told <= fires and severities <= told_before()

    wait_for("what the server tells fires, and nothing worse", fire_alike)
    fires = told_by_prometheus()
    assert {dict(of)["severity"] for of in fires} == {"info", "warning", "critical"}
    spikes = {(dict(of)["rule"], dict(of)["severity"]) for of in fires if ("run", "spikes") in of and ("rule", "silent") not in of}
    assert spikes == {("loss", "info"), ("our_rule", "info")}
