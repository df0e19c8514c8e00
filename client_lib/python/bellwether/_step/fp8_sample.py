"""What was measured of tensors in 8 bits in one step, as blocks of a frame."""

from __future__ import annotations

import array
import dataclasses
from typing import Optional

from .._hook.layer.fp8_tap import COUNTS, STATS, Quantised
from .._native import c_api
from .._native.run_client import Block, RunClient
from .law_rows import LawRows, told
from .tapped_modules import Arriving

SIGNALS = (
    "fp8_elements",
    "fp8_saturated",
    "fp8_zeros",
    "fp8_nonzero_inputs",
    "fp8_flushed",
    "fp8_nonfinite",
    "fp8_scale",
    "fp8_amax_age",
)
COUNTED = ("elements", *COUNTS)
_RANGES_MAX = 4  # Of rows in a frame; a block each for each signal.
_MISSING = (c_api.NOT_MEASURED,) * len(SIGNALS)
Scales = tuple[float, float]  # The largest one, and their sum.


@dataclasses.dataclass
class Measured:
    """Of one row.  stats  as STATS of fp8_tap has them; None: what is not known"""

    name: str
    stats: dict[str, Optional[float]]


class Ages:
    """Since when each row has had its scales, in the order of the samples."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[Scales, int]] = {}

    def of(self, name: str, scales: Scales, step: int) -> int:
        """Steps, 0 where they are new."""
        known = self._since.get(name)
        if known is None or known[0] != scales or step < known[1]:
            self._since[name] = scales, step
            return 0
        return step - known[1]


class Fp8Sample:
    """
    names     of modules
    measured  sides of modules
    """

    def __init__(self, names: list[str], measured: list[Quantised], ages: Ages) -> None:
        self._names, self._measured, self._ages = names, measured, ages
        self._wholes = list({id(of.whole): of.whole for of in measured}.values())
        self._arriving = Arriving(self._wholes)

    def ready(self) -> bool:
        return self._arriving.ready()

    def _rows(self) -> list[Measured]:
        found = []
        arrived = {id(whole): v for whole, v in zip(self._wholes, self._arriving.values())}
        for of in self._measured:
            values = arrived[id(of.whole)][of.at[0]][of.at[1]]
            stats: dict[str, Optional[float]] = dict(zip(STATS, values))
            if not of.before_seen:
                stats["nonzero_inputs"] = stats["flushed"] = None
            if of.scale_alone:
                stats = {name: None if name in COUNTED else stats[name] for name in stats}
            found.append(Measured(row_name(self._names[of.row], of.side), stats))
        return found

    def blocks(
        self, client: Optional[RunClient], rows: LawRows, step: int, room: int
    ) -> list[Block]:
        """For at most so many blocks.  Must be ready.  rows  give the names their numbers"""
        table: dict[int, tuple[float, ...]] = {}
        for row in self._rows():
            of = row.stats
            scale, scales = of["scale"], of["scales"]
            age = None
            if scale is not None and scales is not None:
                age = self._ages.of(row.name, (scale, scales), step)
            number = rows.row(row.name)
            if number is not None:
                values = (
                    of["elements"], of["saturated"], of["zeros"], of["nonzero_inputs"],
                    of["flushed"], of["nonfinite"], scale, age,
                )  # fmt: skip
                table[number] = tuple(
                    c_api.NOT_MEASURED if value is None else float(value) for value in values
                )
        if client is None or not table:
            return []
        found: list[Block] = []
        for of_range in rows.sent(client, table, min(_RANGES_MAX, room // len(SIGNALS))):
            lines = (table.get(n, _MISSING) for n in of_range)
            for signal, column in zip(SIGNALS, zip(*lines)):
                found += told(signal, array.array("f", column), of_range.start)
        return found


def row_name(module: str, side: str) -> str:
    return f"{module} fp8:{side}"
