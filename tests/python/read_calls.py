"""What a call that an adapter has read comes to, in fp64, straight from the words of
_hook/calls/call.py: tests compare it with what the function itself returned."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from bellwether._hook.calls.call import AttentionCall, Mask

HIDES = -10_000.0


def diagonals(mask: Mask, q_len: int, k_len: int) -> list[tuple[int, int, int]]:
    """Of each row the first key and the end of its document, and the key beside it."""
    if mask.q_offsets is None or mask.k_offsets is None:
        shift = 0 if mask.top_left else k_len - q_len
        return [(0, k_len, row + shift) for row in range(q_len)]
    found = [(0, 0, -1)] * q_len
    in_q, in_k = mask.q_offsets.tolist(), mask.k_offsets.tolist()
    for q0, q1, k0, k1 in zip(in_q, in_q[1:], in_k, in_k[1:]):
        for row in range(q0, q1):
            beside = k0 + row - q0 if mask.top_left else k1 + row - q1
            found[row] = k0, k1, beside
    return found


def added(call: AttentionCall, scores: Tensor) -> Tensor:
    """What the mask adds to the scores [batch, heads, rows, keys]; -inf hides a key."""
    mask = call.mask
    batch, heads, q_len, k_len = scores.shape
    total = torch.zeros_like(scores)
    hide = torch.zeros(batch, heads, q_len, k_len, dtype=torch.bool)
    for row, (begin, end, beside) in enumerate(diagonals(mask, q_len, k_len)):
        keys = torch.arange(k_len)
        hidden = (keys < begin) | (keys >= end)
        if mask.causal:
            hidden |= keys > beside
        if mask.left is not None:
            hidden |= keys < beside - mask.left
        if mask.right is not None:
            hidden |= keys > beside + mask.right
        if mask.chunk is not None:
            hidden |= keys // mask.chunk != beside // mask.chunk
        hide[:, :, row] |= hidden
    for b in range(batch):
        first = 0 if mask.begins is None else int(mask.begins[b])
        last = k_len if mask.ends is None else int(mask.ends[b])
        outside = (torch.arange(k_len) < first) | (torch.arange(k_len) >= last)
        hide[b] |= outside
        if mask.padded_rows:
            hide[b, :, outside[:q_len]] = True
    if mask.documents is not None:
        apart = mask.documents[:, :, None] != mask.documents[:, None, :]
        hide |= apart[:, None]
    if mask.tensor is not None:
        if mask.tensor.dtype == torch.bool:
            hide |= ~mask.tensor
        else:
            total = total + mask.tensor.double()
    if mask.function is not None:
        rows = torch.arange(q_len).expand(batch, heads, -1)
        total = total + mask.function(rows, scores)
    hide |= total <= HIDES
    return total.masked_fill(hide, -math.inf)


def output(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """(the output [batch, heads, rows, dim], which rows see a key)."""
    q, k, v = (
        view(t.detach()).double()
        for view, t in ((call.q_view, call.q), (call.k_view, call.k), (call.v_view, call.v))
    )
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    raw = call.scale * q @ k.mT
    scores = call.softcap * torch.tanh(raw / call.softcap) if call.softcap else raw
    scores = scores + added(call, raw)
    visible = scores > -math.inf
    if call.mask.visible is not None:
        assert torch.equal(call.mask.visible.expand(*scores.shape[:2], -1), visible.any(2)), (
            "visible"
        )
    if call.mask.function is not None and not call.mask.hides:
        shown = added(
            dataclasses.replace(call, mask=dataclasses.replace(call.mask, function=None)), raw
        )
        assert torch.equal(shown > -math.inf, visible), "hides"
    if call.mask.heads_alike:
        assert torch.equal(visible.any(2), visible.any(2)[:, :1].expand(-1, visible.shape[1], -1))
    if call.sinks is not None:
        sink = call.sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        p = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    else:
        p = torch.softmax(scores.masked_fill(~visible.any(-1, keepdim=True), 0.0), -1)
    return p @ v, visible.any(-1)


def check(call: AttentionCall | str | None, tolerance: float = 2e-6) -> AttentionCall:
    """Runs the call, whose output must be what was read, as must its keys' gradient."""
    assert isinstance(call, AttentionCall), call
    assert call.unread is None, call.unread
    with torch.no_grad():
        result = call.run(call.q, call.k, call.v)
        told, rows = output(call)
        found = call.o_view(call.output(result)).double()
        error = ((found - told).abs() * rows[..., None]).amax() / told.abs().amax()
    assert error < tolerance, float(error)
    replaced = call.with_output(result, call.output(result) + 1)
    assert type(replaced) is type(result)
    assert torch.equal(call.output(replaced), call.output(result) + 1)
    return call
