"""Draws `bellwether scorecard --json`: which rule warned of which run how early.

    bellwether scorecard DIR --json | python tests/bench/scorecard_plot.py - scorecard.png

A run is a row: above, from our first warning over the first critical to what then happened; below,
the alarms of the rules that others use.  In a run in which nothing happens every mark is a false
alarm.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

Line = dict[str, Any]

OURS_Y = 0.18  # Above the middle of a run's row; the others' rules share what lies below.
PEERS_Y = -0.02, -0.42


def runs_of(text: str) -> list[Line]:
    """The runs of a scorecard, failing ones first.  Raises ValueError."""
    runs = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
            if entry["run"] is not None:
                runs.append(entry)
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise ValueError(
                f"line {number} is no line of `bellwether scorecard --json`: {e}"
            ) from e
    if not runs:
        raise ValueError("no run in it")
    return sorted(runs, key=lambda run: (failed_at(run) is None, str(run["family"]), run["run"]))


def failed_at(run: Line) -> int | None:
    at = run["t_sigma"] if run["t_sigma"] is not None else run["t_loss"]
    return None if at is None else int(at)


def draw(runs: list[Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(11, 0.55 * len(runs) + 1.6), dpi=110)
    peers = list(dict.fromkeys(rule for run in runs for rule in run["peers"] or {}))
    step = (PEERS_Y[1] - PEERS_Y[0]) / max(1, len(peers) - 1)

    def mark(x: int | None, y: float, **style: Any) -> None:
        if x is not None:
            axis.plot([x], [y], ls="none", **style)

    for row, run in enumerate(reversed(runs)):
        axis.axhline(row - 0.5, color="0.9", lw=0.8)
        y = row + OURS_Y
        end = failed_at(run)
        axis.plot([0, run["steps"]], [y, y], color="0.85", lw=1, zorder=0)
        if run["first_warning"] is not None and end is not None:
            axis.plot([run["first_warning"], end], [y, y], color="C0", lw=3, alpha=0.35, zorder=1)
        mark(run["first_warning"], y, marker="o", mfc="white", mec="C0", ms=7)
        mark(run["first_critical"], y, marker="o", color="C0", ms=7)
        mark(run["t_sigma"], y, marker="X", color="C3", ms=8)
        mark(run["t_loss"], y, marker="|", color="black", ms=12, mew=2)
        for at, rule in enumerate(peers):
            alarms = (run["peers"] or {}).get(rule, [])
            axis.plot(alarms, [row + PEERS_Y[0] + at * step] * len(alarms),
                      ls="none", marker="|", ms=4, mew=1, color=f"C{at + 4}")  # fmt: skip
    axis.set_yticks(
        range(len(runs)),
        [f"{run['run']}\n{run['family'] or ''}" for run in reversed(runs)],
        fontsize=7,
    )
    axis.set_ylim(-0.6, len(runs) - 0.4)
    axis.set_xlim(0, None)
    axis.set_xlabel("optimizer step")
    handles = [
        axis.plot(
            [], [], ls="none", marker="o", mfc="white", mec="C0", ms=7, label="first warning"
        )[0],
        axis.plot([], [], ls="none", marker="o", color="C0", ms=7, label="first critical")[0],
        axis.plot([], [], ls="none", marker="X", color="C3", ms=8, label="sigma(W_Q) explodes")[0],
        axis.plot(
            [],
            [],
            ls="none",
            marker="|",
            color="black",
            ms=12,
            mew=2,
            label="loss leaves its course",
        )[0],
    ] + [
        axis.plot([], [], ls="none", marker="|", ms=6, color=f"C{at + 4}", label=rule)[0]
        for at, rule in enumerate(peers)
    ]
    figure.legend(handles=handles, loc="upper center", ncol=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.7 / figure.get_figheight()))
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws `bellwether scorecard --json`.")
    parser.add_argument("source", help="its output, a file or - for standard input")
    parser.add_argument("target", type=Path, help="the picture; its ending says the format")
    options = parser.parse_args()
    try:
        text = sys.stdin.read() if options.source == "-" else Path(options.source).read_text()
        draw(runs_of(text), options.target)
    except (OSError, ValueError) as e:
        print(f"scorecard_plot: {options.source}: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
