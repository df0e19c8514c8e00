"""A run's derived signals, read from a server in the order of its steps, for other loggers.

Of each layer the worst head counts, as in the server's own metrics `bellwether_layer_*`.  What a
logger has taken is remembered in the user's state folder, so that it gets no step twice.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

from .._server.state_file import StateFile
from ..query import Client, QueryError

SERIES_MAX = 64  # GetSeries' own limit.
POINTS_MAX = 1000  # Of a series, in one call.
_VALUES_MAX = 250_000  # In one batch.
_ALERTS_MAX = 1000  # ListAlerts' own limit.
_OVERLOADED = 429  # HTTP: from here on the server says "later", not "no".


class Away(RuntimeError):
    """The server cannot be reached, or is too busy to answer."""


class _Signal(NamedTuple):
    name: str  # As the server's catalogue has it.
    metric: str  # As it is forwarded.
    worst: Callable[[float, float], float]


SIGNALS = (
    _Signal("drift_ratio", "bellwether_layer_drift_ratio_max", max),
    _Signal("key_leak", "bellwether_layer_key_leak_ratio_max", max),
    _Signal("wq_sigma", "bellwether_layer_wq_spectral_norm_max", max),
    _Signal("logit_max", "bellwether_layer_logit_max", max),
    _Signal("entropy_ratio", "bellwether_layer_entropy_ratio_min", min),
    _Signal("tied_fraction_bf16", "bellwether_layer_tied_rows_ratio_max", max),
)
STAGE, ETA = "bellwether_run/stage", "bellwether_run/eta_steps"
FIRING = "bellwether_run/alerts_firing"

Values = dict[str, float]


@dataclass(frozen=True)
class Told:
    """A change of an alert, and the run's state with it."""

    id: int
    step: int
    text: str
    key: str
    state: Values
    severity: str  # info, warning, critical
    time_unix_ns: int


@dataclass
class Entry:
    """What a logger gets of one step."""

    step: int
    values: Values = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """All that is new of the steps up to and with `step`."""

    step: int
    samples: dict[int, Values]
    told: list[Told]  # By their ids.

    def after(self, place: Place) -> list[Entry]:
        """What of it a logger has not had yet, by steps."""
        entries = {at: Entry(at, dict(v)) for at, v in self.samples.items() if at > place.step}
        for told in self.told:
            if told.id > place.transition:
                entry = entries.setdefault(told.step, Entry(told.step))
                entry.values.update(told.state)
                entry.told.append(told)
        return sorted(entries.values(), key=lambda entry: entry.step)


class Place:
    """How far a logger has got with a run, kept in a file."""

    def __init__(self, run_uuid: str, target: str) -> None:
        self._file = StateFile("forwards", run_uuid, target)
        self.step = -1
        self.transition = 0
        self.resume = ""  # By what the logger finds its own run again.
        try:
            told = self._file.read() or {}
            self.step, self.transition = int(told["step"]), int(told["transition"])
            self.resume = str(told["resume"])
        except (ValueError, KeyError, TypeError):
            pass  # Nothing was forwarded yet.

    def forget(self) -> None:
        self.step, self.transition, self.resume = -1, 0, ""

    def advance(self, batch: Batch) -> None:
        self.step = max(self.step, batch.step)
        self.transition = max([self.transition, *(told.id for told in batch.told)])
        self.save()

    def save(self) -> None:
        told = {"step": self.step, "transition": self.transition, "resume": self.resume}
        self._file.write(told)


def worse(signal: _Signal, one: float, other: float) -> float:
    """As the server's metrics have it: a NaN is worse than any number."""
    return math.nan if math.isnan(one) or math.isnan(other) else signal.worst(one, other)


