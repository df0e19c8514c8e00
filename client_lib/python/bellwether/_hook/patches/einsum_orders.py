"""What the dimensions of a product's operands are, by the equation of einsum or by their place.

A product of queries and keys sums over one dimension, keeps those that both have (batches and
heads), and has one more of each: rows and keys.  That with the values sums over the keys.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple, Optional

from torch import Tensor

_PART = r"((?:\.\.\.)?[a-zA-Z]+)"
_EQUATION = re.compile(f"{_PART},{_PART}->{_PART}")
# That stand for the dimensions of an ellipsis: no equation is made of them.
_OTHERS = "\u03b1\u03b2\u03b3\u03b4"


@dataclasses.dataclass(frozen=True)
class Order:
    """Which dimension of a tensor is what."""

    batch: tuple[int, ...]
    heads: int
    rows: int  # Those of keys and values are their tokens.
    last: int  # Keys of scores; of the others the dimension of a head.

    def view(self, x: Tensor) -> Tensor:
        """[batch, heads, rows, last]"""
        return x.permute(*self.batch, self.heads, self.rows, self.last).flatten(
            0, len(self.batch) - 1
        )

    def turned(self, dims: Sequence[int]) -> Order:
        """Of the tensor whose dimension i is dims[i] of this one."""
        place = list(dims).index
        return Order(
            tuple(map(place, self.batch)), place(self.heads), place(self.rows), place(self.last)
        )

    def view_of_term(self, term: Tensor, shape: Sequence[int]) -> Tensor:
        """The same view of what broadcasts to a tensor of this shape."""
        term = term.reshape((1,) * (len(shape) - term.dim()) + tuple(term.shape))
        if len(self.batch) > 1:
            term = term.expand(*(shape[i] if i in self.batch else -1 for i in range(len(shape))))
        return self.view(term)


USUAL = Order((0,), 1, 2, 3)


class OfScores(NamedTuple):
    q: Order
    k: Order
    scores: Order
    keys_first: bool  # The keys are the first operand.


def _letters(equation: str, a: Tensor, b: Tensor) -> Optional[tuple[str, str, str]]:
    """One for each dimension."""
    found = _EQUATION.fullmatch(equation.replace(" ", ""))
    if found is None:
        return None
    parts = list(found.groups())
    if any(part.startswith("...") for part in parts):
        if not all(part.startswith("...") for part in parts):
            return None
        more = [x.dim() - len(part) + 3 for x, part in zip((a, b), parts)]
        if more[0] != more[1] or not 0 <= more[0] <= len(_OTHERS):
            return None
        parts = [_OTHERS[: more[0]] + part[3:] for part in parts]
    if (a.dim(), b.dim()) != (len(parts[0]), len(parts[1])):
        return None
    return (parts[0], parts[1], parts[2]) if all(len(set(x)) == len(x) for x in parts) else None


def of_scores(equation: str, a: Tensor, b: Tensor) -> Optional[OfScores]:
    """None where it is no product of queries and keys."""
    letters = _letters(equation, a, b)
    if letters is None:
        return None
    sizes = dict(zip(letters[0], a.shape))
    if any(sizes.get(letter, size) != size for letter, size in zip(letters[1], b.shape)):
        return None
    keys_first = False
    q, k, out = letters
    summed = [x for x in q if x in k and x not in out]
    of_q, of_k = [x for x in q if x not in k], [x for x in k if x not in q]
    shared = [x for x in q if x in k and x in out]
    if (len(summed), len(of_q), len(of_k)) != (1, 1, 1) or len(shared) < 2:
        return None
    if len(out) != len(shared) + 2 or of_q[0] not in out or of_k[0] not in out:
        return None
    if out.index(of_q[0]) > out.index(of_k[0]):  # Rows come before keys.
        keys_first, q, k, of_q, of_k = True, k, q, of_k, of_q
        shared = [x for x in q if x in shared]

    def order(of: str, rows: str, last: str) -> Order:
        batch = tuple(of.index(x) for x in shared[:-1])
        return Order(batch, of.index(shared[-1]), of.index(rows), of.index(last))

    return OfScores(
        order(q, of_q[0], summed[0]), order(k, of_k[0], summed[0]),
        order(out, of_q[0], of_k[0]), keys_first,
    )  # fmt: skip


def of_values(
    equation: str, a: Tensor, b: Tensor, weights_first: bool, weights: Order
) -> Optional[tuple[Order, Order]]:
    """(of the values, of the output); None where it is no product of weights and values."""
    letters = _letters(equation, a, b)
    if letters is None:
        return None
    of, v, out = letters if weights_first else (letters[1], letters[0], letters[2])
    if len(of) != len(weights.batch) + 3:
        return None
    batch, heads = [of[i] for i in weights.batch], of[weights.heads]
    rows, keys = of[weights.rows], of[weights.last]
    dims = [x for x in v if x not in of]
    if len(dims) != 1 or set(v) != {*batch, heads, keys, *dims}:
        return None
    if set(out) != {*batch, heads, rows, *dims}:
        return None

    def order(of: str, tokens: str) -> Order:
        places = tuple(of.index(x) for x in batch)
        return Order(places, of.index(heads), of.index(tokens), of.index(dims[0]))

    return order(v, keys), order(out, rows)
