"""Goal: other loggers show what the server holds, each value at its own step, once, over restarts
of either side; what is missing is said in words.
Method: a real server, TensorBoard's files read back by TensorBoard itself, MLflow's own file store.
W&B is a stand-in that keeps to its documented interface and takes nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.server
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, wait_for
from warm_python import WarmPython

from bellwether.client import Block, RunClient, RunOptions
from bellwether.forward import otlp
from bellwether.forward.loggers import Start
from bellwether.forward.otlp import Otlp
from bellwether.forward.reader import Entry

RUN = "gpt-flash-s4"
DRIFT = "bellwether_layer_drift_ratio_max/layer_001"
STAGE, FIRING = "bellwether_run/stage", "bellwether_run/alerts_firing"
# Keeps to https://docs.wandb.ai/ref/python: one JSON line a call.
WANDB = """
import json, os

def _say(**told):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(json.dumps(told) + "\\n")

class Run:
    def define_metric(self, name, step_metric=None):
        _say(define=name, by=step_metric)
    def log(self, data, step=None, commit=None):
        assert all(isinstance(value, (str, int, float)) for value in data.values())
        _say(log=data)
    def alert(self, title, text, level=None, wait_duration=None):
        assert len(title) < 64
        _say(alert=text, level=level)
    def finish(self, exit_code=None):
        _say(finish=True)

class AlertLevel:
    INFO, WARN, ERROR = "INFO", "WARN", "ERROR"

def init(entity=None, project=None, id=None, name=None, config=None, resume=None):
    _say(init=dict(entity=entity, project=project, id=id, name=name, config=config, resume=resume))
    return Run()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        server.run("run", "import", str(ROOT / f"tests/testdata/runs/{RUN}.bwrun"))
        yield server


@functools.cache
def warm() -> WarmPython:
    return WarmPython("torch.utils.tensorboard", "mlflow")


class Forward:
    """The command, with a state folder of its own and no way to any service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "modules").mkdir()
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{folder / 'modules'}:{ROOT / 'client_lib/python'}",
            "XDG_STATE_HOME": str(folder / "state"),
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "CALLS": str(folder / "calls"),
        }

    def start(self, page: str, *words: str) -> subprocess.Popen[str]:
        called = [sys.executable, "-m", "bellwether", "forward", *words, "--page", f"http://{page}"]
        return subprocess.Popen(called, env=self.env, cwd=self.folder, stderr=subprocess.PIPE, text=True)

    def run(self, page: str, *words: str) -> tuple[int, str]:
        called = ["-m", "bellwether", "forward", *words, "--page", f"http://{page}"]
        done = warm().run(called, self.env, self.folder, timeout=240)
        return done.returncode, done.stderr


@pytest.fixture
def forward(tmp_path: Path) -> Forward:
    return Forward(tmp_path)


class Shown:
    """What TensorBoard shows of a folder."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        self._events: list[Any] = []
        for path in sorted(folder.iterdir()):
            self._events.append(EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}))
            self._events[-1].Reload()

    def tags(self) -> set[str]:
        return {tag for events in self._events for tag in events.Tags()["scalars"]}

    def scalars(self, tag: str) -> list[tuple[int, float]]:
        return [(e.step, e.value) for each in self._events if tag in each.Tags()["scalars"] for e in each.Scalars(tag)]

    def texts(self) -> dict[int, str]:
        name = "bellwether_run/alerts/text_summary"
        found = [e for each in self._events if name in each.Tags()["tensors"] for e in each.Tensors(name)]
        return {e.step: e.tensor_proto.string_val[0].decode() for e in found}


def worst(server: Server, name: str, layer: int, of: Any = max) -> dict[int, float]:
    heads = [server.series(RUN, name, layer, head) for head in range(6)]
    return {step: of(head[step] for head in heads) for step in heads[0]}


def same(shown: list[tuple[int, float]], stored: dict[int, float]) -> bool:
    """Every step once and in order, with its very value."""
    values = dict(shown)
    return [step for step, _ in shown] == sorted(stored) and all(
        values[step] == pytest.approx(value, rel=1e-6, nan_ok=True) for step, value in stored.items()
    )


def history(server: Server) -> list[dict[str, Any]]:
    alerts = server.call("ListAlerts", run=RUN, limit=1000)["alerts"]
    every = [server.call("GetAlert", run=RUN, key=a["last"]["key"])["alert"]["history"] for a in alerts]
    return sorted((told for each in every for told in each), key=lambda told: int(told["id"]))


