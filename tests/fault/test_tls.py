"""Goal: the handshake lets no stranger in: bad certificates, old TLS, weak ciphers and plaintext
are refused.  Certificates rotate under open streams.  Floods and HTTP/2 attacks cost nothing that
they should not.  An address off loopback without all that is not listened on.
Method: the real server with real certificates; raw sockets and Python's TLS against it. Rows 17 to
20 of the fault matrix.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import queue
import resource
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, Server, free_port, wait_for
from secure_server import SecureServer, answers, cpu_seconds, eventually, resident_mib, tool

from bellwether._server.alerts import Alert, Follower
from bellwether.client import Block
from bellwether.settings import Settings

ACCESS = """
identities:
- {name: everybody, certificates: ["spiffe://bellwether/client/*"], roles: [admin], runs: ["*"]}
- {name: root, roles: [admin], runs: ["*"]}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecureServer]:
    with SecureServer(tmp_path, ACCESS) as running:
        yield running


def context_of(server: SecureServer, certificate: Path, key: Path) -> ssl.SSLContext:
    return server.context(server.shown(certificate, key))


def expired(server: SecureServer, folder: Path) -> ssl.SSLContext:
    """A certificate of the server's own authority, whose time is over."""
    folder.mkdir()
    now = datetime.datetime.now(datetime.timezone.utc)
    times = [(now - datetime.timedelta(days=d)).strftime("%y%m%d%H%M%SZ") for d in (10, 1)]
    (folder / "index").touch()
    (folder / "conf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={folder}/index\nnew_certs_dir={folder}\nrand_serial=yes\n"
        "default_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
    )
    (folder / "ext").write_text("subjectAltName=URI:spiffe://bellwether/client/late\n")
    request = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=late"]
    subprocess.run([*request, "-keyout", folder / "key", "-out", folder / "req"], check=True, capture_output=True)
    sign = ["openssl", "ca", "-batch", "-config", folder / "conf", "-cert", server.tls / "ca.pem", "-notext"]
    sign += ["-keyfile", server.tls / "ca.key", "-in", folder / "req", "-out", folder / "pem", "-extfile", folder / "ext"]
    subprocess.run([*map(str, sign), "-startdate", times[0], "-enddate", times[1]], check=True, capture_output=True)
    return context_of(server, folder / "pem", folder / "key")


