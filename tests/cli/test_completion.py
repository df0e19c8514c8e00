"""Completion of the bellwether command in bash, zsh and fish.

Goal: wherever the cursor stands, what fits there is offered: commands, flags, the values of an
option, the names that the server knows; and a Tab in each real shell completes a word.
Method: the candidates of the real command, asked a server of synthetic runs; each shell on a
pseudo-terminal, and its script called as the shell calls it.
"""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("BELLWETHER_LIB_DIR", ROOT / "build/cpu/bin"))
CLI = str(BIN / "bellwether")


def environment(**extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BELLWETHER_")}
    return {**clean, "XDG_STATE_HOME": "/nonexistent", "PATH": f"{BIN}:{clean['PATH']}", **extra}


def run(*words: str, **env: str) -> str:
    done = subprocess.run(
        [CLI, *words], capture_output=True, text=True, timeout=60, env=environment(**env)
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def offered(*words: str, **env: str) -> list[str]:
    lines = run("completion", "candidates", *words, **env).splitlines()
    return [line.split("\t")[0] for line in lines]


def leaves(path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The commands of the tree as its help shows it."""
    text = run(*path, "--help")
    if "\nSubcommands:\n" not in text:
        return [path]
    block = text.split("\nSubcommands:\n")[1].split("\n\n")[0]
    names = re.findall(r"(?m)^  (\S+)", block)
    assert offered(*path, "") == names
    return [leaf for name in names for leaf in leaves((*path, name))]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    process = subprocess.Popen(
        [BIN / "query_test_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    yield f"127.0.0.1:{process.stdout.readline().split()[1]}"
    process.stdin.close()
    process.wait(60)


def test_every_command_and_every_flag_is_offered() -> None:
    everywhere = set(re.findall(r"(?m)^  (?:-\w,)?(--[\w.-]+)", run("--help")))
    assert "--server" in everywhere
    for leaf in leaves():
        options = run(*leaf, "--help").split("\nOptions:\n")[1]
        flags = re.findall(r"(?m)^  (?:-\w,)?(--[\w-]+)", options)
        assert "--help" in flags
        got = offered(*leaf, "--")
        assert set(got) == set(flags) | everywhere, leaf
        assert len(got) == len(set(got)), leaf


def test_values_of_choices_signals_and_files() -> None:
    assert offered("run", "list", "-o", "") == ["table", "json", "yaml", "csv"]
    assert offered("-o", "c") == ["csv"]
    assert offered("alert", "list", "--severity", "") == ["info", "warning", "critical"]
    assert offered("alert", "list", "--severity=w") == ["--severity=warning"]
    assert offered("alert", "list", "--output=js") == ["--output=json"]
    assert "attention.center_k" in offered("action", "propose", "my-run", "")
    assert offered("action", "propose", "my-run", "stop", "--mode", "hp") == ["hp", "hpm"]
    assert offered("policy", "dry-run", "p.yml", "--mode", "e") == ["enforce"]
    assert offered("head", "top", "my-run", "--signal", "drift") == ["drift_ratio"]
    assert offered("matrix", "my-run", "wq_sig")[0] == "wq_sigma"
    assert "loss" in offered("series", "get", "my-run", "rows", "lo")
    assert offered("rules", "check", "") == [":files"]
    assert offered("replay", "x.bwrun", "--rules", "") == [":files"]
    # A value is no command, and what nobody knows is not made up.
    assert offered("--server", "run", "run", "wa") == ["watch"]
    assert offered("run", "list", "--limit", "") == []
    assert offered("run", "get", "my-run", "") == []
    assert offered("nonsense", "") == offered("")


def test_runs_alerts_and_actions_of_the_server_are_offered(server: str) -> None:
    here = {"BELLWETHER_SERVER": server}
    assert offered("run", "get", "", **here) == ["gpt-bf16", "gpt-fp32"]
    assert offered("run", "compare", "gpt-bf16", "gpt-f", **here) == ["gpt-fp32"]
    assert offered("alert", "list", "--run", "", **here) == ["gpt-bf16", "gpt-fp32"]
    assert offered("--server", server, "run", "get", "gpt-b") == ["gpt-bf16"]
    assert offered("run", f"--server={server}", "get", "gpt-b") == ["gpt-bf16"]
    keys = ["drift/1/2/220", "ties/0/3/100"]
    assert sorted(offered("alert", "get", "gpt-bf16", "", **here)) == keys
    assert offered("alert", "ack", "gpt-fp32", "", **here) == []
    run("action", "propose", "gpt-bf16", "stop", **here)
    assert offered("action", "approve", "gpt-bf16", "", **here) == ["00000000-1"]
    assert offered("run", "get", "", BELLWETHER_SERVER="127.0.0.1:1") == []


def test_the_scripts_hand_words_over(server: str, tmp_path: Path) -> None:
    bash = run("completion", "bash")
    for line, expected in (
        ("bellwether al", "alert"),
        ("bellwether alert list --severity=w", "warning"),  # bash has its own word after "=".
        ("bellwether --server " + server + " run get gpt-b", "gpt-bf16"),
    ):
        at = f"COMP_LINE='{line}' COMP_POINT={len(line)}"
        probe = f"{bash}\n{at}\n_bellwether; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(
            ["bash", "--norc", "-c", probe], capture_output=True, text=True, env=environment()
        )
        assert (done.stdout, done.stderr) == (expected + "\n", ""), line
    script = tmp_path / "bellwether.fish"
    script.write_text(run("completion", "fish"))
    lines = ("bellwether alert s", f"bellwether rules check {tmp_path}/bell")
    probe = "; ".join([f"source {script}", *(f"complete -C '{line}'" for line in lines)])
    done = subprocess.run(
        ["fish", "--no-config", "-c", probe],
        capture_output=True,
        text=True,
        env=environment(HOME=str(tmp_path)),
    )
    silence, file = done.stdout.splitlines()
    assert silence == "silence\tStops notifications of an alert for a while"
    assert file.split("\t")[0] == str(script)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_tab_completes(shell: str, tmp_path: Path) -> None:
    """`bellwether vers<Tab>` is run as `bellwether version`."""
    script = tmp_path / "script"
    script.write_text(run("completion", shell))
    load = {
        "bash": f"source {script}",
        "zsh": f"autoload -Uz compinit; compinit -u -d {tmp_path}/dump; source {script}",
        "fish": f"source {script}",
    }[shell]
    start = {
        "bash": ["bash", "--norc", "--noprofile", "-i"],
        "zsh": ["zsh", "-f", "-i"],
        "fish": ["fish", "--no-config", "-i"],
    }[shell]
    process, terminal = pty.fork()
    if process == 0:
        env = environment(HOME=str(tmp_path), TERM="xterm", PS1="$ ")
        os.execvpe(start[0], start, env)
    output = b""

    def wait_for(pattern: bytes) -> None:
        nonlocal output
        deadline = time.monotonic() + 60
        while not re.search(pattern, output):
            assert time.monotonic() < deadline, output
            if select.select([terminal], [], [], 0.1)[0]:
                output += os.read(terminal, 1 << 16)

    # Each command's end is seen before the next is typed: a shell throws away what comes too early.
    os.write(terminal, f"{load}; echo rea''dy\n".encode())
    wait_for(rb"\bready\r?\n")
    os.write(terminal, b"bellwether vers\t")
    wait_for(rb"vers(\x1b\[[0-9;?]*[a-zA-Z]|\x08|\s|vers)*ion")
    os.write(terminal, b"\n")
    wait_for(rb"bellwether \d+\.\d+\.\d+ \(gRPC")
    os.write(terminal, b"exit\n")
    os.waitpid(process, 0)
    os.close(terminal)
