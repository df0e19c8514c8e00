"""Goal: a number of a step that cannot be read costs that number: the step, its frame and its
sample arrive all the same, and it is said once.  Method: short runs with odd numbers and odd
optimizers, read back from their recordings; DTensors are in test_parallel.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import bellwether

from models import Model, Shape, batch
from recording import Recording

SHAPE = Shape(layers=1)
STEPS = 12  # More than errors turn a monitor off.


class OwnRate(torch.optim.Optimizer):
    """Sets its own rate, as Adafactor does."""

    def __init__(self, parameters: Any, **groups: Any) -> None:
        super().__init__(parameters, groups)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-1e-3)


def told(path: Path, optimizer: Any, numbers: dict[str, Any], explicit: bool) -> Any:
    """(steps, status) of a run that tells these numbers."""
    model = Model(SHAPE)
    stepper = optimizer(model.parameters())
    monitor = bellwether.attach(
        model, record=str(path), run="numbers", every=2, overhead_budget=1e9
    )
    for step in range(STEPS):
        model(batch(SHAPE, step)).square().mean().backward()
        stepper.step()
        stepper.zero_grad()
        if explicit:
            monitor.step(**numbers)
    assert monitor.flush(20)
    status = monitor.status()
    monitor.detach()
    assert status["errors"] == 0 and status["live"], status["last_error"]
    recorded = Recording(path, ended=True)
    assert [frame.step for frame in recorded.frames] == list(range(STEPS))
    assert all("rows" in recorded.steps()[step] for step in range(0, STEPS, 2))
    return recorded.steps(), status


@pytest.mark.parametrize(
    "groups",
    [dict(lr=None), {}, dict(lr=0.5, weight_decay=None), dict(lr=None, weight_decay="none")],
    ids=str,
)
@pytest.mark.parametrize("explicit", [False, True])
def test_an_optimizer_without_a_rate(
    groups: dict[str, Any], explicit: bool, tmp_path: Path
) -> None:
    steps, _ = told(
        tmp_path / "a.bwrun", lambda parameters: OwnRate(parameters, **groups), {}, explicit
    )
    assert all(("learning_rate" in s) == (groups.get("lr") is not None) for s in steps.values())


def test_an_unreadable_number_costs_that_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = {"loss": torch.ones(3), "grad_norm": 2.0, "lr": "warm", "tokens": math.nan}
    steps, status = told(tmp_path / "a.bwrun", lambda p: torch.optim.SGD(p, lr=0.1), numbers, True)
    for signals in steps.values():
        assert "loss" not in signals and "learning_rate" not in signals
        assert signals["grad_norm"][0, 0] == 2 and math.isnan(signals["tokens"][0, 0])
    assert sorted(status["numbers_left_out"].values()) == [STEPS, STEPS]
    said = caplog.text
    assert said.count("left out: loss: ") == 1 and said.count("left out: learning_rate: ") == 1
