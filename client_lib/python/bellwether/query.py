"""bellwether.Client: asks a server from Python, with nothing but the standard library.

    client = bellwether.Client("http://127.0.0.1:7071")
    for run in client.runs():
        print(run["description"]["name"], run["stage"])
    drift = client.series("llama", "drift_ratio", layer=3, head=5)
    plt.plot(drift.step, drift.max)
    for alert in client.watch("llama"):
        ...

Answers are the messages of query.proto and alerts.proto as dictionaries, their integers as int
and their numbers as float; series and matrices are array.array, which NumPy, pandas and
Matplotlib take without a copy.
"""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import time
import urllib.error
import urllib.parse
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

from ._server import private_server
from ._server.page import DEFAULT_PAGE, Page, QueryError, tls_context
from ._util import files
from .actions import JSON_KINDS

__all__ = ["Client", "Matrix", "QueryError", "Series"]

_FIRST_WAIT_SECONDS = 0.2
_WAIT_SECONDS_MAX = 10.0
_KINDS = {name: of_proto for of_proto, name in JSON_KINDS.items()}
_LIMIT = 1000  # The servers' own, for lists.
# The fields that hold 64-bit integers or floating-point numbers, which protobuf's JSON has as
# strings (the latter when they are not finite).  A test compares them with the .proto files.
_NUMBERS = frozenset({
    "after", "after_id", "apply_at_step", "band", "caught_up_id", "counters", "dropped_ring_total",
    "dropped_total", "dropped_window_total", "durable_seq", "epoch", "events",
    "expires_unix_ns", "first_step", "first_time_unix_ns", "first_unacked_seq", "frames",
    "frames_dropped", "frames_stripped", "high", "last_report_unix_ns", "last_seq",
    "launch_unix_ms", "learned_unix_ns", "limits", "loss", "low", "lower_steps", "max", "mean",
    "median", "min", "next_after", "p01", "p50", "p99", "peer_score", "ratio", "resync_from",
    "scale", "seq", "session_epoch", "silenced_until_unix_ns", "softcap", "started_unix_ns", "step",
    "step_begin", "step_end", "step_seconds", "steps", "steps_recorded",
    "stripped_total", "threshold", "time_unix_ns", "total", "upper", "upper_steps", "value",
    "values", "weight_decay", "window_bytes",
})  # fmt: skip
# Numbers in the messages that have the other field too, words elsewhere.
_NUMBERS_BESIDE = {"id": "k", "baseline": "detector"}


@dataclass(frozen=True)
class Series:
    """One signal of one head, or of a tensor, over the steps.  Point i covers steps from step[i]
    to step[i + 1]; min = mean = max where nothing was thinned.  NaN: every value there was NaN."""

    signal: str
    layer: int
    head: int
    step: array[int]
    min: array[float]
    mean: array[float]
    max: array[float]
    downsampled: bool
    name: str = ""  # Of a tensor or module; its row is `layer`.

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Matrix:
    """One signal of all heads, or of all tensors, at one step; NaN: not measured, or NaN."""

    signal: str
    step: int
    layers: int
    heads: int
    values: array[float]  # [layers][heads]
    names: list[str] = field(default_factory=list)  # Of tensors or modules, [layers].

    def __getitem__(self, at: tuple[int, int]) -> float:
        layer, head = at
        if not (0 <= layer < self.layers and 0 <= head < self.heads):
            raise IndexError(f"[{layer}, {head}] of {self.layers} layers and {self.heads} heads")
        return self.values[layer * self.heads + head]


def _number(value: Any) -> Any:
    if isinstance(value, list):  # A list of messages may have the name of a number elsewhere.
        return [_plain(v) if isinstance(v, dict) else _number(v) for v in value]
    if isinstance(value, dict):
        return {k: _number(v) for k, v in value.items()}
    if not isinstance(value, str):
        return value
    return int(value) if value.removeprefix("-").isdecimal() else float(value)


