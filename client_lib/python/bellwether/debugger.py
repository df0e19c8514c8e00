"""The way into a running Python: has one line run where Python itself lets signal handlers run.

Python 3.14 has a door of its own, sys.remote_exec.  Before it a debugger stops the process for
a fraction of a second and calls two functions there: mmap, for a page that holds the line, and
Py_AddPendingCall, which may be called with or without the GIL and by any thread, and which only
queues PyRun_SimpleString for the main thread's next safe point.  No memory of the process's
allocator is touched, no import or GIL is waited for while it stands, so it does not matter what
the thread was doing.
"""

from __future__ import annotations

import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from .processes import REMOTE_EXEC, Target

STOP_SECONDS_MAX = 1.0
ATTEMPTS = 3
_UNWIND_SECONDS = 2.0  # For the debugger to take its call back and let go.
_TOTAL_SECONDS = 15  # Ends the debugger also where nobody is left to wait for it.
_POLL_SECONDS = 0.001
_PAGE = 4096

_SETTINGS = """\
set pagination off
set confirm off
set width 0
set language c
set auto-solib-add off
set debuginfod enabled off
set unwindonsignal on
"""


class DebuggerError(RuntimeError):
    """The debugger could not enter; it has let go of the process."""


def _commands(target: Target, line: str) -> str:
    """What gdb does: no symbol is read, all addresses are known beforehand."""
    text = line.encode() + b"\0"
    if len(text) > _PAGE:
        raise DebuggerError(f"the line has {len(text)} bytes, legal are at most {_PAGE}")
    text += b"\0" * (-len(text) % 8)
    page = "unsigned long (*)(unsigned long, unsigned long, int, int, int, long)"
    commands = [
        f"attach {target.pid}",
        # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS
        f"set $page = (({page}){target.mmap})(0, {_PAGE}, 3, 34, -1, 0)",
    ]
    for at in range(0, len(text), 8):
        (word,) = struct.unpack_from("<Q", text, at)
        commands.append(f"set {{unsigned long}}($page + {at}) = {word}")
    call = "int (*)(unsigned long, unsigned long)"
    commands += [
        f"set $queued = (({call}){target.add_pending_call})({target.run_simple_string}, $page)",
        'printf "queued %d\\n", $queued',
        "detach",
    ]
    return _SETTINGS + "\n".join(commands) + "\n"


def _traced(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(r"^TracerPid:\t0$", status, re.MULTILINE) is None


def _stop(target: Target, line: str, folder: Path) -> tuple[bool, float, str]:
    """One attempt: (whether the line is queued, seconds that the process stood, what gdb said)."""
    script, said = folder / "debugger.gdb", folder / "debugger.txt"
    script.write_text(_commands(target, line), encoding="utf-8")
    with open(said, "w", encoding="utf-8") as output:
        # A session of its own: whatever ends this command, the debugger finishes and lets go.
        gdb = subprocess.Popen(
            ["timeout", "--signal=INT", "--kill-after=5", str(_TOTAL_SECONDS),
             "gdb", "-nx", "-nh", "-q", "-batch", "-iex", "set auto-load no",
             "-iex", "set auto-load libthread-db off", "-x", str(script)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    first = last = 0.0
    interrupted = 0.0
    while gdb.poll() is None:
        if _traced(target.pid):
            last = time.monotonic()
            first = first or last
            if not interrupted and last - first > STOP_SECONDS_MAX:
                interrupted = last
                gdb.send_signal(signal.SIGINT)  # gdb takes the call back and lets go.
            elif interrupted and last - interrupted > _UNWIND_SECONDS:
                gdb.terminate()
        time.sleep(_POLL_SECONDS)
    text = said.read_text(encoding="utf-8", errors="replace")
    return "queued 0" in text, last - first, text


def _complaint(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("[")]
    return lines[-1].strip() if lines else "gdb said nothing"


def enter(target: Target, line: str, folder: Path) -> float:
    """Queues `line` for the main thread of the process, in the namespace of __main__.

    folder  a private one, for what the debugger reads and writes

    Returns the seconds that the process stood still, at most about STOP_SECONDS_MAX an attempt.
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
    seconds, text = 0.0, ""
    for _ in range(ATTEMPTS):
        queued, seconds, text = _stop(target, line, folder)
        if queued:
            return seconds
        if seconds <= STOP_SECONDS_MAX:  # It was refused, not slow: once more would be no better.
            break
    raise DebuggerError(f"gdb did not enter process {target.pid}: {_complaint(text)}")
