"""A small model whose linear layers multiply in 8 bits by torch._scaled_mm, and keep what they
multiplied."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import torch
from torch import Tensor, nn

from models import Attention, Shape, through

SHAPE = Shape(fused=False)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIDES = ("x", "w", "dy")


@dataclasses.dataclass
class Kept:
    """One tensor in 8 bits, what it was before, and its scales."""

    q: Tensor
    before: Tensor
    scale: Tensor


def _cast(before: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (before.float() / scale).clamp(-largest, largest).to(dtype)


def _by_columns(q: Tensor) -> Tensor:
    return q.t().contiguous().t()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, of: ScaledLinear) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        s_x, s_w = of.scale("x", rows, E4M3), of.scale("w", w, E4M3)
        q_x, q_w = _cast(rows, s_x, E4M3), _cast(w, s_w, E4M3)
        ctx.save_for_backward(q_x, s_x, q_w, s_w)
        ctx.of, ctx.shape = of, x.shape
        of.keep("x", Kept(q_x, rows, s_x))
        of.keep("w", Kept(q_w, w, s_w))
        y = of.multiply(q_x, s_x, q_w.t(), s_w)
        return y.to(x.dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:
        q_x, s_x, q_w, s_w = ctx.saved_tensors
        rows = d_y.reshape(-1, d_y.shape[-1])
        s = ctx.of.scale("dy", rows, E5M2)
        q = _cast(rows, s, E5M2)
        ctx.of.keep("dy", Kept(q, rows, s))
        if ctx.of.weight_first:
            d_w = ctx.of.multiply(q.t().contiguous(), s, _by_columns(q_x), s_x)
            d_x = ctx.of.multiply(q, s, _by_columns(q_w), s_w)
        else:
            d_x = ctx.of.multiply(q, s, _by_columns(q_w), s_w)
            d_w = ctx.of.multiply(q.t().contiguous(), s, _by_columns(q_x), s_x)
        return d_x.to(d_y.dtype).reshape(ctx.shape), d_w.to(d_y.dtype), None


class ScaledLinear(nn.Module):
    """
    delayed  scales of the first step stay for so many steps; 0 = each step has its own
    factor   what scales are multiplied by: below 1 the largest elements saturate, far above it
             the small ones become 0
    """

    def __init__(self, inner: int, outer: int, delayed: int = 0, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner) / inner**0.5)
        self.delayed, self.factor = delayed, factor
        self.weight_first = False
        self.kept: Optional[dict[str, list[Kept]]] = None
        self._scales: dict[str, tuple[int, Tensor]] = {}
        self.step = 0

    def scale(self, side: str, before: Tensor, dtype: torch.dtype) -> Tensor:
        known = self._scales.get(side)
        if known is not None and self.step - known[0] < self.delayed:
            return known[1]
        amax = before.detach().abs().amax().float().clamp(min=1e-12)
        scale = amax / torch.finfo(dtype).max * self.factor
        self._scales[side] = self.step, scale
        return scale

    @staticmethod
    def multiply(a: Tensor, s_a: Tensor, b: Tensor, s_b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, scale_a=s_a, scale_b=s_b, out_dtype=torch.bfloat16)

    def keep(self, side: str, kept: Kept) -> None:
        if self.kept is not None:
            self.kept.setdefault(side, []).append(kept)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self)  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int, **how: Any) -> None:
        super().__init__()
        self.up, self.down = ScaledLinear(width, 80, **how), ScaledLinear(80, width, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(SHAPE.width), nn.LayerNorm(SHAPE.width)
        self.attention, self.mlp = Attention(SHAPE), Mlp(SHAPE.width, **how)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, checkpointing: Optional[str] = None, **how: Any) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.inlet = nn.Linear(SHAPE.width, SHAPE.width)
        self.layers = nn.ModuleList(Block(**how) for _ in range(2))

    def scaled(self) -> dict[str, ScaledLinear]:
        return {n: m for n, m in self.named_modules() if isinstance(m, ScaledLinear)}

    def forward(self, x: Tensor) -> Tensor:
        return through(self.layers, self.inlet(x), self.checkpointing)
