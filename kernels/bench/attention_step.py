"""Step time of a 1B decoder with SDPA on cuDNN, FlashAttention 4 and ours.

Random weights and tokens: only the time matters.  bf16, Llama-like: 16 layers of
width 2048, 32 heads of 64 on 8 key-value heads, SwiGLU of 8192, one sequence of
4096 and one of 8192 tokens, forward, backward and AdamW.  FlashAttention 4 is timed where it
can be imported.

    python3 attention_step.py LIBRARY [--head-dim 64|128] [--tokens 4096,8192]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention_bench
import attention_calls as calls
from attention_calls import Backward, Forward, Options

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(lib: Any, options: Options) -> Attention:
    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            ctx.op = Forward(lib, q, k, v, options, fill=False)
            return ctx.op.run()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return Backward(ctx.op, g, fill=False).run()

    return lambda q, k, v: Op.apply(q, k, v)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def flash4() -> Attention | None:
    call = attention_bench.flash4()
    if call is None:
        return None
    return lambda q, k, v: call(*(t.transpose(1, 2) for t in (q, k, v)), True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, head_dim: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.kv = nn.Linear(width, 2 * kv_heads * head_dim, bias=False)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.attention: Attention = cudnn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q = self.q(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).chunk(2, 1)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", default="4096,8192")
    args = parser.parse_args()
    torch.manual_seed(0)
    width, vocabulary = 2048, 32000
    with torch.device("cuda"):
        blocks = nn.ModuleList(Block(width, args.head_dim, 8, 4 * width) for _ in range(16))
        model = nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.RMSNorm(width),
                              nn.Linear(width, vocabulary, bias=False)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    lib = calls.load(args.library)
    choices: dict[str, Attention] = {
        "cuDNN SDPA": cudnn,
        "fa": ours(lib, Options(mode="fa", causal=True)),
        "hp": ours(lib, Options(mode="hp", causal=True)),
        "hpm": ours(lib, Options(mode="hpm", causal=True)),
        "hp + center": ours(lib, Options(mode="hp", causal=True, center=True)),
        "hp + statistics": ours(lib, Options(mode="hp", causal=True, stats=True,
                                             stats_every=0)),
        "hp + center + statistics": ours(lib, Options(mode="hp", causal=True, center=True,
                                                      stats=True, stats_every=0)),
    }

    fa4 = flash4()
    if fa4 is not None:
        choices["FlashAttention 4"] = fa4

    def step(attention: Attention, ids: torch.Tensor) -> float:
        gc.collect()  # ours() holds its output in a cycle, which would fill the GPU otherwise
        for block in blocks:
            block.attention = attention
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = F.cross_entropy(model(ids[:, :-1])[0].float(), ids[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    parameters = sum(p.numel() for p in model.parameters())
    for tokens in map(int, args.tokens.split(",")):
        ids = torch.randint(vocabulary, (1, tokens + 1), device="cuda")
        times: dict[str, list[float]] = {name: [] for name in choices}
        for round_ in range(args.steps + 2):
            for name, attention in choices.items():
                ms = step(attention, ids)
                if round_ >= 2:
                    times[name].append(ms)
        base = statistics.median(times["cuDNN SDPA"])
        print(f"{parameters / 1e9:.2f}B parameters, head_dim {args.head_dim}, {tokens} tokens")
        for name, of_call in times.items():
            median = statistics.median(of_call)
            print(f"{name:26} {median:7.1f} ms  {median / base:.3f} of cuDNN's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
