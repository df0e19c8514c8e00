"""What a training is, apart from its fault, and how the two splits differ.

The test split has other architectures, widths, optimizers, text and strengths of faults than the
train split.  To add a healthy architecture, add a row to ARCHITECTURES and name it in a split.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional


@dataclass(frozen=True)
class Setting:
    # The model.
    architecture: str = "gpt"
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 4
    positions: str = "learned"  # or "rotary"
    norm: str = "layernorm"  # or "rmsnorm"
    mlp: str = "gelu"  # or "swiglu", or "none"
    attention: str = "sdpa"  # or "bf16": rounding.py
    qk_norm: bool = False
    sinks: bool = False
    gated: bool = False
    latent: bool = False  # Keys and values come from a narrow common vector.
    experts: int = 0  # 0 = no mixture.
    tied: bool = False
    fp8: bool = False  # Blocks multiply in 8 bits.
    dtype: str = "float32"  # or "bfloat16"; "float16" needs a GPU.
    # The training.
    optimizer: str = "adamw"  # or "muon"
    lr: float = 2e-3
    warmup: int = 50
    decay: bool = True  # Of the rate, by a cosine.
    beta2: float = 0.95
    eps: float = 1e-8
    moments: str = "float32"  # Type in which the second moments are kept.
    weight_decay: float = 0.1
    clip: Optional[float] = 1.0
    accumulation: int = 1
    dropout: float = 0.0
    weight_until: int = 0  # The loss counts a thirtieth before this step.
    task: str = "text"  # or "policy": a policy gradient; or "classes": rounding.py
    ranks: int = 1
    warm_start: int = 0  # Steps that were trained before the run began.
    # The data.
    corpus: str = "modules"
    tokens: int = 64
    batch: int = 4
    losses: bool = True  # The job tells the losses of its sequences.
    # The run.
    steps: int = 600
    every: int = 10

    def changed(self, **changes: Any) -> Setting:
        return dataclasses.replace(self, **changes)


_LLAMA = {"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu"}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt-tied": {"tied": True},
    "gpt-rms": {"norm": "rmsnorm"},
    "gpt-moe": {"experts": 4},
    "llama": {**_LLAMA},
    "llama-grouped": {**_LLAMA, "kv_heads": 2},
    "qk-norm": {**_LLAMA, "qk_norm": True},
    "latent": {**_LLAMA, "latent": True},
    "sinks": {**_LLAMA, "sinks": True},
    "gated": {**_LLAMA, "gated": True},
    "llama-moe": {**_LLAMA, "experts": 8},
    "bf16": {**_LLAMA, "dtype": "bfloat16"},
}


@dataclass(frozen=True)
class Split:
    architectures: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]  # (layers, width)
    optimizers: tuple[dict[str, Any], ...]
    corpus: str
    steps: tuple[int, int]
    bands: tuple[int, ...]  # Eighths of a strength's logarithmic range that are drawn from.


SPLITS = {
    "train": Split(
        architectures=("gpt", "gpt-tied", "llama", "llama-grouped", "qk-norm"),
        shapes=((2, 64), (3, 64)),
        optimizers=({"lr": 2e-3}, {"lr": 1e-3, "clip": None}),
        corpus="modules", steps=(500, 900), bands=(0, 2, 4, 6),
    ),
    "test": Split(
        architectures=("gpt-rms", "latent", "sinks", "gated", "bf16"),
        shapes=((2, 96), (3, 96), (4, 128)),
        optimizers=(
            {"lr": 1e-3, "beta2": 0.98},
            {"lr": 1e-3, "accumulation": 2, "batch": 2},
            {"optimizer": "muon", "lr": 1e-3},
        ),
        corpus="packages", steps=(600, 1200), bands=(1, 3, 5, 7),
    ),
}  # fmt: skip
# Healthy runs alone: what faults do not meet, for alarms at what is merely unusual.
HEALTHY_EXTRAS: dict[str, tuple[dict[str, Any], ...]] = {
    "train": ({}, {"experts": 4}, {"warm_start": 200}, {"accumulation": 2, "batch": 2}),
    "test": (
        {}, {"experts": 8}, {"warm_start": 300}, {"task": "policy", "lr": 3e-4}, {"ranks": 2},
        {"optimizer": "muon"},
    ),
}  # fmt: skip


def drawn(split: str, draw: random.Random, changes: Mapping[str, Any]) -> Setting:
    """The setting of a run, before its fault has its say.  `changes` go first, but draw nothing
    else.  Raises ValueError for a split or a field that does not exist."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    of = SPLITS[split]
    name = draw.choice(of.architectures)
    layers, width = draw.choice(of.shapes)
    steps = draw.randint(*of.steps)
    known = {field.name for field in dataclasses.fields(Setting)}
    unknown = sorted(changes.keys() - known)
    if unknown:
        raise ValueError(f"{unknown[0]} is no field of a setting: {', '.join(sorted(known))}")
    return Setting(
        **{
            "architecture": name, "layers": layers, "width": width, "corpus": of.corpus,
            "steps": steps, **ARCHITECTURES[name], **draw.choice(of.optimizers), **changes,
        }
    )  # fmt: skip


def log_uniform(draw: random.Random, low: float, high: float, split: str) -> float:
    """Of the bands of the split: no strength of one split is met in the other."""
    at = (draw.choice(SPLITS[split].bands) + draw.random()) / 8
    return float(low * (high / low) ** at)
