"""The laws of a step's layers, but for attention's, as rows that the server judges.

A row is one law at one place.  Its name is "PLACE LAW", as in "model.layers.3.mlp.up_proj dx=dW":
LAW begins with the computed tensors that enter, joined by =.  Behind a colon it may say which sum
it is.  The server needs no list of laws.  Rows get their numbers in the order in which they first
come, so layers that take their turn together lie together, and a step needs few blocks.
"""

from __future__ import annotations

import array
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Optional, Protocol

import torch

from .._native import c_api
from .._native.run_client import Block, RunClient

_GAP_MAX = 64  # Rows between two of a step that are sent as not measured, to spare blocks.
_RANGES_MAX = 6  # Of rows in a frame; a block each for each signal.


@dataclasses.dataclass(frozen=True)
class LawRow:
    """What a law gave at a place.  Gradients are as the loss scale left them.

    difference  of two sums that exact arithmetic makes equal; nan where an element is not finite
    variance    of it, by independent roundings
    alike       how far roundings that are all alike can move it
    alike_sigma  standard deviation of that part of the variance which may be the same on all ranks
    in_nonfinite, out_nonfinite  elements that are not finite in what the call was given, and in
                what it computed and the law names; None = not counted
    """

    place: str
    law: str
    difference: float
    variance: float
    alike: float = 0.0
    in_nonfinite: Optional[int] = None
    out_nonfinite: Optional[int] = None
    alike_sigma: float = 0.0


class NamedLaws(Protocol):
    """What some layers of one step gave, perhaps still on its way from a GPU."""

    def ready(self) -> bool: ...

    def law_rows(self) -> list[LawRow]:
        """Must be ready."""

    def summary(self) -> dict[str, float]:
        """For people and other loggers, by name.  Must be ready."""


SIGNALS = (
    "law_difference",
    "law_variance",
    "law_alike",
    "law_in_nonfinite",
    "law_out_nonfinite",
    "law_alike_sigma",
)
# A float32 ends at 3.4e38, and up to 4,096 ranks are added.
_SUM_MAX = 1e30


def _values(row: LawRow, scale: float) -> tuple[float, ...]:
    """In the order of SIGNALS."""
    counts = (
        c_api.NOT_MEASURED if n is None else float(n) for n in (row.in_nonfinite, row.out_nonfinite)
    )
    difference, variance = row.difference / scale, row.variance / scale**2
    alike, sigma = row.alike / scale, row.alike_sigma / scale
    # An element of 1e26 has a variance that a float32 does not hold.  The row then shrinks as a
    # whole: its z stays, and the sum over ranks is as sound as before, of other weights.
    largest = max(abs(difference), math.sqrt(variance) if variance > 0 else 0.0, alike, sigma)
    if math.sqrt(_SUM_MAX) < largest < math.inf:
        by = math.sqrt(_SUM_MAX) / largest
        difference, variance = difference * by, variance * by * by
        alike, sigma = alike * by, sigma * by
    return (difference, variance, alike, *counts, sigma)


class LawRows:
    """The rows of a run: those of laws, and of activations, which have the module's name alone."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.refused = 0  # Rows without a place among NAMED_ROWS_MAX, or whose name is too long.
        self.not_sent = 0  # Rows whose names wait, or that a frame had no blocks for.
        self._rows: dict[str, int] = {}
        self._named = 0  # To the server.

    def row(self, name: str) -> Optional[int]:
        """Its number, a new one at first; None if there is none left."""
        found = self._rows.get(name)
        if found is None:
            too_long = len(name.encode()) > c_api.ROW_NAME_MAX
            if too_long or len(self.names) >= c_api.NAMED_ROWS_MAX:
                self.refused += 1
                return None
            found = self._rows[name] = len(self.names)
            self.names.append(name)
        return found

    def blocks(
        self, client: Optional[RunClient], rows: Sequence[LawRow], scale: float, room: int
    ) -> list[Block]:
        """What a frame has of them.  Names that are new go to the server first.

        scale  what the loss was multiplied by
        room   blocks that the frame can still take
        """
        of: dict[int, LawRow] = {}
        for law in rows:
            number = self.row(f"{law.place} {law.law}")
            if number is not None:
                of[number] = law
        if client is None or not of:
            return []
        return [
            block for of_range in self.sent(client, of, min(_RANGES_MAX, room // len(SIGNALS)))
            for block in self._blocks(of, of_range, scale)
        ]  # fmt: skip

    def sent(self, client: RunClient, rows: Collection[int], at_most: int) -> list[range]:
        """Those whose names the server has, in so few ranges.  The others are counted."""
        named = self.tell(client)
        numbers = sorted(number for number in rows if number < named)
        found = ranges(numbers, at_most)
        self.not_sent += len(rows) - (len(numbers) if found else 0)
        return found

    def tell(self, client: RunClient) -> int:
        """How many rows have told their names to the server; new ones do first."""
        if self._named < len(self.names):
            self._named += client.push_names(c_api.MODULE, self.names[self._named :], self._named)
        return self._named

    def _blocks(self, of: dict[int, LawRow], numbers: range, scale: float) -> Iterator[Block]:
        missing = (c_api.NOT_MEASURED,) * len(SIGNALS)
        columns = zip(*(_values(of[n], scale) if n in of else missing for n in numbers))
        for signal, column in zip(SIGNALS, columns):
            yield Block(signal, array.array("f", column), numbers.start, len(numbers))


def ranges(numbers: Sequence[int], at_most: int) -> list[range]:
    """Numbers that rise, as so few ranges: cut at the widest gaps."""
    if not numbers or at_most < 1:
        return []
    gaps = [after - before for before, after in zip(numbers, numbers[1:])]
    wide = sorted((i for i, gap in enumerate(gaps) if gap > _GAP_MAX), key=lambda i: -gaps[i])
    cuts = [-1, *sorted(wide[: at_most - 1]), len(numbers) - 1]
    return [range(numbers[a + 1], numbers[b] + 1) for a, b in zip(cuts, cuts[1:])]


def told(signal: str, values: array.array[float], first: int) -> list[Block]:
    """From the first to the last row that has it."""
    if not values:  # No row has a name yet: torch takes no empty buffer.
        return []
    bits = torch.frombuffer(values, dtype=torch.int32)
    there = (bits != c_api.NOT_MEASURED_BITS).nonzero().flatten().tolist()
    if not there:
        return []
    begin, end = there[0], there[-1] + 1
    return [Block(signal, values[begin:end], first + begin, end - begin)]
