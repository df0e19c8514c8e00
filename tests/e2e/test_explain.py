"""Goal: `python -m bellwether explain` tells a run as the server has it, in words and as JSON of
documented fields, with exit codes; `python -m bellwether open` prints the page of a run.
Method: the commands against a real bellwetherd with recorded runs, against a private server that
has ended, and where there is none.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, free_port, wait_for

from bellwether import __main__ as bellwether_main
from bellwether._server import private_server
from bellwether.tools import explain, open_page

ILL, SOUND = "gpt-flash-s4", "gpt-center-s4"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        for run in (ILL, SOUND):
            server.run("run", "import", str(ROOT / f"tests/testdata/runs/{run}.bwrun"))
        yield server


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("BELLWETHER_PAGE", "BELLWETHER_SERVER", "BELLWETHER_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


def told(capsys: pytest.CaptureFixture[str], server: Server, run: str, *words: str) -> tuple[int, Any]:
    code = explain.main([run, "--json", "--page", f"http://{server.http}/?token=secret", *words])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


def test_an_ill_run_is_told_as_the_server_has_it(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = told(capsys, server, ILL)
    run = server.json("run", "get", ILL)
    assert code == explain.OK and found["format"] == explain.FORMAT
    assert (found["run"]["name"], found["run"]["step"]) == (ILL, int(run["step"]))
    assert (found["verdict"], found["severity"]) == ("ill", "critical")
    assert found["stage"] == run["stage"] and found["run"]["imported"]
    alerts = server.json("alert", "list", "--run", ILL)["alerts"]
    assert {each["key"] for each in found["alerts"]} == {each["last"]["key"] for each in alerts}
    first = found["alerts"][0]
    (last,) = [each["last"] for each in alerts if each["last"]["key"] == first["key"]]
    assert first["state"] == "firing" and first["severity"] == "critical"
    assert (first["layer"], first["head"]) == (
        None if last["layer"] < 0 else last["layer"], None if last["head"] < 0 else last["head"],
    )  # fmt: skip
    assert first["advice"] == last["advice"] and f"{ILL}: {first['summary']}" == last["summary"]
    assert [each["signal"] for each in first["evidence"]] == [each["signal"] for each in last["evidence"]]
    assert found["do"][0] == {"alert": first["key"], "text": first["do"], "command": None}
    assert first["do"] and first["advice"].startswith(first["do"])
    assert found["page"] == f"http://{server.http}/#/run/{ILL}"  # A token stays out of logs.


@pytest.mark.parametrize("run", [ILL, SOUND])
def test_both_commands_tell_the_same(
    server: Server, capsys: pytest.CaptureFixture[str], run: str
) -> None:
    page = ["--page", f"http://{server.http}"]
    for python, command in ((["--json"], ["-o", "json"]), ([], [])):
        assert explain.main([run, *python, *page]) == explain.OK
        assert server.run("run", "explain", run, *command) == capsys.readouterr().out
    ill = explain.FINDINGS if run == ILL else explain.OK
    server.run("run", "explain", run, "--exit-code", exit_code=ill)
    server.run("run", "explain", "no-such-run", exit_code=explain.FAILED)


def test_exit_codes_tell_what_became_of_it(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ["--page", f"http://{server.http}"]
    assert explain.main([ILL, "--exit-code", *page]) == explain.FINDINGS
    assert explain.main([SOUND, "--exit-code", *page]) == explain.OK
    assert explain.main(["nobody", *page]) == explain.FAILED
    assert "no run has this name" in capsys.readouterr().err
    assert explain.main([ILL, "--page", "http://127.0.0.1:9"]) == explain.UNREACHABLE
    with pytest.raises(SystemExit) as ended:
        explain.main([])
    assert ended.value.code == 2


def test_a_sound_run_claims_only_what_was_judged(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = told(capsys, server, SOUND)
    run = server.json("run", "get", SOUND)
    counts = [each for each in found["alerts"] if each["severity"] != "info"]
    assert counts == [] and found["severity"] is None and found["do"] == []
    assert found["verdict"] == (run["judged"]["text"] if run["judged"]["whole"] else "not judged")
    assert found["judged"]["text"] == run["judged"]["text"]


def test_words_for_people_name_evidence_and_advice(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.main([ILL, "--page", f"http://{server.http}"]) == explain.OK
    said = capsys.readouterr().out
    assert said.startswith(f"{ILL}: ill, ended, step ")
    assert "\n  why: " in said and "\ndo: " in said
    assert said.splitlines()[-1] == f"http://{server.http}/#/run/{ILL}"


def test_a_false_alarm_does_not_make_a_run_ill(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    _, before = told(capsys, server, ILL)
    firing = [each["key"] for each in before["alerts"] if each["state"] == "firing"]
    try:
        for key in firing:
            server.call("MarkFalseAlarm", run=ILL, key=key, by="me", reason="a test of ours")
        _, found = told(capsys, server, ILL)
        marked = [each for each in found["alerts"] if each["key"] in firing]
        assert all(each["false_alarm"] == "a test of ours" for each in marked)
        assert found["severity"] is None and found["verdict"] != "ill" and found["do"] == []
    finally:
        for key in firing:
            server.call("MarkFalseAlarm", run=ILL, key=key, by="me", reason="", undo=True)


def test_open_prints_the_address_alone(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    page = f"http://{server.http}/?token=t"
    assert open_page.main([ILL, "--page", page]) == open_page.OK
    assert capsys.readouterr().out == f"http://{server.http}/?token=t#/run/{ILL}\n"
    assert open_page.main(["--page", page]) == open_page.OK
    assert capsys.readouterr().out == f"http://{server.http}/?token=t\n"
    assert open_page.main(["nobody", "--page", page]) == open_page.FAILED
    assert SOUND in capsys.readouterr().err
    assert open_page.main(["--page", "http://127.0.0.1:9"]) == open_page.UNREACHABLE


def test_the_page_beside_the_named_server_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = Server(tmp_path)
    while True:  # Until the next port is free, too.
        port = free_port()
        with socket.socket() as one_above:
            if one_above.connect_ex(("127.0.0.1", port + 1)) != 0:
                break
    beside.grpc, beside.http = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
    with beside:
        beside.run("run", "import", str(ROOT / f"tests/testdata/runs/{ILL}.bwrun"))
        monkeypatch.setenv("BELLWETHER_SERVER", beside.grpc)
        assert open_page.main([ILL]) == open_page.OK
        assert capsys.readouterr().out == f"http://{beside.http}/#/run/{ILL}\n"
        assert explain.main([ILL]) == explain.OK
    # It is away: no private server takes its place.
    assert open_page.main([]) == open_page.UNREACHABLE
    assert private_server.running() is None


def test_commands_say_what_to_type_instead(capsys: pytest.CaptureFixture[str]) -> None:
    assert bellwether_main.main(["exlpain", "x"]) == 2
    assert 'no command "exlpain"; did you mean explain?' in capsys.readouterr().err
    assert explain.main(["x", "--page", "127.0.0.1:9"]) != explain.OK
    assert "must begin with http://" in capsys.readouterr().err
    assert explain.main(["x", "--page", "http://127.0.0.1:9"]) == explain.UNREACHABLE
    told = capsys.readouterr().err
    assert "no answer ([Errno 111] Connection refused)" in told and "bellwether open" in told


def test_open_starts_an_ended_private_server_again() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "client_lib/python")}

    def bellwether(*words: str) -> subprocess.CompletedProcess[str]:
        called = [sys.executable, "-m", "bellwether", *words]
        return subprocess.run(called, env=env, capture_output=True, text=True, timeout=120)

    pids = []
    try:
        first = private_server.join_or_start()
        pids.append(first.pid)
        recording = str(ROOT / f"tests/testdata/runs/{SOUND}.bwrun")
        command = [*Server(Path()).program("bellwether"), "--server", first.grpc, "run", "import", recording]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        # A server at the usual place would be asked first; here is none.
        explained = bellwether("explain", SOUND).stdout
        assert explained.startswith(SOUND)
        # Its token alone opens its page.
        page = first.page_url(SOUND)
        assert f"?token={first.token}#" in page and explained.splitlines()[-1] == page
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert browser.open(page.partition("#")[0], timeout=60).status == 200
        command = [*Server(Path()).program("bellwether"), "run", "explain", SOUND]
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=120)
        assert done.stdout == explained
        os.kill(first.pid, signal.SIGTERM)
        os.waitpid(first.pid, 0)
        done = bellwether("open", SOUND)
        again = private_server.running()
        assert again is not None
        pids.append(again.pid)
        assert done.returncode == 0 and "is started over" in done.stderr, done.stderr
        assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/\?token=\S+#/run/{SOUND}\n", done.stdout)
    finally:
        for pid in pids[-1:]:
            os.kill(pid, signal.SIGTERM)
        wait_for("it has ended", lambda: private_server.running() is None)
