"""A script as several processes of one job (gloo), until all have ended."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Optional, Union

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "support"))
from bellwether_process import free_port
from warm_python import WarmPython


@functools.cache
def warm() -> WarmPython:
    """What the processes of all jobs of this one are made from."""
    modules = ("torch._dynamo", "torch.distributed.fsdp", "bellwether.monitor")
    return WarmPython(*modules, path=ROOT / "client_lib" / "python")


def run_ranks(
    script: Union[str, Path],
    *arguments: str,
    ranks: int = 2,
    of_rank: Optional[Mapping[str, Sequence[object]]] = None,
    killed: Collection[int] = (),
    **more: str,
) -> list[str]:
    """What each printed.  Fails with it where a process did not end well.

    of_rank  of their environment: one value for each
    killed   ranks that end with 9
    more     of the environment of all
    """
    environment = {
        **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT / "client_lib" / "python"), **more,
    }  # fmt: skip
    jobs = []
    for rank in range(ranks):
        own = {name: str(values[rank]) for name, values in (of_rank or {}).items()}
        told = {**environment, "RANK": str(rank), **own}
        jobs.append(warm().start([script, *arguments], told, together=True))
    ended = [job.ended(timeout=240) for job in jobs]
    said = [job.stdout for job in ended]
    codes = [job.returncode for job in ended]
    assert codes == [9 if rank in killed else 0 for rank in range(ranks)], "\n".join(said)
    return said
