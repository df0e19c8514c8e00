"""Has one thread of another process call two functions, by ptrace: x86-64 Linux.

A program of its own, started by debugger.py in a session of its own: whatever ends the command
that wants it, this finishes and lets go.  It imports nothing of the package.

    python -I ptrace_call.py PID MMAP ADD_PENDING_CALL RUN_SIMPLE_STRING SECONDS < line

The main thread is interrupted wherever it is, and made to call mmap, for a page that holds the
line, and Py_AddPendingCall(PyRun_SimpleString, page).  Both return to address 0, and the fault
there comes to the tracer alone.  Then every register, those of the vector units included, is
what it was; the other threads never stop.  A debugger does the same, at a hundred times the
length, and those that do not know a processor's newest registers cannot put them back.

Prints "queued in S s", S being how long the thread was away; or one sentence, with exit code 1.
The thread is where it was in either case.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import time
from typing import Optional

_PTRACE_CONT, _PTRACE_DETACH = 7, 17
_PTRACE_GETREGSET, _PTRACE_SETREGSET = 0x4204, 0x4205
_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207
_NT_PRSTATUS, _NT_X86_XSTATE = 1, 0x202
_EVENT_STOP = 128
_WALL = 0x40000000
_SIGSEGV = 11
_SYS_TGKILL = 234

# struct user_regs_struct, 27 words.
_NAMES = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx",
    "rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds",
    "es", "fs", "gs",
)  # fmt: skip
_GENERAL_BYTES = 8 * len(_NAMES)
_ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
_MINUS_ONE = 2**64 - 1
_DIRECTION_FLAG = 0x400
_RED_ZONE = 128
_XSTATE_BYTES = 1 << 16
_PAGE = 4096
_POLL_SECONDS = 0.0002
_UNWIND_SECONDS = 2.0


class Failed(RuntimeError):
    """The thread could not be had, or it did not come back; the text says why."""


class _Slice(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int, data: int, what: str) -> None:
    if _libc.ptrace(request, pid, address, data) == -1:
        raise Failed(f"{what}: {os.strerror(ctypes.get_errno())}")


class _Thread:
    """The main thread of a process, once it has been interrupted."""

    def __init__(self, pid: int, deadline: float) -> None:
        self.pid = pid
        self.deadline = deadline
        self.signals: list[int] = []  # That came meanwhile; it gets them afterwards.
        _ptrace(_PTRACE_SEIZE, pid, 0, 0, "ptrace")
        _ptrace(_PTRACE_INTERRUPT, pid, 0, 0, "interrupting it")
        while (status := self._wait()) >> 16 != _EVENT_STOP:
            self.go_on(status >> 8 & 0xFF)  # A signal that was on its way.
        self.since = time.monotonic()

    def stop_anywhere(self) -> None:
        _ptrace(_PTRACE_INTERRUPT, self.pid, 0, 0, "interrupting it")
        self._keep(self._wait())

    def go_on(self, signal: int = 0) -> None:
        _ptrace(_PTRACE_CONT, self.pid, 0, signal, "letting it go on")

    def _wait(self) -> int:
        """The status of its next stop.  Raises Failed when time is out."""
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG | _WALL)
            if pid:
                if not os.WIFSTOPPED(status):
                    raise Failed("it has ended")
                return status
            if time.monotonic() > self.deadline:
                raise Failed("it took too long")
            time.sleep(_POLL_SECONDS)

    def _keep(self, status: int) -> bool:
        """Keeps a signal that is not ours for later; whether it is ours."""
        signal = status >> 8 & 0xFF
        if status >> 16 == 0 and signal != _SIGSEGV:
            self.signals.append(signal)
        return status >> 16 == 0 and signal == _SIGSEGV

    def wait_for_fault(self) -> None:
        while not self._keep(self._wait()):
            self.go_on()

    def get(self, kind: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        part = _Slice(ctypes.addressof(buffer), size)
        _ptrace(_PTRACE_GETREGSET, self.pid, kind, ctypes.addressof(part), "reading registers")
        return buffer.raw[: part.length]

    def set(self, kind: int, registers: bytes) -> None:
        buffer = ctypes.create_string_buffer(registers, len(registers))
        part = _Slice(ctypes.addressof(buffer), len(registers))
        _ptrace(_PTRACE_SETREGSET, self.pid, kind, ctypes.addressof(part), "setting registers")

    def detach(self) -> None:
        for signal in self.signals:
            _libc.syscall(_SYS_TGKILL, self.pid, self.pid, signal)
        _ptrace(_PTRACE_DETACH, self.pid, 0, 0, "letting it go")


class _Caller:
    """Calls functions in a thread's place, and puts everything back at the end."""

    def __init__(self, thread: _Thread, memory: int) -> None:
        self._thread = thread
        self._memory = memory  # /proc/PID/mem
        self._general = thread.get(_NT_PRSTATUS, _GENERAL_BYTES)
        self._vector = thread.get(_NT_X86_XSTATE, _XSTATE_BYTES)
        self._away = False

    def call(self, function: int, *arguments: int) -> int:
        registers = self._words(self._general)
        # As a call leaves it: 16 bytes aligned but for the address to return to, which is 0.
        stack = ((registers["rsp"] - _RED_ZONE) & ~15) - 8
        self.write(stack, bytes(8))
        registers.update(zip(_ARGUMENTS, arguments))
        registers.update(rip=function, rsp=stack, rax=0, orig_rax=_MINUS_ONE)
        # orig_rax -1: the thread is in no system call that the kernel should start again.
        registers["eflags"] &= ~_DIRECTION_FLAG
        self._away = True
        self._thread.set(_NT_PRSTATUS, struct.pack(f"{len(_NAMES)}Q", *registers.values()))
        self._thread.go_on()
        self._thread.wait_for_fault()
        self._away = False
        after = self._words(self._thread.get(_NT_PRSTATUS, _GENERAL_BYTES))
        if after["rip"] != 0:
            raise Failed(f"the call crashed at {after['rip']:#x}")
        return int(after["rax"])

    @staticmethod
    def _words(registers: bytes) -> dict[str, int]:
        return dict(zip(_NAMES, struct.unpack(f"{len(_NAMES)}Q", registers)))

    def write(self, address: int, data: bytes) -> None:
        os.pwrite(self._memory, data, address)

    def put_back(self) -> None:
        if self._away:
            self._thread.deadline = time.monotonic() + _UNWIND_SECONDS
            self._thread.stop_anywhere()
        self._thread.set(_NT_X86_XSTATE, self._vector)
        self._thread.set(_NT_PRSTATUS, self._general)


