"""The shadow check: what a kernel returned beside the same in fp64."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .call import GradedCall
from .reference import EXP, Expected, Reference

FACTOR_FLOOR = 2.0**-104  # Of an element's variance: attention_laws.h.


@dataclasses.dataclass
class Shadow:
    """Of one tensor, by sequence and head: [batch, heads or kv_heads]."""

    cosine: Tensor
    norms: Tensor  # Ratio of norms, 1 if all is well.
    nonfinite: Tensor
    # |difference|^2 over what independent roundings give, without what channels explain.
    excess: Tensor
    degrees: Tensor  # How many independent rows or keys `excess` is a mean of, at least.
    worst_row: Tensor  # The largest excess of one row or key.
    row_at: Tensor  # Which one that is.
    # The tensor as a multiple of the reference, less 1, times factor_variance: attention_laws.h.
    factor: Tensor
    factor_variance: Tensor
    factor_alike: Tensor

    def factors(self) -> Tensor:
        """By how much the tensor is too large, as a part of it; 0 where nothing is known."""
        return self.factor / self.factor_variance.clamp(min=1e-300)

    def factor_z(self) -> Tensor:
        """Beyond what roundings explain that are alike."""
        beyond = (self.factor.abs() - self.factor_alike).clamp(min=0)
        return beyond / self.factor_variance.clamp(min=1e-300).sqrt()


def _without_channels(difference: Tensor, channels: list[Tensor]) -> Tensor:
    """What is left behind the best multiples from 0 to 1 of the channels, row by row."""
    sizes = [c.square().sum(-1, keepdim=True).clamp(min=1e-300) for c in channels]
    used = [torch.zeros_like(size) for size in sizes]
    left = difference
    for _ in range(3 if len(channels) > 1 else 1):  # Each in its turn, the others kept.
        for i, (channel, size) in enumerate(zip(channels, sizes)):
            before = used[i]
            more = (left * channel).sum(-1, keepdim=True) / size
            used[i] = (before + more).clamp(0, 1)
            left = left - (used[i] - before) * channel
    return left


def _factor(got: Tensor, expected: Expected) -> tuple[Tensor, Tensor, Tensor]:
    exact = expected.exact
    size, variance = exact.square().sum(-1), expected.variance.sum(-1)
    weight = torch.where(size > 0, 1 / (variance + exact.shape[-1] * FACTOR_FLOOR), 0.0)
    channels = torch.stack(
        [((exact * channel).sum(-1) * weight).sum(2) for channel in expected.channels]
    )
    information = (size * weight).sum(2)
    alike = torch.maximum(channels.clamp(min=0).sum(0), (-channels).clamp(min=0).sum(0))
    along = ((got - exact) * exact).sum(-1) * weight
    return along.sum(2), information, alike + EXP * information


def compare(got: Tensor, expected: Expected, rows: Tensor) -> Shadow:
    """got, and the parts of `expected`: [batch, heads, rows, dim]"""
    exact, variance = expected.exact, expected.variance
    got = got.double()
    finite = torch.isfinite(got)
    nonfinite = (~finite).sum((2, 3))
    got = got.masked_fill(~finite, 0.0)
    norms = got.square().sum((2, 3)).sqrt(), exact.square().sum((2, 3)).sqrt()
    tiny = torch.finfo(torch.float64).tiny
    cosine = (got * exact).sum((2, 3)) / (norms[0] * norms[1]).clamp(min=tiny)
    rest = _without_channels(got - exact, expected.channels).square().sum(-1)
    of_row = variance.sum(-1).clamp(min=tiny)
    excess = rest / of_row
    return Shadow(
        cosine, norms[0] / norms[1].clamp(min=tiny), nonfinite,
        rest.sum(-1) / of_row.sum(-1),
        of_row.sum(-1).square() / of_row.square().sum(-1).clamp(min=tiny),
        excess.amax(-1), rows[excess.argmax(-1)], *_factor(got, expected),
    )  # fmt: skip


@torch.no_grad()
def shadow(call: GradedCall, known: Reference) -> dict[str, Shadow]:
    """By the tensor's name; dk and dv where the reference has them."""
    found = {}
    for name, expected in (("o", known.o), ("dq", known.dq)):
        flat = Expected(
            expected.exact.flatten(1, 2), expected.variance.flatten(1, 2),
            [c.flatten(1, 2) for c in expected.channels],
        )  # fmt: skip
        found[name] = compare(getattr(call, name)[:, :, known.rows], flat, known.rows)
    keys = torch.arange(call.k.shape[2], device=call.k.device)
    for name, of_keys in (("dk", known.dk), ("dv", known.dv)):
        if of_keys is not None:
            found[name] = compare(getattr(call, name), of_keys, keys)
    return found
