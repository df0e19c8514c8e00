"""One element that is wrong once: of a weight, a gradient or an activation."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from ..settings import Setting
from ..training import Training
from .base import Fault, Place

MATRICES = (
    "self_attn.q_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class Corruption(Fault):
    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.until = self.onset + 1
        self.variant = draw.choice(("weight", "gradient", "activation"))
        layer = draw.randrange(setting.layers)
        self._row, self._column = draw.randrange(setting.width), draw.randrange(setting.width // 2)
        if self.variant == "activation":
            self.strength = self.drawn_strength(draw, 4.0, 1e20)
            self.place = Place(layer=layer)
            return setting
        most = 2.0**60 if self.variant == "weight" else 1e30
        self.strength = self.drawn_strength(draw, 2.0, most)
        matrix = draw.choice(MATRICES)
        head = None
        if matrix.endswith("q_proj"):
            head = self._row * setting.heads // setting.width
        self.place = Place(layer=layer, head=head, tensor=f"layers.{layer}.{matrix}.weight")
        return setting.changed(experts=0)

    def built(self, training: Training) -> None:
        if self.variant == "activation":
            assert self.place.layer is not None
            mlp = training.model.blocks()[self.place.layer].mlp
            assert mlp is not None
            mlp.register_forward_hook(lambda module, inputs, output: self._spoilt(training, output))

    def _spoilt(self, training: Training, output: Tensor) -> Tensor:
        if not self.is_on(training):
            return output
        assert self.strength is not None
        factor = torch.ones_like(output)
        factor[0, -1, self._row] = self.strength
        return output * factor

    def _element(self, training: Training) -> Any:
        p = training.model.get_parameter(str(self.place.tensor))
        return p, (self._row % p.shape[0], self._column % p.shape[1])

    @torch.no_grad()
    def gradients(self, training: Training) -> None:
        if self.variant == "gradient" and self.is_on(training):
            p, at = self._element(training)
            p.grad[at] = self.strength * p.grad.square().mean().sqrt()

    @torch.no_grad()
    def weights(self, training: Training) -> None:
        if self.variant == "weight" and self.is_on(training):
            p, at = self._element(training)
            p[at] *= self.strength  # A power of two of the exponent, or nearly.
