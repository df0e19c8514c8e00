"""A bellwetherd of one's own, for a run that was given no server.

There is one server a user.  The first process that attaches starts it, and later ones join it.  It
ends by itself minutes after its last client.  It listens on a Unix socket for frames and on a
loopback port for the page.  Its data, log and lock file are in the user's state directory.

Machines may share that directory (a home on NFS).  Then the socket of another machine's server
gives no answer here, alive or not.  Such a server is left alone, and this machine has one of its
own, in a folder by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Optional

from .._native import c_api
from .._util import files, log

READY_FILE = "server.json"  # The `bellwether` command finds the server by it.
HOST_FILE = "server.host"  # Which machine the server that READY_FILE tells of was started on.
HOSTS = (
    "hosts"  # Folder of the folders of machines that are not the first; `bellwether` looks there.
)
READY_SECONDS = 10.0
LOCK_SECONDS = 3 * READY_SECONDS
IDLE_EXIT = "300s"
_HELD = "one server per directory"  # In bellwetherd's words.
_WAIT_SECONDS_MAX = 0.1
_SOCKET_PATH_MAX = 100  # Bytes; the kernel's limit is 108.


class ServerError(RuntimeError):
    """No private server could be had; the text says why."""


@dataclasses.dataclass(frozen=True)
class PrivateServer:
    pid: int
    grpc: str  # "unix:/path"
    http: str  # "http://127.0.0.1:port" or "127.0.0.1:port"
    token: str
    data: Optional[Path] = None  # Its folder.

    def page_url(self, run: str) -> str:
        """Address of the run's page; the token in it opens it."""
        if not self.http:
            return ""
        base = self.http if "://" in self.http else f"http://{self.http}"
        token = f"?token={self.token}" if self.token else ""
        return f"{base}/{token}#/run/{run}"


def state_folder() -> Path:
    """Raises ServerError where this user has none."""
    told = os.environ.get("XDG_STATE_HOME")
    if told:
        return Path(told) / "bellwether"
    try:
        return Path.home() / ".local" / "state" / "bellwether"
    except RuntimeError:  # A container may run a number that is no user's.
        raise ServerError(f"user {os.getuid()} has no home: set HOME or XDG_STATE_HOME") from None


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except ValueError:
        return False
    return True


def _socket_path(folder: Path) -> Path:
    path = folder / "grpc.sock"
    raw = os.fsencode(path)
    if len(raw) <= _SOCKET_PATH_MAX and _is_utf8(raw):  # gRPC takes an address that is text.
        return path
    short = Path(tempfile.gettempdir()) / f"bellwether-{os.getuid()}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.stat().st_uid != os.getuid():
        raise ServerError(f"{short} belongs to somebody else")
    return short / f"{hashlib.sha256(raw).hexdigest()[:16]}.sock"  # Not that of another folder.


