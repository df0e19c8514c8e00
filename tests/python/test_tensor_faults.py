"""Goal: a fault that is put into a small training by hand is seen within two samples that cover the
place: in the signals of its parameters, or by an own rule on them.  Without one there is no alert.
Method: a language model of two blocks, healthy and with one fault each, and the server's judge over
its recording.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_tensors import Told, told_in
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import bellwether
from bellwether.settings import STATS

from models import Attention, Block, Shape
from recording import replayed_alerts

SHAPE = Shape(fused=False, width=32)
WORDS = 64
AT = 30  # The first step with the fault.
STEPS = AT + 10
LATE = 100  # The same, where there is a past by then.
PASTS = "thresholds: {context: {warmup_steps: 0}}"


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SHAPE.width)
        self.blocks = nn.ModuleList(Block(SHAPE, Attention) for _ in range(SHAPE.layers))
        self.norm = nn.LayerNorm(SHAPE.width)
        self.head = nn.Linear(SHAPE.width, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclasses.dataclass
class Training:
    model: Language
    optimizer: AdamW
    step: int = 0
    scale: float = 1.0  # Of the loss.

    @property
    def faulty(self) -> bool:
        return self.step >= AT


@dataclasses.dataclass
class Fault:
    begins: Callable[[Training], None] = lambda t: None  # Before the step.
    gradients: Callable[[Training], None] = lambda t: None  # Before the optimizer's.
    zeroes: Callable[[Training], bool] = lambda t: True
    steps: Callable[[Training], bool] = lambda t: True
    rate: Callable[[int], float] = lambda step: min(1.0, step / 4)
    without: str = ""  # Parameters that the optimizer is not given.


def batch_of(step: int) -> Tensor:
    """Words that follow one another by a rule, with every word in it."""
    make = torch.Generator().manual_seed(step)
    first = torch.randint(WORDS, (8, 1), generator=make)
    return (first + 5 * torch.arange(65)) % WORDS


class Silent(AdamW):
    """Its step may do nothing."""

    skips = False

    def step(self, closure: Any = None) -> Any:
        return None if self.skips else super().step(closure)


def trained(path: Path, fault: Fault, steps: int = STEPS) -> tuple[Told, list[Any]]:
    torch.manual_seed(0)
    model = Language()
    monitor = bellwether.attach(
        model, run="faults", record=str(path), every=1, overhead_budget=1e9,
        stats=frozenset(STATS) - {"modules", "experts", "fp8"},
    )  # fmt: skip
    held = [p for n, p in model.named_parameters() if not fault.without or fault.without not in n]
    optimizer = Silent(held, 3e-3)
    schedule = LambdaLR(optimizer, lambda step: fault.rate(step))
    training = Training(model, optimizer)
    for step in range(steps):
        training.step = step
        fault.begins(training)
        if fault.zeroes(training):
            optimizer.zero_grad()
        words = batch_of(step)
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        (training.scale * loss).backward()
        fault.gradients(training)
        optimizer.skips = not fault.steps(training)
        optimizer.step()
        schedule.step()
        if step % 8 == 7:  # What a busy machine does not take in time loses its tensors.
            assert monitor.flush(60)
    status = monitor.status()
    assert status["errors"] == 0 and status["live"], status["last_error"]
    monitor.detach()
    return told_in(path), replayed_alerts(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("healthy")


@functools.cache
def healthy(folder: Path) -> tuple[Path, Told, list[Any]]:
    """A training without a fault: its recording, what it told, and its alerts."""
    path = folder / "a.bwrun"
    return path, *trained(path, Fault(), 2 * LATE)


def of_all(told: Told, step: int, signal: str) -> dict[str, float]:
    return {name: of[signal] for name, of in told[step].items() if signal in of}


def median(values: dict[str, float]) -> float:
    return sorted(values.values())[len(values) // 2]


def norms(told: Told, step: int) -> dict[str, float]:
    return {n: math.sqrt(x) for n, x in of_all(told, step, "tensor_grad_sumsq").items()}


def test_a_healthy_training_has_no_alert(folder: Path) -> None:
    path, told, alerts = healthy(folder)
    assert alerts == [] and jumps(path) == "[]" and of_their_past(path) == []
    assert set(of_all(told, 50, "tensor_moved").values()) == {1.0}


def named(alerts: list[Any]) -> str:
    (alert,) = alerts
    assert alert["rule"] == "frozen" and alert["severity"] == "warning", alert
    return str(alert["summary"])


def still(told: Told, step: int) -> set[str]:
    return {name for name, moved in of_all(told, step, "tensor_moved").items() if moved == 0}


def test_nothing_moves_where_a_step_is_skipped_silently(tmp_path: Path) -> None:
    told, alerts = trained(tmp_path / "a.bwrun", Fault(steps=lambda t: not t.faulty), AT + 2)
    assert still(told, AT - 1) == set() and still(told, AT) == set(told[AT])
    assert "the optimizer's step changes nothing" in named(alerts)
    assert f"the step may be skipped, since step {AT}" in named(alerts)


def test_nothing_moves_once_a_scheduler_is_at_zero(tmp_path: Path) -> None:
    fault = Fault(rate=lambda step: max(0.0, 1 - step / AT))
    told, alerts = trained(tmp_path / "a.bwrun", fault, AT + 2)
    assert still(told, AT - 1) == set() and still(told, AT) == set(told[AT])
    assert f"the learning rate is 0, since step {AT}" in named(alerts)


def test_a_layer_that_no_optimizer_has_has_gradients(tmp_path: Path) -> None:
    told, alerts = trained(tmp_path / "a.bwrun", Fault(without="blocks.1."), 3)
    assert still(told, 1) == {name for name in told[1] if "blocks.1." in name}
    assert min(norms(told, 1).values()) > 0
    assert "parameters have a gradient and do not move: blocks.1." in named(alerts)
    assert "blocks.0." not in named(alerts) and "head" not in named(alerts)


def test_a_layer_that_stops_training_does_not_move(tmp_path: Path) -> None:
    def freeze(t: Training) -> None:
        if t.step == AT:
            frozen = {id(p) for n, p in t.model.named_parameters() if n.startswith("blocks.0.")}
            (group,) = t.optimizer.param_groups
            group["params"] = [p for p in group["params"] if id(p) not in frozen]

    told, alerts = trained(tmp_path / "a.bwrun", Fault(begins=freeze), AT + 2)
    assert still(told, AT - 1) == set()
    assert still(told, AT) == {name for name in told[AT] if "blocks.0." in name}
    assert "parameters have a gradient and do not move: blocks.0." in named(alerts)


def test_a_gradient_that_is_not_finite_names_its_parameter(tmp_path: Path) -> None:
    def spoil(t: Training) -> None:
        if t.faulty:
            for name in ("blocks.0.attention.out.weight", "embed.weight"):
                grad = t.model.get_parameter(name).grad
                assert grad is not None
                grad[0, 0] = math.nan

    _, alerts = trained(tmp_path / "a.bwrun", Fault(gradients=spoil), AT + 1)
    (alert,) = alerts
    assert alert["rule"] == "nonfinite" and alert["severity"] == "critical"
    assert "of the gradient of blocks.0.attention.out.weight" in alert["summary"]


def test_gradients_that_are_not_zeroed_pile_up(folder: Path, tmp_path: Path) -> None:
    _, well, _ = healthy(folder)
    told, _ = trained(tmp_path / "b.bwrun", Fault(zeroes=lambda t: t.step <= AT))
    for step in range(AT + 2, STEPS):
        ratios = {n: x / norms(well, step)[n] for n, x in norms(told, step).items()}
        assert median(ratios) > 1.2 * (step - AT) ** 0.5, step


RULES = """
thresholds: {context: {warmup_steps: 0}}
rules:
- {name: tensor_jumps, signal: tensor_grad_max, scope: row, detector: impulse, scale: log,
   direction: both, sigmas: 10, window_batches: 16, batch_steps: 1, hold_batches: 2, stage: 1,
   severity: info}
