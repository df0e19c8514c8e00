"""Faults between copies of a model: two ranks, or a trainer and what samples for it."""

from __future__ import annotations

import random

import torch

from ..settings import Setting
from ..training import Training
from .base import Fault, Place


class ReplicasApart(Fault):
    """At rank 1 a weight changes once, or a gradient is not the others' from a step on."""

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 1e-6, 1.0)
        self.variant = draw.choice(("weight", "gradient"))
        layer = draw.randrange(setting.layers)
        # Of two copies neither is known to be the right one, so the rank is no part of the truth.
        self.place = Place(layer=layer, tensor=f"layers.{layer}.self_attn.o_proj.weight")
        return setting.changed(ranks=2, accumulation=1, experts=0, dtype="float32")

    def _here(self, training: Training) -> bool:
        return self.is_on(training) and torch.distributed.get_rank() == 1

    def gradients(self, training: Training) -> None:
        if self.variant == "gradient" and self._here(training):
            assert self.strength is not None
            gradient = training.model.get_parameter(str(self.place.tensor)).grad
            assert gradient is not None
            gradient.mul_(1 + self.strength)

    @torch.no_grad()
    def weights(self, training: Training) -> None:
        if self.variant == "weight" and training.step == self.onset and self._here(training):
            assert self.strength is not None
            training.model.get_parameter(str(self.place.tensor))[0].mul_(1 + self.strength)


class RolloutApart(Fault):
    """What samples keeps its old weights, or has weights that are off by a share of themselves."""

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.variant = draw.choice(("old weights", "other weights"))
        if self.variant == "other weights":
            self.strength = self.drawn_strength(draw, 1e-3, 1.0)
        return setting.changed(
            task="policy", lr=5e-4, accumulation=1, experts=0, dtype="float32", optimizer="adamw"
        )

    @torch.no_grad()
    def begins(self, training: Training) -> None:
        if not self.is_on(training):
            return
        assert training.rollout is not None
        if self.variant == "old weights":
            training.rollout.follows = False
            return
        generator = torch.Generator().manual_seed(training.seed)  # The same error in each step.
        for p in training.rollout.sampler.parameters():
            p.mul_(1 + float(self.strength or 0) * torch.randn(p.shape, generator=generator))
