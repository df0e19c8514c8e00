"""A job of two processes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "support"))

from bellwether_process import free_port  # noqa: E402


def megatron(python: str, device: str, way: str, folder: Path) -> list[dict[str, Any]]:
    """What each process of megatron_ranks.py answers."""
    return answers([python, str(HERE / "megatron_ranks.py"), device, way, str(folder)])


def answers(command: list[str]) -> list[dict[str, Any]]:
    """Those of both processes."""
    environment = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's sequence parallelism asks for it.
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    found = []
    try:
        for process in processes:
            said, errors = process.communicate(timeout=240)
            assert process.returncode == 0 and said, errors[-3000:]
            found.append(json.loads(said))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found
