"""Small launches of every kind of attention kernel of one path, for compute-sanitizer; of
one head dim, so that several can run at once.

    BELLWETHER_ATTENTION_PATH=sm80 compute-sanitizer --tool racecheck \
        python3 attention_sanitizer_run.py LIBRARY 64 [--heads 64] [--forward-only] [--masked-only]

With 64 heads a multiprocessor of a large GPU has several tiles, one after another.
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels" / "bench"))
import attention_calls as calls  # noqa: E402
from attention_calls import Backward, Forward, Options, Seen  # noqa: E402

OPTIONS = [
    Options(mode="fa", causal=True), Options(mode="hp", stats=True), Options(mode="hpm"),
    Options(mode="fa", causal=True, stats=True, stats_every=2, center=True),
    Options(mode="hpm", causal=True, window=100, deterministic=True, center=True),
    Options(mode="hp", softcap=10.0, causal=True, stats=True, deterministic=True),
    Options(mode="sr", seed=1), Options(mode="paper", causal=True),
    Options(mode="hpm", stats=True, stats_every=2),
]


def run_masked(lib: ctypes.CDLL, d: int, heads: int, dtype: torch.dtype, forward_only: bool) -> None:
    """Masks of two types, key bounds with padding on either side, and sinks."""
    q, g = (torch.randn(2, heads, 200, d, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, heads // 2, 230, d, device="cuda", dtype=dtype) for _ in range(2))
    bounds = torch.tensor([[0, 150], [37, 230]], device="cuda", dtype=torch.int32)
    sinks = torch.randn(heads, device="cuda")
    calls_of = (
        (OPTIONS[4], Seen(torch.rand(2, 1, 200, 230, device="cuda") < 0.7, bounds)),
        (OPTIONS[5], Seen(torch.randn(1, heads, 200, 230, device="cuda", dtype=dtype), bounds, sinks)),
        (OPTIONS[2], Seen(bounds=bounds)), (OPTIONS[3], Seen(bounds=bounds)),
    )
    for o, seen in calls_of:
        op = Forward(lib, q, k, v, o, seen=seen)
        op.run()
        if not forward_only:
            Backward(op, g).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("head_dim", type=int)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--masked-only", action="store_true")
    args = parser.parse_args()
    lib, d, heads = calls.load(args.library), args.head_dim, args.heads
    if args.masked_only:
        run_masked(lib, d, heads, torch.bfloat16, args.forward_only)
        torch.cuda.synchronize()
        print("done")
        return 0
    for dtype in (torch.bfloat16, torch.float16):
        for o in OPTIONS:
            for packed in (False, True):
                q, g = (torch.randn(1, heads, 333, d, device="cuda", dtype=dtype)
                        for _ in range(2))
                k, v = (torch.randn(1, heads // 2, 430, d, device="cuda", dtype=dtype)
                        for _ in range(2))
                cu = (torch.tensor([0, 1, 200, 333], device="cuda", dtype=torch.int32),
                      torch.tensor([0, 130, 130, 430], device="cuda", dtype=torch.int32))
                op = Forward(lib, q, k, v, o, cu if packed else None)
                op.run()
                if not args.forward_only:
                    Backward(op, g).run()
        run_masked(lib, d, heads, dtype, args.forward_only)
        if not args.forward_only:  # enough tiles that Hopper launches them in parts
            for causal in (False, True):
                q, g = (torch.randn(1, 270, 1300, d, device="cuda", dtype=dtype) for _ in range(2))
                k, v = (torch.randn(1, 270, 100, d, device="cuda", dtype=dtype) for _ in range(2))
                op = Forward(lib, q, k, v, Options(mode="hp", causal=causal, center=True))
                op.run()
                Backward(op, g).run()
    if not args.forward_only:  # one tile of each head, of long rows that Hopper prepares under other heads' products
        for center in (False, True):
            q, g = (torch.randn(1, 132, 1600, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            k, v = (torch.randn(1, 132, 100, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            op = Forward(lib, q, k, v, Options(mode="hp", center=center))
            op.run()
            Backward(op, g).run()
    if not args.forward_only:  # so few tiles that Hopper has several blocks share each
        for o in OPTIONS:
            q, g = (torch.randn(1, 8, 600, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            k, v = (torch.randn(1, 1, 600, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            op = Forward(lib, q, k, v, o)
            op.run()
            Backward(op, g).run()
    torch.cuda.synchronize()
    print("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
