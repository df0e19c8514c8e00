"""Faults of what the optimizer is told: its rate, its warm-up, beta2 and epsilon."""

from __future__ import annotations

import random

from ..settings import Setting
from ..training import Training
from .base import INJECTED, SLOW, Fault


def _multiply_rates(training: Training, factor: float) -> None:
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= factor


class RateTooHigh(Fault):
    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 1.2, 100.0)
        self.variant = draw.choice(("from the start", "at a step"))
        if self.variant == "from the start":
            self.kind, self.onset = SLOW, 0
        else:
            self.kind = INJECTED
        return setting

    def begins(self, training: Training) -> None:
        if self.is_on(training):
            assert self.strength is not None
            _multiply_rates(training, self.strength)


class WarmUpMissing(Fault):
    """The strength is the largest rate over the setting's; the twin has it too, and a warm-up."""

    kind = SLOW

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.onset = 0
        self.strength = self.drawn_strength(draw, 1.5, 12.0)
        return setting.changed(lr=setting.lr * self.strength, warmup=100)

    def changes(self, setting: Setting) -> Setting:
        return setting.changed(warmup=0)


class SlowSecondMoment(Fault):
    """The loss counts thirty times as much from a step on; beta2 is 1 - 1 / strength."""

    kind = SLOW

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 20.0, 1e5)
        return setting.changed(
            weight_until=self.onset, clip=None, beta2=0.95, optimizer="adamw", dtype="float32",
            lr=3 * setting.lr,  # At a small one no step is too large.
        )  # fmt: skip

    def changes(self, setting: Setting) -> Setting:
        assert self.strength is not None
        return setting.changed(beta2=1 - 1 / self.strength)


class EpsilonTooSmall(Fault):
    """Second moments in 16 bits underflow; epsilon, 1e-4 in the twin, is `strength` times less."""

    kind = SLOW

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.onset = 0
        self.strength = self.drawn_strength(draw, 1.5, 1e4)
        return setting.changed(moments="float16", eps=1e-4, optimizer="adamw", dtype="float32")

    def changes(self, setting: Setting) -> Setting:
        assert self.strength is not None
        return setting.changed(eps=setting.eps / self.strength)


class Stall(Fault):
    """The rate is divided by the strength: the loss stays where it is, though more could be won."""

    kind = SLOW

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.onset = int(0.2 * setting.steps)
        self.strength = self.drawn_strength(draw, 1.1, 1e4)
        return setting

    def begins(self, training: Training) -> None:
        if self.is_on(training):
            assert self.strength is not None
            _multiply_rates(training, 1 / self.strength)
