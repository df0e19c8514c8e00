"""What /proc shows of a process that a command is to attach to, and every reason not to.

Nothing in here stops or changes the process.  A caller that gets a Target may go on; any other
gets a Refusal, a sentence with what is in the way and what to do.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import pwd
import re
import sys
from pathlib import Path
from typing import Optional

from .._native import c_api
from .._util import presence
from .._util.torch_version import TORCH_MIN, dotted
from . import elf

PYTHON_MIN = (3, 9)
REMOTE_EXEC = (3, 14)  # sys.remote_exec: Python's own way, but the same Python on both sides.
PACKAGE = Path(__file__).resolve().parents[1]

_PROC = Path("/proc")
_CAP_SYS_PTRACE = 19
_TORCH = re.compile(r"(.*/torch)/_C\.cpython-3(\d+)(t?)-[^/]*\.so$")
_MARK = f"/memfd:{presence.NAME} "


class Refusal(RuntimeError):
    """Attaching is not possible, and nothing was touched; the text says why."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A training process that can be attached to."""

    pid: int
    uid: int
    gid: int
    command: str
    python: tuple[int, int]
    torch: str
    add_pending_call: int  # Addresses in the process; 0 where sys.remote_exec is the way in.
    run_simple_string: int
    mmap: int

    def __str__(self) -> str:
        python = ".".join(map(str, self.python))
        return f"process {self.pid}: {self.command} (Python {python}, torch {self.torch})"


def _read(pid: int, name: str) -> str:
    return (_PROC / str(pid) / name).read_text(encoding="utf-8", errors="replace")


