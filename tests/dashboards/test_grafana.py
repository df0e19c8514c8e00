"""Goal: Grafana's boards are what their scripts write, keep the rules of good boards, show the layer x
head matrix as it is meant, and can be provisioned and mixed in as they lie here.
Method: the boards are written again and compared; every expression is read by promtool; the mixin is evaluated
by jsonnet. The matrix goes through Grafana's own transformation code, values through its words and colours
(@grafana/data in Node).
No Grafana runs here.  tests/e2e/test_prometheus.py asks a real Prometheus every query.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import _jsonnet
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "dashboards"
GRAFANA = DASHBOARDS / "grafana"
NODE = Path(__file__).resolve().parent / "grafana"
BOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(GRAFANA.glob("*.json"))}


needs_grafana_code = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").is_dir(), reason=f"npm ci in {NODE}"
)


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that show something: headings do not."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: dict[str, Any]) -> dict[str, str]:
    found = {f"{p['title']} {t['refId']}": t["expr"] for p in panels(board) for t in p["targets"]}
    return found | {f"annotation {a['name']}": a["expr"] for a in board["annotations"]["list"]}


def raw_counters(expr: str) -> set[str]:
    """Counters that are read otherwise than by rate over an interval that fits the zoom."""
    counters = set(re.findall(r"\b\w+_(?:total|bucket)\b", expr))
    fits = r"\brate\({}(\{{[^}}]*\}})?\[\$__rate_interval\]\)"
    as_alerts_do = r"\bincrease\({}(\{{[^}}]*\}})?\[1[05]m\]\)"  # Over the window of the alert.
    return {c for c in counters if not any(re.search(form.format(c), expr) for form in (fits, as_alerts_do))}


def missing_variables(board: dict[str, Any]) -> set[str]:
    """Variables of expressions that the board does not define."""
    own = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(expressions(board).values())))
    return {name for name in used if not name.startswith("__")} - own


def refused_by_prometheus(exprs: dict[str, str], folder: Path) -> str:
    """What promtool says against the expressions, as recording rules."""
    rules = []
    for number, expr in enumerate(exprs.values()):
        expr = expr.replace("$__rate_interval", "1m").replace("$__interval", "1m").replace("$__range", "6h")
        rules.append({"record": f"expression:number:{number}", "expr": expr})
    path = folder / "expressions.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "expressions", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, check=False)
    return checked.stdout + checked.stderr if checked.returncode else ""


def transformed(panel: dict[str, Any], values: dict[tuple[int, int], float]) -> list[list[Any]]:
    """A table panel's cells, of values by layer and head."""
    result = [
        {"metric": {"__name__": "m", "run": "r", "layer": str(layer), "head": str(head)}, "value": [1, str(value)]}
        for (layer, head), value in values.items()
    ]
    given = json.dumps({"transformations": panel["transformations"], "result": result})
    done = subprocess.run(["node", NODE / "transform.mjs"], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells: list[list[Any]] = json.loads(done.stdout)
    return cells


def displayed(panel: dict[str, Any], values: list[float]) -> list[tuple[str, str]]:
    """The words and the colour that Grafana gives values."""
    given = json.dumps({"defaults": panel["fieldConfig"]["defaults"], "values": values})
    done = subprocess.run(["node", NODE / "display.mjs"], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(text, color) for text, color in json.loads(done.stdout)]


def named(uid: str, title: str) -> dict[str, Any]:
    (panel,) = [panel for panel in panels(BOARDS[uid]) if panel["title"] == title]
    return panel


def test_the_committed_boards_are_what_the_script_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, GRAFANA / "generate.py", tmp_path], check=True)
    assert {path.stem for path in tmp_path.iterdir()} == BOARDS.keys()
    for path in tmp_path.iterdir():
        assert path.read_text() == (GRAFANA / path.name).read_text(), f"{path.name} is stale: run generate.py"


