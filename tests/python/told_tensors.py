"""What recordings tell of parameters, and the same recomputed in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from bellwether._native import c_api
from bellwether._step.tensor_sample import SIGNALS, TURN_SIGNALS

from recording import Recording

Told = dict[int, dict[str, dict[str, float]]]  # Step -> row -> signal -> value.


def rows_told(
    path: Path, granularity: int, signals: Collection[str], all_rows: bool = False
) -> Told:
    """What a recording has of named rows: of each step those of which something is told, or all
    that have names."""
    recording = Recording(path, ended=True)
    names: list[str] = []
    for message in recording.messages:
        if message.WhichOneof("body") == "names" and message.names.granularity == granularity:
            names[message.names.first :] = list(message.names.names)
    told: Told = {}
    for frame in recording.frames:
        of_step = told.setdefault(frame.step, {name: {} for name in names} if all_rows else {})
        for block in frame.blocks:
            signal = recording.names[block.signal]
            for i, value in enumerate(block.values if signal in signals else ()):
                if not is_missing(value):
                    of_step.setdefault(names[block.layer_begin + i], {})[signal] = value
    return told


def told_in(path: Path) -> Told:
    return rows_told(path, c_api.TENSOR, (*SIGNALS, *TURN_SIGNALS), all_rows=True)


def is_missing(value: float) -> bool:
    bits = torch.tensor([value], dtype=torch.float32).view(torch.int32)
    return int(bits) == c_api.NOT_MEASURED_BITS


@dataclasses.dataclass
class Kept:
    """Of one parameter and step, in float64."""

    g: Optional[Tensor]
    before: Tensor
    after: Tensor
    m: Optional[Tensor]
    v: Optional[Tensor]
    t: float
    beta2: float
    eps: float

    def wanted(self) -> dict[str, float]:
        found = {
            "tensor_elements": float(self.after.numel()),
            "tensor_weight_sumsq": float(self.after.square().sum()),
            "tensor_moved": float(not torch.equal(self.before, self.after)),
            "tensor_change_sumsq": float((self.after - self.before).square().sum()),
            "tensor_change_weight_sumsq": float(self.after.square().sum()),
        }
        if self.g is None:
            return found
        found["tensor_grad_sumsq"] = float(self.g.square().sum())
        found["tensor_grad_max"] = float(self.g.abs().max())
        found["tensor_grad_nonfinite"] = float((~self.g.isfinite()).sum())
        found["tensor_grad_zeros"] = float((self.g == 0).sum())
        if self.m is not None:
            found["tensor_momentum_dot"] = float((self.g * self.m).sum())
            found["tensor_momentum_norms"] = float(self.g.norm() * self.m.norm())
        if self.v is not None:
            vhat = (self.beta2 * self.v + (1 - self.beta2) * self.g.square()) / (
                1 - self.beta2**self.t
            )
            ratios = self.g.square() / vhat.clamp(min=self.eps**2)
            found["tensor_lag_sum"] = float(ratios[self.g != 0].sum())
        return found


def merge_rules() -> dict[str, str]:
    """Of each signal: how the server merges what ranks tell."""
    from bellwether.v1 import signals_pb2

    found = {}
    for value in signals_pb2.Signal.DESCRIPTOR.values:
        if value.number:
            info = value.GetOptions().Extensions[signals_pb2.signal]
            found[info.name] = signals_pb2.Merge.Name(info.merge)
    return found
