"""The lines that a training script's terminal has of its run.

An illness has a line where it becomes a warning and one at each rise, each with what to do first.
So has a loss that is lost, an advice that becomes to stop, and the end of the run.

A daemon thread asks the server now and then, and the training is never waited for.  At the end it
asks once more, for half a second at most.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

from .._util import files, log
from .._util.ending import Ending
from .._util.guard import harmless, in_words
from ..settings import Settings
from .page import DEFAULT_PAGE, Hearing, Page, QueryError, is_refusal, tls_context
from .private_server import IDLE_EXIT
from .run_state import SEVERITIES, WARNING, RunState, severity_of, short, without_run, word

LINES_MAX = 20  # About alerts, of a run.
LOST_STAGE = 5  # The loss has left its course.
LAST_SECONDS = 0.5  # That the end waits for, at most.
_WAIT_SECONDS = 1.0  # Until the server is asked first; each time longer, ...
_WAIT_SECONDS_MAX = 20.0  # ... to this.
_REFUSED_SECONDS = 60.0  # Behind a refusal: a certificate or a token may be renewed meanwhile.
_AGAIN_SECONDS = 0.05  # At the end, until what was sent last is judged.
_ANSWER_SECONDS = 5.0


class Judged(NamedTuple):
    step: int  # Up to this one.
    verdict: str


class Terminal:
    """page_url  a method that gives the address of the run's page, "" while that is not known

    server  that the run is sent to; None: there is none to ask
    """

    def __init__(
        self, settings: Settings, page_url: Callable[[], str], server: Optional[str]
    ) -> None:
        self._settings = settings
        self._known_page_url = weakref.WeakMethod(page_url)
        self._url = ""
        self._page: Optional[Page] = None
        self._told: dict[str, int] = {}  # By the alert's key, the severity that was told.
        self._told_lost: set[str] = set()  # Keys of alerts that were told as is_lost().
        self._lines = 0
        self._why = ""  # The newest answer was none.
        self._refused = False  # It said that we may not ask.
        tls = bool(settings.tls_ca or settings.tls_cert)
        self._hearing = Hearing(f"alerts of run {files.one_line(settings.run)}", tls)
        self._uuid = ""
        self._judged: Optional[Judged] = None  # The newest.
        self._last_step = -1
        self._bytes: Optional[int] = None
        self._data: Optional[Path] = None
        self._ending, self._done = threading.Event(), threading.Event()
        self._pid = os.getpid()
        if server is None:
            self._done.set()
            return
        thread = threading.Thread(target=self._watch, name="bellwether-terminal", daemon=True)
        thread.start()

    # ---- on the thread ----

    @harmless("the lines on the terminal")
    def _watch(self) -> None:
        try:
            wait = _WAIT_SECONDS
            while not self._ending.wait(wait):
                wait = min(_WAIT_SECONDS_MAX, 1.5 * wait)
                if self._known_page_url() is None or not self._look():
                    return
                if self._refused:
                    wait = _REFUSED_SECONDS
            self._bytes = None if self._data is None else files.folder_bytes(self._data)
            deadline = time.monotonic() + LAST_SECONDS
            while self._look() and not self._refused and time.monotonic() < deadline:
                if self._judged is None or self._judged.step >= self._last_step:
                    return
                time.sleep(_AGAIN_SECONDS)
        finally:
            self._done.set()

    def _look(self) -> bool:
        """False: it is of no use to ask again."""
        try:
            if self._page is None:
                url = self._known_page_url()
                self._url = "" if url is None else url()
                if not self._url:
                    return not self._ending.is_set()
                self._page = self._open(self._url)
            # By its uuid once that is known: people may rename it.
            state = RunState.ask(self._page, self._uuid or self._settings.run)
            self._uuid = state.uuid
            self._tell(state)
            self._judged = Judged(state.step, state.verdict())
            self._why, self._refused = "", False
            self._hearing.heard()
        except Exception as e:  # It refuses, is away, or answers as no server of ours.
            log.debug(f"terminal: {in_words(e)}")
            self._refused = is_refusal(e)
            if isinstance(e, QueryError):
                self._why = f"the server refused: {files.one_line(e)}"
            else:
                why = f": {files.one_line(e)}" if isinstance(e, OSError) else " that can be read"
                self._why = f"the server gave no answer{why}"
            # A run is known from its first step on, which may take minutes.
            unknown = isinstance(e, QueryError) and e.status == 404
            if not unknown and not self._ending.is_set():
                since = "" if self._judged is None else f" since step {self._judged.step}"
                self._hearing.failed(self._url, self._why, self._refused, since)
            if self._refused or not isinstance(e, QueryError):
                self._page = None  # What is shown is read anew.
                return self._refused or not self._ending.is_set()
        return True

    def _open(self, url: str) -> Page:
        of = self._settings
        token = files.read_text(of.token_file).strip() if of.token_file else ""
        tls = tls_context(of.tls_ca, of.tls_cert, of.tls_key)
        try:
            return Page(url, token, _ANSWER_SECONDS, tls)
        except ValueError as e:  # No address that may be asked.
            raise OSError(str(e)) from None

    def _tell(self, state: RunState) -> None:
        for alert in state.heard():
            last = alert["last"]
            key, severity = str(last["key"]), severity_of(last)
            told = self._told.get(key, 0)
            turns = is_lost(last) and key not in self._told_lost
            if word(last["state"]) != "firing" or severity < WARNING:
                continue
            if severity <= told and not turns:
                continue
            self._told[key] = max(severity, told)
            if turns:
                self._told_lost.add(key)
            self._lines += 1
            if self._lines <= LINES_MAX:
                log.warning(alert_line(last, rose=0 < told < severity, page=self._page_of_others()))
            elif self._lines == LINES_MAX + 1:
                log.warning(f"more alerts than {LINES_MAX}: the others are on the page only")

    def _page_of_others(self) -> str:
        """The page's address if a command does not find it by itself."""
        if not self._settings.server or self._page is None or self._page.base == DEFAULT_PAGE:
            return ""
        return self._page.base

    # ---- on the trainer's thread ----

    @harmless("the end of the lines on the terminal")
    def end(self, ending: Ending) -> None:
        """The last lines; waits for LAST_SECONDS at most."""
        if os.getpid() != self._pid or ending.step < 0:
            self._ending.set()
            return
        self._last_step, self._data = ending.step, ending.data
        self._ending.set()
        self._done.wait(LAST_SECONDS)
        of = self._judged
        ill = bool(self._told or ending.why_off or ending.unsent)
        (log.warning if ill else log.info)(goodbye(self._settings.run, ending, of, self._why))
        where = where_lines(self._settings.run, ending, self._url if of is not None else "")
        if self._bytes is not None and ending.data is not None:
            where.append(f"the data of all your runs, {size(self._bytes)}: {ending.data}")
        for line in where:
            log.info(line)


