"""The faults, by the name of their family.  To add one: a class in a file here, and a row below."""

from __future__ import annotations

import random

from ..settings import Setting
from .attention import FaultyKernel, LogitGrowth, RoundingDrift
from .base import Fault
from .copies import ReplicasApart, RolloutApart
from .corruption import Corruption
from .data import BadData, NothingToLearn, StepChange
from .experts import DeadExperts
from .gradients import DoesNotMove, NotCleared, ScaledWrongly
from .growth import HeadGrowth, ResidualGrowth
from .rates import EpsilonTooSmall, RateTooHigh, SlowSecondMoment, Stall, WarmUpMissing
from .scales import Fp8Saturation

FAULTS: dict[str, type[Fault]] = {
    "rounding-drift": RoundingDrift,
    "faulty-kernel": FaultyKernel,
    "logit-growth": LogitGrowth,
    "learning-rate-too-high": RateTooHigh,
    "warm-up-missing": WarmUpMissing,
    "second-moment-too-slow": SlowSecondMoment,
    "epsilon-too-small": EpsilonTooSmall,
    "bad-data": BadData,
    "nothing-to-learn": NothingToLearn,
    "optimizer-does-not-move": DoesNotMove,
    "gradients-not-cleared": NotCleared,
    "gradients-scaled-wrongly": ScaledWrongly,
    "dead-experts": DeadExperts,
    "residual-growth": ResidualGrowth,
    "head-growth": HeadGrowth,
    "fp8-saturation": Fp8Saturation,
    "corruption": Corruption,
    "replicas-apart": ReplicasApart,
    "rollout-apart": RolloutApart,
    "step-change-of-the-loss": StepChange,
    "stall": Stall,
}


def fault_of(name: str, draw: random.Random, split: str, setting: Setting) -> Fault:
    """Raises ValueError for a family that has no fault here."""
    if name not in FAULTS:
        raise ValueError(f"family {name} is not made here; those that are: {', '.join(FAULTS)}")
    return FAULTS[name](draw, split, setting)
