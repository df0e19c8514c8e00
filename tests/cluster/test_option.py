"""Goal: BELLWETHER_CLUSTER=OFF builds a server in which nothing of the cluster is compiled.
Method: configure so, tests included, and read what ninja would compile; with the option on, the same shows the cluster.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiled(folder: Path) -> set[str]:
    """Our sources that bellwetherd is made of."""
    inputs = subprocess.check_output(["ninja", "-C", str(folder), "-t", "inputs", "bellwetherd"], text=True)
    paths = (os.path.relpath(line, ROOT) for line in inputs.splitlines() if line.startswith(f"{ROOT}/"))
    return {path for path in paths if path.endswith(".cc") and path.startswith("server/")}


@pytest.mark.parametrize("option", ["ON", "OFF"])
def test_the_option_decides_whether_the_cluster_is_compiled(option: str, tmp_path: Path) -> None:
    command = ["cmake", "--preset", "cpu", "-B", str(tmp_path), "-DBELLWETHER_TESTS=ON", f"-DBELLWETHER_CLUSTER={option}"]
    configured = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert configured.returncode == 0, configured.stderr
    found = compiled(tmp_path)
    assert "server/engine/shard.cc" in found, "ninja lists nothing of ours"
    of_cluster = {path for path in found if path.startswith("server/cluster/")}
    assert bool(of_cluster) == (option == "ON"), of_cluster
    assert ("server/app/cluster_part.cc" in found) == (option == "ON")
    assert ("server/app/cluster_part_none.cc" in found) == (option == "OFF")
