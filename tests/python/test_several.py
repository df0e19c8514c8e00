"""Goal: several models, and several processes, are watched beside each other: each is a run of its
own, none takes another's layers or names, and what cannot be is said.
Method: two models at a private server of the real program; recordings; fork().
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bellwether
from bellwether._native import c_api
from bellwether._server import private_server

from models import Model, Shape, batch
from recording import Recording

SHAPE = Shape(layers=2)


@pytest.fixture
def server() -> Iterator[private_server.PrivateServer]:
    if c_api.find(c_api.SERVER) is None:
        pytest.skip("bellwetherd is not built")
    found = private_server.join_or_start()
    yield found
    os.kill(found.pid, signal.SIGTERM)


def train(model: Any, optimizer: Any, step: int) -> None:
    model(batch(SHAPE, step, 1, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_two_models_of_a_job_are_two_runs(
    server: private_server.PrivateServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    models = [Model(SHAPE), Model(SHAPE)]
    monitors = [bellwether.attach(model, every=2) for model in models]
    first, second = (monitor.settings.run for monitor in monitors)
    assert second == f"{first}-2" and second in caplog.text
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for step in range(6):
        for model, optimizer in zip(models, optimizers):
            train(model, optimizer, step)
    for monitor in monitors:
        assert monitor.flush(20), monitor.status()
        status = monitor.status()
        assert status["link"] == "streaming" and status["counters"].error == "", status
        monitor.detach()
    # Names are free again.
    with bellwether.attach(models[0]) as monitor:
        assert monitor.settings.run == first


def test_two_models_do_not_write_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    models = [Model(SHAPE), Model(SHAPE), Model(SHAPE)]
    monitors = [bellwether.attach(m, record=str(path), run="r", every=1) for m in models]
    for index, (model, monitor) in enumerate(zip(models, monitors)):
        for step in range(index + 1):
            model(batch(SHAPE, step)).sum().backward()
            monitor.step()
        assert monitor.flush(20)
        monitor.detach()
    for index, name in enumerate(("a.bwrun", "a-2.bwrun", "a-3.bwrun")):
        recorded = Recording(tmp_path / name, ended=True)
        assert len(recorded.frames) == index + 1
        assert recorded.hello.run.name == ("r" if index == 0 else f"r-{index + 1}")


@pytest.mark.parametrize("inner_first", [False, True])
def test_a_model_in_another_is_not_watched_twice(
    inner_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(SHAPE)
    order = [model.blocks[0], model] if inner_first else [model, model.blocks[0]]
    first = bellwether.attach(order[0], record=str(tmp_path / "a.bwrun"), run="a", every=1)
    second = bellwether.attach(order[1], record=str(tmp_path / "b.bwrun"), run="b", every=1)
    assert first.live() and not second.live()
    assert "watched already" in second.why_off and "watched already" in caplog.text
    second.detach()
    for _ in range(2):
        model(batch(SHAPE, 0)).sum().backward()
        first.step()
        second.step()
    assert all(layer.fired == 2 for layer in first.layers) and first.status()["errors"] == 0
    first.detach()
    third = bellwether.attach(order[1], record=str(tmp_path / "c.bwrun"), run="c", every=1)
    assert third.live()
    third.detach()


def test_a_forked_child_attaches_anew(tmp_path: Path) -> None:
    model = Model(SHAPE)
    path = tmp_path / "child.bwrun"
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="p", every=1) as parent:
        model(batch(SHAPE, 0)).sum().backward()
        parent.step()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                told = [parent.why_off]
                own = bellwether.attach(model, record=str(path), run="c", every=1)
                told.append(str(own is not parent and own.live()))
                for step in range(3):  # No backward: PyTorch's threads have stayed behind.
                    model(batch(SHAPE, step))
                    own.step(loss=1.0)
                parent.detach()  # The handle that it has inherited.
                model(batch(SHAPE, 3))
                own.step(loss=1.0)
                told.append(str(own.flush(20)) + str(own.status()["errors"]))
                own.detach()
                os.write(write, "|".join(told).encode())
            except BaseException as e:
                os.write(write, repr(e).encode())
            os._exit(0)
        deadline = time.monotonic() + 60
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
        assert os.read(read, 4000).decode() == (
            "forked: call attach() again in this process|True|True0"
        )
        model(batch(SHAPE, 1)).sum().backward()
        parent.step()
        assert parent.live() and parent.flush(20)
    assert [f.step for f in Recording(path, ended=True).frames] == [0, 1, 2, 3]
    assert len(Recording(tmp_path / "a.bwrun", ended=True).frames) == 2
