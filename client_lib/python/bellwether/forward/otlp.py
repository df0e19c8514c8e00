"""Runs in an OpenTelemetry collector: OTLP over HTTP, in its JSON.

A collector knows times and no steps, so gauges tell what is newest when they are sent, as a scrape
would; alerts are logs with their own times.  The SDK measures the process that it is in and has no
stable interface for logs of others; what is sent is held against the protocol's own messages.

Source: https://opentelemetry.io/docs/specs/otlp/
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import math
import os
import socket
import sys
import threading
import time
import urllib.request
from typing import Any, Optional
from urllib.parse import unquote

from .._util import files
from .loggers import Start
from .reader import Entry, Told

_TIMEOUT_SECONDS = 10.0
_LOGS_MAX = 1000  # In one request.
_ANSWER_MAX = 64 << 10  # Bytes that are read of one.
_SEVERITY_NUMBERS = {"info": 9, "warning": 13, "critical": 17}  # INFO, WARN, ERROR.


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Only the address that people configured gets the data: a redirect is an HTTPError."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Exchange:
    """One request and the head of its answer, within _TIMEOUT_SECONDS in all.  That of a socket is
    for each read, and a collector may send a byte a second."""

    def __init__(self) -> None:
        self._connection: Optional[http.client.HTTPConnection] = None
        self._passed = False

    def open(self, asked: urllib.request.Request) -> Any:
        """Raises OSError: also where the time has passed."""
        timer = threading.Timer(_TIMEOUT_SECONDS, self._cut)
        timer.daemon = True
        timer.start()
        opener = urllib.request.build_opener(_NoRedirect, _Plain(self), _Secure(self))
        try:
            answer = opener.open(asked, timeout=_TIMEOUT_SECONDS)
        except (OSError, http.client.HTTPException) as e:
            if self._passed:
                raise self._late() from e
            if isinstance(e, OSError):
                raise
            raise OSError(f"no answer of HTTP: {e!r}") from e
        finally:
            timer.cancel()
        if self._passed:  # A head that was cut off reads like one that has ended.
            answer.close()
            raise self._late()
        return answer

    def made(self, connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
        self._connection = connection
        return connection

    def _cut(self) -> None:
        self._passed = True
        own: Optional[socket.socket] = getattr(self._connection, "sock", None)
        if own is not None:
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _late() -> OSError:
        return TimeoutError(f"it has not answered in {_TIMEOUT_SECONDS:g} s")


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        def connection(host: str, **how: Any) -> http.client.HTTPConnection:
            return self._exchange.made(http.client.HTTPConnection(host, **how))

        return self.do_open(connection, req)


class _Secure(urllib.request.HTTPSHandler):
    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        def connection(host: str, **how: Any) -> http.client.HTTPConnection:
            return self._exchange.made(http.client.HTTPSConnection(host, **how))

        return self.do_open(connection, req)


def _partial(answer: Any) -> dict[str, Any]:
    """The part that a collector refused, of the start of its answer: it is a stranger."""
    until, text = time.monotonic() + _TIMEOUT_SECONDS, b""
    while len(text) < _ANSWER_MAX and time.monotonic() < until:
        more = answer.read1(_ANSWER_MAX - len(text))
        if not more:
            break
        text += more
    try:
        partial = json.loads(text or b"{}")["partialSuccess"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return partial if isinstance(partial, dict) else {}


class Otlp:
    """Gauges and logs of one run; `where` is the collector's address, http://host:4318."""

    resume = ""  # Nothing is opened there.

    def __init__(self, where: str, start: Start) -> None:
        if not where.startswith(("http://", "https://")):
            raise ValueError(f"otlp:{where}: must be http://HOST:4318 or https://...")
        self._where = where.rstrip("/")
        facts = {f"bellwether.{name}": value for name, value in start.facts.items()}
        named = {"service.name": "bellwether", "bellwether.run": start.run}
        self._of = {
            "attributes": _attributes({**named, "bellwether.run_uuid": start.uuid, **facts})
        }

    def write(self, entries: list[Entry]) -> None:
        newest: dict[str, float] = {}
        for entry in entries:
            newest.update(entry.values)
        if entries:
            newest["bellwether_run/step"] = float(entries[-1].step)
            self._send("metrics", "resourceMetrics", "scopeMetrics", "metrics", _gauges(newest))
        logs = [_log(entry, told) for entry in entries for told in entry.told]
        for first in range(0, len(logs), _LOGS_MAX):
            part = logs[first : first + _LOGS_MAX]
            self._send("logs", "resourceLogs", "scopeLogs", "logRecords", part)

    def _send(self, signal: str, resource: str, scope: str, items: str, told: list[Any]) -> None:
        """Raises OSError where the collector does not answer, or does not take it."""
        inside = {"scope": {"name": "bellwether"}, items: told}
        body = {resource: [{"resource": self._of, scope: [inside]}]}
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", **_headers()}
        data = gzip.compress(json.dumps(body, allow_nan=False).encode())
        asked = urllib.request.Request(f"{self._where}/v1/{signal}", data, headers)
        with _Exchange().open(asked) as answer:
            partial = _partial(answer)
        # By the protocol not to be sent again.
        if refused := {
            name: count for name, count in partial.items() if count and name.startswith("rejected")
        }:
            text = f"otlp: refused: {refused}: {partial.get('errorMessage')}"
            print(files.one_line(text), file=sys.stderr)

    def close(self, ended: bool) -> None:
        pass


def _headers() -> dict[str, str]:
    """OTEL_EXPORTER_OTLP_HEADERS, as its specification has it: name=value,name=value, %-encoded."""
    pairs = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",")
    named = [pair.partition("=") for pair in pairs if "=" in pair]
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in named}


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = {int: "intValue"}  # As protobuf's JSON has it: in quotes.
    return [
        {"key": key, "value": {kinds.get(type(value), "stringValue"): str(value)}}
        for key, value in values.items()
    ]


def _gauges(values: dict[str, float]) -> list[dict[str, Any]]:
    """bellwether_run/stage -> bellwether_run_stage; what is behind /layer_ becomes an attribute."""
    now = str(time.time_ns())
    points: dict[str, list[dict[str, Any]]] = {}
    for name, value in values.items():
        metric, _, layer = name.partition("/layer_")
        # As protobuf's JSON has them; JSON itself has none.
        number = (
            value
            if math.isfinite(value)
            else "NaN"
            if math.isnan(value)
            else f"{'-' * (value < 0)}Infinity"
        )
        point: dict[str, Any] = {"timeUnixNano": now, "asDouble": number}
        if layer:
            point["attributes"] = _attributes({"layer": int(layer)})
        points.setdefault(metric.replace("/", "_"), []).append(point)
    return [{"name": name, "gauge": {"dataPoints": found}} for name, found in points.items()]


def _log(entry: Entry, told: Told) -> dict[str, Any]:
    return {
        "timeUnixNano": str(told.time_unix_ns),
        "observedTimeUnixNano": str(time.time_ns()),
        "severityNumber": _SEVERITY_NUMBERS[told.severity],
        "severityText": told.severity,
        "body": {"stringValue": told.text},
        "attributes": _attributes(
            {"bellwether.alert": told.key, "bellwether.step": int(entry.step)}
        ),
    }
