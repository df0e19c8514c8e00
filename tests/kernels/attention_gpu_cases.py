"""Inputs and exact answers for the tests of attention on a GPU."""

from __future__ import annotations

import ctypes
import math
import os
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels" / "bench"))
from attention_calls import Forward, Options, Seen  # noqa: E402

BF16, F16 = torch.bfloat16, torch.float16
Lib = ctypes.CDLL
HEAD_DIMS_VARIABLE = "BELLWETHER_TEST_HEAD_DIMS"


def chosen(head_dim: int) -> bool:
    """Whether cases of this head_dim are asked for: attention_gpu_test.py --head-dims."""
    asked = os.environ.get(HEAD_DIMS_VARIABLE)
    return asked is None or str(head_dim) in asked.split(",")


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def repeat_heads(t: torch.Tensor, heads: int) -> torch.Tensor:
    return t.repeat_interleave(heads // t.shape[1], dim=1)


def allowed(n: int, m: int, o: Options, seen: Seen = Seen()) -> torch.Tensor:
    row = torch.arange(n, device="cuda")[:, None] + m - n
    key = torch.arange(m, device="cuda")[None]
    shown = key <= row if o.causal else torch.ones(n, m, dtype=torch.bool, device="cuda")
    shown = shown & (key > row - o.window) if o.window else shown
    if seen.bounds is not None:
        begin, end = seen.bounds[:, :1, None, None], seen.bounds[:, 1:, None, None]
        shown = shown & (key >= begin) & (key < end)
    if seen.mask is None:
        return shown
    hides = ~seen.mask if seen.mask.dtype == torch.bool else seen.mask.float() <= -9984
    return shown & ~hides


def scores(q: torch.Tensor, k: torch.Tensor, o: Options, seen: Seen = Seen()) -> torch.Tensor:
    """In the type of q."""
    s = q @ repeat_heads(k, q.shape[1]).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if o.softcap:
        s = o.softcap * torch.tanh(s / o.softcap)
    if seen.mask is not None and seen.mask.dtype != torch.bool:
        s = s + seen.mask.to(s.dtype).clamp(min=-9984)  # what hides comes next
    return s.masked_fill(~allowed(q.shape[2], k.shape[2], o, seen), -math.inf)


def softmax(s: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Of the last dimension and a sink; rows of -inf are 0."""
    if sinks is not None:
        s = torch.cat((s, sinks.to(s.dtype).view(-1, 1, 1).expand(*s.shape[:3], 1)), -1)
    empty = s.isneginf().all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0), -1).masked_fill(empty, 0)
    return p if sinks is None else p[..., :-1]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: Options,
              seen: Seen = Seen()) -> torch.Tensor:
    """In the type of q; rows without keys are 0."""
    return softmax(scores(q, k, o, seen), seen.sinks) @ repeat_heads(v, q.shape[1])


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
              o: Options, seen: Seen = Seen()) -> list[torch.Tensor]:
    """dQ, dK, dV and that of sinks in the type of q; rows without keys give 0."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    sinks = None
    if seen.sinks is not None:
        sinks = seen.sinks.to(q.dtype).detach().requires_grad_()
        leaves.append(sinks)
    out = softmax(scores(*leaves[:2], o, seen), sinks) @ repeat_heads(leaves[2], q.shape[1])
    return list(torch.autograd.grad(out, leaves, g))


def far(mine: torch.Tensor, exact: torch.Tensor, yard: torch.Tensor, factor: float) -> float:
    """Error over its bar: above 1 is a failure, and so is NaN."""
    bar = factor * (yard.double() - exact).abs().max().item() + 1e-5
    return (mine.double() - exact).abs().max().item() / bar


def off_centred(mine: torch.Tensor, dk: torch.Tensor) -> float:
    """How far dK of centred keys is from `dk` minus its mean, beyond one rounding more."""
    exact = dk.double() - dk.double().mean(2, keepdim=True)
    ulp = 2**-8 if mine.dtype == BF16 else 2**-11
    return ((mine.double() - exact).abs() - ulp * exact.abs()).max().item()


def pack(lengths: list[int], extra: int = 0) -> torch.Tensor:
    cu = torch.tensor([0] + [n + (extra if n else 0) for n in lengths], dtype=torch.int32)
    return torch.cumsum(cu, 0, dtype=torch.int32).cuda()


def bias_inputs(kind: str, d: int, n: int, heads: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Rows that make a rounded delta biased; V and dO of one sign."""
    torch.manual_seed({"sink": 1, "tie": 2, "broad": 3, "near": 4}[kind] + 1000 * seed)
    q, k = (torch.randn(1, heads, n, d, device="cuda") for _ in range(2))
    v = torch.rand(1, heads, n, d, device="cuda") + 0.5
    g = torch.rand(1, heads, n, d, device="cuda") + 0.5
    if kind == "broad":
        q, k = q * 0.03, k * 0.03
    elif kind == "near":  # half the keys 1.5e-3 below, where V is halved
        q, k = q * 0.001, k * 0.001
        q[..., 0], k[..., 0] = 1.0, 0.0
        k[:, :, ::2, 0] = -1.5e-3 * math.sqrt(d)
        v[:, :, ::2] *= 0.5
    else:  # channel 0 of q is constant and lifts the first keys
        lift = math.log(n / (1e-2 if kind == "sink" else 2e-3)) + 0.5
        first = 1 if kind == "sink" else 2
        q[..., 0], k[..., 0] = 4.0, 0.0
        k[..., :first, :] = 0.0
        k[..., :first, 0] = lift * math.sqrt(d) / 4.0
    return tuple(t.to(BF16) for t in (q, k, v, g))


def run_forward(lib: Lib, inputs: tuple[torch.Tensor, ...], options: Options) -> Forward:
    op = Forward(lib, *inputs[:3], options)
    op.run()
    return op


def row_sums(op: Forward, inputs: tuple[torch.Tensor, ...]
             ) -> tuple[torch.Tensor, torch.Tensor, float]:
    """-rowsum(dS) in fp64 of the P that the backward uses and the delta that the
    forward's outputs give; the size of delta's terms; and O's bias in ulp."""
    q, k, v, g = inputs
    s = scores(q.double(), k.double(), op.options)
    p = torch.softmax(s, -1)
    exact_o = p @ v.double()
    dp = g.double() @ v.double().transpose(-1, -2)
    size = (p * dp * dp).sum(-1).sqrt()
    if op.options.mode == "hpm":
        assert op.anchor is not None and op.rounded_sum is not None
        x = torch.exp2((s * math.log2(math.e) - op.anchor.double()[..., None]).float())
        p = x.to(BF16).double() / op.rounded_sum.double()[..., None]
    o = op.o.double() + (op.o_lo.double() if op.o_lo is not None else 0)
    ulp = torch.exp2(torch.floor(torch.log2(exact_o.abs())) - 7)
    error = (g.double() * o).sum(-1) - (p * dp).sum(-1)
    return error, size, ((o - exact_o) / ulp).mean().item()
