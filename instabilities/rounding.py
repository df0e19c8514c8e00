"""Attention in bf16 as FlashAttention computes it, and a task whose second layer nothing holds.

P, the exponentials of scores less their row's maximum, and O are rounded to bf16.  The backward
pass is exact but for one thing: delta, the row sums of dO * O, is made of an O with a share of the
rounding error.  With a share of 1 it is FlashAttention's.  With 0 it fits what it is subtracted
from.  The forward pass is the same with each share.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 8
SCORED_FROM = 8  # Tokens: the first positions know too little to be asked.
LOSS_SCALE = 10.0


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: float) -> Tensor:
        q, k, v = q.float(), k.float(), v.float()
        tokens = q.shape[2]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        scores = (q.shape[-1] ** -0.5 * (q @ k.mT)).masked_fill_(hidden, -torch.inf)
        p = (scores - scores.amax(-1, keepdim=True)).exp_()
        total = p.sum(-1, keepdim=True)
        o: Tensor = (p.bfloat16().float() @ v / total).bfloat16()
        p = p / total
        exact = p @ v
        ctx.save_for_backward(q, k, v, p, exact.lerp(o.float(), share))
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, p, o = ctx.saved_tensors
        d_o = gradients[0].float()
        delta = (d_o * o).sum(-1, keepdim=True)
        d_s = q.shape[-1] ** -0.5 * p * (d_o @ v.mT - delta)
        found = (d_s @ k, d_s.mT @ q, p.mT @ d_o)
        return *(t.bfloat16() for t in found), None


class RoundedAttention(nn.Module):
    """Of q, k and v in bf16, causal, with as many heads of each."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 0.0  # Of the rounding error of O that delta has.

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = _Rounded.apply(q, k, v, self.share)  # type: ignore[no-untyped-call]
        return y


@functools.cache
def _class_of_byte() -> Tensor:
    """[256, CLASSES] one-hot: lower, upper, digit, space, newline, _., brackets, the rest."""
    tests = (str.islower, str.isupper, str.isdigit, " ".__eq__, "\n".__eq__,
             "_.,".__contains__, "()[]{}".__contains__)  # fmt: skip
    classes = [
        next((i for i, test in enumerate(tests) if test(chr(byte))), len(tests))
        for byte in range(256)
    ]
    return F.one_hot(torch.tensor(classes), CLASSES).float()


def losses(predicted: Tensor, tokens: Tensor) -> Tensor:
    """Of each sequence: how far `predicted` is from how often the classes have occurred so far.

    A first layer can do that with uniform attention, so nothing holds the scores of a second one.
    """
    classes = _class_of_byte().to(tokens.device)[tokens]
    seen = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)[:, None]
    error = LOSS_SCALE * (predicted - classes.cumsum(dim=1) / seen)
    return error[:, SCORED_FROM:].square().mean(dim=(1, 2))
