"""The families of faults, each with the one string that says its cause.

A truth has one of these as its cause, and a monitor is right if it says the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEALTHY = "healthy"
UNKNOWN = "unknown"  # A monitor may say so; it is not right.


@dataclass(frozen=True)
class Family:
    cause: str
    meaning: str
    always: bool = False  # Something is wrong whatever the loss does, and has to be told.
    # Of what takes turns to be measured: samples, for each layer of the model, of one turn of all.
    in_turn: int = 0

    @property
    def name(self) -> str:
        """As commands and files have it: "dead-experts"."""
        return re.sub(r"[^a-z0-9]+", "-", self.cause.lower())


_ALL = (
    Family(HEALTHY, "no fault; every warning is a false one"),
    Family("rounding drift", "biased rounding of a low-precision kernel pushes W_Q"),
    Family(
        "faulty kernel",
        "attention of one layer returns a wrong output or gradient",
        always=True,
        in_turn=1,  # A layer a sample is compared with a reference.
    ),
    Family("logit growth", "queries and keys of a layer grow, and scores with them"),
    Family("learning rate too high", "from the start, or from one step on"),
    Family("warm-up missing", "the full learning rate from step 0"),
    Family("second moment too slow", "gradients grow, and Adam's second moment does not follow"),
    Family("epsilon too small", "Adam divides by a second moment that has underflowed"),
    Family("bad data", "some batches of tokens that are no text"),
    Family(
        "nothing to learn",
        "all labels masked, labels constant, or one batch again and again",
        always=True,
    ),
    Family(
        "optimizer does not move", "not stepped, at a rate of 0, or without one layer", always=True
    ),
    Family("gradients not cleared", "zero_grad is forgotten, wholly or in part"),
    Family("gradients scaled wrongly", "unscaled twice, or not at all", always=True),
    Family("dead experts", "an expert gets no tokens, or two get all", always=True),
    Family("residual growth", "what a block adds to the residual stream grows"),
    Family("head growth", "the output layer or the embedding grows"),
    Family(
        "FP8 saturation",
        "the scale of a tensor in 8 bits does not fit: values clamp, or become 0",
        always=True,
        in_turn=2,  # Four modules a sample, of at most eight.
    ),
    Family("corruption", "one bit of a weight, one gradient element, or one activation"),
    Family("replicas apart", "copies of a weight at two ranks differ", always=True),
    Family("rollout apart", "the policy that samples is not the one that is trained"),
    Family("step change of the loss", "the loss jumps at a step and does not come back"),
    Family("stall", "the loss falls no more, though there is more to learn"),
)
FAMILIES = {family.name: family for family in _ALL}
CAUSES = {family.cause for family in _ALL}


def family(name: str) -> Family:
    """By its name or its cause.  Raises ValueError."""
    found = FAMILIES.get(re.sub(r"[^a-z0-9]+", "-", name.lower()))
    if found is None:
        raise ValueError(f"family {name!r} is not one of {', '.join(FAMILIES)}")
    return found
