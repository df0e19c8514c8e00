"""Weights that grow: what blocks add to the residual stream, the output layer, the embedding."""

from __future__ import annotations

import random

from ..settings import Setting
from ..training import Training
from .attention import grow
from .base import SLOW, Fault, Place


class ResidualGrowth(Fault):
    kind = SLOW

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 2e-3, 0.1)
        self.place = Place(layer=draw.randrange(setting.layers))
        return setting

    def apart(self, training: Training) -> list[str]:
        block = f"layers.{self.place.layer}."
        ends = ("o_proj.weight", "down_proj.weight")
        names = [name for name, _ in training.model.named_parameters()]
        return [name for name in names if name.startswith(block) and name.endswith(ends)]

    def begins(self, training: Training) -> None:
        grow(self, training)


class HeadGrowth(Fault):
    kind = SLOW

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 2e-3, 0.1)
        self.variant = draw.choice(("lm_head", "embed_tokens"))
        self.place = Place(tensor=f"{self.variant}.weight")
        return setting.changed(tied=False)

    def apart(self, training: Training) -> list[str]:
        return [f"{self.variant}.weight"]

    def begins(self, training: Training) -> None:
        grow(self, training)
