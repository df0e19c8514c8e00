"""Attention on one GPU: correctness first, then speed beside SDPA's kernels.

Loads the C interface by ctypes, so that no torch extension has to be built.
Every timed configuration is compared with a float64 reference before it is
timed; peers are pinned (unpinned SDPA on Hopper is cuDNN) and interleaved with
ours in one process, with the L2 flushed before every launch.

    python3 attention_bench.py LIBRARY [--out FILE.json] [--quick] [--only check|bench]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import subprocess
import sys
from typing import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

MODES = {"fa": 0, "hp": 1}
DTYPES = {torch.bfloat16: 1, torch.float16: 2}


class Tensor4(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("batch_stride", ctypes.c_int64),
                ("head_stride", ctypes.c_int64), ("token_stride", ctypes.c_int64)]


class ForwardParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("backend", ctypes.c_uint32),
        ("dtype", ctypes.c_uint32), ("mode", ctypes.c_uint32), ("stream", ctypes.c_void_p),
        ("batch", ctypes.c_int64), ("heads", ctypes.c_int64), ("kv_heads", ctypes.c_int64),
        ("q_len", ctypes.c_int64), ("k_len", ctypes.c_int64), ("head_dim", ctypes.c_int64),
        ("q", Tensor4), ("k", Tensor4), ("v", Tensor4), ("o", Tensor4), ("o_lo", Tensor4),
        ("lse", ctypes.c_void_p), ("lse_batch_stride", ctypes.c_int64),
        ("lse_head_stride", ctypes.c_int64), ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float), ("window", ctypes.c_int32), ("causal", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 3), ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
    ]


class BackwardParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32),
        ("forward", ForwardParams), ("d_o", Tensor4), ("dq", Tensor4), ("dk", Tensor4),
        ("dv", Tensor4), ("workspace", ctypes.c_void_p), ("workspace_bytes", ctypes.c_uint64),
    ]


def view(t: torch.Tensor | None) -> Tensor4:
    if t is None:
        return Tensor4(None, 0, 0, 0)
    assert t.stride(3) == 1
    return Tensor4(t.data_ptr(), t.stride(0), t.stride(1), t.stride(2))


class Forward:
    """One prepared call: outputs are allocated once, run() only enqueues."""

    def __init__(self, lib: ctypes.CDLL, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 causal: bool, mode: str, counter: bool = True) -> None:
        self.lib = lib
        self.keep = (q, k, v)
        batch, heads, n, d = q.shape
        self.o = torch.full_like(q, float("nan"))
        self.o_lo = None if mode == "fa" else torch.full_like(q, float("nan"),
                                                              dtype=torch.bfloat16)
        self.lse = torch.full((batch, heads, n), float("nan"), device=q.device)
        self.workspace = torch.empty(64, dtype=torch.int32, device=q.device)
        self.params = ForwardParams(
            struct_size=ctypes.sizeof(ForwardParams), backend=1, dtype=DTYPES[q.dtype],
            mode=MODES[mode], batch=batch, heads=heads, kv_heads=k.shape[1], q_len=n,
            k_len=k.shape[2], head_dim=d, q=view(q), k=view(k), v=view(v), o=view(self.o),
            o_lo=view(self.o_lo), lse=self.lse.data_ptr(), lse_batch_stride=heads * n,
            lse_head_stride=n, scale=1 / math.sqrt(d), causal=int(causal),
            workspace=self.workspace.data_ptr() if counter else None, workspace_bytes=256)

    def run(self) -> torch.Tensor:
        self.params.stream = torch.cuda.current_stream().cuda_stream
        if self.lib.bw_attention_forward(ctypes.byref(self.params)) != 0:
            raise RuntimeError(self.lib.bw_kernels_last_error().decode())
        return self.o


class Backward:
    """The gradient of a Forward that has run, for one dO."""

    def __init__(self, forward: Forward, d_o: torch.Tensor) -> None:
        self.forward = forward
        q, k, v = forward.keep
        self.d_o = d_o
        self.dq, self.dk, self.dv = (torch.full_like(t, float("nan")) for t in (q, k, v))
        lib = forward.lib
        lib.bw_attention_backward_workspace.restype = ctypes.c_uint64
        size = lib.bw_attention_backward_workspace(ctypes.byref(forward.params))
        self.workspace = torch.full((size,), 255, dtype=torch.uint8, device=q.device)
        self.params = BackwardParams(
            struct_size=ctypes.sizeof(BackwardParams), forward=forward.params, d_o=view(d_o),
            dq=view(self.dq), dk=view(self.dk), dv=view(self.dv),
            workspace=self.workspace.data_ptr(), workspace_bytes=size)

    def run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.params.forward.stream = torch.cuda.current_stream().cuda_stream
        if self.forward.lib.bw_attention_backward(ctypes.byref(self.params)) != 0:
            raise RuntimeError(self.forward.lib.bw_kernels_last_error().decode())
        return self.dq, self.dk, self.dv


def load(path: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(path)
    lib.bw_kernels_last_error.restype = ctypes.c_char_p
    return lib


# ---- correctness


def repeat_heads(t: torch.Tensor, heads: int) -> torch.Tensor:
    return t.repeat_interleave(heads // t.shape[1], dim=1)


def scores64(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    s = q.double() @ repeat_heads(k, q.shape[1]).double().transpose(-1, -2)
    s /= math.sqrt(q.shape[-1])
    if causal:
        n, m = s.shape[-2:]
        s.masked_fill_(torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1 + m - n),
                       -math.inf)
    return s


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
              causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """O and L in float64; rows without any key are 0 and -inf."""
    s = scores64(q, k, causal)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse.isinf(), 0, lse)[..., None])
    return p @ repeat_heads(v, q.shape[1]).double(), lse


def math_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                   causal: bool) -> torch.Tensor:
    """Attention with every step in the input type: the yardstick of rule A."""
    s = q @ repeat_heads(k, q.shape[1]).transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        n, m = s.shape[-2:]
        s = s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1 + m - n),
                          -math.inf)
    p = torch.softmax(s, -1).nan_to_num(0)
    return p @ repeat_heads(v, q.shape[1])


def rule_a(lib: ctypes.CDLL) -> list[str]:
    """max|O - ref| <= 2x the math path's + 1e-5, |dL| <= 1e-5 max(1, |L|)."""
    failures = []
    cases = [  # batch, heads, kv_heads, q_len, k_len
        (2, 4, 4, 512, 512), (1, 2, 2, 1, 1), (1, 4, 1, 129, 129), (2, 8, 2, 127, 127),
        (1, 4, 4, 1000, 1000), (1, 2, 1, 333, 777), (1, 2, 2, 300, 100), (1, 8, 8, 2048, 2048),
        (3, 4, 2, 64, 1), (1, 1, 1, 191, 4097), (2, 16, 16, 1536, 1536),
    ]
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16):
        for d in (64, 128):
            for causal in (False, True):
                for mode in MODES:
                    for index, (b, h, hk, n, m) in enumerate(cases):
                        torch.manual_seed(1000 + index)
                        q = torch.randn(b, n, h, d, device="cuda", dtype=dtype).transpose(1, 2)
                        k = torch.randn(b, hk, m, d, device="cuda", dtype=dtype)
                        v = torch.randn(b, hk, m, d, device="cuda", dtype=dtype)
                        if index % 5 == 2:  # all scores of a row equal
                            k = k[:, :, :1].repeat(1, 1, m, 1)
                        if index % 5 == 4:  # saturated: |S| to thousands
                            q = q * 60
                        if index % 3 == 1:  # outliers
                            q = q * torch.where(torch.rand_like(q) < 1e-3, 30.0, 1.0).to(dtype)
                        op = Forward(lib, q, k, v, causal, mode, counter=index % 2 == 0)
                        op.run()
                        ref, lse = reference(q, k, v, causal)
                        yard = (math_attention(q, k, v, causal).double() - ref).abs().max().item()
                        error = (op.o.double() - ref).abs().max().item()
                        finite = ~lse.isinf()
                        d_lse = ((op.lse.double() - lse).abs() / lse.abs().clamp(min=1))[finite]
                        lse_error = d_lse.max().item() if d_lse.numel() else 0.0
                        # A NaN makes each of these comparisons false.
                        good = error <= 2 * yard + 1e-5 and lse_error <= 1e-5
                        good = good and torch.equal(op.lse.isneginf(), ~finite)
                        if mode != "fa":
                            whole = (op.o.double() + op.o_lo.double() - ref).abs().max().item()
                            good = good and whole <= 2 * yard + 1e-5
                        worst = max(worst, error / (2 * yard + 1e-5))
                        if not good:
                            failures.append(
                                f"A {dtype} d{d} causal={causal} {mode} {(b, h, hk, n, m)}: "
                                f"{error:.3g} against 2 x {yard:.3g}, L {lse_error:.3g}")
    print(f"rule A: worst error / bar {worst:.3f}, {len(failures)} failures")
    return failures


