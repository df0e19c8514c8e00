"""Goal: on a GPU attention is switched under autocast and in compiled blocks, heads are clipped in
place, and what a CUDA graph has captured is refused with that reason.
Method: the jobs of test_monitor_gpu.py; skipped without a GPU, unless BELLWETHER_REQUIRE_GPU=1.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import bellwether
from bellwether._hook import attention_switch

import models
from asking import ALL, action
from gpu import LACKS, SKIPPED

if SKIPPED:
    pytest.skip(LACKS, allow_module_level=True)

from test_monitor_gpu import SHAPE, Job, Replayed, watch


def answers(monitor: Any) -> list[tuple[bool, str]]:
    found = monitor.status()["actions"]["answers"].values()
    return [(answer["applied"], answer["reason"]) for answer in found]


@pytest.mark.parametrize(
    "kind", [models.Attention, models.PaddedRight, models.Packed, models.Window]
)
def test_switched_under_autocast_as_stabilize_would(kind: type, tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, dtype=torch.float32)

    def losses(job: Job, between: Any, monitor: Any = None) -> list[float]:
        found = []
        for number in range(6):
            if number == 3:
                between()
            with torch.autocast("cuda", torch.bfloat16):
                found.append(float(job.step(number)))
            if monitor is not None:
                monitor.step()
        return found

    asked, by_hand = Job(shape, kind=kind), Job(shape, kind=kind)
    with watch(asked, tmp_path / "a.bwrun", every=2, allow=ALL) as monitor:
        # Asked one step before: it is in force from the next on.
        original = monitor.actions.boundary

        def boundary(step: int) -> None:
            if step == 3:
                monitor.actions.take(action("attention.mode", mode="hp"))
            original(step)

        monitor.actions.boundary = boundary
        got = losses(asked, lambda: None, monitor)
        assert answers(monitor) == [(True, "")]
        assert {attention_switch.of(m) for m in asked.model.attentions()} == {"hp"}
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
    want = losses(by_hand, lambda: bellwether.stabilize(by_hand.model, mode="hp"))
    assert got == pytest.approx(want, rel=1e-3)


def test_compiled_blocks_are_switched(tmp_path: Path) -> None:
    job = Job()
    with watch(job, tmp_path / "a.bwrun", every=2, allow=ALL) as monitor:
        for block in job.model.blocks:
            block.compile(fullgraph=True)
        for number in range(8):
            if number == 2:
                monitor.actions.take(action("attention.center_k", value=1))
            if number == 4:
                monitor.actions.take(action("attention.mode", mode="hp"))
            loss = job.step(number)
            monitor.step(loss=loss)
            assert torch.isfinite(loss)
        assert answers(monitor) == [(True, ""), (True, "")]
        assert {attention_switch.of(m) for m in job.model.attentions()} == {"hp+"}
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]


def test_actions_on_captured_cuda_graphs_are_refused(tmp_path: Path) -> None:
    job = Replayed(3)
    with watch(job, tmp_path / "a.bwrun", every=2, allow=ALL) as monitor:
        for number in range(6):
            monitor.step(loss=job.step(number))
        before = job.model.attentions()[1].qkv.weight[:64].detach().clone()
        asked = [
            ("attention.mode", {"mode": "hp"}),
            ("attention.center_k", {"value": 1}),
            ("lr.scale", {"value": 0.5}),
            ("qk.clip", {"value": 0.25, "scope": {"heads": [{"layer": 1, "head": 0}]}}),
        ]
        for kind, fields in asked:
            monitor.actions.take(action(kind, **fields))
        monitor.step(loss=job.step(6))
        said = answers(monitor)
        assert all("captured in a CUDA graph" in why for _, why in said[:3]), said
        assert said[3][0], said  # In place: the graph reads the new weights.
        ratio = job.model.attentions()[1].qkv.weight[:64].norm() / before.norm()
        assert float(ratio) == pytest.approx(0.25, rel=0.05)  # The key head is shared: W_Q alone.
        monitor.step(loss=job.step(7))
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
