"""Faults of what is read."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from ..corpus import VOCABULARY
from ..settings import Setting
from ..training import MASKED, Training
from .base import Fault


def _generator(training: Training) -> torch.Generator:
    return torch.Generator().manual_seed(training.seed * 999_983 + training.step)


class BadData(Fault):
    """The strength is the share of sequences that are random bytes, or one byte again and again."""

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 1 / setting.batch, 1.0)
        self.until = self.onset + draw.randint(1, 20)
        self.variant = draw.choice(("random", "repeated"))
        return setting

    def batch(self, training: Training, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_on(training):
            return tokens, labels
        assert self.strength is not None
        rows = max(1, round(self.strength * len(tokens)))
        generator = _generator(training)
        if self.variant == "random":
            shape = (rows, tokens.shape[1] + 1)
            bad = torch.randint(0, VOCABULARY, shape, generator=generator)
        else:
            byte = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
            bad = byte.expand(-1, tokens.shape[1] + 1)
        tokens, labels = tokens.clone(), labels.clone()
        tokens[:rows], labels[:rows] = bad[:, :-1], bad[:, 1:]
        return tokens, labels


class NothingToLearn(Fault):
    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.variant = draw.choice(("all labels masked", "labels constant", "one batch"))
        return setting

    def batch(self, training: Training, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_on(training):
            return tokens, labels
        if self.variant == "all labels masked":
            return tokens, torch.full_like(labels, MASKED)
        if self.variant == "labels constant":
            return tokens, torch.full_like(labels, ord(" "))
        return training._read(self.onset, training.seed)


class StepChange(Fault):
    """From a step on a share of the labels is chance, or dropout is on: a level, no drift."""

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        self.strength = self.drawn_strength(draw, 0.003, 0.6)
        self.variant = draw.choice(("labels", "dropout"))
        return setting

    def begins(self, training: Training) -> None:
        if self.variant == "dropout" and self.is_on(training):
            assert self.strength is not None
            training.model.dropout = self.strength

    def batch(self, training: Training, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.variant != "labels" or not self.is_on(training):
            return tokens, labels
        assert self.strength is not None
        generator = _generator(training)
        wrong = torch.rand(labels.shape, generator=generator) < self.strength
        other = torch.randint(0, VOCABULARY, labels.shape, generator=generator)
        return tokens, torch.where(wrong.to(labels.device), other.to(labels.device), labels)
