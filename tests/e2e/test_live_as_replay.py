"""Goal: a run that is watched live is judged as its replay, transition for transition, also where
the server is killed in between and the sender comes again with what was not acknowledged.
Method: a recorded failing run, whose messages a sender gives a real server one by one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import zstandard
from google.protobuf.internal.decoder import _DecodeVarint32  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import INGEST, OPTIONS
from bellwether_process import BIN, ROOT, Server, wait_for

from bellwether.v1 import recording_pb2

RECORDED = ROOT / "tests/testdata/runs/gpt-flash-s4.bwrun"
RUN = "gpt-flash-s4"
KILLS = 3


def messages_of(path: Path) -> Iterator[Any]:
    data = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()[8:])
    at = 0
    while at < len(data):
        size, at = _DecodeVarint32(data, at)
        yield recording_pb2.RecordedMessage.FromString(data[at : at + size]).message
        at += size


class Sender:
    """One rank: it numbers what it has, and sends again what was not acknowledged."""

    def __init__(self, address: str) -> None:
        hello, *others = messages_of(RECORDED)
        assert hello.WhichOneof("body") == "hello"
        self.rest = [m for m in others if m.WhichOneof("body") in ("frame", "event")]
        self.hello, self.address, self.durable = hello, address, 0
        for seq, message in enumerate(self.rest, start=1):
            message.seq = seq

    def send(self, until: int) -> None:
        """Until so many are acknowledged."""
        self.hello.hello.first_unacked_seq = self.durable + 1
        with grpc.insecure_channel(self.address, OPTIONS) as channel:
            attach = channel.stream_stream(
                "/bellwether.v1.Ingest/Attach",
                request_serializer=INGEST.ClientMessage.SerializeToString,
                response_deserializer=INGEST.ServerMessage.FromString,
            )
            answers = attach(iter([self.hello, *self.rest[self.durable : until]]))
            for answer in answers:
                if answer.HasField("ack"):
                    self.durable = max(self.durable, answer.ack.durable_seq)
                if self.durable >= until:
                    break
            answers.cancel()


def told_of(transition: dict[str, Any]) -> tuple[Any, ...]:
    """What of a transition is the same, however it is printed."""
    severity = str(transition["severity"]).removeprefix("SEVERITY_").lower()
    return transition["key"], int(transition.get("k", 0)), int(transition["step"]), severity, transition["cause"]


def test_live_run_is_judged_as_its_replay_over_kills(tmp_path: Path) -> None:
    command = [str(BIN / "bellwether"), "replay", str(RECORDED), "--json"]
    replayed = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = [told_of(json.loads(line)) for line in replayed.stdout.splitlines()]
    assert len(expected) > 5
    with Server(tmp_path) as server:
        sender = Sender(server.grpc)
        count = len(sender.rest)
        for part in range(1, KILLS + 1):
            sender.send(part * count // (KILLS + 1))
            server.kill()
            server.start()
        sender.send(count)
        server.await_applied()

        def told() -> list[tuple[Any, ...]]:
            history = []
            for alert in server.call("ListAlerts", run=RUN, limit=1000).get("alerts", []):
                key = alert["last"]["key"]
                history += server.call("GetAlert", run=RUN, key=key)["alert"]["history"]
            return [told_of(each) for each in sorted(history, key=lambda each: int(each["id"]))]

        wait_for("all of it is judged", lambda: len(told()) >= len(expected), 60)
        assert told() == expected
