"""Small attention models that keep what their kernels saw, to compute the statistics from."""

from __future__ import annotations

import dataclasses
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    dim: int = 16
    width: int = 48
    causal: bool = True
    fused: bool = True
    repeat: bool = False  # Keys repeated by hand instead of enable_gqa.
    dtype: torch.dtype = torch.float32
    spread: float = 1.0  # Size of the projections, so that the scores mean something.


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        rows = (shape.heads + 2 * shape.kv_heads) * shape.dim
        if shape.fused:
            self.qkv = nn.Linear(shape.width, rows, bias=False)
        else:
            self.q_proj = nn.Linear(shape.width, shape.heads * shape.dim, bias=False)
            self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.dim, bias=False)
            self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.dim, shape.width, bias=False)
        self.saved: list[tuple[Tensor, ...]] = []
        self.keep = False

    def split(self, x: Tensor) -> list[Tensor]:
        s = self.shape
        if s.fused:
            parts = self.qkv(x).split([s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim], -1)
        else:
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return [p.unflatten(-1, (-1, s.dim)).transpose(1, 2).to(s.dtype) for p in parts]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal, enable_gqa=gqa)

    def forward(self, x: Tensor) -> Tensor:
        s = self.shape
        q, k, v = self.split(x)
        gqa = s.heads != s.kv_heads
        if gqa and s.repeat:
            k, v = (t.repeat_interleave(s.heads // s.kv_heads, dim=1) for t in (k, v))
            gqa = False
        y = self.attend(q, k, v, gqa)
        if self.keep and torch.is_grad_enabled():
            for t in (k, y):
                t.retain_grad()
            self.saved.append((q, k, v, y))
        return self.out(y.transpose(1, 2).flatten(2).to(x.dtype))


class ByName(Attention):
    """Calls the function by the name that `from ... import` gave it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=self.shape.causal, enable_gqa=gqa)


class ByAttribute(Attention):
    """Keeps the function as an attribute of the module."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.function = F.scaled_dot_product_attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return self.function(q, k, v, is_causal=self.shape.causal, enable_gqa=gqa)


class ByMask(Attention):
    """Says that it is causal by a mask of torch.nn.attention.bias."""

    def mask(self, queries: int, keys: int) -> Tensor:
        return causal_lower_right(queries, keys)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        mask = self.mask(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)


class ByUpperMask(ByMask):
    def mask(self, queries: int, keys: int) -> Tensor:
        return causal_upper_left(queries, keys)


class MoreKeys(ByMask):
    """With keys of an earlier call."""

    def split(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().split(x)
        return [q, *(torch.cat([t.flip(2)[:, :, :17], t], 2) for t in (k, v))]


class Block(nn.Module):
    def __init__(self, shape: Shape, kind: type[Attention]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.attention = kind(shape)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    def __init__(
        self,
        shape: Shape = Shape(),
        kind: type[Attention] = Attention,
        checkpointing: Optional[str] = None,  # "reentrant" or "non-reentrant"
    ) -> None:
        super().__init__()
        self.shape, self.checkpointing = shape, checkpointing
        self.inlet = nn.Linear(shape.width, shape.width)
        self.blocks = nn.ModuleList(Block(shape, kind) for _ in range(shape.layers))
        with torch.no_grad():
            for block in self.blocks:
                for p in block.attention.parameters():
                    p.mul_(shape.spread)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return x

    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.blocks]


def batch(shape: Shape, seed: int, size: int = 3, tokens: int = 40, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, tokens, shape.width, generator=generator).to(device)
