"""python -m bellwether attach | doctor | explain | forward | open | plot | reproduce | run | scan |
npz2run | version."""

from __future__ import annotations

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
    if command == "attach":
        from .attach_pid import command as attach_command

        return attach_command.main(rest)
    if command == "doctor":
        from .tools import doctor

        return doctor.main(rest)
    if command == "explain":
        from .tools import explain

        return explain.main(rest)
    if command == "forward":
        from .forward import command as forward_command

        return forward_command.main(rest)
    if command == "open":
        from .tools import open_page

        return open_page.main(rest)
    if command == "plot":
        from .tools import plot

        return plot.main(rest)
    if command == "reproduce":
        from .tools import reproduce

        return reproduce.main(rest)
    if command == "run":
        from .tools import runner

        return runner.main(rest)
    if command == "scan":
        from .scan import command as scan_command

        return scan_command.main(rest)
    if command == "npz2run":
        from .tools import npz2run

        return npz2run.main(rest)
    if command == "version":
        return version()
    help_asked = command in ("-h", "--help", "help")
    print(USAGE, end="", file=sys.stdout if help_asked else sys.stderr)
    return 0 if help_asked else 2


if __name__ == "__main__":
    sys.exit(main())
