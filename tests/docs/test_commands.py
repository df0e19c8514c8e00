"""Goal: every command in every document works as it stands there, or has the reason for not being
run.
Method: shell blocks of a document run in order in one shell, Python blocks in order in one
namespace, against one server with a recorded failing run.  YAML is checked by its own reader.  A
stand-in of a document (RUN, HOST) is replaced.  Blocks that are not run, and commands in running
text, are compared with the helps.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, wait_for
from blocks import Block, blocks_of, documents, without_blocks

DATA = ROOT / "tests/testdata"
BLOCKS = [block for document in documents() for block in blocks_of(document)]
RUN_HERE = ("sh", "python", "yaml")
NO_COMMANDS = ("text", "json")
# Stand until somebody ends them.
ENDLESS = re.compile(r"--follow|alert watch|run watch (?!.*--once)|curl -sN")
PRELUDE = """
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
until_interrupted() {
  local code=0
  timeout --signal=INT --kill-after=20 3 "$@" || code=$?
  [[ $code = 0 || $code = 124 || $code = 130 ]]
}
"""
# Runs each document's Python, in one process: what they import takes longer than what they do.
PYTHON = """
import json, sys, traceback
failed = {}
for document, blocks in json.load(sys.stdin).items():
    names = {"__name__": "__main__"}
    for place, code in blocks:
        try:
            exec(compile(code, place, "exec"), names)
        except BaseException:
            failed[document] = traceback.format_exc()
            break
json.dump(failed, open(sys.argv[1], "w"))
"""
TRAIN = """
import sys, time
import torch

