"""What is alike in every command: formats, headers, and the exit codes of a failing server.

Goal: JSON and YAML hold the same tree, CSV is rectangular and loses just its first line with
--no-headers, data is on stdout alone; 4 = no answer, 5 = denied, 2 = usage, for each command.
Method: every command of the tree that asks a server, against one of synthetic runs; a command that
is in no list here fails the test.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))
from pseudo_terminal import on_terminal

BIN = Path(os.environ.get("BELLWETHER_LIB_DIR", ROOT / "build/cpu/bin"))
RUN, KEY = "gpt-bf16", "drift/1/2/220"

# Commands that show something, with arguments that they take.
SHOWING = {
    "run list": (),
    "run get": (RUN,),
    "run explain": (RUN,),
    "run watch": (RUN, "--once"),
    "run events": (RUN,),
    "run compare": (RUN, "gpt-fp32"),
    "head top": (RUN,),
    "matrix": (RUN, "drift_ratio"),
    "tensor top": (RUN,),
    "series get": (RUN, "loss", "--points", "5"),
    "alert list": (),
    "alert get": (RUN, KEY),
    "alert ack": (RUN, KEY, "--by", "ann"),
    "alert silence": (RUN, KEY, "--for", "1h"),
    "alert false-alarm": (RUN, KEY, "--reason", "known"),
    "action list": (RUN,),
    "action get": (RUN, "00000000-1"),
    "action propose": (RUN, "stop"),
    "action approve": (RUN, "00000000-1"),
    "action reject": (RUN, "00000000-1"),
    "action undo": (RUN, "00000000-1"),
    "policy get": (RUN,),
    "policy set": (RUN, "--mode", "observe"),
    "baseline list": (),
    "baseline get": (RUN,),
    "server info": (),
}
# Those whose table is one table with a header.
ONE_TABLE = {"run list", "run get", "run events", "run compare", "head top", "tensor top", "series get"}
ONE_TABLE |= {"alert list", "alert ack", "action list", "baseline list"}
# The others that ask a server.
ASKING = {
    "run annotate": (RUN, "a note"),
    "run import": (__file__,),
    "run export": (RUN, "-"),
    "run rename": (RUN, "another"),
    "run delete": (RUN, "--yes"),
    "alert watch": (),
    "open": (RUN,),
}
OFFLINE = {"replay", "scorecard", "rules check", "rules test", "rules explain", "policy check"}
OFFLINE |= {"policy explain", "policy dry-run", "check config", "version"}
OFFLINE |= {"completion bash", "completion zsh", "completion fish"}
OFFLINE |= {"cert init", "cert client", "cert server", "cert revoke", "cert show"}
OFFLINE |= {"token create", "token list", "token revoke"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("BELLWETHER_")}
    command = [BIN / "bellwether", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def serve(*flags: str) -> Iterator[str]:
    process = subprocess.Popen(
        [BIN / "query_test_server", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    yield f"127.0.0.1:{process.stdout.readline().split()[1]}"
    process.stdin.close()
    process.wait(60)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    for address in serve():
        assert run("--server", address, "action", "propose", RUN, "stop").returncode == 0
        assert run("--server", address, "run", "annotate", RUN, "first").returncode == 0
        yield address


@pytest.fixture(scope="module")
def denying() -> Iterator[str]:
    yield from serve("--token", "s3cret")


def leaves(*path: str) -> list[str]:
    text = run(*path, "--help").stdout
    if "\nSubcommands:\n" not in text:
        return [" ".join(path)]
    block = text.split("\nSubcommands:\n")[1].split("\n\n")[0]
    return [x for name in re.findall(r"(?m)^  (\S+)", block) for x in leaves(*path, name)]


def test_no_command_is_left_out() -> None:
    assert sorted([*SHOWING, *ASKING, *OFFLINE]) == sorted(leaves())


@pytest.mark.parametrize("name", SHOWING)
def test_formats(name: str, server: str) -> None:
    words = ("--server", server, *name.split(), *SHOWING[name])

    def shown(*more: str) -> str:
        done = run(*words, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    changing = ("propose", "approve", "reject", "undo", "silence", "false-alarm")
    changes = name.split()[1:] in [[word] for word in changing]

    as_json = json.loads(shown("-o", "json"))
    as_yaml = list(yaml.safe_load_all(shown("-o", "yaml")))[-1]
    if changes:  # Each call makes another one, or another time.
        assert as_yaml.keys() == as_json.keys()
    else:
        assert as_yaml == as_json
    text = shown("-o", "csv")
    rows = list(csv.reader(io.StringIO(text)))
    assert rows and all(rows)
    bare = shown("-o", "csv", "--no-headers")
    if name in ONE_TABLE or name == "matrix":
        assert len({len(row) for row in rows}) == 1
        assert bare == text.split("\n", 1)[1]
    table = shown()
    assert "\x1b" not in table
    if name in ONE_TABLE:
        # Wider than any terminal, and whole: nothing but a terminal has a width.
        lines = table.splitlines()
        bare_lines = shown("--no-headers").splitlines()
        assert [line.split() for line in bare_lines] == [line.split() for line in lines[1:]]
        assert len(rows) == len(lines)


@pytest.mark.parametrize("name", SHOWING)
def test_nothing_is_wider_than_the_terminal(name: str, server: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("BELLWETHER_")}
    words = ("--server", server, *name.split(), *SHOWING[name])
    _, text = on_terminal([BIN / "bellwether", *words], 80, {**env, "TERM": "xterm-256color"})
    long = [line for line in text.splitlines() if len(line) > 80 and not line.startswith("bellwether: ")]
    assert text and not long, "\n".join(long)


@pytest.mark.parametrize("name", [*SHOWING, *ASKING])
def test_exit_codes(name: str, denying: str) -> None:
    words = (*name.split(), *{**SHOWING, **ASKING}[name])
    for address, code, word in (("127.0.0.1:1", 4, "cannot reach"), (denying, 5, "denied")):
        done = run("--server", address, *words)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert word in done.stderr
    wrong = run("--server", denying, *words, "--no-such-flag")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--no-such-flag" in wrong.stderr
