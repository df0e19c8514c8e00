"""Real processes for the tests: bellwetherd with its data in a folder, and the command."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("BELLWETHER_LIB_DIR", ROOT / "build/cpu/bin"))
sys.path.insert(0, str(ROOT / "client_lib/python"))


def cusolver_flags() -> list[str]:
    """BELLWETHER_CUSOLVER names a cuSOLVER that the loader does not find by itself."""
    name = os.environ.get("BELLWETHER_CUSOLVER")
    return [f"--gpu.cusolver={name}"] if name else []


_held: list[socket.socket] = []


def free_port() -> int:
    """A port, free on every address, that is given to no other caller until this process ends: a
    socket that does not listen stays bound to it.  The server that it is for may bind it all the
    same, on any address, again and again, as it sets SO_REUSEADDR, which all of ours do, and Go's,
    PostgreSQL, PyTorch and http.server.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("0.0.0.0", 0))
    _held.append(held)
    return int(held.getsockname()[1])


def wait_for(what: str, condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Returns the condition's first true value; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.01)


def await_silence(told: Callable[[], int], seconds: float = 0.5, within: float = 10) -> int:
    """What was committed may still be told: until nothing more is for so long.  What was then."""
    last, since = told(), time.monotonic()

    def silent() -> bool:
        nonlocal last, since
        if (now := told()) != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since >= seconds

    wait_for("nothing more is told", silent, within)
    return last


class Server:
    """A bellwetherd on fixed loopback ports, so that a restart is found again."""

    def __init__(self, folder: Path, config: str = "", *flags: str) -> None:
        self.folder = folder
        self.grpc = f"127.0.0.1:{free_port()}"
        self.http = f"127.0.0.1:{free_port()}"
        self.storage = folder / "data"
        self.environment: dict[str, str] = {}  # Of bellwetherd, beside the test's own.
        self.bearer = ""  # A token to ask with, where the page wants one.
        self.flags = list(flags)
        if config:
            (folder / "server.yml").write_text(config)
            self.flags.append(f"--config.file={folder / 'server.yml'}")
        self.process: Optional[subprocess.Popen[bytes]] = None

    def program(self, name: str) -> list[str]:
        """How a program of ours is called."""
        return [str(BIN / name)]

    def start(self) -> Server:
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.program("bellwetherd"),
                    f"--storage.path={self.storage}",
                    f"--grpc.listen-address={self.grpc}",
                    f"--web.listen-address={self.http}",
                    f"--ready.file={ready}",
                    *self.flags,
                ],
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment},
            )
        process = self.process
        wait_for("bellwetherd is ready", lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None, self.log()
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @contextmanager
    def paused(self) -> Iterator[None]:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=60)

    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def run(self, *words: str, exit_code: int = 0) -> str:
        done = subprocess.run(
            [*self.program("bellwether"), "--server", self.grpc, *words], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == exit_code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "-o", "json"))

    def metric(self, name: str) -> float:
        """The sum of all series of that name."""
        lines = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, lines))

    def await_applied(self) -> None:
        """What the log held at the start is applied."""
        wait_for("the log is applied", lambda: self.metric("bellwether_wal_unapplied_frames") == 0, 60)

    def await_end(self, run: str, attempt: int = 0) -> None:
        """A job's sender outlives it, and may come after its end."""

        def over() -> bool:
            runs = self.call("ListRuns").get("runs", [])
            ended = [r["description"] for r in runs if r["ended"]]
            return (run, attempt) in [(d["name"], int(d.get("attempt", 0))) for d in ended]

        wait_for(f"{run} has ended, attempt {attempt}", over)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.bearer}"} if self.bearer else {}

    def call(self, method: str, **request: Any) -> Any:
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json", **self._headers()}
        url = urllib.request.Request(f"http://{self.http}/api/v1/{method}", data=body, headers=headers)
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as e:
            why = e.read()  # Shown where nobody expects the error, and there for whoever does.
            said = f"{e.msg}: {why.decode(errors='replace')}"
            raise urllib.error.HTTPError(e.url, e.code, said, e.headers, io.BytesIO(why)) from None

    def get(self, path: str) -> str:
        url = urllib.request.Request(f"http://{self.http}{path}", headers=self._headers())
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())

    def series(self, run: str, signal_name: str, layer: int = 0, head: int = 0) -> dict[int, float]:
        """Every stored value by its step; asks in ranges of steps, none of which is downsampled."""
        whole: dict[int, float] = {}
        width = 8_000
        # One range more: what is told of the run is a little behind what is stored.
        for begin in range(0, int(self.call("GetRun", run=run)["step"]) + 1 + width, width):
            answer = self.call(
                "GetSeries",
                run=run,
                series=[{"signal": signal_name, "layer": layer, "head": head}],
                points_max=10_000,
                step_begin=begin,
                step_end=begin + width,
                attempt=-1,
            )["series"][0]
            assert not answer["downsampled"]
            whole |= zip(map(int, answer["step"]), map(float, answer["mean"]))
        return whole

    def alert_log(self, run: str) -> list[dict[str, Any]]:
        """Every transition of the run's alerts in the order of steps, without what is the server's
        own: its clock, its count, the run's uuid."""
        log = []
        for alert in self.call("ListAlerts", run=run, limit=1000)["alerts"]:
            log += self.call("GetAlert", run=run, key=alert["last"]["key"])["alert"]["history"]
        for transition in log:
            for field in ("time_unix_ns", "id", "run_uuid"):
                transition.pop(field, None)
        return sorted(log, key=lambda t: (int(t["step"]), t["key"], t["k"]))
