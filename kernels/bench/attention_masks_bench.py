"""Attention on one GPU with what hides keys: its speed beside SDPA's with the same mask.

As attention_bench.py, which has the method; here a mask is handed to SDPA, whose kernels take
nothing else for padding.  Rates count the products of all keys, hidden or not; causal calls half.

    python3 attention_masks_bench.py LIBRARY [--out FILE.json] [--repetitions 30] [--shape hd128]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import attention_calls as calls
import torch
import torch.nn.functional as F
from attention_bench import describe, on_path, time_interleaved
from attention_calls import Backward, Forward, Options, Seen
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "math": SDPBackend.MATH}
# name, batch, heads, tokens, head_dim, v_dim
SHAPES = [("hd128-4k", 4, 16, 4096, 128, 128), ("hd64-4k", 4, 32, 4096, 64, 64),
          ("hd192/128-4k", 4, 16, 4096, 192, 128)]
Call = Callable[[], Any]


def cases(b: int, h: int, n: int) -> dict[str, tuple[Seen, torch.Tensor | None]]:
    """What ours is given, and the mask that says the same to SDPA; all are causal."""
    row, key = torch.arange(n, device="cuda")[:, None], torch.arange(n, device="cuda")
    causal = key <= row
    ends = torch.tensor([n, n * 3 // 4, n // 2, n // 2][:b], dtype=torch.int32, device="cuda")
    bounds = torch.stack((torch.zeros_like(ends), ends), 1)
    padded = causal & (key < ends[:, None, None, None])
    packed = causal & (key // (n // 4) == row // (n // 4))
    bias = torch.randn(1, h, n, n, device="cuda", dtype=torch.bfloat16)
    sinks = torch.randn(h, device="cuda")
    return {
        "none": (Seen(), causal[None, None]),
        "key bounds": (Seen(bounds=bounds), padded),
        "bool mask, padding": (Seen(padded), padded),
        "bool mask, four documents": (Seen(packed[None, None]), packed[None, None]),
        "bf16 bias": (Seen(bias), bias.masked_fill(~causal, -math.inf)),
        "sinks": (Seen(sinks=sinks), None),
    }


def gradients(attend: Callable[..., torch.Tensor], g: torch.Tensor, *inputs: torch.Tensor) -> Call:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attend(*leaves)
    return lambda: torch.autograd.grad(out, leaves, g, retain_graph=True)


def bench_shape(lib: Any, args: argparse.Namespace, name: str, b: int, h: int, n: int, d: int,
                e: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    q, k = (torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v, g = (torch.randn(b, h, n, e, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = b * h * n * n * (d + e)  # causal: half of 2 (d + e) a pair
    rows: list[dict[str, object]] = []
    for label, (seen, mask) in cases(b, h, n).items():
        op = Forward(lib, q, k, v, Options(mode="hp", causal=True), seen=seen)
        op.run()
        fwd: dict[str, Call] = {"ours": on_path("sm90", op.run)}
        bwd: dict[str, Call] = {"ours": on_path("sm90", Backward(op, g).run)}
        if label == "none":
            fwd["ours sm80"] = on_path("sm80", op.run)
            bwd["ours sm80"] = on_path("sm80", Backward(op, g).run)
        for peer, backend in BACKENDS.items() if mask is not None else ():
            def attend(*inputs: torch.Tensor, backend: SDPBackend = backend,
                       mask: torch.Tensor = mask) -> torch.Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(*inputs, attn_mask=mask)
            try:
                off = (attend(q, k, v).float() - op.run().float()).abs().max().item()
                calls_of = gradients(attend, g, q, k, v)
                calls_of()
            except RuntimeError as error:  # this backend has no such kernel: the others still count
                print(f"{name} {label}: no {peer}: {str(error)[:80]}", flush=True)
                torch.cuda.empty_cache()
                continue
            if not off <= 0.05:
                print(f"WRONG {name} {label}: {off} from {peer}")
            fwd[peer], bwd[peer] = (lambda attend=attend: attend(q, k, v)), calls_of
        for which, what, work in (("fwd", fwd, flops), ("bwd", bwd, 2.5 * flops)):
            times = time_interleaved(what, args.repetitions)
            rate = {c: round(work / statistics.median(t) * 1e-9, 1) for c, t in times.items()}
            rows.append({"shape": name, "case": label, "pass": which, "tflops": rate,
                         "iqr_ms": {c: [round(x, 4) for x in statistics.quantiles(t, n=4)[::2]]
                                    for c, t in times.items()}})
            print(f"{name:13} {label:26} {which} "
                  + " ".join(f"{c} {r:5.0f}" for c, r in rate.items()), flush=True)
        del fwd, bwd
        torch.cuda.empty_cache()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--out")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--shape", default="", help="shapes whose name contains this")
    args = parser.parse_args()
    lib, before, rows = calls.load(args.library), describe(), []
    for shape in SHAPES:
        if args.shape in shape[0]:
            rows += bench_shape(lib, args, *shape)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({**before, "attention_masks": rows}, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
