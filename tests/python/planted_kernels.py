"""Attention as an autograd Function that rounds as fused kernels do, right or with one fault that
nothing outside of it sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What is wrong -> the tensor that is, and a head of it: None = any.
FAULTS: dict[str, tuple[str, int | None]] = {
    "dq_times_five_in_a_sequence": ("dq", None),
    "dq_negated_in_a_head": ("dq", 2),
    "dk_of_heads_exchanged": ("dk", None),
    "dk_tail_not_written": ("dk", 1),
    "dq_key_tile_skipped": ("dq", None),
    "dv_one_percent_large": ("dv", 3),
    "dq_two_percent_large": ("dq", 3),
    "p_does_not_add_up": ("dv", None),
    "nan_in_a_head_of_dq": ("dq", 2),
    "o_two_percent_large": ("o", 1),
    "dv_last_row_of_queries_left_out": ("dv", None),
}

SCALED_FIRST = "dS times the scale is rounded"  # Right, as some kernels do it.


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, d_o: Tensor, p: Tensor, fault: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k, v; all with the same heads, in fp32."""
    scale, tile = q.shape[-1] ** -0.5, slice(32, 64)
    if fault == "p_does_not_add_up":
        p = p * 1.02
    dtype = o.dtype
    delta = (d_o.float() * o.float()).sum(-1, keepdim=True)
    d_s = p * (d_o.float() @ v.mT - delta)
    by = scale if fault == SCALED_FIRST else 1.0
    d_s = (by * d_s).to(dtype).float() / by
    rounded = p.to(dtype).float()
    dv = rounded.mT @ d_o.float()
    if fault == "dv_last_row_of_queries_left_out":
        dv = rounded[:, :, :-1].mT @ d_o[:, :, :-1].float()
    dk = scale * (d_s.mT @ q)
    if fault == "dq_key_tile_skipped":
        d_s = d_s.clone()
        d_s[:, :, :, tile] = 0
    return scale * (d_s @ k), dk, dv


class Planted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, fault: str
    ) -> Tensor:
        group = q.shape[1] // k.shape[1]
        kf, vf = (t.float().repeat_interleave(group, 1) for t in (k, v))
        s = q.shape[-1] ** -0.5 * (q.float() @ kf.mT)
        if mask is not None:
            s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
        p = s.softmax(-1)
        if fault != "nan_where_nothing_is_seen":
            p = p.nan_to_num(0.0)
        o = (p.to(q.dtype).float() @ vf).to(q.dtype)
        if fault == "o_two_percent_large":
            o[:, 1] *= 1.02
        ctx.save_for_backward(q, k, v, o, p, s.logsumexp(-1, keepdim=True))
        ctx.fault = fault
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, p, logsumexp = ctx.saved_tensors
        fault, group = ctx.fault, q.shape[1] // k.shape[1]
        kf, vf = (t.float().repeat_interleave(group, 1) for t in (k, v))
        dq, dk, dv = _gradients(q.float(), kf, vf, o, d_o, p, fault)
        dk, dv = (t.unflatten(1, (-1, group)).sum(2).to(k.dtype) for t in (dk, dv))
        dq = dq.to(q.dtype)
        if fault == "dq_times_five_in_a_sequence":
            dq[-1] *= 5
        elif fault == "dq_negated_in_a_head":
            dq[:, 2] *= -1
        elif fault == "dk_of_heads_exchanged":
            dk[:, [0, 1]] = dk[:, [1, 0]]
        elif fault == "dk_tail_not_written":
            dk[:, 1, -(dk.shape[2] % 32 or 32) :] = 0
        elif fault == "dv_one_percent_large":
            dv[:, 3] *= 1.01
        elif fault == "dq_two_percent_large":
            dq[:, 3] *= 1.02
        elif fault == "nan_in_a_head_of_dq":
            dq[0, 2, 5, 1] = torch.nan
        elif fault == "unused_keys_score_zero" and k.shape[2] % 128:
            dq += (torch.exp(-logsumexp) * 0).to(dq.dtype)  # P of a key that is all 0.
        return dq, dk, dv, None, None


def planted(fault: str) -> Any:
    """A function with the arguments of scaled_dot_product_attention."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
        is_causal: bool = False, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if is_causal:
            shape = (q.shape[2], k.shape[2])
            attn_mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril()
        result: Tensor = Planted.apply(q, k, v, attn_mask, fault)  # type: ignore[no-untyped-call]
        return result

    return attend


# For `doctor --kernels --function planted_kernels:NAME`.
sound = planted("")
exchanged = planted("dk_of_heads_exchanged")
unused = planted("unused_keys_score_zero")