def _read_ready(path: Path) -> Optional[PrivateServer]:
    """The server that the file tells of, if it is alive."""
    try:
        told = files.read_json(path)
        server = PrivateServer(
            int(told["pid"]),
            str(told["grpc"]),
            str(told["http"]),
            str(told.get("token", "")),
            path.parent / "data",
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(server.grpc.split(":", 1)[1])
    except (OSError, IndexError):
        return None
    return server


def running() -> Optional[PrivateServer]:
    """This user's private server on this machine, if it is alive; none is started."""
    try:
        folder = state_folder()
    except ServerError:
        return None
    for place in (folder, folder / HOSTS / socket.gethostname()):
        server = _read_ready(place / READY_FILE)
        if server is not None:
            return server
    return None


def _this_host() -> str:
    """Name and boot of this machine, a line each."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}\n{boot}\n"


def _of_another_host(folder: Path) -> bool:
    """Whether the folder's server is one of another machine, that may live."""
    try:
        told = files.read_text(folder / HOST_FILE).splitlines()
    except (OSError, ValueError):
        return False
    here = _this_host().splitlines()
    # A container has a name of its own, and a machine that was started again another boot.
    other = len(told) == 2 and told[0] != here[0] and told[1] != here[1]
    return other and (folder / READY_FILE).exists()


def _log_tail(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(lines[-3:])


def join_or_start() -> PrivateServer:
    """The user's private server, started if there is none.  Raises ServerError."""
    binary = c_api.find(c_api.SERVER)
    if binary is None:
        raise ServerError("bellwetherd was not found beside the package nor in $PATH")
    folder = state_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("server.lock", "server.log", HOST_FILE):
            why = files.why_no_file(folder / name)
            if why is not None:
                raise ServerError(f"{folder / name}: {why}")
        with open(folder / "server.lock", "w", encoding="utf-8") as lock:
            _hold(lock)  # Two jobs that start at once get one server.
            own = folder / HOSTS / socket.gethostname()
            for place in (folder, own):
                server = _read_ready(place / READY_FILE)
                if server is not None:
                    return server
            if _of_another_host(folder):
                own.mkdir(mode=0o700, parents=True, exist_ok=True)
                log.info(f"the private server in {folder} is another machine's; one in {own}")
                folder = own
            return _start(binary, folder)
    except OSError as e:
        raise ServerError(f"{folder}: {e}") from e


def _waits() -> Iterator[float]:
    """Seconds from one look to the next.  Neither a ready file nor a lock with a limit of time can
    be waited for without watching the folder, which NFS does not tell of other machines."""
    seconds = 0.002
    while True:
        yield seconds
        seconds = min(_WAIT_SECONDS_MAX, 2 * seconds)


def _hold(lock: IO[str]) -> None:
    """Locks the file, which a process that starts a server holds for a moment.  Raises ServerError
    if another process does not let go.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    for seconds in _waits():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ServerError(f"{lock.name} was held for {LOCK_SECONDS:g} s") from None
        time.sleep(seconds)


def _start(binary: Path, folder: Path) -> PrivateServer:
    """Starts one where there is none, or a dead one of this machine.  The lock is held."""
    ready = folder / READY_FILE
    ready.unlink(missing_ok=True)
    (folder / HOST_FILE).write_text(_this_host(), encoding="utf-8")
    listen = _socket_path(folder)
    listen.unlink(missing_ok=True)
    output_path = folder / "server.log"
    deadline = time.monotonic() + READY_SECONDS
    process = _spawn(binary, folder, listen, output_path)
    looks, starts = _waits(), _waits()
    while time.monotonic() < deadline:
        server = _read_ready(ready)
        if server is not None:
            return server
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(next(looks))  # Its end is told at once.
        if process.returncode is None:
            continue
        said = _log_tail(output_path)
        if _HELD not in said:
            raise ServerError(f"bellwetherd ended with {process.returncode}: {said}")
        # The one before may still be closing its folder: its ready file goes first.
        time.sleep(next(starts))
        process = _spawn(binary, folder, listen, output_path)
        looks = _waits()
    process.terminate()
    raise ServerError(
        f"bellwetherd was not ready after {READY_SECONDS:.0f} s: {_log_tail(output_path)}"
    )


def _spawn(binary: Path, folder: Path, listen: Path, output_path: Path) -> subprocess.Popen[bytes]:
    output_path.write_bytes(b"")
    # The one before may have last words yet: they come behind what is there.
    with open(output_path, "ab") as output:
        return subprocess.Popen(
            [
                str(binary),
                f"--storage.path={folder / 'data'}",
                f"--grpc.listen-address=unix:{listen}",
                "--web.listen-address=127.0.0.1:0",
                "--gpu=off",  # The GPU here is the training's.
                f"--lifetime.idle-exit={IDLE_EXIT}",
                f"--ready.file={folder / READY_FILE}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in the training job is not for the server.
            cwd=folder,
        )
