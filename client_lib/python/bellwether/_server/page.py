"""The HTTP side of a server: its JSON calls and its stream of events."""

from __future__ import annotations

import contextlib
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

from .._util import files, log

_EVENTS_SECONDS = 60.0  # The server speaks every 15 s.


class QueryError(RuntimeError):
    """The server refused a call; the text names the field, the value and the legal range.
    `status` is HTTP's: 400 a bad request, 401 or 403 not allowed, 404 no such run or alert."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


DEFAULT_PAGE = "http://127.0.0.1:7071"
_NOT_ALLOWED = (401, 403)
_FAILURES_TOLD = 3  # One after the other, of a page that has never answered: its address is wrong.
_SILENCES_TOLD = 10  # Of one that has: a server may be started anew meanwhile.


def is_refusal(error: Exception) -> bool:
    """We may not ask, or the other side takes our certificate no more."""
    if isinstance(error, QueryError):
        return error.status in _NOT_ALLOWED
    cause = error if isinstance(error, ssl.SSLError) else getattr(error, "reason", None)
    return isinstance(cause, ssl.SSLError) and "ALERT" in str(cause.reason)


class Hearing:
    """Says once that alerts are not heard, with the page's address, and once that they are again.

    what  "alerts of run x"
    tls   frames are sent over TLS
    """

    def __init__(self, what: str, tls: bool) -> None:
        self._what, self._tls = what, tls
        self._heard = self._told = False
        self._failures = 0

    def failed(self, page_url: str, why: str, refused: bool, since: str = "") -> None:
        self._failures += 1
        enough = _SILENCES_TOLD if self._heard else _FAILURES_TOLD
        if self._told or (not refused and self._failures < enough):
            return
        self._told = True
        base = split_page_url(page_url)[0]
        named = ""
        if not self._heard and not refused:
            plain = self._tls and base.startswith("http://")
            named = f" (the server's web.external_url{', not https://' if plain else ''})"
        log.warning(f"{self._what} are not heard{since}, asking again: {base}{named}: {why}")

    def heard(self) -> None:
        if self._told:
            log.info(f"{self._what} are heard again")
        self._heard, self._told, self._failures = True, False, 0


@dataclass(frozen=True)
class Event:
    kind: str  # alert, runs, resync or refused
    id: str  # Of an alert or a resync, from where the stream goes on; "" else.
    data: Any


def split_page_url(page_url: str) -> tuple[str, str]:
    """("http://host:port", token) of a page's address."""
    parts = urllib.parse.urlsplit(page_url)
    token = urllib.parse.parse_qs(parts.query).get("token", [""])[0]
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", token


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def tls_context(
    ca: Union[str, Path, None], cert: Union[str, Path, None], key: Union[str, Path, None]
) -> Optional[ssl.SSLContext]:
    """The authorities to trust (None: the system's) and what to show; None if none is given.
    Raises ValueError when one of cert and key is missing, OSError when a file cannot be read.
    """
    if (cert is None) != (key is None):
        raise ValueError("tls_cert and tls_key belong together")
    if ca is None and cert is None:
        return None
    for path in (ca, cert, key):
        why = files.why_no_file(path) if path is not None else None
        if why is not None:
            raise OSError(f"{path}: {why}")
    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    if cert is not None and key is not None:
        context.load_cert_chain(str(cert), str(key))
    return context


class Page:
    """Thread-safe.  Every call raises OSError when the server cannot be reached."""

    def __init__(
        self, url: str, token: str = "", timeout: float = 30.0, tls: Optional[ssl.SSLContext] = None
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f'page "{url}": must begin with http:// or https://')
        self.base, in_url = split_page_url(url)
        self._token = token or in_url
        self._timeout = timeout
        parts = urllib.parse.urlsplit(self.base)
        if self._token and parts.scheme != "https" and not _is_local(parts.hostname or ""):
            raise ValueError(f"{self.base}: a token is sent by https, or within this machine, only")
        # Never through a proxy: the server is on this machine or on the site's own network.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=tls))
        self._opener = urllib.request.build_opener(*handlers)

    def _request(self, path: str, body: Optional[bytes] = None) -> urllib.request.Request:
        request = urllib.request.Request(f"{self.base}/api/v1/{path}", data=body)
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        return request

    def call(self, method: str, **request: Any) -> Any:
        """A call of service Query (query.proto) by its name.  Raises QueryError."""
        asked = self._request(method, json.dumps(request).encode())
        try:
            with self._opener.open(asked, timeout=self._timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as e:
            text = e.read().decode("utf-8", "replace").strip()
            # Not every refusal is JSON: a token is refused in plain words.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["message"]
            raise QueryError(e.code, f"{method}: {text or e.reason}") from None

    def events(self, after: Optional[str] = None) -> Iterator[Event]:
        """What happens, until the stream breaks; with `after` first what was missed behind it."""
        request = self._request("events")
        if after is not None:
            request.add_header("Last-Event-ID", after)
        try:
            answer = self._opener.open(request, timeout=_EVENTS_SECONDS)
        except urllib.error.HTTPError as e:
            if e.code in (401, 403, 404):
                raise QueryError(e.code, f"events: {e.reason}") from None
            raise  # Too many streams: later.
        with answer:
            fields: dict[str, str] = {}
            for raw in answer:
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                if line:
                    key, _, value = line.partition(":")
                    fields[key] = value.removeprefix(" ")
                    continue
                if "event" in fields:
                    data = json.loads(fields.get("data", "null"))
                    yield Event(fields["event"], fields.get("id", ""), data)
                fields = {}
