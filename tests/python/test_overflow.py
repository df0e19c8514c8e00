"""Goal: a GradScaler that skips steps, as it does at the start and now and then, is no alarm and
costs no sample.  A healthy run in 16 bits is healthy to the judges, and what fails still fails.
Method: the scaler's default factor, whose first gradients overflow; recordings read back, and
judged by `bellwether replay`.  On a GPU too, where there is one: there whether a fused optimizer
skipped is known some steps later.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import bellwether
from bellwether._step import grad_scale, law_rows
from bellwether.settings import STATS

from gpu import DEVICES
from models import Model, Shape, batch
from recording import Recording, replayed_alerts

SHAPE = Shape(layers=2, dtype=torch.float16)
STEPS = 45
ORDERS = ("hook", "after", "clip")


def train(path: Path, how: str, device: str, **optimizer: Any) -> list[bool]:
    """Whether each iteration was skipped."""
    torch.manual_seed(0)
    model = Model(SHAPE).to(device)
    monitor = bellwether.attach(
        model, record=str(path), run="overflow", every=20, overhead_budget=1e9
    )
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, **optimizer)
    # It grows, and overflows once more, in the middle.
    scaler = torch.amp.GradScaler(device, init_scale=65536.0, growth_interval=17)
    skipped = []
    for step in range(STEPS):
        loss = model(batch(SHAPE, step, device=device)).square().sum()
        scaler.scale(loss).backward()
        told = {"loss": loss}
        if how == "clip":
            scaler.unscale_(adam)
            told["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        factor = scaler.get_scale()
        scaler.step(adam)
        scaler.update()
        adam.zero_grad()
        skipped.append(scaler.get_scale() < factor)
        if how != "hook":
            monitor.step(**told)
    assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()
    monitor.detach()
    assert skipped[0] and 2 <= sum(skipped) < STEPS / 2 and any(skipped[10:])
    return skipped


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("how", ORDERS)
def test_a_healthy_run_has_no_alert(how: str, fused: bool, device: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    skipped = train(path, how, device, fused=fused)
    recorded = Recording(path, ended=True)
    steps = recorded.steps()
    count = STEPS if how != "hook" or fused else STEPS - sum(skipped)
    assert [frame.step for frame in recorded.frames] == list(range(count))
    for frame in recorded.frames:
        for block in frame.blocks:
            name = recorded.names[block.signal]
            # NaN where the weights have not changed, and in layers whose turn it is not.
            if name != "qk_increment_rank" and name not in (*STATS["laws"], *law_rows.SIGNALS):
                assert all(map(math.isfinite, block.values)), (frame.step, name)
    told = [step for step in steps if "delta_abs_sum" in steps[step]]
    if count == STEPS:  # The next step makes up for a sample whose gradients were thrown away.
        first = skipped.index(False)
        late = STEPS if device == "cuda" and fused else 0
        assert first <= told[0] <= first + late and not any(skipped[step] for step in told)
        assert ("grad_norm" in steps[first]) == (how == "clip") and "grad_norm" not in steps[0]
    else:
        assert told[:2] == [0, 20]
    assert len(told) >= 2
    assert all("key_leak_sum" in steps[step] and "rows" in steps[step] for step in told)
    assert replayed_alerts(path) == []


def test_lasting_overflow_is_not_sampled_at_each_step(tmp_path: Path) -> None:
    model = Model(SHAPE)
    path = tmp_path / "a.bwrun"
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=0.999)
    with bellwether.attach(model, record=str(path), run="never", every=20) as monitor:
        sampled = []
        for step in range(60):
            sampled.append(monitor.steps.samples_step())
            scaler.scale(model(batch(SHAPE, step, 1, 4)).square().sum()).backward()
            scaler.step(adam)
            scaler.update()
            if step >= 40:
                monitor.step(loss=math.nan)
        assert sum(sampled[:40]) == 33
        assert monitor.status()["errors"] == 0 and monitor.flush(20)
    Recording(path, ended=True)
    assert replayed_alerts(path)  # The loss is told in any case.


def test_an_optimizer_whose_hooks_are_not_called_is_no_overflow(tmp_path: Path) -> None:
    class Compiled(torch.optim.SGD):
        """What torch.compile makes of a step calls no hook."""

        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad, alpha=-1e-3)

        step.hooked = True  # PyTorch's mark of a step that it has wrapped.

    model = Model(Shape(layers=1))
    optimizer = Compiled(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    path = tmp_path / "a.bwrun"
    with bellwether.attach(model, record=str(path), run="hookless", every=1) as monitor:
        for step in range(4):
            scaler.scale(model(batch(SHAPE, step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.step()
        assert monitor.flush(20)
    assert all("delta_abs_sum" in s for s in Recording(path, ended=True).steps().values())


def test_the_methods_are_put_back(tmp_path: Path) -> None:
    names = ("scale", "step")
    before = [getattr(torch.amp.GradScaler, name) for name in names]
    model = Model(SHAPE)
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="p"):
        assert [getattr(torch.amp.GradScaler, name) for name in names] != before
    assert [getattr(torch.amp.GradScaler, name) for name in names] == before
    assert not grad_scale._replaced