def test_only_a_good_certificate_opens_the_handshake(server: SecureServer, tmp_path: Path) -> None:
    good = server.client_certificate("trainers")
    assert answers(server.grpc, server.context(good)), "the planted good one is refused: nothing below means anything"
    assert not answers(server.grpc), "plaintext"
    assert not answers(server.grpc, server.context()), "no certificate"
    assert not answers(server.grpc, expired(server, tmp_path / "expired")), "expired"
    tool("cert", "init", str(tmp_path / "other"))
    tool("cert", "client", str(tmp_path / "other"), "trainers")
    stranger = context_of(server, tmp_path / "other/trainers.pem", tmp_path / "other/trainers.key")
    assert not answers(server.grpc, stranger), "another authority"
    swapped = context_of(server, server.tls / "server.pem", server.tls / "server.key")
    assert not answers(server.grpc, swapped), "a server's certificate is no client's"
    # And a client does not speak to a server whose certificate is no server's.
    log = subprocess.run(
        [BIN / "bellwether", "--server", server.grpc, "--tls-ca", tmp_path / "other/ca.pem", "run", "list", "--timeout", "2s"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert log.returncode == 4, log


def old(context: ssl.SSLContext, version: ssl.TLSVersion, ciphers: str = "DEFAULT@SECLEVEL=0") -> ssl.SSLContext:
    context.set_ciphers(ciphers)
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = version
    return context


def page_takes(server: SecureServer, shown: dict[str, str]) -> bool:
    try:
        return server.ask("/metrics", shown=shown)[0] == 200
    except OSError:  # The handshake, or what TLS 1.3 says of it at the first read.
        return False


def test_an_authority_between_that_was_taken_back_opens_nothing(
    server: SecureServer, tmp_path: Path
) -> None:
    def made(*words: str) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, cwd=tmp_path)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    authority = "basicConstraints=critical,CA:true\nkeyUsage=keyCertSign,cRLSign\n"
    (tmp_path / "authority.ext").write_text(authority)
    (tmp_path / "leaf.ext").write_text("subjectAltName=URI:spiffe://bellwether/client/under\n")
    root = ["-subj", "/CN=root", "-days", "9", "-keyout", "root.key", "-out", "root.pem"]
    made("req", "-x509", *curve, *root, "-addext", "keyUsage=keyCertSign,cRLSign")
    for name, by, ext in (("between", "root", "authority.ext"), ("under", "between", "leaf.ext")):
        made("req", *curve, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.req")
        signed = ["-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-days", "9", "-extfile", ext]
        made("x509", "-req", "-in", f"{name}.req", *signed, "-out", f"{name}.pem")
    chain = (tmp_path / "under.pem").read_text() + (tmp_path / "between.pem").read_text()
    (tmp_path / "chain.pem").write_text(chain)
    under = server.shown(tmp_path / "chain.pem", tmp_path / "under.key")
    kept = server.client_certificate("kept")

    def taken(shown: dict[str, str]) -> tuple[bool, bool]:
        return answers(server.grpc, server.context(shown)), page_takes(server, shown)

    # Two authorities, of which only ours has a list: nothing of the other was taken back.
    ours = (server.tls / "ca.pem").read_text()
    (server.tls / "ca.pem").write_text(ours + (tmp_path / "root.pem").read_text())
    assert eventually(lambda: taken(under) == (True, True))
    assert taken(kept) == (True, True)
    (tmp_path / "index").touch()
    (tmp_path / "conf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={tmp_path}/index\ndefault_md=sha256\n"
        "default_crl_days=9\n"
    )
    by_root = ["-config", "conf", "-cert", "root.pem", "-keyfile", "root.key"]
    made("ca", *by_root, "-revoke", "between.pem")
    made("ca", *by_root, "-gencrl", "-out", "root.crl")
    lists = (server.tls / "crl.pem").read_text() + (tmp_path / "root.crl").read_text()
    (server.tls / "crl.pem").write_text(lists)
    assert eventually(lambda: taken(under) == (False, False))
    assert taken(kept) == (True, True)


def test_a_certificate_that_was_taken_back_opens_neither_port(server: SecureServer, tmp_path: Path) -> None:
    kept, lost = server.client_certificate("kept"), server.client_certificate("lost")

    def taken(shown: dict[str, str]) -> tuple[bool, bool]:
        return answers(server.grpc, server.context(shown)), page_takes(server, shown)

    assert taken(kept) == taken(lost) == (True, True)
    tool("cert", "revoke", str(server.tls), str(server.tls / "lost.pem"))
    assert eventually(lambda: taken(lost) == (False, False))
    assert taken(kept) == (True, True)
    root = server.token("root")
    wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)
    assert server.metric(root, "bellwether_tls_revoked_refused_total") >= 2
    # The second one leaves the first one in the list; once more is an error that changes nothing.
    another = server.client_certificate("another")
    assert taken(another) == (True, True)
    tool("cert", "revoke", str(server.tls), str(server.tls / "another.pem"))
    tool("cert", "revoke", str(server.tls), str(server.tls / "another.pem"), exit_code=1)
    assert eventually(lambda: taken(another) == (False, False))
    assert taken(lost) == (False, False) and taken(kept) == (True, True)
    # A list that is damaged, or of another authority, changes nothing, and is told.
    tool("cert", "init", str(tmp_path / "other"))
    strange = (tmp_path / "other/crl.pem").read_text()
    tool("cert", "revoke", str(tmp_path / "other"), str(server.tls / "kept.pem"), exit_code=3)
    good = (server.tls / "crl.pem").read_text()
    for text, word in (("no list\n", "holds no revocation list"), (good + strange, "nobody of tls.client_ca_file has signed")):
        (server.tls / "crl.pem").write_text(text)
        wait_for("told", lambda word=word: word in server.log())
        assert taken(lost) == (False, False) and taken(kept) == (True, True)
    # Nor is it begun with.
    local = (f"--grpc.listen-address=127.0.0.1:{free_port()}", "--web.listen-address=none")
    flags = [f"--tls.{name}-file={server.tls}/{file}" for name, file in (("cert", "server.pem"), ("key", "server.key"))]
    crl = f"--tls.crl-file={server.tls}/crl.pem"
    assert "nobody of tls.client_ca_file has signed" in starts(
        tmp_path / "second", *local, *flags, f"--tls.client-ca-file={server.tls}/ca.pem", crl
    )
    assert "--tls.crl-file needs --tls.client-ca-file" in starts(tmp_path / "second", *local, *flags, crl)
    (server.tls / "crl.pem").write_text(good)
    server.kill()
    server.start()
    assert taken(lost) == (False, False) and taken(kept) == (True, True)


def test_trainer_with_a_revoked_certificate_is_refused(server: SecureServer) -> None:
    lost = server.client_certificate("lost")
    with server.trainer("r", lost) as client:
        client.push(0, [Block("loss", [1.0])])
        assert client.flush(20)
    tool("cert", "revoke", str(server.tls), str(server.tls / "lost.pem"))
    assert eventually(lambda: not answers(server.grpc, server.context(lost)))
    with server.trainer("r", lost) as client:
        client.push(1, [Block("loss", [1.0])])
        assert not client.flush(3)
    server.command(lost, "run", "list", "--timeout", "2s", exit_code=4)


def expect_every_step(server: SecureServer, run: str, token: str, steps: int) -> None:
    """Each step is stored once, with its own number as its loss."""
    wait_for("the last step", lambda: f'"step":"{steps - 1}"' in server.ask("GetRun", token, {"run": run})[1].replace(" ", ""))
    asked = {"run": run, "series": [{"signal": "loss"}], "points_max": 10_000, "step_end": steps, "attempt": -1}
    answer = json.loads(server.ask("GetSeries", token, asked)[1])["series"][0]
    assert [int(step) for step in answer["step"]] == list(range(steps))
    assert [float(value) for value in answer["mean"]] == [float(step) for step in range(steps)]
    assert int(json.loads(server.ask("GetRun", token, {"run": run})[1])["frames"]) == steps


def ended(server: SecureServer, token: str, reason: str) -> float:
    return server.metric(token, f'bellwether_access_streams_ended_total{{reason="{reason}"}}')


def test_open_streams_end_with_their_certificate_and_nothing_is_lost(server: SecureServer) -> None:
    kept, lost, root = server.client_certificate("kept"), server.client_certificate("lost"), server.token("root")
    wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)
    with server.trainer("goes-on", kept) as other, server.trainer("r", lost) as client:
        for step in range(10):
            assert client.push(step, [Block("loss", [float(step)])])
            other.push(step, [Block("loss", [float(step)])])
        assert client.flush(20) and other.flush(20)
        with server.trainer("sick", kept) as sick:
            sick.push(0, [Block("loss", [math.nan])])
            assert sick.flush(20)
        watch = server.begin(lost, "alert", "watch")
        events, page = server.events(shown=lost), server.keep(lost)
        assert page("/-/ready") == 200
        tool("cert", "revoke", str(server.tls), str(server.tls / "lost.pem"))
        began = time.monotonic()
        # A connection that is open brings no new call either.
        wait_for("the open connection is refused", lambda: time.sleep(0.2) or page("/-/ready") == 401, 10)
        wait_for("trainer, watch and page end", lambda: ended(server, root, "certificate_revoked") == 3, 10)
        assert time.monotonic() - began < 8
        said, code = watch()
        assert code == 5 and "the certificate was revoked" in said, said
        told = events()
        assert "event: refused" in told and "the certificate was revoked" in told, told
        # The trainer goes on, its sender keeps what it is given and says why.
        wait_for("told", lambda: "the certificate was revoked" in (server.folder / "sender.log").read_text())
        for step in range(10, 50):
            assert client.push(step, [Block("loss", [float(step)])])
        assert client.counters().frames_acked == 10
        for step in range(10, 20):
            other.push(step, [Block("loss", [float(step)])])
        assert other.flush(20) and other.counters().reconnects == 0, "another's stream was touched"
        # A new certificate in the same place is taken at the next try.
        for name in ("lost.pem", "lost.key"):
            (server.tls / name).unlink()
        assert server.client_certificate("lost") == lost
        assert client.flush(60), client.counters()
        counters = client.counters()
        assert (counters.frames_acked, counters.frames_dropped_ring, counters.frames_dropped_window) == (50, 0, 0)
    expect_every_step(server, "r", root, 50)
    assert server.log().count("open streams of everybody end: ") == 1, "once an identity"
    assert any(line["call"] == "Attach" and line["result"] == "UNAUTHENTICATED" for line in server.audit())


