"""A router that gives an expert nothing, or all to the same."""

from __future__ import annotations

import random

from ..models import TOP_K
from ..settings import Setting
from ..training import Training
from .base import Fault, Place


class DeadExperts(Fault):
    """The strength is what the router's bias adds to, or takes from, an expert's logit."""

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        experts = setting.experts or (4 if self.split == "train" else 8)
        self.strength = self.drawn_strength(draw, 4.0, 50.0)
        self.variant = draw.choice(("dead", "collapsed"))
        layer, self._expert = draw.randrange(setting.layers), draw.randrange(experts)
        dead = self.variant == "dead"
        self.place = Place(layer=layer, expert=self._expert if dead else None)
        return setting.changed(experts=experts)

    def begins(self, training: Training) -> None:
        if not self.is_on(training):
            return
        assert self.place.layer is not None and self.strength is not None
        bias = training.model.mixtures()[self.place.layer].router.bias
        if self.variant == "dead":
            bias[self._expert] = -self.strength
        else:
            for other in range(TOP_K):
                bias[(self._expert + other) % len(bias)] = self.strength
