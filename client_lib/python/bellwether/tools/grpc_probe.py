"""Would a run be taken at this address, with this identity?  Asked in gRPC itself, over the
standard library: one stream of Attach is opened as the sender does, and ended without a run.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import urllib.parse
from dataclasses import dataclass
from typing import Optional, Union

from .._server.page import tls_context
from .._util import files
from ..settings import Settings

SECONDS = 5.0  # For each wait.
_METHOD = "/bellwether.v1.Ingest/Attach"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _CONTINUATION = 0, 1, 3, 4, 6, 7, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_FRAMES_MAX, _FRAME_MAX = 100, 1 << 20
_DENIED, _UNAUTHENTICATED = 7, 16
_STREAM = 1

# Of a client's certificate, by what TLS calls them.
_REFUSALS = {
    "UNKNOWN_CA": "no authority of the server's tls.client_ca_file has signed it",
    "CERTIFICATE_REVOKED": "it was taken back: put a renewed one there",
    "CERTIFICATE_EXPIRED": "it has expired: put a renewed one there",
    "UNSUPPORTED_CERTIFICATE": "it is no client's certificate (`bellwether cert client` makes one)",
}

Link = Union[socket.socket, ssl.SSLSocket]


class NoServer(RuntimeError):
    """The text says what is there in place of a server that takes the run, and what to do."""


@dataclass(frozen=True)
class _Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header that is in no table, without Huffman's code.  Raises ValueError if it is long."""
    found = b"\x10"  # Never indexed: a token may be among them.
    for text in (name.encode(), value.encode()):
        if len(text) > 126 + 127:
            raise ValueError(f"{name} has {len(text)} bytes, 253 at most are legal here")
        found += bytes([len(text)]) if len(text) < 127 else bytes([127, len(text) - 127])
        found += text
    return found