model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10**6 if "for-ever" in sys.argv else 5):
    model(torch.randn(2, 4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""


def chosen(language: str) -> dict[str, list[Block]]:
    """By document, what is run here."""
    found: dict[str, list[Block]] = {}
    for block in BLOCKS:
        if block.language == language and not block.is_elsewhere:
            found.setdefault(block.document, []).append(block)
    return found


def fill_folder(folder: Path) -> None:
    """What documents call by name."""
    for name in ("run.bwrun", "incident.bwrun"):
        shutil.copy(DATA / "tiny/bf16-1.bwrun", folder / name)
    shutil.copy(ROOT / "deploy/rules/builtin.yml", folder / "rules.yml")
    for name in ("policy.yml", "p.yml"):
        shutil.copy(ROOT / "deploy/policy/default.yml", folder / name)
    (folder / "train.py").write_text(TRAIN)
    # What the journal holds is what the server says; there is no journal without a booted systemd.
    (folder / "bin").mkdir()
    journal = folder / "bin/journalctl"
    journal.write_text(f"#!/bin/sh\ncat {shlex.quote(str(folder.parent / 'server/server.log'))}\n")
    journal.chmod(0o755)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.getbasetemp() / "server"
    folder.mkdir()
    config = "alerting: {webhooks: [{url: 'http://127.0.0.1:9/'}]}\n"
    with Server(folder, config, f"--rules.file={ROOT / 'deploy/rules/builtin.yml'}") as server:
        for name in ("my-run", "llama"):
            recording = str(DATA / "runs/gpt-flash-s4.bwrun")
            server.run("run", "import", recording, "--name", name)
        # Something that the journal tells of.
        assert server.process is not None
        server.process.send_signal(signal.SIGHUP)
        wait_for("a reload", lambda: "rules read again" in server.log())
        yield server


def here(text: str, server: Server) -> str:
    """With the server and the run that are here in place of what the document calls them."""
    text = re.sub(r"http://(HOST|127\.0\.0\.1):7071", f"http://{server.http}", text)
    text = re.sub(r"\b(host|127\.0\.0\.1):7070", server.grpc, text)
    return re.sub(r"\bRUN\b", "my-run", text).replace("RULES.yml", "rules.yml")


def environment(folder: Path, server: Server) -> dict[str, str]:
    path = [str(folder / "bin"), str(BIN), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path), "PYTHONPATH": str(ROOT / "client_lib/python"),
        "BELLWETHER_SERVER": server.grpc, "BELLWETHER_PAGE": f"http://{server.http}",
        "BELLWETHER_LIB_DIR": str(BIN),
        "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def shell_script(blocks: list[Block]) -> str:
    lines = [PRELUDE]
    for block in blocks:
        lines += [f"# {block.place}", block.before]
        for line in re.sub(r"\bPID\b", "$PID", block.text).splitlines():
            lines.append(f"until_interrupted {line}" if ENDLESS.search(line) else line)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def failures(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], str]:
    """By language and document, what went wrong."""

    def shell(document: str) -> str:
        folder = tmp_path_factory.mktemp("shell")
        fill_folder(folder)
        script = here(shell_script(chosen("sh")[document]), server)
        done = subprocess.run(
            ["bash", "-xc", script], cwd=folder, env=environment(folder, server),
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        return "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-2000:]

    def python() -> dict[str, str]:
        folder = tmp_path_factory.mktemp("python")
        told = folder / "failed.json"

        def code_of(block: Block) -> tuple[str, str]:
            return block.place, here(f"{block.before}\n{block.text}", server)

        code = {document: list(map(code_of, found)) for document, found in chosen("python").items()}
        done = subprocess.run(
            [sys.executable, "-c", PYTHON, told], input=json.dumps(code), cwd=folder,
            env=environment(folder, server), capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        failed: dict[str, str] = json.loads(told.read_text())
        return failed

    with ThreadPoolExecutor(2) as pool:
        in_python = pool.submit(python)
        in_shell = dict(zip(chosen("sh"), pool.map(shell, chosen("sh"))))
        failed = {("python", document): text for document, text in in_python.result().items()}
    return failed | {("sh", document): text for document, text in in_shell.items() if text}


@pytest.mark.parametrize("document", chosen("sh"))
def test_shell_blocks_run(document: str, failures: dict[tuple[str, str], str]) -> None:
    if ("sh", document) in failures:
        pytest.fail(failures["sh", document])


@pytest.mark.parametrize("document", chosen("python"))
def test_python_blocks_run(document: str, failures: dict[tuple[str, str], str]) -> None:
    if ("python", document) in failures:
        pytest.fail(failures["python", document])


READERS = {
    "config": [str(BIN / "bellwether"), "check", "config"],
    "rules": [str(BIN / "bellwether"), "rules", "check"],
    "policy": [str(BIN / "bellwether"), "policy", "check"],
    "prometheus": ["promtool", "check", "config"],
    "alertmanager": ["amtool", "check-config"],
}


@pytest.mark.parametrize("document", chosen("yaml"))
def test_documented_files_are_accepted_by_their_programs(document: str, tmp_path: Path) -> None:
    for file in ("dashboards/alerts/rules.yml", "deploy/webhook/slack.json"):
        shutil.copy(ROOT / file, tmp_path)
    for block in chosen("yaml")[document]:
        [kind] = block.said["checked as"]
        (tmp_path / "file.yml").write_text(block.text)
        done = subprocess.run(
            [*READERS[kind], "file.yml"], cwd=tmp_path, capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == 0, f"{block.place}: {done.stdout}{done.stderr}"


def complaint(block: Block) -> str:
    """What keeps a block from being run by anybody without a word about it; empty: nothing."""
    if block.language not in RUN_HERE + NO_COMMANDS:
        return f"a fence needs one of {', '.join(RUN_HERE + NO_COMMANDS)}, not {block.language!r}"
    if block.language in NO_COMMANDS:
        return "only commands are run" if block.said else ""
    if block.language == "yaml" and not block.is_elsewhere and "checked as" not in block.said:
        return "YAML says by `checked as` whose it is"
    for test in block.said.get("run by", []):
        # The document is where the test has it from.
        if not (ROOT / test).exists() or block.document not in (ROOT / test).read_text():
            return f"{test} does not read {block.document}"
    return ""


def test_every_block_is_run_or_says_why_not() -> None:
    assert len(BLOCKS) > 50
    assert [f"{block.place}: {complaint(block)}" for block in BLOCKS if complaint(block)] == []
    # Indented code is code that nobody sees.
    for document in documents():
        assert not re.search(
            r"(?m)\A    \S|\n\n    (?:python|bellwether|\./|curl|cmake)",
            without_blocks((ROOT / document).read_text()),
        ), document


def test_block_without_a_test_is_found() -> None:
    for text in (
        "```\nls\n```",
        "<!-- run by tests/docs/test_paper.py -->\n```sh\nls\n```",
        "```yaml\na: 1\n```",
    ):
        [block] = blocks_of("README.md", text)
        assert complaint(block), text
    with pytest.raises(ValueError, match="says nothing that is known"):
        blocks_of("README.md", "<!-- perhaps -->\n```sh\nls\n```")
    assert flags_unknown("bellwether run list --no-such-flag") == {"--no-such-flag"}
    assert flags_unknown("bellwether run lst") == {"lst"}


@cache
def help_of(*command: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "client_lib/python")}
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, env=env)
    return done.stdout if done.returncode == 0 else ""


PROGRAMS = {
    "bellwether": (str(BIN / "bellwether"),),
    "bellwetherd": (str(BIN / "bellwetherd"),),
    "./start": (str(ROOT / "start"),),
    "./check": (str(ROOT / "check"),),
    "python -m bellwether": (sys.executable, "-m", "bellwether"),
}


def flags_unknown(line: str) -> set[str]:
    """Of one command: the commands and flags that its help does not know."""
    line = re.split(r"\s+#|[|;>&]", line)[0].strip()
    named = [name for name in PROGRAMS if f"{line} ".startswith(f"{name} ")]
    if not named:
        return set()
    command = program = PROGRAMS[named[0]]
    words = line[len(named[0]) :].split()
    text = help_of(*command)
    while words and re.search(r"(?m)^(?:Subcommands|commands):$", text):
        if not re.fullmatch(r"[a-z][\w-]*", words[0]):
            break
        if not re.search(rf"(?m)^  {words[0]}\b", text):
            return {words[0]}
        command = (*command, words.pop(0))
        text = help_of(*command) or text
    flags = {word.split("=")[0] for word in words if word.startswith("--")}
    every = set(re.findall(r"--[\w.-]+", text + help_of(*program)))
    return flags - every - {"--help"}


def test_commands_in_text_and_unrun_blocks_exist() -> None:
    wrong = []
    for document in documents():
        if document.startswith("CHANGELOG"):
            continue  # What was.
        text = (ROOT / document).read_text()
        lines = re.findall(r"`([^`\n]+)`", without_blocks(text))
        for block in blocks_of(document):
            if block.language == "sh" and block.is_elsewhere:
                lines += block.text.splitlines()
        wrong += [
            f"{document}: {line}: {flags}" for line in lines if (flags := flags_unknown(line))
        ]
    assert wrong == []
