"""What `bellwether` says where a server cannot be reached, and of what is mistyped.

Goal: a person learns in plain words what is wrong and what to give. Nothing listens, or it is the
page's port, or TLS is on one side alone. A certificate is missing or wrong, or a name is near.
Method: the real command against real servers, plain, with TLS, and with client certificates.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, free_port
from secure_server import SecureServer, tool

ACCESS = "roles:\n  viewers: {rights: [read], identities: [ann]}\n"


def said(*words: str, code: int, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("BELLWETHER_", "GRPC_"))}
    done = subprocess.run(
        [BIN / "bellwether", *words], capture_output=True, text=True, timeout=60,
        env={"XDG_STATE_HOME": "/nonexistent", **clean, **env},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, ""), done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr  # No line of gRPC's own.
    return done.stderr


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        server.run("run", "import", str(ROOT / "tests/testdata/runs/gpt-live-flash-s14.bwrun"))
        yield server


@pytest.fixture(scope="module")
def mutual() -> Iterator[SecureServer]:
    with tempfile.TemporaryDirectory() as folder:
        tool("cert", "init", f"{folder}/other")
        tool("cert", "client", f"{folder}/other", "ann")
        config = "tls: {{cert_file: {0}/tls/server.pem, key_file: {0}/tls/server.key, client_ca_file: {0}/tls/ca.pem}}"
        server = SecureServer(Path(folder), "{}")
        (Path(folder) / "server.yml").write_text(config.format(folder))
        with server:
            yield server


@pytest.fixture(scope="module")
def one_sided() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        tool("cert", "init", f"{folder}/tls")
        config = f"tls: {{cert_file: {folder}/tls/server.pem, key_file: {folder}/tls/server.key}}"
        with Server(Path(folder), config) as server:
            yield server


def ca(server: Server, folder: str = "tls") -> tuple[str, str]:
    return "--tls-ca", str(server.folder / folder / "ca.pem")


def identity(server: Server, folder: str = "tls") -> tuple[str, ...]:
    where = server.folder / folder
    if not (where / "ann.pem").exists():
        tool("cert", "client", str(where), "ann")
    return "--tls-cert", str(where / "ann.pem"), "--tls-key", str(where / "ann.key")


def test_nothing_listens() -> None:
    address = f"127.0.0.1:{free_port()}"
    told = said("--server", address, "run", "list", code=4)
    assert told == f"bellwether: cannot reach {address}: nothing listens there; is bellwetherd running?\n"
    assert "nothing listens there" in said("--server", "unix:/no/such/socket", "run", "list", code=4)


def test_a_name_without_address() -> None:
    told = said("--server", "no-such-host.invalid:7070", "run", "list", code=4)
    assert "no-such-host.invalid:7070: no address is known for this name" in told


def test_an_address_is_checked_before_any_lookup() -> None:
    must = "must be host:port, such as 127.0.0.1:7070, or unix:PATH"
    for wrong in ("foo", "foo:", ":7070", "foo:bar", "foo:70700", "foo:0", "http://127.0.0.1:7071"):
        told = said("--server", wrong, "run", "list", code=2)
        assert f'--server "{wrong}": {must}' in told
    assert must in said("run", "list", code=2, BELLWETHER_SERVER="foo")


def test_the_pages_port_names_that_of_grpc(plain: Server) -> None:
    port = plain.grpc.rpartition(":")[2]
    told = said("--server", plain.http, "run", "list", code=4)
    assert f"that is the port of the page, or of another program; gRPC's is {port}" in told
    folder = plain.folder / "ca"
    tool("cert", "init", str(folder))
    told = said("--server", plain.http, *ca(plain, "ca"), "--timeout", "1s", "run", "list", code=4)
    assert f"gRPC's is {port}" in told


def test_a_private_page_is_told_by_the_ready_file(one_sided: Server, tmp_path: Path) -> None:
    ready = tmp_path / "bellwether/server.json"
    ready.parent.mkdir()
    assert one_sided.process is not None
    about = {"pid": one_sided.process.pid, "grpc": one_sided.grpc, "token": "", "http": f"https://{one_sided.http}"}
    ready.write_text(json.dumps(about))
    told = said("--server", one_sided.http, "run", "list", code=4, XDG_STATE_HOME=str(tmp_path))
    assert f"gRPC's is {one_sided.grpc}" in told


def test_tls_on_the_servers_side_alone(one_sided: Server, mutual: SecureServer) -> None:
    for server in (one_sided, mutual):
        assert "it speaks TLS: give --tls-ca" in said("--server", server.grpc, "run", "list", code=4)


def test_tls_on_the_callers_side_alone(plain: Server, one_sided: Server) -> None:
    told = said("--server", plain.grpc, *ca(one_sided), "run", "list", code=4)
    assert "it speaks no TLS: leave out --tls-ca" in told


def test_a_clients_certificate_is_asked_for(mutual: SecureServer) -> None:
    told = said("--server", mutual.grpc, *ca(mutual), "run", "list", code=4)
    assert "it wants a client's certificate: give --tls-cert and --tls-key" in told
    told = said("--server", mutual.grpc, *ca(mutual), *identity(mutual, "other"), "run", "list", code=4)
    assert "it refuses the certificate of --tls-cert" in told


def test_another_authority_and_another_name(one_sided: Server, mutual: SecureServer) -> None:
    told = said("--server", one_sided.grpc, *ca(mutual, "other"), "run", "list", code=4)
    assert "its certificate is of no authority in --tls-ca" in told
    port = one_sided.grpc.rpartition(":")[2]
    with _forwarded("127.0.0.9", int(port)) as address:
        told = said("--server", address, *ca(one_sided), "run", "list", code=4)
    assert "its certificate is of another name" in told


class _forwarded:
    """The server's port under an address that its certificate does not name."""

    def __init__(self, host: str, port: int) -> None:
        self.listener = socket.create_server((host, 0))
        self.to = port
        self.ends: list[socket.socket] = [self.listener]

    def __enter__(self) -> str:
        threading.Thread(target=self._accept, daemon=True).start()
        host, port = self.listener.getsockname()
        return f"{host}:{port}"

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self.listener.accept()
                there = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                return
            self.ends += [here, there]
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    @staticmethod
    def _copy(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_a_port_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        told = said("--server", address, "--timeout", "300ms", "run", "list", code=4)
    assert "something listens there and says nothing" in told and "--timeout" in told


def test_a_server_that_hangs_is_told_as_late(plain: Server) -> None:
    with plain.paused():
        told = said("--server", plain.grpc, "--timeout", "300ms", "run", "list", code=4)
    assert "in time" in told and "--timeout" in told


def test_unknown_commands_name_the_nearest() -> None:
    assert said("rnu", "list", code=2) == 'bellwether: "rnu" is no command; did you mean run? (see --help)\n'
    assert 'run: "gett" is no command; did you mean get' in said("run", "gett", "x", code=2)
    assert '"explain" is no command; did you mean run explain or ' in said("explain", "x", code=2)
    assert 'check: "policy" is no command; did you mean policy check?' in said("check", "policy", "f", code=2)
    assert "its commands are list, get" in said("run", "zzzzz", code=2)
    assert "run: a command is missing, one of list, get" in said("run", code=2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("action", "approve"), "action approve: a run is missing (see bellwether run list)"),
        (("action", "approve", "x"), "action approve: an action's id is missing (see bellwether action list x)"),
        (("alert", "ack", "x"), "alert ack: an alert's key is missing (see bellwether alert list --run x)"),
        (("run", "compare", "x"), "run compare: a run is missing (see bellwether run list)"),
    ],
)
def test_missing_arguments_come_with_their_list(words: tuple[str, ...], told: str) -> None:
    assert said(*words, code=2) == f"bellwether: {told}\n"


