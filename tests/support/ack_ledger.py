"""Trainers that write down what a server promised them, and the check of it afterwards.

Each trainer is a rank that speaks the protocol itself: it numbers its frames, keeps what is not
acknowledged, and comes back after every broken stream with the same numbers, like the sender.  A
line goes into the ledger for each word of the server: `ack RUN RANK SEQ` and `alert ID KEY K`.
check() compares the whole ledger with what the server stores: nothing that was acknowledged is
missing, nothing is there twice or with another value, each alert is there once, as it was told.
"""

from __future__ import annotations

import queue
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

import grpc
from bellwether_process import ROOT, Server, wait_for

LAYERS, HEADS = 32, 32  # 16 KiB a frame with 4 signals.
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.initial_reconnect_backoff_ms", 50),
]


def load_protos() -> tuple[Any, Any, Any]:
    """ingest_pb2, query_pb2, signals_pb2, made by protoc once a process."""
    protoc = shutil.which("protoc")
    assert protoc, "protoc is needed (apt-get install protobuf-compiler)"
    folder = Path(tempfile.mkdtemp(prefix="protos"))
    protos = sorted((ROOT / "proto" / "bellwether" / "v1").glob("*.proto"))
    subprocess.run(
        [protoc, f"-I{ROOT / 'proto'}", f"--python_out={folder}", *map(str, protos)], check=True
    )
    import bellwether

    bellwether.__path__.append(str(folder / "bellwether"))
    from bellwether.v1 import ingest_pb2, query_pb2, signals_pb2

    return ingest_pb2, query_pb2, signals_pb2


INGEST, QUERY, SIGNALS = load_protos()


