"""Goal: the norm of a rank's own gradient of each micro-batch equals that of a twin that trains
nothing, for each way of training; a rank with a bad batch stands out.  Training stays the same bit
for bit, nothing stays registered, and what is not seen is said.
Method: a twin of the model computes each gradient anew, and norms are taken in float64; two
processes with gloo for what ranks add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import rank_norm_job
import torch
from rank_jobs import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether._hook.model.parallel import Parallel
from bellwether._step import rank_norms
from bellwether._step.rank_norms import RankNorms, norm_of

from conftest import ROOT
from gpu import DEVICES
from models import Model, Shape, batch
from recording import Recording

SHAPE = Shape(fused=False)
EVERY, STEPS = 3, 10


def norm(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))


class Ran:
    """Norms of the micro-batches of each step, what was told, and the parameters at the end."""

    def __init__(self, norms: list[list[float]], path: Path, end: list[Tensor], said: Any) -> None:
        self.norms, self.end, self.status = norms, end, said
        self.told: dict[int, list[float]] = {}
        for step, signals in Recording(path, ended=True).steps().items() if said else ():
            if "rank_grad_norm" in signals:
                values = (signals[s].flat[0] for s in rank_norms.SIGNALS)
                self.told[step] = [float(value) for value in values]


class Way:
    """How one process trains."""

    dtype = torch.float32
    micro = 1
    explicit = False
    scale: Optional[float] = None
    every = EVERY
    steps: Optional[list[int]] = None  # That tell; None: those that are sampled, but the first.

    def wrap(self, model: nn.Module) -> Callable[[Tensor], Any]:
        return model

    def backward(self, loss: Tensor, model: nn.Module) -> None:
        loss.backward()

    def batch(self, number: int) -> Tensor:
        return batch(SHAPE, number) * (1 + number % 3)


def ran(way: Way, path: Path, device: str = "cpu", watched: bool = True) -> Ran:
    def made() -> Model:
        torch.manual_seed(0)
        return Model(SHAPE).to(device, way.dtype)

    twin, model = made(), made()
    scaler = torch.amp.GradScaler(device, init_scale=way.scale) if way.scale else None
    monitor = None
    if watched:
        monitor = bellwether.attach(
            model, record=str(path), run="norms", every=way.every, overhead_budget=1e9,
            stats="drift,rank_norms",
        )  # fmt: skip
    forward = way.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    norms: list[list[float]] = []
    for step in range(STEPS):
        twin.load_state_dict(model.state_dict())
        norms.append([])
        for part in range(way.micro):
            x = way.batch(step * way.micro + part).to(device, way.dtype)
            loss = twin(x).float().square().mean()
            gradients = torch.autograd.grad(loss, list(twin.parameters()))
            norms[-1].append(norm(list(gradients)))
            loss = forward(x).float().square().mean()
            way.backward(scaler.scale(loss) if scaler else loss, model)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        if way.explicit and monitor is not None:
            monitor.step(loss=loss)
    said: Any = None
    if monitor is not None:
        assert monitor.flush(20)
        said = monitor.status()
        assert said["errors"] == 0, said["last_error"]
        monitor.detach()
    assert all(p._backward_hooks is None for p in model.parameters())
    return Ran(norms, path, [p.detach().clone() for p in model.parameters()], said)


class Plain(Way):
    """Steps end with the next forward."""


class Told(Way):
    explicit = True


class EachStep(Way):
    every = 1


class Accumulated(Way):
    micro = 3


class Scaled(Way):
    scale = 1024.0
    micro = 2


class InBf16(Way):
    dtype = torch.bfloat16


class Compiled(Way):
    def wrap(self, model: nn.Module) -> Callable[[Tensor], Any]:
        return torch.compile(model, backend="aot_eager")  # type: ignore[no-any-return]


class CompiledTold(Compiled):
    explicit, micro = True, 2


class Checkpointed(Way):
    def wrap(self, model: nn.Module) -> Callable[[Tensor], Any]:
        return lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True)


class Asked(Way):
    """The job asks for gradients that are none of the step."""

    def backward(self, loss: Tensor, model: nn.Module) -> None:
        torch.autograd.grad(loss * 7, list(model.parameters()), retain_graph=True)
        loss.backward()


class ByEngine(Asked):
    """As Megatron-Core's pipeline: no torch.autograd.backward()."""

    micro = 2

    def backward(self, loss: Tensor, model: nn.Module) -> None:
        torch.autograd.grad(loss * 7, list(model.parameters()), retain_graph=True)
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True,
            accumulate_grad=True,
        )  # fmt: skip


