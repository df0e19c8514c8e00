"""python -m bellwether plot RUN... -o FILE: runs over their steps as a picture, by Matplotlib."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

from .._server.run_state import severity_of
from .._util import files
from ..actions import JSON_KINDS
from ..query import Client, QueryError, Series, add_client_arguments, client_of, unreachable

OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 4
# From cause to effect.
STORY = ["drift_ratio", "key_leak", "tied_fraction_bf16", "delta_bias_t", "wq_sigma", "logit_max"]
STORY += ["loss"]
# As the page calls them, and what a value is.  A test compares the names.
LABELS = {
    "drift_ratio": ("Drift ratio", "times the spread"),
    "key_leak": ("Key-gradient leak", "share of the gradient"),
    "tied_fraction_bf16": ("Tied rows", "share of rows"),
    "delta_bias_t": ("Delta bias t", "standard errors"),
    "wq_sigma": ("\N{GREEK SMALL LETTER SIGMA}(W_Q)", "largest singular value"),
    "logit_max": ("Largest logit", "score before softmax"),
    "entropy_ratio": ("Entropy ratio", "1 is uniform"),
    "loss": ("Loss", ""),
    "grad_norm": ("Gradient norm", ""),
}
POINTS, POINTS_MAX = 300, 1000  # Of a line.
LIMIT_REACH = 10.0  # A limit so many times beyond all values would flatten them, and is left out.
RUNS_MAX, RANKED, ALERTS_MAX, ACTIONS_MAX, EVENTS_MAX = 8, 64, 5, 4, 4
LOG_RATIO = 20.0  # Beyond this ratio of the extremes a panel is logarithmic.
AHEAD = 0.5  # How far ahead of a run the axis goes for what is expected, in its length.
# Okabe and Ito: told apart by the colour-blind too.
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"]
EXPECTED = "expected divergence"
WIDTH, HEIGHT = 12, 9  # Inches, of 100 pixels.
DATED: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None},
    ".png": {},
    ".pdf": {"CreationDate": None},
}  # By format.
STYLE: Any = {
    "svg.fonttype": "none",  # Words stay words, whatever runs and notes are called.
    "text.parse_math": False,
    "svg.hashsalt": "bellwether",  # The same values give the same file.
    "path.simplify": False,
}
_EPILOG = """\
examples:
  python -m bellwether plot my-run -o my-run.svg
  python -m bellwether plot my-run -o loss.png --signal loss --from 1000 --to 5000
  python -m bellwether plot my-run twin -o both.pdf --signal drift_ratio --head 3/5 --head 3/6

exit codes:
  0    the picture is written, whole
  1    the server refuses, Matplotlib is missing or the file cannot be written; no file is left
  2    wrong usage
  4    the server could not be reached