def gradients(attention: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor,
              v: torch.Tensor, g: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(attention(*leaves, causal), leaves, g)


def rule_a_backward(lib: ctypes.CDLL) -> list[str]:
    """max|dX - ref| <= 2x the math path's + 1e-5, for dQ, dK and dV."""
    failures = []
    cases = [(2, 4, 4, 512, 512), (1, 2, 2, 1, 1), (1, 4, 1, 129, 129), (2, 8, 2, 127, 127),
             (1, 4, 4, 1000, 1000), (1, 2, 1, 333, 777), (1, 2, 2, 300, 100),
             (1, 4, 4, 2048, 2048), (3, 4, 2, 64, 1), (1, 1, 1, 191, 2049)]
    worst = {"dq": 0.0, "dk": 0.0, "dv": 0.0}
    for dtype in (torch.bfloat16, torch.float16):
        for d in (64, 128):
            for causal in (False, True):
                for index, (b, h, hk, n, m) in enumerate(cases):
                    mode = ("fa", "hp")[index % 2]
                    torch.manual_seed(2000 + index)
                    q = torch.randn(b, n, h, d, device="cuda", dtype=dtype).transpose(1, 2)
                    k, v = (torch.randn(b, hk, m, d, device="cuda", dtype=dtype)
                            for _ in range(2))
                    g = torch.randn(b, h, n, d, device="cuda", dtype=dtype)
                    forward = Forward(lib, q, k, v, causal, mode)
                    forward.run()
                    ours = Backward(forward, g).run()
                    ref = gradients(lambda *a: reference(*a)[0],
                                    q.double(), k.double(), v.double(), g.double(), causal)
                    yard = gradients(math_attention, q, k, v, g, causal)
                    for name, mine, exact, bar in zip(worst, ours, ref, yard):
                        # The softmax's own backward is NaN on rows without keys.
                        exact = exact.nan_to_num(0)
                        error = (mine.double() - exact).abs().max().item()
                        limit = 2 * (bar.nan_to_num(0).double() - exact).abs().max().item() + 1e-5
                        worst[name] = max(worst[name], error / limit)
                        if not error <= limit:
                            failures.append(f"A {name} {dtype} d{d} causal={causal} {mode} "
                                            f"{(b, h, hk, n, m)}: {error:.3g} > {limit:.3g}")
    print(f"rule A backward: worst error / bar {worst}, {len(failures)} failures")
    return failures


def bias_inputs(kind: str, d: int, n: int, heads: int) -> tuple[torch.Tensor, ...]:
    """Rows that make a rounded delta biased; V of one sign."""
    torch.manual_seed({"sink": 1, "tie": 2, "broad": 3}[kind])
    q = torch.randn(1, heads, n, d, device="cuda")
    k = torch.randn(1, heads, n, d, device="cuda")
    v = torch.rand(1, heads, n, d, device="cuda") + 0.5
    # Channel 0 of q is constant: key 0's score is raised through channel 0 of k.
    if kind == "broad":
        q, k = q * 0.03, k * 0.03
    else:
        q[..., 0] = 4.0
        k[..., 0] = 0.0
        lift = (math.log(n / 1e-2) if kind == "sink" else math.log(n / 2e-3)) + 0.5
        first = 1 if kind == "sink" else 2
        k[..., :first, :] = 0.0
        k[..., :first, 0] = lift * math.sqrt(d) / 4.0
    bf16 = torch.bfloat16
    return q.to(bf16), k.to(bf16), v.to(bf16)


def rule_b(lib: ctypes.CDLL) -> tuple[list[str], list[dict[str, object]]]:
    """Delta bias = mean e / mean sqrt(sum P dP^2): hp <= 1e-5, fa must fail.

    Also |mean signed error| of O + O_lo <= 0.01 ulp, over >= 1e6 elements.  dO is
    of one sign too, the adverse case of NUMERICS.md section 2.
    """
    failures, table = [], []
    d, n, heads = 64, 512, 64
    for kind in ("sink", "tie", "broad"):
        q, k, v = bias_inputs(kind, d, n, heads)
        g = (torch.rand(q.shape, device="cuda") + 0.5).to(torch.bfloat16).double()
        s = scores64(q, k, False)
        p = torch.softmax(s, -1)
        dp = g @ v.double().transpose(-1, -2)
        exact_delta = (p * dp).sum(-1)
        size = (p * dp * dp).sum(-1).sqrt().mean()
        exact_o = p @ v.double()
        ulp = torch.exp2(torch.floor(torch.log2(exact_o.abs())) - 7)
        for mode in MODES:
            op = Forward(lib, q, k, v, False, mode)
            op.run()
            o = op.o.double() + (op.o_lo.double() if op.o_lo is not None else 0)
            bias = (((g * o).sum(-1) - exact_delta).mean() / size).item()
            o_bias = ((o - exact_o) / ulp).mean().item()
            spread = (((g * o).sum(-1) - exact_delta) / size).std().item()
            table.append({"rows": kind, "mode": mode, "delta_bias": bias, "delta_sd": spread,
                          "o_bias_ulp": o_bias})
            print(f"rule B {kind:5} {mode}: delta bias {bias:+.2e} sd {spread:.1e}, "
                  f"O bias {o_bias:+.2e} ulp")
            if mode == "fa":
                if not abs(bias) > 1e-5:
                    failures.append(f"B {kind}: fa should be biased, but is {bias:.2e}")
            elif not (abs(bias) <= 1e-5 and abs(o_bias) <= 0.01):
                failures.append(f"B {kind} {mode}: delta {bias:.2e}, O {o_bias:.2e} ulp")
    return failures, table


def repeatable(lib: ctypes.CDLL) -> list[str]:
    """200 launches are bitwise equal: no race shows."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(2, 8, 1030, 128, device="cuda", dtype=torch.bfloat16)
               for _ in range(3))
    op = Forward(lib, q, k, v, True, "hp")
    first = [t.clone() for t in (op.run(), op.o_lo, op.lse)]
    different = 0
    for _ in range(199):
        op.run()
        different += not all(torch.equal(a, b) for a, b in zip(first, (op.o, op.o_lo, op.lse)))
    print(f"200 launches: {different} differ")
    return [f"{different} of 200 launches differ"] if different else []


# ---- speed


def shapes(quick: bool) -> list[tuple[str, int, int, int, int, int, bool]]:
    """name, batch, heads, kv_heads, n, d, causal: 16k tokens, heads * d = 2048."""
    out = []
    for d in (128, 64):
        for causal in (True, False):
            for n in (4096, 16384) if quick else (1024, 2048, 4096, 8192, 16384, 32768):
                name = f"hd{d}-{'causal' if causal else 'full'}-{n // 1024}k"
                out.append((name, max(1, 16384 // n), 2048 // d, 2048 // d, n, d, causal))
    if not quick:
        out.append(("llama-hd128-causal-8k", 1, 64, 8, 8192, 128, True))
    return out


def time_interleaved(calls: dict[str, Callable[[], object]],
                     repetitions: int) -> dict[str, list[float]]:
    """Milliseconds of each call, A B C A B C ..., L2 flushed before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for call in calls.values():
        for _ in range(3):
            call()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) for a, b in pairs] for n, pairs in events.items()}


