"""W = base + low-rank updates, by head: the matrix of a few heads, or a factor of every head's Gram
matrix W W^T for its spectrum.

With A = `down` and B = scale * `up` the Gram matrix is that of the base plus
(W A^T) B^T + its transpose + B (A A^T) B^T.  The base's own is kept while the base is frozen, so a
sample forms neither the product of the updates nor the base's Gram matrix.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .adapters import LowRank, Unreadable

CHUNK_BYTES = 1 << 25  # Of the base's rows in double, which are read at a time.
KEPT_BYTES_MAX = 1 << 22  # Of the base's Gram matrices of one projection.
# What is added to a Gram matrix before it is factored, of its trace: above its rounding.
_LIFT = 1e-13


def check(rows: int, width: int, updates: list[LowRank]) -> None:
    """Raises Unreadable if an update does not fit the base."""
    for update in updates:
        rank = len(update.down)
        fits = update.down.shape == (rank, width) and update.up.shape == (rows, rank)
        if not fits or (update.magnitude is not None and update.magnitude.shape != (rows,)):
            raise Unreadable(
                f"an adapter of {list(update.up.shape)} and {list(update.down.shape)} does not fit "
                f"a weight of {[rows, width]}"
            )


def added(base: Tensor, updates: list[LowRank], places: Tensor) -> Tensor:
    """The rows of W at `places` (any shape) in double; `base` is what the base has there."""
    wide = base.detach().double()
    whole = wide.clone()
    for update in updates:
        product = update.scale * (update.up[places].double() @ update.down.double())
        if update.magnitude is not None:
            merged = wide + product
            length = update.magnitude[places].double() / merged.norm(dim=-1)
            product = length.unsqueeze(-1) * merged - wide
        whole += product
    return whole


class Factors:
    """Of the heads of one projection; keeps the Gram matrices of a frozen base."""

    def __init__(self) -> None:
        self._stamp: Optional[tuple[int, int]] = None
        self._kept: list[Tensor] = []

    def of(
        self, base: Tensor, updates: list[LowRank], places: Tensor, stamp: Optional[tuple[int, int]]
    ) -> Tensor:
        """[heads, dim, dim] float32, F with F F^T = W W^T.

        places  [heads, dim] rows of each head, on the base's device
        stamp   of the base; None = it is trained
        """
        heads, dim = places.shape
        width = base.shape[1]
        if stamp is None or stamp != self._stamp:
            self._kept = []
        keeps = stamp is not None and heads * dim * dim * 8 <= KEPT_BYTES_MAX
        self._stamp = stamp if keeps else None
        kept, self._kept = self._kept, []
        down = [update.down.double() for update in updates]
        each = max(1, CHUNK_BYTES // (dim * width * 8))
        found = []
        for number, rows in enumerate(torch.split(places, each)):
            wide = base[rows].double()
            gram = kept[number] if number < len(kept) else wide @ wide.mT
            if keeps:
                self._kept.append(gram)
            found.append(_factor(_updated(gram, wide, updates, down, rows)).float())
        return torch.cat(found)


def _updated(
    gram: Tensor, wide: Tensor, updates: list[LowRank], down: list[Tensor], rows: Tensor
) -> Tensor:
    """W W^T of some heads, by that of the base."""
    own = torch.ones(rows.shape, dtype=gram.dtype, device=gram.device)  # What the base counts.
    lifts = []
    for update, matrix in zip(updates, down):
        lift = update.scale * update.up[rows].double()
        if update.magnitude is not None:
            cross = ((wide @ matrix.T) * lift).sum(-1)
            square = ((lift @ (matrix @ matrix.T)) * lift).sum(-1)
            length = (gram.diagonal(dim1=-2, dim2=-1) + 2 * cross + square).clamp(min=0).sqrt()
            ratio = update.magnitude[rows].double() / length
            own = own + ratio - 1
            lift = ratio.unsqueeze(-1) * lift
        lifts.append(lift)
    lift, whole = torch.cat(lifts, -1), torch.cat(down)
    cross = own.unsqueeze(-1) * (wide @ whole.T) @ lift.mT
    scaled = own.unsqueeze(-1) * gram * own.unsqueeze(-2)
    return scaled + cross + cross.mT + lift @ (whole @ whole.T) @ lift.mT


def _factor(gram: Tensor) -> Tensor:
    """Its lower triangle, without asking the device how that went."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # A head of zeros has no trace either.
    least = torch.finfo(gram.dtype).tiny
    factor, failed = torch.linalg.cholesky_ex(gram + (_LIFT * trace + least) * one)
    again, _ = torch.linalg.cholesky_ex(gram + (1e-9 * trace + least) * one)
    # A factor of what is not finite may look finite.
    return torch.where((failed == 0)[:, None, None], factor, again) + 0 * trace
