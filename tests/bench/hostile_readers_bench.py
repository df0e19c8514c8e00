#!/usr/bin/env python3
"""What readers that read nothing cost the trainers: how late frames are acknowledged without such
readers beside them, and with them, in turn.

Trainers send frames of 16 KiB at a fixed rate, and a latency counts from when a frame was due.  The
readers are those of tests/fault/test_unread_answers.py: streams of gRPC and of the page, and
questions for the most there is, all of them unread and asked anew as they are cut off.

    python3 tests/bench/hostile_readers_bench.py --rounds 5 --trainers 2 --rate 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fault"))
from ack_ledger import HEADS, INGEST, LAYERS, SIGNALS
from bellwether_process import Server, wait_for
from test_unread_answers import QUERY_MIB, RECORDING, hostile_readers

NAMES = ("SIGNAL_ROWS", "SIGNAL_LOGIT_MAX", "SIGNAL_ENTROPY_SUM", "SIGNAL_SINK_SUM")


class Trainer:
    """A rank that sends `rate` frames a second and notes when each is durable."""

    def __init__(self, server: str, number: int, rate: float) -> None:
        self._number, self._rate = number, rate
        self._due: dict[int, float] = {}
        self._ended = threading.Event()
        self.late: list[float] = []  # Seconds, since begin().
        self._channel = grpc.insecure_channel(server, [("grpc.use_local_subchannel_pool", 1)])
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def begin(self) -> None:
        self.late = []

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self._channel.close()

    def _listen(self) -> None:
        call = self._channel.stream_stream(
            "/bellwether.v1.Ingest/Attach",
            INGEST.ClientMessage.SerializeToString,
            INGEST.ServerMessage.FromString,
        )
        for answer in call(self._messages()):
            if not answer.HasField("ack"):
                continue
            now = time.monotonic()
            for seq in [seq for seq in list(self._due) if seq <= answer.ack.durable_seq]:
                self.late.append(now - self._due.pop(seq))

    def _messages(self) -> Iterator[Any]:
        first = INGEST.ClientMessage()
        hello = first.hello
        hello.protocol, hello.client_version = 1, "bench"
        run = hello.run
        run.name, run.uuid = f"bench-{self._number}", uuid.uuid4().bytes
        run.world = run.reporters = 1
        run.layout.layers, run.layout.heads, run.layout.kv_heads = LAYERS, HEADS, HEADS
        run.layout.head_dim = 64
        yield first
        begin, seq = time.monotonic(), 0
        while not self._ended.is_set():
            seq += 1
            due = begin + seq / self._rate
            self._ended.wait(max(0.0, due - time.monotonic()))
            message = INGEST.ClientMessage(seq=seq)
            frame = message.frame
            frame.step, frame.parts, frame.time_unix_ns = seq, 1, time.time_ns()
            for name in NAMES:
                block = frame.blocks.add()
                block.signal = SIGNALS.Signal.Value(name)
                block.layer_count, block.head_count = LAYERS, HEADS
                block.values.extend([1 + (seq % 97) / 97] * (LAYERS * HEADS))
            self._due[seq] = due
            yield message
        last = INGEST.ClientMessage()
        last.bye.reason, last.bye.last_seq = 1, seq
        yield last


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=20, help="frames a second of each")
    options = parser.parse_args()
    config = f"limits: {{query_memory_max: {QUERY_MIB << 20}}}"
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder), config) as server:
        server.run("run", "import", str(RECORDING))
        trainers = [Trainer(server.grpc, n, options.rate) for n in range(options.trainers)]
        ratios = []
        try:
            wait_for("each trainer is heard", lambda: all(trainer.late for trainer in trainers))
            for number in range(options.rounds):
                found = {}
                for name in ("without", "with"):
                    beside = hostile_readers(server) if name == "with" else contextlib.nullcontext()
                    with beside:
                        time.sleep(1)  # The readers' streams fill meanwhile.
                        for trainer in trainers:
                            trainer.begin()
                        time.sleep(options.seconds)
                        late = [1000 * each for trainer in trainers for each in trainer.late]
                    found[name] = {
                        "frames": len(late),
                        **{f"p{100 * q:g}_ms": round(quantile(late, q), 2) for q in (0.5, 0.99)},
                    }
                ratios.append(found["with"]["p99_ms"] / found["without"]["p99_ms"])
                told = {"round": number, **found, "p99_ratio": round(ratios[-1], 2)}
                print(json.dumps(told), flush=True)
        finally:
            for trainer in trainers:
                trainer.stop()
        refused = server.metric("bellwether_query_limit_refused_total")
        print(json.dumps({"p99_ratio": round(statistics.median(ratios), 2), "refused": refused}))


if __name__ == "__main__":
    main()