def is_lost(last: dict[str, Any]) -> bool:
    """The loss has left its course, or the advice is to stop."""
    return int(last.get("stage", 0)) >= LOST_STAGE or str(last.get("advice", "")).startswith("Stop")


def alert_line(last: dict[str, Any], rose: bool, page: str = "") -> str:
    """One change of an alert, in its sentence, for a reader of nothing but this line."""
    severity = SEVERITIES[severity_of(last)].upper()
    cause = files.one_line(last.get("cause", ""))
    named = f" Cause: {cause}." if cause and cause != "unknown" else ""
    run = files.one_line(last.get("run", ""))
    at = f" --page {page}" if page else ""
    # A server of before says its advice only.
    first = files.one_line(last.get("do_first") or last.get("advice", "").partition(". ")[0])
    do = f" Do: {short(first).rstrip('.')}." if first else ""
    sentence = short(without_run(last)).rstrip(".")
    return (
        f"{'NOW ' if rose else ''}{severity} {run}: {sentence}.{named}{do}"
        f" More: python -m bellwether explain {run}{at}"
    )


def goodbye(run: str, ending: Ending, judged: Optional[Judged], why: str = "") -> str:
    """How the run ended, as far as it is known.

    why  the newest answer was none: nothing is known of what was judged since
    """
    parts = [f"run {run} has ended at step {ending.step}"]
    if ending.why_off:
        parts.append("watching went off before, for the reason told then")
    if ending.unsent:
        done = "sent" if ending.record_path is None else "recorded"
        what = "nothing more" if ending.sent_some else "nothing"
        parts.append(f"{what} was {done}: {files.one_line(ending.unsent)}")
    if judged is not None:
        behind = judged.step < ending.step
        if behind and why:
            parts.append(f"what was judged after step {judged.step} is not known here: {why}")
        parts.append(f"{judged.verdict}{f' (judged up to step {judged.step})' if behind else ''}")
    elif ending.record_path is None and not ending.unsent:
        why = why or "the server gave no answer"
        parts.append(f"what was judged of it is not known here: {why}")
    if ending.cost:
        parts.append(ending.cost)
    return "; ".join(parts)


def where_lines(run: str, ending: Ending, url: str) -> list[str]:
    """Where it is to be seen.  An address stands alone on its line."""
    if ending.unsent and not ending.sent_some:
        return []
    if ending.record_path is not None and not url:
        return [f"it is recorded; judge it with: bellwether replay {ending.record_path}"]
    if ending.data is not None:
        minutes = int(IDLE_EXIT.removesuffix("s")) // 60
        later = f"python -m bellwether open {run}"
        if not url:
            return [f"its page: {later}"]
        return [f"its page, for {minutes} minutes; later by {later}:\n{url}"]
    return [f"its page:\n{url}"] if url else []


def size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**9 else f"{count / 1e6:.0f} MB"