class Reader:
    """What is new of a run.  Raises Away, or QueryError where the server refuses."""

    def __init__(self, client: Client, run: str) -> None:
        self._client = client
        self.uuid = ""  # Of the run that the name meant first; there may be a newer one.
        self._name = run
        self._width = POINTS_MAX  # Steps that are asked for at once.

    def _ask(self, method: str, **request: Any) -> dict[str, Any]:
        try:
            return self._client.call(method, run=self.uuid or self._name, **request)
        except QueryError as e:
            if e.status >= _OVERLOADED:
                raise Away(str(e)) from None
            raise
        except (OSError, ValueError) as e:  # ValueError: half an answer.
            raise Away(str(e)) from None

    def run(self) -> dict[str, Any]:
        run = self._ask("GetRun")
        # protobuf's JSON has bytes in base64.
        self.uuid = self.uuid or base64.b64decode(run["description"]["uuid"]).hex()
        return run

    def batches(self, run: dict[str, Any], step: int, transition: int) -> Iterator[Batch]:
        """What is new behind `step` and behind `transition`, in parts of bounded size.

        `run` is what was told before anything else is asked: all steps up to its own are stored,
        so that no layer is asked before its part of a step is there."""
        told = self._transitions(transition)
        begin, end = step + 1, int(run["step"]) + 1
        asked = self._series(begin, end)
        names = len({(signal, layer) for signal, layer, _ in asked})
        points = min(POINTS_MAX, _VALUES_MAX // max(1, names))
        while begin < end:
            width = min(self._width, end - begin)
            samples = self._window(asked, begin, begin + width, points)
            if samples is None:
                self._width = max(1, width // 2)
                continue
            if len(samples) * 2 < points:
                self._width = 2 * width
            begin += width
            if begin == end:
                samples.setdefault(end - 1, {}).update(_state(run))
            # By their ids, whatever their steps: a logger's place knows the last id alone.
            ready = next((i for i, each in enumerate(told) if each.step >= begin), len(told))
            yield Batch(begin - 1, samples, told[:ready])
            told = told[ready:]
        if told:  # Nothing else is new, or they were concluded while this was asked for.
            yield Batch(end - 1, {}, told)

    def _series(self, begin: int, end: int) -> list[tuple[_Signal, int, int]]:
        """(signal, layer, head) of everything that has something new."""
        found = []
        for signal in SIGNALS if begin < end else ():
            newest = self._ask("GetMatrix", signal=signal.name, step=-1)
            if newest["step"] < begin:
                continue
            for layer in range(newest["layers"]):  # Servers take 512 at most.
                found += [(signal, layer, head) for head in range(newest["heads"])]
        return found

    def _window(
        self, asked: list[tuple[_Signal, int, int]], begin: int, end: int, points: int
    ) -> Optional[dict[int, Values]]:
        """The worst heads of these steps; None: too many of them for one call."""
        samples: dict[int, Values] = {}
        for first in range(0, len(asked), SERIES_MAX):
            part = asked[first : first + SERIES_MAX]
            series = [{"signal": s.name, "layer": layer, "head": head} for s, layer, head in part]
            told = self._ask(
                "GetSeries", series=series,
                step_begin=begin, step_end=end, points_max=points, attempt=-1,
            )["series"]  # fmt: skip
            if any(each["downsampled"] for each in told):
                return None
            for (signal, layer, _), each in zip(part, told):
                name = f"{signal.metric}/layer_{layer:03d}"
                for at, value in zip(each["step"], each["max"]):
                    values = samples.setdefault(at, {})
                    values[name] = worse(signal, values.get(name, value), value)
        return samples

    def _transitions(self, after: int) -> list[Told]:
        """Of all alerts, by their ids.  Those that happen meanwhile come the next time."""
        alerts = self._ask("ListAlerts", limit=_ALERTS_MAX)["alerts"]
        newest = max((alert["last"]["id"] for alert in alerts), default=0)
        every: list[dict[str, Any]] = []
        for alert in alerts:
            if alert["last"]["id"] <= after:
                every.append(alert["last"])
                continue
            history = self._ask("GetAlert", key=alert["last"]["key"])["alert"]["history"]
            every += [each for each in history if each["id"] <= newest]
        found = []
        firing: dict[str, int] = {}  # Stage by the alert's key.
        for each in sorted(every, key=lambda each: int(each["id"])):
            firing.pop(each["key"], None)
            if each["state"] == "ALERT_STATE_FIRING":
                firing[each["key"]] = each["stage"]
            if each["id"] <= after:
                continue
            state = {STAGE: float(max(firing.values(), default=0)), FIRING: float(len(firing))}
            if each["eta"]["known"]:
                state[ETA] = each["eta"]["steps"]
            severity, at = _word(each["severity"]), int(each["time_unix_ns"])
            words = f"{severity}, {_word(each['state'])}: {each['summary']}"
            found.append(Told(each["id"], each["step"], words, each["key"], state, severity, at))
        return found


def _word(constant: str) -> str:
    """ALERT_STATE_FIRING -> firing"""
    return constant.rpartition("_")[2].lower()


def _state(run: dict[str, Any]) -> Values:
    state = {STAGE: float(run["stage"]), FIRING: float(run["alerts_firing"])}
    if run["eta"]["known"]:
        state[ETA] = run["eta"]["steps"]
    return state
