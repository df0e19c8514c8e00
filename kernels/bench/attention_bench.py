"""Attention on one GPU: its speed beside SDPA's kernels and FlashAttention 4's, in one process.

Peers are pinned (unpinned SDPA on Hopper is cuDNN) and interleaved with ours.  The L2 is flushed
before every launch.  The GPU is kept waiting until the launch is queued, so that nothing of the
host's time is counted.  FlashAttention 4, the package flash-attn-4, is timed where it can be
imported.  What is timed is compared with FA2's answer at that size first.
tests/kernels/attention_gpu_test.py tests accuracy.

    python3 attention_bench.py LIBRARY [--out FILE.json] [--variants a,b,...]
        [--paths sm80,sm90] [--sweep | --quick] [--head-dims 128,64] [--shape hd128,gqa]
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import attention_calls as calls
import torch
import torch.nn.functional as F
from attention_calls import Backward, Forward, Options
from torch.nn.attention import SDPBackend, sdpa_kernel

# Name in the table -> what is called.
VARIANTS = {
    "fa": Options(mode="fa"), "hp": Options(mode="hp"), "hpm": Options(mode="hpm"),
    "sr": Options(mode="sr"), "paper": Options(mode="paper"),
    "hp-nolt": Options(mode="hp-nolt"), "lt": Options(mode="lt"),
    "hp+stats": Options(mode="hp", stats=True, stats_every=0),
    "hp+stats-all": Options(mode="hp", stats=True), "hp+center": Options(mode="hp", center=True),
    "hp+deterministic": Options(mode="hp", deterministic=True),
}
WAIT_CYCLES = 1_000_000  # about half a millisecond: longer than any call's host side
Libraries = dict[str, ctypes.CDLL]
Rows = list[dict[str, object]]
Call = Callable[[], Any]
# name, batch, heads, kv_heads, n, d, causal
Shape = tuple[str, int, int, int, int, int, bool]
PEERS = ("cudnn", "fa2", "fa4", "flex")


def sweep(quick: bool, dims: list[int]) -> list[Shape]:
    """16k tokens of all lengths, heads * d = 2048 (96: 2016); llama: 8k tokens, 8 query heads
    on one of the keys."""
    out = []
    for d in dims:
        for causal in (True, False):
            for n in (4096, 16384) if quick else (1024, 2048, 4096, 8192, 16384, 32768):
                name = f"hd{d}-{'causal' if causal else 'full'}-{n // 1024}k"
                out.append((name, max(1, 16384 // n), 2048 // d, 2048 // d, n, d, causal))
    if not quick:
        for d in dims:
            heads = 64 if d <= 128 else 32
            out.append((f"llama-hd{d}-causal-8k", 1, heads, heads // 8, 8192, d, True))
    return out


def standard() -> list[Shape]:
    """What versions are compared by: plain shapes, and few key heads and sequences, as large
    models have them on each GPU."""
    out: list[Shape] = []
    for b, h, n, d, causal in ((4, 16, 4096, 128, True), (4, 16, 4096, 128, False), (1, 16, 16384, 128, True),
                               (1, 16, 16384, 128, False), (16, 16, 1024, 128, False), (8, 16, 2048, 128, True),
                               (4, 32, 4096, 64, True), (1, 32, 16384, 64, True), (1, 32, 16384, 64, False),
                               (8, 32, 2048, 64, True), (16, 32, 1024, 64, False), (4, 32, 4096, 64, False),
                               (4, 21, 4096, 96, True), (4, 10, 4096, 192, True), (4, 8, 4096, 256, True),
                               (4, 8, 4096, 256, False)):
        out.append((f"hd{d}-{'causal' if causal else 'full'}-{n // 1024}k", b, h, h, n, d, causal))
    for b, h, hk, n, d in ((1, 64, 8, 2048, 128), (1, 64, 8, 4096, 128), (1, 64, 8, 8192, 128), (2, 64, 8, 4096, 128),
                           (1, 32, 8, 2048, 128), (1, 32, 8, 4096, 128), (1, 32, 4, 4096, 128), (1, 16, 2, 4096, 128),
                           (1, 8, 1, 8192, 128), (1, 128, 8, 4096, 128), (1, 16, 1, 4096, 256), (1, 40, 8, 32768, 128)):
        out.append((f"gqa{h}/{hk}-b{b}-hd{d}-causal-{n // 1024}k", b, h, hk, n, d, True))
    return out


def on_path(path: str, call: Callable[[], Any]) -> Call:
    """The call with this path forced."""
    def forced() -> Any:
        os.environ[calls.PATH_VARIABLE] = path
        return call()
    return forced


def time_interleaved(calls: dict[str, Callable[[], object]], repetitions: int,
                     before: Callable[[str], object] = lambda name: None) -> dict[str, list[float]]:
    """Milliseconds of each call, A B C A B C ...; `before` is not timed."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for call in calls.values():
        for _ in range(3):
            call()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            before(name)
            flush.zero_()
            torch.cuda._sleep(WAIT_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) for a, b in pairs] for n, pairs in events.items()}


