"""Goal: attach() with nothing configured ends in a run on a real private server, which the
command finds, and which says what the library measured.
Method: the real bellwetherd, bellwether-sender and bellwether of this build.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bellwether
from bellwether import _native, private_server

from models import Model, Shape, batch


@pytest.fixture
def ended_server() -> Iterator[None]:
    assert _native.find(_native.SERVER), "bellwetherd is not built"
    yield
    ready = private_server.state_folder() / private_server.READY_FILE
    if ready.exists():
        pid = json.loads(ready.read_text())["pid"]
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def ask(*words: str) -> str:
    command = _native.find("bellwether")
    assert command, "bellwether is not built"
    done = subprocess.run([str(command), *words], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_attach_to_the_command(ended_server: None, tmp_path: Path) -> None:
    model = Model(Shape())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bellwether.attach(model, run="live", every=2, overhead_budget=1e9) as monitor:
        for step in range(6):
            model(batch(model.shape, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=1.25)
        assert monitor.flush(20), monitor.status()
        status = monitor.status()
        assert status["link"] == "streaming" and status["errors"] == 0
        assert status["page_url"].endswith("#/run/live")
        told = monitor.metrics()
    deadline = time.monotonic() + 20
    while "live" not in (listed := ask("run", "list")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "live" in listed
    matrix = json.loads(ask("-o", "json", "matrix", "live", "wq_sigma"))
    rows = [v for row in flat(matrix) for v in row]
    assert max(rows) == pytest.approx(
        max(told["bellwether/layer0/wq_sigma_max"], told["bellwether/layer1/wq_sigma_max"]),
        rel=1e-5,
    )


def flat(thing: object) -> list[list[float]]:
    """All lists of numbers in a JSON value."""
    if isinstance(thing, list):
        if thing and all(isinstance(v, (int, float)) for v in thing):
            return [thing]
        return [row for v in thing for row in flat(v)]
    if isinstance(thing, dict):
        return [row for v in thing.values() for row in flat(v)]
    return []