One panel a signal, one line a head: those of the alerts first, those that fire before others, then
the worst.  A line is the mean, with a shade from the least to the greatest value where steps were
merged.  A gap is what was not finite; a mark shows the first one.  A dotted line is the limit that
the worst alert had.  Above the panels stand alerts, actions and notes.
Matplotlib comes by: pip install 'bellwether[plot]'
"""


def _head(text: str) -> tuple[int, int]:
    if found := re.fullmatch(r"(\d{1,4})/(\d{1,4})", text):
        return int(found[1]), int(found[2])
    raise argparse.ArgumentTypeError(f"{text!r} must be LAYER/HEAD, such as 3/5")


def _output(text: str) -> Path:
    if Path(text).suffix in DATED:
        return Path(text)
    raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(DATED)}")


def _parse(arguments: Optional[list[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bellwether plot",
        description="Draws signals of runs over their steps: of the heads of their alerts, from "
        "the drift to the loss, if nothing else is asked for; with limits, actions and notes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, heads = parser.add_argument, parser.add_mutually_exclusive_group()
    what = f"name (the newest of that name) or uuid; up to {RUNS_MAX} in one picture"
    add("run", metavar="RUN", nargs="+", help=what)
    what = "the picture: .svg, .png or .pdf"
    add("-o", "--output", type=_output, required=True, metavar="FILE", help=what)
    what = f"a panel of this signal; may be repeated ({', '.join(STORY)})"
    add("--signal", action="append", metavar="SIGNAL", help=what)
    what = "a head to draw; may be repeated (the worst)"
    heads.add_argument("--head", action="append", type=_head, metavar="LAYER/HEAD", help=what)
    what = "so many heads of each run, of its alerts and then the worst, 1 to 8 (4)"
    heads.add_argument("--heads", type=int, default=4, metavar="COUNT", help=what)
    add("--from", dest="begin", type=int, default=0, metavar="STEP", help="the first step (0)")
    what = "the step after the last (the run's end, and what is expected)"
    add("--to", dest="end", type=int, metavar="STEP", help=what)
    what = f"points of a line at most, 10 to {POINTS_MAX} ({POINTS}); steps are merged to that"
    add("--points", type=int, default=POINTS, metavar="COUNT", help=what)
    add_client_arguments(parser)
    given = parser.parse_args(arguments)
    if not 1 <= given.heads <= 8:
        parser.error(f"--heads: {given.heads} is outside of 1 to 8")
    if not 10 <= given.points <= POINTS_MAX:
        parser.error(f"--points: {given.points} is outside of 10 to {POINTS_MAX}")
    if given.begin < 0 or given.begin >= (math.inf if given.end is None else given.end):
        parser.error(f"--from: {given.begin} must be at least 0 and below --to, {given.end}")
    if len(given.run) > RUNS_MAX or len(set(given.run)) < len(given.run):
        parser.error(f"RUN: {len(given.run)} are given: must be 1 to {RUNS_MAX}, each once")
    return given


class Span(NamedTuple):
    """Something that lasted from one step to another; a moment if they are equal."""

    begin: int
    end: int
    text: str
    colour: str
    shade: bool  # Also behind the panels.


def _place(layer: int, head: int) -> str:
    return "" if layer < 0 else f"L{layer}" if head < 0 else f"L{layer} H{head}"


def _worst_first(alert: dict[str, Any]) -> tuple[bool, bool, int]:
    """Those that fire, are no false alarm and are severe come first."""
    last = alert["last"]
    over = last["state"] != "ALERT_STATE_FIRING"
    return over, bool(alert.get("muted")), -severity_of(last)


class _Run:
    def __init__(self, client: Client, given: argparse.Namespace, name: str) -> None:
        self.name, self._client, self._given = name, client, given
        self.told = client.run(name)
        self.step, self.eta = self.told["step"], self.told.get("eta", {})
        self._alerts = sorted(client.alerts(name), key=_worst_first)
        ranked = [] if given.head else client.top_heads(name, limit=RANKED)
        ranked.sort(key=lambda head: -int(head["stage"]))  # Stable: by drift within a stage.
        ill = [(at["layer"], at["head"]) for alert in self._alerts for at in alert["last"]["heads"]]
        worst = [(head["layer"], head["head"]) for head in ranked]
        chosen = list(dict.fromkeys([*ill, *worst]))[: given.heads]
        self._heads = given.head or chosen  # The same ones in every panel.

    def label(self, text: str) -> str:
        return files.one_line(f"{text} of {self.name}" if len(self._given.run) > 1 else text)

    def lines(self, signal: str) -> Iterator[tuple[str, Series]]:
        """Each with its name; none where the run has no value of the signal."""
        shape = self._client.matrix(self.name, signal)  # 1 x 1: of the run.
        heads, of = self.told["description"]["layout"]["heads"], [("run", 0, 0)]
        if shape.layers * shape.heads > 1:  # Of key heads there may be fewer.
            of = [(_place(*at), at[0], at[1] * shape.heads // heads) for at in self._heads]
        of_given = self._given
        window = {"begin": of_given.begin, "end": of_given.end, "points": of_given.points}
        for name, layer, head in of:
            found = self._client.series(self.name, signal, layer, head, **window)
            if found.step:
                yield self.label(name), found

    def title(self, signal: str) -> str:
        """The signal's name for people, and its unit."""
        own = {each["name"]: each["unit"] for each in self.told.get("own_signals", [])}
        label, unit = LABELS.get(signal, (signal, own.get(signal, "")))
        return files.one_line(f"{label} ({unit})" if unit else label)

    def limit(self, signal: str) -> Optional[float]:
        """What the worst alert with a value of the signal held it against."""
        for alert in self._alerts:
            for each in alert["last"]["evidence"]:
                if each["signal"] == signal and math.isfinite(each["threshold"]):
                    return float(each["threshold"])
        return None

    def spans(self) -> Iterator[Span]:
        for alert in self._alerts[:ALERTS_MAX]:
            last = alert["last"]
            severity = last["severity"].removeprefix("SEVERITY_").lower()
            text = self.label(f"{severity} {last['rule']} {_place(last['layer'], last['head'])}")
            end = last["step"] if last["state"] == "ALERT_STATE_RESOLVED" else self.step
            colour = "#d7191c" if severity == "critical" else "#f0a30a"
            yield Span(last["first_step"], end, text, colour, severity != "info")
        for action in self._client.actions(self.name)[-ACTIONS_MAX:]:
            steps = {change["state"]: change["step"] for change in reversed(action["history"])}
            last = action["history"][-1]["step"] if steps else self.step
            applied = steps.get("ACTION_STATE_APPLIED")
            lasts = applied is not None and action["state"] != "ACTION_STATE_UNDONE"
            state = action["state"].removeprefix("ACTION_STATE_").lower()
            text = self.label(f"{state}: {JSON_KINDS.get(action['kind'], action['kind'])}")
            begin, end = last if applied is None else applied, self.step if lasts else last
            yield Span(begin, end, text, "#2c7bb6", applied is not None)
        total = self._client.call("ListEvents", run=self.name, limit=1)["total"]
        newest = {"limit": EVENTS_MAX, "after": max(0, total - EVENTS_MAX)}
        for event in self._client.call("ListEvents", run=self.name, **newest)["events"]:
            text = f"{event['kind'].removeprefix('EVENT_KIND_')} {event['text']}"
            yield Span(event["step"], event["step"], self.label(text), "#555555", False)


