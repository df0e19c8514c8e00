"""Two jobs in processes of their own, which run blocks of steps by turns on one device.

While one runs a block the other stands still.  Blocks come as A B B A, then B A A B, and so on:
what drifts evenly, as a card's temperature does, costs both the same.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

# Of what it is given, in its own process: what answers what the process is told.
Make = Callable[[Any], Callable[..., Any]]


def _serve(connection: Any, make: Make, given: Any) -> None:
    answer = make(given)
    while (told := connection.recv()) is not None:
        connection.send(answer(*told))


class Twin:
    """A process that makes something of `given` at once, and answers one question at a time.

    make  at the top of a module, since the process imports it
    """

    def __init__(self, make: Make, given: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, given), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, *told: Any) -> None:
        """Without waiting for the answer."""
        self._connection.send(told)

    def answer(self) -> Any:
        """Raises EOFError if the process has ended."""
        return self._connection.recv()

    def ask(self, *told: Any) -> Any:
        self.begin(*told)
        return self.answer()

    def end(self) -> None:
        self._connection.send(None)
        self._process.join()


def turns(a: Any, b: Any) -> Iterator[list[Any]]:
    """Whose blocks come, four at a time."""
    while True:
        yield [a, b, b, a]
        yield [b, a, a, b]


def student(freedom: int) -> float:
    """The factor of a 95 % interval with so many degrees of freedom, at least 3: within 1 %."""
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


def mean_and_half_width(values: Sequence[float]) -> tuple[Optional[float], float]:
    """With 95 % by Student's distribution; infinite below four values."""
    if not values:
        return None, math.inf
    mean, count = statistics.fmean(values), len(values)
    if count < 4:
        return mean, math.inf
    return mean, student(count - 1) * statistics.stdev(values) / math.sqrt(count)