class Ledger:
    """What the server said, in memory and in a file that survives the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._lock = threading.Lock()
        self.acked: dict[tuple[str, int], int] = {}
        self.alerts: dict[int, tuple[str, str, int]] = {}  # id -> run, key, k
        self.unstored: list[tuple[str, str, int]] = []  # Told before it had an id.
        self.contradictions: list[str] = []

    def ack(self, run: str, rank: int, seq: int) -> None:
        with self._lock:
            self.acked[run, rank] = max(seq, self.acked.get((run, rank), 0))
            self._file.write(f"ack {run} {rank} {seq}\n")

    def alert(self, transition: Any) -> None:
        said = (transition.run, transition.key, transition.k)
        with self._lock:
            if transition.id == 0:
                self.unstored.append(said)
            elif self.alerts.setdefault(transition.id, said) != said:
                self.contradictions.append(
                    f"id {transition.id} was {self.alerts[transition.id]}, now {said}"
                )
            self._file.write(
                f"alert {transition.id} {transition.run} {transition.key} {transition.k}\n"
            )

    @property
    def total(self) -> int:
        with self._lock:
            return sum(self.acked.values())


def frame_value(seq: int) -> float:
    return float(seq % 8191)


class Trainer:
    """One rank; frames each `period` seconds until stopped.  From `sick_from` on its W_Q is not finite."""

    def __init__(
        self,
        server: str,
        run: str,
        ledger: Ledger,
        period: float,
        sick_from: int = 0,
        layers: int = LAYERS,
        heads: int = HEADS,
    ) -> None:
        self.run, self.ledger, self.period, self.sick_from = run, ledger, period, sick_from
        self.shape = (layers, heads)
        self.address = server
        self.uuid = uuid.uuid5(uuid.NAMESPACE_URL, run).bytes
        self.made = 0  # Highest seq so far.
        self.unacked: dict[int, bytes] = {}
        self.streams = 0
        self.refused: list[str] = []
        self.late_s = 0.0  # The longest wait for an ack.
        self._sent: dict[int, float] = {}
        self._stop = threading.Event()
        self._making = threading.Lock()
        self._paused = False
        self._thread = threading.Thread(target=self._live, name=run, daemon=True)
        self._thread.start()

    def _hello(self) -> Any:
        message = INGEST.ClientMessage()
        hello = message.hello
        hello.protocol, hello.client_version = 1, "ledger"
        hello.run.name, hello.run.uuid, hello.run.world, hello.run.reporters = (
            self.run,
            self.uuid,
            1,
            1,
        )
        layout = hello.run.layout
        layout.layers, layout.heads = self.shape
        layout.kv_heads, layout.head_dim = layout.heads, 64
        hello.first_unacked_seq = min(self.unacked, default=0)
        return message

    def _frame(self, seq: int) -> bytes:
        message = INGEST.ClientMessage(seq=seq)
        frame = message.frame
        frame.step, frame.parts, frame.time_unix_ns = seq, 1, time.time_ns()
        layers, heads = self.shape
        block = frame.blocks.add(signal=SIGNALS.SIGNAL_LOSS, layer_count=1, head_count=1)
        block.values.append(frame_value(seq))
        sick = self.sick_from and seq >= self.sick_from
        for signal in ("ROWS", "WQ_SIGMA", "WK_SIGMA", "NONFINITE_ROWS"):
            block = frame.blocks.add(
                signal=getattr(SIGNALS, f"SIGNAL_{signal}"), layer_count=layers, head_count=heads
            )
            value = {"ROWS": 4096.0, "NONFINITE_ROWS": 8.0 if sick else 0.0}.get(
                signal, frame_value(seq)
            )
            block.values.extend([value] * (layers * heads))
        return bytes(message.SerializeToString())

    def _live(self) -> None:
        while not self._stop.is_set():
            outbox: queue.SimpleQueue[Optional[bytes]] = queue.SimpleQueue()
            with grpc.insecure_channel(self.address, OPTIONS) as channel:
                attach = channel.stream_stream(
                    "/bellwether.v1.Ingest/Attach",
                    request_serializer=lambda raw: raw,
                    response_deserializer=INGEST.ServerMessage.FromString,
                )
                outbox.put(self._hello().SerializeToString())
                answers = attach(iter(outbox.get, None))
                try:
                    self._talk(answers, outbox)
                except grpc.RpcError as error:
                    self.refused.append(f"{error.code().name}: {error.details()}")
                finally:
                    outbox.put(None)
                    answers.cancel()
            self._stop.wait(0.05)

    def _talk(self, answers: Iterator[Any], outbox: queue.SimpleQueue[Optional[bytes]]) -> None:
        pusher: Optional[threading.Thread] = None
        ended = threading.Event()
        try:
            for answer in answers:
                if answer.HasField("welcome"):
                    self.streams += 1
                    self._forget(answer.welcome.durable_seq)
                    self.made = max(self.made, answer.welcome.durable_seq)
                    for seq in sorted(self.unacked):
                        outbox.put(self.unacked[seq])
                    pusher = threading.Thread(target=self._push, args=(outbox, ended), daemon=True)
                    pusher.start()
                elif answer.HasField("ack"):
                    self._forget(answer.ack.durable_seq)
                    self.ledger.ack(self.run, 0, answer.ack.durable_seq)
        finally:
            ended.set()
            if pusher is not None:
                pusher.join()

    def _push(self, outbox: queue.SimpleQueue[Optional[bytes]], ended: threading.Event) -> None:
        while not self._stop.is_set() and not ended.wait(self.period):
            with self._making:
                if self._paused or len(self.unacked) >= 4096:  # Its window is full.
                    continue
                self.made += 1
                self._sent[self.made] = time.monotonic()
                self.unacked[self.made] = frame = self._frame(self.made)
            outbox.put(frame)

    def _forget(self, durable: int) -> None:
        now = time.monotonic()
        for seq in [seq for seq in list(self.unacked) if seq <= durable]:
            del self.unacked[seq]
            self.late_s = max(self.late_s, now - self._sent.pop(seq, now))

    def stop(self, seconds: float = 60) -> None:
        """Once all that was made is acknowledged."""
        with self._making:
            self._paused = True
        wait_for(f"{self.run}: everything is acknowledged", lambda: not self.unacked, seconds)
        self._stop.set()

    def abandon(self) -> None:
        """At once, whatever was acknowledged."""
        self._stop.set()


class Watcher:
    """A WatchAlerts stream that goes on where it was."""

    def __init__(self, server: str, ledger: Ledger) -> None:
        self._ledger, self._server, self._after = ledger, server, 0
        self._stop = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            with grpc.insecure_channel(self._server, OPTIONS) as channel:
                watch = channel.unary_stream(
                    "/bellwether.v1.Query/WatchAlerts",
                    request_serializer=QUERY.WatchAlertsRequest.SerializeToString,
                    response_deserializer=QUERY.WatchAlertsResponse.FromString,
                )
                try:
                    for answer in watch(QUERY.WatchAlertsRequest(after_id=self._after)):
                        if answer.HasField("transition"):
                            self._ledger.alert(answer.transition)
                            self._after = max(self._after, answer.transition.id)
                        if self._stop.is_set():
                            return
                except grpc.RpcError:
                    continue

    def stop(self) -> None:
        self._stop.set()


class Fleet:
    """`runs` trainers and a watcher; the last of them is sick."""

    def __init__(
        self,
        server: Server,
        folder: Path,
        runs: int,
        period: float,
        sick_from: int = 40,
        **shape: int,
    ) -> None:
        self.server = server
        self.ledger = Ledger(folder / "ledger.txt")
        self._promised: dict[tuple[str, int], int] = {}
        self.watcher = Watcher(server.grpc, self.ledger)
        self.trainers = [
            Trainer(
                server.grpc,
                f"run-{i}",
                self.ledger,
                period,
                sick_from if i == runs - 1 else 0,
                **shape,
            )
            for i in range(runs)
        ]

    def await_acks(self, more: int, seconds: float = 60) -> None:
        before = self.ledger.total
        wait_for(f"{more} more acks", lambda: self.ledger.total >= before + more, seconds)

    def kill(self) -> None:
        """SIGKILL, and a look at what the server had promised by then."""
        self.server.kill()
        self.note_end()

    def note_end(self) -> None:
        """The server has just ended: what it acknowledged so far is what check_acked() wants."""
        self._promised = dict(self.ledger.acked)

    def check_acked(self) -> None:
        """What was acknowledged before the end is there after the next start."""
        self.server.await_applied()
        for trainer in self.trainers:
            acked = self._promised.get((trainer.run, 0), 0)
            if acked == 0:
                continue
            stored = self.server.series(trainer.run, "loss")
            missing = [seq for seq in range(1, acked + 1) if seq not in stored]
            assert not missing, (
                f"{trainer.run}: acknowledged up to {acked}, missing {missing[:10]}; {self.ledger.path}"
            )

    def finish(self) -> None:
        """Ends the trainers and compares the ledger with the store."""
        for trainer in self.trainers:
            trainer.stop()
        for trainer in self.trainers:
            # Acknowledged is in the log, and what is asked here comes a moment behind it.
            told = f"{trainer.run}: 1 to {trainer.made} are stored"
            wait_for(told, partial(self._whole, trainer))
            stored = self.server.series(trainer.run, "loss")
            assert sorted(stored) == list(range(1, trainer.made + 1)), trainer.run
            assert all(value == frame_value(step) for step, value in stored.items()), trainer.run
            head = self.server.series(
                trainer.run, "wq_sigma", trainer.shape[0] - 1, trainer.shape[1] - 1
            )
            assert head == stored, trainer.run
            wait_for("each frame is counted once", partial(self._counted, trainer))
        self.check_alerts()
        self.watcher.stop()

    def _whole(self, trainer: Trainer) -> bool:
        stored = self.server.series(trainer.run, "loss")
        return sorted(stored) == list(range(1, trainer.made + 1))

    def _counted(self, trainer: Trainer) -> bool:
        return int(self.server.call("GetRun", run=trainer.run)["frames"]) == trainer.made

    def check_alerts(self) -> None:
        """Each alert that was told is in the log, once; the sick run's is among them."""
        assert not self.ledger.contradictions, self.ledger.contradictions
        sick = self.trainers[-1]
        if sick.sick_from and sick.made > sick.sick_from + 50:
            wait_for(
                "the sick run's alert was told",
                lambda: any(a[0] == sick.run for a in self.ledger.alerts.values()),
            )
        # A server looks each second whether what it told without an id can be stored by now.
        unstored = {f"{run} {key} {k}" for run, key, k in list(self.ledger.unstored)}
        if unstored:
            wait_for(
                f"{unstored} are stored",
                lambda: unstored <= {what for what, _ in self._alert_log()},
            )
        stored = self._alert_log()
        assert len({what for what, _ in stored}) == len(stored), "an alert is stored twice"
        assert len({number for _, number in stored}) == len(stored), "an id is given twice"
        by_id = {number: what for what, number in stored}
        for number, (run, key, k) in self.ledger.alerts.items():
            assert by_id.get(number) == f"{run} {key} {k}", (
                f"alert {number} was told as {run} {key} {k}"
            )
        for run, key, k in self.ledger.unstored:
            assert f"{run} {key} {k}" in by_id.values(), f"{run} {key} {k} was never stored"

    def _alert_log(self) -> list[tuple[str, int]]:
        """(run, key and k; id) of each transition that is stored."""
        stored = []
        for alert in self.server.call("ListAlerts", limit=1000)["alerts"]:
            key, run = alert["last"]["key"], alert["last"]["run"]
            for t in self.server.call("GetAlert", run=run, key=key)["alert"]["history"]:
                stored.append((f"{run} {key} {t['k']}", int(t["id"])))
        return stored