class Owner:
    """Of a follower: it knows the page."""

    def __init__(self, server: SecureServer) -> None:
        self._url = f"https://{server.http}"

    def page_url(self) -> str:
        return self._url


def test_alerts_while_a_certificate_was_revoked_are_heard_later(server: SecureServer) -> None:
    kept, lost, root = server.client_certificate("kept"), server.client_certificate("lost"), server.token("root")
    wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)
    owner, heard = Owner(server), queue.Queue[Alert]()
    follower = Follower(Settings(run="sick", **lost), owner.page_url, heard.put)
    wait_for("it follows", lambda: server.metric(root, "bellwether_console_streams") == 1)
    tool("cert", "revoke", str(server.tls), str(server.tls / "lost.pem"))
    wait_for("it is refused", lambda: server.metric(root, "bellwether_tls_revoked_refused_total") > 0)
    with server.trainer("sick", kept) as sick:
        sick.push(0, [Block("loss", [math.nan])])
        assert sick.flush(20)
    for name in ("lost.pem", "lost.key"):
        (server.tls / name).unlink()
    assert server.client_certificate("lost") == lost
    alert = heard.get(timeout=60)
    assert (alert.run, alert.rule) == ("sick", "nonfinite")
    follower.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_tls_and_weak_ciphers_are_refused(server: SecureServer) -> None:
    good = server.client_certificate("trainers")
    for address in (server.grpc, server.http):
        took = answers if address == server.grpc else handshakes
        assert took(address, server.context(good))
        assert took(address, old(server.context(good), ssl.TLSVersion.TLSv1_2, "DEFAULT"))
        assert not took(address, old(server.context(good), ssl.TLSVersion.TLSv1_1))
        assert not took(address, old(server.context(good), ssl.TLSVersion.TLSv1))
        for weak in ("NULL", "AES128-SHA", "ECDHE-ECDSA-AES128-SHA"):
            offer = old(server.context(good), ssl.TLSVersion.TLSv1_2, f"{weak}:@SECLEVEL=0")
            assert not took(address, offer), weak


