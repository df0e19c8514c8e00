"""What benchmarks that compare pairs of blocks share."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence


def median_and_interval(values: Sequence[float]) -> list[float]:
    """The median with its 95 % interval, by the bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return [statistics.median(values), medians[50], medians[-51]]
