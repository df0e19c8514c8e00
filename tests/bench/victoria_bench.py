#!/usr/bin/env python3
"""The same frames into bellwetherd and into VictoriaMetrics (single node), on the same core.

Values a second until all are acknowledged, bytes on disk a value, and what was acknowledged and is
gone after kill -9.  The two take turns, each with an empty folder; everything that is sent was
encoded before.  A frame is a step of 32 layers x 32 heads x 4 signals.

  bellwether   the trainer's protocol: a stream of frames, at most WINDOW unacknowledged; judged by
               detectors on the way
  remote       Prometheus remote write: a snappy body of 4,096 samples a request, as one step brings
  import       /api/v1/import: a line a series with 128 steps, as a client that fills in history

VictoriaMetrics is sent the shortest decimals that are the same float32, which it packs best.

    python3 tests/bench/victoria_bench.py --rounds 3 --kills 5

Needs bellwetherd, victoria-metrics (Debian: victoria-metrics, not among the packages of ./check),
numpy and libsnappy.  The server has core 0, this program core 1.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import queue
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Optional

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import INGEST, OPTIONS, SIGNALS
from bellwether_process import Server, free_port, wait_for

LAYERS, HEADS, SIGNAL_NAMES = (
    32,
    32,
    ("wq_sigma", "delta_bias_sum", "logit_max", "tied_rows_bf16"),
)
SERIES = LAYERS * HEADS * len(SIGNAL_NAMES)
WINDOW = 512  # Frames without acknowledgement, as a sender's.
IMPORT_STEPS = 128
STEP_MS = 1_000


def make_values(steps: int, seed: int) -> np.ndarray:
    """[steps, 4, heads] float32: a norm, a signed sum, a mean and a rare count."""
    chance = np.random.default_rng(seed)
    heads = LAYERS * HEADS
    values = np.empty((steps, 4, heads), np.float32)
    norm, mean = chance.uniform(1, 2, heads), chance.normal(5, 1, heads)
    for step in range(steps):
        norm *= 1 + chance.normal(0, 2e-4, heads)
        mean = 5 + 0.9 * (mean - 5) + chance.normal(0, 0.1, heads)
        values[step] = norm, chance.normal(0, 1e-3, heads), mean, chance.random(heads) < 0.02
    return values


def pinned(core: int, *words: str) -> list[str]:
    return ["taskset", "-c", str(core), *words]


def bytes_of(folder: Path) -> int:
    return sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file())


class Pinned(Server):
    def program(self, name: str) -> list[str]:
        return pinned(0, *super().program(name)) if name == "bellwetherd" else super().program(name)


class Bellwether:
    """One run on a bellwetherd of its own."""

    name = "bellwether"

    def __init__(self, folder: Path, values: np.ndarray) -> None:
        self.server = Pinned(folder)
        self.uuid = uuid.uuid4().bytes
        self.steps = len(values)
        self.frames = [self._frame(step, values[step]) for step in range(self.steps)]

    def _frame(self, step: int, values: np.ndarray) -> bytes:
        message = INGEST.ClientMessage(seq=step + 1)
        message.frame.step, message.frame.parts = step, 1
        for name, of_heads in zip(SIGNAL_NAMES, values):
            block = message.frame.blocks.add(
                signal=getattr(SIGNALS, f"SIGNAL_{name.upper()}"),
                layer_count=LAYERS,
                head_count=HEADS,
            )
            block.values.extend(of_heads.tolist())
        return bytes(message.SerializeToString())

    def start(self) -> None:
        self.server.start()

    def send(self, frames_per_second: float) -> int:
        """Until all is acknowledged, or it dies; 0 = as fast as acknowledgements come.

        Returns how many steps were acknowledged.
        """
        hello = INGEST.ClientMessage()
        hello.hello.protocol, hello.hello.client_version = 1, "bench"
        run = hello.hello.run
        run.name, run.uuid, run.world, run.reporters = "bench", self.uuid, 1, 1
        run.layout.layers, run.layout.heads, run.layout.kv_heads = LAYERS, HEADS, HEADS
        run.layout.head_dim = 64
        outbox: queue.SimpleQueue[Optional[bytes]] = queue.SimpleQueue()
        state = threading.Condition()
        acked, ended = 0, False

        def requests() -> Iterator[bytes]:
            yield hello.SerializeToString()
            start = outbox.get()
            assert start is not None
            begin, sent = time.monotonic(), int(start)
            first = sent
            while sent < self.steps and not ended:
                if frames_per_second:
                    time.sleep(
                        max(0, begin + (sent - first) / frames_per_second - time.monotonic())
                    )
                elif sent - acked >= WINDOW:
                    with state:
                        state.wait(0.1)
                    continue
                yield self.frames[sent]
                sent += 1
            outbox.get()  # Half-closed once all is acknowledged.

        with grpc.insecure_channel(self.server.grpc, OPTIONS) as channel:
            attach = channel.stream_stream(
                "/bellwether.v1.Ingest/Attach",
                request_serializer=lambda raw: raw,
                response_deserializer=INGEST.ServerMessage.FromString,
            )
            answers = attach(requests())
            try:
                for answer in answers:
                    if answer.HasField("welcome"):
                        acked = answer.welcome.durable_seq
                        outbox.put(str(acked).encode())
                    elif answer.HasField("ack"):
                        with state:
                            acked = answer.ack.durable_seq
                            state.notify()
                    if acked >= self.steps:
                        break
            except grpc.RpcError:
                pass  # It was killed.
            ended = True
            outbox.put(None)
            outbox.put(None)
            answers.cancel()
        return acked

    def pid(self) -> int:
        assert self.server.process is not None
        return self.server.process.pid

    def kill(self) -> None:
        self.server.kill()

    def stored(self) -> int:
        """Steps, counted one by one."""
        self.server.await_applied()
        return len(self.server.series("bench", SIGNAL_NAMES[0], LAYERS - 1, HEADS - 1))

    def disk(self) -> int:
        """Stopped; without the one segment of 64 MiB that its log keeps, however much is stored."""
        assert self.server.stop() == 0, self.server.log()
        return bytes_of(self.server.storage) - bytes_of(self.server.storage / "wal")

    def end(self) -> None:
        if self.server.process is not None and self.server.process.poll() is None:
            self.server.kill()


def snappy(plain: bytes) -> bytes:
    library = ctypes.CDLL("libsnappy.so.1")
    library.snappy_max_compressed_length.restype = ctypes.c_size_t
    size = ctypes.c_size_t(library.snappy_max_compressed_length(ctypes.c_size_t(len(plain))))
    packed = ctypes.create_string_buffer(size.value)
    library.snappy_compress(plain, ctypes.c_size_t(len(plain)), packed, ctypes.byref(size))
    return packed.raw[: size.value]


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, body: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(body)) + body


class Victoria:
    """One single-node VictoriaMetrics; `how`: remote or import."""

    def __init__(self, folder: Path, values: np.ndarray, how: str) -> None:
        self.name = f"victoria, {how}"
        self.folder, self.how = folder / "victoria", how
        self.port = free_port()
        self.steps = len(values)
        self.begin_ms = (int(time.time()) - 7 * 86_400) * 1000
        self.process: Optional[subprocess.Popen[bytes]] = None
        # The shortest decimal of each float32, as a double.
        self.doubles = values.astype("U16").astype(np.float64)
        self.bodies: list[tuple[int, bytes]] = []  # Steps up to here, body.
        (self._encode_remote if how == "remote" else self._encode_import)()

    def _labels(self) -> list[dict[str, str]]:
        return [
            {"__name__": f"bellwether_{name}", "run": "bench", "layer": str(i), "head": str(j)}
            for name in SIGNAL_NAMES
            for i in range(LAYERS)
            for j in range(HEADS)
        ]

    def _encode_remote(self) -> None:
        heads = [
            b"".join(
                field(1, field(1, name.encode()) + field(2, value.encode()))
                for name, value in sorted(labels.items())
            )
            for labels in self._labels()
        ]
        for step in range(self.steps):
            at = varint(2 << 3) + varint(self._time(step))  # prompb.Sample: 1 value, 2 timestamp.
            body = b"".join(
                field(1, head + field(2, b"\x09" + struct.pack("<d", value) + at))
                for head, value in zip(heads, self.doubles[step].ravel().tolist())
            )
            self.bodies.append((step + 1, snappy(body)))

    def _encode_import(self) -> None:
        labels = self._labels()
        for first in range(0, self.steps, IMPORT_STEPS):
            end = min(first + IMPORT_STEPS, self.steps)
            times = json.dumps([self._time(step) for step in range(first, end)])
            of_series = self.doubles[first:end].reshape(end - first, SERIES).T
            lines = [
                f'{{"metric":{json.dumps(label)},"values":{json.dumps(row)},"timestamps":{times}}}'
                for label, row in zip(labels, of_series.tolist())
            ]
            self.bodies.append((end, "\n".join(lines).encode()))

    def _time(self, step: int) -> int:
        return self.begin_ms + step * STEP_MS

    def start(self) -> None:
        self.process = subprocess.Popen(
            pinned(
                0,
                "victoria-metrics",
                f"-storageDataPath={self.folder}",
                "-retentionPeriod=10y",
                f"-httpListenAddr=127.0.0.1:{self.port}",
                "-search.latencyOffset=0s",
                "-search.disableCache",
                "-search.maxPointsPerTimeseries=1000000",
            ),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        wait_for("VictoriaMetrics answers", self._healthy, 60)

    def _healthy(self) -> bool:
        try:
            return bool(self._get("/health"))
        except OSError:
            return False

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return bytes(answer.read())

    def send(self, frames_per_second: float) -> int:
        path, headers = "/api/v1/import", {}
        if self.how == "remote":
            path = "/api/v1/write"
            headers = {
                "Content-Encoding": "snappy",
                "Content-Type": "application/x-protobuf",
                "X-Prometheus-Remote-Write-Version": "0.1.0",
            }
        http = HTTPConnection("127.0.0.1", self.port, timeout=60)
        begin, acked = time.monotonic(), 0
        for end, body in self.bodies:
            if frames_per_second:
                time.sleep(max(0, begin + acked / frames_per_second - time.monotonic()))
            try:
                http.request("POST", path, body, headers)
                answer = http.getresponse()
                answer.read()
            except OSError:
                return acked  # It was killed.
            assert answer.status == 204, answer.status
            acked = end
        return acked

    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stored(self) -> int:
        """Steps of the last series, counted one by one."""
        match = (
            f'{{__name__="bellwether_{SIGNAL_NAMES[0]}",layer="{LAYERS - 1}",head="{HEADS - 1}"}}'
        )
        told = self._get(
            "/api/v1/export?"
            + urllib.parse.urlencode({"match[]": match, "start": self.begin_ms // 1000 - 1})
        )
        return sum(len(json.loads(line)["values"]) for line in told.splitlines())

    def disk(self) -> int:
        """Merged into one part, as it does with time by itself, and stopped."""
        self._get("/internal/force_flush")
        self._get("/internal/force_merge")
        wait_for("merged", lambda: b"vm_active_force_merges 0" in self._get("/metrics"), 60)
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=60)
        return bytes_of(self.folder)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ingest(peer: Any, steps: int) -> dict[str, float]:
    peer.start()
    before, began = cpu_seconds(peer.pid()), time.monotonic()
    acked = peer.send(0)
    took, cpu = time.monotonic() - began, cpu_seconds(peer.pid()) - before
    assert acked == steps, (peer.name, acked)
    return {
        "mvalues_per_second": steps * SERIES / took / 1e6,
        "mvalues_per_cpu_second": steps * SERIES / cpu / 1e6,
        "bytes_per_value": peer.disk() / (steps * SERIES),
    }


def kill(peer: Any, rate: float, chance: random.Random) -> dict[str, float]:
    """After 5 to 25 seconds of a steady load; steps acknowledged, and steps found after a start."""
    peer.start()
    timer = threading.Timer(chance.uniform(5, 25), peer.kill)
    timer.start()
    acked = peer.send(rate)
    timer.join()
    peer.start()
    stored = peer.stored()
    return {
        "acked": acked,
        "stored": stored,
        "lost": max(0, acked - stored),
        "lost_seconds": max(0, acked - stored) / rate,
    }


def make(name: str, folder: Path, values: np.ndarray) -> Any:
    if name == "bellwether":
        return Bellwether(folder, values)
    return Victoria(folder, values, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2048)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--kill-rate", type=float, default=20, help="frames a second")
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    os.sched_setaffinity(0, {1})
    values = make_values(options.steps, options.seed)
    names = ("bellwether", "remote", "import")
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    lost: dict[str, list[dict[str, float]]] = {name: [] for name in names[:2]}
    chance = random.Random(options.seed)

    def in_folder(name: str, work: Any, steps: int) -> Any:
        with tempfile.TemporaryDirectory(prefix="victoria-bench-") as folder:
            peer = make(name, Path(folder), values[:steps])
            try:
                return work(peer)
            finally:
                peer.end()

    for _ in range(options.rounds):
        for name in names:
            found = in_folder(name, lambda peer: ingest(peer, options.steps), options.steps)
            rounds[name].append(found)
            print(json.dumps({"ingest": name, **found}), file=sys.stderr, flush=True)
    for _ in range(options.kills):
        for name in names[:2]:
            found = in_folder(name, lambda peer: kill(peer, options.kill_rate, chance), 512)
            lost[name].append(found)
            print(json.dumps({"kill": name, **found}), file=sys.stderr, flush=True)
    query = ["dpkg-query", "-W", "victoria-metrics"]
    version = subprocess.run(query, capture_output=True, text=True).stdout.split()
    print(
        json.dumps(
            {
                "version": version,
                "steps": options.steps,
                "series": SERIES,
                "load_average": os.getloadavg(),
                "ingest": {
                    name: {
                        key: {
                            "median": round(statistics.median(r[key] for r in of_name), 3),
                            "all": [round(r[key], 3) for r in of_name],
                        }
                        for key in of_name[0]
                    }
                    for name, of_name in rounds.items()
                    if of_name
                },
                "kills": lost,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
