"""A script as several processes of one job (gloo), until all have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Union

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "support"))
from bellwether_process import free_port


def run_ranks(script: Union[str, Path], *arguments: str, ranks: int = 2, **more: str) -> None:
    """Fails with what a process printed that did not end well.  more  of their environment"""
    environment = {
        **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT / "client_lib" / "python"), **more,
    }  # fmt: skip
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments], env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for job in jobs:
        said = job.communicate(timeout=240)[0]
        assert job.returncode == 0, said
