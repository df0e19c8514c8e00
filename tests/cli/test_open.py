"""`bellwether open`: a run's page, also after its private server has ended.

Goal: the address is printed alone, and a browser is opened on a desktop only. The runs of a private
server that has ended are told of and come back, by this command as by Python's.
Method: the real command against a real bellwetherd and against private servers that it, or Python,
has started in a state folder of the test's own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, wait_for

RECORDING = ROOT / "tests/testdata/runs/gpt-live-flash-s14.bwrun"
RUN = "gpt-live-flash-s14"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    for ready in tmp_path.rglob("server.json"):
        os.kill(json.loads(ready.read_text())["pid"], signal.SIGTERM)
        wait_for("the private server has ended", lambda file=ready: not file.exists())


def command(state: Path, *words: str, code: int = 0, **env: str) -> tuple[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BELLWETHER_")}
    clean = {k: v for k, v in clean.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")}
    done = subprocess.run(
        [BIN / "bellwether", *words], capture_output=True, text=True, timeout=60,
        env={**clean, "XDG_STATE_HOME": str(state), **env},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_a_servers_page_is_printed_alone(tmp_path: Path, state: Path) -> None:
    with Server(tmp_path) as server:
        server.run("run", "import", str(RECORDING))
        to = ("--server", server.grpc)
        assert command(state, *to, "open", RUN) == (f"http://{server.http}/#/run/{RUN}\n", "")
        assert command(state, *to, "open") == (f"http://{server.http}/\n", "")
        assert "did you mean" in command(state, *to, "open", "gpt-live-flsh-s14", code=1)[1]
        server.run("run", "import", str(RECORDING), "--name", "a/b:c")
        assert command(state, *to, "open", "a/b:c")[0] == f"http://{server.http}/#/run/a%2Fb%3Ac\n"


def test_a_browser_is_for_desktops_only(tmp_path: Path, state: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/told.part; mv {tmp_path}/told.part {tmp_path}/told\n')
    browser.chmod(0o755)
    told = tmp_path / "told"
    with Server(tmp_path) as server:
        to = ("--server", server.grpc, "open")
        command(state, *to, BROWSER=str(browser))
        command(state, *to, "--print", BROWSER=str(browser), DISPLAY=":9")
        assert not told.exists()
        url, _ = command(state, *to, BROWSER=f"no-such-browser:{browser} --new %s", DISPLAY=":9")
        wait_for("the browser is told", told.exists)
        assert told.read_text() == f"--new {url}"


def test_a_server_without_page_says_so(tmp_path: Path, state: Path) -> None:
    server = Server(tmp_path)
    server.http = "none"
    with server:
        assert "serves no page" in command(state, "--server", server.grpc, "open", code=1)[1]


def test_runs_of_an_ended_private_server_come_back(state: Path) -> None:
    url, told = command(state, "open")
    data = state / "bellwether/data"
    assert f"your private server is started over {data}" in told
    assert "?token=" in url and url.startswith("http://127.0.0.1:")
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    assert browser.open(url.strip(), timeout=10).status == 200
    command(state, "run", "import", str(RECORDING))
    ready = state / "bellwether/server.json"
    os.kill(json.loads(ready.read_text())["pid"], signal.SIGTERM)  # As it does when idle.
    wait_for("the private server has ended", lambda: not ready.exists())

    _, told = command(state, "run", "list", code=4)
    assert f"the runs of your training scripts are in {data}" in told and "`bellwether open`" in told
    url, told = command(state, "open", RUN)
    assert f"#/run/{RUN}" in url and str(data) in told
    assert command(state, "run", "list")[0].splitlines()[1].startswith(RUN)
    again, told = command(state, "open", RUN)
    assert (again, told) == (url, "")  # It is found, and not started twice.


def test_an_empty_server_tells_of_private_runs(tmp_path: Path, state: Path) -> None:
    command(state, "open")
    command(state, "run", "import", str(RECORDING))
    with Server(tmp_path) as server:
        told = command(state, "--server", server.grpc, "run", "list")[1]
        assert f"the runs of your training scripts are in {state / 'bellwether/data'}" in told
        assert "`bellwether open --private`" in told
        assert "`bellwether open --private`" in command(state, "--server", server.grpc, "run", "get", RUN, code=1)[1]
        url, _ = command(state, "--server", server.grpc, "open", "--private", RUN)
    assert server.http not in url and f"#/run/{RUN}" in url


def test_python_finds_what_this_command_started(state: Path) -> None:
    url, _ = command(state, "open")
    env = {**os.environ, "XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT / "client_lib/python")}
    for words, elsewhere in (([], {}), (["--private"], {"BELLWETHER_PAGE": "http://127.0.0.1:9"})):
        done = subprocess.run(
            [sys.executable, "-m", "bellwether", "open", "--print", *words],
            capture_output=True, text=True, env={**env, **elsewhere},
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, url), done.stderr


def test_a_long_state_folder_gets_a_short_socket(tmp_path: Path) -> None:
    state = tmp_path / ("long" * 30)
    try:
        command(state, "open")
        ready = json.loads((state / "bellwether/server.json").read_text())
        assert len(ready["grpc"]) < 108
        command(state, "run", "list")
    finally:
        os.kill(ready["pid"], signal.SIGTERM)
        wait_for("it has ended", lambda: not (state / "bellwether/server.json").exists())


def test_without_program_it_says_so(tmp_path: Path, state: Path) -> None:
    alone = tmp_path / "bellwether"
    alone.write_bytes((BIN / "bellwether").read_bytes())
    alone.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(state), "HOME": str(tmp_path)}
    done = subprocess.run([alone, "open"], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "bellwetherd cannot be started" in done.stderr
