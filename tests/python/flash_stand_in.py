"""FlashAttention's functions with the signatures of the packages, computed by PyTorch: the packages
themselves need a GPU.  Module names are those of the packages."""

from __future__ import annotations

import math
import types
from typing import Any, Optional

import torch
from torch import Tensor


def _one(
    q: Tensor, k: Tensor, v: Tensor, scale: Optional[float], causal: bool, window: Any,
    softcap: float, slopes: Optional[Tensor], sink: Optional[Tensor] = None, chunk: int = 0,
    p: float = 0.0,
) -> Tensor:  # fmt: skip
    """One sequence, [tokens, heads, dim]."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[1:]
    place = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None]
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (place - key).abs()
    left, right = (-1 if w is None else w for w in window)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= key >= place - left
    if causal or right >= 0:
        seen &= key <= place + (0 if causal else right)
    if chunk:
        seen &= key // chunk == place // chunk
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, queries, 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num()[..., :keys]
    return (torch.dropout(weights, p, True) @ v).transpose(0, 1)


def _batch(
    q: Tensor, k: Tensor, v: Tensor, slopes: Optional[Tensor], *rest: Any, **more: Any
) -> Tensor:
    each = [None] * len(q) if slopes is None else slopes.expand(len(q), -1)
    return torch.stack(
        [_one(a, b, c, *rest[:4], s, **more) for a, b, c, s in zip(q, k, v, each)]  # type: ignore[arg-type]
    )


def _documents(
    q: Tensor, k: Tensor, v: Tensor, in_q: Tensor, in_k: Tensor, slopes: Optional[Tensor],
    *rest: Any, **more: Any,
) -> Tensor:  # fmt: skip
    each = [None] * len(in_q) if slopes is None else slopes.expand(len(in_q), -1)
    ends_q, ends_k = in_q.tolist(), in_k.tolist()
    found = [
        _one(q[a:b], k[c:d], v[c:d], *rest[:4], s, **more)
        for a, b, c, d, s in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], each)
    ]
    return torch.cat([*found, q.new_zeros(len(q) - ends_q[-1], q.shape[1], v.shape[2])])


# ---- flash_attn 2 ----


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    o = _batch(q, k, v, alibi_slopes, softmax_scale, causal, window_size, softcap, p=dropout_p)
    return (o, None, None) if return_attn_probs else o


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return flash_attn_func(
        *qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return flash_attn_func(
        q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    o = _documents(
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, softmax_scale, causal, window_size,
        softcap, p=dropout_p,
    )  # fmt: skip
    return (o, None, None) if return_attn_probs else o


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    return flash_attn_varlen_func(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return flash_attn_varlen_func(
        q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


two = types.ModuleType("flash_attn")
for _function in (
    flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func,
):  # fmt: skip
    setattr(two, _function.__name__, _function)


# ---- flash_attn_interface, 3 ----


class _Three:
    @staticmethod
    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        o = _batch(
            q, k, v, None, softmax_scale, causal, window_size, softcap, chunk=attention_chunk
        )
        return (o, None) if return_attn_probs else o

    @staticmethod
    def flash_attn_qkvpacked_func(
        qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False,
        num_heads_q=None, sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        if qkv.dim() == 5:
            q, k, v = qkv.unbind(2)
        else:
            rest = (qkv.shape[2] - num_heads_q) // 2
            q, k, v = qkv.split([num_heads_q, rest, rest], 2)
        return _Three.flash_attn_func(
            q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
            attention_chunk, softcap, return_attn_probs=return_attn_probs,
        )  # fmt: skip


three = types.ModuleType("flash_attn_interface")
three.flash_attn_func = _Three.flash_attn_func  # type: ignore[attr-defined]
three.flash_attn_qkvpacked_func = _Three.flash_attn_qkvpacked_func  # type: ignore[attr-defined]


# ---- flash_attn.cute, 4 ----


class _Four:
    @staticmethod
    def flash_attn_func(
        q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
        aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None,
        return_lse=False,
    ):  # fmt: skip
        o = _batch(q, k, v, None, softmax_scale, causal, window_size, softcap, sink=learnable_sink)
        return o, None

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
        gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
        block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False,
        scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    ):  # fmt: skip
        o = _documents(
            q, k, v, cu_seqlens_q, cu_seqlens_k, None, softmax_scale, causal, window_size,
            softcap, sink=learnable_sink,
        )  # fmt: skip
        return o, None


four = types.ModuleType("flash_attn.cute")
four.flash_attn_func = _Four.flash_attn_func  # type: ignore[attr-defined]
four.flash_attn_varlen_func = _Four.flash_attn_varlen_func  # type: ignore[attr-defined]


# ---- torch.nn.attention.varlen ----


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    o = _documents(query, key, value, cu_seq_q, cu_seq_k, None, scale, False, window_size, 0.0)
    return (o, None) if return_aux is not None else o
