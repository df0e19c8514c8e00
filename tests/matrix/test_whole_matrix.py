"""Goal: every cell of the matrix's cover is as it should be, and 60 more by chance are.
Method: the cells run in two processes; the seed is printed.  Results are kept in build/, so a
second start goes on where the first one ended.  What is open (less_than_full.py) has to fail: a
kind that is watched by now may no longer stand there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

import less_than_full
import matrix
from cell import Cell


def failed(cells: Iterable[Cell]) -> list[str]:
    results = matrix.Results(matrix.ROOT / "build" / "matrix.jsonl")
    cells = list(cells)
    matrix.run(cells, results, jobs=2)
    found = [results.found[str(cell)] for cell in cells]
    print(matrix.table(found))
    return [matrix.describe(result) for result in found if not matrix.passed(result)]


def test_every_cell_of_the_cover_is_as_it_should_be() -> None:
    wrong = failed(cell for cell in matrix.cover() if not less_than_full.is_open(cell))
    assert not wrong, "\n".join(wrong)


def test_cells_by_chance_are_as_they_should_be() -> None:
    seed = random.SystemRandom().randrange(10**6)
    chosen = [cell for cell in matrix.by_chance(90, seed) if not less_than_full.is_open(cell)]
    wrong = failed(chosen[:60])
    assert not wrong, "\n".join([f"seed {seed}", *wrong])


@pytest.mark.parametrize("words", less_than_full.OPEN)
def test_an_open_kind_is_not_watched_yet(words: str) -> None:
    cells = [next(c for c in matrix.every_cell() if set(words.split()) <= set(c))]
    assert failed(cells), f"{words} is watched: less_than_full.OPEN may not have it any more"
