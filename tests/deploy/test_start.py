"""Goal: ./start says what is wrong before it builds, names its folder, serves what it prints, and
leaves no process behind, whichever way it is ended.
Method: the script itself on the build of this checkout, on a terminal where Ctrl-C matters; our
processes are known by a mark in their environment.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, wait_for

START = ROOT / "start"


def said(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([START, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--atention"], "unknown argument --atention"),
        (["--attention", "int8"], "--attention needs bf16 or fp32, not 'int8'"),
        (["--steps", "0"], "--steps needs a number from 1, not '0'"),
        (["--steps"], "--steps needs a number"),
        (["--bundle"], "--bundle needs a folder"),
        (["--wheel"], "--wheel needs a folder"),
    ],
)
def test_wrong_words_are_told_before_anything_is_built(words: list[str], complaint: str) -> None:
    refused = said(*words)
    assert refused.returncode == 1
    assert complaint in refused.stderr
    assert "Building" not in refused.stdout


def test_help_names_every_option() -> None:
    options = set(re.findall(r"^    (--[a-z-]+)", START.read_text(), re.MULTILINE))
    shown = said("--help")
    assert shown.returncode == 0
    assert options and options <= set(re.findall(r"--[a-z-]+", shown.stdout))


def test_the_last_line_of_a_build_is_the_folder() -> None:
    built = said("--build-only")
    assert built.returncode == 0, built.stderr
    folder = Path(built.stdout.splitlines()[-1])
    assert all(os.access(folder / program, os.X_OK) for program in ("bellwetherd", "bellwether"))


class Terminal:
    """./start on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._mark = f"BELLWETHER_TEST_MARK={uuid.uuid4()}"
        self.output = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            name, value = self._mark.split("=")
            os.environ[name] = value
            os.execv(START, [str(START), *words])

    def read_until(self, pattern: str) -> re.Match[str]:
        """The first match in all the output; fails when the script ends without one."""
        while not (found := re.search(pattern, self.output)):
            try:
                self.output += os.read(self._terminal, 65536).decode(errors="replace")
            except OSError:  # The terminal has closed.
                pytest.fail(f"{pattern!r} was never said:\n{self.output}")
        return found

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def end(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self._terminal)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def processes(self) -> list[str]:
        """What still runs of all that the script has started."""
        alive = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes():
                    alive.append((folder / "cmdline").read_text())
            except OSError:  # It has ended, or is not ours to read.
                continue
        return alive


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        if terminal.pid:
            os.kill(terminal.pid, signal.SIGTERM)
            terminal.end()


def test_ctrl_c_while_a_model_trains_ends_everything(terminals: list[Terminal]) -> None:
    terminal = Terminal("--steps", "1000000")
    terminals.append(terminal)
    terminal.read_until(r"step +200/")
    assert len(terminal.processes()) >= 4  # The script, server, trainer, sender.
    terminal.press_ctrl_c()
    assert terminal.end() == 128 + signal.SIGINT
    # The sender has delivered all and said good-bye; it may be on its way out.
    wait_for("every process has ended", lambda: not terminal.processes())


def test_start_proposes_a_repair_to_approve(terminals: list[Terminal]) -> None:
    terminal = Terminal("--steps", "1000000")
    terminals.append(terminal)
    page = terminal.read_until(r"Its alerts are on the page, \d+ s .*: (http://\S+/)#/run/gpt-flash-s4").group(1)
    with urllib.request.urlopen(page, timeout=30) as answer:
        assert answer.status == 200
    listing = terminal.read_until(r"   (\S+ --server \S+ action list \S+ --waiting)").group(1)
    approving = terminal.read_until(r"   (\S+ --server \S+ action approve \S+) ID").group(1)
    terminal.read_until("ALERT ")
    terminal.read_until(r"step +1600/")

    def ran(command: str) -> str:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    waiting = wait_for(
        "a repair waits", lambda: json.loads(ran(f"{listing} -o json")).get("actions")
    )
    assert [action["state"] for action in waiting] == ["ACTION_STATE_PROPOSED"]
    ran(f"{approving} {waiting[0]['id']}")
    terminal.press_ctrl_c()
    assert terminal.end() == 128 + signal.SIGINT


def test_start_serves_the_page_it_names(terminals: list[Terminal]) -> None:
    terminal = Terminal("--serve")
    terminals.append(terminal)
    page = terminal.read_until(r"page (http://\S+/) ").group(1)
    terminal.read_until("Attach a training script")
    with urllib.request.urlopen(page, timeout=30) as answer:
        assert answer.status == 200

    second = said("--serve")
    assert second.returncode == 1 and "another ./start" in second.stderr

    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM
    assert terminal.processes() == []