def _draw_panel(
    axis: Any, signal: str, title: str, lines: list[tuple[str, Series]], limit: Optional[float],
    colours: dict[str, str],
) -> None:  # fmt: skip
    import numpy as np

    low, high = math.inf, -math.inf
    for label, series in lines:
        colour = colours.setdefault(label, COLOURS[len(colours) % len(COLOURS)])
        values = np.array([series.min, series.mean, series.max], dtype=float)
        finite = np.isfinite(values).all(axis=0)
        values[:, ~finite] = np.nan
        axis.plot(
            series.step, values[1], color=colour, lw=1.4, label=label, gid=f"{signal} {label}"
        )
        if not finite.all():
            first, top = series.step[int(np.argmin(finite))], axis.get_xaxis_transform()
            axis.plot([first], [1], "v", color=colour, transform=top, gid=f"{signal} {label} gap")
        if finite.any():
            low, high = min(low, np.nanmin(values[0])), max(high, np.nanmax(values[2]))
            if np.nanmax(values[2] - values[0]) > 0:
                axis.fill_between(series.step, values[0], values[2], color=colour, alpha=0.2, lw=0)
    logarithmic = 0 < LOG_RATIO * low < high
    if logarithmic:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
    if limit is not None and abs(limit) <= LIMIT_REACH * max(abs(low), abs(high)):
        axis.axhline(limit, color="#d7191c", lw=1, ls=":", gid=f"{signal} limit {limit:.4g}")
        words = {"color": "#d7191c", "fontsize": 7, "va": "bottom", "ha": "right"}
        at = axis.get_yaxis_transform()
        axis.text(1, limit, f"limit {limit:.4g}", transform=at, **words)
    axis.set_title(title + (", log" if logarithmic else ""), loc="left", fontsize=10)
    axis.grid(color="#e4e4e4")


def _draw_spans(axis: Any, spans: list[Span], begin: int, end: float) -> None:
    for row, span in enumerate(spans):
        first, last = max(span.begin, begin), min(span.end, end)
        width = max(last - first, (end - begin) / 500)
        axis.barh(row, width, left=first, height=0.8, color=span.colour)
        side = -1 if first > (begin + end) / 2 else 1  # Where there is room.
        words = {"ha": "right" if side < 0 else "left", "va": "center", "fontsize": 8}
        axis.annotate(span.text, (first, row), (4 * side, 0), textcoords="offset points", **words)
    axis.invert_yaxis()
    axis.axis("off")


