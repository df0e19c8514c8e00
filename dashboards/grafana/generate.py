#!/usr/bin/env python3
"""Writes the Grafana dashboards beside this file: python3 generate.py [folder].

The JSON is committed, so that Grafana can load it without this script; a test
compares the two. Panels stand in causal order: who reads from the top left sees
what will happen to what stands below.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Json = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
RUN = 'run="$run"'
LAYER = 'run="$run",layer=~"$layer"'
# Of counters of rows: ratios sum before they divide.
TIED = (
    f'sum by (layer) (rate(bellwether_layer_tied_rows_total{{{LAYER},rule="bf16"}}[$__rate_interval]))'
    f" / sum by (layer) (rate(bellwether_layer_sampled_rows_total{{{LAYER}}}[$__rate_interval]))"
)


def target(expr: str, legend: str, ref: str = "A", instant: bool = False) -> Json:
    """One query of a panel."""
    query: Json = {"datasource": DATASOURCE, "expr": expr, "legendFormat": legend, "refId": ref}
    if instant:
        query |= {"instant": True, "range": False, "format": "table"}
    return query


class Board:
    """A dashboard under construction; places panels from left to right on 24 columns."""

    def __init__(self, uid: str, title: str, description: str) -> None:
        self._x = self._y = self._row = 0
        self._panels: list[Json] = []
        self._board: Json = {
            "uid": uid,
            "title": title,
            "description": description,
            "tags": ["bellwether"],
            "schemaVersion": 39,
            "editable": False,
            "graphTooltip": 1,  # One cursor for all panels.
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "timezone": "",
            "templating": {"list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]},
            "annotations": {"list": []},
            "links": [
                {"title": "Bellwether", "type": "dashboards", "tags": ["bellwether"], "asDropdown": True, "includeVars": True, "keepTime": True}
            ],
        }

    def variable(self, name: str, label: str, query: str, multi: bool = False) -> None:
        """A variable that Prometheus fills, again when the time range changes."""
        self._board["templating"]["list"].append(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": DATASOURCE,
                "query": {"query": query, "refId": name},
                "definition": query,
                "refresh": 2,
                "sort": 3 if multi else 1,
                "multi": multi,
                "includeAll": multi,
            }
            | ({"current": {"text": "All", "value": "$__all"}} if multi else {})
        )

    def annotation(self, name: str, expr: str, color: str) -> None:
        """Marks on every panel."""
        self._board["annotations"]["list"].append(
            {"name": name, "datasource": DATASOURCE, "enable": True, "expr": expr, "iconColor": color, "step": "60s", "titleFormat": "{{alertname}}"}
        )

    def panel(self, kind: str, title: str, description: str, targets: list[Json], *, width: int = 12, height: int = 8, unit: str = "none",
              warn: float | None = None, critical: float | None = None, log: bool = False, extra: Json | None = None) -> None:
        """Adds a panel behind the last one."""
        if self._x + width > 24:
            self._x, self._y, self._row = 0, self._y + self._row, 0
        steps: list[Json] = [{"value": None, "color": "green"}]
        if warn is not None:
            steps.append({"value": warn, "color": "orange"})
        if critical is not None:
            steps.append({"value": critical, "color": "red"})
        custom: Json = {}
        if kind == "timeseries":
            custom = {"lineWidth": 1, "fillOpacity": 0, "showPoints": "never", "spanNulls": 300000,
                      "thresholdsStyle": {"mode": "dashed" if len(steps) > 1 else "off"}}
            if log:
                custom["scaleDistribution"] = {"type": "log", "log": 10}
        panel: Json = {
            "id": len(self._panels) + 1,
            "type": kind,
            "title": title,
            "description": description,
            "datasource": DATASOURCE,
            "gridPos": {"x": self._x, "y": self._y, "w": width, "h": height},
            "targets": targets,
            "fieldConfig": {"defaults": {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}, "custom": custom}, "overrides": []},
            "options": {},
        }
        if kind == "timeseries":
            panel["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
        panel |= extra or {}
        self._panels.append(panel)
        self._x += width
        self._row = max(self._row, height)

    def json(self) -> str:
        """The text that Grafana loads."""
        return json.dumps(self._board | {"panels": self._panels}, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def run_board() -> Board:
    """One run, cause first, loss last."""
    board = Board("bellwether-run", "Bellwether / Run", "One training run: what will happen to it stands left and above what is happening.")
    board.variable("run", "Run", "label_values(bellwether_run_info, run)")
    board.variable("layer", "Layer", f"label_values(bellwether_layer_drift_ratio_max{{{RUN}}}, layer)", multi=True)
    board.annotation("Alerts", 'ALERTS{alertname=~"Bellwether.*",alertstate="firing",run="$run"}', "red")
    board.annotation("Restarts", f"changes(bellwether_run_attempt{{{RUN}}}[$__interval]) > 0", "blue")

    stages = [{"type": "value", "options": {str(i): {"text": text, "color": color} for i, (text, color) in enumerate(
        [("healthy", "green"), ("1 drift", "orange"), ("2 ties and bias", "orange"), ("3 norm", "red"), ("4 logits", "red"), ("5 loss", "red")])}}]
    stage_field = {"fieldConfig": {"defaults": {"mappings": stages, "unit": "none", "thresholds": {"mode": "absolute", "steps": [
        {"value": None, "color": "green"}, {"value": 1, "color": "orange"}, {"value": 3, "color": "red"}]}}, "overrides": []},
        "options": {"colorMode": "background", "reduceOptions": {"calcs": ["lastNotNull"]}}}
    board.panel("stat", "Stage", "What the alert engine concluded: 0 healthy to 5 loss.", [target(f"bellwether_run_stage{{{RUN}}}", "")],
                width=6, height=4, extra=stage_field)
    board.panel("stat", "Steps left", "Predicted steps to divergence; empty without a prediction.", [target(f"bellwether_run_eta_steps{{{RUN}}}", "")],
                width=6, height=4, unit="locale")
    board.panel("stat", "Step", "The newest step that all ranks reported.", [target(f"bellwether_run_step{{{RUN}}}", "")], width=6, height=4, unit="locale")
    board.panel("stat", "Last report", "Time since the run was last heard of. Silence is not health.",
                [target(f"time() - bellwether_run_last_report_timestamp_seconds{{{RUN}}}", "")], width=6, height=4, unit="s", warn=300, critical=600)

    layer = "layer {{layer}}"
    board.panel("timeseries", "1 Drift ratio", "Common mode of the scores over their spread, worst head of the layer. A healthy head stays near 1; exponential growth is the first sign.",
                [target(f"bellwether_layer_drift_ratio_max{{{LAYER}}}", layer)], warn=8, log=True)
    board.panel("timeseries", "2 Key-gradient leak", "The part of the key gradients that must be zero and is not, worst key head of the layer: pure kernel error.",
                [target(f"bellwether_layer_key_leak_ratio_max{{{LAYER}}}", layer)], log=True)
    board.panel("timeseries", "3 Tied rows", "Share of sampled rows whose bf16 maximum occurs more than once.", [target(TIED, layer)], unit="percentunit", warn=0.2)
    board.panel("timeseries", "4 Delta bias", "t statistic of the error of delta, the head furthest from zero, sign kept. Persistent beyond 3: biased, not noisy.",
                [target(f"bellwether_layer_delta_bias_t{{{LAYER}}}", layer)])
    board.panel("timeseries", "5 Spectral norm of W_Q", "Largest singular value of a head's W_Q, worst head of the layer: the weights are being pushed.",
                [target(f"bellwether_layer_wq_spectral_norm_max{{{LAYER}}}", layer)], log=True)
    board.panel("timeseries", "6 Largest logit", "Largest attention score of the layer. Beyond 100 and growing: attention is failing.",
                [target(f"bellwether_layer_logit_max{{{LAYER}}}", layer)], warn=100, log=True)
    board.panel("timeseries", "7 Entropy", "Smallest entropy of a head against uniform attention: 0 is one key.",
                [target(f"bellwether_layer_entropy_ratio_min{{{LAYER}}}", layer)], unit="percentunit")
    board.panel("timeseries", "8 Loss", "Training loss. The last to know.", [target(f"bellwether_run_loss{{{RUN}}}", "loss")])

    matrix = {
        "transformations": [
            # Labels are strings: 10 must not stand before 2.
            {"id": "convertFieldType", "options": {"conversions": [{"targetField": "layer", "destinationType": "number"}, {"targetField": "head", "destinationType": "number"}]}},
            {"id": "sortBy", "options": {"sort": [{"field": "head"}]}},
            {"id": "sortBy", "options": {"sort": [{"field": "layer"}]}},
            {"id": "groupingToMatrix", "options": {"columnField": "head", "rowField": "layer", "valueField": "Value", "emptyValue": "null"}},
        ],
        "fieldConfig": {"defaults": {"unit": "none", "decimals": 1, "custom": {"cellOptions": {"type": "color-background"}, "align": "center"},
                                     "thresholds": {"mode": "absolute", "steps": [{"value": None, "color": "green"}, {"value": 4, "color": "orange"}, {"value": 32, "color": "red"}]}}, "overrides": []},
    }
    board.panel("table", "Layer x head: drift ratio", "The exported heads now: the worst ones, or all with export.per_head: all. The console shows every head.",
                [target(f"bellwether_head_drift_ratio{{{RUN}}}", "", instant=True)], width=24, height=10, extra=matrix)
    board.panel("timeseries", "Gradient norm", "Global gradient norm before clipping.", [target(f"bellwether_run_grad_norm{{{RUN}}}", "gradient norm")], width=8, log=True)
    board.panel("timeseries", "Tokens", "Tokens per second.", [target(f"rate(bellwether_run_tokens_total{{{RUN}}}[$__rate_interval])", "tokens")], width=8, unit="short")
    board.panel("timeseries", "Hook overhead", "Share of a step that the hook takes.", [target(f"bellwether_run_hook_overhead_ratio{{{RUN}}}", "hook")],
                width=8, unit="percentunit", warn=0.005)
    return board


def overview_board() -> Board:
    """All runs, and the server that watches them."""
    board = Board("bellwether-overview", "Bellwether / Overview", "Which run is ill, which is silent, and whether the watcher itself is well.")
    board.panel("stat", "Runs", "Runs that are exported now.", [target("count(bellwether_run_info)", "")], width=6, height=4)
    board.panel("stat", "Ill", "Runs in stage 1 or beyond.", [target("count(bellwether_run_stage > 0) or vector(0)", "")], width=6, height=4, warn=1)
    board.panel("stat", "Alerts that fire", "By the server's own conclusions.", [target("count(bellwether_alert_active) or vector(0)", "")], width=6, height=4, warn=1)
    board.panel("stat", "Streams", "Trainers that are connected.", [target("sum(bellwether_ingest_streams)", "")], width=6, height=4)
    board.panel("timeseries", "Stage", "0 healthy, 1 drift, 2 ties and bias, 3 norm, 4 logits, 5 loss.", [target("bellwether_run_stage > 0", "{{run}}")], warn=1, critical=3)
    board.panel("timeseries", "Steps left", "Predicted steps to divergence.", [target("bellwether_run_eta_steps", "{{run}}")], unit="locale")
    board.panel("table", "Firing", "Alerts with their heads.", [target("bellwether_alert_active", "", instant=True)], width=24)
    board.panel("timeseries", "Frames", "Frames per second by what became of them.",
                [target("sum by (result) (rate(bellwether_ingest_frames_total[$__rate_interval]))", "{{result}}")], width=8, unit="short")
    board.panel("timeseries", "Durable acknowledgement", "99th percentile from arrival to durable.",
                [target("histogram_quantile(0.99, sum by (le) (rate(bellwether_ack_seconds_bucket[$__rate_interval])))", "p99")], width=8, unit="s", warn=0.1)
    board.panel("timeseries", "Series", "Exported, by level; the limit drops heads first.", [target("sum by (level) (bellwether_series_exported)", "{{level}}")], width=8)
    board.panel("timeseries", "Notifications", "Per minute, by what became of them.",
                [target("60 * sum by (channel, result) (rate(bellwether_notifications_total[$__rate_interval]))", "{{channel}} {{result}}")], width=8)
    board.panel("timeseries", "Memory", "Resident memory of bellwetherd.", [target('process_resident_memory_bytes{job="bellwether"}', "{{instance}}")], width=8, unit="bytes")
    board.panel("timeseries", "CPU", "Cores that bellwetherd uses.", [target('rate(process_cpu_seconds_total{job="bellwether"}[$__rate_interval])', "{{instance}}")], width=8)
    return board


def main() -> None:
    """Writes both boards."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "bellwether-run.json").write_text(run_board().json(), encoding="utf-8")
    (folder / "bellwether-overview.json").write_text(overview_board().json(), encoding="utf-8")


if __name__ == "__main__":
    main()
