"""Those that tell people of alerts: a real Alertmanager, commands that print lines of JSON, and the other end of a
webhook."""

from __future__ import annotations

import email
import email.policy
import http.server
import json
import shutil
import socketserver
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from pathlib import Path
from typing import IO, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, free_port, wait_for


@contextmanager
def alertmanager(folder: Path, receiver: str, smarthost: str = "") -> Iterator[str]:
    """Its host and port.  It notifies the address `receiver`, and by e-mail of the committed template."""
    config = folder / "alertmanager.yml"
    mail = (
        f", email_configs: [{{to: oncall@example.org, from: b@example.org, smarthost: '{smarthost}',"
        " require_tls: false, send_resolved: true,"
        """ headers: {Subject: '{{ template "bellwether.subject" . }}'},"""
        """ text: '{{ template "bellwether.text" . }}', html: '{{ template "bellwether.html" . }}'}]"""
        if smarthost
        else ""
    )
    config.write_text(
        f"templates: ['{ROOT / 'deploy/alertmanager/*.tmpl'}']\n"
        "route: {receiver: sink, group_by: [run], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}\n"
        "inhibit_rules:\n- {source_matchers: [severity=critical], target_matchers: [severity=warning], equal: [run]}\n"
        f"receivers:\n- {{name: sink, webhook_configs: [{{url: '{receiver}', send_resolved: true}}]{mail}}}\n"
    )
    program, amtool = shutil.which("prometheus-alertmanager"), shutil.which("amtool")
    assert program and amtool, "Debian's package prometheus-alertmanager is missing"
    subprocess.run([amtool, "check-config", str(config)], check=True, capture_output=True)
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={config}", f"--storage.path={folder / 'am'}", f"--web.listen-address={address}"]
    flags += ["--cluster.listen-address="]
    with open(folder / "alertmanager.log", "wb") as log, subprocess.Popen([program, *flags], stderr=log) as process:

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "alertmanager.log").read_text()
            try:
                with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        try:
            wait_for("Alertmanager is ready", is_ready, 60)
            yield address
        finally:
            process.terminate()


@contextmanager
def receiver(take: Callable[[str, dict[str, Any]], None]) -> Iterator[str]:
    """The address of one that takes what is posted to it: the path, and the JSON."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            take(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class _Smtp(socketserver.StreamRequestHandler):
    """As much of a mail server as a client needs to leave its mail (RFC 5321)."""

    def handle(self) -> None:
        self.wfile.write(b"220 test\r\n")
        for line in self.rfile:
            word = line[:4].upper()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                mail = b"".join(iter(lambda: self.rfile.readline(), b".\r\n"))
                cast(Any, self.server).take(email.message_from_bytes(mail, policy=email.policy.default))
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
            if word == b"QUIT":
                return


@contextmanager
def mailbox(take: Callable[[EmailMessage], None]) -> Iterator[str]:
    """Host and port of a mail server that gives what it is sent to `take`."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Smtp) as server:
        server.take = take  # type: ignore[attr-defined]
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def lines_of(command: list[str], take: Callable[[dict[str, Any]], None]) -> Iterator[IO[str]]:
    """Runs a command that prints lines of JSON; it ends with the block, which may write to it."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    lines = process.stdout

    def read() -> None:
        for line in lines:
            take(json.loads(line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield process.stdin
        assert process.poll() is None, f"{command} ended with {process.returncode}"
    finally:
        process.stdin.close()
        process.terminate()
        process.wait(60)
        reader.join()
