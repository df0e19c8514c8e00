"""Goal: lr.scale acts on every step, whatever sets the rate, and leaves no trace when undone.
Method: SGD on one weight with gradient 1, so a step is the rate; torch's own schedulers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from asking import Training

RATE = 0.125


class Scaled(Training):
    """Trains without a gradient of its own: the weight `probe` moves by the rate of each step."""

    def __init__(self, path: Optional[Path], how: Callable[[Any], Any], tensor: bool) -> None:
        def make(parameters: Any) -> torch.optim.Optimizer:
            groups = [{"params": list(parameters)}, {"params": [self.probe], "lr": RATE}]
            rate: Any = torch.tensor(1e-3) if tensor else 1e-3
            if tensor:
                groups[1]["lr"] = torch.tensor(RATE)
            return torch.optim.SGD(groups, lr=rate, foreach=False)

        self.probe = torch.zeros((), dtype=torch.float64, requires_grad=True)
        super().__init__(path, optimizer=make)
        self.schedule = how(self.optimizer)
        self.moves: list[float] = []
        self.rates: list[float] = []  # As the loop sees them behind the step.

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.probe.grad = torch.ones((), dtype=torch.float64)
            before = float(self.probe)
            super().step()
            self.moves.append(before - float(self.probe))
            self.rates.append(float(self.optimizer.param_groups[1]["lr"]))
            if self.schedule is not None:
                self.schedule.step()


class ByHand:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = RATE / (1 + self.count)


schedulers = torch.optim.lr_scheduler
WAYS: dict[str, Callable[[Any], Any]] = {
    "constant": lambda optimizer: None,
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda step: 0.9),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 12),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, RATE, total_steps=20),
    "by hand": ByHand,
}


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_scheduler_survives(way: str, tensor: bool, tmp_path: Path) -> None:
    if tensor and way == "by hand":
        pytest.skip("a number replaces the tensor")
    plain = Scaled(None, WAYS[way], tensor)
    plain.step(12)
    scaled = Scaled(tmp_path / "a.bwrun", WAYS[way], tensor)
    scaled.step(3)
    first = scaled.ask("lr.scale", value=0.5)
    scaled.step(4)  # The next boundary is behind the first of them.
    second = scaled.ask("lr.scale", value=0.25)
    scaled.step(2)
    for id in (first, second):
        scaled.ask("lr.scale", undoes=id)
    scaled.step(3)
    assert scaled.rates == plain.rates
    factors = [1] * 4 + [0.5] * 4 + [0.125] * 2 + [1] * 2
    wanted = [rate * factor for rate, factor in zip(plain.moves, factors)]
    assert scaled.moves == pytest.approx(wanted, rel=1e-6)
    groups = [g["lr"] for g in scaled.optimizer.param_groups]
    assert [type(lr) for lr in groups] == [Tensor if tensor else float] * 2
    scaled.ends()


def test_told_to_the_server_and_kept_out_of_checkpoints(tmp_path: Path) -> None:
    from recording import Recording

    training = Scaled(tmp_path / "a.bwrun", WAYS["constant"], False)
    training.step(2)
    training.ask("lr.scale", value=0.5)
    training.step(3)
    assert training.optimizer.state_dict()["param_groups"][0]["lr"] == 1e-3
    training.ends()
    recorded = Recording(tmp_path / "a.bwrun", ended=True)
    rates = {step: float(s["learning_rate"][0, 0]) for step, s in recorded.steps().items()}
    assert list(rates.values()) == pytest.approx([1e-3, 1e-3, 1e-3, 5e-4, 5e-4])
    assert [(e.step, e.value) for e in recorded.events if e.kind == 1] == [(3, 5e-4)]


def compiled(training: Training, how: str) -> None:
    """From here on the training steps by what torch.compile makes of its optimizer's step."""
    step = training.optimizer.step

    def by_hand() -> None:
        step()

    training.take_step = torch.compile(step if how == "step" else by_hand, backend="eager")


@pytest.mark.parametrize("told", [True, False], ids=["told", "seen"])
@pytest.mark.parametrize("how", ["step", "function"])
@pytest.mark.parametrize("eager", [0, 3])
def test_a_compiled_step_is_said_to_ignore_the_rate(
    eager: int, how: str, told: bool, tmp_path: Path
) -> None:
    training = Training(
        tmp_path / "a.bwrun", told=told,
        optimizer=lambda p: torch.optim.AdamW(p, lr=RATE, foreach=False),
    )  # fmt: skip
    training.step(eager)
    before = training.ask("lr.scale", value=0.5) if eager else None
    training.step(eager)
    compiled(training, how)
    training.step(6)
    answer = training.answer(training.ask("lr.scale", value=0.5))
    assert answer is not None and "optimizer.step() is compiled" in answer["reason"]
    status = training.monitor.status()
    assert status["actions"]["in_force"] == []
    if before is not None:
        assert training.answer(before) == {"applied": True, "step": 4, "reason": "factor 0.5"}
    training.step(3)
    lost = 0 if told or not eager else 3  # Until it is seen that the optimizer has gone quiet.
    assert training.monitor.status()["step"] >= training.steps - lost - 1
    training.ends()


def test_an_optimizer_that_raises_leaves_no_scaled_rate_behind(tmp_path: Path) -> None:
    class Raises(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                raise RuntimeError("planted")
            return super().step(closure)

    training = Training(tmp_path / "a.bwrun", optimizer=lambda p: Raises(p, lr=RATE))
    training.step(2)
    training.ask("lr.scale", value=0.5)
    training.step(2)
    Raises.broken = True
    with pytest.raises(RuntimeError, match="planted"):
        training.step()
    Raises.broken = False
    training.monitor.detach()
    assert training.optimizer.param_groups[0]["lr"] == RATE
