"""What a server has concluded of a run so far, in the words for a terminal."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .._util import files
from .page import Page

ALERTS_MAX = 1000  # ListAlerts' own limit.
SEVERITIES = ("unspecified", "info", "warning", "critical")
WARNING = SEVERITIES.index("warning")
_SUMMARY_MAX = 260


def word(constant: str) -> str:
    """ALERT_STATE_FIRING -> firing"""
    return constant.rpartition("_")[2].lower()


def severity_of(transition: Mapping[str, Any]) -> int:
    """A place in SEVERITIES."""
    name = word(str(transition.get("severity", "")))
    return SEVERITIES.index(name) if name in SEVERITIES else 0


def without_run(transition: Mapping[str, Any]) -> str:
    """The summary of an alert without the run's name, which the reader knows."""
    text = files.one_line(transition.get("summary", ""))
    return text.removeprefix(f"{transition.get('run', '')}: ")


def short(text: str) -> str:
    return text if len(text) <= _SUMMARY_MAX else f"{text[: _SUMMARY_MAX - 3]}..."


def uuid_of(run: Mapping[str, Any]) -> str:
    """Of an answer of GetRun: 32 hexadecimal digits; "" if the server tells none."""
    told: Mapping[str, Any] = run.get("description") or {}
    return base64.b64decode(str(told.get("uuid", ""))).hex()


@dataclass(frozen=True)
class RunState:
    """Answers of GetRun and ListAlerts, as protobuf's JSON has them."""

    run: Mapping[str, Any]
    alerts: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def ask(cls, page: Page, run: str) -> RunState:
        """Raises OSError, QueryError, ValueError."""
        told = page.call("GetRun", run=run)
        alerts = page.call("ListAlerts", run=run, severity_min="SEVERITY_WARNING", limit=ALERTS_MAX)
        return cls(told, list(alerts["alerts"]))

    @property
    def step(self) -> int:
        return int(self.run.get("step", -1))

    @property
    def uuid(self) -> str:
        return uuid_of(self.run)

    @property
    def judged(self) -> str:
        """What may be said of a run without alerts: "healthy", or "nothing found in 5 steps", or by
        what it is judged."""
        return files.one_line(self._told.get("text", "")) or "not judged"

    @property
    def _told(self) -> Mapping[str, Any]:
        return self.run.get("judged") or {}

    def heard(self) -> list[Mapping[str, Any]]:
        """The alerts that people have neither silenced nor called false."""
        now_ns = time.time_ns()
        return [
            alert
            for alert in self.alerts
            if not alert.get("muted") and int(alert.get("silenced_until_unix_ns", 0)) < now_ns
        ]

    def verdict(self) -> str:
        """How the run is, in one sentence."""
        lasts = [alert["last"] for alert in self.alerts if not alert.get("muted")]
        if not lasts:
            part = "" if self._told.get("whole") else "no alert, but it is not wholly judged: "
            return f"{part}{self.judged}"
        firing = [last for last in lasts if word(last["state"]) == "firing"]
        worst = max(firing or lasts, key=severity_of)
        named = f"{SEVERITIES[severity_of(worst)]}: {short(without_run(worst)).rstrip('.')}"
        if len(lasts) == 1:
            return f"1 alert, {'still firing' if firing else 'over'}: {named}"
        return f"{len(lasts)} alerts, {len(firing) or 'none'} still firing; the worst {named}"
