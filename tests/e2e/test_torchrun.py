"""Goal: each start of a job by torchrun is one attempt, and all its ranks are in it, though
torchrun numbers starts for each node by itself and does not number those where nodes come.
Method: two nodes (torchrun's agents, on this machine) that meet by c10d, and a real server.  One
node comes later.  One rank is killed while the other hangs.  One is killed in its first seconds,
when the store of the start before still has what that one wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, Server, free_port, wait_for


class Job:
    """Its nodes, which end once the folder has a file "stop"."""

    def __init__(self, folder: Path, server: Server, nodes_min: int, **environment: str) -> None:
        self.folder, self.server, self.nodes_min = folder, server, nodes_min
        self.environment, self.port = environment, free_port()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        words = [f"--nnodes={self.nodes_min}:2", "--nproc-per-node=1", "--max-restarts=5", "--monitor-interval=0.2",
                 "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=job",
                 "--rdzv-conf=last_call_timeout=1", "--local-addr=127.0.0.1"]  # fmt: skip
        job = [str(Path(__file__).with_name("torchrun_job.py")), str(self.folder), name, self.server.grpc]
        told = {"OMP_NUM_THREADS": "1", "BELLWETHER_LIB_DIR": str(BIN), **self.environment}
        with open(self.folder / f"node-{name}.log", "wb") as log:
            self.nodes[name] = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words, *job],
                env={**os.environ, **told}, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def kill_rank(self, name: str) -> None:
        (self.folder / f"kill-{name}").touch()

    def await_ranks(self, attempt: int, ranks: int) -> None:
        wait_for(f"{ranks} ranks train in attempt {attempt}", lambda: self._is_there(attempt, ranks), 120)

    def _is_there(self, attempt: int, ranks: int) -> bool:
        assert all(node.poll() is None for node in self.nodes.values()), self.said()
        run = self.run()
        if run is None or int(run["description"]["attempt"]) != attempt:
            return False
        return int(run["ranks_reporting"]) == ranks and int(run["step"]) > 10

    def run(self) -> Optional[dict[str, Any]]:
        runs = self.server.call("ListRuns")["runs"]
        return dict(runs[0]) if runs else None

    def said(self) -> str:
        return "\n".join((self.folder / f"node-{name}.log").read_text() for name in self.nodes)

    def counts(self, name: str) -> list[str]:
        """What torchrun called each start of the node's rank."""
        return (self.folder / f"counts-{name}").read_text().split()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "stop").touch()
        for node in self.nodes.values():
            node.terminate()  # Of its ranks, too.
            node.wait()

    def await_success(self) -> None:
        (self.folder / "stop").touch()
        codes = {name: node.wait(timeout=120) for name, node in self.nodes.items()}
        assert set(codes.values()) == {0}, self.said()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running


def test_each_start_is_an_attempt_of_all_its_ranks(tmp_path: Path, server: Server) -> None:
    # With the store shared, torch 2.13 lets no node in later.
    with Job(tmp_path, server, 1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as job:
        job.start("a")
        job.await_ranks(attempt=0, ranks=1)
        job.start("b")
        job.await_ranks(attempt=1, ranks=2)
        job.kill_rank("b")
        job.await_ranks(attempt=2, ranks=2)
        job.await_success()
    server.await_end("job", attempt=2)
    assert (job.counts("a"), job.counts("b")) == (["0", "0", "0"], ["0", "1"]), "torchrun's own numbers"


def test_restart_in_the_same_store_is_a_new_attempt(tmp_path: Path, server: Server) -> None:
    # One node: where several share it, torch's own addresses of the start before mislead its groups.
    with Job(tmp_path, server, 1) as job:
        job.start("a")
        job.await_ranks(attempt=0, ranks=1)
        job.kill_rank("a")
        job.await_ranks(attempt=1, ranks=1)
        job.await_success()
    server.await_end("job", attempt=1)
