"""Goal: the first job starts the user's server, the next joins it, a dead one is replaced, and
without one the run is recorded and says so.
Method: a small program in the place of bellwetherd that speaks its ready file.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import bellwether
from bellwether._native import c_api
from bellwether._server import private_server
from bellwether._server.state_file import StateFile
from bellwether.tools import doctor

from models import Model, Shape, batch
from recording import Recording

FAKE = """#!{python}
import json, os, socket, sys
flags = dict(a.lstrip("-").split("=", 1) for a in sys.argv[1:])
with open(os.path.join(os.path.dirname(__file__), "starts"), "a") as f:
    f.write(json.dumps(flags) + chr(10))
if os.path.exists(os.path.join(os.path.dirname(__file__), "broken")):
    sys.exit("no space left for anything")
held = os.path.join(os.path.dirname(__file__), "held")
if os.path.exists(held):
    left = int(open(held).read())
    os.remove(held)
    if left > 1:
        open(held, "w").write(str(left - 1))
    sys.exit("it is held by another process: one server per directory")
path = flags["grpc.listen-address"][len("unix:"):]
s = socket.socket(socket.AF_UNIX); s.bind(path); s.listen(16)
temporary = flags["ready.file"] + ".tmp"
with open(temporary, "w") as f:
    json.dump(dict(pid=os.getpid(), grpc="unix:" + path, http="http://127.0.0.1:9", token="t"), f)
os.rename(temporary, flags["ready.file"])
while True:
    s.accept()[0].close()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "programs"
    folder.mkdir()
    program = folder / "bellwetherd"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    real = c_api.find

    def find(name: str) -> object:
        return program if name == c_api.SERVER else real(name)

    monkeypatch.setattr(c_api, "find", find)
    yield folder
    for ready in private_server.state_folder().rglob(private_server.READY_FILE):
        pid = json.loads(ready.read_text())["pid"]
        if pid > 0:
            os.kill(pid, signal.SIGTERM)


def starts(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "starts").read_text().splitlines()]


def test_started_once_by_many(fake: Path) -> None:
    found: list[private_server.PrivateServer] = []
    threads = [
        threading.Thread(target=lambda: found.append(private_server.join_or_start()))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(found)) == 1
    (flags,) = starts(fake)
    assert flags["web.listen-address"] == "127.0.0.1:0" and flags["lifetime.idle-exit"] == "300s"
    assert found[0].page_url("r") == "http://127.0.0.1:9/?token=t#/run/r"
    folder = private_server.state_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_dead_one_is_replaced(fake: Path) -> None:
    first = private_server.join_or_start()
    os.kill(first.pid, signal.SIGKILL)
    os.waitpid(first.pid, 0)
    second = private_server.join_or_start()
    assert second.pid != first.pid and len(starts(fake)) == 2


