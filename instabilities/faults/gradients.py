"""Faults between the backward pass and the optimizer's step."""

from __future__ import annotations

import random

from ..settings import Setting
from ..training import Training
from .base import Fault, Place


class DoesNotMove(Fault):
    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.variant = draw.choice(("not stepped", "rate 0", "a layer left out"))
        if self.variant == "a layer left out":
            self.place = Place(layer=draw.randrange(setting.layers))
        return setting

    def apart(self, training: Training) -> list[str]:
        if self.place.layer is None:
            return []
        block = f"layers.{self.place.layer}."
        return [name for name, _ in training.model.named_parameters() if name.startswith(block)]

    def begins(self, training: Training) -> None:
        if not self.is_on(training) or self.variant == "not stepped":
            return
        for optimizer in training.optimizers:
            for group in optimizer.param_groups:
                if self.variant == "rate 0" or group["apart"]:
                    group["lr"] = 0.0

    def steps(self, training: Training) -> bool:
        return self.variant != "not stepped" or not self.is_on(training)


class NotCleared(Fault):
    """Of a gradient 1 - 1 / strength is kept: it counts for so many steps."""

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 1.2, 1e4)
        return setting

    def clears(self, training: Training) -> None:
        if not self.is_on(training):
            super().clears(training)
            return
        assert self.strength is not None
        for p in training.model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 - 1 / self.strength)


class ScaledWrongly(Fault):
    """As by a loss scale that is taken out twice, or never; the strength is that scale."""

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 16.0, 2.0**20)
        self.variant = draw.choice(("unscaled twice", "not unscaled"))
        return setting

    def gradients(self, training: Training) -> None:
        if not self.is_on(training):
            return
        assert self.strength is not None
        by = self.strength if self.variant == "not unscaled" else 1 / self.strength
        for p in training.model.parameters():
            if p.grad is not None:
                p.grad.mul_(by)
