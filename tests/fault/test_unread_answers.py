"""Goal: unread answers, of every kind at once, stay within the budget of answers, and
small questions are answered beside them.
Method: the real server and callers that ask for the most there is and read nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import QUERY
from bellwether_process import ROOT, Server

RECORDING = ROOT / "tests/testdata/tiny/bf16-1.bwrun"
RUN = "tiny-bf16-1"
QUERY_MIB = 64
# Beside the answers: buffers of 64 sockets and of gRPC, threads, what the allocator keeps.
BESIDE_MIB = 96


def resident_mib(server: Server, key: str) -> float:
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.findall(key + r":\s+(\d+)", status)[0]) / 1024


def ask(server: Server, method: str, **request: object) -> socket.socket:
    """A question whose answer is left unread."""
    host, port = server.http.rsplit(":", 1)
    wire = socket.create_connection((host, int(port)), timeout=20)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps(request).encode()
    wire.sendall(
        f"POST /api/v1/{method} HTTP/1.1\r\nHost: {server.http}\r\n".encode()
        + f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return wire


def listen(server: Server) -> socket.socket:
    host, port = server.http.rsplit(":", 1)
    wire = socket.create_connection((host, int(port)), timeout=20)
    wire.sendall(f"GET /api/v1/events HTTP/1.1\r\nHost: {server.http}\r\n\r\n".encode())
    return wire


@contextlib.contextmanager
def hostile_readers(server: Server) -> Iterator[None]:
    """Streams by gRPC that are never read, and questions by HTTP, anew as they are cut off."""
    ended = threading.Event()
    held: list[socket.socket] = []
    series = {"run": RUN, "series": [{"signal": "loss"}] * 64, "points_max": 10_000}

    def again() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                held.append(ask(server, "GetSeries", **series))
                held.append(ask(server, "ListEvents", run=RUN))
            if len(held) > 48:
                held.pop(0).close()
            ended.wait(0.05)

    with grpc.insecure_channel(server.grpc) as channel:

        def stream(method: str, request: Any) -> Any:
            name = f"/bellwether.v1.Query/{method}"
            return channel.unary_stream(name, type(request).SerializeToString, None)(request)

        streams = [stream("ExportRun", QUERY.ExportRunRequest(run=RUN)) for _ in range(8)]
        streams += [stream("WatchRun", QUERY.WatchRunRequest(run=RUN)) for _ in range(32)]
        pages = [listen(server) for _ in range(32)]
        thread = threading.Thread(target=again)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            for each in streams:
                each.cancel()
            for wire in held + pages:
                wire.close()


def test_unread_answers_stay_within_their_budget(tmp_path: Path) -> None:
    with Server(tmp_path, f"limits: {{query_memory_max: {QUERY_MIB << 20}}}") as server:
        server.run("run", "import", str(RECORDING))
        before = resident_mib(server, "VmRSS")
        with hostile_readers(server):
            until = time.monotonic() + 6
            while time.monotonic() < until:
                assert RUN in server.run("run", "list"), "a list has memory of its own"
                time.sleep(0.1)
        refused = server.metric("bellwether_query_limit_refused_total")
        grown = resident_mib(server, "VmHWM") - before
        assert refused > 0, "the budget was reached"
        assert grown < 1.25 * QUERY_MIB + BESIDE_MIB, f"{grown:.0f} MiB"
        # What may be taken is a part of what the whole server may take.
        limits = server.call("GetServerInfo")["limits"]
        assert limits["memory_max"] > 1.25 * limits["query_memory_bytes"]
