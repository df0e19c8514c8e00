"""The way into a running Python: has one line run where Python itself lets signal handlers run.

Python 3.14 has a door of its own, sys.remote_exec.  Before it the main thread is taken away for a
millisecond and made to call two functions (ptrace_call.py).  The first is mmap, for a page that
holds the line.  The second is Py_AddPendingCall, which may be called with or without the GIL and by
any thread.  It only queues PyRun_SimpleString for the main thread's next safe point.  No memory of
the process's allocator is touched, no import or GIL is waited for, so it does not matter what the
thread was doing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .processes import REMOTE_EXEC, Target

STOP_SECONDS_MAX = 1.0
ATTEMPTS = 3
_PROGRAM = Path(__file__).with_name("ptrace_call.py")


class DebuggerError(RuntimeError):
    """The process could not be entered, and was let go."""


def enter(target: Target, line: str, folder: Path) -> float:
    """Queues `line` for the main thread of the process, in the namespace of __main__.

    folder  a private one, for what sys.remote_exec reads

    Returns the seconds that the thread was away, at most about STOP_SECONDS_MAX an attempt.
    Raises DebuggerError.
    """
    if target.python >= REMOTE_EXEC:
        path = folder / "line.py"
        path.write_text(line, encoding="utf-8")
        try:
            sys.remote_exec(target.pid, str(path))  # type: ignore[attr-defined,unused-ignore]
        except (OSError, RuntimeError) as e:
            raise DebuggerError(f"sys.remote_exec: {e}") from e
        return 0.0
    addresses = (target.mmap, target.add_pending_call, target.run_simple_string)
    said = ""
    for _ in range(ATTEMPTS):
        # A session of its own: whatever ends this command, it finishes and lets go.
        done = subprocess.run(
            [sys.executable, "-I", str(_PROGRAM), str(target.pid), *map(hex, addresses),
             str(STOP_SECONDS_MAX)],
            input=line.encode(), capture_output=True, start_new_session=True, check=False,
        )  # fmt: skip
        said = (done.stdout or done.stderr).decode(errors="replace").strip()
        queued = re.fullmatch(r"queued in ([0-9.]+) s", said)
        if queued:
            return float(queued[1])
        if "took too long" not in said:  # Once more would be no better.
            break
    raise DebuggerError(f"process {target.pid} was not entered: {said.splitlines()[-1]}")
