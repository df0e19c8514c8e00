"""Which rows of which projection are W_Q and W_K of each head."""

from __future__ import annotations

import dataclasses
import functools
from typing import Optional

import torch
from torch import Tensor, nn

from . import low_rank
from .adapters import Unreadable
from .projection import Projection, read, resolve


@dataclasses.dataclass(frozen=True)
class Rows:
    path: str  # Of the projection, or of its weight.
    total: int  # Rows that it has; with another number it is not this one.
    begins: tuple[int, ...]  # First row of each head.
    dim: int  # Rows of each.
    step: int = 1  # How far the rows of one head are apart.

    @functools.cached_property
    def _apart(self) -> Optional[int]:
        """How far the heads are apart; None if some are further than others."""
        apart = {b - a for a, b in zip(self.begins, self.begins[1:])} or {self.dim}
        return apart.pop() if len(apart) == 1 else None

    def of(self, matrix: Tensor) -> Tensor:
        """[heads, dim, width] of [total, width]: a view where the heads lie evenly."""
        apart = self._apart
        if apart is None:
            return torch.stack([matrix[begin :: self.step][: self.dim] for begin in self.begins])
        row, column = matrix.stride()
        return matrix.as_strided(
            (len(self.begins), self.dim, matrix.shape[1]), (apart * row, self.step * row, column),
            matrix.storage_offset() + self.begins[0] * row,
        )  # fmt: skip

    def places(self, device: torch.device) -> Tensor:
        """[heads, dim] numbers of the rows."""
        apart, heads = self._apart, len(self.begins)
        if apart is None:
            begins = torch.tensor(self.begins, device=device)
        else:  # Without a copy from the host, for which a GPU is waited for.
            begins = self.begins[0] + apart * torch.arange(heads, device=device)
        return begins[:, None] + self.step * torch.arange(self.dim, device=device)

    def projection(self, holder: nn.Module) -> tuple[Projection, Tensor]:
        """It, and its base [total, width].  Raises Unreadable."""
        found = read(resolve(holder, self.path))
        base = found.base()
        if base.shape[0] != self.total:
            raise Unreadable("the weights changed their shape")
        low_rank.check(base.shape[0], base.shape[1], found.updates)
        return found, base

    def matrices(self, holder: nn.Module) -> Tensor:
        """[heads, dim, width] as the model computes with it; a view where it is one.  Raises
        Unreadable."""
        found, base = self.projection(holder)
        if not found.updates:
            return self.of(base)
        return low_rank.added(self.of(base), found.updates, self.places(base.device)).float()

    def matrix(self, holder: nn.Module, head: int) -> Tensor:
        """[dim, width] of one head.  Raises Unreadable."""
        found, base = self.projection(holder)
        begin = self.begins[head]
        if not found.updates:
            return base[begin :: self.step][: self.dim]
        return dataclasses.replace(self, begins=(begin,)).matrices(holder)[0]

    def spanning(self, holder: nn.Module, factors: low_rank.Factors) -> Tensor:
        """[heads, dim, any number], with the left singular vectors and values of each head's
        matrix.  Raises Unreadable."""
        found, base = self.projection(holder)
        if not found.updates:
            return self.of(base)
        return factors.of(base, found.updates, self.places(base.device), found.stamp())


@dataclasses.dataclass(frozen=True)
class Location:
    """Paths go from one module, the attention or one around it."""

    how: str  # In words for people: the order of the rows, and the names.
    query: Rows
    key: Rows
    shared: bool = False  # W_K is that of another layer, whose keys this one is given.
    sure: bool = True  # False: only what the attention is given tells the order of the rows.

    @property
    def heads(self) -> int:
        return len(self.query.begins)

    @property
    def kv_heads(self) -> int:
        return len(self.key.begins)

    @property
    def dim(self) -> int:
        return self.query.dim

    def views(self, holder: nn.Module) -> Optional[tuple[Tensor, Tensor]]:
        """([heads, dim, width], [kv_heads, dim, width]) now, or None if they cannot be read."""
        try:
            return self.query.matrices(holder), self.key.matrices(holder)
        except Unreadable:
            return None


def separate(names: tuple[str, str], heads: int, kv_heads: int, dim: int) -> Location:
    """All heads one behind the other, in a projection for queries and one for keys."""
    query = Rows(names[0], heads * dim, tuple(h * dim for h in range(heads)), dim)
    key = Rows(names[1], kv_heads * dim, tuple(h * dim for h in range(kv_heads)), dim)
    return Location(f"separate {names[0]} {names[1]}", query, key)


def fused(name: str, heads: int, kv_heads: int, dim: int) -> Location:
    """All queries, then all keys, then all values."""
    total = (heads + 2 * kv_heads) * dim
    query = Rows(name, total, tuple(h * dim for h in range(heads)), dim)
    key = Rows(name, total, tuple((heads + h) * dim for h in range(kv_heads)), dim)
    return Location(f"fused {name}", query, key)


def grouped(name: str, heads: int, kv_heads: int, dim: int) -> Location:
    """The queries of a key head, its key, its value, then the next group.  Of as many key heads as
    heads: the query, key and value of a head, then those of the next."""
    share, total = heads // kv_heads, (heads + 2 * kv_heads) * dim
    each = share + 2
    query = tuple((h // share * each + h % share) * dim for h in range(heads))
    key = tuple((h * each + share) * dim for h in range(kv_heads))
    return Location(f"grouped {name}", Rows(name, total, query, dim), Rows(name, total, key, dim))


def interleaved(name: str, heads: int, dim: int) -> Location:
    """The first rows of a head's query, key and value, then the second ones."""
    query = Rows(name, 3 * heads * dim, tuple(3 * h * dim for h in range(heads)), dim, 3)
    key = dataclasses.replace(query, begins=tuple(begin + 1 for begin in query.begins))
    return Location(f"interleaved {name}", query, key)


def gated(names: tuple[str, str], heads: int, kv_heads: int, dim: int) -> list[Location]:
    """A projection for queries that has as many rows for a gate: of each head behind its query, or
    behind all queries."""
    plain = separate(names, heads, kv_heads, dim)
    by_head = tuple(2 * h * dim for h in range(heads))
    return [
        Location(
            f"gated {names[0]} {names[1]}",
            Rows(names[0], 2 * heads * dim, begins, dim), plain.key,
        )
        for begins in (by_head, plain.query.begins)
    ]  # fmt: skip


def latent(names: tuple[str, str], rows: tuple[int, int], heads: int, dim: int) -> Location:
    """Latent attention: of each head the `dim` rows that are not rotated, which come first; the
    others of a key are the same for all heads."""
    query = tuple(h * (rows[0] // heads) for h in range(heads))
    key = tuple(h * (rows[1] // heads) for h in range(heads))
    return Location(
        f"latent {names[0]} {names[1]}",
        Rows(names[0], rows[0], query, dim), Rows(names[1], rows[1], key, dim),
    )  # fmt: skip
