"""A bellwetherd with TLS and identities, and its callers, for the tests of both."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from bellwether_process import BIN, Server

from bellwether.client import RunClient, RunOptions

CONFIG = """
tls: {{cert_file: {tls}/server.pem, key_file: {tls}/server.key, client_ca_file: {tls}/ca.pem,
      crl_file: {tls}/crl.pem, refresh_seconds: 1}}
access_file: access.yml
tokens_file: tokens
{more}
"""


def tool(*words: str, exit_code: int = 0) -> str:
    done = subprocess.run([str(BIN / "bellwether"), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == exit_code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


class SecureServer(Server):
    """Certificates in folder/tls, identities as `access` says."""

    def __init__(self, folder: Path, access: str, more: str = "", tls: str = "tls") -> None:
        self.tls = folder / "tls"
        if not self.tls.exists():
            tool("cert", "init", str(self.tls))
        (folder / "access.yml").write_text(access)
        super().__init__(folder, CONFIG.format(tls=tls, more=more))

    def client_certificate(self, name: str, uri: str = "") -> dict[str, str]:
        """What a trainer or a command shows; made at the first call."""
        if not (self.tls / f"{name}.pem").exists():
            tool("cert", "client", str(self.tls), name, *(["--uri", uri] if uri else []))
        return self.shown(self.tls / f"{name}.pem", self.tls / f"{name}.key")

    def shown(self, certificate: Path, key: Path) -> dict[str, str]:
        return {"tls_ca": str(self.tls / "ca.pem"), "tls_cert": str(certificate), "tls_key": str(key)}

    def token(self, identity: str, *more: str) -> str:
        return tool("token", "create", identity, "--file", str(self.folder / "tokens"), *more).strip()

    def trainer(self, run: str, shown: dict[str, str], **options: Any) -> RunClient:
        log = self.folder / "sender.log"
        return RunClient(RunOptions(run=run, layers=1, heads=1, server=self.grpc, log_path=str(log), **shown, **options))

    def command(self, shown: dict[str, str], *words: str, token: str = "", exit_code: int = 0) -> str:
        done = subprocess.run(
            [str(BIN / "bellwether"), "--server", self.grpc, *self.flags_of(shown, token), *words],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == exit_code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def token_file(self, token: str) -> str:
        file = self.folder / f"token-{abs(hash(token))}"
        file.write_text(token)
        file.chmod(0o600)
        return str(file)

    def begin(self, shown: dict[str, str], *words: str, token: str = "") -> Callable[[], tuple[str, int]]:
        """Starts a command that watches, and waits for its first line; what is returned waits for
        its end: (what it printed, its exit code)."""
        process = subprocess.Popen(
            [str(BIN / "bellwether"), "--server", self.grpc, *self.flags_of(shown, token), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        first = process.stdout.readline()

        def end() -> tuple[str, int]:
            said = process.communicate(timeout=60)[0]
            return first + said, process.returncode

        return end

    def events(self, token: str = "", shown: Optional[dict[str, str]] = None) -> Callable[[], str]:
        """Opens the page's stream of events; what is returned waits for its end: all that it told."""
        request = urllib.request.Request(f"https://{self.http}/api/v1/events")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        stream = urllib.request.urlopen(request, timeout=20, context=self.context(shown))
        lines = [stream.readline()]

        def end() -> str:
            lines.append(stream.read())
            return b"".join(lines).decode()

        return end

    def keep(self, shown: dict[str, str]) -> Callable[[str], int]:
        """One connection to the page that stays open: the status of a path asked on it."""
        host, port = self.http.rsplit(":", 1)
        connection = http.client.HTTPSConnection(host, int(port), timeout=20, context=self.context(shown))
        connection.connect()
        connection.auto_open = 0  # Another connection would be another handshake.

        def ask(path: str) -> int:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            return answer.status

        return ask

    def flags_of(self, shown: dict[str, str], token: str = "") -> list[str]:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in shown.items()]
        return [*flags, f"--token-file={self.token_file(token)}"] if token else flags

    def context(self, shown: Optional[dict[str, str]] = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.tls / "ca.pem"))
        if shown:
            context.load_cert_chain(shown["tls_cert"], shown["tls_key"])
        return context

    def ask(self, path: str, token: str = "", body: Any = None, shown: Optional[dict[str, str]] = None) -> tuple[int, str]:
        """(status, text) of a request to the page's side."""
        request = urllib.request.Request(f"https://{self.http}{path}")
        if body is not None:
            request = urllib.request.Request(
                f"https://{self.http}/api/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=20, context=self.context(shown)) as answer:
                return int(answer.status), str(answer.read().decode())
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()

    def metric(self, token: str, name: str) -> float:
        status, text = self.ask("/metrics", token)
        assert status == 200, text
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(map(float, values))

    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "data/audit.log").read_text().splitlines()]


def answers(address: str, context: Optional[ssl.SSLContext] = None, seconds: float = 10.0) -> bool:
    """Whether gRPC's side takes this handshake: its first frame proves that it has."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=seconds) as raw:
            wire: socket.socket = raw
            if context is not None:
                context.set_alpn_protocols(["h2"])
                wire = context.wrap_socket(raw, server_hostname="localhost")
            wire.settimeout(seconds)
            wire.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            got = wire.recv(64)
            return len(got) >= 9 and got[3] == 4  # SETTINGS
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmRSS"))


def eventually(condition: Any, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
