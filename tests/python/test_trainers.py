"""Goal: every optimizer step of the model is seen, once: also after its parameters were replaced,
after another optimizer went on, with several of them in each step or in turns.
Method: short runs of each kind, whose frames are counted, without mon.step(); the taking of turns
on the class itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bellwether
from bellwether._step.trainers import Trainers

from models import Model, Shape, batch
from recording import Recording

SHAPE = Shape(layers=1, fused=False)


def attached(model: nn.Module, path: Path) -> Any:
    return bellwether.attach(model, record=str(path), run="t", every=2, overhead_budget=1e9)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        model(batch(SHAPE, step, 1, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ended(monitor: Any, path: Path) -> list[int]:
    """The steps that were told."""
    assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()
    monitor.detach()
    recorded = Recording(path, ended=True)
    steps = recorded.steps()
    assert all(("rows" in signals) == (step % 2 == 0) for step, signals in steps.items())
    return [frame.step for frame in recorded.frames]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def fsdp2(model: Model) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def fsdp1(model: Model, original: bool = False) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))


def fsdp1_original(model: Model) -> nn.Module:
    return fsdp1(model, True)


def filled(model: Model) -> nn.Module:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
    return model


@pytest.mark.parametrize(
    "replace", [fsdp2, fsdp1, fsdp1_original, filled], ids=lambda f: f.__name__
)
def test_parameters_that_are_replaced_after_attach(
    replace: Any, tmp_path: Path, one_rank: None
) -> None:
    with torch.device("meta" if replace is filled else "cpu"):
        model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    run = replace(model)
    train(run, sgd(run), 5)
    assert ended(monitor, tmp_path / "a.bwrun") == [0, 1, 2, 3, 4]
    steps = Recording(tmp_path / "a.bwrun").steps()
    assert all(torch.tensor(steps[s]["wq_sigma"]).isfinite().all() for s in (0, 2, 4))


def test_another_optimizer_goes_on_while_the_first_is_still_there(tmp_path: Path) -> None:
    model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    first, second = sgd(model), sgd(model)
    train(model, first, 5)
    train(model, second, 6)
    assert ended(monitor, tmp_path / "a.bwrun") == list(range(11))


def test_an_optimizer_a_step(tmp_path: Path) -> None:
    model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    for _ in range(6):
        train(model, sgd(model), 1)
    assert len(monitor.steps.ends.trainers) == 1
    assert ended(monitor, tmp_path / "a.bwrun") == list(range(6))


def test_two_optimizers_in_every_step(tmp_path: Path) -> None:
    model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    parts = [p for p in model.parameters()]
    pair = [torch.optim.SGD(parts[:2], lr=0.01), torch.optim.AdamW(parts[2:], lr=0.01)]
    for step in range(6):
        model(batch(SHAPE, step, 1, 8)).square().mean().backward()
        for optimizer in pair if step % 2 else reversed(pair):
            optimizer.step()
    assert ended(monitor, tmp_path / "a.bwrun") == list(range(6))


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_an_optimizer_for_each_weight_within_the_backward(
    checkpointing: Any, tmp_path: Path
) -> None:
    model = Model(Shape(layers=3, fused=False), checkpointing=checkpointing)
    monitor = attached(model, tmp_path / "a.bwrun")
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for step in range(6):
        model(batch(SHAPE, step, 1, 8)).square().mean().backward()
    assert monitor.flush(20)
    assert monitor.status()["step"] == 6
    monitor.detach()


def test_passes_without_a_step_are_told_also_between_samples(tmp_path: Path) -> None:
    model = Model(SHAPE)
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="b", every=50) as monitor:
        train(model, sgd(model), 2)
        assert not monitor.steps.samples_step() or monitor.flush()
        for _ in range(64):
            model(batch(SHAPE, 0, 1, 4)).sum().backward()
        assert not monitor.steps.samples_step() and not monitor.steps.ends.warned
        model(batch(SHAPE, 0, 1, 4)).sum().backward()
        assert monitor.steps.ends.warned


class Turns:
    """Optimizers of one model; `steps` says which of them ended a step of it."""

    def __init__(self, count: int) -> None:
        self.weight = nn.Parameter(torch.zeros(1))
        self.optimizers = [torch.optim.SGD([self.weight], lr=0.1) for _ in range(count)]
        self.trainers = Trainers(lambda: [self.weight])

    def steps(self, order: str) -> str:
        """`order`: f = a forward pass, a digit = a step of that optimizer."""
        ended = ""
        for what in order:
            if what == "f":
                self.trainers.forward()
                continue
            optimizer = self.optimizers[int(what)]
            assert self.trainers.trains(optimizer)
            ended += what if self.trainers.ends_step(optimizer) else ""
        return ended


@pytest.mark.parametrize(
    ("order", "ended"),
    [
        ("f0f0f1f1f1", "00111"),  # One after the other.
        ("f0f0f1f1f0f0f0", "001100"),  # And back: the first of them is known already.
        ("f0f1f0f1f0f1", "000"),  # In turns.
        ("f01f01f10f10", "0011"),  # Together.
        ("f0f01f0f01f0f01", "000000"),  # One of them every other time.
        ("f0011", "001"),  # Where the forward passes are not known.
        ("0000111", "000011"),
    ],
)
def test_the_right_optimizer_ends_the_step(order: str, ended: str) -> None:
    assert Turns(2).steps(order) == ended


def test_other_optimizer_is_asked_seldom_and_may_become_trainer() -> None:
    asked: list[int] = []
    own, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def parameters() -> list[nn.Parameter]:
        asked.append(1)
        return [own]

    trainers = Trainers(parameters)
    stranger = torch.optim.SGD([other], lr=0.1)
    assert not any(trainers.trains(stranger) for _ in range(1000))
    assert len(asked) == 10  # 1, 2, 4 ... 512
    stranger.add_param_group({"params": [own]})
    assert trainers.trains(stranger) and trainers.known() == [stranger]
    count = len(asked)
    assert all(trainers.trains(stranger) for _ in range(100)) and len(asked) == count
    del stranger
    assert trainers.known() == []
