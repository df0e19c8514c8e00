"""Goal: off the handshake nobody gets in: bad certificates, old TLS, weak ciphers and plaintext are
refused; certificates rotate under open streams; floods and HTTP/2 attacks cost nothing that they
should not; and an address off loopback without all that is not listened on.
Method: the real server with real certificates; raw sockets and Python's TLS against it. Rows 17 to
20 of the fault matrix.
"""

from __future__ import annotations

import datetime
import os
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

from bellwether.client import Block

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
        with socket.create_connection((host, int(port)), timeout=3) as raw:
            with context.wrap_socket(raw, server_hostname="localhost") as wire:
                wire.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b"200 OK" in wire.recv(64)
    except OSError:
        return False


def serial(server: SecureServer, address: str, shown: dict[str, str]) -> bytes:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        with server.context(shown).wrap_socket(raw, server_hostname="localhost") as wire:
            return wire.getpeercert(binary_form=True) or b""


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
                assert eventually(lambda a=address: serial(server, a, good) != before[a], 15), "not rotated"
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
            held.append(socket.create_connection((host, int(port)), timeout=3))
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
            assert eventually(lambda: answers(server.grpc, server.context(good)), 15)
            for one in held:
                one.close()
            assert eventually(lambda: answers(server.grpc, server.context(good)), 15)
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
            other.settimeout(5)
            host, port = server.grpc.rsplit(":", 1)
            other.connect((host, int(port)))
            with server.context(good).wrap_socket(other, server_hostname="localhost"):
                pass
        for one in held:
            one.close()
        assert eventually(lambda: answers(server.grpc, server.context(good)))


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
    assert answers(server.grpc, server.context(server.client_certificate("trainers")))


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


def test_keys_that_others_may_read_and_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
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


def test_with_keys_loaded_nobody_elses_debugger_reads_them(server: SecureServer) -> None:
    assert server.process is not None
    # Not dumpable: /proc/PID belongs to root, and no core is written.
    limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
    assert core.split()[4:6] == ["0", "0"]
    if os.geteuid() != 0:
        assert Path(f"/proc/{server.process.pid}/maps").stat().st_uid == 0


def test_the_start_says_which_weaknesses_grpc_has(server: SecureServer, tmp_path: Path) -> None:
    assert "CVE-2023-33953" in server.log() and "it is reached from this machine only" in server.log()


def test_half_open_handshakes_do_not_stop_the_page(server: SecureServer) -> None:
    good = server.client_certificate("trainers")
    held = hold(server.http, 20)
    begin = time.monotonic()
    assert handshakes(server.http, server.context(good))
    assert time.monotonic() - begin < 5
    for one in held:
        one.close()
