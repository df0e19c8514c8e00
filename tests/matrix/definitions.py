"""The statistics of the catalogue in fp64, straight from the definitions in signals.proto and
probe.h, of one captured call: any mask, bias, softcap and sinks."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from capture import Call, scores


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
    mean_size = (keys.norm(dim=-1, keepdim=True) * visible).sum(2) / count[:, :, 0]
    coherence = mean_key[:, :, 0].norm(dim=-1) / mean_size[..., 0].clamp(min=1e-300)

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

    def key_heads(x: Tensor) -> Tensor:
        return x[:, :: q.shape[1] // call.kv_heads].sum(0)

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
        "sequences": torch.full((call.kv_heads,), float(k.shape[0]), dtype=torch.float64),
        "key_coherence_sum": key_heads(coherence),
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
        "delta_bias_sum": 1e-3 * rows(e.abs()) + 2.0**-21 * rows(products),
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
        slack["key_leak_sum"] = one * found["key_gradient_sum"]
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