def measure(shape: str, which: str, flops: float, calls: dict[str, Callable[[], object]],
            ours: dict[str, Forward], repetitions: int) -> list[dict[str, object]]:
    """Rows of the result, one for each of `ours`; prints one line.  Their statistics are
    empty before each call, as in training."""
    times = time_interleaved(calls, repetitions,
                             lambda name: ours[name].forget() if name in ours else None)

    def tflops(ms: float) -> float:
        return flops / ms * 1e-9

    rate = {c: tflops(statistics.median(t)) for c, t in times.items()}
    peers = [p for p in PEERS if p in rate]
    line = f"{shape:20} {which} " + " ".join(f"{p} {rate[p]:5.0f}" for p in peers)
    rows: list[dict[str, object]] = []
    for key in ours:
        path, mode = key.split(" ")
        low, _, high = statistics.quantiles(times[key], n=4)
        rows.append({"path": path, "mode": mode, "shape": shape, "pass": which,
                     "tflops": round(rate[key], 1),
                     **{f"{p}_tflops": round(rate[p], 1) for p in peers},
                     "iqr": [round(tflops(high), 1), round(tflops(low), 1)]})
        line += f" | {key} {rate[key]:5.0f}" + "".join(
            f" {rate[key] / rate[p]:.2f}x {p}" for p in peers if p != "flex")
    print(line, flush=True)
    return rows


def flex(causal: bool, gqa: bool) -> Callable[..., torch.Tensor]:
    """FlexAttention, compiled; the mask is a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    torch._dynamo.reset()  # else it stops compiling after eight shapes
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = q.shape[2]
        mask = masks.setdefault(n, create_block_mask(
            lambda b, h, i, j: i >= j, None, None, n, n)) if causal else None
        return compiled(q, k, v, block_mask=mask, enable_gqa=gqa)

    masks: dict[int, object] = {}
    return call


def flash4() -> Callable[..., torch.Tensor] | None:
    """FlashAttention 4, or None where it is not installed."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        out = flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return call


def tokens_first(t: torch.Tensor) -> torch.Tensor:
    """[batch][heads][tokens][dim] as [batch][tokens][heads][dim], which FlashAttention 4 takes."""
    return t.transpose(1, 2).contiguous()


