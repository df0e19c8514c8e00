"""Goal: the unit is confined, with a GPU and without; bellwetherd tells systemd when it is ready,
reloads and ends, and keeps its data where systemd says.
Method: systemd's own checker on the unit, with an open one as the planted fault; the real server
with a real socket in $NOTIFY_SOCKET. tests/deploy/test_package.py starts it under a real systemd.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server

UNIT = ROOT / "deploy/systemd/bellwetherd.service"
GPU = ROOT / "deploy/systemd/bellwetherd.service.d/gpu.conf"


def exposure(unit: Path) -> subprocess.CompletedProcess[str]:
    """Exit status 0: an exposure of 2.5 at most."""
    return subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", unit],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("drop_ins", [[], [GPU]], ids=["cpu", "gpu"])
def test_the_unit_is_confined(tmp_path: Path, drop_ins: list[Path]) -> None:
    # A drop-in is read as if it stood behind the unit.
    merged = tmp_path / "bellwetherd.service"
    merged.write_text("".join(file.read_text() for file in [UNIT, *drop_ins]))
    judged = exposure(merged)
    assert judged.returncode == 0, judged.stdout + judged.stderr

    merged.write_text("[Service]\nExecStart=/usr/bin/bellwetherd\n")
    assert exposure(merged).returncode != 0


class Manager:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(60)
        self._socket.bind(address.replace("@", "\0", 1))
        self.address = address

    def told(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().splitlines())

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@bellwether-test-{os.getpid()}"
    opened = Manager(address)
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    yield opened
    opened.close()


def test_systemd_is_told_what_happens(manager: Manager, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text("thresholds: {norm: {peer_factor: 3}}\n")
    with Server(tmp_path, "", f"--rules.file={rules}") as server:
        assert server.process is not None
        assert manager.told() == {"READY": "1"}
        assert server.get("/-/ready") == "ready\n"
        for text in ("thresholds: {norm: {peer_factor: 4}}\n", "thresholds: {nrm: 1}\n"):
            rules.write_text(text)
            server.process.send_signal(signal.SIGHUP)
            reloading = manager.told()
            assert reloading["RELOADING"] == "1" and int(reloading["MONOTONIC_USEC"]) > 0
            # Also after a bad file: the old rules stay in force, the service is as ready as it was.
            assert manager.told() == {"READY": "1"}
        assert server.stop() == 0
        assert manager.told() == {"STOPPING": "1"}


def test_a_socket_that_is_gone_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    with Server(tmp_path) as server:
        assert server.get("/-/ready") == "ready\n"
        assert server.stop() == 0


def test_data_is_kept_where_systemd_says(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "STATE_DIRECTORY": f"{tmp_path / 'state'}:/elsewhere"}
    told = subprocess.run(
        [BIN / "bellwetherd", "--help"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"--storage.path .*\[" + re.escape(str(tmp_path / "state")) + r"\]", told), told
