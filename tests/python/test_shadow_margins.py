"""Goal: what sound kernels round leaves the shadow check far below its limit, on inputs as small
     models have them: sharp and flat rows, few gradients, repeated tokens, parts in common.
Method: fused kernels are emulated in fp32 with each rounding to bf16 that such kernels do; the
     kernels library compares 32 rows and 16 keys of a head with fp64, as a watched job does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bellwether._kernels.probe import ProbeMask
from bellwether._laws.call import GradedCall

from graded_calls import given, shadow_rows

TOKENS, DIM, HEADS = 64, 24, 4
SHAPE = (2, HEADS, TOKENS, DIM)
TENSORS = ("o", "dq", "dk", "dv")
DRAWS = 4
CHANCE = 20.0  # -ln of that of one question, some 30 samples after a run began.
HIDDEN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
Results = tuple[Tensor, Tensor, Tensor, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Results]


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def fused(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, scaled: bool = False) -> Results:
    """As FlashAttention; with `scaled` dS is of the rounded P, and rounded times the scale."""
    q, k, v, d_o = (t.float() for t in (q, k, v, d_o))
    scale = DIM**-0.5
    scores = (scale * (q @ k.mT)).masked_fill(HIDDEN, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    o = (rounded(weights) @ v / total).bfloat16()
    p = (scores - top - total.log()).exp()
    d_s = (rounded(p) if scaled else p) * (d_o @ v.mT - (d_o * o.float()).sum(-1, keepdim=True))
    d_s = rounded(scale * d_s) if scaled else rounded(d_s)
    last = 1.0 if scaled else scale
    dq, dk, dv = last * (d_s @ k), last * (d_s.mT @ q), rounded(p).mT @ d_o
    return o, dq.bfloat16(), dk.bfloat16(), dv.bfloat16()


def fused_of_scaled(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> Results:
    return fused(q, k, v, d_o, scaled=True)


def written_out(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> Results:
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = (DIM**-0.5 * (inputs[0] @ inputs[1].mT)).masked_fill(HIDDEN, -torch.inf)
    o = scores.softmax(-1) @ inputs[2]
    dq, dk, dv = torch.autograd.grad(o, inputs, d_o)
    return o.detach(), dq, dk, dv


def drawn(kind: str, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def between(low: float, high: float) -> float:
        return float(10 ** (low + (high - low) * torch.rand((), generator=draw)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    q, k = normal(*SHAPE) * between(-1.5, 1.1), normal(*SHAPE) * between(-0.5, 0.7)
    v, d_o = normal(*SHAPE), normal(*SHAPE) * between(-6, 0)
    if kind == "gradients of few rows":
        d_o = d_o * (torch.rand(2, HEADS, TOKENS, 1, generator=draw) < 0.06)
    elif kind == "repeated tokens":
        at = torch.randint(0, 3, (2, 1, TOKENS, 1), generator=draw).expand(SHAPE)
        q, k, v, d_o = (t.gather(2, at) for t in (q, k, v, d_o))
    elif kind == "a key that takes all":
        k[:, :, 0] *= 8
        q = q + 0.3 * k[:, :, :1]
    elif kind == "values in common":
        v = 0.05 * v + 3 * normal(2, HEADS, 1, DIM)
    elif kind == "gradients in common":
        d_o = 0.05 * d_o + d_o[:, :, :1]
    elif kind == "rows look at themselves":
        k = q + 0.1 * normal(*SHAPE)
    elif kind == "all in common":
        q, k, v, d_o = (0.1 * t + t[:, :, :1] for t in (q, k, v, d_o))
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), d_o.bfloat16()


KINDS = (
    "plain", "gradients of few rows", "repeated tokens", "a key that takes all",
    "values in common", "gradients in common", "rows look at themselves", "all in common",
)  # fmt: skip


def part_of_limit(kind: str, attend: Attention, arithmetic: str) -> float:
    """The largest of a tensor and head, as law_watch.h has the limit."""
    draw, found = torch.Generator().manual_seed(7), 0.0
    for _ in range(DRAWS):
        q, k, v, d_o = drawn(kind, draw)
        o, dq, dk, dv = attend(q, k, v, d_o)
        call = GradedCall(q, k, v, o, d_o, dq, dk, dv, DIM**-0.5, ProbeMask(causal=True))
        got = shadow_rows(given(call, arithmetic), HEADS, 32, 16)
        for name in TENSORS:
            rest, variance, squares = (
                got[f"shadow_{name}_{part}"] for part in ("rest", "variance", "variance_sq")
            )
            there = variance > 1e-34  # Below it the server asks nothing.
            degrees = (variance[there].square() / squares[there].clamp(min=1e-38)).clamp(min=1)
            limit = 1 + 2 * (CHANCE / degrees).sqrt() + 2 * CHANCE / degrees.sqrt()
            part = rest[there] / variance[there] / limit
            found = max(found, float(part.max()) if part.numel() else 0.0)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "attend, arithmetic",
    [(fused, "fused"), (fused_of_scaled, "fused"), (written_out, "composed")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_sound_kernels_stay_far_below_the_limit(
    kind: str, attend: Attention, arithmetic: str
) -> None:
    assert part_of_limit(kind, attend, arithmetic) < 0.25


def test_products_of_16_bits_are_far_beyond_what_is_fused() -> None:
    assert part_of_limit("plain", written_out, "fused") > 1