def test_tensorboard_shows_the_servers_values_once(server: Server, forward: Forward) -> None:
    folder = forward.folder / "tb"
    code, told = forward.run(server.http, RUN, "--to", "tensorboard:tb")
    assert code == 0, told
    shown = Shown(folder)
    assert same(shown.scalars(DRIFT), worst(server, "drift_ratio", 1))
    assert len(shown.scalars(DRIFT)) > 1300  # More than one batch.
    assert same(shown.scalars("bellwether_layer_entropy_ratio_min/layer_005"), worst(server, "entropy_ratio", 5, min))
    assert same(shown.scalars("bellwether_layer_tied_rows_ratio_max/layer_000"), worst(server, "tied_fraction_bf16", 0))
    names = {tag.split("/")[0] for tag in shown.tags()}
    assert {"bellwether_layer_wq_spectral_norm_max", "bellwether_layer_logit_max"} <= names
    assert "bellwether_layer_key_leak_ratio_max" not in names  # The run does not report it.

    changes, texts = history(server), shown.texts()
    assert len(changes) > 5 and set(texts) == {int(told["step"]) for told in changes}
    assert all(told["summary"] in texts[int(told["step"])] for told in changes)
    run = server.call("GetRun", run=RUN)
    at_end = int(run["step"])
    stages, firing = dict(shown.scalars(STAGE)), dict(shown.scalars(FIRING))
    assert (stages[at_end], firing[at_end]) == (run["stage"], run["alerts_firing"]) == (5, 1)
    assert stages[3010] == 1 and firing[3010] == 1 and firing[11530] == 2
    assert dict(shown.scalars("bellwether_run/eta_steps"))[3010] == pytest.approx(float(changes[0]["eta"]["steps"]))

    assert forward.run(server.http, RUN, "--to", "tensorboard:tb")[0] == 0
    assert Shown(folder).scalars(DRIFT) == shown.scalars(DRIFT)


def test_mlflow_and_wandb_get_the_same(
    server: Server, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    (forward.folder / "modules/wandb.py").write_text(WANDB)
    mlflow_alone = ["--to", "mlflow:mlruns#pretraining"]
    for to in (mlflow_alone, [*mlflow_alone, "--to", "wandb:team/pretraining"]):
        code, told = forward.run(server.http, RUN, *to)
        assert code == 0, told  # Each from where it is itself.
    drift = worst(server, "drift_ratio", 1)
    changes = history(server)
    newest = {told["key"]: told["summary"] for told in changes}

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=str(forward.folder / "mlruns"))
    [run] = client.search_runs([client.get_experiment_by_name("pretraining").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["layers"]) == (RUN, "FINISHED", "6")
    assert same([(m.step, m.value) for m in client.get_metric_history(run.info.run_id, DRIFT)], drift)
    tags = {name: text for name, text in run.data.tags.items() if name.startswith("bellwether.alert.")}
    assert len(tags) == len(newest) and all(any(one in tag for tag in tags.values()) for one in newest.values())

    calls = [json.loads(line) for line in Path(forward.env["CALLS"]).read_text().splitlines()]
    opened = [call["init"] for call in calls if "init" in call]
    assert len(opened) == 1 and (opened[0]["entity"], opened[0]["project"]) == ("team", "pretraining")
    assert {"define": "*", "by": "bellwether_step"} in calls and calls[-1] == {"finish": True}
    rows = [call["log"] for call in calls if "log" in call]
    assert same([(row["bellwether_step"], row[DRIFT]) for row in rows if DRIFT in row], drift)
    assert sum(row.get("bellwether_alert", "").count("\n") + 1 for row in rows if "bellwether_alert" in row) == len(changes)

    assert forward.run(server.http, RUN, "--to", "wandb:team/pretraining", "--again")[0] == 0
    again = [json.loads(line) for line in Path(forward.env["CALLS"]).read_text().splitlines()][len(calls) :]
    assert again[0]["init"]["id"] != opened[0]["id"] and [c["log"] for c in again if "log" in c] == rows


# Keeps to trackio 0.43.0.
TRACKIO = """
import json, os

def _say(**told):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(json.dumps(told) + "\\n")

class AlertLevel:
    INFO, WARN, ERROR = "info", "warn", "error"

class Run:
    def log(self, metrics, step=None):
        _say(log=metrics, step=step)
    def alert(self, title, text=None, level=AlertLevel.WARN, step=None, webhook_url=None):
        _say(alert=text, level=level, step=step)
    def finish(self):
        _say(finish=True)

def init(project, name=None, resume="never", config=None, embed=True):
    _say(init=dict(project=project, name=name, resume=resume))
    return Run()
"""


def test_trackio_and_wandb_get_alerts_where_asked(server: Server, forward: Forward) -> None:
    (forward.folder / "modules/wandb.py").write_text(WANDB)
    (forward.folder / "modules/trackio.py").write_text(TRACKIO)
    calls = Path(forward.env["CALLS"])

    def forwarded(*words: str) -> list[dict[str, Any]]:
        calls.unlink(missing_ok=True)
        code, told = forward.run(server.http, RUN, *words)
        assert code == 0, told
        return [json.loads(line) for line in calls.read_text().splitlines()]

    changes = [each for each in history(server) if each["state"] == "ALERT_STATE_FIRING"]
    grave = [each for each in changes if each["severity"] != "SEVERITY_INFO"]
    critical = [each for each in grave if each["severity"] == "SEVERITY_CRITICAL"]
    quiet = forwarded("--to", "trackio:pretraining")
    assert not any("alert" in call for call in quiet) and quiet[-1] == {"finish": True}
    rows = [call for call in quiet if "log" in call]
    shown = [(call["step"], call["log"][DRIFT]) for call in rows if DRIFT in call["log"]]
    assert same(shown, worst(server, "drift_ratio", 1))
    for to, level in (("trackio:pretraining", "error"), ("wandb:pretraining", "ERROR")):
        loud = [call for call in forwarded("--to", to, "--alerts", "--again") if "alert" in call]
        assert len(loud) == len(grave) > 2
        assert len([call for call in loud if call["level"] == level]) == len(critical)
        assert {call["alert"] for call in loud} == {each["summary"] for each in grave}
        if to.startswith("trackio"):
            assert [call["step"] for call in loud] == [int(each["step"]) for each in grave]


class Collector:
    """Takes OTLP over HTTP, and reads it by the protocol's own messages."""

    def __init__(self) -> None:
        from google.protobuf import json_format
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsServiceRequest,
        )

        self.metrics: list[Any] = []
        self.logs: list[Any] = []
        self.tokens: set[Optional[str]] = set()
        self.busy = 0  # How many requests are refused first.
        collector = self
        kinds = {
            "/v1/metrics": (ExportMetricsServiceRequest, self.metrics),
            "/v1/logs": (ExportLogsServiceRequest, self.logs),
        }

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
                collector.busy -= 1
                if collector.busy < 0:
                    message, kept = kinds[self.path]
                    kept.append(json_format.Parse(body, message()))  # Knows every field, or raises.
                    collector.tokens.add(self.headers["x-token"])
                self.send_response(200 if collector.busy < 0 else 503)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.to = f"otlp:http://127.0.0.1:{self.server.server_address[1]}"

    def gauges(self) -> dict[tuple[str, Optional[int]], float]:
        """The newest of each, by name and layer."""
        found = {}
        for request in self.metrics:
            for metric in request.resource_metrics[0].scope_metrics[0].metrics:
                for point in metric.gauge.data_points:
                    layer = point.attributes[0].value.int_value if point.attributes else None
                    found[metric.name, layer] = point.as_double
        return found


