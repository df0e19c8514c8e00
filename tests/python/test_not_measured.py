"""Goal: what was not measured is reported as such, and not as a value that is not a number.  A
healthy run of which a part is watched has no alert, and a NaN that was measured has one.
Method: recordings of such runs, judged by `bellwether replay`.
"""

from __future__ import annotations

import array
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import bellwether
from bellwether._native import c_api
from bellwether._step import increments

from models import Model, Shape, batch
from recording import Recording, replayed_alerts

SHAPE = Shape(layers=3)


def train(path: Path, rate: float = 0.1, broken: bool = False, **attach: Any) -> None:
    torch.manual_seed(0)
    model = Model(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    monitor = bellwether.attach(
        model, record=str(path), run="part", every=1, overhead_budget=1e9, **attach
    )
    for step in range(4):
        model(batch(SHAPE, step)).square().mean().backward()
        optimizer.step()
        if broken and step == 2:
            with torch.no_grad():
                model.blocks[1].attention.qkv.weight[0, 0] = float("nan")
        monitor.step(loss=1.0)
    assert monitor.flush(20) and monitor.status()["errors"] == 0
    monitor.detach()


def test_layers_that_are_not_watched(tmp_path: Path) -> None:
    train(tmp_path / "a.bwrun", layers=r"blocks\.1")
    assert replayed_alerts(tmp_path / "a.bwrun") == []


def test_increments_of_one_layer_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(increments, "INCREMENT_BYTES_MAX", 1)
    train(tmp_path / "a.bwrun")
    assert replayed_alerts(tmp_path / "a.bwrun") == []
    assert any("qk_increment_rank" in s for s in Recording(tmp_path / "a.bwrun").steps().values())


def test_weights_that_do_not_change(tmp_path: Path) -> None:
    train(tmp_path / "a.bwrun", rate=0.0)
    assert replayed_alerts(tmp_path / "a.bwrun") == []


def test_a_nan_that_was_measured_is_an_alert(tmp_path: Path) -> None:
    train(tmp_path / "a.bwrun", broken=True, layers=r"blocks\.1")
    found = replayed_alerts(tmp_path / "a.bwrun")
    assert found and found[0]["rule"] == "nonfinite" and found[0]["layer"] == 1


def test_the_bits_survive() -> None:
    assert struct.pack("<f", c_api.NOT_MEASURED) == struct.pack("<I", 0x7FC0BE11)
    assert array.array("f", [c_api.NOT_MEASURED]).tobytes() == struct.pack("=I", 0x7FC0BE11)
