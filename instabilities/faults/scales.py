"""Scales of tensors in 8 bits that do not fit."""

from __future__ import annotations

import random

from ..fp8 import FORMATS, Linear8
from ..settings import Setting
from ..training import Training
from .base import SLOW, Fault, Place
from .corruption import MATRICES

SMALLEST = {"x": 1e3, "w": 1e3, "dy": 1e6}  # Factors by which a scale that is too small is off,
LARGEST = {"x": 1e6, "w": 1e6, "dy": 1e10}  # by what a format holds.
# What these are given, and their weights, grow from the first steps on; what norms return does not.
GROWING = ("self_attn.o_proj", "mlp.down_proj")


class Fp8Saturation(Fault):
    """The scale of one tensor is off by a factor, or is that of an early step for ever.

    One that is too large clamps the largest elements, one that is too small makes the small ones 0.
    """

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self._side = draw.choice(list(FORMATS))
        how = draw.choice(("clamps", "flushes", "stays"))
        if how == "clamps":
            self.strength = self.drawn_strength(draw, 1.2, 1e4)
            self._factor = self.strength
        elif how == "flushes":
            self.strength = self.drawn_strength(draw, SMALLEST[self._side], LARGEST[self._side])
            self._factor = 1 / self.strength
        else:
            self.kind, self.onset = SLOW, draw.randint(2, min(20, setting.steps - 1))
            self._side = "w" if self._side == "w" else "x"
        self.variant = f"{self._side} {how}"
        layer = draw.randrange(setting.layers)
        self._module = f"layers.{layer}.{draw.choice(MATRICES if self.strength else GROWING)}"
        self.place = Place(layer=layer, tensor=f"{self._module}.weight")
        return setting.changed(fp8=True, experts=0)

    def begins(self, training: Training) -> None:
        if not self.is_on(training):
            return
        module = training.model.get_submodule(self._module)
        assert isinstance(module, Linear8)
        scale = module.scales[self._side]
        if self.kind == SLOW:
            scale.follows = False
        else:
            scale.factor = self._factor