def test_the_boards_are_three_and_lead_to_each_other() -> None:
    assert set(BOARDS) == {"bellwether-overview", "bellwether-run", "bellwether-server"}
    for uid, board in BOARDS.items():
        assert board["uid"] == uid and board["tags"] == ["bellwether"] and not board["editable"]
        assert board["graphTooltip"] == 1
        (links,) = board["links"]
        assert links["type"] == "dashboards" and links["tags"] == ["bellwether"] and links["keepTime"], uid
        first = board["templating"]["list"][0]
        assert (first["name"], first["type"], first["query"]) == ("datasource", "datasource", "prometheus")
        assert {a["name"] for a in board["annotations"]["list"]} >= {"Alerts"}
        for url in re.findall(r'"url": "/d/([\w-]+)', json.dumps(board)):
            assert url in BOARDS
    assert "/d/bellwether-run?var-run=" in json.dumps(BOARDS["bellwether-overview"])


@pytest.mark.parametrize("uid", BOARDS)
def test_every_panel_says_what_it_shows(uid: str) -> None:
    board = BOARDS[uid]
    ids = [panel["id"] for panel in board["panels"]]
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles)
    assert missing_variables(board) == set()
    for panel in panels(board):
        name = panel["title"]
        assert name and panel["description"].endswith("."), name
        assert panel["fieldConfig"]["defaults"]["unit"], name
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs), name
        for source in (panel["datasource"], *(target["datasource"] for target in panel["targets"])):
            assert source == {"type": "prometheus", "uid": "${datasource}"}, name
        for target in panel["targets"]:
            assert raw_counters(target["expr"]) == set(), name


