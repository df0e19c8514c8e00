"""What the benchmark's tests share: its package, no settings from outside, and a truth."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "client_lib" / "python")]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("BELLWETHER_") and name != "BELLWETHER_LIB_DIR":
            monkeypatch.delenv(name)
    torch.set_num_threads(1)


@pytest.fixture
def truth() -> dict[str, Any]:
    """Of a made-up run whose weight is spoilt at step 105, with a sample every 10 steps."""
    return {
        "cause": "corruption", "family": "corruption", "variant": "weight", "split": "test",
        "kind": "injected", "onset": 105, "until": 106, "strength": 2.0**24, "harmless": False,
        "layer": 1, "head": 2, "tensor": "layers.1.self_attn.q_proj.weight", "expert": None,
        "rank": None, "loss_up": 107, "steps": 400, "every": 10, "seed": 7,
        "architecture": "gpt", "optimizer": "adamw", "setting": {}, "stats": "all", "versions": {},
    }  # fmt: skip
