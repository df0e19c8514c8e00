"""Goal: receivers are strangers: whatever they answer costs neither memory nor time, changes nothing
for the others, forges no line of the log, and does not hold up a stop.
Method: a real server tells a recorded failing run to hostile receivers of each kind at once, and to
a good one of each; then it is ended while some of them still trickle.
"""

from __future__ import annotations

import functools
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, wait_for

FAILING = ROOT / "tests/testdata/runs/gpt-flash-s4.bwrun"
MIB = 1 << 20
OK = b"HTTP/1.1 200 OK\r\n"
BAD = b"HTTP/1.1 500 X\r\n"
FORGED = b'\x1b[31mred\nts=2026 level=error msg="forged log line"\n\xc2\x9b\xff'


@functools.cache
def zipped() -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(256)) + packer.flush()


class Receiver:
    """Takes a request on each connection and then does `deed`; counts the connections."""

    def __init__(self, deed: Callable[[Receiver, socket.socket], None]) -> None:
        self.connections = 0
        self.over = False
        self._deed = deed
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/x"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(taken,), daemon=True).start()

    def _serve(self, taken: socket.socket) -> None:
        with taken:
            try:
                whole = b""
                while b"\r\n\r\n" not in whole:
                    whole += taken.recv(1 << 16)
                head, _, body = whole.partition(b"\r\n\r\n")
                length = int(re.findall(rb"Content-Length: (\d+)", head)[0])
                while len(body) < length:
                    body += taken.recv(1 << 16)
                self._deed(self, taken)
            except (OSError, IndexError):
                pass

    def close(self) -> None:
        self.over = True
        self._listener.close()


def says(*parts: bytes, again: bytes = b"", pause: float = 0) -> Callable[[Receiver, socket.socket], None]:
    """Sends the parts, and then `again` until the other end has gone."""

    def deed(receiver: Receiver, taken: socket.socket) -> None:
        for part in parts:
            taken.sendall(part)
        while again and not receiver.over:
            taken.sendall(again)
            time.sleep(pause)

    return deed


def hang(receiver: Receiver, taken: socket.socket) -> None:
    while not receiver.over:
        time.sleep(0.02)


HOSTILE: dict[str, Callable[[Receiver, socket.socket], None]] = {
    "big": says(BAD + b"\r\n", again=b"A" * MIB),
    "big200": says(OK + b"Transfer-Encoding: chunked\r\n\r\n", again=b"100000\r\n" + b"A" * MIB + b"\r\n"),
    "slow": says(OK + b"Content-Length: 100000\r\n\r\n", again=b"a", pause=0.2),
    "slowhead": says(OK, again=b"X-A: b\r\n", pause=0.2),
    "hang": hang,
    "headers": says(OK, again=b"X-A: " + b"b" * MIB + b"\r\n"),
    "interim": says(again=b"HTTP/1.1 100 Continue\r\n\r\n", pause=0.2),
    "reason": says(b"HTTP/1.1 200 ", again=b"x" * MIB),
    "garbage": says(bytes(range(256)) * 1000),
    "length": says(BAD + b"Content-Length: 18446744073709551615\r\n\r\nabc", again=b"d", pause=0.2),
    "status": says(b"HTTP/1.1 99999999999999999999 OK\r\n\r\n"),
    "escapes": says(BAD + b"\r\n" + FORGED),
}


@pytest.fixture
def receivers() -> Iterator[dict[str, Receiver]]:
    secret = Receiver(says(OK + b"\r\n"))
    packed = zipped()
    deeds = {
        **HOSTILE,
        "gzip": says(BAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed),
        "redirect": says(b"HTTP/1.1 307 F\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % secret.url.encode()),
        "good": says(OK + b"Content-Length: 2\r\n\r\nok"),
    }
    found = {"secret": secret, **{name: Receiver(deed) for name, deed in deeds.items()}}
    yield found
    for receiver in found.values():
        receiver.close()


def entries(kind: str, receivers: dict[str, Receiver]) -> str:
    urls = {name: receiver.url for name, receiver in receivers.items() if name != "secret"}
    urls["handshake"] = receivers["hang"].url.replace("http:", "https:")
    return f"  {kind}:\n" + "".join(f"  - {{url: '{url}', name: {kind}-{name}}}\n" for name, url in urls.items())


def counted(server: Server, metric: str, channel: str, **labels: str) -> float:
    wanted = ",".join(f'{name}="{value}"' for name, value in {"channel": channel, **labels}.items())
    found = re.search(rf"^{metric}{{{re.escape(wanted)}}} (\S+)$", server.get("/metrics"), re.MULTILINE)
    return float(found.group(1)) if found else 0.0


@pytest.mark.parametrize("kind", ["webhooks", "alertmanagers"])
def test_hostile_receivers_cost_neither_memory_nor_time(
    tmp_path: Path, kind: str, receivers: dict[str, Receiver]
) -> None:
    server = Server(tmp_path, f"alerting:\n{entries(kind, receivers)}").start()
    assert server.process is not None
    try:
        server.run("run", "import", "--notify", str(FAILING))
        wait_for(
            "the good one is told",
            lambda: counted(server, "bellwether_notifications_total", f"{kind}-good", result="delivered") >= 1,
        )
        causes = dict.fromkeys(("headers", "reason", "garbage", "status"), "answer")
        causes |= {"big": "status", "gzip": "status", "length": "status", "escapes": "status", "redirect": "redirect"}
        for name, cause in causes.items():
            wait_for(
                f"{name} is refused",
                lambda name=name, cause=cause: counted(
                    server, "bellwether_notification_attempts_failed_total", f"{kind}-{name}", cause=cause
                ),
            )
        for name in ("slow", "big200"):  # Their status is all that counts.
            wait_for(
                f"{name} has it",
                lambda name=name: counted(server, "bellwether_notification_answers_cut_total", f"{kind}-{name}"),
            )
        assert receivers["secret"].connections == 0, "a redirect was followed"
        peak = int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())[0]) >> 10
        assert peak < 500, f"{peak} MiB"
    finally:
        start = time.monotonic()
        server.process.terminate()
        ended = server.process.wait(60)
    seconds = time.monotonic() - start
    assert (ended, seconds < 6) == (0, True), f"{ended} after {seconds:.1f} s"
    lines = server.log().splitlines()
    for line in lines:
        assert re.fullmatch(r'ts=\S+ level=\w+ msg="(?:[^"\\\x00-\x1f\x7f-\x9f]|\\.)*"', line), repr(line)
    assert "stopped; everything acknowledged is durable" in lines[-1]