def _status(pid: int) -> dict[str, str]:
    lines = (line.partition(":") for line in _read(pid, "status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def command_of(pid: int) -> str:
    """The command line, shortened for people."""
    words = _read(pid, "cmdline").rstrip("\0").split("\0")
    line = " ".join([Path(words[0]).name, *words[1:]])
    return line if len(line) <= 80 else line[:77] + "..."


def _may_trace_others() -> bool:
    return bool(int(_status(os.getpid())["CapEff"], 16) >> _CAP_SYS_PTRACE & 1)


def yama_refusal(scope: int) -> str:
    """Why Yama keeps a process without CAP_SYS_PTRACE from attaching; "" if not."""
    if scope <= 0:
        return ""
    told = f"ptrace is restricted here (/proc/sys/kernel/yama/ptrace_scope is {scope})"
    if scope >= 3:
        return f"{told}: no process may attach to another until the machine restarts"
    return f"{told}: run this as root, or give it CAP_SYS_PTRACE"


def _check_alive(pid: int) -> dict[str, str]:
    try:
        status = _status(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise Refusal(f"there is no process {pid}") from None
    state = status.get("State", "?")[0]
    if state in "ZX":
        raise Refusal(f"process {pid} has ended")
    if pid == os.getpid():
        raise Refusal(f"process {pid} is this command itself")
    if state in "Tt":
        raise Refusal(f"process {pid} is stopped: let it go on first (kill -CONT {pid})")
    return status


def _check_permission(pid: int, status: dict[str, str]) -> None:
    uid, mine = int(status["Uid"].split()[0]), os.geteuid()
    powerful = _may_trace_others()
    if not powerful and any(int(u) != mine for u in status["Uid"].split()):
        raise Refusal(
            f"process {pid} belongs to {_user(uid)} and you are {_user(mine)}: "
            f"run this as {_user(uid)} or as root"
        )
    tracer = int(status.get("TracerPid", "0"))
    if tracer:
        raise Refusal(f"process {pid} is traced by process {tracer} already: end that one first")
    scope_file = _PROC / "sys/kernel/yama/ptrace_scope"
    scope = int(scope_file.read_text()) if scope_file.exists() else 0
    try:
        # The kernel asks the same questions for this as for attaching.
        os.close(os.open(_PROC / str(pid) / "mem", os.O_RDONLY))
    except OSError as e:
        why = yama_refusal(scope) if scope >= 3 or not powerful else ""
        raise Refusal(
            f"the kernel lets nobody of your rights trace process {pid} "
            f"({why or e.strerror or e}); in a container it takes CAP_SYS_PTRACE"
        ) from e


def _python_symbols(
    pid: int, maps: list[elf.Mapping]
) -> tuple[Optional[elf.Mapping], dict[str, int]]:
    """The mapping that holds the interpreter, and the addresses of the two functions."""
    wanted = ("Py_AddPendingCall", "PyRun_SimpleString")
    program = os.readlink(_PROC / str(pid) / "exe").removesuffix(" (deleted)")
    seen: set[str] = set()
    for mapping in maps:
        name = Path(mapping.path).name
        if mapping.offset or mapping.path in seen:
            continue
        seen.add(mapping.path)
        if mapping.path != program and not name.startswith("libpython3"):
            continue
        found = elf.addresses(_PROC / str(pid) / "root", mapping, wanted)
        if len(found) == len(wanted):
            return mapping, found
    return None, {}


def _check_python(pid: int, command: str, maps: list[elf.Mapping]) -> dict[str, int]:
    names = [Path(mapping.path).name for mapping in maps]
    if any(name.startswith("ld-musl-") for name in names):
        raise Refusal(
            f"process {pid} ({command}) runs on musl: Bellwether's libraries need the GNU C library"
        )
    interpreter, found = _python_symbols(pid, maps)
    if interpreter is None:
        linked = any(re.match(r"ld(-linux|64)?[-.].*\.so", name) for name in names)
        kind = "" if linked else "; it is linked statically"
        raise Refusal(f"process {pid} ({command}) is not Python{kind}")
    return found


def _check_torch(pid: int, command: str, maps: list[elf.Mapping]) -> tuple[tuple[int, int], str]:
    """((3, minor) of the process's Python, version of its torch)."""
    for mapping in maps:
        match = _TORCH.match(mapping.path)
        if match is None:
            continue
        if match[3]:
            raise Refusal(
                f"process {pid} runs a free-threaded Python: attaching to it is not tried"
            )
        version_file = Path(f"{_PROC}/{pid}/root{match[1]}/version.py")
        told = re.search(r"__version__ = '([^']+)'", version_file.read_text(encoding="utf-8"))
        return (3, int(match[2])), told[1] if told else "0.0"
    raise Refusal(
        f"process {pid} ({command}) has not imported torch: there is nothing to watch yet"
    )


def _check_versions(pid: int, python: tuple[int, int], torch: str) -> None:
    if python < PYTHON_MIN:
        raise Refusal(
            f"process {pid} runs Python {dotted(python)}: "
            f"the package needs {dotted(PYTHON_MIN)} or newer"
        )
    number = re.match(r"(\d+)\.(\d+)", torch)
    if number is None or (int(number[1]), int(number[2])) < TORCH_MIN:
        raise Refusal(
            f"process {pid} runs torch {torch}: the package needs {dotted(TORCH_MIN)} or newer"
        )
    mine = sys.version_info[:2]
    if python >= REMOTE_EXEC and mine != python:
        raise Refusal(
            f"process {pid} runs Python {dotted(python)} and this is Python {dotted(mine)}: since "
            f"{dotted(REMOTE_EXEC)} both must be the same; call the package with that Python"
        )
    if python < REMOTE_EXEC and platform.machine() != "x86_64":
        raise Refusal(
            f"process {pid} runs Python {dotted(python)} on {platform.machine()}: before "
            f"{dotted(REMOTE_EXEC)} only x86_64 can be entered"
        )


def library_folder() -> Path:
    """Where the libraries of this package are.  Raises Refusal."""
    found = c_api.find(c_api.CLIENT_LIBRARY)
    if found is None or c_api.find(c_api.KERNELS_LIBRARY) is None:
        raise Refusal(
            "the libraries of the package were not found: build them with ./start --build-only, "
            "or set BELLWETHER_LIB_DIR to the folder that holds them"
        )
    return found.resolve().parent


def _check_package(pid: int) -> None:
    for path in (PACKAGE / "__init__.py", library_folder() / c_api.CLIENT_LIBRARY):
        try:
            if os.path.samefile(f"{_PROC}/{pid}/root{path}", path):
                continue
        except OSError:
            pass
        raise Refusal(
            f"process {pid} cannot see {path}: it has another file system (a container?); "
            "install the package there and run this inside"
        )


def examine(pid: int, detach: bool = False) -> Target:
    """All that attaching needs.  Raises Refusal; the process notices nothing."""
    status = _check_alive(pid)
    _check_permission(pid, status)
    try:
        command = command_of(pid)
        maps = elf.mappings(_read(pid, "maps"))
        symbols = _check_python(pid, command, maps)
        python, torch = _check_torch(pid, command, maps)
        _check_versions(pid, python, torch)
        _check_package(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise Refusal(f"process {pid} ended while it was looked at") from None
    watched = is_watched(pid)
    if watched and not detach:
        raise Refusal(f"process {pid} is watched already; --detach ends that")
    if detach and not watched:
        raise Refusal(f"process {pid} is not watched: there is nothing to detach")
    uid, gid = (int(status[name].split()[1]) for name in ("Uid", "Gid"))
    libc = next(
        (m for m in maps if re.match(r"libc[-.]", Path(m.path).name) and not m.offset), None
    )
    mmap = elf.addresses(Path(f"{_PROC}/{pid}/root"), libc, ("mmap",)) if libc else {}
    if "mmap" not in mmap:
        raise Refusal(f"process {pid} has no GNU C library that is known here")
    return Target(
        pid, uid, gid, command, python, torch,
        symbols["Py_AddPendingCall"], symbols["PyRun_SimpleString"], mmap["mmap"],
    )  # fmt: skip


def is_watched(pid: int) -> bool:
    """Whether a monitor is installed in the process."""
    try:
        return _MARK in _read(pid, "maps")
    except OSError:
        return False


# ---- all ranks of a run ----


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                parent = int(_status(int(entry.name))["PPid"])
            except (OSError, KeyError):  # It has ended since.
                continue
            found.setdefault(parent, []).append(int(entry.name))
    return found


def _has_torch(pid: int) -> bool:
    try:
        return any(_TORCH.match(mapping.path) for mapping in elf.mappings(_read(pid, "maps")))
    except OSError:
        return False


def _has_rank(pid: int) -> bool:
    try:
        return any(part.startswith("RANK=") for part in _read(pid, "environ").split("\0"))
    except OSError:
        return False


def ranks_below(pid: int) -> list[int]:
    """The training processes of a launcher, or of a rank itself, in order of their ids.

    A rank is the outermost process at or below `pid` that has RANK in its environment and torch
    loaded; data loaders are below it.  If no process has a RANK, the outermost processes below
    `pid` with torch loaded, or else `pid` itself.  Raises Refusal.
    """
    _check_alive(pid)
    children = _children()

    def outermost(start: list[int], told_rank: bool) -> list[int]:
        found: list[int] = []
        for process in start:
            if _has_torch(process) and (not told_rank or _has_rank(process)):
                found.append(process)
            else:
                found += outermost(children.get(process, []), told_rank)
        return found

    ranks = outermost([pid], True) or outermost(children.get(pid, []), False)
    return sorted(ranks) or [pid]