def _plain(message: Any) -> Any:
    """A message of protobuf's JSON with its numbers as such."""
    if isinstance(message, list):
        return [_plain(each) for each in message]
    if not isinstance(message, dict):
        return message
    return {
        key: _number(value)
        if key in _NUMBERS or _NUMBERS_BESIDE.get(key) in message
        else _plain(value)
        for key, value in message.items()
    }


class Client:
    """A server's answers.  `page` is the address of its page, with or without `?token=`.

    For https `tls_ca` has the authorities of the server's certificate.  `tls_cert` and `tls_key`
    are this caller's, where there is no token.  What is not given comes from BELLWETHER_TOKEN_FILE,
    BELLWETHER_TLS_CA, BELLWETHER_TLS_CERT and BELLWETHER_TLS_KEY.

    Raises QueryError when the server refuses, OSError when it cannot be reached; ValueError for a
    token that would cross a network in the clear.  Thread-safe.
    """

    def __init__(
        self,
        page: str = DEFAULT_PAGE,
        *,
        token: str = "",
        token_file: Union[str, Path, None] = None,
        tls_ca: Union[str, Path, None] = None,
        tls_cert: Union[str, Path, None] = None,
        tls_key: Union[str, Path, None] = None,
        timeout: float = 30.0,
    ) -> None:
        told = os.environ.get
        token_file = token_file or (None if token else told("BELLWETHER_TOKEN_FILE"))
        if token_file:
            token = files.read_text(token_file).strip()
        tls = tls_context(
            tls_ca or told("BELLWETHER_TLS_CA"),
            tls_cert or told("BELLWETHER_TLS_CERT"),
            tls_key or told("BELLWETHER_TLS_KEY"),
        )
        self._page = Page(page, token, timeout, tls)

    def call(self, method: str, **request: Any) -> dict[str, Any]:
        """Any call of service Query by its name: what has no method of its own here."""
        return dict(_plain(self._page.call(method, **request)))

    def _signed(self, method: str, by: Optional[str], **request: Any) -> dict[str, Any]:
        return self.call(method, by=_user_name() if by is None else by, **request)

    # ---- runs ----

    def runs(self) -> list[dict[str, Any]]:
        """Every run, the newest 1,000."""
        return list(self.call("ListRuns", limit=_LIMIT)["runs"])

    def run(self, run: str) -> dict[str, Any]:
        """A run by its name (the newest of that name) or uuid."""
        return self.call("GetRun", run=run)

    def rename_run(self, run: str, name: str) -> dict[str, Any]:
        """Gives a run another name, which it keeps when its job is resumed."""
        return self.call("RenameRun", run=run, name=name)

    def delete_run(self, run: str) -> dict[str, Any]:
        """Deletes a run that has ended, with all that is kept of it."""
        return self.call("DeleteRun", run=run)

    def series(
        self, run: str, signal: str, layer: int = 0, head: int = 0, *,
        name: str = "", begin: int = 0, end: Optional[int] = None, points: int = 1000,
        attempt: int = -1,
    ) -> Series:  # fmt: skip
        """Steps begin..end of a signal of a head, or of the tensor or module of this name.

        They are thinned to at most `points` (1 to 10,000) by buckets that keep the extremes.
        attempt -1: of each step the newest attempt that wrote it."""
        of: dict[str, Any] = {"signal": signal, "layer": layer, "head": head}
        if name:
            of["name"] = name
        request: dict[str, Any] = {"step_begin": begin, "points_max": points, "attempt": attempt}
        if end is not None:
            request["step_end"] = end
        found = self.call("GetSeries", run=run, series=[of], **request)["series"][0]
        least, mean, most = (array("f", map(float, found[key])) for key in ("min", "mean", "max"))
        steps = array("q", found["step"])
        of_row = found["id"]
        return Series(
            signal, int(of_row["layer"]), head, steps, least, mean, most,
            bool(found["downsampled"]), str(of_row.get("name", "")),
        )  # fmt: skip

    def matrix(self, run: str, signal: str, step: int = -1) -> Matrix:
        """A signal of all heads, of the last sample at or before `step`; -1: the newest."""
        found = self.call("GetMatrix", run=run, signal=signal, step=step)
        values = array("f", map(float, found["values"]))
        names = [str(name) for name in found.get("names", [])]
        return Matrix(signal, found["step"], found["layers"], found["heads"], values, names)

    def top_heads(self, run: str, signal: str = "", limit: int = 10) -> list[dict[str, Any]]:
        """The heads with the worst values, worst first; by drift if `signal` is empty."""
        return list(self.call("TopHeads", run=run, signal=signal, limit=limit, step=-1)["heads"])

    # ---- alerts ----

    def alerts(self, run: str = "", *, firing_only: bool = False) -> list[dict[str, Any]]:
        """Alerts with their newest transition (`last`), firing first; unnamed: of all runs."""
        request = {"firing_only": firing_only, "limit": _LIMIT}
        return list(self.call("ListAlerts", run=run, **request)["alerts"])

    def alert(self, run: str, key: str) -> dict[str, Any]:
        """One alert with its history."""
        return self.call("GetAlert", run=run, key=key)

    # `by` is the name that stands beside what is done, here and with actions; None: $USER, else
    # the login.  A server with identities takes the caller's instead.

    def acknowledge(
        self, run: str, key: str, by: Optional[str] = None, comment: str = ""
    ) -> dict[str, Any]:
        """Somebody looks after it."""
        return self._signed("AcknowledgeAlert", by, run=run, key=key, comment=comment)

    def silence(
        self, run: str, key: str, seconds: int, by: Optional[str] = None, comment: str = ""
    ) -> dict[str, Any]:
        """Sends no notifications of this alert for so long, 1 second to 30 days."""
        request = {"seconds": seconds, "comment": comment}
        return self._signed("SilenceAlert", by, run=run, key=key, **request)

    def mark_false_alarm(
        self, run: str, key: str, by: Optional[str] = None, reason: str = ""
    ) -> dict[str, Any]:
        """Mutes the alert's illness, the same cause at the same place, in this run.  If it becomes
        worse than it is now, people are notified again.  The reason must be said."""
        return self._signed("MarkFalseAlarm", by, run=run, key=key, reason=reason)

    def undo_false_alarm(
        self, run: str, key: str, by: Optional[str] = None, reason: str = ""
    ) -> dict[str, Any]:
        return self._signed("MarkFalseAlarm", by, run=run, key=key, reason=reason, undo=True)

    def watch(self, run: str = "", *, after: Optional[int] = None) -> Iterator[dict[str, Any]]:
        """Each transition of an alert as it happens, for ever; over a lost connection and a
        restarted server it goes on behind the last one, so none is missed and none comes twice.
        `after`: first those with a larger id (0: all that are stored)."""
        last = None if after is None else str(after)
        wait = 0.0
        while True:
            time.sleep(wait)
            wait = min(_WAIT_SECONDS_MAX, 2 * wait or _FIRST_WAIT_SECONDS)
            try:
                for event in self._page.events(last):
                    wait = _FIRST_WAIT_SECONDS
                    if event.kind != "alert":
                        continue
                    last = event.id
                    if not run or event.data["run"] == run:
                        yield {"id": int(event.id), **event.data}
            except (OSError, ValueError):
                continue  # Away; it comes back or the caller stops.

    # ---- actions ----

    def actions(self, run: str) -> list[dict[str, Any]]:
        return list(self.call("ListActions", run=run)["actions"])

    def propose(
        self, run: str, kind: str, by: Optional[str] = None, *, layers: Sequence[int] = (),
        heads: Sequence[tuple[int, int]] = (), **parameters: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Proposes an action, of all heads unless layers or (layer, head) pairs are named.
        `kind` as in attach(allow=), its parameters (mode=, value=): docs/concepts/actions.md."""
        if kind not in _KINDS:
            raise ValueError(f"kind is {kind!r}: must be one of {', '.join(sorted(_KINDS))}")
        scope = {"layers": list(layers), "heads": [{"layer": a, "head": b} for a, b in heads]}
        if kind == "attention.center_k":
            parameters = {"value": 1.0, **parameters}  # On, but where it is said.
        action = {"kind": _KINDS[kind], "scope": scope, **parameters}
        return self._signed("ProposeAction", by, run=run, action=action)

    def approve(
        self, run: str, id: str, by: Optional[str] = None, reason: str = ""
    ) -> dict[str, Any]:
        return self._signed("ApproveAction", by, run=run, id=id, reason=reason)

    def reject(
        self, run: str, id: str, by: Optional[str] = None, reason: str = ""
    ) -> dict[str, Any]:
        return self._signed("RejectAction", by, run=run, id=id, reason=reason)

    def undo(self, run: str, id: str, by: Optional[str] = None, reason: str = "") -> dict[str, Any]:
        return self._signed("UndoAction", by, run=run, id=id, reason=reason)

    def info(self) -> dict[str, Any]:
        """The server: version, options, limits, counters."""
        return self.call("GetServerInfo")


def _user_name() -> str:
    """As the command names you: $USER, else the login; "" where neither is known."""
    try:
        return os.environ.get("USER") or getpass.getuser()
    except (ImportError, KeyError, OSError):  # Of a user id without a name, as in containers.
        return ""


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags for the server's address and for the caller's identity."""
    add = parser.add_argument
    add(
        "--page", metavar="URL",
        help="the address of the server's page, with or without ?token= [$BELLWETHER_PAGE]; "
        f"default: beside $BELLWETHER_SERVER, else {DEFAULT_PAGE}, else your own private server",
    )  # fmt: skip
    add("--token-file", type=Path, metavar="FILE", help="holds your token [$BELLWETHER_TOKEN_FILE]")
    add("--tls-ca", type=Path, metavar="FILE", help="for https: the authority [$BELLWETHER_TLS_CA]")
    add("--tls-cert", type=Path, metavar="FILE", help="your certificate [$BELLWETHER_TLS_CERT]")
    add("--tls-key", type=Path, metavar="FILE", help="its key [$BELLWETHER_TLS_KEY]")


def _listens(page: str) -> bool:
    parts = urllib.parse.urlsplit(page)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=1.0).close()
    except OSError:
        return False
    return True


