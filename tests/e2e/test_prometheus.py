"""Goal: every query of the dashboards and every alert rule has data from a real Prometheus that
scrapes the real bellwetherd; what the server concludes fires the rule that is made for it.
Method: recorded runs that fail by drift, norm, logits and loss are imported; of two runs that
live, one drifts and is restarted, and of the other nearly all is wrong.  Rules are asked without their
threshold, so that those that rightly stay quiet show that their series exist.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, free_port, wait_for

from scraping import DASHBOARDS, Prometheus, Trainer, prometheus_of

RECORDED = ("gpt-flash-s4", "gpt-flash-hp-at-sigma30-s4")
VARIABLES = {"$__rate_interval": "20s", "$__interval": "15s", "$run": "drifts", "$layer": ".*"}
def dashboard_queries() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted((DASHBOARDS / "grafana").glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            found |= {f"{path.stem}: {panel['title']} {t['refId']}": t["expr"] for t in panel["targets"]}
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


@contextmanager
def breaking(server: Server) -> Iterator[None]:
    """A run of two ranks whose rounding ties, whose hook is slow and whose ranks disagree; its gradients
    jump, its loss is no number, and one rank falls silent: six of the server's rules."""
    without = ("key_leak_sum", "key_gradient_sum")
    with Trainer(server, "breaks", without, rank=0, world=2) as talker, Trainer(server, "breaks", without, rank=1, world=2) as other:
        while other.step < 1600:
            grad_norm = 1.0 if other.step < 1500 else 100.0
            for trainer, wq_sigma in ((talker, 2.0), (other, 3.0)):
                trainer.report(tied_rows_bf16=950.0, hook_seconds=0.005, wq_sigma=wq_sigma, grad_norm=grad_norm)
        talker.report(loss=math.nan)
        yield


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Trainer]]:
    folder = tmp_path_factory.mktemp("server")
    config = (
        "ingest:\n  step_deadline_ms: 1000\n  silence_ms_min: 500\n"
        f"alerting:\n  webhooks:\n    - url: http://127.0.0.1:{free_port()}/nobody\n"
    )
    with Server(folder, config) as server, prometheus_of(server, folder) as prometheus:
        for name in RECORDED:
            server.run("run", "import", str(ROOT / f"tests/testdata/runs/{name}.bwrun"))
        with Trainer(server, "drifts") as first:
            first.report()
            wait_for("the first attempt is scraped", lambda: prometheus.has('bellwether_run_attempt{run="drifts"}'))
            with Trainer(server, "drifts", attempt=1) as second:
                while second.step < 1500:
                    second.drift()
                with breaking(server):
                    yield prometheus, second


def test_every_query_of_the_dashboards_has_data(scraped: tuple[Prometheus, Trainer]) -> None:
    prometheus, trainer = scraped
    missing = dashboard_queries()
    assert len(missing) > 25

    def all_have_data() -> bool:
        trainer.drift()  # Rates are of what goes on.
        for name, expr in list(missing.items()):
            if prometheus.has(expr):
                del missing[name]
        return not missing

    try:
        wait_for("data", all_have_data, 60)
    except AssertionError:
        pytest.fail(f"no data: {missing}")
    assert not prometheus.has("bellwether_no_such_metric")


def test_every_rule_has_data_and_what_the_server_concludes_fires(scraped: tuple[Prometheus, Trainer]) -> None:
    prometheus, _ = scraped
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    queries = {rule["name"]: without_threshold(rule["query"]) if rule["type"] == "alerting" else rule["name"] for rule in rules}
    concluded = {name for name, expr in queries.items() if "bellwether_alert_active" in expr}
    assert len(queries) > 15 and len(concluded) == 10

    def quiet() -> dict[str, str]:
        firing = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"}
        return {name: expr for name, expr in queries.items() if not prometheus.has(expr) or name in concluded - firing}

    try:
        wait_for("data", lambda: not quiet(), 60)
    except AssertionError:
        pytest.fail(f"no data, or does not fire: {quiet()}")