def test_a_collector_gets_the_newest_values_and_the_alerts(server: Server, forward: Forward) -> None:
    collector = Collector()
    forward.env["OTEL_EXPORTER_OTLP_HEADERS"] = "x-token=a%20b"
    collector.busy = 1
    code, told = forward.run(server.http, RUN, "--to", collector.to)
    assert code == 4 and "not taken" in told and "503" in told
    code, told = forward.run(server.http, RUN, "--to", collector.to)
    assert code == 0, told
    assert collector.tokens == {"a b"}
    run = server.call("GetRun", run=RUN)
    of = {a.key: a.value for a in collector.metrics[0].resource_metrics[0].resource.attributes}
    assert of["bellwether.run"].string_value == RUN and of["bellwether.layers"].int_value == 6
    gauges = collector.gauges()
    assert gauges["bellwether_run_step", None] == int(run["step"])
    assert (gauges["bellwether_run_stage", None], gauges["bellwether_run_alerts_firing", None]) == (5, 1)
    for layer in range(6):
        drift = worst(server, "drift_ratio", layer)
        value = gauges["bellwether_layer_drift_ratio_max", layer]
        assert value == pytest.approx(drift[max(drift)], rel=1e-6, nan_ok=True)
    logs = [r for request in collector.logs for r in request.resource_logs[0].scope_logs[0].log_records]
    changes = history(server)
    assert sorted(log.time_unix_nano for log in logs) == sorted(int(c["time_unix_ns"]) for c in changes)
    assert all(any(c["summary"] in log.body.string_value for log in logs) for c in changes)
    assert {log.severity_text for log in logs} >= {"warning", "critical"}
    assert forward.run(server.http, RUN, "--to", collector.to)[0] == 0
    assert len(logs) == sum(len(r.resource_logs[0].scope_logs[0].log_records) for r in collector.logs)
    collector.server.shutdown()


