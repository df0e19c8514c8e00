"""Goal: a real training job that breaks is named, in the right layer, before its W_Q shows it;
its healthy twin is left in peace.
Method: examples/tiny_transformer.py under the real hook, over real gRPC, to a real bellwetherd:
seeds 1 to 4 in bf16, which fail, and in fp32, their twins.  The alert is taken from the three
places that people look at: a WatchAlerts stream, a webhook, and the page's events.  "Before" is
the first sample at which sigma(W_Q) of layer 1 passes 3x that of the twin.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, free_port, wait_for

SEEDS = (1, 2, 3, 4)
STEPS = 6000
SICK_LAYER = 1


class Receiver:
    """A webhook's other end: keeps every body."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/hook"


class PageEvents:
    """Reads the page's event stream, as the browser does."""

    def __init__(self, server: Server) -> None:
        self.transitions: list[dict[str, Any]] = []
        self._answer = urllib.request.urlopen(f"http://{server.http}/api/v1/events", timeout=600)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self._answer:
                if line.startswith(b"data:") and b'"rule"' in line:
                    self.transitions.append(json.loads(line[5:]))
        except OSError:
            pass  # The server ended.


def train(server: Server, attention: str, seed: int) -> str:
    run = f"{attention}-{seed}"
    environment = {**os.environ, "BELLWETHER_LIB_DIR": str(BIN), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples/tiny_transformer.py"), "--attention", attention, "--seed", str(seed)]
    command += ["--steps", str(STEPS), "--server", server.grpc, "--run", run]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    receiver = Receiver()
    folder = tmp_path_factory.mktemp("server")
    config = f"alerting:\n  webhooks:\n    - url: {receiver.url}\n"
    with Server(folder, config) as server:
        page = PageEvents(server)
        watch_file = folder / "watch.json"
        with open(watch_file, "w") as out:
            watch = subprocess.Popen(
                [str(BIN / "bellwether"), "--server", server.grpc, "alert", "watch", "-o", "json"], stdout=out
            )
        jobs = [(attention, seed) for seed in SEEDS for attention in ("bf16", "fp32")]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda job: train(server, *job), jobs))
        wait_for("all runs ended", lambda: all(run["ended"] for run in server.call("ListRuns")["runs"]), 60)
        stored = server.call("ListAlerts", limit=1000)["alerts"]
        wait_for("the webhook has its say", lambda: receiver.bodies, 30)
        watch.terminate()
        watch.wait()
        yield {
            "server": server,
            "alerts": stored,
            "webhook": [alert for body in receiver.bodies for alert in body["alerts"]],
            "page": list(page.transitions),
            "watch": watch_file.read_text(),
        }


def first_warning(server: Server, run: str) -> Optional[dict[str, Any]]:
    """The earliest transition of severity warning or worse that names the sick layer."""
    alerts = server.call("ListAlerts", run=run, limit=1000)["alerts"]
    found = []
    for alert in alerts:
        history = server.call("GetAlert", run=run, key=alert["last"]["key"])["alert"]["history"]
        found += [
            t
            for t in history
            if t["severity"] in ("SEVERITY_WARNING", "SEVERITY_CRITICAL")
            and t["state"] == "ALERT_STATE_FIRING"
            and t["layer"] == SICK_LAYER
        ]
    return min(found, key=lambda t: int(t["step"]), default=None)


def passes_three_times_twin(server: Server, seed: int) -> Optional[int]:
    sick = server.series(f"bf16-{seed}", "wq_sigma", SICK_LAYER)
    twin = server.series(f"fp32-{seed}", "wq_sigma", SICK_LAYER)
    return min((step for step in sick if step in twin and step >= 500 and sick[step] > 3 * twin[step]), default=None)


def test_the_sick_layer_is_named_before_its_norm_shows(watched: dict[str, Any]) -> None:
    server = watched["server"]
    in_time = 0
    for seed in SEEDS:
        warning = first_warning(server, f"bf16-{seed}")
        exploded = passes_three_times_twin(server, seed)
        print(f"seed {seed}: warned at {warning and warning['step']}, sigma passes 3x its twin at {exploded}")
        in_time += warning is not None and (exploded is None or int(warning["step"]) < exploded)
    assert in_time >= 3


def test_the_watch_the_webhook_and_the_page_tell_the_same(watched: dict[str, Any]) -> None:
    warned = [seed for seed in SEEDS if first_warning(watched["server"], f"bf16-{seed}")]
    assert len(warned) >= 3
    for seed in warned:
        run = f"bf16-{seed}"
        layer = str(SICK_LAYER)
        assert any(a["labels"]["run"] == run and a["labels"].get("layer") == layer for a in watched["webhook"]), run
        assert any(t["run"] == run and t["layer"] == SICK_LAYER for t in watched["page"]), run
        assert f'"{run}"' in watched["watch"], run


def test_the_healthy_twins_get_no_critical(watched: dict[str, Any]) -> None:
    criticals = [
        (alert["last"]["run"], alert["last"]["summary"])
        for alert in watched["alerts"]
        if alert["last"]["run"].startswith("fp32") and alert["last"]["severity"] == "SEVERITY_CRITICAL"
    ]
    assert criticals == []