def _check_fault_is_free(pid: int) -> None:
    """A fault that is blocked or ignored would end the process before the tracer hears of it."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, mask = line.partition(":")
            if name in ("SigBlk", "SigIgn") and int(mask, 16) >> (_SIGSEGV - 1) & 1:
                raise Failed("its main thread blocks or ignores SIGSEGV, on which this rests")


def queue_line(
    pid: int, mmap: int, add_pending_call: int, run_simple_string: int, seconds: float, line: bytes
) -> float:
    """Queues the line for the main thread's next safe point.

    seconds  that the thread may be away

    Returns the seconds that it was.  Raises Failed, OSError.
    """
    text = line + b"\0"
    if len(text) > _PAGE:
        raise Failed(f"the line has {len(text)} bytes, legal are at most {_PAGE}")
    _check_fault_is_free(pid)
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    thread = _Thread(pid, time.monotonic() + seconds)
    caller: Optional[_Caller] = None
    try:
        caller = _Caller(thread, memory)
        # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS
        page = caller.call(mmap, 0, _PAGE, 3, 34, _MINUS_ONE, 0)
        if page % _PAGE:
            raise Failed("it has no page of memory left")
        caller.write(page, text)
        if caller.call(add_pending_call, run_simple_string, page) & 0xFFFFFFFF:
            raise Failed("its queue of pending calls is full")
    finally:
        if caller is not None:
            caller.put_back()
        thread.detach()
        os.close(memory)
    return time.monotonic() - thread.since


def main() -> int:
    pid, mmap, add_pending_call, run_simple_string = (int(word, 0) for word in sys.argv[1:5])
    try:
        away = queue_line(
            pid, mmap, add_pending_call, run_simple_string, float(sys.argv[5]),
            sys.stdin.buffer.read(),
        )  # fmt: skip
    except (Failed, OSError) as e:
        print(e)
        return 1
    print(f"queued in {away:.6f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