def test_server_of_another_machine_is_left_alone(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = private_server.state_folder()
    folder.mkdir(parents=True)
    # As a home on NFS shows it: the socket is there, and nobody here listens at it.
    path, ready = folder / "grpc.sock", folder / private_server.READY_FILE
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        told = dict(pid=0, grpc=f"unix:{path}", http="http://127.0.0.1:5", token="t")
        ready.write_text(json.dumps(told))
        (folder / private_server.HOST_FILE).write_text("elsewhere\n0-0-0\n")
        before = {p.name: p.stat() for p in (path, ready)}
        own = private_server.join_or_start()
        assert own == private_server.join_or_start() and len(starts(fake)) == 1
        assert {p.name: p.stat() for p in (path, ready)} == before
        assert json.loads(ready.read_text()) == told
    (flags,) = starts(fake)
    place = str(folder / private_server.HOSTS / socket.gethostname())
    assert flags["storage.path"].startswith(place) and flags["ready.file"].startswith(place)
    # Theirs has ended: whoever comes next has the folder, but for those that run here.
    ready.unlink()
    assert private_server.join_or_start() == own
    os.kill(own.pid, signal.SIGKILL)
    os.waitpid(own.pid, 0)
    private_server.join_or_start()
    assert starts(fake)[-1]["ready.file"] == str(ready)
    (Path(place) / private_server.READY_FILE).unlink()


@pytest.mark.parametrize("told", ["{name}\nanother boot\n", "container\n{boot}\n", ""])
def test_dead_server_of_this_machine_is_replaced(told: str, fake: Path) -> None:
    name, boot = private_server._this_host().splitlines()
    folder = private_server.state_folder()
    folder.mkdir(parents=True)
    dead = dict(pid=0, grpc=f"unix:{folder / 'grpc.sock'}", http="", token="")
    (folder / private_server.READY_FILE).write_text(json.dumps(dead))
    (folder / private_server.HOST_FILE).write_text(told.format(name=name, boot=boot))
    private_server.join_or_start()
    assert starts(fake)[0]["ready.file"] == str(folder / private_server.READY_FILE)
    assert (folder / private_server.HOST_FILE).read_text() == private_server._this_host()


def test_folder_that_the_last_server_still_closes_is_awaited(fake: Path) -> None:
    (fake / "held").write_text("4")
    server = private_server.join_or_start()
    assert server.token == "t" and len(starts(fake)) == 5
    assert private_server.join_or_start() == server


def test_server_that_does_not_start_says_why(fake: Path) -> None:
    (fake / "broken").touch()
    with pytest.raises(private_server.ServerError, match="no space left"):
        private_server.join_or_start()


@pytest.mark.parametrize("name", [b"deep" * 30, b"st\xffate"], ids=["deep", "no-utf8"])
def test_unaddressable_state_folders_get_short_sockets(
    name: bytes, fake: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(private_server.tempfile, "gettempdir", lambda: str(tmp_path))
    if len(str(tmp_path)) > 60:
        monkeypatch.setattr(private_server.tempfile, "gettempdir", lambda: "/tmp")
    servers = []
    for end in (b"/a", b"/b"):
        state = os.fsencode(tmp_path) + b"/" + name + end
        monkeypatch.setenv("XDG_STATE_HOME", os.fsdecode(state))
        server = private_server.join_or_start()
        assert private_server.join_or_start() == server and starts(fake)[-1]["storage.path"] == (
            os.fsdecode(state + b"/bellwether/data")
        )
        model = Model(Shape())
        with bellwether.attach(model, run="there") as monitor:
            assert monitor.live() and monitor.server == server.grpc and server.grpc.isascii()
        assert len(server.grpc) < 108
        servers.append(server)
        os.kill(server.pid, signal.SIGTERM)
        os.waitpid(server.pid, 0)
        (private_server.state_folder() / private_server.READY_FILE).unlink()
    assert servers[0].grpc != servers[1].grpc


def test_held_lock_and_foreign_files_are_not_awaited(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_server, "LOCK_SECONDS", 0.1)
    folder = private_server.state_folder()
    folder.mkdir(parents=True)
    with open(folder / "server.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(private_server.ServerError, match=r"server.lock was held for 0.1 s"):
            private_server.join_or_start()
    for name in ("server.lock", "server.log", private_server.HOST_FILE):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(private_server.ServerError, match=f"{name}: it is a FIFO, must be"):
            private_server.join_or_start()
        (folder / name).unlink()
    assert not (fake / "starts").exists()


def test_without_a_server_the_run_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = c_api.find
    monkeypatch.setattr(c_api, "find", lambda n: None if n == c_api.SERVER else real(n))
    monkeypatch.chdir(tmp_path)
    model = Model(Shape())
    with bellwether.attach(model, run="lonely") as monitor:
        assert monitor.record_path == "lonely.bwrun"
        model(batch(Shape(), 0)).sum().backward()
        monitor.step(loss=1.0)
        assert monitor.flush(20)
    assert len(Recording(tmp_path / "lonely.bwrun").frames) == 1


def test_without_a_home_the_run_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose user is a number without an entry."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert private_server.running() is None
    model = Model(Shape())
    with bellwether.attach(model, run="homeless") as monitor:
        assert monitor.record_path == "homeless.bwrun"
        model(batch(Shape(), 0)).sum().backward()
        monitor.step(loss=1.0)
        assert monitor.flush(20)
    assert len(Recording(tmp_path / "homeless.bwrun").frames) == 1
    assert "has no home: set HOME or XDG_STATE_HOME" in caplog.text
    (finding,) = doctor.server_findings(None)
    assert finding.ok is False and "has no home" in finding.text
    remembered = StateFile("scans", "one")
    assert remembered.read() is None
    with pytest.raises(OSError, match="has no home"):
        remembered.write({})


def test_attach_uses_the_private_server(fake: Path) -> None:
    with bellwether.attach(Model(Shape()), run="private") as monitor:
        assert monitor.server is not None and monitor.server.startswith("unix:")
        assert monitor.page_url == "http://127.0.0.1:9/?token=t#/run/private"
        assert monitor.record_path is None
