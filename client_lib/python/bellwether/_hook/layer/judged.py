"""What the server can judge of each layer, by what its samples hold.

A family of rules finds nothing where its signals are not measured, which looks like health: so
the job's own log says once what is not measured, where and why, and doctor fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from .notes import WITHOUT_LEAK, WITHOUT_NORM, why

if TYPE_CHECKING:
    from ...settings import Settings
    from .layer import Layer

# Rules of the server, and which of the statistics they take (settings.STATS).
FAMILIES = {"drift": "drift", "ties": "ties", "norm": "sigma", "logits": "ties", "leak": "leak"}
MISSED_MAX = 8  # Samples in a row without, as the server counts.
SAMPLES_TOLD = 4  # Then the log says it; or at the end, if there are fewer.


class Judged:
    """Counts for each layer and family the samples in a row that were without it."""

    def __init__(self, settings: Settings) -> None:
        self.wanted = tuple(f for f, part in FAMILIES.items() if part in settings.stats)
        self.samples = 0
        self._missed: dict[int, dict[str, int]] = {}
        self._told = False

    def add(self, families: dict[int, set[str]]) -> None:
        """One sample: what it holds of each layer."""
        self.samples += 1
        for index, held in families.items():
            missed = self._missed.setdefault(index, dict.fromkeys(self.wanted, 0))
            for family in self.wanted:
                missed[family] = 0 if family in held else missed[family] + 1

    def lacks(self, layer: Layer) -> list[str]:
        """Families that are not judged in it though they could be."""
        missed = self._missed.get(layer.index, {})
        enough = min(MISSED_MAX, self.samples)
        found = [family for family, count in missed.items() if count >= max(1, enough)]
        without = {"leak": WITHOUT_LEAK, "norm": WITHOUT_NORM}
        return [f for f in found if without.get(f, frozenset()).isdisjoint(layer.notes)]

    def due(self, ended: bool) -> bool:
        """Whether line() may have something to say, for which the layers have to be looked at."""
        return not self._told and self.samples >= (1 if ended else SAMPLES_TOLD)

    def line(self, reporting: list[Layer], unmeasured: list[Layer]) -> Optional[str]:
        """What the log is to say, once; None = nothing.  That a run reports nothing at all is told
        elsewhere."""
        if not reporting:
            return None
        lacking = [(layer, list(self.wanted)) for layer in unmeasured]
        lacking += [(layer, families) for layer in reporting if (families := self.lacks(layer))]
        if not lacking:
            return None
        self._told = True
        first, families = lacking[0]
        name = f"{first.name or 'the model'} ({first.module_class.__name__})"
        return (
            f"this run is judged in part only: not by {', '.join(families)} in {len(lacking)} of "
            f"{len(reporting) + len(unmeasured)} layers. {name}: {why(first.notes, first.calls)} "
            "(python -m bellwether doctor names each layer)"
        )
