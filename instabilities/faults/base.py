"""What all faults have: when, where and how strong, drawn from the seed, and the truth of it.

A fault has a class in a file of this folder, and its class a row in __init__.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from ..settings import Setting, log_uniform
from ..training import NoFault, Training

INJECTED, SLOW = "injected", "slow"


@dataclass(frozen=True)
class Place:
    """Where a fault is; None where it has no such place."""

    layer: Optional[int] = None
    head: Optional[int] = None
    tensor: Optional[str] = None
    expert: Optional[int] = None
    rank: Optional[int] = None


class Fault(NoFault):
    """`setting` is that of the run and of its twin; `strength` None: the fault is there or not."""

    # Fields of the setting that are not drawn, unless the request has them.
    usual: ClassVar[dict[str, Any]] = {}
    kind = INJECTED  # SLOW: it is no single moment, and is judged by whether it is told in time.

    def __init__(self, draw: random.Random, split: str, setting: Setting) -> None:
        self.split = split
        self.onset = draw.randint(int(0.3 * setting.steps), int(0.6 * setting.steps))
        self.until: Optional[int] = None  # The first step that is right again.
        self.strength: Optional[float] = None
        self.variant = ""
        self.place = Place()
        self.setting = self.prepared(draw, setting)

    def prepared(self, draw: random.Random, setting: Setting) -> Setting:
        """Draws strength and place; returns what run and twin need for the fault to be possible."""
        raise NotImplementedError

    def drawn_strength(self, draw: random.Random, low: float, high: float) -> float:
        return log_uniform(draw, low, high, self.split)

    def is_on(self, training: Training) -> bool:
        return self.onset <= training.step and (self.until is None or training.step < self.until)