def measure(shape: str, which: str, flops: float, calls: dict[str, Callable[[], object]],
            ours: list[str], repetitions: int) -> list[dict[str, object]]:
    """Rows of the result, one for each of `ours`; prints one line."""
    times = time_interleaved(calls, repetitions)

    def tflops(ms: float) -> float:
        return flops / ms * 1e-9

    rate = {c: tflops(statistics.median(t)) for c, t in times.items()}
    line = f"{shape:20} {which} cudnn {rate['cudnn']:5.0f} fa2 {rate['fa2']:5.0f}"
    rows: list[dict[str, object]] = []
    for mode in ours:
        low, _, high = statistics.quantiles(times[mode], n=4)
        rows.append({"path": "sm90", "mode": mode, "shape": shape, "pass": which,
                     "tflops": round(rate[mode], 1), "cudnn_tflops": round(rate["cudnn"], 1),
                     "fa2_tflops": round(rate["fa2"], 1),
                     "iqr": [round(tflops(high), 1), round(tflops(low), 1)]})
        line += f" | {mode} {rate[mode]:5.0f} ({rate[mode] / rate['cudnn']:.2f}x)"
    print(line, flush=True)
    return rows


def bench(libs: dict[str, ctypes.CDLL], quick: bool, repetitions: int,
          modes: list[str], only_shape: str, with_backward: bool) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, b, h, hk, n, d, causal in shapes(quick):
        if only_shape not in name:
            continue
        torch.manual_seed(0)
        q = torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(b, hk, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        flops = 4 * b * h * n * n * d * (0.5 if causal else 1.0)

        def sdpa(backend: SDPBackend) -> Callable[[], object]:
            def call() -> object:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal,
                                                          enable_gqa=hk != h)
            return call

        ours = {f"{mode}{label}": Forward(lib, q, k, v, causal, mode)
                for label, lib in libs.items() for mode in modes}
        calls: dict[str, Callable[[], object]] = {
            "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": sdpa(SDPBackend.FLASH_ATTENTION)}
        calls |= {mode: op.run for mode, op in ours.items()}
        # What is timed is right: compared with cuDNN's answer at this very size.
        peer = calls["cudnn"]().float()
        for mode, op in ours.items():
            off = (op.run().float() - peer).abs().max().item()
            if not off <= 0.05:
                print(f"WRONG {name} {mode}: {off} from cuDNN")
        del peer
        rows += measure(name, "fwd", flops, calls, list(ours), repetitions)
        if not with_backward:
            continue
        g = torch.randn_like(q)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]

        def sdpa_backward(backend: SDPBackend) -> Callable[[], object]:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(*leaves, is_causal=causal,
                                                     enable_gqa=hk != h)
            return lambda: torch.autograd.grad(out, leaves, g, retain_graph=True)

        calls = {"cudnn": sdpa_backward(SDPBackend.CUDNN_ATTENTION),
                 "fa2": sdpa_backward(SDPBackend.FLASH_ATTENTION)}
        backward = {mode: Backward(op, g) for mode, op in ours.items()}
        calls |= {mode: op.run for mode, op in backward.items()}
        peers = [t.float() for t in calls["cudnn"]()]
        for mode, op in backward.items():
            for which, mine, peer in zip("qkv", op.run(), peers):
                off = ((mine.float() - peer).norm() / peer.norm()).item()
                if not off <= 0.02:
                    print(f"WRONG {name} {mode} d{which}: {off} from cuDNN")
        del peers
        rows += measure(name, "bwd", 2.5 * flops, calls, list(backward), repetitions)
        del calls, backward
    return rows