def bench_shape(libs: Libraries, args: argparse.Namespace, name: str, b: int, h: int, hk: int,
                n: int, d: int, causal: bool) -> Rows:
    torch.manual_seed(0)
    q = torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, hk, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    g = torch.randn_like(q)
    flops = 4 * b * h * n * n * d * (0.5 if causal else 1.0)
    def sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor,
             v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=hk != h)

    forward: dict[str, Callable[..., torch.Tensor]] = {
        "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
        "fa2": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION)}
    if args.flex:
        forward["flex"] = flex(causal, hk != h)
    inputs: dict[str, tuple[torch.Tensor, ...]] = {p: (q, k, v, g) for p in forward}
    fa4 = flash4()
    if fa4 is not None:
        tokens = tuple(tokens_first(t) for t in (q, k, v, g))
        try:
            fa4(*tokens[:3], causal)
            forward["fa4"], inputs["fa4"] = functools.partial(fa4, causal=causal), tokens
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:  # It has no kernel of this shape: the others still count.
            print(f"fa4 left out of {name}: {error}", flush=True)
    fwd: dict[str, Call] = {p: functools.partial(call, *inputs[p][:3]) for p, call in forward.items()}
    ops = {f"{path} {variant}{label}": Forward(lib, q, k, v,
                                               dataclasses.replace(VARIANTS[variant], causal=causal))
           for path in args.paths.split(",")
           for label, lib in libs.items() for variant in args.variants.split(",")}
    ours = {key: on_path(key.split(" ")[0], op.run) for key, op in ops.items()}
    answer = fwd["fa2"]().float()
    for variant, run in ours.items():
        off = (run().float() - answer).abs().max().item()
        if not off <= 0.05:
            print(f"WRONG {name} {variant}: {off} from FA2")
    del answer
    rows = measure(name, "fwd", flops, fwd | ours, ops, args.repetitions)
    if args.forward_only:
        return rows

    def gradients(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Call:
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out = call(*leaves)
        return lambda: torch.autograd.grad(out, leaves, tensors[3], retain_graph=True)

    bwd = {p: gradients(call, *inputs[p]) for p, call in forward.items()}
    backward = {key: on_path(key.split(" ")[0], Backward(op, g).run) for key, op in ops.items()}
    answers = [t.float() for t in bwd["fa2"]()]
    for variant, run in backward.items():
        for which, mine, exact in zip("qkv", run(), answers):
            off = ((mine.float() - exact).norm() / exact.norm()).item()
            if not off <= 0.02:
                print(f"WRONG {name} {variant} d{which}: {off} from FA2")
    del answers
    return rows + measure(name, "bwd", 2.5 * flops, bwd | backward, ops, args.repetitions)


def bench(libs: Libraries, args: argparse.Namespace) -> Rows:
    rows: Rows = []
    dims = [int(d) for d in args.head_dims.split(",")]
    chosen = sweep(args.quick, dims) if args.sweep or args.quick else standard()
    for name, *shape in chosen:
        if any(part in name for part in args.shape.split(",")):
            try:
                rows += bench_shape(libs, args, name, *shape)
            except RuntimeError as error:  # The other shapes still count.
                print(f"FAILED {name}: {error}", flush=True)
    return rows


def flash4_version() -> str | None:
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, object]:
    query = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,power.draw,temperature.gpu",
         "--format=csv,noheader"], capture_output=True, text=True, check=False).stdout.strip()
    return {"gpu": torch.cuda.get_device_name(), "driver": query.split(",")[0],
            "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "fa4": flash4_version(),
            "clocks": query}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", nargs="+", help="more than one: LABEL=PATH, compared")
    parser.add_argument("--out")
    parser.add_argument("--sweep", action="store_true", help="all lengths instead of the standard shapes")
    parser.add_argument("--quick", action="store_true", help="the sweep, 4k and 16k only")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too (compiles)")
    parser.add_argument("--variants", default="fa,hp", help=", ".join(VARIANTS))
    parser.add_argument("--paths", default="sm90", help="sm80,sm90: kernels compared")
    parser.add_argument("--head-dims", default="128,64", help="of the sweep: 64, 96, 128, 256")
    parser.add_argument("--shape", default="", help="shapes whose name contains one of these")
    parser.add_argument("--repetitions", type=int, default=30)
    args = parser.parse_args()
    libs = {}
    for item in args.library:
        label, _, path = item.rpartition("=")
        libs[f"-{label}" if label else ""] = calls.load(path)
    before = describe()
    rows = bench(libs, args)
    after = describe()
    print(before["clocks"], "->", after["clocks"])
    if args.out:
        with open(args.out, "w") as file:
            result = {**before, "clocks_after": after["clocks"], "attention": rows}
            json.dump(result, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
