"""Goal: doctor says of a server whether it would take the run, in gRPC, with TLS and the role, and
what to do where it would not.
Method: real servers, open and secured; other listeners; the answer is held against what a run's
own sender meets.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, wait_for
from secure_server import SecureServer, answers, eventually, tool

from bellwether.settings import Settings
from bellwether.tools import doctor
from bellwether.tools.grpc_probe import literals, why_not

ACCESS = """
identities:
- {name: trainer, certificates: ["spiffe://bellwether/client/trainer"], roles: [write], runs: ["*"]}
- {name: reader, certificates: ["spiffe://bellwether/client/reader"], roles: [read], runs: ["*"]}
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServer]:
    with SecureServer(tmp_path_factory.mktemp("secure"), ACCESS) as server:
        yield server


def asked(server: str, **shown: Any) -> Optional[str]:
    return why_not(server, Settings(server=server, **shown))


def test_a_server_that_takes_runs_is_found_and_keeps_none(plain: Server) -> None:
    assert asked(plain.grpc) is None
    assert plain.json("run", "list").get("runs", []) == []
    (finding,) = doctor.server_findings(plain.grpc)
    assert finding.ok and "takes runs" in finding.text


def test_the_pages_port_is_told_from_the_runs(plain: Server) -> None:
    assert "the port of a page" in str(asked(plain.http))
    (finding,) = doctor.server_findings(plain.http)
    assert finding.ok is False and "7070" in finding.text


def test_a_port_without_a_listener_is_said() -> None:
    assert "nothing listens there" in str(asked("127.0.0.1:9"))
    assert "must be host:port" in str(asked("127.0.0.1"))
    assert "No such file" in str(asked("unix:/no/such/socket"))


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00" * 64, b"\xff" * 64])
def test_other_programs_are_no_servers(answer: bytes) -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                link, _ = listening.accept()
            except OSError:
                return
            with link, contextlib.suppress(ConnectionError):
                link.sendall(answer)
                link.shutdown(socket.SHUT_WR)
                while link.recv(4096):
                    pass

    threading.Thread(target=serve, daemon=True).start()
    said = asked(f"127.0.0.1:{listening.getsockname()[1]}")
    listening.close()
    assert said is not None and "gRPC" in said


def test_each_fault_of_tls_and_role_says_its_remedy(
    secure: SecureServer, plain: Server, tmp_path: Path
) -> None:
    trainer = secure.client_certificate("trainer")
    assert asked(secure.grpc, **trainer) is None
    assert "BELLWETHER_TLS_CA" in str(asked(secure.grpc))
    authority = {"tls_ca": trainer["tls_ca"]}
    assert "BELLWETHER_TLS_CERT" in str(asked(secure.grpc, **authority))
    other = SecureServer(tmp_path, ACCESS)
    strange = {**trainer, "tls_ca": str(other.tls / "ca.pem")}
    assert "is not of an authority in" in str(asked(secure.grpc, **strange))
    assert "leave tls_ca" in str(asked(plain.grpc, **authority))
    reader = str(asked(secure.grpc, **secure.client_certificate("reader")))
    assert "may not send runs" in reader and "role write" in reader
    revoked = secure.client_certificate("trainer-that-was")
    tool("cert", "revoke", str(secure.tls), revoked["tls_cert"])
    assert eventually(lambda: not answers(secure.grpc, secure.context(revoked)))
    said = str(asked(secure.grpc, **revoked))
    assert revoked["tls_cert"] in said and "taken back" in said, said
    tool("cert", "client", str(other.tls), "trainer")
    foreign = {"tls_cert": str(other.tls / "trainer.pem"), "tls_key": str(other.tls / "trainer.key")}
    said = str(asked(secure.grpc, **{**trainer, **foreign}))
    assert foreign["tls_cert"] in said and "authority" in said, said
    missing = {**trainer, "tls_ca": "/no/such/file"}
    assert "/no/such/file" in str(asked(secure.grpc, **missing))


def test_a_sender_meets_the_answer_that_was_given(secure: SecureServer) -> None:
    for name, taken in (("trainer", True), ("reader", False)):
        shown = secure.client_certificate(name)
        with secure.trainer("probe", shown) as client:
            client.push_event(0, "annotation", "x")
            want = "streaming" if taken else ""
            wait_for("the link", lambda client=client: client.counters().error or client.counters().link == "streaming")
            assert (client.counters().link == "streaming") == bool(want)
        assert (asked(secure.grpc, **shown) is None) == taken


def test_half_a_block_of_headers_is_an_error() -> None:
    block = b"\x40\x0bgrpc-status\x017" + b"\x88" + b"\x00\x0cgrpc-message\x02no"
    assert literals(block) == {"grpc-status": "7", "grpc-message": "no"}
    for size in range(1, len(block)):
        try:
            found = literals(block[:size])
        except IndexError:
            continue
        assert set(found) <= {"grpc-status", "grpc-message"} | {k for k in found if "grpc" in k}
