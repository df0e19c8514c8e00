"""K-centring on one GPU: its time beside attention's, in one process.

Centring is one kernel a pass, the same forward and backward, so its share of a training
step's attention is 2 t / (forward + backward).  Beside it: a copy of K, which moves the same
bytes, PyTorch's operations for the same, and what center=True adds inside our attention.
Interleaved, the L2 flushed before every launch, and the GPU kept waiting until the launch is
queued, so that nothing of the host's time is counted.

    python3 center_keys_bench.py LIBRARY [--out FILE.json] [--repetitions N]
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention_calls as calls
from attention_bench import describe, time_interleaved
from attention_calls import Backward, Forward, Options, Tensor4, view


class CenterKeysParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("backend", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32), ("threads", ctypes.c_uint32), ("stream", ctypes.c_void_p),
        ("batch", ctypes.c_int64), ("kv_heads", ctypes.c_int64), ("k_len", ctypes.c_int64),
        ("head_dim", ctypes.c_int64), ("k", Tensor4), ("out", Tensor4),
        ("cu_seqlens", ctypes.c_void_p), ("sequences", ctypes.c_int64),
    ]


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int


SHAPES = [
    Shape("gpt-hd64-1k", 16, 6, 6, 1024, 64),  # the set-up that fails
    *(Shape(f"{name}-{n // 1024}k", max(1, 16384 // n), heads, kv_heads, n, d)
      for name, heads, kv_heads, d in (("mha-hd128", 16, 16, 128), ("mha-hd64", 32, 32, 64),
                                       ("gqa8-hd128", 64, 8, 128))
      for n in (1024, 4096, 16384)),
]


class Center:
    """A prepared call of bw_center_keys; out starts as NaN."""

    def __init__(self, lib: ctypes.CDLL, k: torch.Tensor) -> None:
        self.lib, self.k, self.out = lib, k, torch.full_like(k, torch.nan)
        batch, kv_heads, k_len, head_dim = k.shape
        self.params = CenterKeysParams(
            struct_size=ctypes.sizeof(CenterKeysParams), backend=1, dtype=calls.DTYPES[k.dtype],
            batch=batch, kv_heads=kv_heads, k_len=k_len, head_dim=head_dim, k=view(k),
            out=view(self.out))

    def run(self) -> torch.Tensor:
        self.params.stream = torch.cuda.current_stream().cuda_stream
        calls.check(self.lib, self.lib.bw_center_keys(ctypes.byref(self.params)))
        return self.out


def composed(k: torch.Tensor) -> torch.Tensor:
    wide = k.float()
    return (wide - wide.mean(dim=2, keepdim=True)).to(k.dtype)


def attention_calls_of(lib: ctypes.CDLL, shape: Shape, q: torch.Tensor, k: torch.Tensor,
                       v: torch.Tensor, g: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Causal attention forward and backward: SDPA's kernels and ours."""
    out: dict[str, Callable[[], object]] = {}
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    for name, backend in (("fa2", SDPBackend.FLASH_ATTENTION),
                          ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)

        try:
            result = sdpa(*leaves)
        except RuntimeError as error:
            print(f"{shape.name}: no {name}: {error}")
            continue
        out[f"{name}_fwd"] = lambda sdpa=sdpa: sdpa(q, k, v)
        out[f"{name}_bwd"] = lambda result=result: torch.autograd.grad(
            result, leaves, g, retain_graph=True)
    for name, center in (("hp", False), ("hp+center", True)):
        forward = Forward(lib, q, k, v, Options(mode="hp", causal=True, center=center))
        forward.run()
        out[f"{name}_fwd"], out[f"{name}_bwd"] = forward.run, Backward(forward, g).run
    return out


def bench_shape(lib: ctypes.CDLL, shape: Shape, repetitions: int) -> dict[str, object]:
    torch.manual_seed(0)

    def randn(heads: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, shape.tokens, shape.head_dim, device="cuda",
                           dtype=torch.bfloat16)

    q, g, k, v = (randn(heads) for heads in (shape.heads, shape.heads, *[shape.kv_heads] * 2))
    k += 2  # a mean to take away
    center, copy = Center(lib, k), torch.empty_like(k)
    exact = k.double() - k.double().mean(dim=2, keepdim=True)
    off = float(((center.run().double() - exact).abs() - 2**-8 * exact.abs()).max())
    timed = {"center": center.run, "copy": lambda: copy.copy_(k), "composed": lambda: composed(k),
             **attention_calls_of(lib, shape, q, k, v, g)}
    times = time_interleaved(timed, repetitions)
    us = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    both = {name: us[f"{name}_fwd"] + us[f"{name}_bwd"]
            for name in ("fa2", "cudnn", "hp", "hp+center") if f"{name}_fwd" in us}
    low, _, high = statistics.quantiles(times["center"], n=4)
    row = {
        **dataclasses.asdict(shape), "right": off <= 1e-5,
        "microseconds": {name: round(value, 1) for name, value in us.items()},
        "center_iqr": [round(1e3 * low, 1), round(1e3 * high, 1)],
        "gigabytes_per_second": round(2e-3 * k.numel() * k.element_size() / us["center"]),
        "speed_of_a_copy": round(us["copy"] / us["center"], 3),
        "speed_of_composed": round(us["composed"] / us["center"], 2),
        "share_of_attention": {name: round(2 * us["center"] / both[name], 4)
                               for name in both if name != "hp+center"},
        "share_inside_hp": round(both["hp+center"] / both["hp"] - 1, 4),
    }
    share = row["share_of_attention"]
    print(f"{shape.name:15} {'' if row['right'] else 'WRONG '}center {us['center']:6.1f} us, copy "
          f"{us['copy']:6.1f}, composed {us['composed']:6.1f}; of fwd + bwd: {share}; inside hp "
          f"{row['share_inside_hp']:+.2%}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--out")
    parser.add_argument("--repetitions", type=int, default=30)
    args = parser.parse_args()
    lib = calls.load(args.library)
    rows = [bench_shape(lib, shape, args.repetitions) for shape in SHAPES]
    if args.out:
        with open(args.out, "w") as file:
            json.dump({**describe(), "center_keys": rows}, file, indent=1)
            file.write("\n")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