def handshakes(address: str, context: ssl.SSLContext) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            with context.wrap_socket(raw, server_hostname="localhost") as wire:
                wire.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b"200 OK" in wire.recv(64)
    except OSError:
        return False


def serial(server: SecureServer, address: str, shown: dict[str, str]) -> bytes:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        with server.context(shown).wrap_socket(raw, server_hostname="localhost") as wire:
            return wire.getpeercert(binary_form=True) or b""


def test_a_renewed_server_keeps_its_names(tmp_path: Path) -> None:
    folder = str(tmp_path / "tls")
    tool("cert", "init", folder, "--host", "bellwether.example.org")
    told = tool("cert", "server", folder, "--host", "10.1.2.3")
    assert "for bellwether.example.org, " in told and "10.1.2.3" in told
    shown = tool("cert", "show", f"{folder}/server.pem")
    assert "bellwether.example.org" in shown and "10.1.2.3" in shown


def test_certificates_rotate_and_no_stream_breaks(tmp_path: Path) -> None:
    (tmp_path / "tls").mkdir()
    tool("cert", "init", str(tmp_path / "tls"))
    with SecureServer(tmp_path, ACCESS) as server:
        good = server.client_certificate("trainers")
        before = {address: serial(server, address, good) for address in (server.grpc, server.http)}
        with server.trainer("r", good) as client:
            client.push(0, [Block("loss", [1.0])])
            assert client.flush(20)
            tool("cert", "server", str(server.tls))
            for address in before:
                assert eventually(lambda a=address: serial(server, a, good) != before[a], 60), "not rotated"
            client.push(1, [Block("loss", [1.0])])
            assert client.flush(20)
            assert client.counters().reconnects == 0
        # A file that is damaged, or of another key, changes nothing, and is told.
        current = {address: serial(server, address, good) for address in before}
        tool("cert", "init", str(tmp_path / "other"))
        for text in ("no certificate\n", (tmp_path / "other/server.pem").read_text()):
            told = server.log().count("the certificate stays as it was")
            (server.tls / "server.pem").write_text(text)
            wait_for("told", lambda: server.log().count("the certificate stays as it was") > told)
            time.sleep(1.5)  # gRPC looks each second.
            assert {address: serial(server, address, good) for address in before} == current


