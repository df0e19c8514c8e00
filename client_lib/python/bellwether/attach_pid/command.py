"""python -m bellwether attach PID: watches a training job that runs already, or ends that.

looks        at the processes, and says why not before anything is stopped (processes.py)
enters       each one, its main thread away for a millisecond (debugger.py)
waits        for the report of what happened at the next optimizer step (inside.py)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Optional

from .. import __version__, settings
from . import debugger, processes
from .debugger import DebuggerError
from .mailbox import ARRIVED, QUEUED, REPORT, Mailbox
from .processes import Refusal, Target

WAIT_SECONDS = 60.0
_REPORT_SECONDS = 30.0  # From taking the request to the report.
_POLL_SECONDS = 0.01

# One statement without a name of its own: it runs in the script's namespace.  Nothing that goes
# wrong in it may reach the script.
_LINE = "try: exec({code!r}, {{}})\nexcept BaseException: pass\n"
# By its file, not through sys.path, where the package's neighbours would get in.
_CODE = """\
import os, sys
try: os.close(os.open({arrived!r}, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
except OSError: pass  # Nobody waits any more.
if "bellwether" not in sys.modules:
    from importlib import util
    spec = util.spec_from_file_location("bellwether", {package!r})
    sys.modules["bellwether"] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
try:
    from bellwether.attach_pid import inside
    inside.begin({folder!r})
except BaseException as error:
    import json
    text = json.dumps({{"ok": False, "text": "%s: %s" % (type(error).__name__, error)}})
    with open({report!r} + ".tmp", "x", opener=lambda p, f: os.open(p, f, 0o600)) as file:
        file.write(text)
    os.rename({report!r} + ".tmp", {report!r})
"""

_SETTINGS = ("server", "run", "every", "layers", "ranks", "rows", "sequences", "overhead_budget",
             "record", "config", "allow")  # fmt: skip


def _line(box: Mailbox) -> str:
    code = _CODE.format(
        package=str(processes.PACKAGE / "__init__.py"),
        folder=str(box.folder),
        report=str(box.folder / REPORT),
        arrived=str(box.folder / ARRIVED),
    )
    return _LINE.format(code=code)


class _Visitor:
    """One process: entered, then waited for."""

    def __init__(self, target: Target, request: dict[str, Any], wait: float) -> None:
        self.target = target
        self._wait = wait
        self._deadline = time.time() + wait
        request = {**request, "deadline": self._deadline, "version": __version__}
        self._box = Mailbox.create(target.uid, target.gid, request)
        self.stopped = 0.0

    def enter(self) -> None:
        """Raises DebuggerError."""
        self.stopped = debugger.enter(self.target, _line(self._box), self._box.folder)

    def wait(self) -> dict[str, Any]:
        """The report; what is told when there is none has `ok` False too."""
        deadline = self._deadline
        while True:
            text = self._box.read(REPORT)
            if text is not None:
                return dict(json.loads(text))
            if not Path(f"/proc/{self.target.pid}").exists():
                return {"ok": False, "text": "it ended"}
            if time.time() > deadline:
                if self._box.withdraw():
                    return {"ok": False, "text": self._why_nothing()}
                if time.time() > deadline + _REPORT_SECONDS:
                    return {"ok": False, "text": "it began and did not report; see its log"}
            time.sleep(_POLL_SECONDS)

    def _why_nothing(self) -> str:
        wait = f"{self._wait:g} s"
        queued = self._box.read(QUEUED)
        if queued is None and self._box.read(ARRIVED) is not None:
            return (
                f"it was still importing bellwether after {wait}; nothing was changed "
                "(--wait for longer)"
            )
        if queued is None:
            return (
                f"its main thread ran no Python within {wait} (it waits for something in C?); "
                "nothing was changed"
            )
        if queued:
            return f"{queued}, within {wait}; nothing was changed"
        return (
            f"no optimizer of torch.optim made a step within {wait}; nothing was changed "
            "(--wait for longer)"
        )

    def forget(self) -> None:
        """The command no longer waits: what was not begun will not be."""
        self._box.withdraw()
        self._box.remove()


def _parse(arguments: Optional[list[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bellwether attach",
        description="Watches a PyTorch process that runs already; its script is not touched.",
    )
    parser.add_argument("pid", type=int, help="the training process, or its launcher")
    parser.add_argument(
        "--run-tree", action="store_true", help="every rank below PID (torchrun, mpirun, a shell)"
    )
    parser.add_argument("--detach", action="store_true", help="take everything back")
    parser.add_argument("--server", help="host:port or unix:/path; default: a private server")
    parser.add_argument("--run", help="the run's name")
    parser.add_argument("--every", type=int, help="steps between two samples")
    parser.add_argument("--layers", help="regular expression on module names")
    parser.add_argument("--ranks", help="dp0 or all")
    parser.add_argument("--rows", type=int, help="sampled query rows per head and sequence")
    parser.add_argument("--sequences", type=int, help="sampled sequences of a batch")
    parser.add_argument("--overhead-budget", type=float, help="share of the step time")
    parser.add_argument("--record", help="write a .bwrun file")
    parser.add_argument("--config", help="file of `key: value` lines")
    parser.add_argument("--allow", help="kinds of action that the server may ask for: a,b,...")
    parser.add_argument(
        "--wait", type=float, default=WAIT_SECONDS, metavar="SECONDS",
        help=f"for an optimizer step ({WAIT_SECONDS:g})",
    )  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="do not ask")
    given = parser.parse_args(arguments)
    if given.pid <= 0:
        parser.error(f"pid: {given.pid} is not above 0")
    if not 0 < given.wait <= 86400:
        parser.error(f"--wait: {given.wait:g} is outside of 0 to 86400 seconds")
    return given


def _attach_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """What attach() is told inside, with paths that mean the same there.  Raises ValueError."""
    told = {name: getattr(given, name) for name in _SETTINGS if getattr(given, name) is not None}
    for name in ("server", "run"):  # The environment of this command counts; the job has its own.
        value = os.environ.get(f"BELLWETHER_{name.upper()}")
        if value:
            told.setdefault(name, value)
    for name in ("record", "config"):
        if name in told:
            told[name] = os.path.abspath(told[name])
    config = told.get("config")
    settings.resolve({n: v for n, v in told.items() if n != "config"}, config)
    return told


def _examine(given: argparse.Namespace) -> list[Target]:
    pids = processes.ranks_below(given.pid) if given.run_tree else [given.pid]
    if given.detach:  # Only one of the ranks may report.
        pids = [pid for pid in pids if processes.is_watched(pid)] or pids
    return [processes.examine(pid, given.detach) for pid in pids]


def _agreed(given: argparse.Namespace) -> bool:
    if given.yes or not sys.stdin.isatty():
        return True
    question = "Detach?" if given.detach else "Attach? Each process stands still for up to 1 s."
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _visit(targets: list[Target], request: dict[str, Any], wait: float) -> bool:
    """Whether all went well.  All processes are entered before one is waited for."""
    visitors: list[_Visitor] = []
    good = True
    try:
        for target in targets:
            visitor = _Visitor(target, request, wait)
            visitors.append(visitor)
            visitor.enter()
        for visitor in visitors:
            told = visitor.wait()
            good = good and bool(told["ok"])
            print(
                f"process {visitor.target.pid}: {told['text']} "
                f"(it stood for {visitor.stopped:.4f} s)",
                file=sys.stdout if told["ok"] else sys.stderr,
            )
            for name in ("page_url", "record"):
                if told.get(name):
                    print(told[name])
    finally:
        for visitor in visitors:
            visitor.forget()
    return good


def main(arguments: Optional[list[str]] = None) -> int:
    given = _parse(arguments)
    try:
        request = {
            "action": "detach" if given.detach else "attach",
            "arguments": {} if given.detach else _attach_arguments(given),
            "libraries": str(processes.library_folder()),
        }
        targets = _examine(given)
    except (Refusal, ValueError) as e:
        print(e, file=sys.stderr)
        return 1
    for target in targets:
        print(target)
    if not _agreed(given):
        return 1
    try:
        return 0 if _visit(targets, request, given.wait) else 1
    except DebuggerError as e:
        print(e, file=sys.stderr)
        return 1
