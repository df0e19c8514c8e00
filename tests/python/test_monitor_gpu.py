"""Goal: on a GPU watching waits for nothing, launches nothing between samples and changes no
result; what it costs there is known.  Method: small models in bf16 on the GPU; skipped without
one, unless BELLWETHER_REQUIRE_GPU=1.  The statistics themselves: test_statistics.py.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import bellwether

from gpu import LACKS, SKIPPED
from models import Model, Shape, batch
from recording import Recording

if SKIPPED:
    pytest.skip(LACKS, allow_module_level=True)

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # For deterministic products.

SHAPE = Shape(layers=2, heads=4, kv_heads=2, dim=64, width=256, dtype=torch.bfloat16)


class Job:
    """A model that trains."""

    def __init__(self, shape: Shape = SHAPE, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = Model(shape).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.batches = [batch(shape, i, tokens=256, device="cuda") for i in range(4)]

    def step(self, number: int) -> Tensor:
        loss = self.model(self.batches[number % 4]).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def watch(job: Job, path: Path, **how: Any) -> Any:
    return bellwether.attach(job.model, record=str(path), **{"every": 4, "run": "gpu", **how})


def test_nothing_waits_for_the_gpu(tmp_path: Path) -> None:
    job = Job()
    with watch(job, tmp_path / "a.bwrun", every=2) as monitor:
        monitor.step(loss=job.step(0))  # Libraries are loaded, layouts found.
        monitor.step(loss=job.step(1))
        torch.cuda.synchronize()
        mode: Any = torch.cuda.set_sync_debug_mode
        mode("error")
        try:
            for number in range(2, 12):
                monitor.step(loss=job.step(number))
        finally:
            mode("default")
        assert monitor.flush(20)
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
    steps = Recording(tmp_path / "a.bwrun").steps()
    assert sorted(steps) == list(range(12))
    assert all("loss" in steps[i] for i in steps)
    assert all(("rows" in steps[i]) == (i % 2 == 0) for i in steps)
    assert all(("wq_sigma" in steps[i]) == (i % 2 == 0) for i in steps)


def kernels(job: Job, numbers: range, monitor: Optional[Any]) -> Counter[str]:
    """What ran on the GPU, by name."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for number in numbers:
            job.step(number)
            if monitor is not None:
                monitor.step()
        torch.cuda.synchronize()
    return Counter(event.name for event in trace.events() if event.device_type.name == "CUDA")


def test_no_launch_between_samples(tmp_path: Path) -> None:
    job = Job()
    for number in range(3):
        job.step(number)
    alone = kernels(job, range(3), None)
    with watch(job, tmp_path / "a.bwrun", every=4, overhead_budget=1e9) as monitor:
        for number in range(5):  # The step behind is one after a sample.
            job.step(number)
            monitor.step()
        between = kernels(job, range(5, 8), monitor)
        sampled = kernels(job, range(8, 11), monitor)
    assert between == alone
    assert sum(sampled.values()) > sum(alone.values())


@pytest.mark.parametrize("rows", [0, 16])
def test_the_run_is_the_same_bit_for_bit(rows: int, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        shape = Shape(layers=2, heads=4, kv_heads=4, dim=64, width=256, dtype=torch.bfloat16)
        alone = [float(job.step(i)) for job in [Job(shape)] for i in range(30)]
        job = Job(shape)
        with watch(job, tmp_path / "a.bwrun", every=3, rows=rows) as monitor:
            watched = []
            for number in range(30):
                loss = job.step(number)
                monitor.step(loss=loss)
                watched.append(float(loss))
            assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert watched == alone


def test_the_price_on_the_gpu_is_measured(tmp_path: Path) -> None:
    job = Job()
    with watch(job, tmp_path / "a.bwrun", every=4, overhead_budget=1e9) as monitor:
        for number in range(40):
            job.step(number)
            monitor.step()
        assert monitor.flush(20)
        kernels = monitor._frames.device_seconds
        assert kernels > 0 and monitor._clock.sample_seconds() is not None
    steps = Recording(tmp_path / "a.bwrun").steps()
    # The CPU's time is hidden behind the GPU's: only a sampled step has a price.
    assert steps[39]["hook_seconds"][0, 0] == 0
    assert steps[36]["hook_seconds"][0, 0] >= 0.5 * kernels


def test_a_shape_that_no_kernel_takes_is_said_and_the_rest_measured(tmp_path: Path) -> None:
    shape = Shape(layers=1, heads=1, kv_heads=1, dim=320, width=320, dtype=torch.bfloat16)
    job = Job(shape)
    with watch(job, tmp_path / "a.bwrun", every=1) as monitor:
        for number in range(3):
            job.step(number)
            monitor.step()
        status = monitor.status()
        assert status["errors"] == 0 and status["live"]
        assert any("at most 256" in note for note in status["layers"][0]["notes"]), status
        assert monitor.flush(20)


def test_captured_steps_are_left_alone(tmp_path: Path) -> None:
    """A whole step in a CUDA graph: training goes on, and the layer says why it is not seen."""
    job = Job()
    with watch(job, tmp_path / "a.bwrun", every=1) as monitor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for number in range(3):
                job.step(number)
                monitor.step()
        torch.cuda.current_stream().wait_stream(side)
        assert monitor.flush(20)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = job.model(job.batches[0]).float().square().mean()
            loss.backward()
        graph.replay()
        torch.cuda.synchronize()
        assert bool(torch.isfinite(loss))
        notes = monitor.status()["layers"][0]["notes"]
        assert any("CUDA graph" in note for note in notes), notes
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
