"""python -m bellwether attach | doctor | explain | forward | open | plot | reproduce | run | scan |
npz2run | version."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Optional

from . import __version__

USAGE = """usage: python -m bellwether COMMAND ...

Watches PyTorch training jobs, new ones and running ones, and says why it cannot.

commands:
  attach PID [--detach]       watches a process that runs already, or ends that
  doctor [script.py args]     says why there is no data; --kernels: which attention is right
  explain RUN [--json]        says how a run is, on what evidence, and what to do
  forward RUN --to LOGGER     sends a run's signals to TensorBoard, W&B, trackio, MLflow, OTLP
  open [RUN]                  prints and opens the page of a run, also of one that ended
  plot RUN -o FILE            draws the heads of a run's alerts, with limits, actions and notes
  reproduce CAPTURE           makes a script of a captured call of attention, for its vendor
  run script.py args          runs a training script, untouched, under watch
  scan DIR [--follow]         watches a run by the checkpoints that it writes
  npz2run IN.npz OUT.bwrun    turns a recorded trace into a recorded run
  version                     versions of the package and the libraries
"""


_MODULES = {
    "attach": "attach_pid.command",
    "doctor": "tools.doctor",
    "explain": "tools.explain",
    "forward": "forward.command",
    "npz2run": "tools.npz2run",
    "open": "tools.open_page",
    "plot": "tools.plot",
    "reproduce": "tools.reproduce",
    "run": "tools.runner",
    "scan": "scan.command",
}


def version() -> int:
    from ._native import c_api

    print(f"bellwether {__version__}")
    for name in (
        c_api.CLIENT_LIBRARY,
        c_api.KERNELS_LIBRARY,
        c_api.SENDER,
        c_api.SERVER,
    ):
        print(f"{name} {c_api.find(name) or 'not found'}")
    return 0


def main(arguments: Optional[list[str]] = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    command, rest = (given[0], given[1:]) if given else ("", [])
    if command in _MODULES:
        return int(importlib.import_module(f".{_MODULES[command]}", __package__).main(rest))
    if command == "version":
        return version()
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    print(USAGE, end="", file=sys.stderr)
    if command:
        near = difflib.get_close_matches(command, [*_MODULES, "version"], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        # Runs and alerts are listed by the other program.
        print(f'\nno command "{command}"{hint} (see also: bellwether --help)', file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