def test_planted_faults_are_seen() -> None:
    assert raw_counters("bellwether_ingest_frames_total") == {"bellwether_ingest_frames_total"}
    assert raw_counters("rate(bellwether_ack_seconds_bucket[5m])") == {"bellwether_ack_seconds_bucket"}
    assert raw_counters('sum(rate(a_total{b="c"}[$__rate_interval]))') == set()
    board = BOARDS["bellwether-run"]
    assert missing_variables({**board, "templating": {"list": board["templating"]["list"][:2]}}) == {"layer"}


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_do_not_overlap(uid: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARDS[uid]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    places = [(p["gridPos"]["y"], p["gridPos"]["x"]) for p in BOARDS[uid]["panels"]]
    assert places == sorted(places)


def test_panels_stand_in_causal_order() -> None:
    run = " ".join(panel["title"] for panel in BOARDS["bellwether-run"]["panels"] if panel["title"][0].isdigit())
    assert re.search("1 Drift.*3 Tied.*4 Delta bias t.*5 σ.*6 .*logit.*8 Loss", run)
    server = " ".join(panel["title"] for panel in BOARDS["bellwether-server"]["panels"])
    assert re.search(
        "Frames.*Refused.*Shard queues.*Log to disk.*acknowledgement.*Detector.*Notifications.*CPU", server
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    found = {f"{uid}: {name}": expr for uid, board in BOARDS.items() for name, expr in expressions(board).items()}
    assert len(found) > 60
    assert refused_by_prometheus(found, tmp_path) == ""
    assert "parse error" in refused_by_prometheus({"planted": "sum by (le (x)"}, tmp_path)


@needs_grafana_code
def test_grafana_makes_a_matrix_of_layers_and_heads() -> None:
    (panel,) = [panel for panel in panels(BOARDS["bellwether-run"]) if "transformations" in panel]
    # The worst heads only, as they are exported: each layer has others, ten and more of both.
    values = {(10, 1): 3.0, (2, 0): 1.5, (0, 11): 9.0, (0, 2): 1.0, (2, 11): 40.0}
    assert transformed(panel, values) == [
        ["layer\\head", "0", "1", "2", "11"],
        [0, None, None, 1.0, 9.0],
        [2, 1.5, None, None, 40.0],
        [10, None, 3.0, None, None],
    ]
    every = {(layer, head): 100.0 * layer + head for layer in range(12) for head in reversed(range(12))}
    names, *rows = transformed(panel, every)
    assert names[1:] == [str(head) for head in range(12)]
    assert rows == [[layer, *(100.0 * layer + head for head in range(12))] for layer in range(12)]


@needs_grafana_code
def test_stages_are_words_not_numbers() -> None:
    words = ["Judged in part", "Healthy", "Drift", "Ties", "Weights", "Scores", "Loss"]
    colors = ["blue", "green", "orange", "orange", "red", "red", "dark-red"]
    shown = [("bellwether-overview", "Stage"), ("bellwether-run", "Stage"), ("bellwether-run", "Stage over time")]
    for uid, title in shown:
        panel = named(uid, title)
        assert displayed(panel, [-1, 0, 1, 2, 3, 4, 5]) == list(zip(words, colors, strict=True)), (uid, title)
    for uid, title in (shown[0], shown[2]):
        assert named(uid, title)["type"] == "state-timeline"


@needs_grafana_code
def test_no_streams_are_neither_good_nor_bad() -> None:
    for uid in ("bellwether-overview", "bellwether-server"):
        assert displayed(named(uid, "Streams"), [0, 1, 40]) == [("0", "text"), ("1", "green"), ("40", "green")]


@needs_grafana_code
def test_the_time_left_stands_beside_the_steps_left() -> None:
    for uid, only in (("bellwether-overview", ""), ("bellwether-run", '{run="$run"}')):
        steps, time = named(uid, "Steps left"), named(uid, "Time left")
        assert steps["gridPos"]["y"] == time["gridPos"]["y"]
        assert steps["gridPos"]["x"] + steps["gridPos"]["w"] == time["gridPos"]["x"]
        (step_target,), (time_target,) = steps["targets"], time["targets"]
        seconds = f"quantile_over_time(0.5, bellwether_run_step_seconds{only}[5m])"
        assert time_target["expr"] == f"{step_target['expr']} * {seconds}"
        (text, _), *_ = displayed(time, [1300])
        assert text in ("21.7 mins", "22 mins")


def test_thresholds_of_runs_and_server_are_those_of_alerts() -> None:
    rules = yaml.safe_load((DASHBOARDS / "alerts/rules.yml").read_text())["groups"]
    alerts = {rule["alert"]: rule["expr"] for group in rules for rule in group["rules"] if "alert" in rule}
    expected = {
        ("bellwether-overview", "Silence"): ["BellwetherRunSilent"],
        ("bellwether-run", "Last report"): ["BellwetherRunSilent"],
        ("bellwether-server", "Acknowledged in time"): ["BellwetherAckSlow"],
        ("bellwether-server", "Log to disk"): ["BellwetherAckSlow"],
        ("bellwether-server", "Durable acknowledgement"): ["BellwetherAckSlow"],
        ("bellwether-server", "Free for the store"): ["BellwetherStoreFull"],
        ("bellwether-server", "Free"): ["BellwetherStoreFull"],
    }
    for uid in ("bellwether-overview", "bellwether-server", "bellwether-run"):
        for panel in panels(BOARDS[uid]):
            steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
            numbers = [step["value"] for step in steps if step["value"] is not None]
            sources = expected.get((uid, panel["title"]))
            if sources is None:  # Those of detectors are compared by assets_test.py.
                assert uid == "bellwether-run" or set(numbers) <= {1, 3}, f"{uid}: {panel['title']}: {numbers}"
                continue
            for number, alert in zip(numbers, sources, strict=True):
                asked = [float(found) for found in re.findall(r"(?<![\w.])[\d.]+(?![\w.])", alerts[alert])]
                assert number in asked, panel["title"]


def test_the_targets_of_the_server_name_their_alerts() -> None:
    titles = [panel["title"] for panel in BOARDS["bellwether-server"]["panels"]]
    first = titles.index("Targets") + 1
    assert titles[first : first + 4] == [
        "Acknowledged in time", "Refused frames", "Failed notifications", "Free for the store",
    ]  # fmt: skip
    named_alerts = {
        alert for title in titles[first : first + 4]
        for alert in re.findall(r"Bellwether\w+", named("bellwether-server", title)["description"])
    }  # fmt: skip
    groups = yaml.safe_load((DASHBOARDS / "alerts/rules.yml").read_text())["groups"]
    assert len(named_alerts) == 4
    assert named_alerts <= {rule.get("alert") for group in groups for rule in group["rules"]}
    page = (ROOT / "docs/operate/grafana.md").read_text()
    assert all(alert in page for alert in named_alerts)


@pytest.mark.parametrize("uid", BOARDS)
def test_every_mark_has_a_title_and_a_text(uid: str) -> None:
    marks = BOARDS[uid]["annotations"]["list"]
    assert len(marks) > 1
    for mark in marks:
        assert mark["titleFormat"] and mark["textFormat"], mark["name"]
    (alerts,) = [mark for mark in marks if mark["name"] == "Alerts"]
    assert "{{severity}}" in alerts["textFormat"]


def test_provisioning_is_fixed_and_finds_the_boards() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources.yml").read_text())
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards.yml").read_text())
    assert sources["apiVersion"] == providers["apiVersion"] == 1
    (source,) = sources["datasources"]
    assert (source["type"], source["uid"], source["editable"]) == ("prometheus", "prometheus", False)
    (provider,) = providers["providers"]
    assert provider["type"] == "file" and provider["allowUiUpdates"] is False
    compose = yaml.safe_load((ROOT / "deploy/docker/compose.yml").read_text())["services"]["grafana"]
    mounted = {target: source for source, target, _ in (mount.split(":") for mount in compose["volumes"])}
    assert (ROOT / "deploy/docker" / mounted[provider["options"]["path"]]).resolve() == GRAFANA


def test_the_mixin_gives_the_same_boards_and_rules() -> None:
    program = (
        f"local mixin = import {json.dumps(str(DASHBOARDS / 'mixin.libsonnet'))};"
        "{boards: mixin.grafanaDashboards, alerts: mixin.prometheusAlerts.groups, rules: mixin.prometheusRules.groups}"
    )
    mixed = json.loads(_jsonnet.evaluate_snippet("mixin", program))
    assert mixed["boards"] == {f"{uid}.json": board for uid, board in BOARDS.items()}
    groups = yaml.safe_load((DASHBOARDS / "alerts/rules.yml").read_text())["groups"]
    for field, kind in (("alerts", "alert"), ("rules", "record")):
        assert mixed[field] == [group for group in groups if all(kind in rule for rule in group["rules"])]
    assert len(mixed["alerts"]) + len(mixed["rules"]) == len(groups) and mixed["rules"]


def test_no_rule_has_a_line_break() -> None:
    """Jsonnet up to 0.18 aborts on one within a scalar."""
    groups = yaml.safe_load((DASHBOARDS / "alerts/rules.yml").read_text())["groups"]
    texts = re.findall(r'"(?:[^"\\]|\\.)*"', json.dumps(groups))
    assert len(texts) > 100
    assert [text for text in texts if "\\n" in text] == []


def test_alerts_lead_to_boards_and_variables_that_exist() -> None:
    groups = yaml.safe_load((DASHBOARDS / "alerts/rules.yml").read_text())["groups"]
    urls = {rule["annotations"]["dashboard_url"] for group in groups for rule in group["rules"] if "alert" in rule}
    led = set()
    for url in urls:
        found = re.fullmatch(r"https://[^/]+/d/([\w-]+)\?var-(\w+)=\{\{ \$labels\.\2 \}\}", url)
        assert found, url
        assert found[2] in {variable["name"] for variable in BOARDS[found[1]]["templating"]["list"]}, url
        led.add(found[1])
    assert led == {"bellwether-run", "bellwether-server"}
