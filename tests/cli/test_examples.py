"""Every example that the helps of `bellwether` show works as it stands.

Goal: an example that is copied gives an answer, not an error.
Method: the examples are read from docs/reference/cli.md (which tests/docs keeps current) and run
by a shell, in a folder with the files that they name, against a bellwetherd with the runs that they
name.  Keys and ids are the server's to give, so those of the examples are replaced by real ones.
Actions need a server that grants them without a trainer: that of tests/support, with its own runs.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server

DATA = ROOT / "tests/testdata"
KEY, ID, TOKEN = "a1", "6f1b0a2c-3", "3f9a01c2d4e5"  # As the helps spell them.
REFERENCE = (ROOT / "docs/reference/cli.md").read_text().split("\n## bellwetherd")[0]


def examples() -> list[str]:
    found = []
    for chapter in re.split(r"\n###? ", REFERENCE)[1:]:
        name = chapter.split("\n")[0]
        blocks = re.findall(r"```sh\n(.*?)```", chapter, re.DOTALL)
        assert blocks or "COMMAND --help" in chapter, f"{name} has no example"
        found += [line for block in blocks for line in block.splitlines()]
    return sorted(set(found))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        recording = DATA / "runs/gpt-live-flash-s14.bwrun"
        shutil.copy(recording, here / "run.bwrun")
        shutil.copy(recording, here / "incident.bwrun")
        (here / "runs").mkdir()
        shutil.copy(DATA / "tiny/bf16-1.bwrun", here / "runs")
        shutil.copy(ROOT / "deploy/rules/builtin.yml", here / "rules.yml")
        tests = (ROOT / "deploy/rules/builtin_test.yml").read_text()
        (here / "rules_test.yml").write_text(tests.replace("builtin.yml", "rules.yml"))
        shutil.copy(ROOT / "deploy/policy/default.yml", here / "policy.yml")
        (here / "bellwether.yml").write_text("{}\n")
        (here / ".zfunc").mkdir()
        (here / "empty").mkdir()
        for words in ("cert init tls", "token create alice --file tokens"):
            subprocess.run([BIN / "bellwether", *words.split()], cwd=here, check=True)
        yield here


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    (folder / "server").mkdir()
    with Server(folder / "server") as started:
        started.run("run", "import", str(folder / "run.bwrun"), "--name", "my-run")
        for name in ("old-run", "train-20261125-210719-6635"):
            started.run("run", "import", str(DATA / "tiny/bf16-1.bwrun"), "--name", name)
        for name in ("bf16", "fp32"):
            recording = str(DATA / f"tiny/{name}-1.bwrun")
            started.run("run", "import", recording, "--name", name)
        yield started


@pytest.fixture(scope="module")
def granting() -> Iterator[str]:
    process = subprocess.Popen(
        [BIN / "query_test_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    yield f"127.0.0.1:{process.stdout.readline().split()[1]}"
    process.stdin.close()
    process.wait(60)


def shell(example: str, folder: Path, address: str) -> subprocess.Popen[str]:
    env = {**os.environ, "HOME": str(folder), "BELLWETHER_SERVER": address}
    env["PATH"] = f"{BIN}:{env['PATH']}"
    program = ["fish", "--no-config"] if example.endswith("| source") else ["bash", "--norc"]
    # exec: a signal reaches the command.
    line = f"exec {example}" if re.match(r"bellwether [^|>]*$", example) else example
    return subprocess.Popen(
        [*program, "-c", line],
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.parametrize("example", examples())
def test_examples_work(example: str, folder: Path, server: Server, granting: str) -> None:
    address = server.grpc
    if example.startswith("bellwether action"):
        address = granting
        example = example.replace("my-run", "gpt-bf16").replace("--layer 3", "--layer 2")
        propose = ["action", "propose", "gpt-bf16", "stop", "--no-headers", "--server", granting]
        done = subprocess.run(
            [BIN / "bellwether", *propose], capture_output=True, text=True, check=True
        )
        example = example.replace(ID, done.stdout.split()[0])
    if example.startswith("bellwether cert init"):
        folder = folder / "empty"  # An authority is never written over.
    if TOKEN in example:
        listed = subprocess.run(
            [BIN / "bellwether", "token", "list", "--file", folder / "tokens"], capture_output=True, text=True, check=True
        )
        example = example.replace(TOKEN, listed.stdout.splitlines()[1].split()[0])
    key = server.json("alert", "list", "--run", "my-run", "--firing")["alerts"][0]["last"]["key"]
    process = shell(re.sub(rf"\b{KEY}\b", key, example), folder, address)  # Ids may hold it.
    try:
        if " alert watch" in example:
            # It stands until Ctrl-C and tells what comes meanwhile.  Nobody says when it has begun
            # to listen, so things come until it has heard of one.
            assert process.stdout is not None
            for again in range(100):
                if select.select([process.stdout], [], [], 0.1)[0]:
                    break
                name = f"again-{again}"
                server.run("run", "import", str(folder / "run.bwrun"), "--name", name)
            assert process.stdout.readline()
            process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    allowed = (0, 3) if "--exit-code" in example else (0,)
    assert process.returncode in allowed, (example, output, errors)
    if "zfunc" in example:
        assert (folder / ".zfunc/_bellwether").read_text().startswith("#compdef bellwether")


def test_there_are_as_many_as_commands() -> None:
    assert len(examples()) > 40
    assert any(KEY in example for example in examples())
    assert any(ID in example for example in examples())
