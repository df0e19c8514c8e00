"""Attention out of PyTorch's own operations, for calls that no kernel takes: slow, and every score
is in memory."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as functional
from torch import Tensor


def composed(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Optional[Tensor] = None,
    softcap: float = 0.0, sinks: Optional[Tensor] = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """softmax(cap(scale q k^T) + mask) v, with probabilities in fp32.

    q         [batch, heads, q_len, dim]
    k, v      [batch, kv_heads, k_len, dim of k or v]; kv_heads divides heads
    mask      bool (true = may see) or added to the scores, -inf = hidden; broadcasts to
              [batch, heads, q_len, k_len]
    sinks     [heads] one more logit of each row, without a value

    Returns [batch, heads, q_len, dim of v] in q's type; a row that sees no key is 0.
    """
    copies = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(copies, 1) if copies > 1 else t for t in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    unseen = None
    if mask is not None:
        bools = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if bools else scores + mask
        unseen = (~mask if bools else mask == -torch.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(unseen, 0.0)  # Of no keys a softmax would be NaN.
    if sinks is not None:
        logits = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, logits), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if unseen is not None:
        weights = weights.masked_fill(unseen, 0.0)
    return torch.matmul(functional.dropout(weights.to(v.dtype), dropout), v)
