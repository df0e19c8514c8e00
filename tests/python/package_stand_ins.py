"""Attention of Megatron-Core, Transformer Engine and xformers with the attributes and signatures of
the packages, computed by PyTorch: they need a GPU or are not installed here.  Each class and
function does what its package documents, as far as the tests ask."""

from __future__ import annotations

import dataclasses
import enum
import math
from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor, nn


def _softmax(scores: Tensor, hidden: Optional[Tensor], sink: Optional[Tensor]) -> Tensor:
    if hidden is not None:
        scores = scores.masked_fill(hidden, -10000.0 if sink is None else -math.inf)
    if sink is None:
        return torch.softmax(scores, -1)
    more = sink.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, more], -1), -1)[..., :-1]


def _window(q_len: int, k_len: int, left: int, right: int, top_left: bool = False) -> Tensor:
    """True where hidden."""
    place = torch.arange(q_len)[:, None] + (0 if top_left else k_len - q_len)
    key = torch.arange(k_len)[None]
    hidden = torch.zeros(q_len, k_len, dtype=torch.bool)
    if left >= 0:
        hidden |= key < place - left
    if right >= 0:
        hidden |= key > place + right
    return hidden


# ---- megatron.core.transformer.dot_product_attention ----


class AttnMaskType(enum.Enum):
    padding = 1
    causal = 2
    no_mask = 3


class FusedScaleMaskSoftmax(nn.Module):
    def __init__(self, kind: AttnMaskType, scale: Optional[float], window: Any, fused: bool):
        super().__init__()
        self.attn_mask_type, self.scale, self.window_size = kind, scale, window
        self._fused = fused

    def is_kernel_available(self, mask: Any, b: int, np: int, sq: int, sk: int) -> bool:
        return self._fused

    def forward(self, scores: Tensor, mask: Optional[Tensor], offset: Optional[Tensor]) -> Tensor:
        scores = scores * self.scale if self.scale is not None else scores
        causal = self.attn_mask_type is AttnMaskType.causal
        sq, sk = scores.shape[2:]
        if self._fused and offset is None:  # Megatron's kernels know no windows.
            mask = _window(sq, sk, -1, 0) if causal else mask
        elif self.window_size is not None:
            mask = _window(sq, sk, *self.window_size)
        elif causal and mask is None and sq > 1:
            mask = _window(sq, sk, -1, 0)
        return _softmax(scores, mask, offset)


class MegatronAttention(nn.Module):
    """DotProductAttention."""

    def __init__(
        self, kind: AttnMaskType = AttnMaskType.causal, layer_number: int = 1,
        layer_scaling: bool = False, window: Any = None, softmax_type: str = "vanilla",
        dropout: float = 0.0, fused: bool = False, heads: int = 4, dim: int = 8,
    ) -> None:  # fmt: skip
        super().__init__()
        coefficient = layer_number if layer_scaling else None
        self.softmax_scale = dim**-0.5 / (coefficient or 1)
        self.scale_mask_softmax = FusedScaleMaskSoftmax(kind, coefficient, window, fused)
        self.attention_dropout = nn.Dropout(dropout)
        self.softmax_offset: Optional[Tensor] = None
        if softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(heads)
        elif softmax_type == "learnable":
            del self.softmax_offset
            self.softmax_offset = nn.Parameter(torch.randn(heads))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
        attn_mask_type: Any = None, attention_bias: Optional[Tensor] = None,
        packed_seq_params: Any = None,
    ) -> Tensor:  # fmt: skip
        assert packed_seq_params is None and attention_bias is None
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        weights = self.scale_mask_softmax(
            self.softmax_scale * q @ k.mT, attention_mask, self.softmax_offset
        )
        o = self.attention_dropout(weights) @ v
        return o.permute(2, 0, 1, 3).flatten(2).contiguous()


# ---- transformer_engine.pytorch.attention ----


