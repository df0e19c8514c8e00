#!/usr/bin/env python3
"""What watching costs a training job on a GPU: paired, interleaved, in one process.

One model trains; blocks of steps with the hook and without it take turns.  With --compile there
are two, since the taps are part of what is compiled: one that was attached before, one that never
was.  A pair is a block with and the block without before it.

Reported is the median over the pairs of how much longer a block with the hook took, with a 95 %
interval by the bootstrap.  So is the same for the median step, and what the hook adds to the peak
of the allocator.  A block is as long as the sampling period, so that it holds one sampled step.

    python3 tests/bench/hook_overhead_bench.py --model 124m --pairs 20 --compile --out overhead.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "client_lib" / "python"))
import bellwether
import bellwether.settings

from paired import median_and_interval

#         layers, width, heads, key heads, vocabulary, batch, tokens
MODELS = {
    "124m": (12, 768, 12, 12, 50304, 32, 1024),
    "1b": (16, 2048, 32, 8, 32000, 1, 8192),
    "tiny": (2, 128, 4, 2, 512, 2, 128),  # To try this script.
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.dim = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        grouped = self.num_heads != self.num_kv_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Job:
    def __init__(self, model: str, device: str) -> None:
        layers, width, heads, kv_heads, vocabulary, batch, tokens = MODELS[model]
        torch.manual_seed(0)
        self.device = device
        with torch.device(device):
            blocks = (Block(width, heads, kv_heads) for _ in range(layers))
            self.model = nn.Sequential(
                nn.Embedding(vocabulary, width), *blocks, nn.LayerNorm(width),
                nn.Linear(width, vocabulary, bias=False),
            )  # fmt: skip
            self.ids = torch.randint(vocabulary, (batch, tokens + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def compile(self) -> None:
        for block in self.model:
            if isinstance(block, Block):
                block.compile(fullgraph=True)

    def step(self) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(self.ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def block(
        self, steps: int, step_ends: Optional[Callable[[Tensor], None]] = None
    ) -> list[float]:
        """Milliseconds of each step: what the GPU took from one's end to the next one's."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            loss = self.step()
            if step_ends is not None:
                step_ends(loss)
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="124m")
    parser.add_argument("--compile", action="store_true", help="each block, with fullgraph")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--every", type=int, default=20, help="sampling period and block length")
    parser.add_argument("--stats", default=",".join(bellwether.settings.STATS))
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args(argv)
    job = watched_job = Job(args.model, "cuda")
    if args.compile:
        job.compile()
    job.block(5)
    torch.cuda.reset_peak_memory_stats()
    job.block(2)
    plain_bytes, others_bytes = torch.cuda.max_memory_allocated(), 0
    if args.compile:
        job.optimizer.zero_grad()
        others_bytes = torch.cuda.memory_allocated()
        watched_job = Job(args.model, "cuda")
    with tempfile.TemporaryDirectory() as folder:
        monitor = bellwether.attach(
            watched_job.model, record=f"{folder}/run.bwrun", run="overhead", every=args.every,
            overhead_budget=1e9, byte_budget=0, stats=args.stats,
        )  # fmt: skip

        def step_ends(loss: Tensor) -> None:
            monitor.step(loss=loss)

        if args.compile:
            watched_job.compile()
            job.block(3)  # What attach() has patched may be compiled once more.
        watched_job.block(5, step_ends)  # The first sample loads libraries.
        torch.cuda.reset_peak_memory_stats()
        watched_job.block(args.every, step_ends)
        watched_bytes = torch.cuda.max_memory_allocated() - others_bytes
        layers = [layer["fired"] for layer in monitor.status()["layers"]]
        assert min(layers) > 0, "not every layer is watched"
        # Between eager blocks the forward is as it was: taps are there in sampled steps alone.
        health = monitor.steps.health
        blocks, steps = [], []
        began = time.monotonic()
        for pair in range(args.pairs):
            health.live = False
            without = job.block(args.every)
            health.live = True
            watched = watched_job.block(args.every, step_ends)
            blocks.append(100 * (sum(watched) / sum(without) - 1))
            steps.append(100 * (statistics.median(watched) / statistics.median(without) - 1))
            if sys.stderr.isatty():
                print(
                    f"\rpair {pair + 1}/{args.pairs}  {blocks[-1]:+.2f} %", end="", file=sys.stderr
                )
        status = monitor.status()
        monitor.detach()
    assert status["errors"] == 0, status["last_error"]
    found = {
        "model": args.model, "compiled": args.compile,
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "every": args.every, "pairs": args.pairs, "stats": args.stats,
        "step_ms": statistics.median(without),
        "sampled_step_ms": max(watched),
        "block_overhead_percent": median_and_interval(blocks),
        "median_step_overhead_percent": median_and_interval(steps),
        "told_overhead_percent": 100 * status["overhead"],
        "device_seconds_of_a_sample": monitor.steps.reporter.frames.device_seconds,
        "memory_overhead_percent": 100 * (watched_bytes / plain_bytes - 1),
        "seconds": time.monotonic() - began,
    }  # fmt: skip
    print(json.dumps(found))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