def test_collector_redirects_and_endless_answers_are_bounded() -> None:
    """A redirect is not followed, and of an endless answer the start is read."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            self.send_response(302 if self.path.startswith("/to") else 200)
            self.send_header("Location", "/secret/v1/metrics")
            self.end_headers()
            with contextlib.suppress(OSError):
                while self.path.startswith("/endless"):
                    self.wfile.write(b" " * (1 << 20))

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    start = Start("r", "u", {}, "")
    where = f"http://127.0.0.1:{server.server_address[1]}"
    with pytest.raises(OSError, match="302"):
        Otlp(f"{where}/to", start).write([Entry(1)])
    Otlp(f"{where}/endless", start).write([Entry(1)])
    assert asked == ["/to/v1/metrics", "/endless/v1/metrics"]
    server.shutdown()


def test_a_collector_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes within the socket's timeout: the head of the answer never ends."""
    monkeypatch.setattr(otlp, "_TIMEOUT_SECONDS", 1.0)
    gone = threading.Event()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while connection.recv(1 << 16):
                connection.settimeout(0.01)
                for _ in range(1000):
                    connection.sendall(b"x")
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(1 << 16):
                            break
        gone.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        told = Otlp(f"http://127.0.0.1:{listener.getsockname()[1]}", Start("r", "u", {}, ""))
        with pytest.raises(TimeoutError, match="has not answered in 1 s"):
            told.write([Entry(1)])
        assert gone.wait(30)


def push(client: RunClient, steps: Iterable[int]) -> None:
    for step in steps:
        values = [math.nan if step == 7 else 1.0 + step, 0.5]
        assert client.push(step, [Block("wq_sigma", values, 0, 1, 0, 2)])
        if step % 100 == 99:
            assert client.flush(60)
    assert client.flush(60)


def test_following_goes_on_over_restarts_until_the_run_ends(tmp_path: Path, forward: Forward) -> None:
    folder, words = tmp_path / "tb", ["live", "--to", "tensorboard:tb", "--follow", "--every", "0.1"]
    sigma = "bellwether_layer_wq_spectral_norm_max/layer_000"

    def steps() -> list[int]:
        return [step for step, _ in Shown(folder).scalars(sigma)] if folder.exists() else []

    process: Optional[subprocess.Popen[str]] = None
    (tmp_path / "server").mkdir()
    with Server(tmp_path / "server") as server:
        with RunClient(RunOptions(run="live", layers=1, heads=2, server=server.grpc)) as client:
            push(client, range(10))
            wait_for("the run is known", lambda: server.call("ListRuns")["runs"])
            process = forward.start(server.http, *words)
            # What the command and this test import takes most of the time.
            wait_for("the first steps", lambda: steps() == list(range(10)), 120)
            server.kill()
            assert process.stderr is not None
            assert "waiting for it" in process.stderr.readline()
            server.start()
            push(client, range(10, 20))
            wait_for("the next steps", lambda: steps() == list(range(20)))
            process.send_signal(signal.SIGTERM)
            told = process.communicate(timeout=60)[1]
            assert process.returncode == 0, told
            assert "the server is back, after" in told and "waiting for it" not in told  # Once.
            # Few at first, then more than one call may ask for at the width that had become usual.
            every = [*range(30), *range(4000, 6500)]
            push(client, every[20:])
            process = forward.start(server.http, *words)
            wait_for("the last steps", lambda: steps() == every, 120)
        told = process.communicate(timeout=60)[1]
        assert process.returncode == 0, told
    assert steps() == every
    values = dict(Shown(folder).scalars(sigma))
    assert math.isnan(values.pop(7)) and values == {step: 1.0 + step for step in values}


def test_failures_to_forward_are_explained(server: Server, forward: Forward) -> None:
    (forward.folder / "modules/wandb.py").write_text(WANDB)
    to = ["--to", "wandb:p"]
    code, told = forward.run(server.http, "no-such-run", *to)
    assert code == 1 and "no-such-run" in told
    code, told = forward.run("127.0.0.1:9", RUN, *to)
    assert code == 4 and "127.0.0.1:9" in told
    (forward.folder / "modules/wandb.py").write_text("raise ImportError('No module named wandb')")
    code, told = forward.run(server.http, RUN, *to)
    assert code == 1 and "python -m pip install wandb" in told and "Traceback" not in told
    (forward.folder / "file").write_text("")
    code, told = forward.run(server.http, RUN, "--to", "tensorboard:file/tb")
    assert code == 4 and "not taken" in told and "Traceback" not in told
    for wrong, why in (
        (["--to", "nowhere:x"], "must be tensorboard:DIR"),
        (["--to", "tensorboard:"], "must be tensorboard:DIR"),
        ([*to, *to], "given twice"),
        ([*to, "--every", "0"], "outside of 0.1 to 3600 seconds"),
        ([], "--to"),
    ):
        code, told = forward.run(server.http, RUN, *wrong)
        assert code == 2 and why in told
