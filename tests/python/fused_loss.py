"""A linear layer, softmax and cross entropy in one function that makes its gradients in chunks,
as fused losses do: no tap sees logits or their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FusedCrossEntropy(torch.autograd.Function):
    """The mean over tokens.  x [tokens, width], weight [words, width], target [tokens].

    accumulate  the type that the weight's gradient is added up in
    z_loss      times the square of log Z is added to each token's loss
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, target: Tensor, chunks: int, accumulate: torch.dtype,
        z_loss: float = 0.0,
    ) -> Tensor:  # fmt: skip
        d_weight = torch.zeros_like(weight, dtype=accumulate)
        d_x, loss, tokens = [], torch.zeros(()), x.shape[0]
        for rows, words in zip(x.chunk(chunks), target.chunk(chunks)):
            z = (rows @ weight.to(rows.dtype).t()).float()
            log_z = z.logsumexp(-1, keepdim=True)
            p = (z - log_z).exp()
            loss = loss + (log_z - z.gather(1, words[:, None]) + z_loss * log_z.square()).sum()
            d_z = p.scatter_add(1, words[:, None], torch.full_like(log_z, -1.0))
            d_z = ((d_z + 2 * z_loss * log_z * p) / tokens).to(rows.dtype)
            d_x.append(d_z @ weight.to(rows.dtype))
            d_weight += (d_z.t().to(accumulate) @ rows.to(accumulate)).to(accumulate)
        ctx.save_for_backward(torch.cat(d_x), d_weight.to(weight.dtype))
        return loss / tokens

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_x, d_weight = ctx.saved_tensors
        scale = gradients[0]
        return (
            (d_x * scale).to(d_x.dtype),
            (d_weight * scale).to(d_weight.dtype),
            None,
            None,
            None,
            None,
        )
