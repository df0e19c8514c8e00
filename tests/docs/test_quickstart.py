"""Each program of docs/quickstart.md runs as it stands there, and its run is on a server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server

PAGE = (ROOT / "docs/quickstart.md").read_text()
PROGRAMS = dict(re.findall(r"^## (\w+)\n.*?^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


def test_every_program_runs(server: Server, tmp_path: Path) -> None:
    assert PROGRAMS.keys() == {"PyTorch", "transformers", "Lightning"}
    environment = {**os.environ, "BELLWETHER_SERVER": server.grpc, "BELLWETHER_LIB_DIR": str(BIN)}
    environment["PYTHONPATH"] = str(ROOT / "client_lib/python")

    def run(framework: str) -> str:
        folder = tmp_path / framework
        folder.mkdir()
        (folder / "train.py").write_text(PROGRAMS[framework])
        command = [sys.executable, "train.py"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, PROGRAMS))

    for framework in PROGRAMS:
        run_name = f"quickstart-{framework.lower()}"
        server.await_end(run_name)
        described = server.call("GetRun", run=run_name)
        assert {"wq_sigma", "common_mode_sum"} <= set(described["signals"]), run_name
        server.run("run", "watch", run_name, "--once")
        server.run("head", "top", run_name)
