"""on_alert=: a callback for each alert of the run, from the server's event stream.

One daemon thread, started only if a callback was given.  The stream is server-sent events at
/api/v1/events of the server's page; after a break it goes on behind the last event it had, so that
what came meanwhile is heard, too.  Each time certificate, key and token are read anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Optional

from .._util import files, log
from .._util.guard import harmless
from ..settings import Settings
from .page import Hearing, Page, QueryError, is_refusal, tls_context
from .run_state import uuid_of


@dataclasses.dataclass(frozen=True)
class Alert:
    """One change of an alert: it fires, becomes another, or is resolved."""

    run: str
    key: str  # Names the alert in its run.
    k: int  # This is its k-th change, from 0 on.
    state: str  # "firing" or "resolved"
    severity: str  # "info", "warning" or "critical"
    rule: str  # "drift", "ties", "norm", "logits", "loss", "nonfinite", ...
    stage: int  # 0 to 5
    step: int  # When this was concluded.
    first_step: int  # When the alert began.
    layer: Optional[int]  # The strongest; None: the run as a whole.
    head: Optional[int]  # None: the layer as a whole.
    heads: tuple[tuple[Optional[int], Optional[int]], ...]  # (layer, head), the strongest first.
    eta_steps: Optional[float]  # Until the loss is hurt; None: not known.
    evidence: Mapping[str, float]  # By signal, at `step`; NaN: not finite.
    cause: str  # "rounding drift", "logit growth", ..., "unknown"
    summary: str  # One sentence.

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Alert:
        """told  an event of the page (TransitionToJson of server/query/json_api.h).  Raises
        ValueError, TypeError or AttributeError for anything else."""

        def text(name: str) -> str:
            return str(told.get(name, ""))

        def count(name: str) -> int:
            return int(told.get(name, 0))

        def index(value: Any) -> Optional[int]:
            return None if value is None else int(value)

        eta = told.get("eta_steps")
        return cls(
            run=text("run"),
            key=text("key"),
            k=count("k"),
            state=text("state"),
            severity=text("severity"),
            rule=text("rule"),
            stage=count("stage"),
            step=count("step"),
            first_step=count("first_step"),
            layer=index(told.get("layer")),
            head=index(told.get("head")),
            heads=tuple((index(layer), index(head)) for layer, head in told.get("heads", [])),
            eta_steps=None if eta is None else float(eta),
            evidence={
                str(signal): math.nan if value is None else float(value)
                for signal, value in told.get("evidence", {}).items()
            },
            cause=text("cause"),
            summary=text("summary"),
        )


Callback = Callable[[Alert], None]

_FIRST_WAIT_SECONDS = 0.2
_WAIT_SECONDS_MAX = 10.0


class Follower:
    """Reads events until the owner of `page_url` is gone, which is held by a weak reference.

    page_url  a method that gives the address of the run's page, "" while that is not known

    callback  called on the thread of this object
    """

    def __init__(self, settings: Settings, page_url: Callable[[], str], callback: Callback) -> None:
        self._known_page_url = weakref.WeakMethod(page_url)
        self._callback = callback
        self._run = settings.run
        self._uuid = ""  # Stays the same when people rename the run; "" = not known.
        self._settings = settings
        self._last_id: Optional[str] = None  # Of an alert, or where the stream began.
        tls = bool(settings.tls_ca or settings.tls_cert)
        self._hearing = Hearing(f"on_alert=: alerts of run {files.one_line(settings.run)}", tls)
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._follow, name="bellwether-alerts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Does not wait: the thread ends at its next event."""
        self._ended.set()

    def _page_url(self) -> Optional[str]:
        """None once its owner is gone, "" while the page is unknown."""
        known = self._known_page_url()
        if known is None or self._ended.is_set():
            return None
        return known()

    @harmless("on_alert")
    def _follow(self) -> None:
        wait = _FIRST_WAIT_SECONDS
        while not self._ended.wait(wait):
            url = self._page_url()
            if url is None:
                return
            if url:
                try:
                    self._read(url)
                    wait = _FIRST_WAIT_SECONDS
                    continue
                except (OSError, QueryError, ValueError, http.client.HTTPException) as e:
                    log.debug(f"alerts: {e}")
                    said = "refused" if isinstance(e, QueryError) else "no answer"
                    self._hearing.failed(url, f"{said}: {files.one_line(e)}", is_refusal(e))
            wait = min(_WAIT_SECONDS_MAX, 2 * wait)

    def _read(self, url: str) -> None:
        # The page wants the role read of the same certificate or token that frames are sent with.
        told = self._settings
        token = files.read_text(told.token_file).strip() if told.token_file else ""
        page = Page(url, token, tls=tls_context(told.tls_ca, told.tls_cert, told.tls_key))
        if not self._uuid:
            # A server that does not tell it names the run in each event all the same.
            with contextlib.suppress(OSError, QueryError, ValueError):
                self._uuid = uuid_of(page.call("GetRun", run=self._run))
        for event in page.events(self._last_id):
            if self._ended.is_set():
                return
            if event.kind == "refused":
                raise QueryError(401, str(event.data.get("message", "")))
            self._hearing.heard()
            self._last_id = event.id or self._last_id
            if event.kind == "alert":
                self._take(event.data)

    def _take(self, transition: dict[str, Any]) -> None:
        uuid = transition.get("run_uuid")  # An older server does not say it.
        if uuid != self._uuid if uuid and self._uuid else transition.get("run") != self._run:
            return
        try:
            alert = Alert.of(transition)
        except (ValueError, TypeError, AttributeError) as e:
            log.warning(f"an alert that cannot be read: {type(e).__name__}: {e}")
            return
        try:
            self._callback(alert)
        except Exception as e:
            log.warning(f"on_alert raised {type(e).__name__}: {e}")
