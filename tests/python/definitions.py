"""The statistics of the catalogue in fp64, straight from the definitions in signals.proto and
probe.h, of one call of attention: any mask, bias, softcap and sinks."""

from __future__ import annotations

import dataclasses
import math
from typing import Optional

import torch
from torch import Tensor

HIDDEN = -9984.0  # An additive mask from here down hides the key: -10,000 as bfloat16 has it.


@dataclasses.dataclass
class Call:
    """One call; tensors are [batch, heads, tokens, dim], k and v with the heads that were given."""

    module: str
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    scale: float
    allowed: Optional[Tensor] = None  # bool, broadcasts to [batch, heads, rows, keys]; None = all
    bias: Optional[Tensor] = None  # Added to the scores after the cap.
    softcap: float = 0.0
    sinks: Optional[Tensor] = None  # [heads]
    dropout: float = 0.0
    d_o: Optional[Tensor] = None
    d_k: Optional[Tensor] = None
    kv_heads: int = 0  # Of them, those that differ.


def rule(mask: Optional[Tensor]) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """(allowed, bias) of a boolean or additive mask."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    allowed = mask.double() > HIDDEN
    return allowed, torch.where(allowed, mask.double(), 0.0)


def of_tensors(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, d_o: Tensor, scale: float, causal: bool,
    mask: Optional[Tensor] = None, d_k: Optional[Tensor] = None, kv_heads: Optional[int] = None,
) -> Expected:  # fmt: skip
    """The statistics of a call that a test has made itself.

    causal    aligned at the bottom right
    mask      broadcasts to [batch, heads, rows, keys]: bool, true = may see; else added
    kv_heads  of k, those that differ; all by default
    """
    q, k, v, o, d_o = (t.detach().cpu() for t in (q, k, v, o, d_o))
    allowed, bias = rule(None if mask is None else mask.detach().cpu())
    if causal:
        before = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        allowed = before if allowed is None else allowed & before
    d_k = None if d_k is None else d_k.detach().cpu()
    heads = kv_heads or k.shape[1]
    return of_call(Call("", q, k, v, o, scale, allowed, bias, d_o=d_o, d_k=d_k, kv_heads=heads))


def scores(call: Call) -> Tensor:
    """Scale q.k, capped, with the bias; -inf where a key is hidden; fp64."""
    q, k = call.q.double(), call.k.double()
    raw = call.scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    if call.softcap:
        raw = call.softcap * torch.tanh(raw / call.softcap)
    if call.bias is not None:
        raw = raw + call.bias
    return raw if call.allowed is None else raw.masked_fill(~call.allowed, -math.inf)


@dataclasses.dataclass
class Expected:
    values: dict[str, Tensor]  # signal -> [heads] or [key heads]
    slack: dict[str, Tensor]  # How far a number may be off, the same shape.

    def __add__(self, other: Expected) -> Expected:
        def merged(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
            both = a.keys() & b.keys()
            return {n: torch.maximum(a[n], b[n]) if n == "logit_max" else a[n] + b[n] for n in both}

        return Expected(merged(self.values, other.values), merged(self.slack, other.slack))


def of_call(call: Call) -> Expected:
    assert call.d_o is not None
    q, k, v, o, d_o = (t.double() for t in (call.q, call.k, call.v, call.o, call.d_o))
    group = q.shape[1] // k.shape[1]
    key_group = k.shape[1] // call.kv_heads  # Copies of a key head that the function was given.
    keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
    s = scores(call)
    allowed = torch.isfinite(s)
    n = allowed.sum(-1)
    row = n > 0  # A row that may see no key is none.
    n = n.double()
    top = s.amax(-1, keepdim=True).masked_fill(~row[..., None], 0.0)
    sink = torch.full((1, 1, 1, 1), -math.inf, dtype=torch.float64)
    if call.sinks is not None:
        sink = call.sinks.double().reshape(1, -1, 1, 1)
    highest = torch.maximum(top, sink)
    weights = torch.exp(s - highest)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink - highest)
    p = weights / total
    # What one rounding error in fp32 may move a score by.
    error = 8 * 2.0**-24 * (call.scale * (q.abs() @ keys.abs().mT))
    if call.bias is not None:
        error = error + 2.0**-23 * call.bias.abs()

    # Over the keys that some row may see.
    visible = allowed.any(2).double()[..., None]
    count = visible.sum(2, keepdim=True).clamp(min=1)
    mean_key = (keys * visible).sum(2, keepdim=True) / count
    centred = (keys - mean_key) * visible
    covariance = centred.mT @ centred / count
    quadratic = torch.einsum("bhtd,bhde,bhte->bht", q, covariance, q).clamp(min=0)

    plogp = torch.where(p > 0, p * p.clamp(min=1e-300).log(), 0.0)
    entropy = torch.where(n > 1, -plogp.sum(-1) / n.clamp(min=2).log(), 0.0)
    delta_hp = (d_o * (p @ values)).sum(-1)
    e = (d_o * o).sum(-1) - delta_hp
    products = (d_o * o).abs().sum(-1)

    def rows(x: Tensor) -> Tensor:
        return torch.where(row, x.double(), 0.0).sum((0, 2))

    def within(limit: float) -> tuple[Tensor, Tensor]:
        threshold = top - limit
        tied = (s >= threshold).sum(-1) > 1
        near = ((s - threshold).abs() <= error + error.amax(-1, keepdim=True)) & allowed
        return rows(tied), rows(near.any(-1))

    rounded = s.bfloat16()
    high = (s + error).bfloat16() != (s - error).bfloat16()
    close = s >= top - top.abs() * 2.0**-6
    eps, eps_unsure = within(1.955e-3)
    paper, paper_unsure = within(1e-3)
    saturated = total.squeeze(-1)

    # Of a key head are all keys that one of its query heads sees.
    seen = visible.unflatten(1, (call.kv_heads, -1)).amax(2)
    of_head = k[:, ::key_group]
    key_sum = (seen * of_head).sum(2).norm(dim=-1)
    key_sizes = (seen * of_head.norm(dim=-1, keepdim=True)).sum((2, 3))
    coherence = key_sum / key_sizes.clamp(min=1e-300)

    found = {
        "rows": rows(row),
        "common_mode_sum": rows((call.scale * (q * mean_key).sum(-1)).abs()),
        "spread_sum": rows(call.scale * quadratic.sqrt()),
        "tied_rows_bf16": rows((rounded == rounded.amax(-1, keepdim=True)).sum(-1) > 1),
        "tied_rows_eps": eps,
        "tied_rows_eps_paper": paper,
        "saturated_rows": rows(saturated < 1 + 2.0**-7),
        "logit_max": s.amax((0, 2, 3)),
        "entropy_sum": rows(entropy),
        "sink_sum": rows(p[..., 0]),
        "nonfinite_rows": torch.zeros(q.shape[1], dtype=torch.float64),
        "delta_bias_sum": rows(e),
        "delta_bias_sumsq": rows(e * e),
        "delta_abs_sum": rows(delta_hp.abs()),
        "delta_error_abs_sum": rows(e.abs()),
        "sequences": seen.amax((2, 3)).sum(0),
        "key_coherence_sum": coherence.sum(0),
    }
    one = 1e-5
    slack = {
        "rows": torch.zeros(q.shape[1]),
        "common_mode_sum": one * rows((call.scale * (q * mean_key)).abs().sum(-1)),
        # A spread near zero is the root of what is rounded.
        "spread_sum": one * rows(call.scale * (q.abs() * keys.abs().amax(2, keepdim=True)).sum(-1)),
        "tied_rows_bf16": rows((high & close & allowed).any(-1)),
        "tied_rows_eps": eps_unsure,
        "tied_rows_eps_paper": paper_unsure,
        "saturated_rows": rows((saturated - 1 - 2.0**-7).abs() < 1e-6),
        "logit_max": one * (call.scale * q.abs() @ keys.abs().mT).amax((0, 2, 3)),
        "entropy_sum": one * rows(-plogp.sum(-1)),
        "sink_sum": one * rows(p[..., 0]) + 1e-9,
        "nonfinite_rows": torch.zeros(q.shape[1]),
        # fp32 kernels have hardly a bias to see: the floor is the rounding of float sums.
        "delta_bias_sum": 1e-3 * rows(e.abs()) + 2.0**-22 * rows(products),
        "delta_bias_sumsq": 1e-3 * rows(e * e) + 2.0**-21 * rows(products * products),
        "delta_abs_sum": one * rows(products),
        "delta_error_abs_sum": 1e-3 * rows(e.abs()) + 2.0**-21 * rows(products),
        "sequences": torch.zeros(call.kv_heads),
        "key_coherence_sum": torch.full((call.kv_heads,), one * k.shape[0]),
    }
    if call.d_k is not None:
        batch, _, tokens, dim = call.d_k.shape
        whole = call.d_k.double().reshape(batch, call.kv_heads, key_group, tokens, dim).sum(2)
        found["key_leak_sum"] = whole.sum(2).norm(dim=-1).sum(0)
        found["key_gradient_sum"] = whole.norm(dim=-1).sum((0, 2))
        slack["key_leak_sum"] = one * found["key_leak_sum"] + 1e-6 * found["key_gradient_sum"]
        slack["key_gradient_sum"] = one * found["key_gradient_sum"]
    return Expected(found, {name: value.double() for name, value in slack.items()})


def mistaken(call: Call) -> float:
    """How far o is from what the reading of the call says it should be, relative to its size: it
    shows whether mask, bias, scale and the rest are understood."""
    s = scores(call)
    sink = torch.full((1, 1, 1, 1), -math.inf, dtype=torch.float64)
    if call.sinks is not None:
        sink = call.sinks.double().reshape(1, -1, 1, 1)
    row = torch.isfinite(s).any(-1, keepdim=True)
    p = torch.softmax(torch.cat([s, sink.expand(*s.shape[:-1], 1)], -1), -1)[..., :-1]
    v = call.v.double()
    o = p @ v.repeat_interleave(p.shape[1] // v.shape[1], 1)
    difference = torch.where(row, o - call.o.double(), 0.0)
    return float(difference.abs().max() / call.o.double().abs().max().clamp(min=1e-300))