def _draw(figure: Any, given: argparse.Namespace, runs: list[_Run]) -> None:
    """Raises ValueError when there is nothing to draw."""
    signals = given.signal or STORY
    panels = [(name, [line for run in runs for line in run.lines(name)]) for name in signals]
    panels = [(name, lines) for name, lines in panels if lines]
    if not panels:
        raise ValueError(f"{' '.join(given.run)}: no value of {', '.join(signals)} in these steps")
    end = given.end or max(run.step for run in runs) + 1
    ahead = [run for run in runs if run.eta.get("known") and given.end is None]
    reach = end + AHEAD * (end - given.begin)
    end = max([end, *(min(run.step + run.eta["upper_steps"], reach) for run in ahead)])
    spans = [span for run in runs for span in run.spans()]
    spans = [span for span in spans if span.end >= given.begin and span.begin <= end]
    rows = 0.2 * len(spans)  # Inches.
    heights = [rows] * bool(spans) + [(HEIGHT - 1 - rows) / len(panels)] * len(panels)
    shape = {"squeeze": False, "height_ratios": heights}
    axes = list(figure.subplots(len(heights), 1, sharex=True, **shape)[:, 0])
    if spans:
        _draw_spans(axes.pop(0), spans, given.begin, end)
    colours: dict[str, str] = {}
    for axis, (signal, lines) in zip(axes, panels):
        limits = (run.limit(signal) for run in runs)
        limit = next((each for each in limits if each is not None), None)
        _draw_panel(axis, signal, runs[0].title(signal), lines, limit, colours)
        for span in spans:
            if span.shade:
                axis.axvspan(span.begin, span.end, color=span.colour, alpha=0.06)
        for run in ahead:
            low, high = (run.step + run.eta[side] for side in ("lower_steps", "upper_steps"))
            axis.axvspan(low, high, color="#8a2be2", alpha=0.1)
            at = run.step + run.eta["steps"]
            axis.axvline(at, color="#8a2be2", ls="--", label=run.label(EXPECTED), gid=EXPECTED)
    axes[-1].set_xlim(given.begin, end)
    axes[-1].set_xlabel("step")
    named = {name: line for axis in axes for line, name in zip(*axis.get_legend_handles_labels())}
    figure.legend(named.values(), named.keys(), loc="outside right upper", fontsize=9)
    facts = (f"{run.name}: step {run.step}, stage {run.told['stage']}" for run in runs)
    figure.suptitle(files.one_line("; ".join(facts)))


def _rounded(svg: str) -> str:
    """Places to a hundredth of a point, which halves the file."""

    def shorter(path: re.Match[str]) -> str:
        numbers = re.sub(r"-?\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", path[0])
        return numbers.replace(" \nL ", " L ").replace("\nL ", "L ")

    return re.sub(r' d="[^"]*"', shorter, svg)


def main(arguments: Optional[list[str]] = None) -> int:
    given = _parse(arguments)

    def fail(why: object, code: int = FAILED) -> int:
        print(f"plot: {why}", file=sys.stderr)
        return code

    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as e:
        return fail(f"Matplotlib is missing ({e}): pip install 'bellwether[plot]'")
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        try:
            client = client_of(given)
            _draw(figure, given, [_Run(client, given, name) for name in given.run])
        except (QueryError, ValueError) as e:
            return fail(e)
        except OSError as e:
            return fail(unreachable(given.page, e), UNREACHABLE)
        kind = given.output.suffix
        told = {"Title": files.one_line(" ".join(given.run)), **DATED[kind]}
        try:
            with files.replacing(given.output) as part:
                figure.savefig(part, format=kind[1:], metadata=told)
                if kind == ".svg":
                    part.write_text(_rounded(part.read_text(encoding="utf-8")), encoding="utf-8")
        except OSError as e:
            return fail(e)
    return OK