def limited(server: Server, descriptors: int) -> None:
    """Starts the server under `ulimit -n`, and waits as start() does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    original = subprocess.Popen

    def popen(*args: object, **kwargs: object) -> object:
        kwargs["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
        return original(*args, **kwargs)  # type: ignore[call-overload]

    subprocess.Popen = popen  # type: ignore[assignment,misc]
    try:
        server.start()
    finally:
        subprocess.Popen = original  # type: ignore[misc]
    assert (soft, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)


def hold(address: str, connections: int) -> list[socket.socket]:
    host, port = address.rsplit(":", 1)
    held = []
    for _ in range(connections):
        try:
            held.append(socket.create_connection((host, int(port)), timeout=20))
        except OSError:
            break
    return held


def test_a_flood_of_connections_ends_and_the_server_serves(tmp_path: Path) -> None:
    server = SecureServer(tmp_path, ACCESS)
    good = server.client_certificate("trainers")
    limited(server, 100)
    try:
        with server.trainer("r", good) as client:
            client.push(0, [Block("loss", [1.0])])
            assert client.flush(20)
            held = hold(server.grpc, 300)
            assert len(held) == 300
            # Whoever is in stays in, and everything of his becomes durable.
            client.push(1, [Block("loss", [1.0])])
            assert client.flush(20)
            # The handshake's limit cuts those who say nothing, though they stay.
            assert eventually(lambda: answers(server.grpc, server.context(good)), 60)
            for one in held:
                one.close()
            assert eventually(lambda: answers(server.grpc, server.context(good)), 60)
            assert client.counters().reconnects == 0
        assert "limits.connections_max = 8192: taken as 25" in server.log()
        root = server.token("root")
        wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)
        assert server.metric(root, "bellwether_connections_refused_total") > 100
        assert server.metric(root, "bellwether_tls_certificate_expiry_timestamp_seconds") > time.time() + 14 * 86400
    finally:
        server.kill()


def test_connections_that_are_reset_do_not_fill_the_log(tmp_path: Path) -> None:
    with SecureServer(tmp_path, ACCESS) as server:
        host, port = server.grpc.rsplit(":", 1)
        before = len(server.log().splitlines())
        began = time.monotonic()
        for _ in range(2000):
            with socket.create_connection((host, int(port)), timeout=3) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        lines = server.log().splitlines()[before:]
        assert len(lines) <= 2 + 2 * (time.monotonic() - began), lines[:20]
        assert answers(server.grpc, server.context(server.client_certificate("trainers")))


def test_one_address_cannot_take_all_connections(tmp_path: Path) -> None:
    more = "limits: {connections_max: 64, connections_per_address_max: 8}"
    with SecureServer(tmp_path, ACCESS, more) as server:
        good = server.client_certificate("trainers")
        held = hold(server.grpc, 40)
        # From another address of this machine.
        with socket.socket() as other:
            other.bind(("127.0.0.2", 0))
            other.settimeout(20)
            host, port = server.grpc.rsplit(":", 1)
            other.connect((host, int(port)))
            with server.context(good).wrap_socket(other, server_hostname="localhost"):
                pass
        for one in held:
            one.close()
        assert eventually(lambda: answers(server.grpc, server.context(good)))


def test_one_address_cannot_take_the_page(tmp_path: Path) -> None:
    with SecureServer(tmp_path, ACCESS, "web: {connections_per_address_max: 8}") as server:
        root = server.token("root")
        wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)
        host, port = server.http.rsplit(":", 1)
        held = []
        for _ in range(40):
            one = socket.socket()
            one.bind(("127.0.0.2", 0))
            one.settimeout(20)
            one.connect((host, int(port)))
            held.append(one)
        # The newest eight beyond wait for a health check; those before are closed.
        assert all(one.recv(1) == b"" for one in held[8:32])
        began = time.monotonic()
        assert server.metric(root, "bellwether_http_connections_refused_total") == 24
        assert time.monotonic() - began < 8, "others wait for those who say nothing"
        for one in held:
            one.close()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, CONTINUATION, END_HEADERS = 1, 3, 4, 9, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def integer(value: int, bits: int) -> bytes:
    """HPACK's, with a prefix of `bits` bits."""
    limit = (1 << bits) - 1
    if value < limit:
        return bytes([value])
    out, value = [limit], value - limit
    while value >= 128:
        out.append(value % 128 | 128)
        value //= 128
    return bytes([*out, value])


def literal(name: str, value: str) -> bytes:
    return b"\0" + integer(len(name), 7) + name.encode() + integer(len(value), 7) + value.encode()