"""


def jumps(path: Path) -> str:
    """The alerts of an own rule."""
    rules = path.with_suffix(".yml")
    rules.write_text(RULES)
    alerts = replayed_alerts(path, "--rules", str(rules))
    return str([alert for alert in alerts if alert["rule"] == "tensor_jumps"])


def test_gradients_that_are_unscaled_twice_vanish(tmp_path: Path) -> None:
    scale = 2.0**16

    def scaled(t: Training) -> None:
        t.scale = scale

    def unscale(t: Training) -> None:
        for p in t.model.parameters():
            assert p.grad is not None
            p.grad /= scale**2 if t.faulty else scale

    path = tmp_path / "a.bwrun"
    told, _ = trained(path, Fault(begins=scaled, gradients=unscale), AT + 2)
    ratios = {n: norms(told, AT)[n] / norms(told, AT - 1)[n] for n in norms(told, AT)}
    assert max(ratios.values()) < 10 / scale
    assert f"'step': {AT + 1}" in jumps(path)


def test_a_row_of_the_embedding_that_explodes_shows_there_alone(tmp_path: Path) -> None:
    def explode(t: Training) -> None:
        if t.faulty:
            grad = t.model.embed.weight.grad
            assert grad is not None
            grad[7] *= 1e4

    path = tmp_path / "a.bwrun"
    told, _ = trained(path, Fault(gradients=explode), AT + 2)
    before, after = (of_all(told, step, "tensor_grad_max") for step in (AT - 1, AT))
    ratios = {name: after[name] / before[name] for name in after}
    assert ratios.pop("embed.weight") > 1e3
    assert max(ratios.values()) < 10
    assert "embed.weight" in jumps(path) and "blocks" not in jumps(path)


def of_their_past(path: Path) -> list[str]:
    """What is said of parameters that leave it."""
    rules = path.with_suffix(".yml")
    rules.write_text(PASTS)
    alerts = replayed_alerts(path, "--rules", str(rules))
    return [alert["summary"] for alert in alerts if alert["rule"] == "parameters"]


def _explode(t: Training) -> None:
    if t.step >= LATE:
        grad = t.model.embed.weight.grad
        assert grad is not None
        grad[7] *= 1e4


def _unscaled_twice(t: Training) -> None:
    for p in t.model.parameters():
        assert p.grad is not None
        p.grad *= 2.0**-16 if t.step >= LATE else 1


@pytest.mark.parametrize(
    "fault, said",
    (
        (Fault(gradients=_explode), "the gradient norm of embed.weight has risen to"),
        (Fault(gradients=_unscaled_twice), "gradient norm of all parameters together has fallen"),
    ),
    ids=("a row explodes", "unscaled twice"),
)
def test_a_parameter_out_of_its_past_is_named(fault: Fault, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    trained(path, fault, LATE + 20)
    told = of_their_past(path)
    assert said in str(told), told
