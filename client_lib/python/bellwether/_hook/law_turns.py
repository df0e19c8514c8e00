"""Which layers the laws of attention are asked about in a sample, by its number alone: all ranks
choose the same, and nothing is kept between samples."""

from __future__ import annotations

import dataclasses

SHARE_ON_GPUS = 8  # One layer in so many is asked in a sample there, at least one.
COMPARED = 2  # Of four layers or more so many are compared in a sample, where all are asked.
KEYS_EVERY = 4  # On a GPU keys are compared to a reference in one of so many of a layer's turns.


@dataclasses.dataclass(frozen=True)
class LawTurn:
    """Of one layer in one sample."""

    asked: bool  # about its laws
    compared: bool = False  # to a reference as well
    with_keys: bool = False  # dk and dv are compared, too


def law_turn(layer: int, layers: int, sample: int, at_once: int, keys_every: int = 1) -> LawTurn:
    """
    layer       from 0; below 0: it has no number yet, as in the first sample
    layers      that report
    at_once     how many are asked in a sample at most; all have had their turn within the fewest
                samples that allow it, and are compared within `layers` of them, or a few more
    keys_every  in which of the comparisons of a layer its keys take part
    """
    if layer < 0 or layers < 1:
        return LawTurn(False)
    turns = -(-layers // max(at_once, 1))
    first, turn = sample % turns, sample // turns
    if layer % turns != first:
        return LawTurn(False)
    asked = len(range(first, layers, turns))
    at_a_time = COMPARED if turns == 1 and asked >= 2 * COMPARED else 1
    rounds = -(-asked // at_a_time)
    compared = layer // turns % rounds == turn % rounds
    return LawTurn(True, compared, compared and turn // rounds % keys_every == 0)
