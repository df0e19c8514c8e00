#!/usr/bin/env python3
"""With which weights should the mean be taken that centred keys lose?

Any vector may be taken from all keys of a sequence: softmax does not see it.  The bias of a rounded
backward pass pushes along what queries see of the keys, in the mean.  `mean` is that where
attention is to all keys alike.  `running` (the mean of the running means) is that where it is
causal and broad.  `seen` takes the probabilities themselves, which no fused kernel returns.

Each is switched on in layer 1 of examples/tiny_transformer.py at step 800, as an alert would, seed
by seed, beside the fp32 twin and the run that is let alone.  Reported are sigma(W_Q) of layer 1 at
the end, and how many of the seeds stay below twice their twin's.  Single runs prove little:
rounding decides, and the processor with it.

    python3 tests/bench/centring_weights.py --seed 1 --seed 2 --jobs 2 --json weights.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import tiny_transformer as example

KINDS = ("fp32", "untouched", "mean", "running", "seen")
SWITCHED_AT = 800
SICK_LAYER = 1


def running_means(tokens: int) -> Tensor:
    """w_j = (1 / n) (1 / (j + 1) + ... + 1 / n)"""
    return (1 / torch.arange(1, tokens + 1)).flip(0).cumsum(0).flip(0) / tokens


def seen(q: Tensor, k: Tensor) -> Tensor:
    """What each key gets of the queries' attention, in the mean: [batch, heads, tokens]"""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1).mean(dim=2)


class Centred(example.Attention):
    weights = ""

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        q, k, v = (
            part.view(batch, example.TOKENS, 1, example.WIDTH).transpose(1, 2).to(self.dtype)
            for part in self.qkv(x).split(example.WIDTH, dim=2)
        )
        if self.weights:
            wide = k.float()
            share = torch.full((example.TOKENS,), 1 / example.TOKENS)
            if self.weights == "running":
                share = running_means(example.TOKENS)
            elif self.weights == "seen":
                with torch.no_grad():
                    share = seen(q.float(), wide)
            k = (wide - (wide * share[..., None]).sum(dim=2, keepdim=True)).to(self.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(
            y.transpose(1, 2).reshape(batch, example.TOKENS, example.WIDTH).float()
        )
        return out


def train(kind: str, seed: int, steps: int) -> float:
    """sigma(W_Q) of the layer at the end, as the example trains."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = example.Data(seed)
    example.Attention = Centred  # type: ignore[misc]
    model = example.TinyTransformer("fp32" if kind == "fp32" else "bf16")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=example.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0, fused=True
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for step in range(steps):
            if step == SWITCHED_AT and kind not in ("fp32", "untouched"):
                attention = model.blocks[SICK_LAYER].attention
                assert isinstance(attention, Centred)
                attention.weights = kind
            warm = min(1.0, (step + 1) / example.WARM_UP_STEPS)
            optimizer.param_groups[0]["lr"] = example.LEARNING_RATE * warm
            tokens, target = data.batch()
            error = example.LOSS_SCALE * (model(tokens) - target)
            (error**2)[:, example.SCORED_FROM :].mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), example.GRADIENT_NORM_MAX)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return float(example.sigma_of_queries(model)[SICK_LAYER])


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, action="append", required=True, help="named before it is seen")
    add("--kind", action="append", choices=KINDS, help="only these, and fp32")
    add("--steps", type=int, default=8000)
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once")
    add("--json", type=Path)
    args = parser.parse_args(argv)
    kinds = [kind for kind in KINDS if kind == "fp32" or kind in (args.kind or KINDS)]
    sigma: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
    with ProcessPoolExecutor(args.jobs) as pool:
        of = {
            pool.submit(train, kind, seed, args.steps): (kind, seed)
            for seed in args.seed
            for kind in kinds
        }
        for done, future in enumerate(as_completed(of), start=1):
            kind, seed = of[future]
            sigma[kind][seed] = future.result()
            print(f"{done}/{len(of)}  {kind} {seed}: {sigma[kind][seed]:.1f}", file=sys.stderr)
    for kind in kinds:
        held = sum(sigma[kind][seed] < 2 * sigma["fp32"][seed] for seed in args.seed)
        told = "  ".join(f"{sigma[kind][seed]:6.1f}" for seed in args.seed)
        print(f"{kind:>10}  {told}   below twice the twin: {held} of {len(args.seed)}")
    if args.json is not None:
        args.json.write_text(json.dumps(sigma, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