def test_unknown_names_and_words_have_the_nearest(plain: Server) -> None:
    run = "gpt-live-flash-s14"
    to = ("--server", plain.grpc)
    told = said(*to, "run", "get", "gpt-live-flsh-s14", code=1)
    assert f'run "gpt-live-flsh-s14": no run has this name or uuid; did you mean {run}?' in told
    assert f"did you mean {run}?" in said(*to, "alert", "watch", "--run", "gpt-live-flash-s41", code=1)
    assert "see bellwether run list" in said(*to, "run", "get", "something-else", code=1)
    for words in (("head", "top", run, "--signal", "drfit_ratio"), ("matrix", run, "drfit_ratio")):
        assert "did you mean drift_ratio?" in said(*to, *words, code=2)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("alert", "list", "--severity", "critcal"), "critical"),
        (("action", "propose", "x", "qk.clp"), "qk.clip"),
        (("action", "propose", "x", "stop", "--mode", "hpn"), "hp"),
        (("run", "annotate", "x", "y", "--kind", "restor"), "restore"),
        (("run", "list", "-o", "jsn"), "json"),
    ],
)
def test_words_of_a_choice_have_the_nearest(words: tuple[str, ...], meant: str) -> None:
    told = said(*words, code=2)
    assert told.startswith("bellwether: ") and f"did you mean {meant}" in told


def test_times_have_units_everywhere() -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BELLWETHER_")}
    for words in (("--timeout", "1", "run", "list"), ("alert", "silence", "x", "a1", "--for", "1")):
        done = subprocess.run([BIN / "bellwether", *words], capture_output=True, text=True, env=clean)
        assert done.returncode == 2 and '"1": needs a unit, such as 1s' in done.stderr