REQUEST = b"".join(
    literal(name, value)
    for name, value in [
        (":method", "POST"), (":scheme", "https"), (":path", "/bellwether.v1.Ingest/Attach"),
        (":authority", "localhost"), ("te", "trailers"), ("content-type", "application/grpc"),
    ]
)  # fmt: skip


def hpack_bomb() -> Iterator[bytes]:
    """One header of 8 MiB, over many frames."""
    size = 8 << 20
    yield frame(HEADERS, 0, 1, REQUEST + b"\0" + integer(5, 7) + b"x-big" + integer(size, 7))
    for _ in range(size // 16384):
        yield frame(CONTINUATION, 0, 1, b"a" * 16384)


def continuation_flood() -> Iterator[bytes]:
    yield frame(HEADERS, 0, 1, REQUEST)
    fields = b"".join(literal(f"x-{i}", "a" * 1000) for i in range(16))
    for _ in range(512):
        yield frame(CONTINUATION, 0, 1, fields)


def rapid_reset() -> Iterator[bytes]:
    for stream in range(1, 40_001, 2):
        reset = frame(RST_STREAM, 0, stream, struct.pack(">I", 8))
        yield frame(HEADERS, END_HEADERS, stream, REQUEST) + reset


@pytest.mark.parametrize("attack", [hpack_bomb, continuation_flood, rapid_reset])
@pytest.mark.parametrize("shown", ["plaintext", "no certificate"])
def test_http2_attacks_cost_nothing_without_a_certificate(server: SecureServer, attack, shown: str) -> None:  # type: ignore[no-untyped-def]
    assert server.process is not None
    pid = server.process.pid
    # What the first handshake of all takes is not the attack's.
    good = server.client_certificate("trainers")
    assert answers(server.grpc, server.context(good))
    cpu, memory = cpu_seconds(pid), resident_mib(pid)
    host, port = server.grpc.rsplit(":", 1)
    cut = False
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        try:
            wire: socket.socket = raw
            if shown == "no certificate":
                context = server.context()
                context.set_alpn_protocols(["h2"])
                wire = context.wrap_socket(raw, server_hostname="localhost")
            wire.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            for part in attack():
                wire.sendall(part)
            while wire.recv(65536):
                pass
            cut = True
        except OSError:
            cut = True
    assert cut
    assert cpu_seconds(pid) - cpu < 0.3
    assert resident_mib(pid) - memory <= 4
    assert answers(server.grpc, server.context(good))


def starts(tmp_path: Path, *flags: str) -> str:
    """What the server says when it does not start; "" if it does."""
    ready = tmp_path / "ready.json"
    process = subprocess.Popen(
        [BIN / "bellwetherd", f"--storage.path={tmp_path / 'data'}", f"--ready.file={ready}", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for("it is ready or gone", lambda: ready.exists() or process.poll() is not None)
    started = process.poll() is None
    process.terminate()
    said = process.communicate(timeout=20)[1]
    return "" if started else said


def test_off_loopback_only_with_certificates_and_a_guarded_page(tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    tool("cert", "init", str(tls))
    (tmp_path / "access.yml").write_text(ACCESS)
    grpc, web = f"--grpc.listen-address=0.0.0.0:{free_port()}", f"--web.listen-address=0.0.0.0:{free_port()}"
    local, nobody = f"--grpc.listen-address=127.0.0.1:{free_port()}", "--web.listen-address=none"
    server = [f"--tls.cert-file={tls}/server.pem", f"--tls.key-file={tls}/server.key"]
    client = f"--tls.client-ca-file={tls}/ca.pem"
    access = f"--access.file={tmp_path}/access.yml"
    assert "clients must show certificates" in starts(tmp_path, grpc, nobody)
    assert "clients must show certificates" in starts(tmp_path, grpc, nobody, *server)
    assert starts(tmp_path, grpc, nobody, *server, client) == ""
    assert "must speak TLS and ask who reads it" in starts(tmp_path, local, web)
    assert "must speak TLS and ask who reads it" in starts(tmp_path, local, web, *server, client)
    assert starts(tmp_path, grpc, web, *server, client, access) == ""
    assert starts(tmp_path, grpc, web, "--insecure-i-understand") == ""


def test_readable_keys_and_mismatched_files_are_refused(tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    tool("cert", "init", str(tls))
    local = [f"--grpc.listen-address=127.0.0.1:{free_port()}", "--web.listen-address=none"]
    flags = [*local, f"--tls.cert-file={tls}/server.pem"]
    assert {oct(path.stat().st_mode & 0o777) for path in tls.glob("*.key")} == {"0o600"}
    assert starts(tmp_path, *flags, f"--tls.key-file={tls}/server.key") == ""
    assert "is not the key of" in starts(tmp_path, *flags, f"--tls.key-file={tls}/ca.key")
    (tls / "server.key").chmod(0o644)
    said = starts(tmp_path, *flags, f"--tls.key-file={tls}/server.key")
    assert "mode 0644 lets others use it; chmod 600" in said
    (tmp_path / "access.yml").write_text(ACCESS)
    (tmp_path / "access.yml").chmod(0o666)
    assert "mode 0666 lets others change it" in starts(tmp_path, *local, f"--access.file={tmp_path}/access.yml")


def test_failed_handshakes_of_the_page_have_their_address(server: SecureServer, tmp_path: Path) -> None:
    root = server.token("root")
    wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)
    assert server.metric(root, "bellwether_http_handshakes_failed_total") == 0
    tool("cert", "init", str(tmp_path / "other"))
    tool("cert", "client", str(tmp_path / "other"), "stranger")
    stranger = server.shown(tmp_path / "other/stranger.pem", tmp_path / "other/stranger.key")
    for _ in range(3):
        assert not page_takes(server, stranger)
    assert server.metric(root, "bellwether_http_handshakes_failed_total") == 3
    assert "the page's port: the TLS handshake of 127.0.0.1 failed: certificate verify failed" in server.log()


def test_any_reload_sets_the_gauge(server: SecureServer) -> None:
    root = server.token("root")
    wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)

    def good() -> float:
        return server.metric(root, "bellwether_config_last_reload_successful")

    assert good() == 1
    access = server.folder / "access.yml"
    access.write_text("identities: 1\n")  # Read because it has changed, without a signal.
    wait_for("it is refused", lambda: good() == 0)
    access.write_text(ACCESS)
    wait_for("it is taken", lambda: good() == 1)


def test_a_plain_address_of_a_tls_server_is_warned_of(tmp_path: Path) -> None:
    with SecureServer(tmp_path, ACCESS, more="web: {external_url: 'http://box:7071'}") as server:
        assert "web.external_url = http://box:7071: the page speaks TLS" in server.log()


def test_a_client_certificate_is_replaced_on_demand_only(tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    tool("cert", "init", str(tls))
    tool("cert", "client", str(tls), "ann")
    (tls / "ann.key").chmod(0o640)
    before = (tls / "ann.pem").read_text(), (tls / "ann.key").read_text()
    again = subprocess.run([BIN / "bellwether", "cert", "client", tls, "ann"], capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "ann.key: is there already; --replace makes it anew" in again.stderr, again
    assert (tls / "ann.pem").read_text() == before[0]
    tool("cert", "client", str(tls), "ann", "--replace")
    assert (tls / "ann.pem").read_text() != before[0] and (tls / "ann.key").read_text() != before[1]
    assert (tls / "ann.key").stat().st_mode & 0o777 == 0o640  # As the one before.


def test_a_token_written_to_a_file_says_its_id(tmp_path: Path) -> None:
    tokens, out = str(tmp_path / "tokens"), tmp_path / "ann.token"
    said = tool("token", "create", "ann", "--file", tokens, "--expires", "90d", "--out", str(out))
    listed = tool("token", "list", "--file", tokens).splitlines()[1].split()
    assert said == f"wrote {out}: token {listed[0]} of ann, until {listed[3]}\n"
    assert out.read_text().strip() not in said


def test_server_with_keys_is_not_dumpable(server: SecureServer) -> None:
    assert server.process is not None
    # Not dumpable: /proc/PID belongs to root, and no core is written.
    limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert core.split()[4:6] == ["0", "0"]
    if os.geteuid() != 0:
        assert Path(f"/proc/{server.process.pid}/maps").stat().st_uid == 0


def test_half_open_handshakes_do_not_stop_the_page(server: SecureServer) -> None:
    good = server.client_certificate("trainers")
    held = hold(server.http, 20)
    begin = time.monotonic()
    assert handshakes(server.http, server.context(good))
    assert time.monotonic() - begin < 8  # The others have 10 s.
    for one in held:
        one.close()
