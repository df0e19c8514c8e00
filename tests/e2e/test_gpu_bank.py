"""Goal: a server whose detectors run on a GPU tells the same alerts as one without, also when
the device fails in the middle of a run; it says where they run.
Method: the real bellwetherd with a library that stands for the GPU (tests/support/fake_gpu_bank.cc).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server

RECORDED = ROOT / "tests/testdata/runs/gpt-flash-s4.bwrun"
RUN = "gpt-flash-s4"
FAKE = BIN / "libbellwether_fake_gpu_bank.so"


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


@pytest.mark.parametrize("passes", ["1000000", "300"])
def test_the_alerts_are_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: str) -> None:
    monkeypatch.setenv("BELLWETHER_FAKE_BANK_PASSES", passes)
    with Server(folder(tmp_path, "cpu"), "", "--gpu=off") as server:
        server.run("run", "import", str(RECORDED))
        expected = server.alert_log(RUN)
        assert 'cuda="off"' in server.get("/metrics")
    with Server(folder(tmp_path, "gpu"), "", "--gpu=on", f"--gpu.library={FAKE}") as server:
        assert server.call("GetServerInfo")["backend"] == "cuda"
        server.run("run", "import", str(RECORDED))
        assert server.alert_log(RUN) == expected
        metrics = server.get("/metrics")
    assert len(expected) >= 3
    assert 'cuda="on"' in metrics
    failed = passes == "300"
    assert f'bellwether_degraded{{reason="gpu"}} {int(failed)}' in metrics
    ticks = {
        backend: sum(
            int(float(line.split()[-1]))
            for line in metrics.splitlines()
            if line.startswith(f'bellwether_detector_tick_seconds_count{{backend="{backend}"}}')
        )
        for backend in ("cpu", "cuda")
    }
    assert (ticks["cpu"] > 0) == failed
    assert ticks["cuda"] == 300 if failed else ticks["cuda"] > 300


def test_without_a_gpu_on_refuses_to_start(tmp_path: Path) -> None:
    result = subprocess.run(
        [str(BIN / "bellwetherd"), f"--storage.path={tmp_path}", "--gpu=on", "--gpu.library=/no/such.so"],
        capture_output=True,
        text=True,
        env={**os.environ},
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "gpu is on, but" in result.stderr and "/no/such.so" in result.stderr