def describe() -> dict[str, object]:
    query = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,power.draw,temperature.gpu",
         "--format=csv,noheader"], capture_output=True, text=True, check=False).stdout.strip()
    return {"gpu": torch.cuda.get_device_name(), "driver": query.split(",")[0],
            "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
            "clocks_after": query}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", nargs="+", help="more than one: LABEL=PATH, compared")
    parser.add_argument("--out")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--only", choices=("check", "bench"))
    parser.add_argument("--modes", default="fa,hp")
    parser.add_argument("--shape", default="", help="only shapes whose name contains this")
    parser.add_argument("--repetitions", type=int, default=30)
    args = parser.parse_args()
    libs = {}
    for item in args.library:
        label, _, path = item.rpartition("=")
        libs[f"-{label}" if label else ""] = load(path)
    failures: list[str] = []
    bias: list[dict[str, object]] = []
    if args.only != "bench":
        for label, lib in libs.items():
            print(f"checking {label or args.library[0]}")
            failures += rule_a(lib) + rule_a_backward(lib)
            more, bias = rule_b(lib)
            failures += more + repeatable(lib)
        for failure in failures[:40]:
            print("FAILED", failure)
    rows: list[dict[str, object]] = []
    if args.only != "check":
        rows = bench(libs, args.quick, args.repetitions, args.modes.split(","), args.shape,
                     not args.forward_only)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({**describe(), "attention": rows, "bias": bias}, file, indent=1)
            file.write("\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
