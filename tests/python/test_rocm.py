"""Goal: under a PyTorch for ROCm, where an AMD GPU is called cuda, no kernel is asked of a GPU.
That is said, and a model on the CPU is watched as ever.
Method: torch.version.hip is set; no such build has run here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bellwether
from bellwether._attention.attention_op import machine_lacks
from bellwether._kernels import probe
from bellwether.tools.doctor import known_findings

from models import Model, Shape, batch
from recording import Recording


@pytest.fixture(autouse=True)
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")


def test_a_gpu_of_amd_has_no_kernels() -> None:
    assert probe.available("cuda") == probe.NO_ROCM == machine_lacks(torch.device("cuda", 0))
    assert "ROCm" in probe.NO_ROCM and probe.available("cpu") is None
    known_findings()


def test_a_model_on_the_cpu_is_watched(tmp_path: Path) -> None:
    model = Model(Shape())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "a.bwrun"
    monitor = bellwether.attach(model, record=str(path), every=1, overhead_budget=1e9)
    for step in range(3):
        model(batch(model.shape, step)).square().mean().backward()
        optimizer.step()
        monitor.step(loss=1.0)
    assert monitor.flush(60) and monitor.status()["errors"] == 0
    monitor.detach()
    assert all("logit_max" in step for step in Recording(path).steps().values())
