"""The statistics on one GPU: what a watched step costs beside its attention.

Measured are the probe with and without v, o and d_o, with drift alone and with masks, and the leak.
So are the laws of attention, its shadow check, and the spectral norms of all heads of a model.  Each stands beside what it must at least do: read
its inputs once, as a copy does (which also writes them).  The share is of causal attention forward
and backward by PyTorch's flash attention.  Launches are interleaved.  The L2 is flushed before
every launch, and the GPU kept waiting until the launch is queued.

    python3 statistics_bench.py LIBRARY [--out FILE.json] [--repetitions N] [--laws-alone]
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention_calls
import statistics_calls as calls
from attention_bench import describe
from center_keys_bench import time_interleaved
from statistics_calls import Probed, ProbeOptions, Spectrum


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int


SHAPES = [
    Shape("layer-16x1k", 16, 32, 32, 1024, 128),  # the bar: drift at most 3 % of attention
    Shape("gpt2-32x1k", 32, 12, 12, 1024, 64),
    Shape("8b-1x8k", 1, 32, 8, 8192, 128),
]
ROWS = (16, 64)  # sampled of a sequence and head
# The laws' bar: each of eight tensors once, at 3 TB/s.
LAW_SHAPES = [
    Shape("gpt2-4x1k", 4, 12, 12, 1024, 64),
    Shape("grouped-16x1k", 16, 32, 8, 1024, 128),
    Shape("long-1x8k", 1, 32, 32, 8192, 64),
]
LAW_ROWS, SHADOW_ROWS, SHADOW_KEYS = 64, 16, 4
BYTES_A_MICROSECOND = 3e6
# heads, rows, columns; the bar: the first in at most 3 ms.
WEIGHTS = [(1024, 128, 4096), (144, 64, 768), (10000, 64, 1024)]


def summary(times: list[float]) -> dict[str, float]:
    """Microseconds, of milliseconds."""
    low, middle, high = statistics.quantiles((1e3 * t for t in times), n=4)
    return {"median": round(middle, 1), "low_quartile": round(low, 1),
            "high_quartile": round(high, 1)}


def bench_layer(lib: ctypes.CDLL, shape: Shape, repetitions: int) -> dict[str, object]:
    torch.manual_seed(0)

    def randn(heads: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, shape.tokens, shape.head_dim, device="cuda",
                           dtype=torch.bfloat16)

    q, g, k, v = (randn(heads) for heads in (shape.heads, shape.heads, *[shape.kv_heads] * 2))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)

    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    result = attend(*leaves)
    o = result.detach()
    into = Probed.fresh(shape.heads, shape.kv_heads, "cuda")
    leak, copy = torch.zeros(2, shape.kv_heads, device="cuda"), torch.empty_like(k)

    def probe(rows: int, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
              drift_only: bool = False) -> Callable[[], object]:
        options = ProbeOptions(causal=True, rows=rows, seed=1, drift_only=drift_only)
        return lambda: calls.probe(lib, q, k, outputs, options, into)

    timed: dict[str, Callable[[], object]] = {
        "attention_fwd": lambda: attend(q, k, v),
        "attention_bwd": lambda: torch.autograd.grad(result, leaves, g, retain_graph=True),
        "copy_of_k": lambda: copy.copy_(k), "key_leak": lambda: calls.key_leak(lib, k, leak)}
    row = torch.arange(shape.tokens, device="cuda")
    documents = torch.stack([row // 512 * 512, row // 512 * 512 + 512, row], -1).int()[None]
    mask = (row <= row[:, None]).expand(shape.batch, 1, -1, -1).contiguous()
    visible = torch.ones(1, 1, shape.tokens, dtype=torch.bool, device="cuda")
    for name, parts in (("documents", {"causal": True, "ranges": documents}), ("mask", {"mask": mask}),
                        ("bias", {"mask": torch.where(mask, 0., -torch.inf).bfloat16()})):
        masked = ProbeOptions(rows=ROWS[-1], seed=1, visible=visible, **parts)
        timed[f"{name}_{ROWS[-1]}"] = functools.partial(calls.probe, lib, q, k, (v, o, g), masked, into)
    for rows in ROWS:
        timed[f"drift_{rows}"] = probe(rows, None, drift_only=True)
        timed[f"scores_{rows}"] = probe(rows, None)
        timed[f"scores_and_delta_{rows}"] = probe(rows, (v, o, g))
    times = {name: summary(t) for name, t in time_interleaved(timed, repetitions).items()}
    both = times["attention_fwd"]["median"] + times["attention_bwd"]["median"]
    share = {name: round(t["median"] / both, 4) for name, t in times.items()
             if not name.startswith("attention")}
    print(f"{shape.name:12} attention {both:.0f} us; shares {share}", flush=True)
    return {**dataclasses.asdict(shape), "microseconds": times, "share_of_attention": share}


def bench_laws(lib: ctypes.CDLL, shape: Shape, repetitions: int) -> dict[str, object]:
    """Laws and shadow check beside the probe that a sampled step has anyway."""
    torch.manual_seed(0)

    def randn(heads: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, shape.tokens, shape.head_dim, device="cuda",
                           dtype=torch.bfloat16)

    q, o, g, dq = (randn(shape.heads) for _ in range(4))
    k, v, dk, dv = (randn(shape.kv_heads) for _ in range(4))
    into = Probed.fresh(shape.heads, shape.kv_heads, "cuda")
    sums = (torch.zeros(len(calls.LAW_HEAD_STATS), shape.heads, device="cuda"),
            torch.zeros(len(calls.LAW_KV_STATS), shape.kv_heads, device="cuda"))

    def options(rows: int) -> ProbeOptions:
        return ProbeOptions(causal=True, rows=rows, seed=1)

    def laws(rows: int) -> None:
        calls.laws(lib, q, k, (v, o, g), (dq, dk, dv), options(rows), sums)

    def shadow(keys: int) -> None:
        calls.shadow(lib, q, k, (v, o, g), (dq, dk, dv), options(SHADOW_ROWS), sums, keys)

    copies = [torch.empty_like(t) for t in (q, o, k, v)]

    def copy() -> None:
        for to, of in zip(copies, (q, o, k, v)):
            to.copy_(of)

    leaves = [t.detach().requires_grad_() for t in (q, k, v)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)

    result = attend(*leaves)
    timed: dict[str, Callable[[], object]] = {
        "attention_fwd": lambda: attend(q, k, v),
        "attention_bwd": lambda: torch.autograd.grad(result, leaves, g, retain_graph=True),
        "copy_of_half": copy,  # as many bytes as the laws read
        f"probe_{LAW_ROWS}": lambda: calls.probe(lib, q, k, (v, o, g), options(LAW_ROWS), into),
        f"laws_{LAW_ROWS}": lambda: laws(LAW_ROWS), "laws_16": lambda: laws(16),
        f"shadow_{SHADOW_ROWS}": lambda: shadow(0),
        f"shadow_{SHADOW_ROWS}_keys_{SHADOW_KEYS}": lambda: shadow(SHADOW_KEYS)}
    times = {name: summary(t) for name, t in time_interleaved(timed, repetitions).items()}
    size = sum(t.numel() * t.element_size() for t in (q, o, g, dq, k, v, dk, dv))
    floor = size / BYTES_A_MICROSECOND
    share = {name: round(floor / t["median"], 3) for name, t in times.items() if name.startswith("laws")}
    print(f"{shape.name:14} {size / 1e6:.0f} MB, {floor:.0f} us at 3 TB/s; medians "
          f"{ {name: t['median'] for name, t in times.items()} }; share of 3 TB/s {share}", flush=True)
    return {**dataclasses.asdict(shape), "bytes": size, "microseconds": times, "share_of_3_tb_a_second": share}


def bench_weights(lib: ctypes.CDLL, of: tuple[int, int, int], dtype: torch.dtype,
                  repetitions: int) -> dict[str, object]:
    torch.manual_seed(0)
    weight = torch.randn(*of, device="cuda", dtype=dtype)
    spectrum = Spectrum.fresh(of[0], of[1], "cuda", gram=False)
    copy = torch.empty_like(weight)
    timed: dict[str, Callable[[], object]] = {
        "spectral_norms": lambda: calls.spectral_norms(lib, weight, spectrum),
        "copy": lambda: copy.copy_(weight)}
    times = {name: summary(t) for name, t in time_interleaved(timed, repetitions).items()}
    sample = weight[:8].double()
    exact = torch.linalg.matrix_norm(sample, 2)
    off = ((spectrum.sigma[:8].double() - exact).abs() / exact).max().item()
    print(f"{of} {dtype}: {times['spectral_norms']['median'] / 1e3:.2f} ms, sigma off {off:.1e}",
          flush=True)
    return {"heads": of[0], "rows": of[1], "columns": of[2], "dtype": str(dtype),
            "microseconds": times, "sigma_error": off}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--out")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--laws-alone", action="store_true")
    args = parser.parse_args()
    lib = attention_calls.load(args.library)
    laws = [bench_laws(lib, shape, args.repetitions) for shape in LAW_SHAPES]
    layers = [bench_layer(lib, shape, args.repetitions) for shape in SHAPES if not args.laws_alone]
    weights = [] if args.laws_alone else [bench_weights(lib, of, dtype, args.repetitions)
               for of in WEIGHTS for dtype in (torch.bfloat16, torch.float32)]
    if args.out:
        with open(args.out, "w") as file:
            json.dump({**describe(), "laws": laws, "statistics": layers, "spectral_norms": weights}, file,
                      indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
