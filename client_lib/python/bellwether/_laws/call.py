"""One call of attention with its gradients: what the laws and the shadow check are asked about."""

from __future__ import annotations

import dataclasses
from typing import Optional

import torch
from torch import Tensor

from .._kernels.probe import ProbeMask, row_ranges

HIDES = -9984.0  # What a mask adds at most to hide a key: -10000, also as bf16 has it.
TENSORS = ("o", "dq", "dk", "dv")  # What a kernel returns, in the order in which it depends.


@dataclasses.dataclass(frozen=True, eq=False)
class GradedCall:
    """q, o, d_o, dq [batch, heads, q_len, dim]; k, v, dk, dv [batch, kv_heads, k_len, dim], as they
    went into a kernel and as they came out."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    d_o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    scale: float
    mask: ProbeMask
    softcap: float = 0.0
    sinks: Optional[Tensor] = None  # [heads]

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.q.shape[1] // self.k.shape[1]

    def grouped(self, of_queries: Tensor) -> Tensor:
        """[batch, heads, ...] as [batch, kv_heads, group, ...]"""
        batch, _, *rest = of_queries.shape
        return of_queries.reshape(batch, self.k.shape[1], self.group, *rest)

    def bias(self, rows: Tensor) -> Tensor:
        """What the mask adds to the scores of some rows: fp64, -inf where a key is hidden;
        broadcasts to [batch, kv_heads, group, rows, k_len]."""
        k_len = self.k.shape[2]
        begin, end = row_ranges(self.mask, self.q, k_len)
        begin, end = (t.expand(-1, self.q.shape[2])[:, rows, None] for t in (begin, end))
        key = torch.arange(k_len, device=self.q.device)
        shown = ((key >= begin) & (key < end))[:, None, None]
        added = torch.zeros(shown.shape, dtype=torch.float64, device=self.q.device)
        added = added.masked_fill(~shown, -torch.inf)
        if self.mask.tensor is None:
            return added
        tensor = self.mask.tensor.detach()
        tensor = tensor[(None,) * (4 - tensor.dim())]
        tensor = tensor[:, :, rows] if tensor.shape[2] > 1 else tensor
        tensor = self.grouped(tensor) if tensor.shape[1] > 1 else tensor[:, :, None]
        if tensor.dtype == torch.bool:
            return added.masked_fill(~tensor, -torch.inf)
        return added + tensor.double()

    def blank(self, rows: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Of some rows and what bias() said of them, [batch, kv_heads, group, rows]: whether they
        see no key and have no weights, for their output is 0; and whether it is NaN.

        A row that sees no key and comes out otherwise is a mean: a mask adds the least number of
        its type to all scores, or the kernel does so itself.
        """
        return self.outcome(rows, self.unseen(rows, bias))

    def unseen(self, rows: Tensor, bias: Tensor) -> Tensor:
        """Whether they see no key, whatever came out."""
        shape = (self.q.shape[0], self.k.shape[1], self.group, rows.numel())
        return (bias <= HIDES).all(-1).expand(shape)

    def outcome(self, rows: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
        """Of those: whether their output is 0, and whether it is NaN."""
        o = self.grouped(self.o[:, :, rows])
        return unseen & (o == 0).all(-1), unseen & ~torch.isfinite(o).all(-1)