WAYS = [
    Plain, Told, EachStep, Accumulated, Scaled, InBf16, Compiled, CompiledTold, Checkpointed,
    Asked, ByEngine,
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_norms_equal_those_of_a_twin(way: type[Way], device: str, tmp_path: Path) -> None:
    found = ran(way(), tmp_path / "a.bwrun", device)
    assert sorted(found.told) == list(range(way.every, STEPS, way.every))
    for step, (mean, largest) in found.told.items():
        norms = found.norms[step]
        assert mean == pytest.approx(sum(norms) / len(norms), rel=1e-5), step
        assert largest == pytest.approx(max(norms), rel=1e-5), step
    assert found.status["rank_norms"]["passes"] == way.micro
    without = ran(way(), tmp_path / "b.bwrun", device, watched=False)
    assert all(torch.equal(a, b) for a, b in zip(found.end, without.end))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have trained in every way."""
    folder = tmp_path_factory.mktemp("norms")
    run_ranks(ROOT / "tests" / "python" / "rank_norm_job.py", str(folder), *rank_norm_job.WAYS)
    return folder


@pytest.mark.parametrize("way", rank_norm_job.WAYS)
def test_each_rank_tells_its_own_before_they_are_added(way: str, folder: Path) -> None:
    _, micro, near = rank_norm_job.WAYS[way]
    at_bad_step = []
    for rank in range(2):
        kept = torch.load(folder / way / f"{rank}.pt")
        assert kept["same"]
        assert kept["said"]["passes"] == micro and kept["said"]["not_measured"] is None
        path = folder / way / ("s.bwrun" if rank == 0 else "s-rank1.bwrun")
        told = Recording(path, ended=True).steps()
        steps = [step for step, signals in told.items() if "rank_grad_norm" in signals]
        assert steps == list(range(rank_norm_job.EVERY, rank_norm_job.STEPS, rank_norm_job.EVERY))
        for step in steps:
            norms = kept["norms"][step]
            mean, largest = (told[step][s][rank, 0] for s in rank_norms.SIGNALS)
            assert mean == pytest.approx(sum(norms) / micro, rel=near), (rank, step)
            assert largest == pytest.approx(max(norms), rel=near), (rank, step)
        at_bad_step.append(told[rank_norm_job.BAD_STEP]["rank_grad_norm"][rank, 0])
    assert at_bad_step[1] > 100 * at_bad_step[0]


class Host:
    """Of a measurement without a monitor."""

    hook_seconds = 0.0

    def __init__(self) -> None:
        self.errors: list[str] = []

    def live(self) -> bool:
        return True

    def trouble(self, error: Exception, where: str) -> None:
        self.errors.append(f"{where}: {error!r}")


def measured(model: nn.Module) -> tuple[RankNorms, Host]:
    """Of a step that begins."""
    host = Host()
    norms = RankNorms(host, lambda: model, Parallel())  # type: ignore[arg-type]
    norms.begin_step(True)
    return norms, host


def told(norms: RankNorms, scale: Optional[float] = None) -> dict[str, float]:
    sample = norms.sample()
    return {b.signal: b.values[0] for b in sample.blocks(scale)} if sample is not None else {}


def test_nan_and_infinity_are_told_as_they_are() -> None:
    model = nn.Linear(3, 2, bias=False)
    for value in (math.nan, math.inf):
        norms, host = measured(model)
        for factor in (1.0, value, 2.0):
            (model(torch.ones(1, 3)).sum() * factor).backward()
        assert [str(v) for v in told(norms).values()] == [str(value)] * 2
        assert host.errors == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_norm_is_near_float64s_whatever_the_layout(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((), (0,), (5,), (4096,), (3, 70_001), (700, 900)):
        values = torch.randn(shape).to(dtype)
        for of in (values, values.mT if values.dim() == 2 else values, values.view(-1)[::2]):
            want = float(torch.linalg.vector_norm(of.double()))
            assert float(norm_of(of)) == pytest.approx(want, rel=1e-6)


def test_gradients_of_fp16_need_a_known_scale() -> None:
    model = nn.Linear(3, 2, bias=False).half()
    for scale, count in ((None, 0), (4.0, 2)):
        norms, _ = measured(model)
        (model(torch.ones(1, 3).half()).sum() * 4).backward()
        found = told(norms, scale)
        assert len(found) == count
    assert found["rank_grad_norm"] == pytest.approx(math.sqrt(6))
    norms, _ = measured(model)
    model(torch.ones(1, 3).half()).sum().backward()
    assert told(norms) == {} and norms.not_measured == rank_norms.NO_SCALE


def test_gradients_that_are_not_seen_are_named() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 3, sparse=True)
            self.out = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Any:
            return self.out(self.words(x))

    model = Words()
    norms, _ = measured(model)
    model(torch.arange(5)).sum().backward()
    out = norm([p.grad for p in model.out.parameters() if p.grad is not None])
    assert told(norms)["rank_grad_norm"] == pytest.approx(out)
    assert norms.left_out == {"words.weight": rank_norms.SPARSE}
    # As Megatron-Core's fused accumulation says that the gradient is no gradient.
    weight: Any = model.out.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(2, 3), True
    norms, _ = measured(model)
    model(torch.arange(5)).sum().backward()
    assert told(norms) == {} and norms.not_measured == rank_norms.FUSED
    assert norms.left_out["out.weight"] == rank_norms.FUSED
    weight.grad_added_to_main_grad = False
    norms, _ = measured(model)
    model(torch.arange(5)).sum().backward()
    assert norms.not_measured is None and len(told(norms)) == 2
    # ZeRO-3, and nothing at all.
    norms, _ = measured(model)
    assert told(norms) == {} and norms.not_measured == rank_norms.NONE_SEEN
    weight.ds_id = 0
    assert told(measured(model)[0]) == {}
    assert measured(model)[0].not_measured == rank_norms.FLAT


def test_a_gradient_in_parts_is_no_norm() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.inner(checkpoint(self.inner, x, use_reentrant=True))

    model = Tied()
    norms, _ = measured(model)
    norms.backward_begins()
    model(torch.ones(1, 3, requires_grad=True)).sum().backward()
    norms.backward_ends()
    assert told(norms) == {} and norms.not_measured == rank_norms.IN_PARTS


def test_a_pass_under_way_is_not_counted() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    norms, _ = measured(model)
    norms.begin_step(False)
    assert all(p._backward_hooks is None for p in model.parameters())
    model[1].weight.register_hook(lambda grad: norms.begin_step(True))
    model(torch.ones(1, 3)).sum().backward()
    model(torch.ones(1, 3)).sum().backward()
    assert norms.sample() is None or norms.passes <= 1


def test_no_gradient_is_kept_nor_copied() -> None:
    model = nn.Linear(30, 20, bias=False)
    norms, _ = measured(model)
    given: list[int] = []
    model.weight.register_hook(lambda grad: given.append(grad.data_ptr()))
    model(torch.ones(1, 30)).sum().backward()
    assert model.weight.grad is not None and given == [model.weight.grad.data_ptr()]
    assert len(told(norms)) == 2
