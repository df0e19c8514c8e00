"""Goal: connections grow old and are made anew without loss.  A trainer loses no step and sends
none twice, a watch receives everything once, servers come and go meanwhile.
Method: a real bellwetherd whose connections live for a second or two, real senders and the real
command over several of those ages; the server's own bytes on the wire, read from a socket.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, wait_for
from tcp_link import Link

from bellwether.client import Block, RunClient, RunOptions

RECORDING = ROOT / "tests/testdata/runs/gpt-center-s4.bwrun"
AGES = "grpc: {connection_age_seconds: 1, connection_age_grace_seconds: 1}\n"
LAYERS, HEADS = 2, 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, AGES) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for command in Command.all:
        command.process.kill()
    Command.all.clear()


class Command:
    """`bellwether ... -o json` that runs; its lines as they come."""

    all: ClassVar[list[Command]] = []

    def __init__(self, server: Server, *words: str, address: str = "") -> None:
        self.process = subprocess.Popen(
            [str(BIN / "bellwether"), "--server", address or server.grpc, *words, "-o", "json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        Command.all.append(self)
        self.lines: list[dict[str, Any]] = []
        self.words = ""
        self._threads = [
            threading.Thread(target=read, daemon=True) for read in (self._read, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.words += line

    def ended(self) -> int:
        code = self.process.wait(60)
        for thread in self._threads:
            thread.join()
        return code

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.ended()


def client(server: Server, run: str, **options: Any) -> RunClient:
    return RunClient(RunOptions(run=run, layers=LAYERS, heads=HEADS, server=server.grpc, **options))


def push(to: RunClient, step: int, sigma: float = 1.0) -> bool:
    values = [sigma] * (LAYERS * HEADS)
    return to.push(
        step, [Block("loss", [float(step)]), Block("wq_sigma", values, 0, LAYERS, 0, HEADS)]
    )


def fall_ill(server: Server, run: str) -> None:
    """A run of a few steps, whose last ones raise alerts: all of them are stored."""
    trainer = client(server, run)
    for step in range(8):
        assert push(trainer, step, math.nan if step > 4 else 1.0)
    assert trainer.flush(30), trainer.counters()
    trainer.close()
    wait_for(f"{run} has ended", lambda: server.call("GetRun", run=run).get("ended"))
    assert server.call("ListAlerts", run=run).get("alerts"), f"{run} is not ill"


def ended_calls(server: Server, method: str) -> float:
    calls = re.findall(
        rf'^grpc_server_handled_total{{[^}}]*grpc_method="{method}"[^}}]*}} (\S+)$',
        server.get("/metrics"),
        re.MULTILINE,
    )
    return sum(map(float, calls))


def await_ages(server: Server, method: str, ages: int) -> None:
    before = ended_calls(server, method)
    wait_for(
        f"{method} has ended {ages} times", lambda: ended_calls(server, method) >= before + ages, 60
    )


def told_alerts(watch: Command) -> list[tuple[int, str, str]]:
    return [(int(line["id"]), line["run"], line["key"]) for line in list(watch.lines)]


def stored_alerts(server: Server, runs: list[str]) -> list[tuple[int, str, str]]:
    """Every transition of these runs, by its id."""
    told = []
    for run in runs:
        for alert in server.call("ListAlerts", run=run, limit=1000)["alerts"]:
            key = alert["last"]["key"]
            history = server.call("GetAlert", run=run, key=key)["alert"]["history"]
            told += [(int(transition["id"]), run, key) for transition in history]
    return sorted(told)


def test_a_trainer_goes_on_over_its_connections(server: Server, tmp_path: Path) -> None:
    log = tmp_path / "sender.log"
    trainer = client(server, "old", log_path=str(log), ring_frames=4096)
    stop = threading.Event()
    steps = 0

    def train() -> None:
        nonlocal steps
        while not stop.wait(0.002):
            assert push(trainer, steps)
            steps += 1

    thread = threading.Thread(target=train)
    thread.start()
    wait_for("it has come back four times", lambda: trainer.counters().reconnects >= 4, 60)
    stop.set()
    thread.join()
    assert trainer.flush(30), trainer.counters()
    counters = trainer.counters()
    assert counters.frames_queued == counters.frames_acked == steps
    assert counters.frames_dropped_ring == counters.frames_dropped_window == 0
    # Acknowledged is in the log, and what is read comes behind it.
    wait_for("all is stored", lambda: len(server.series("old", "loss")) >= steps)
    stored = server.series("old", "loss")
    assert stored == {step: float(step) for step in range(steps)}
    trainer.close()
    # Kept once: what was sent again counts as such.
    taken = re.search(
        r'^bellwether_ingest_frames_total{result="taken"} (\S+)$',
        server.get("/metrics"),
        re.MULTILINE,
    )
    assert taken is not None and float(taken[1]) == steps
    assert int(server.call("GetRun", run="old").get("frames_dropped", 0)) == 0
    # A connection's age is no outage: nobody is told, and a real one would be.
    assert not log.exists() or "training goes on" not in log.read_text()


def test_alert_watch_gives_each_alert_once(server: Server) -> None:
    fall_ill(server, "before")
    everything = Command(server, "alert", "watch")
    wait_for(
        "the stored ones", lambda: told_alerts(everything) == stored_alerts(server, ["before"])
    )
    only_new = Command(server, "alert", "watch", "--new")
    of_one = Command(server, "alert", "watch", "--run", "before")
    # Nothing comes meanwhile: where the new ones began is known all the same.
    await_ages(server, "WatchAlerts", 6)
    runs = []
    for i in range(3):
        runs.append(f"ill-{i}")
        fall_ill(server, runs[-1])
        await_ages(server, "WatchAlerts", 3)
    new, all_of_them = stored_alerts(server, runs), stored_alerts(server, ["before", *runs])
    wait_for(
        "all", lambda: len(everything.lines) >= len(all_of_them) and len(only_new.lines) >= len(new)
    )
    await_ages(server, "WatchAlerts", 3)
    for watch in (everything, only_new, of_one):
        assert watch.interrupt() == 0, watch.words
        assert watch.words == ""
    assert told_alerts(everything) == all_of_them
    assert told_alerts(only_new) == new
    assert told_alerts(of_one) == stored_alerts(server, ["before"])


def test_run_watch_gives_each_sample_once_and_the_end(server: Server) -> None:
    trainer = client(server, "watched")
    assert push(trainer, 0) and trainer.flush(30)
    wait_for("it is there", lambda: int(server.call("GetRun", run="watched").get("step", -1)) == 0)
    watch = Command(
        server, "run", "watch", "watched", "--interval", "100ms", "--signal", "wq_sigma"
    )
    for step in range(1, 4):
        await_ages(server, "WatchRun", 1)
        assert push(trainer, step) and trainer.flush(30)
        wait_for(
            "it is told",
            lambda step=step: watch.lines and int(watch.lines[-1]["run"]["step"]) == step,
        )
    await_ages(server, "WatchRun", 2)
    trainer.close()
    assert watch.ended() == 0, watch.words
    assert watch.words == ""
    assert watch.lines[-1]["run"]["ended"]
    told = [json.dumps(line, sort_keys=True) for line in watch.lines]
    assert len(set(told)) == len(told)
    steps = [int(line["run"]["step"]) for line in watch.lines]
    assert steps == sorted(steps)


def await_import(server: Server, name: str) -> None:
    """Where others load the machine each may be cut, the last one before its answer alone."""
    words = ["--server", server.grpc, "run", "import", str(RECORDING), "--name", name]

    def is_whole() -> bool:
        subprocess.run([*server.program("bellwether"), *words], capture_output=True, timeout=120)
        runs = server.call("ListRuns")["runs"]
        return any(run["description"]["name"] == name and run["ended"] for run in runs)

    wait_for(f"{name} is whole", is_whole)


def test_transfer_cut_by_the_connection_age_can_be_repeated(server: Server) -> None:
    before = ended_calls(server, "ImportRun")
    with contextlib.closing(Link(server.grpc)) as link:
        link.bytes_per_second = RECORDING.stat().st_size // 5  # Longer than a connection lives.
        imports = Command(
            server, "run", "import", str(RECORDING), "--name", "slow", address=link.address
        )
        wait_for("it is cut", lambda: ended_calls(server, "ImportRun") > before)
        link.bytes_per_second = 0
        assert imports.ended() == 4
    assert "cannot reach" in imports.words
    assert not server.call("GetRun", run="slow").get("ended")
    for name in ("slow", "quick"):
        await_import(server, name)
    assert server.call("GetRun", run="slow")["ended"]
    for signal_name in ("loss", "wq_sigma"):
        assert server.series("slow", signal_name) == server.series("quick", signal_name)


def test_alert_watch_continues_over_restarts(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        runs = ["first"]
        fall_ill(server, "first")
        watch = Command(server, "alert", "watch")
        wait_for("the first", lambda: told_alerts(watch) == stored_alerts(server, runs))
        for end in (server.kill, server.stop):
            outages = watch.words.count("cannot reach")
            end()
            wait_for("it says so", lambda n=outages: watch.words.count("cannot reach") > n)
            server.start()
            server.await_applied()
            runs.append(f"after-{len(runs)}")
            fall_ill(server, runs[-1])
            stored = stored_alerts(server, runs)
            wait_for(
                "what came behind it", lambda stored=stored: len(watch.lines) >= len(stored), 60
            )
        assert watch.interrupt() == 0, watch.words
    assert told_alerts(watch) == stored
    # Each outage once, and its end.
    assert watch.words.count("trying until it answers") == 2, watch.words
    assert watch.words.count("answers again") == 2, watch.words


def test_absent_server_is_an_error_at_once(server: Server) -> None:
    server.kill()
    for words in (["alert", "watch"], ["run", "watch", "any"]):
        watch = Command(server, *words)
        assert watch.ended() == 4
        assert "cannot reach" in watch.words and "trying" not in watch.words


def frames(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """HTTP/2 frames as (type, payload)."""
    while True:
        head = connection.recv(9, socket.MSG_WAITALL)
        if len(head) < 9:
            return
        length = int.from_bytes(head[:3], "big")
        yield head[3], connection.recv(length, socket.MSG_WAITALL) if length else b""


def test_the_channel_arguments_are_those_on_the_wire(server: Server) -> None:
    host, port = server.grpc.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        settings: dict[int, int] = {}
        for kind, payload in frames(connection):
            if kind == 4:
                settings |= {key: value for key, value in struct.iter_unpack(">HI", payload)}
            if kind == 7:
                break
    assert settings[3] == 64  # MAX_CONCURRENT_STREAMS
    assert settings[6] == 8 << 10  # MAX_HEADER_LIST_SIZE
    # GOAWAY, for its age and not for an error: what was begun goes on, nothing new is.
    assert kind == 7 and struct.unpack(">II", payload[:8]) == (0x7FFFFFFF, 0)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("connection_age_seconds", 0, ""),
        ("connection_age_seconds", 604_800, ""),
        ("connection_age_seconds", 604_801, "= 604801: must be a whole number in [0, 604800]"),
        ("connection_age_seconds", -1, "= -1: must be a whole number in [0, 604800]"),
        ("connection_age_grace_seconds", 0, "= 0: must be a whole number in [1, 3600]"),
        ("connection_age_grace_seconds", 3601, "= 3601: must be a whole number in [1, 3600]"),
    ],
)
def test_the_legal_ranges(tmp_path: Path, key: str, value: int, said: str) -> None:
    file = tmp_path / "server.yml"
    file.write_text(f"grpc: {{{key}: {value}}}\n")
    done = subprocess.run(
        [str(BIN / "bellwetherd"), f"--config.file={file}", "--config.check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode == 0) == (said == "")
    assert f"grpc.{key} {said}" in done.stdout + done.stderr or not said
