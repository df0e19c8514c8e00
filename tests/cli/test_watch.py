"""`bellwether run watch`: one frame, a live page, a server that goes away and comes back.

Goal: on a terminal the page shows the run's newest state, survives a restart of the server, and
leaves the terminal as it was; without one a single frame comes out that nothing has cut.
Method: the real command on a pseudo-terminal, a real bellwetherd with a recorded run.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server

RECORDING = ROOT / "tests/testdata/runs/gpt-live-flash-s14.bwrun"
ENTER, LEAVE = b"\x1b[?1049h\x1b[?25l", b"\x1b[?25h\x1b[?1049l"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as started:
        started.run("run", "import", str(RECORDING), "--name", "watched")
        yield started


class Page:
    """The command on a terminal of its own."""

    def __init__(
        self, server: Server, *words: str, rows: int = 30, columns: int = 100, **env: str
    ) -> None:
        told, tells = os.pipe()
        leader, self.terminal = pty.fork()
        if leader == 0:
            self.lead(
                tells,
                [
                    str(BIN / "bellwether"),
                    "--server",
                    server.grpc,
                    "run",
                    "watch",
                    "watched",
                    *words,
                ],
                env,
            )
        os.close(tells)
        self.told = os.fdopen(told)
        self.leader = leader
        self.resize(rows, columns)
        os.write(self.terminal, b"\n")
        self.process = int(self.told.readline())
        self.output = b""

    @staticmethod
    def lead(tells: int, command: list[str], env: dict[str, str]) -> None:
        """The session's leader, like a shell: the terminal outlives the command."""
        os.read(0, 1)  # The terminal has its size.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        modes = termios.tcgetattr(0)
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM")}
            os.execve(command[0], command, {**clean, "TERM": "xterm-256color", **env})
        os.write(tells, f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        same = termios.tcgetattr(0) == modes
        os.write(tells, f"{os.waitstatus_to_exitcode(status)} {same}\n".encode())
        signal.pause()

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> bool:
        """Takes what there is, for a moment; false once the command has ended and all is taken."""
        ready = select.select([self.terminal, self.told], [], [], 0.05)[0]
        if self.terminal in ready:
            self.output += os.read(self.terminal, 1 << 16)
        return ready != [self.told]

    def last(self) -> list[str]:
        """The newest whole page, line by line, without colours."""
        pages = self.output.split(b"\x1b[H")[1:]
        whole = [page for page in pages if page.rstrip().endswith(b"\x1b[J") or LEAVE in page]
        if not whole:
            return []
        text = re.sub(r"\x1b\[[0-9;]*m", "", whole[-1].split(b"\x1b[J")[0].decode())
        return [line.removesuffix("\x1b[K") for line in re.split(r"\r+\n", text)]

    def wait(self, what: str, condition) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + 60
        while not condition(self.last()):
            assert time.monotonic() < deadline, f"{what}: {self.output[-2000:]!r}"
            assert self.read(), f"{what}: it ended: {self.output[-2000:]!r}"

    def ended(self) -> int:
        """Its exit code; what the terminal was set to is as it was."""
        deadline = time.monotonic() + 60
        while self.read():
            assert time.monotonic() < deadline, "it does not end"
        code, same = self.told.readline().split()
        assert same == "True"
        os.kill(self.leader, signal.SIGKILL)
        os.waitpid(self.leader, 0)
        self.told.close()
        os.close(self.terminal)
        return int(code)


def clean_end(page: Page) -> bool:
    """Once into the other screen, once back, and nothing after."""
    return page.output.count(ENTER) == page.output.count(LEAVE) == 1 and page.output.endswith(LEAVE)


def shown(lines: list[str]) -> bool:
    return bool(lines) and lines[0].startswith("watched  attempt 0  step 5300  stage 2 ties  ended")


def test_one_frame_is_whole_without_a_terminal(server: Server) -> None:
    text = server.run("run", "watch", "watched")
    assert text == re.sub(r"\d+ s ago", lambda _: re.search(r"\d+ s ago", text)[0],  # type: ignore[index]
                          server.run("run", "watch", "watched", "--once"))  # fmt: skip
    assert "\x1b" not in text
    lines = text.splitlines()
    assert shown(lines)
    assert re.fullmatch(r"loss 1\.6152  last report \d+ s ago, \S+Z", lines[1])
    assert re.fullmatch(
        r"time left: (\d+) steps \(\d+\.\.\d+ with 80 %\), near step (\d+)", lines[2]
    )
    strip = next(i for i, line in enumerate(lines) if line.startswith("drift_ratio at step 5300"))
    rows = lines[strip + 1 : strip + 7]
    assert [row[:3] for row in rows] == [f"L{layer} " for layer in range(6)]
    # Layer 1, head 4 is the largest: cells of four columns each, the hottest is the ramp's end.
    assert rows[1][3 + 4 * 4 : 3 + 5 * 4] == "@@@@" and text.count("@@@@") == 1
    top = server.json("head", "top", "watched", "--limit", "5")["heads"]
    table = lines.index(next(line for line in lines if line.startswith("LAYER")))
    assert [line.split()[:2] for line in lines[table + 1 : table + 6]] == [
        [str(head["layer"]), str(head["head"])] for head in top
    ]
    alert = server.json("alert", "list", "--run", "watched", "--firing")["alerts"][0]["last"]
    assert any(
        line.startswith("warning   drift  L1 H4") and line.endswith(alert["summary"])
        for line in lines
    )
    assert lines[-1] == "no open actions"


def test_another_signal_and_number_of_heads(server: Server) -> None:
    lines = server.run(
        "run", "watch", "watched", "--signal", "wq_sigma", "--heads", "3"
    ).splitlines()
    assert any(line.startswith("wq_sigma at step 5300") for line in lines)
    table = lines.index(next(line for line in lines if line.startswith("LAYER")))
    assert lines[table + 4] == ""
    server.run("run", "watch", "watched", "--signal", "no_such", exit_code=2)
    server.run("run", "watch", "watched", "--interval", "99ms", exit_code=2)
    server.run("run", "watch", "nobody", exit_code=1)


def test_one_line_for_a_program(server: Server) -> None:
    lines = server.run("run", "watch", "watched", "--once", "-o", "csv").splitlines()
    assert len(lines) == 2 and lines[1].startswith("watched,5300,")


def test_the_page_survives_a_restart_and_leaves_no_trace(server: Server) -> None:
    page = Page(server, "--interval", "100ms")
    page.wait("the run", shown)
    assert all(len(line) <= 100 for line in page.last())
    assert len(page.last()) == 30
    assert "\x1b[48;5;" in page.output.decode() and "\x1b[48;2;" not in page.output.decode()
    server.kill()
    page.wait(
        "the loss of the server",
        lambda lines: any(x.startswith("disconnected since 2") for x in lines),
    )
    assert shown(page.last())  # What was last told stays.
    server.start()
    page.wait(
        "its return", lambda lines: shown(lines) and not any("disconnected" in x for x in lines)
    )
    os.write(page.terminal, b"x")  # No key of ours.
    os.write(page.terminal, b"q")
    assert page.ended() == 0 and clean_end(page)


def test_a_small_terminal_shows_the_hottest_of_several(server: Server) -> None:
    page = Page(server, "--signal", "drift_ratio", rows=16, columns=80, NO_COLOR="1")
    page.wait("the run", shown)
    strip = [line for line in page.last() if line.startswith("L")][:3]
    # Two layers a line; the hottest head, 4 of layer 1, is in the first.
    assert [line[:5] for line in strip] == ["L0-1 ", "L2-3 ", "L4-5 "]
    assert strip[0][5 + 4 * 4 : 5 + 5 * 4] == "@@@@"
    assert "a cell: the largest of 2 heads" in "".join(page.last())
    page.resize(40, 8)
    page.wait("the other size", lambda lines: len(lines) == 40 and all(len(x) <= 8 for x in lines))
    # 5 columns for 6 heads: two heads a cell, and the hottest in the last.
    strip = [line for line in page.last() if line.startswith("L")][:6]
    assert [line[:3] for line in strip] == [f"L{layer} " for layer in range(6)]
    assert strip[1][3:].endswith("@") and len(strip[1]) == 6
    os.write(page.terminal, b"q")
    assert page.ended() == 0 and clean_end(page)


def test_ctrl_c_and_colours(server: Server) -> None:
    for env, has, has_not in (
        ({"COLORTERM": "truecolor"}, "\x1b[48;2;", "\x1b[48;5;"),
        ({"NO_COLOR": "1"}, "@@@@", "\x1b[4"),
    ):
        page = Page(server, **env)  # type: ignore[arg-type]
        page.wait("the run", shown)
        assert has in page.output.decode() and has_not not in page.output.decode()
        os.write(page.terminal, b"\x03")
        assert page.ended() == 0 and clean_end(page)


def test_a_signal_to_end_leaves_no_trace_either(server: Server) -> None:
    page = Page(server)
    page.wait("the run", shown)
    os.kill(page.process, signal.SIGTERM)
    assert page.ended() == 0 and clean_end(page)


def test_a_dumb_terminal_gets_one_frame(server: Server) -> None:
    page = Page(server, TERM="dumb")
    assert page.ended() == 0
    assert b"watched  attempt 0" in page.output and b"\x1b" not in page.output
