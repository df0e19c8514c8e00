"""Python programs that begin with PyTorch loaded: each is a fork of a process that has loaded it.

Loading takes two seconds of a core, which a test of a dozen programs need not spend on each.  A
program finds what a new interpreter would show it: its arguments, environment, folder, path and
streams.  /proc alone names another command.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Optional, Union

Word = Union[str, "os.PathLike[str]"]
_MESSAGE_BYTES_MAX = 1 << 18


class Program:
    """One that was started."""

    def __init__(self, command: list[str], told: int, streams: list[IO[str]]) -> None:
        self._command, self._told, self._streams = command, os.fdopen(told), streams
        self.pid = int(self._told.readline())

    def ended(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """How it ended.  After `timeout` it is killed."""
        if not select.select([self._told], [], [], timeout)[0]:
            os.kill(self.pid, signal.SIGKILL)
        code = int(self._told.readline())
        self._told.close()
        said = []
        for stream in self._streams:
            stream.seek(0)
            said.append(stream.read())
            stream.close()
        return subprocess.CompletedProcess(self._command, code, *said)


class WarmPython:
    """What the programs are forks of."""

    def __init__(self, *modules: str, path: Optional[Word] = None) -> None:
        """modules  have been imported
        path     a folder of some of them: all programs have it in their path
        """
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        if path is not None:
            environment["PYTHONPATH"] = os.fspath(path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                env={**environment, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def start(
        self,
        arguments: Sequence[Word],
        environment: Mapping[str, str],
        folder: Optional[Word] = None,
        together: bool = False,
    ) -> Program:
        """arguments  those of python: a script, or -m and a module, and theirs
        together  errors are printed where all else is
        """
        command = [os.fspath(word) for word in arguments]
        message = {
            "arguments": command,
            "environment": dict(environment),
            "folder": os.fspath(folder or os.getcwd()),
        }
        told, tells = os.pipe()
        streams: list[IO[str]] = [tempfile.TemporaryFile("w+") for _ in range(2 - together)]
        files = [tells, streams[0].fileno(), streams[-1].fileno()]
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], files)
        finally:
            os.close(tells)
        return Program(command, told, streams)

    def run(
        self,
        arguments: Sequence[Word],
        environment: Mapping[str, str],
        folder: Optional[Word] = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        return self.start(arguments, environment, folder).ended(timeout)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def _serve(asks: socket.socket) -> Callable[[], Any]:
    """Returns in the fork that is a program, with what it is to do."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # So those that wait for programs leave nothing.
    while True:
        message, files, _, _ = socket.recv_fds(asks, _MESSAGE_BYTES_MAX, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    asks.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    tells, stdout, stderr = files
    program = os.fork()
    if program == 0:
        os.close(tells)
        for file, number in ((stdout, 1), (stderr, 2)):
            os.dup2(file, number)
        os.close(stdout)
        if stderr != stdout:
            os.close(stderr)
        return _begun(json.loads(message))
    for file in (stdout, stderr):
        os.close(file)
    os.write(tells, f"{program}\n".encode())
    _, status = os.waitpid(program, 0)
    os.write(tells, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _begun(message: dict[str, Any]) -> Callable[[], Any]:
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["environment"])
    first, *rest = message["arguments"]
    as_module = first == "-m"
    sys.argv = rest if as_module else [first, *rest]
    home = os.getcwd() if as_module else os.path.dirname(os.path.abspath(first))
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:0] = [home, *path]
    importlib.invalidate_caches()
    if as_module:
        return lambda: runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    return lambda: runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # This folder.
    for _module in sys.argv[2:]:
        importlib.import_module(_module)
    # A thread would not be in the forks, and what it holds would stay held.
    assert os.listdir("/proc/self/task") == [str(os.getpid())]
    _serve(socket.socket(fileno=int(sys.argv[1])))()