def _usual_page(server: str, with_tls: bool) -> str:
    """The page stands beside gRPC, one port above it, or at its usual port."""
    host, _, port = server.removeprefix("dns:///").rpartition(":")
    usual = int(DEFAULT_PAGE.rpartition(":")[2])
    ports = [int(port) + 1] if port.isdecimal() else []
    scheme = "https" if with_tls else "http"
    pages = [f"{scheme}://{host}:{each}" for each in (*ports, usual)]
    return next((page for page in pages if _listens(page)), pages[-1])


def page_of(given: argparse.Namespace) -> str:
    """The page that is asked: as told, else that of BELLWETHER_SERVER by its usual port, else one
    at the usual place, else the private server's."""
    page = given.page or os.environ.get("BELLWETHER_PAGE")
    server = os.environ.get("BELLWETHER_SERVER", "")
    if not page and ":" in server and not server.startswith("unix:"):
        with_tls = bool(given.tls_ca or os.environ.get("BELLWETHER_TLS_CA"))
        page = _usual_page(server, with_tls)
    if page or _listens(DEFAULT_PAGE):
        return page or DEFAULT_PAGE
    private = private_server.running()
    return DEFAULT_PAGE if private is None else private.page_url("").partition("#")[0]


def unreachable(page: str, error: OSError) -> str:
    """What to do about it, too."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return (
        f"{page}: no answer ({files.one_line(reason)}); --page or BELLWETHER_PAGE names a server, "
        "`bellwether open` shows what your private server had"
    )


def client_of(given: argparse.Namespace) -> Client:
    """A client by these flags; `given.page` is then what is asked.  Raises as Client."""
    given.page = page_of(given)
    return Client(
        given.page, token_file=given.token_file,
        tls_ca=given.tls_ca, tls_cert=given.tls_cert, tls_key=given.tls_key,
    )  # fmt: skip
