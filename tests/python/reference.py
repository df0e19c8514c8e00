"""The statistics of the catalogue in fp64, straight from the definitions in signals.proto."""

from __future__ import annotations

import dataclasses
import math
from typing import Optional

import torch
from torch import Tensor


@dataclasses.dataclass
class Expected:
    values: dict[str, Tensor]  # signal -> [heads] or [kv_heads]
    unsure: dict[str, Tensor]  # count -> rows within fp32 rounding of its threshold, [heads]
    scale: dict[str, Tensor]  # signed sum -> sum of absolute values

    def __add__(self, other: Expected) -> Expected:
        def merge(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
            return {n: torch.maximum(a[n], b[n]) if n == "logit_max" else a[n] + b[n] for n in a}

        return Expected(
            merge(self.values, other.values),
            merge(self.unsure, other.unsure),
            merge(self.scale, other.scale),
        )


def statistics(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, d_o: Tensor, scale: float, causal: bool,
    mask: Optional[Tensor] = None,
) -> Expected:  # fmt: skip
    """q, o, d_o [B, H, T, D]; k, v [B, Hkv, T, D]: as the kernel got and returned them.

    causal  aligned at the bottom right
    mask    broadcasts to [B, H, T, T]: bool, true = may see; else added to the scores
    """
    q, k, v, o, d_o = (t.detach().cpu().double() for t in (q, k, v, o, d_o))
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = scale * q @ keys.mT
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if causal:
        allowed = allowed.tril(allowed.shape[-1] - allowed.shape[-2])
    if mask is not None:
        mask = mask.detach().cpu()
        allowed = allowed & (mask if mask.dtype == torch.bool else mask > -10_000)
        scores = scores if mask.dtype == torch.bool else scores + mask.double()
    n = allowed.sum(-1).double()
    counts = n > 0  # A row that sees no key is none.
    visible = allowed.any(2, keepdim=True).mT.double()  # [B, H, S, 1]
    keys_seen = visible.sum(2, keepdim=True).clamp(min=1)
    scores = scores.masked_fill(~allowed, -math.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(counts[..., None], top, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    p = weights / total.clamp(min=1e-300)
    # What one rounding error in fp32 may move a score by.
    error = 8 * 2.0**-24 * scale * (q.abs() @ keys.abs().mT)

    mean_key = (visible * keys).sum(2, keepdim=True) / keys_seen
    centred = (keys - mean_key) * visible
    covariance = centred.mT @ centred / keys_seen
    quadratic = torch.einsum("bhtd,bhde,bhte->bht", q, covariance, q).clamp(min=0)
    plogp = torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0)
    entropy = torch.where(n > 1, -plogp.sum(-1) / n.clamp(min=2).log(), 0.0)
    delta_hp = (d_o * (p @ values)).sum(-1)
    e = (d_o * o).sum(-1) - delta_hp

    def rows(x: Tensor) -> Tensor:
        return torch.where(counts, x.double(), 0.0).sum((0, 2))

    # Of a key head are all keys that one of its query heads sees.
    seen = visible.unflatten(1, (-1, group)).amax(2)  # [B, Hkv, S, 1]
    of_head = seen.sum(2).clamp(min=1)  # [B, Hkv, 1]
    k_mean = (seen * k).sum(2) / of_head
    k_size = (seen[..., 0] * k.norm(dim=-1)).sum(2) / of_head[..., 0]

    def within(limit: float) -> tuple[Tensor, Tensor]:
        threshold = top - limit
        tied = (scores >= threshold).sum(-1) > 1
        near = ((scores - threshold).abs() <= error + error.amax(-1, keepdim=True)) & allowed
        return rows(tied), rows(near.any(-1))

    rounded = scores.bfloat16()
    high = (scores + error).bfloat16() != (scores - error).bfloat16()
    close = scores >= top - top.abs() * 2.0**-6
    tied_bf16 = (rounded == rounded.amax(-1, keepdim=True)).sum(-1) > 1
    eps, eps_unsure = within(1.955e-3)
    paper, paper_unsure = within(1e-3)
    values_found = {
        "rows": counts.double().sum((0, 2)),
        "common_mode_sum": rows((scale * (q * mean_key).sum(-1)).abs()),
        "spread_sum": rows(scale * quadratic.sqrt()),
        "tied_rows_bf16": rows(tied_bf16),
        "tied_rows_eps": eps,
        "tied_rows_eps_paper": paper,
        "saturated_rows": rows(total.squeeze(-1) < 1 + 2.0**-7),
        "logit_max": torch.where(allowed, scores, -math.inf).amax((0, 2, 3)),
        "entropy_sum": rows(entropy),
        "sink_sum": rows(p[..., 0]),
        "nonfinite_rows": torch.zeros(q.shape[1], dtype=torch.float64),
        "delta_bias_sum": rows(e),
        "delta_bias_sumsq": rows(e * e),
        "delta_abs_sum": rows(delta_hp.abs()),
        "delta_error_abs_sum": rows(e.abs()),
        "sequences": seen.amax((2, 3)).sum(0),
        "key_coherence_sum": (k_mean.norm(dim=-1) / k_size.clamp(min=1e-300)).sum(0),
    }
    unsure = {
        "tied_rows_bf16": rows((high & close & allowed).any(-1)),
        "tied_rows_eps": eps_unsure,
        "tied_rows_eps_paper": paper_unsure,
        "saturated_rows": rows((total.squeeze(-1) - 1 - 2.0**-7).abs() < 1e-6),
    }
    # fp32 of the same dot products: what the signed sums may be judged against.
    scale_of = {"delta_bias_sum": rows(e.abs()), "delta_lp": rows((d_o * o).abs().sum(-1))}
    return Expected(values_found, unsure, scale_of)


def key_leak(d_k: Tensor, kv_heads: int) -> dict[str, Tensor]:
    """d_k [B, heads that the kernel saw, T, D]; repeated heads belong to one key head."""
    batch, heads, tokens, dim = d_k.shape
    whole = (
        d_k.detach().cpu().double().reshape(batch, kv_heads, heads // kv_heads, tokens, dim).sum(2)
    )
    return {
        "key_leak_sum": whole.sum(2).norm(dim=-1).sum(0),
        "key_gradient_sum": whole.norm(dim=-1).sum((0, 2)),
    }
