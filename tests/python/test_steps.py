"""Goal: a step is an optimizer step, reported once, whatever ends it; the run's numbers and events
arrive with it.  Method: short runs of each kind of loop, read back from their recordings.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import bellwether
from bellwether._native import c_api
from bellwether._step import frames
from bellwether.tools.doctor import monitor_findings

from models import Attention, Model, Shape, batch
from recording import Recording

SHAPE = Shape(layers=1)


def train(
    path: Path, steps: int, how: str, micro: int = 1, rates: Any = None, **attach: Any
) -> Recording:
    torch.manual_seed(0)
    model = Model(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.25)
    arguments = {"every": 2, "overhead_budget": 1e9, "record": str(path), "run": "steps", **attach}
    monitor = bellwether.attach(model, **arguments)
    for step in range(steps):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[step]
        for part in range(micro):
            loss = model(batch(SHAPE, step * micro + part)).square().mean()
            loss.backward()
        if how == "before":
            monitor.step(loss=loss, grad_norm=3.0, tokens=120)
        optimizer.step()
        optimizer.zero_grad()
        if how == "after":
            monitor.step(loss=loss, grad_norm=3.0, tokens=120)
    assert monitor.flush(20)
    assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
    monitor.detach()
    return Recording(path, ended=True)


def test_blocks_beyond_a_frame_are_counted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(tmp_path / "a.bwrun", 4, "after").steps()
    most = len(whole[1]) + 3  # Fewer than a sample has, and enough for what is told in each step.
    monkeypatch.setattr(c_api, "BLOCKS_MAX", most)
    model = Model(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = bellwether.attach(
        model, every=2, overhead_budget=1e9, record=str(tmp_path / "b.bwrun"), run="steps"
    )
    for step in range(4):
        model(batch(SHAPE, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=1.0, grad_norm=3.0, tokens=120)
    assert monitor.flush(20)
    [(reason, times)] = monitor.status()["numbers_left_out"].items()
    findings = monitor_findings(monitor)
    monitor.detach()
    assert f"{most} blocks" in reason and times == 2
    assert caplog.text.count(reason) == 1
    assert any(reason in finding.text and finding.ok is False for finding in findings)
    found = Recording(tmp_path / "b.bwrun", ended=True).steps()
    assert [len(found[step]) for step in range(4)] == [most, len(whole[1]), most, len(whole[3])]
    first = next(name for name in whole[0] if name not in found[0])
    assert first in reason


@pytest.mark.parametrize("how", ["after", "before", "hook"])
@pytest.mark.parametrize("micro", [1, 3])
def test_one_frame_a_step(how: str, micro: int, tmp_path: Path) -> None:
    recorded = train(tmp_path / "a.bwrun", 5, how, micro)
    assert [f.step for f in recorded.frames] == [0, 1, 2, 3, 4]
    steps = recorded.steps()
    for step, signals in steps.items():
        assert ("rows" in signals) == (step % 2 == 0), step
        assert ("wq_sigma" in signals) == (step % 2 == 0), step
        assert ("loss" in signals) == (how != "hook")
        assert signals["step_seconds"][0, 0] > 0 and signals["hook_seconds"][0, 0] > 0
        assert signals["sampling_period"][0, 0] == 2
        if how != "hook":
            assert math.isfinite(signals["loss"][0, 0])
            assert signals["grad_norm"][0, 0] == 3 and signals["tokens"][0, 0] == 120
    assert steps[4]["learning_rate"][0, 0] == pytest.approx(0.01)
    assert recorded.hello.run.weight_decay == pytest.approx(0.25 if how != "before" else 0)
    kinds = [recorded.event_names and e.kind for e in recorded.events]
    assert kinds[0] == 5 and kinds[-1] == 6  # attach, detach


def test_sequence_numbers_have_no_gap(tmp_path: Path) -> None:
    seqs = train(tmp_path / "a.bwrun", 6, "after").seqs
    assert seqs == list(range(1, len(seqs) + 1))


def test_learning_rate_jump_is_an_event_warmup_is_not(tmp_path: Path) -> None:
    rates = [0.001, 0.002, 0.004, 0.004, 0.004, 0.02, 0.02, 0.004]
    recorded = train(tmp_path / "a.bwrun", 8, "after", rates=rates)
    jumps = [(e.step, e.value) for e in recorded.events if e.kind == 1]
    assert jumps == [(5, pytest.approx(0.02)), (7, pytest.approx(0.004))]


def test_own_events_and_own_step_numbers(tmp_path: Path) -> None:
    model = Model(SHAPE)
    path = tmp_path / "a.bwrun"
    monitor = bellwether.attach(model, record=str(path), run="own", every=10)
    for step in (100, 101, 102, 50):
        model(batch(SHAPE, step)).sum().backward()
        if step == 50:
            monitor.event("restore", "back to 50", 50)
        monitor.step(step)
    with pytest.raises(ValueError, match="kind"):
        monitor.event("coffee")
    assert monitor.flush(20)
    monitor.detach()
    recorded = Recording(path)
    assert [f.step for f in recorded.frames] == [100, 101, 102, 50]
    restores = [(e.step, e.value, e.text) for e in recorded.events if e.kind == 2]
    assert restores == [(50, 50.0, "back to 50")]


def test_metrics_for_other_loggers(tmp_path: Path) -> None:
    model = Model(SHAPE)
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="m") as monitor:
        model(batch(SHAPE, 0)).sum().backward()
        monitor.step(loss=2.5)
        metrics = monitor.metrics()
    assert metrics["bellwether/loss"] == 2.5
    for name in ("drift_ratio_max", "key_leak_max", "wq_sigma_max", "logit_max"):
        assert math.isfinite(metrics[f"bellwether/layer0/{name}"]), name


def test_many_backwards_without_a_step_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(SHAPE)
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="b") as monitor:
        for _ in range(64):
            model(batch(SHAPE, 0, 1, 4)).sum().backward()
        assert not monitor.steps.ends.warned
        for _ in range(30):
            model(batch(SHAPE, 0, 1, 4)).sum().backward()
        assert monitor.steps.ends.warned


def test_only_chosen_stats_and_layers_are_reported(tmp_path: Path) -> None:
    model = Model(Shape(layers=3))
    path = tmp_path / "a.bwrun"
    with bellwether.attach(
        model, record=str(path), run="s", stats={"drift"}, layers=r"blocks\.2"
    ) as monitor:
        model(batch(SHAPE, 0)).sum().backward()
        monitor.step()
        assert monitor.flush(20)
    step = Recording(path).steps()[0]
    assert "tied_rows_bf16" not in step and "wq_sigma" not in step and "key_leak_sum" not in step
    assert step["rows"].shape == (3, 4)  # Layers keep their numbers.
    assert (step["rows"][2] > 0).all() and (step["rows"][:2] == 0).all()


def test_the_period_grows_when_watching_costs_too_much(tmp_path: Path) -> None:
    model = Model(SHAPE)
    with bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="g", every=1, overhead_budget=1e-9
    ) as monitor:
        for step in range(12):
            model(batch(SHAPE, step)).sum().backward()
            monitor.step()
        assert monitor.status()["sampling_period"] > 1


def test_device_numbers_are_not_awaited_and_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        """In the place of a copy to pinned memory."""

        made: ClassVar[list[Slow]] = []

        def __init__(self, value: torch.Tensor) -> None:
            self.arrived = False
            Slow.made.append(self)

        def ready(self) -> bool:
            return self.arrived

        def value(self) -> float:
            return float(Slow.made.index(self))

    monkeypatch.setattr(frames, "_Late", Slow)
    model = Model(SHAPE)
    path = tmp_path / "a.bwrun"
    with bellwether.attach(model, record=str(path), run="late", every=1) as monitor:
        loss = torch.empty((), device="meta")
        for step in range(4):
            model(batch(SHAPE, step)).sum().backward()
            monitor.step(loss=loss)
            if step == 1:
                Slow.made[1].arrived = True  # Step 0 has not: both wait.
                assert "bellwether/loss" not in monitor.metrics()
        assert not monitor.flush(0.05)
        Slow.made[0].arrived = True

        def arrive() -> None:
            for late in Slow.made:
                late.arrived = True

        threading.Timer(0.2, arrive).start()
        assert monitor.flush(20)
        recorded = Recording(path)
    assert [f.step for f in recorded.frames] == [0, 1, 2, 3]
    assert [s["loss"][0, 0] for s in recorded.steps().values()] == [0, 1, 2, 3]


def test_the_kernel_and_the_norms_are_told(tmp_path: Path) -> None:
    class Normed(Attention):
        def __init__(self, shape: Shape) -> None:
            super().__init__(shape)
            self.q_norm, self.k_norm = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)

    model = Model(SHAPE, kind=Normed)
    path = tmp_path / "a.bwrun"
    backend = torch.nn.attention.SDPBackend
    with bellwether.attach(model, record=str(path), run="norms") as monitor:
        with torch.nn.attention.sdpa_kernel(backend.MATH):
            model(batch(SHAPE, 0)).sum().backward()
        monitor.step()
        assert monitor.flush(20)
    attention = Recording(path).hello.run.attention
    assert attention.qk_norm and attention.kernel == "math" and attention.causal


def test_a_layer_that_comes_late_is_named(tmp_path: Path) -> None:
    model = Model(Shape(layers=2))
    late = model.blocks[1]
    model.blocks[1] = torch.nn.Identity()
    model.spare = late
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="late") as monitor:
        model(batch(SHAPE, 0)).sum().backward()
        monitor.step()
        model.blocks[1] = late
        model(batch(SHAPE, 0)).sum().backward()
        monitor.step()
        notes = [layer["notes"] for layer in monitor.status()["layers"]]
    assert notes[0] == {} and "first called after the first step: not reported" in notes[1]


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointed_statistics_are_in_their_step(every: int, tmp_path: Path) -> None:
    found = []
    for how in (None, "reentrant", "non-reentrant"):
        torch.manual_seed(0)
        model, path = Model(Shape(layers=2), checkpointing=how), tmp_path / f"{how}.bwrun"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bellwether.attach(
            model, record=str(path), run="c", every=every, rows=0, overhead_budget=1e9
        ) as monitor:
            for step in range(5):
                model(batch(SHAPE, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert monitor.flush(20)
        steps = Recording(path, ended=True).steps()
        found.append({s: v["logit_max"].tolist() for s, v in steps.items() if "logit_max" in v})
    assert found[0] == found[1] == found[2] and list(found[0]) == list(range(0, 5, every))
