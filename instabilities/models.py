"""Small decoders, put together from the switches of a Setting.

Modules have the names of transformers' models, so that monitors find them as they find those.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Optional, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .corpus import VOCABULARY
from .fp8 import Linear8
from .rounding import CLASSES, RoundedAttention
from .settings import Setting

TOP_K = 2


def norm_of(setting: Setting, width: int) -> nn.Module:
    if setting.norm == "layernorm":
        return nn.LayerNorm(width, bias=False)
    return nn.RMSNorm(width, eps=1e-6)


def linear(setting: Setting, inner: int, outer: int) -> nn.Linear:
    """Of a block."""
    return Linear8(inner, outer) if setting.fp8 else nn.Linear(inner, outer, bias=False)


@functools.cache
def _turns(
    tokens: int, half: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    frequency = 10_000 ** (-torch.arange(half, device=device) / half)
    angle = torch.arange(tokens, device=device)[:, None] * frequency
    return angle.sin().to(dtype), angle.cos().to(dtype)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of [batch, heads, tokens, dim]."""
    sine, cosine = _turns(x.shape[-2], x.shape[-1] // 2, x.dtype, x.device)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width, self.heads, self.kv_heads = setting.width, setting.heads, setting.kv_heads
        self.dim = width // self.heads
        narrow = self.kv_heads * self.dim
        self.rotary = setting.positions == "rotary"
        source = width // 2 if setting.latent else width
        self.kv_latent = linear(setting, width, source) if setting.latent else None
        self.q_proj = linear(setting, width, width)
        self.k_proj = linear(setting, source, narrow)
        self.v_proj = linear(setting, source, narrow)
        self.o_proj = linear(setting, width, width)
        self.q_norm = nn.RMSNorm(self.dim, eps=1e-6) if setting.qk_norm else None
        self.k_norm = nn.RMSNorm(self.dim, eps=1e-6) if setting.qk_norm else None
        self.gate = linear(setting, width, width) if setting.gated else None
        self.sink = nn.Parameter(torch.zeros(self.heads)) if setting.sinks else None
        self.kernel: Optional[nn.Module] = None  # Another attention than PyTorch's.
        self.rounded = RoundedAttention() if setting.attention == "bf16" else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kernel is not None:
            attended: Tensor = self.kernel(q, k, v)
            return attended
        if self.rounded is not None:
            in_bf16: Tensor = self.rounded(q.bfloat16(), k.bfloat16(), v.bfloat16())
            return in_bf16.to(q.dtype)
        if self.sink is None:
            grouped = self.kv_heads != self.heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        # A key of zeros whose score is a parameter of the head, and whose value is nothing.
        tokens = q.shape[2]
        k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))
        mask = torch.full((tokens, tokens), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
        column = self.sink.to(q.dtype)[:, None, None].expand(-1, tokens, 1)
        mask = torch.cat((column, mask.expand(self.heads, -1, -1)), dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None])

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        source = x if self.kv_latent is None else self.kv_latent(x)
        q = self.q_proj(x).view(batch, tokens, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(source).view(batch, tokens, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(source).view(batch, tokens, self.kv_heads, self.dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = rotated(q), rotated(k)
        y = self.attend(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x))
        projected: Tensor = self.o_proj(y)
        return projected


class MLP(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width = setting.width
        self.gate_proj = linear(setting, width, 2 * width) if setting.mlp == "swiglu" else None
        hidden = 2 * width if setting.mlp == "swiglu" else 4 * width
        self.up_proj = linear(setting, width, hidden)
        self.down_proj = linear(setting, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        gated = F.gelu(up) if self.gate_proj is None else F.silu(self.gate_proj(x)) * up
        projected: Tensor = self.down_proj(gated)
        return projected


class Router(nn.Module):
    """(logits, chosen experts) of each token."""

    bias: Tensor

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(setting.experts, setting.width))
        # What a balancing without a loss adds; 0 here, and a place for faults.
        self.register_buffer("bias", torch.zeros(setting.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight).float() + self.bias
        return logits, logits.topk(TOP_K, dim=-1).indices


class Mixture(nn.Module):
    """Each token goes through TOP_K of the experts; the load is balanced by a loss."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.router = Router(setting)
        self.experts = nn.ModuleList(MLP(setting) for _ in range(setting.experts))
        self.balance = torch.zeros(())  # Of the newest forward: 1 where the load is balanced.

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        logits, chosen = self.router(flat)
        shares = logits.softmax(-1)
        loads = F.one_hot(chosen, len(self.experts)).sum(1).float()
        self.balance = len(self.experts) * (loads.mean(0) / TOP_K * shares.mean(0)).sum()
        weights = shares.gather(1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, tokens, expert(flat[tokens]) * weights[tokens, place, None])
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.input_norm = norm_of(setting, setting.width)
        self.self_attn = Attention(setting)
        self.mlp: Optional[nn.Module] = None
        if setting.mlp != "none":
            self.mlp_norm = norm_of(setting, setting.width)
            self.mlp = Mixture(setting) if setting.experts else MLP(setting)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_norm(x))
        if self.mlp is None:
            return x
        added: Tensor = x + self.mlp(self.mlp_norm(x))
        return added


class Decoder(nn.Module):
    """Logits [batch, tokens, VOCABULARY] of the next byte, or [batch, tokens, CLASSES]."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, setting.width)
        learned = setting.positions == "learned"
        self.embed_positions = nn.Embedding(setting.tokens, setting.width) if learned else None
        self.layers = nn.ModuleList(Block(setting) for _ in range(setting.layers))
        self.norm = norm_of(setting, setting.width)
        classes = setting.task == "classes"
        self.lm_head = nn.Linear(setting.width, CLASSES if classes else VOCABULARY, bias=classes)
        if setting.tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.dropout = setting.dropout
        self._begin(setting)

    def _begin(self, setting: Setting) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                added = name.endswith(("o_proj.weight", "down_proj.weight"))
                spread = 0.02 / (math.sqrt(2 * setting.layers) if added else 1)
                nn.init.normal_(parameter, 0, spread)
            elif name == "lm_head.bias":
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        if self.embed_positions is not None:
            x = x + self.embed_positions.weight[: tokens.shape[1]]
        for block in self.blocks():
            x = F.dropout(block(x), self.dropout)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    def mixtures(self) -> list[Mixture]:
        return [block.mlp for block in self.blocks() if isinstance(block.mlp, Mixture)]

    def balance(self) -> Any:
        """Mean of the routers' balancing losses; 0 without a router."""
        mixtures = self.mixtures()
        return sum(mixture.balance for mixture in mixtures) / len(mixtures) if mixtures else 0.0


def build(setting: Setting, seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(setting).to(getattr(torch, setting.dtype))
