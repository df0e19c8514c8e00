"""What the attention operators are judged by: plain PyTorch, and inputs that were hard once."""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, Optional

import torch
from torch import Tensor

KINDS = (
    "randn", "outliers", "sink", "tie2", "tie3", "tie4", "near-tie", "saturated", "equal", "huge",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Features:
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    scale: Optional[float] = None


def allowed(q_len: int, k_len: int, features: Features) -> Tensor:
    """[q_len, k_len], from the definition in attention.h, one pair at a time in words."""
    last = torch.arange(q_len)[:, None] + (k_len - q_len)
    key = torch.arange(k_len)[None, :]
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    if features.causal:
        seen &= key <= last
    if features.window:
        seen &= key > last - features.window
    return seen


def plain(q: Tensor, k: Tensor, v: Tensor, features: Features) -> Tensor:
    """Attention in the type of its inputs: in double the reference, in bf16 the yardstick."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if features.scale is None else features.scale
    scores = (q * math.sqrt(scale)) @ (k * math.sqrt(scale)).mT
    if features.softcap:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    hidden = ~allowed(q.shape[2], k.shape[2], features)
    p = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    return p.masked_fill(hidden.all(dim=-1, keepdim=True), 0) @ v


def with_gradients(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, ...],
    d_o: Tensor,
    dtype: Optional[torch.dtype] = None,
) -> tuple[Tensor, ...]:
    """o, dq, dk, dv of `function` on copies of the inputs in `dtype`, as doubles."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
    o = function(*leaves)
    o.backward(d_o.to(o.dtype))
    return tuple(t.double() for t in (o.detach(), *(leaf.grad for leaf in leaves)))


def inputs(
    kind: str, heads: int = 2, kv_heads: int = 2, q_len: int = 96, k_len: int = 96, dim: int = 32,
    dtype: torch.dtype = torch.bfloat16, batch: int = 2,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v, d_o of one of KINDS; the same on each call."""
    generator = torch.Generator().manual_seed(KINDS.index(kind))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, d_o = randn(batch, heads, q_len, dim), randn(batch, heads, q_len, dim)
    k, v = randn(batch, kv_heads, k_len, dim), randn(batch, kv_heads, k_len, dim)
    towards = torch.ones(dim) / math.sqrt(dim)  # All queries point here: adds 3 sqrt(dim) to a
    q = q + 3 * math.sqrt(dim) * towards  # score per unit of `towards`, after scaling 3.
    if kind == "outliers":
        for t in (q, k, v):
            t.view(-1)[:: max(1, t.numel() // max(2, t.numel() // 1000))] *= 30
    elif kind == "sink":
        k[:, :, 0] = 3 * towards  # A score of 9 above the others', which are around 0.
        v = v.abs()
    elif kind.startswith("tie"):
        k[:, :, : int(kind[3])] = 5 * towards
        v = v.abs()
    elif kind == "near-tie":
        k[:, :, 0], k[:, :, 1] = 4 * towards, 4 * towards
        k[:, :, 1, 0] *= 1 - 2**-7  # Of the score of 12: about 3e-3 below.
    elif kind == "saturated":
        k *= 30
    elif kind == "equal":
        k[:] = k[:, :, :1]
    elif kind == "huge":
        q, k = q * 30, k * 60
    return tuple(t.to(dtype) for t in (q, k, v, d_o))  # type: ignore[return-value]
