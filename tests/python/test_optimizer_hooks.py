"""Goal: monitors come and go within optimizer.step(), and nothing is raised into it; hooks of
others, before and behind ours, are all called.
Method: hooks of torch's own around monitors that detach in a hook, or whose model is collected.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import bellwether
from bellwether import monitor as monitors
from bellwether._step import optimizer_hooks

from models import Model, Shape, batch
from recording import Recording

SHAPE = Shape(layers=1)


@pytest.fixture
def theirs() -> Iterator[list[str]]:
    """What hooks of others are called, one in front of ours and one behind."""
    called: list[str] = []
    before = register_optimizer_step_post_hook(lambda *_: called.append("before"))
    optimizer_hooks.after_step.add(lambda *_: None)()
    behind = register_optimizer_step_post_hook(lambda *_: called.append("behind"))
    yield called
    before.remove()
    behind.remove()


def attached(path: Path, name: str) -> tuple[Model, Any]:
    model = Model(SHAPE)
    return model, bellwether.attach(model, record=str(path / f"{name}.bwrun"), run=name, every=1)


def step(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(SHAPE, 0)).square().mean().backward()
    optimizer.step()


def at_the_hook_of(
    monitor: Any, action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """`action` is done inside of optimizer.step(), as a callback of on_action() would do it."""
    done: list[int] = []

    def measure(*_: Any) -> None:
        done.append(1)
        action()

    monkeypatch.setattr(monitor.steps.weights, "measure", measure)
    return done


def test_detach_inside_of_the_step(
    tmp_path: Path, theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_first, first = attached(tmp_path, "first")
    model, second = attached(tmp_path, "second")
    kept_third, third = attached(tmp_path, "third")
    done = at_the_hook_of(second, second.detach, monkeypatch)
    step(model)
    assert done and theirs == ["before", "behind"]
    assert not second.live() and first.live() and third.live()
    for monitor, kept in ((first, kept_first), (third, kept_third)):
        assert bellwether.attach(kept) is monitor
        monitor.detach()


def test_a_model_that_is_collected_inside_of_the_step(
    tmp_path: Path, theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.disable()
    try:
        model, monitor = attached(tmp_path, "kept")
        gone, _ = attached(tmp_path, "gone")
        object.__setattr__(gone, "itself", gone)  # A cycle: only the collector ends it.
        count = len(monitors.handles)
        del gone, _
        attached(tmp_path, "later")
        done = at_the_hook_of(monitor, gc.collect, monkeypatch)
        step(model)
        assert done and theirs == ["before", "behind"]
        assert len(monitors.handles) < count + 1
        monitor.detach()
    finally:
        gc.enable()


def test_attach_inside_of_the_step(
    tmp_path: Path, theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, monitor = attached(tmp_path, "first")
    found: list[Any] = []
    done = at_the_hook_of(monitor, lambda: found.append(attached(tmp_path, "second")), monkeypatch)
    step(model)
    assert done and theirs == ["before", "behind"] and found[0][1].live()
    found[0][1].detach()
    monitor.detach()


def test_a_step_within_its_own_is_one_step(tmp_path: Path) -> None:
    """PyTorch calls the hooks of a class and of its base."""

    class Own(torch.optim.AdamW):
        raises = False

        def step(self, closure: Any = None) -> Any:
            if self.raises:
                raise ArithmeticError
            return super().step(closure)

    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # Its class has hooks from now on.
    path = tmp_path / "own.bwrun"
    model, monitor = attached(tmp_path, "own")
    optimizer = Own(model.parameters(), lr=1e-3)
    for step in range(6):
        model(batch(SHAPE, step)).square().mean().backward()
        optimizer.raises = step == 2
        with contextlib.suppress(ArithmeticError):
            optimizer.step()
        optimizer.zero_grad()
    assert monitor.flush(20) and monitor.status()["errors"] == 0
    monitor.detach()
    assert sorted(Recording(path, ended=True).steps()) == list(range(5))
