"""Several masks of one call."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .call import Mask


def mask_of(terms: Sequence[Tensor]) -> Mask:
    """Each is bool (true = may see) or is added to the scores, and broadcasts to [batch, heads,
    rows, keys].  Several are put together at the rows that are sampled alone."""
    if len(terms) > 1:
        return Mask(function=functools.partial(_added, tuple(terms)))
    return Mask(tensor=terms[0]) if terms else Mask()


def _added(terms: tuple[Tensor, ...], rows: Tensor, scores: Tensor) -> Tensor:
    """rows [batch, heads, rows]"""
    total = torch.zeros_like(scores)
    batch, heads, _, keys = scores.shape
    for term in terms:
        term = term[(None,) * (4 - term.dim())][:batch].expand(batch, heads, -1, keys)
        if term.shape[2] > 1:
            term = term.gather(2, rows[..., None].expand(-1, -1, -1, keys))
        hides = term.dtype == torch.bool
        total = total.masked_fill(~term, -torch.inf) if hides else total + term
    return total
