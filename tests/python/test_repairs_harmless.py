"""Goal: a repair that is enforced on a healthy run does it no harm: its loss stays within the
noise of the seed.
Method: examples/tiny_transformer.py in bf16 at a fourth of its learning rate, where it stays
healthy, three seeds; copies go on from mid-run, and are handed centring or hp.  Each is compared
with the untouched run of the same seed and data, against the spread of the untouched runs over
seeds.  With BELLWETHER_LONG 2,000 steps (until then its sigma(W_Q) is the fp32 twin's), else 400.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bellwether

from asking import action

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import tiny_transformer as tiny

STEPS = 2000 if os.environ.get("BELLWETHER_LONG") else 400
LEARNING_RATE = 1e-3
SEEDS = (1, 2, 3)
REPAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "centring": ("attention.center_k", {"value": 1}),
    "hp": ("attention.mode", {"mode": "hp"}),
}


@dataclasses.dataclass
class Training:
    """One that goes on as it would have, also as a copy."""

    data: tiny.Data
    model: tiny.TinyTransformer
    optimizer: torch.optim.Optimizer

    def half(self, path: Path, repair: Optional[str] = None) -> list[float]:
        """Losses of as many steps; from the first one on it is repaired."""
        monitor = bellwether.attach(
            self.model, record=str(path), every=20, rows=0, sequences=0, overhead_budget=0.5,
            allow="attention.center_k,attention.mode",
        )  # fmt: skip
        losses = []
        for step in range(STEPS // 2):
            tokens, target = self.data.batch()
            error = tiny.LOSS_SCALE * (self.model(tokens) - target)
            loss = (error**2)[:, tiny.SCORED_FROM :].mean()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), tiny.GRADIENT_NORM_MAX)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if repair is not None and step == 1:  # What a layer calls is known by then.
                kind, fields = REPAIRS[repair]
                monitor.actions.take(action(kind, **fields).encode())
            monitor.step(loss=loss)
            losses.append(loss.item())
        answers = monitor.status()["actions"]["answers"].values()
        assert [answer["applied"] for answer in answers] == ([True] if repair else []), answers
        monitor.detach()
        return losses

    def ends(self, path: Path, repair: Optional[str] = None) -> tuple[float, float]:
        """The mean loss of the last quarter of all steps, and sigma(W_Q) of the layer that could
        fail."""
        last = self.half(path, repair)[-STEPS // 4 :]
        return sum(last) / len(last), tiny.sigma_of_queries(self.model)[1]


def begun(seed: int) -> Training:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = tiny.Data(seed)
    model = tiny.TinyTransformer("bf16")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    return Training(data, model, optimizer)


def test_repairs_keep_a_healthy_loss_within_seed_noise(tmp_path: Path) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        halves = {seed: begun(seed) for seed in SEEDS}
        for seed, half in halves.items():
            half.half(tmp_path / f"half-{seed}.bwrun")
        untouched = {
            seed: copy.deepcopy(half).ends(tmp_path / f"{seed}.bwrun")
            for seed, half in halves.items()
        }
        losses = [loss for loss, _ in untouched.values()]
        noise = max(losses) - min(losses)
        print(f"untouched, seeds {SEEDS}: {untouched}; spread {noise:.5f}")
        for repair in REPAIRS:
            for seed, half in halves.items():
                path = tmp_path / f"{repair}-{seed}.bwrun"
                loss, sigma = copy.deepcopy(half).ends(path, repair)
                worse = loss - untouched[seed][0]
                print(f"{repair}, seed {seed}: {loss:.5f}, {worse:+.5f}; sigma(W_Q) {sigma:.2f}")
                assert abs(worse) <= noise, (repair, seed, loss, untouched)
