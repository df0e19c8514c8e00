"""Goal: on a GPU watching waits for nothing, launches nothing between samples and changes no
result; what it costs there is known.  Method: small models in bf16 on the GPU; skipped without
one, unless BELLWETHER_REQUIRE_GPU=1.  The statistics themselves: test_statistics.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
import torch._dynamo
from comparing import LAWS, OF_LINEAR
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import bellwether
from bellwether._hook.compiled.compiled_taps import TORCH_MIN
from bellwether.settings import STATS

from gpu import LACKS, SKIPPED
from models import Attention, Model, Shape, batch
from recording import Recording

if SKIPPED:
    pytest.skip(LACKS, allow_module_level=True)

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # For deterministic products.

SHAPE = Shape(layers=2, heads=4, kv_heads=2, dim=64, width=256, dtype=torch.bfloat16)


class Job:
    """A model that trains."""

    def __init__(
        self, shape: Shape = SHAPE, seed: int = 1, kind: type[Attention] = Attention
    ) -> None:
        torch.manual_seed(seed)
        self.model = Model(shape, kind=kind).cuda()
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


COMPILES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= TORCH_MIN


@pytest.mark.skipif(not COMPILES, reason="compiled modules are not watched with this torch")
def test_compiled_blocks_tell_what_eager_ones_tell(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, kv_heads=SHAPE.heads)
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for name in ("eager", "compiled"):
            job = Job(shape)
            with watch(job, tmp_path / f"{name}.bwrun", overhead_budget=1e9) as monitor:
                if name == "compiled":
                    for block in job.model.blocks:
                        block.compile(fullgraph=True)
                for number in range(9):
                    monitor.step(loss=job.step(number))
                assert [layer.fired > 0 for layer in monitor.layers] == [True] * shape.layers
                if name == "compiled":
                    between = kernels(job, range(9, 12), monitor)
                    assert not any("bellwether" in kernel for kernel in between), between
                    sampled = kernels(job, range(12, 15), monitor)
                    assert any("bellwether" in kernel for kernel in sampled), sampled
                assert monitor.flush(20)
                assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
            found.append(Recording(tmp_path / f"{name}.bwrun").steps())
    finally:
        torch.use_deterministic_algorithms(False)
    eager, compiled = found
    for step in range(9):
        assert compiled[step].keys() == eager[step].keys() - OF_LINEAR
        assert ("rows" in eager[step]) == (step % 4 == 0)
    for signal in ("rows", "common_mode_sum", "spread_sum", "key_gradient_sum", "wq_sigma"):
        assert np.allclose(compiled[8][signal], eager[8][signal], rtol=3e-2), signal


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


@pytest.mark.parametrize("law_layers, compiled", [(None, False), (2, False), (2, True)])
def test_the_laws_arrive_and_hold(
    law_layers: Optional[int], compiled: bool, tmp_path: Path
) -> None:
    def begin(job: Job) -> Job:
        for block in job.model.blocks if compiled else ():
            block.compile(fullgraph=True)
        return job

    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    try:
        alone = [float(job.step(i)) for job in [begin(Job())] for i in range(12)]
        torch._dynamo.reset()
        job, watched = Job(), []
        settings = bellwether.Settings(law_layers=law_layers)
        how = {"every": 1, "overhead_budget": 1e9, "settings": settings}
        with watch(job, tmp_path / "a.bwrun", **how) as monitor:
            begin(job)
            for number in range(12):
                watched.append(job.step(number))
                monitor.step()
            assert monitor.flush(20)
            status = monitor.status()
            assert status["errors"] == 0, status["last_error"]
            assert not any(layer["without_laws"] for layer in status["layers"]), status["layers"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert [float(loss) for loss in watched] == alone
    asked = compared = 0
    for number, sent in Recording(tmp_path / "a.bwrun").steps().items():
        if "law_a3" not in sent:
            continue
        for layer in range(SHAPE.layers):
            names = [name for name in STATS["laws"] if name in sent]
            of = {name: sent[name][layer].astype(np.float64) for name in names}
            if np.isnan(of["law_a3"]).all():
                continue
            asked += 1
            for law in ("a1", "a2", "a3", "a4"):
                alike = of.get(f"law_{law}_alike", 0.0)
                rows = {f"law_{law}", *(f"law_{law}_{i}" for i in range(8))}
                for name in rows & of.keys():
                    z = (abs(of[name]) - alike) / np.sqrt(of[f"law_{law}_variance"])
                    assert (z < 6.5).all(), (number, layer, name, z)
            assert all((of[f"{name}_nonfinite"] == 0).all() for name in ("do", "dq", "dk", "dv"))
            if "shadow_dq_rest" in of and not np.isnan(of["shadow_dq_rest"]).all():
                compared += 1
                assert (of["shadow_dq_rest"] < 10 * of["shadow_dq_variance"]).all()
    assert asked >= (9 if law_layers is None else 18) and compared >= 9


def test_the_price_on_the_gpu_is_measured(tmp_path: Path) -> None:
    job = Job()
    with watch(job, tmp_path / "a.bwrun", every=4, overhead_budget=1e9) as monitor:
        for number in range(40):
            job.step(number)
            monitor.step()
        assert monitor.flush(20)
        kernels = monitor.steps.reporter.frames.device_seconds
        assert kernels > 0 and monitor.steps.reporter.cost.price.by_steps()
        assert 0 < monitor.overhead() < 1
    steps = Recording(tmp_path / "a.bwrun").steps()
    # A small job's GPU hides little of the CPU's time, and what it does not hide counts.
    assert 0 <= steps[39]["hook_seconds"][0, 0] < steps[36]["hook_seconds"][0, 0]
    assert steps[36]["hook_seconds"][0, 0] >= 0.5 * kernels


def test_unsupported_shape_is_noted_and_the_rest_measured(tmp_path: Path) -> None:
    shape = Shape(layers=1, heads=1, kv_heads=1, dim=640, width=640, dtype=torch.bfloat16)
    job = Job(shape)
    with watch(job, tmp_path / "a.bwrun", every=1) as monitor:
        for number in range(3):
            job.step(number)
            monitor.step()
        status = monitor.status()
        assert status["errors"] == 0 and status["live"]
        assert any("at most 576" in note for note in status["layers"][0]["notes"]), status
        assert monitor.flush(20)


class Replayed(Job):
    """The same job; once captured, a step is one replay of a CUDA graph: no Python runs in it."""

    def __init__(self, capture_at: int, shape: Shape = SHAPE) -> None:
        super().__init__(shape)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.x, self.capture_at = self.batches[0].clone(), capture_at
        self.graph: Optional[torch.cuda.CUDAGraph] = None
        self.side = torch.cuda.Stream()

    def _whole_step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self, number: int) -> Tensor:
        self.x.copy_(self.batches[number % 4])
        if number < self.capture_at:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                loss = self._whole_step()
            torch.cuda.current_stream().wait_stream(self.side)
            return loss
        if self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = self._whole_step()
        self.graph.replay()
        return self.loss


@pytest.mark.parametrize("rows", [0, 16])
def test_a_cuda_graph_tells_what_eager_steps_tell(rows: int, tmp_path: Path) -> None:
    """The same rows of the same steps; in others its kernels look at a flag and leave."""
    torch.use_deterministic_algorithms(True)
    try:
        eager, graph = (recorded(at, rows, tmp_path) for at in (1000, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert sorted(graph) == sorted(eager) == list(range(14))
    for step, signals in eager.items():
        assert ("rows" in signals) == (step % 4 == 0)
        told = signals.keys() - LAWS  # Graphs are not asked about them.
        assert graph[step].keys() - LAWS == told, step
        for signal in told - {"step_seconds", "hook_seconds"}:
            want, got = signals[signal], graph[step][signal]
            finite = abs(want[want == want])
            slack = 2.0 if "_rows" in signal else 2e-2 * float(finite.max(initial=1e-6))
            same = (abs(want - got) <= slack) | (want == got) | ((want != want) & (got != got))
            assert same.all(), (step, signal, want, got)
        if step % 4 == 0:
            assert (graph[step]["rows"] == signals["rows"]).all() and signals["rows"].min() > 0


def recorded(capture_at: int, rows: int, folder: Path) -> dict[int, dict[str, Any]]:
    """What 14 steps tell; from `capture_at` on they are replayed."""
    shape = dataclasses.replace(SHAPE, kv_heads=SHAPE.heads)
    job = Replayed(capture_at, shape)
    path = folder / f"{capture_at}.bwrun"
    with watch(job, path, every=4, rows=rows, overhead_budget=1e9) as monitor:
        for number in range(5):
            monitor.step(loss=job.step(number))
        fired = [layer.fired for layer in monitor.layers]
        for number in range(5, 14):
            monitor.step(loss=job.step(number))
        assert ([layer.fired for layer in monitor.layers] == fired) == (capture_at < 14)
        assert monitor.flush(20)
        status = monitor.status()
        assert status["errors"] == 0 and status["live"], status["last_error"]
    return Recording(path).steps()


def test_a_graph_outlives_its_monitor(tmp_path: Path) -> None:
    job = Replayed(2)
    monitor = watch(job, tmp_path / "a.bwrun", every=1)
    for number in range(4):
        monitor.step(loss=job.step(number))
    monitor.detach()
    del monitor
    before = float(job.step(4))
    for number in range(5, 25):
        job.step(number)
    torch.cuda.synchronize()
    assert float(job.loss) < before


def test_a_graph_captured_before_anything_was_seen_is_left_alone(tmp_path: Path) -> None:
    job = Replayed(0)
    with watch(job, tmp_path / "a.bwrun", every=1) as monitor:
        warm = Replayed(5)  # Loads the libraries, which no capture may.
        for number in range(3):
            warm.step(number)
        for number in range(3):
            monitor.step(loss=job.step(number))
        notes = monitor.status()["layers"][0]["notes"]
        assert any("CUDA graph" in note for note in notes), notes
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