def _integer(data: bytes, at: int, bits: int) -> tuple[int, int]:
    """An integer of HPACK, and where it ends."""
    most = (1 << bits) - 1
    value, at, shift = data[at] & most, at + 1, 0
    if value < most:
        return value, at
    while True:
        value += (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def literals(block: bytes) -> dict[str, str]:
    """The headers of a block that are spelt out, as gRPC spells its status.  Others are skipped.
    Raises IndexError for half a block."""
    found, at = {}, 0
    while at < len(block):
        first = block[at]
        if first & 0x80:  # Of a table.
            _, at = _integer(block, at, 7)
            continue
        if first & 0xE0 == 0x20:  # A new size of the table.
            _, at = _integer(block, at, 5)
            continue
        index, at = _integer(block, at, 6 if first & 0x40 else 4)
        texts = []
        for _ in range(1 if index else 2):
            coded = block[at] & 0x80
            size, at = _integer(block, at, 7)
            texts.append("" if coded else block[at : at + size].decode("utf-8", "replace"))
            at += size
        if len(texts) == 2:
            found[texts[0]] = texts[1]
    return found


def _exactly(link: Link, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = link.recv(count - len(found))
        if not part:
            raise ConnectionResetError("it closed the connection")
        found += part
    return found


def _next_frame(link: Link) -> _Frame:
    head = _exactly(link, 9)
    if head.startswith((b"HTTP/1", b"<")):
        raise NoServer(
            "that is the port of a page (HTTP/1), or of another program: runs are sent to the gRPC "
            "port, 7070 if nothing else is configured"
        )
    size = int.from_bytes(head[:3], "big")
    if size > _FRAME_MAX:
        raise NoServer("what listens there does not speak gRPC: is it another program's port?")
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return _Frame(kind, flags, stream & 0x7FFFFFFF, _exactly(link, size))


def _header_block(frame: _Frame) -> bytes:
    payload, padding = frame.payload, 0
    if frame.flags & _PADDED:
        padding, payload = payload[0], payload[1:]
    if frame.flags & _PRIORITY:
        payload = payload[5:]
    return payload[: len(payload) - padding]


def _status(link: Link, authority: str, token: str) -> tuple[int, str]:
    """What the call ends with.  Raises OSError, NoServer."""
    headers = _literal(":method", "POST") + _literal(":path", _METHOD)
    headers += _literal(":scheme", "https" if isinstance(link, ssl.SSLSocket) else "http")
    headers += _literal(":authority", authority) + _literal("te", "trailers")
    headers += _literal("content-type", "application/grpc")
    if token:
        headers += _literal("authorization", f"Bearer {token}")
    call = _frame(_HEADERS, _END_HEADERS | _END_STREAM, _STREAM, headers)
    link.sendall(_PREFACE + _frame(_SETTINGS, 0, 0) + call)
    found: dict[str, str] = {}
    for _ in range(_FRAMES_MAX):
        frame = _next_frame(link)
        if frame.kind == _SETTINGS and not frame.flags & _ACK:
            link.sendall(_frame(_SETTINGS, _ACK, 0))
        elif frame.kind == _PING and not frame.flags & _ACK:
            link.sendall(_frame(_PING, _ACK, 0, frame.payload))
        elif frame.kind == _HEADERS:
            found.update(literals(_header_block(frame)))
        elif frame.kind == _CONTINUATION:
            found.update(literals(frame.payload))
        elif frame.kind in (_RESET, _GOAWAY):
            raise ConnectionResetError("it ended the call without a status")
        if frame.kind == _HEADERS and frame.flags & _END_STREAM:
            break
    status = found.get("grpc-status", "")
    if not status.isdecimal():
        raise NoServer("what answers there does not speak gRPC: is it another program's port?")
    return int(status), files.one_line(urllib.parse.unquote(found.get("grpc-message", "")))


def _connected(server: str) -> tuple[socket.socket, str]:
    """(the socket, the name of the host).  Raises OSError, NoServer."""
    if server.startswith("unix:"):
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(SECONDS)
        link.connect(server[len("unix:") :].replace("///", "/"))
        return link, "localhost"
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise NoServer(f"{server!r} must be host:port, as bellwether:7070, or unix:/path")
    return socket.create_connection((host, int(port)), timeout=SECONDS), host


def _speaks_tls(server: str) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # Only whether it does.
    context.set_alpn_protocols(["h2"])
    try:
        link, host = _connected(server)
        with link, context.wrap_socket(link, server_hostname=host):
            return True
    except (OSError, NoServer):
        return False


def _why_no_tls(error: ssl.SSLError, settings: Settings) -> str:
    text = str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        if "ostname mismatch" in text or "IP address mismatch" in text:
            return (
                f"its certificate is of another name: {error.verify_message} Name the server as "
                "its certificate does"
            )
        return (
            f"its certificate is not of an authority in {settings.tls_ca} "
            f"({error.verify_message}): tls_ca (BELLWETHER_TLS_CA) must be the file of the "
            "authority that signed it"
        )
    if "CERTIFICATE_REQUIRED" in text or "HANDSHAKE_FAILURE" in text:
        return (
            "it wants a client certificate: set tls_cert and tls_key (BELLWETHER_TLS_CERT, "
            "BELLWETHER_TLS_KEY), or a token where it takes tokens"
        )
    if any(word in text for word in ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE")):
        why = next((why for word, why in _REFUSALS.items() if word in text), str(error.reason))
        return f"it does not take the certificate {settings.tls_cert} (BELLWETHER_TLS_CERT): {why}"
    if "WRONG_VERSION" in text:
        return "it speaks no TLS: leave tls_ca, tls_cert and tls_key (BELLWETHER_TLS_*) out"
    return f"no TLS with it: {error.reason or text}"


def _why_no_file(settings: Settings) -> Optional[str]:
    for name in ("tls_ca", "tls_cert", "tls_key", "token_file"):
        path = getattr(settings, name)
        if path is not None and not os.path.exists(path):
            return f"{name} (BELLWETHER_{name.upper()}) is {path}: there is no such file"
    return None


def _ask(server: str, settings: Settings) -> tuple[int, str]:
    token = files.read_text(settings.token_file).strip() if settings.token_file else ""
    context = tls_context(settings.tls_ca, settings.tls_cert, settings.tls_key)
    link, host = _connected(server)
    with link:
        if context is None:
            return _status(link, host, token)
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(link, server_hostname=host) as secure:
            return _status(secure, host, token)


def why_not(server: str, settings: Settings) -> Optional[str]:
    """None if the server would take a run of this identity, else why not and what to do.  The
    settings' TLS and token are those that the run would use."""
    missing = _why_no_file(settings)
    if missing is not None:
        return missing
    try:
        status, message = _ask(server, settings)
    except NoServer as e:
        return str(e)
    except ssl.SSLError as e:
        return _why_no_tls(e, settings)
    except ConnectionRefusedError:
        return "nothing listens there: is bellwetherd running, and is this its gRPC address?"
    except (ConnectionError, TimeoutError, IndexError) as e:
        if settings.tls_ca is None and _speaks_tls(server):
            return (
                "it speaks TLS: set tls_ca (BELLWETHER_TLS_CA) to the file of the authority that "
                "signed its certificate"
            )
        if settings.tls_ca is not None and settings.tls_cert is None and _speaks_tls(server):
            return (
                "it ends the connection: it may want a client certificate, tls_cert and tls_key "
                f"(BELLWETHER_TLS_CERT, BELLWETHER_TLS_KEY) [{files.one_line(e)}]"
            )
        if settings.tls_cert is not None and _speaks_tls(server):
            return (
                f"it ends the connection: it may refuse the certificate {settings.tls_cert}, taken "
                f"back, expired or of another authority [{files.one_line(e)}]"
            )
        return f"it does not answer in gRPC ({files.one_line(e) or type(e).__name__})"
    except (OSError, ValueError) as e:
        return files.one_line(e)
    if status == _UNAUTHENTICATED:
        return (
            f"it does not know who asks: {message}. Set token_file (BELLWETHER_TOKEN_FILE), or "
            "tls_cert and tls_key"
        )
    if status == _DENIED:
        return f"this identity may not send runs: {message}. The access file gives the role write"
    return None
