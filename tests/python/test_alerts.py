"""Goal: on_alert gets each change of an alert of its own run, once, also over a broken stream; an
alert that cannot be read and a callback that raises end nothing.
Method: a small HTTP server in the place of bellwetherd that speaks its event stream.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import math
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import bellwether
from bellwether._attach import WRONG_KERNEL
from bellwether._server import page as page_address
from bellwether._step.link import seen_from_here

from models import Model, Shape, batch

# As the server writes it (tests/server/query/json_api_test.cc).
WHOLE = {
    "run": "mine", "step": 767, "state": "firing", "severity": "warning", "stage": 2, "layer": 1,
    "head": 3, "heads": [[1, 3], [0, None]], "eta_steps": 410.5,
    "evidence": {"drift_ratio": 4.5, "loss": None}, "rule": "drift", "key": "k-1", "k": 1,
    "first_step": 700, "summary": "Head 1.3 drifts.", "cause": "rounding drift",
}  # fmt: skip
UUID = ""  # Of "mine"; "" = the server tells none.
UNREADABLE = {"run": "mine", "step": "soon"}
SCRIPT = [  # What each connection is told before it breaks.
    [("alert", "1", {"run": "mine", "layer": 1}), ("alert", "2", {"run": "other", "layer": 0})],
    [("runs", "", {"runs": ["mine"]}), ("alert", "4", UNREADABLE), ("alert", "5", WHOLE)],
]


STATUS: list[int] = []  # Of the first connections' answers; the others': 200.


class Events(BaseHTTPRequestHandler):
    seen: queue.Queue[tuple[str, str, str]] = queue.Queue()
    asked: queue.Queue[tuple[str, bytes]] = queue.Queue()

    def do_GET(self) -> None:
        connection = Events.seen.qsize()
        asked = self.headers.get("Authorization", ""), self.headers.get("Last-Event-ID", "")
        Events.seen.put((self.path, *asked))
        status = STATUS[connection] if connection < len(STATUS) else 200
        if status == 0:  # A broken answer.
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\nevent: al"
            )
            return
        self.send_response(status)
        self.end_headers()
        if status != 200:
            return
        for kind, number, data in SCRIPT[connection] if connection < len(SCRIPT) else []:
            line = f"event: {kind}\nid: {number}\ndata: {json.dumps(data)}\n\n: still here\n\n"
            self.wfile.write(line.encode())

    def do_POST(self) -> None:
        Events.asked.put((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        if not UUID:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        uuid = base64.b64encode(bytes.fromhex(UUID)).decode()
        self.wfile.write(json.dumps({"description": {"uuid": uuid}}).encode())

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    Events.seen, Events.asked = queue.Queue(), queue.Queue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Events)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/?token=secret#/run/mine"
    server.shutdown()


def test_each_alert_of_the_run_once(page: str, tmp_path: Path) -> None:
    got: queue.Queue[bellwether.Alert] = queue.Queue()

    def callback(alert: bellwether.Alert) -> None:
        got.put(alert)
        raise RuntimeError("a callback of the user's")

    model = Model(Shape())
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="mine")
    monitor.steps.reporter.link.page_url = page
    monitor.follow_alerts(callback)
    first, second = got.get(timeout=20), got.get(timeout=20)
    assert (first.layer, first.head, first.heads, first.eta_steps) == (1, None, (), None)
    told = dataclasses.asdict(second)
    assert math.isnan(told["evidence"].pop("loss"))
    assert told == {**WHOLE, "heads": ((1, 3), (0, None)), "evidence": {"drift_ratio": 4.5}}
    monitor.detach()
    assert got.empty() and monitor.status()["errors"] == 0
    assert Events.seen.get(timeout=20) == ("/api/v1/events", "Bearer secret", "")
    assert Events.seen.get(timeout=20) == ("/api/v1/events", "Bearer secret", "2")


def test_an_alert_of_a_wrong_kernel_has_its_layer_captured(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {**WHOLE, "rule": WRONG_KERNEL, "heads": [[1, 3], [1, 0]], "step": 3, "first_step": 3}
    other = {**WHOLE, "heads": [[0, 1]]}  # Of another rule.
    monkeypatch.setitem(globals(), "SCRIPT", [[("alert", "1", other), ("alert", "2", wrong)]])
    told: queue.Queue[bellwether.Alert] = queue.Queue()
    shape, settings = Shape(), bellwether.Settings(capture_dir=str(tmp_path / "kept"))
    model = Model(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="mine", every=1, overhead_budget=1e9,
        settings=settings, on_alert=told.put,
    )  # fmt: skip
    monitor.steps.reporter.link.page_url = page
    assert [told.get(timeout=20).rule for _ in range(2)] == ["drift", WRONG_KERNEL]
    for step in range(2):
        model(batch(shape, step)).square().mean().backward()
        optimizer.step()
        monitor.step(loss=1.0)
    monitor.detach()
    (path,) = monitor.status()["capture"]["written"]
    assert Path(path).name == "mine-rank0-step1-layer1.pt"


def test_a_follower_that_was_refused_misses_nothing(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    began, ended = ("resync", "7", {}), ("refused", "", {"message": "the certificate was revoked"})
    script = [
        [began, ended],
        [],
        [],
        [("resync", "7", {}), ("alert", "8", {"run": "mine", "layer": 1})],
    ]
    monkeypatch.setitem(globals(), "SCRIPT", script)
    monkeypatch.setitem(globals(), "STATUS", [200, 401, 0, 200])
    got: queue.Queue[bellwether.Alert] = queue.Queue()
    caplog.set_level(logging.INFO, "bellwether")
    monitor = bellwether.attach(Model(Shape()), record=str(tmp_path / "a.bwrun"), run="mine")
    monitor.steps.reporter.link.page_url = page
    monitor.follow_alerts(got.put)
    assert got.get(timeout=20).layer == 1
    asked = [Events.seen.get(timeout=20)[2] for _ in range(4)]
    assert asked == ["", "7", "7", "7"]  # From where it was, also while it heard nothing.
    assert monitor.status()["errors"] == 0
    monitor.detach()
    base = page.partition("/?")[0]
    told = [record.getMessage() for record in caplog.records if "on_alert=" in record.getMessage()]
    what = "on_alert=: alerts of run mine are"
    refused = f"{what} not heard, asking again: {base}: refused: the certificate was revoked"
    assert told == [refused, f"{what} heard again"]


def test_a_renamed_run_is_heard_on(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = "0a" * 16, "0b" * 16
    told = [
        {"run": "mine", "run_uuid": mine, "layer": 1},
        {"run": "renamed", "run_uuid": mine, "layer": 2},
        {"run": "mine", "run_uuid": other, "layer": 3},  # Another took the name.
        {"run": "renamed", "run_uuid": mine, "layer": 4},
    ]
    script = [[("alert", str(i), data) for i, data in enumerate(told)]]
    monkeypatch.setitem(globals(), "UUID", mine)
    monkeypatch.setitem(globals(), "SCRIPT", script)
    got: queue.Queue[bellwether.Alert] = queue.Queue()
    monitor = bellwether.attach(Model(Shape()), record=str(tmp_path / "a.bwrun"), run="mine")
    monitor.steps.reporter.link.page_url = page
    monitor.follow_alerts(got.put)
    heard = [got.get(timeout=20) for _ in range(3)]
    assert [(alert.run, alert.layer) for alert in heard] == [
        ("mine", 1), ("renamed", 2), ("renamed", 4)
    ]  # fmt: skip
    monitor.detach()
    assert Events.asked.get(timeout=20) == ("/api/v1/GetRun", b'{"run": "mine"}')


def test_no_thread_without_a_callback(tmp_path: Path) -> None:
    with bellwether.attach(Model(Shape()), record=str(tmp_path / "a.bwrun"), run="mine"):
        names = [thread.name for thread in threading.enumerate()]
    assert "bellwether-alerts" not in names


@pytest.mark.parametrize(
    ("page", "server", "seen"),
    [
        ("https://0.0.0.0:7071/?token=t#/run/x", "box:7070", "https://box:7071/?token=t#/run/x"),
        ("http://[::]:7071/#/run/x", "[fd00::1]:7070", "http://[fd00::1]:7071/#/run/x"),
        ("http://0.0.0.0:7071/#/run/x", "", "http://127.0.0.1:7071/#/run/x"),
        ("http://box:7071/#/run/x", "other:7070", "http://box:7071/#/run/x"),
        ("", "box:7070", ""),
    ],
)
def test_page_on_every_address_is_at_its_server(page: str, server: str, seen: str) -> None:
    assert seen_from_here(page, server) == seen


def test_page_url() -> None:
    assert page_address.split_page_url("http://h:1/?token=a%2Fb#/run/x") == ("http://h:1", "a/b")
    assert page_address.split_page_url("https://h:1/") == ("https://h:1", "")
