"""Goal: the terminal of a training script has one line where an illness becomes a warning, one at
each rise of it, one where the loss is lost and none otherwise.  At the end it says how the run
ended, and where to look.  What the server does, or does not, changes and delays no training.
Method: a small HTTP server that gives the page's answers, one after the other; scripts with a real
private server.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Optional

import pytest

import bellwether
from bellwether._server import private_server, terminal
from bellwether._server.terminal import Terminal
from bellwether._step.cost import Cost
from bellwether._util.ending import Ending

from conftest import ROOT
from models import Model, Shape

WHOLE = {"whole": True, "text": "healthy"}
UUID = base64.b64encode(b"sixteen bytes...").decode()


def alert(key: str, severity: str, state: str = "FIRING", **more: Any) -> dict[str, Any]:
    last = {
        "key": key, "run": "mine", "severity": f"SEVERITY_{severity}",
        "state": f"ALERT_STATE_{state}", "summary": f"mine: {key} is ill", "cause": "logit growth",
    }  # fmt: skip
    return {"last": last, "muted": False, "silenced_until_unix_ns": "0", **more}


class Answers(BaseHTTPRequestHandler):
    """What the page says: the newest alerts, or a refusal, or nothing at all."""

    alerts: ClassVar[list[dict[str, Any]]] = []
    serving: ClassVar[Any] = None  # That of this test: a thread of one before may still ask.
    asked = 0
    runs: ClassVar[list[str]] = []
    status = 200
    hangs = threading.Event()
    body: Optional[bytes] = None
    judged: ClassVar[dict[str, Any]] = WHOLE

    def do_POST(self) -> None:
        of = type(self)
        run = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["run"]
        if self.server is of.serving:
            of.asked += 1
            of.runs.append(run)
        if of.hangs.is_set():
            time.sleep(5)
        told: dict[str, Any] = {"alerts": of.alerts}
        if self.path.endswith("GetRun"):
            told = {"step": "7", "judged": of.judged, "description": {"uuid": UUID}}
        with contextlib.suppress(BrokenPipeError):  # It was not waited for.
            self.send_response(of.status)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode() if of.body is None else of.body)

    def log_message(self, *words: Any) -> None:
        pass


class Owner:
    def __init__(self, url: str) -> None:
        self._url = url

    def page_url(self) -> str:
        return self._url


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setattr(Answers, "runs", [])
    for name in ("alerts", "asked", "status", "hangs", "body", "judged"):
        monkeypatch.setattr(Answers, name, getattr(Answers, name))
    Answers.hangs = threading.Event()
    monkeypatch.setattr(terminal, "_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(terminal, "_WAIT_SECONDS_MAX", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    monkeypatch.setattr(Answers, "serving", server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Owner(f"http://127.0.0.1:{server.server_address[1]}/?token=secret#/run/mine")
    server.shutdown()


def begun(owner: Owner) -> Terminal:
    settings = bellwether.Settings(run="mine")
    return Terminal(settings, owner.page_url, "127.0.0.1:7070")


def ended(step: int = 7, **more: Any) -> Ending:
    said: dict[str, Any] = {"why_off": "", "cost": "", "data": None, "record_path": None}
    return Ending(step, **{**said, **more})


def asked_again() -> None:
    """What is told now is known to the thread."""
    before, deadline = Answers.asked, time.monotonic() + 20
    while Answers.asked < before + 4:
        assert time.monotonic() < deadline, "the server is not asked"
        time.sleep(0.005)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "bellwether"]


def test_a_line_at_the_first_warning_and_each_rise(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bellwether")
    silenced = alert("silenced", "CRITICAL", silenced_until_unix_ns=str(time.time_ns() + 10**12))
    false = alert("false", "CRITICAL", muted=True)
    over = alert("over", "WARNING", "RESOLVED")
    Answers.alerts = [alert("a", "INFO"), silenced, false, over]
    shown = begun(owner)
    asked_again()
    assert told(caplog) == []
    Answers.alerts = [alert("a", "WARNING"), alert("b", "WARNING")]
    asked_again()
    more = "Cause: logit growth. More: python -m bellwether explain mine"
    first = [f"WARNING mine: a is ill. {more}", f"WARNING mine: b is ill. {more}"]
    assert told(caplog) == first
    Answers.alerts = [alert("a", "WARNING"), alert("b", "WARNING", "RESOLVED")]
    asked_again()
    assert told(caplog) == first
    Answers.alerts = [alert("a", "CRITICAL"), alert("b", "WARNING")]
    asked_again()
    assert told(caplog) == [*first, f"NOW CRITICAL mine: a is ill. {more}"]
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    shown.end(ended())
    said = told(caplog)[3:]
    assert said[0] == (
        "run mine has ended at step 7; 2 alerts, 2 still firing; the worst critical: a is ill"
    )
    assert said[1] == f"its page:\n{owner.page_url()}"


def test_advice_that_becomes_to_stop_is_told_once(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    ill, lost, lost_at_once = (alert(key, "CRITICAL") for key in "aab")
    clip, stop = "Clip the named heads (qk.clip).", "Stop, or go back to a checkpoint."
    ill["last"].update(stage=3, advice=f"{clip} It rescales W_Q and W_K.", do_first=clip)
    for each in (lost, lost_at_once):
        each["last"].update(stage=5, advice=f"{stop} Take the newest.", do_first=stop)
    more = "Cause: logit growth. Do: {}. More: python -m bellwether explain mine"
    clip, stop = more.format(clip[:-1]), more.format(stop[:-1])
    Answers.alerts = [ill]
    shown = begun(owner)
    asked_again()
    lines = [f"CRITICAL mine: a is ill. {clip}"]
    assert told(caplog) == lines
    Answers.alerts = [lost, lost_at_once]
    asked_again()
    lines += [f"CRITICAL mine: a is ill. {stop}", f"CRITICAL mine: b is ill. {stop}"]
    assert told(caplog) == lines
    Answers.alerts = [ill, lost_at_once]
    asked_again()
    Answers.alerts = [lost, lost_at_once]
    asked_again()
    assert told(caplog) == lines
    shown.end(ended(-1))


def test_no_more_than_so_many_lines(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    Answers.alerts = [alert(str(key), "WARNING") for key in range(terminal.LINES_MAX + 30)]
    shown = begun(owner)
    asked_again()
    lines = told(caplog)
    assert len(lines) == terminal.LINES_MAX + 1 and "the others are on the page" in lines[-1]
    shown.end(ended(-1))


def test_words_of_others_stay_on_their_line(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    nasty = alert("a", "WARNING")
    nasty["last"].update(summary="mine: \x1b[31mred\nsecond " + "long " * 300, cause="c\nd")
    Answers.alerts = [nasty]
    shown = begun(owner)
    asked_again()
    (line,) = told(caplog)
    assert "\n" not in line and "\x1b" not in line and len(line) < 400
    shown.end(ended(-1))


@pytest.mark.parametrize(
    ("judged", "said"),
    [
        (WHOLE, "healthy"),
        ({**WHOLE, "text": "nothing found in 5 steps"}, "nothing found in 5 steps"),
        ({"text": "judged by: loss"}, "no alert, but it is not wholly judged: judged by: loss"),
        (None, "no alert, but it is not wholly judged: not judged"),
    ],
)
def test_health_is_claimed_only_where_it_was_judged(
    owner: Owner, caplog: pytest.LogCaptureFixture, judged: Any, said: str
) -> None:
    caplog.set_level(logging.INFO, "bellwether")
    Answers.judged = judged
    begun(owner).end(ended(9, cost="watching cost 1 %"))
    line = f"run mine has ended at step 9; {said} (judged up to step 7); watching cost 1 %"
    assert told(caplog)[0] == line
    assert caplog.records[0].levelno == logging.INFO


def test_a_server_that_hangs_delays_the_end_by_little(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bellwether")
    Answers.hangs.set()
    shown = begun(owner)
    time.sleep(0.1)
    begin = time.monotonic()
    shown.end(ended())
    assert time.monotonic() - begin < terminal.LAST_SECONDS + 0.5
    assert "the server gave no answer" in told(caplog)[0] and len(told(caplog)) == 1


def test_a_run_is_asked_for_by_its_uuid(owner: Owner) -> None:
    shown = begun(owner)
    while len(Answers.runs) < 5:
        time.sleep(0.01)
    shown.end(ended())
    by_uuid = b"sixteen bytes...".hex()
    assert Answers.runs[:2] == ["mine", "mine"] and set(Answers.runs[2:]) == {by_uuid}


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_told_and_not_asked_again_soon(
    owner: Owner, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    Answers.status = status
    shown = begun(owner)
    until(lambda: len(told(caplog)) == 1)
    assert Answers.asked == 1
    (line,) = told(caplog)
    base = owner.page_url().partition("/?")[0]
    assert line.startswith(
        f"alerts of run mine are not heard, asking again: {base}: the server refused: "
    )
    caplog.set_level(logging.INFO, "bellwether")
    shown.end(ended())
    assert "is not known here: the server refused: " in told(caplog)[1]


def test_a_run_that_has_not_begun_is_no_failure(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    Answers.status = 404
    shown = begun(owner)
    until(lambda: Answers.asked > 8)
    Answers.status = 200
    asked_again()
    assert told(caplog) == []
    shown.end(ended(-1))


def test_a_server_that_takes_us_again_is_heard(
    owner: Owner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_REFUSED_SECONDS", 0.02)
    Answers.status = 401
    shown = begun(owner)
    asked_again()
    assert len(told(caplog)) == 1  # That it hears nothing; once.
    caplog.set_level(logging.INFO, "bellwether")
    Answers.alerts = [alert("a", "CRITICAL")]
    Answers.status = 200
    asked_again()
    assert "CRITICAL mine: a is ill" in told(caplog)[1]
    assert told(caplog)[2] == "alerts of run mine are heard again"
    shown.end(ended())


def test_alerts_no_longer_heard_are_said_since_when(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    shown = begun(owner)
    asked_again()
    Answers.status = 401
    said = "alerts of run mine are not heard since step 7, asking again: "
    until(lambda: [line.startswith(said) for line in told(caplog)] == [True])
    shown.end(ended(-1))


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://127.0.0.1:9/", " (the server's web.external_url, not https://): "),
        ("https://127.0.0.1:9/", " (the server's web.external_url): "),
        ("http://elsewhere.invalid/?token=t", "a token is sent by https"),
    ],
)
def test_a_page_that_cannot_be_reached_is_named_early(
    owner: Owner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, url: str,
    hint: str,
) -> None:  # fmt: skip
    other = Owner(url)
    monkeypatch.setattr(terminal, "tls_context", lambda *files: None)
    settings = bellwether.Settings(run="mine", tls_ca="ca.pem")
    shown = Terminal(settings, other.page_url, "127.0.0.1:7070")
    until(lambda: len(told(caplog)) == 1)
    (line,) = told(caplog)
    assert url.partition("?")[0].rstrip("/") in line and hint in line
    shown.end(ended(-1))


def test_certificates_that_were_renewed_are_shown(
    owner: Owner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(terminal, "tls_context", lambda *files: read.append(files))
    gone = Owner("http://127.0.0.1:9/")
    shown = Terminal(bellwether.Settings(run="mine"), gone.page_url, "127.0.0.1:7070")
    until(lambda: len(read) > 3)
    shown.end(ended(-1))


def test_alerts_not_heard_are_no_health(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bellwether")
    shown = begun(owner)
    asked_again()
    Answers.status = 403
    shown.end(ended(9))
    why = "what was judged after step 7 is not known here: the server refused: "
    assert f"; {why}" in told(caplog)[0]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"alerts": 5}', b'{"alerts": [{}]}'])
def test_answers_that_are_none_raise_nothing(
    owner: Owner, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    Answers.body = body
    shown = begun(owner)
    time.sleep(0.2)
    shown.end(ended())
    assert [line for line in told(caplog) if "Error" in line] == []


def test_no_thread_where_it_is_switched_off(
    owner: Owner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bellwether")
    off = bellwether.Settings(terminal=False, run="mine", server="127.0.0.1:9")
    with bellwether.attach(Model(Shape()), settings=off):
        names = [thread.name for thread in threading.enumerate()]
    assert "bellwether-terminal" not in names and told(caplog) == []


def test_a_large_share_comes_with_its_reason() -> None:
    def cost(step_seconds: float) -> Cost:
        of = Cost()
        for number in range(100):
            sampled = number % 4 == 0
            took = step_seconds + 0.02 * sampled
            of.count(0.02 * sampled, 0.0, took, sampled, None)
        return of

    short, usual = cost(0.01), cost(2.0)
    line = short.line(4, 2, False)
    assert line is not None and "as steps are short: 10 ms, and a sample takes 20 ms" in line
    assert "as steps are short: 10 ms" in short.sentence(4)
    assert "steps are short" not in str(usual.line(4, 2, False)) + usual.sentence(4)
    assert Cost().sentence(4) == ""


@pytest.mark.parametrize("path", ["x.bwrun", None])
def test_nothing_sent_is_said_at_the_end(
    caplog: pytest.LogCaptureFixture, path: Optional[str]
) -> None:
    caplog.set_level(logging.INFO, "bellwether")
    done = "sent" if path is None else "recorded"
    for sent_some, what in ((False, "nothing"), (True, "nothing more")):
        shown = Terminal(bellwether.Settings(run="mine"), Owner("").page_url, None)
        shown.end(ended(record_path=path, unsent="no\nmemory", sent_some=sent_some))
        line, *where = told(caplog)
        assert line == f"run mine has ended at step 7; {what} was {done}: no memory"
        assert any("it is recorded" in line for line in where) == (sent_some and path is not None)
        assert caplog.records[0].levelno == logging.WARNING
        caplog.clear()


SCRIPT = """
import sys, torch, bellwether
sys.path.insert(0, {tests!r})
from models import Model, Shape, batch
model = Model(Shape())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mon = bellwether.attach(model, run="real", every=2, overhead_budget=1e9)
for step in range(120):
    model(batch(model.shape, step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    mon.step(loss=float("nan") if step > 60 else 1 / (1 + step))
mon.flush(60)
"""


@pytest.fixture
def private() -> Iterator[None]:
    yield
    running = private_server.running()
    if running is not None:
        os.kill(running.pid, signal.SIGTERM)


def script() -> str:
    text = SCRIPT.format(tests=str(Path(__file__).parent))
    told = {**os.environ, "PYTHONPATH": str(ROOT / "client_lib/python")}
    done = subprocess.run(
        [sys.executable, "-c", text], env=told, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout == "", done.stderr
    return done.stderr


def test_a_script_with_a_private_server_is_told(private: None) -> None:
    lines = script().splitlines()
    assert next(line for line in lines if " CRITICAL " in line).startswith(
        "bellwether: CRITICAL real: "
    )
    (goodbye,) = [line for line in lines if "has ended" in line]
    assert goodbye.startswith("bellwether: run real has ended at step 119; ")
    assert "critical: " in goodbye and "since step 61" in goodbye
    addresses = [line for line in lines if "http://" in line]
    assert len(addresses) == 2 and len(set(addresses)) == 1  # At the start, and at the end.
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=\S+#/run/real", addresses[0])
    folder = private_server.state_folder() / "data"
    assert re.fullmatch(rf"bellwether: the data of all your runs, \d+ MB: {folder}", lines[-1])
