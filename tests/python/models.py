"""Small attention models that keep what their kernels saw, to compute the statistics from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
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


class Masked(Attention):
    """With a mask that is a tensor; False and -inf hide a key."""

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        mask = self.mask(q, k)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)


def causal(q: Tensor, k: Tensor) -> Tensor:
    ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return ones.tril(k.shape[2] - q.shape[2])


class PaddedRight(Masked):
    """As many keys less in each sequence; their rows see the others."""

    def lengths(self, q: Tensor) -> Tensor:
        return q.shape[2] - 7 * torch.arange(q.shape[0], device=q.device)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        key = torch.arange(k.shape[2], device=k.device)
        return (causal(q, k) & (key < self.lengths(q)[:, None, None]))[:, None]


class PaddedLeft(PaddedRight):
    """Rows of padding see nothing."""

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        key = torch.arange(k.shape[2], device=k.device)
        allowed = causal(q, k) & (key >= q.shape[2] - self.lengths(q)[:, None, None])
        hidden = torch.finfo(q.dtype).min if q.dtype != torch.float16 else -math.inf
        empty = torch.zeros((), dtype=q.dtype, device=q.device)
        return torch.where(allowed, empty, hidden)[:, None]


class KeysAlone(PaddedRight):
    """One row of a mask for all rows."""

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        key = torch.arange(k.shape[2], device=k.device)
        return (key < self.lengths(q)[:, None])[:, None, None]


class Window(Masked):
    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return causal(q, k) & causal(q, k).triu(-5)


class Chunked(Masked):
    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        token = torch.arange(q.shape[2], device=q.device) // 16
        return (causal(q, k) & (token[:, None] == token))[None, None]


class Packed(Masked):
    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        begins = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int64, device=q.device)
        for sequence in range(q.shape[0]):
            begins[sequence, 11 + sequence :: 13] = 1
        document = begins.cumsum(1)
        return (causal(q, k) & (document[:, :, None] == document[:, None]))[:, None]


class Biased(Masked):
    """A learned bias of each distance."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.bias = nn.Parameter(torch.linspace(-1, 1, shape.heads * 64).view(shape.heads, 64))

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        token = torch.arange(q.shape[2], device=q.device)
        bias = self.bias[:, (token[:, None] - token).abs()].to(q.dtype)
        return bias.masked_fill(~causal(q, k), -math.inf)


class CausalMoreKeys(MoreKeys):
    """Aligned at the top left: the last keys are seen by no row."""

    def mask(self, queries: int, keys: int) -> Tensor:
        return causal_upper_left(queries, keys)


class NarrowValues(PaddedRight):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.out = nn.Linear(shape.heads * (shape.dim - 6), shape.width, bias=False)

    def split(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().split(x)
        return [q, k, v[..., 6:]]


class FiveDimensions(Masked):
    """Key heads in a dimension of their own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        grouped = q.unflatten(1, (k.shape[1], -1))
        mask = causal(q, k)
        y = F.scaled_dot_product_attention(grouped, k[:, :, None], v[:, :, None], attn_mask=mask)
        return y.flatten(1, 2)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return causal(q, k)


class Block(nn.Module):
    def __init__(self, shape: Shape, kind: type[Attention]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.attention = kind(shape)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def through(blocks: Iterable[nn.Module], x: Tensor, checkpointing: Optional[str]) -> Tensor:
    """One block after the other.  checkpointing: "reentrant" or "non-reentrant"; None = without."""
    for block in blocks:
        if checkpointing is None:
            x = block(x)
        else:
            x = checkpoint(block, x, use_reentrant=checkpointing == "reentrant")
    return x


class Model(nn.Module):
    def __init__(
        self,
        shape: Shape = Shape(),
        kind: type[Attention] = Attention,
        checkpointing: Optional[str] = None,  # As of through().
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
        return through(self.blocks, self.inlet(x), self.checkpointing)

    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.blocks]


def batch(shape: Shape, seed: int, size: int = 3, tokens: int = 40, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, tokens, shape.width, generator=generator).to(device)