class EngineAttention(nn.Module):
    """DotProductAttention."""

    def __init__(
        self, num_attention_heads: int, kv_channels: int, attention_dropout: float = 0.0,
        qkv_format: str = "sbhd", attn_mask_type: str = "causal", window_size: Any = None,
        softmax_scale: Optional[float] = None, softmax_type: str = "vanilla",
    ) -> None:  # fmt: skip
        super().__init__()
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type.replace(",", "_")
        self.window_size = self._checked(self.attn_mask_type, window_size)
        self.attention_dropout, self.cp_group, self.fp8 = attention_dropout, None, False
        self.unfused_attention = SimpleNamespace(softmax_scale=softmax_scale or kv_channels**-0.5)
        self.softmax_type = softmax_type
        self.softmax_offset: Optional[Tensor] = None
        if softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(1, num_attention_heads, 1, 1)
        elif softmax_type == "learnable":
            del self.softmax_offset
            self.softmax_offset = nn.Parameter(torch.randn(1, num_attention_heads, 1, 1))

    @staticmethod
    def _checked(kind: str, window: Any) -> tuple[int, int]:
        if "causal" in kind:
            return (-1 if window is None else window[0]), 0
        return (-1, -1) if window in (None, (-1, 0)) else window

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor,
        attention_mask: Any = None, qkv_format: Optional[str] = None,
        cu_seqlens_q: Optional[Tensor] = None, cu_seqlens_kv: Optional[Tensor] = None,
        cu_seqlens_q_padded: Optional[Tensor] = None, cu_seqlens_kv_padded: Optional[Tensor] = None,
        max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None,
        attn_mask_type: Optional[str] = None, window_size: Any = None,
        checkpoint_core_attention: bool = False, core_attention_bias_type: str = "no_bias",
        core_attention_bias: Optional[Tensor] = None, alibi_slopes: Optional[Tensor] = None,
        fast_zero_fill: bool = True, inference_params: Any = None,
        pad_between_seqs: Optional[bool] = None, fp8_output: Optional[bool] = False,
        num_splits: Optional[int] = 1,
    ) -> Tensor:  # fmt: skip
        form = qkv_format or self.qkv_format
        kind = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        left, right = self._checked(kind, window_size or self.window_size)
        if form == "thd":
            assert cu_seqlens_q is not None and cu_seqlens_kv is not None
            out = torch.zeros(*query_layer.shape[:2], value_layer.shape[2])
            in_q, in_k = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
            for a, b, c, d in zip(in_q, in_q[1:], in_k, in_k[1:]):
                one = (t[None] for t in (query_layer[a:b], key_layer[c:d], value_layer[c:d]))
                out[a:b] = self._core(*one, kind, left, right, None, alibi_slopes, None)[0]
            return out.flatten(1)
        order = (1, 0, 2, 3) if form == "sbhd" else (0, 1, 2, 3)
        tensors = (t.permute(order) for t in (query_layer, key_layer, value_layer))
        hidden = attention_mask
        if "padding" in kind:
            pair = hidden if isinstance(hidden, tuple) else (hidden, hidden)
            if hidden is None:
                lengths = cu_seqlens_q[1:] - cu_seqlens_q[:-1]  # type: ignore[index]
                steps = torch.arange(query_layer.shape[order.index(1)])
                pair = ((steps >= lengths[:, None])[:, None, None],) * 2
            hidden = pair[0].transpose(-1, -2) | pair[1]
        o = self._core(*tensors, kind, left, right, hidden, alibi_slopes, core_attention_bias)
        return o.permute(order).flatten(2)

    def _core(
        self, q: Tensor, k: Tensor, v: Tensor, kind: str, left: int, right: int,
        hidden: Optional[Tensor], slopes: Optional[Tensor], bias: Optional[Tensor],
    ) -> Tensor:  # fmt: skip
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = self.unfused_attention.softmax_scale * q @ k.mT
        if bias is not None:
            scores = scores + bias
        if slopes is not None:
            place = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
            scores = (
                scores
                - slopes.reshape(-1, q.shape[1], 1, 1) * (place - torch.arange(k.shape[2])).abs()
            )
        apart = _window(q.shape[2], k.shape[2], left, right, "bottom_right" not in kind)
        apart = apart if hidden is None else apart | hidden
        return (_softmax(scores, apart, self.softmax_offset) @ v).transpose(1, 2)


# ---- xformers.ops ----


@dataclasses.dataclass
class SeqLenInfo:
    seqstart: Tensor


class LowerTriangularMask: ...


class LowerTriangularFromBottomRightMask: ...


@dataclasses.dataclass
class LowerTriangularMaskWithTensorBias:
    _bias: Tensor


@dataclasses.dataclass
class LocalAttentionFromBottomRightMask:
    window_left: int
    window_right: int


@dataclasses.dataclass
class LowerTriangularFromBottomRightLocalAttentionMask:
    _window_size: int


@dataclasses.dataclass
class BlockDiagonalMask:
    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo


class BlockDiagonalCausalMask(BlockDiagonalMask): ...


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask): ...


@dataclasses.dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalMask):
    _window_size: int = 0


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalMask): ...


def _hidden_by(bias: Any, q_len: int, k_len: int) -> Tensor:
    """True where hidden."""
    name = type(bias).__name__
    window = getattr(bias, "_window_size", 0)
    if isinstance(bias, BlockDiagonalMask):
        hidden = torch.ones(q_len, k_len, dtype=torch.bool)
        in_q, in_k = bias.q_seqinfo.seqstart.tolist(), bias.k_seqinfo.seqstart.tolist()
        for a, b, c, d in zip(in_q, in_q[1:], in_k, in_k[1:]):
            right = 0 if "Causal" in name else -1
            hidden[a:b, c:d] = _window(b - a, d - c, window - 1, right, "BottomRight" not in name)
        return hidden
    if isinstance(bias, LocalAttentionFromBottomRightMask):
        return _window(q_len, k_len, bias.window_left, bias.window_right)
    return _window(q_len, k_len, window - 1, 0, "BottomRight" not in name)


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: Optional[float] = None, *, op: Any = None, output_dtype: Any = None,
) -> Tensor:  # fmt: skip
    shape = query.shape
    if query.dim() == 3:
        query, key, value = (t.unsqueeze(2) for t in (query, key, value))
    elif query.dim() == 5:
        query, key, value = (t.flatten(2, 3) for t in (query, key, value))
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    tensor = attn_bias if isinstance(attn_bias, Tensor) else getattr(attn_bias, "_bias", None)
    if tensor is not None:
        scores = scores + tensor.reshape(scores.shape)
    if attn_bias is not None and not isinstance(attn_bias, Tensor):
        scores = scores.masked_fill(_hidden_by(attn_bias, *scores.shape[2:]), -math.inf)
    o = (torch.dropout(torch.softmax(scores, -1), p, True) @ v).transpose(1, 2)
    return o.reshape(*shape[:-1], v.shape[-1])
