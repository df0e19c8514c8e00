"""Tests of attention on a GPU about calls of few key tiles, whose steps several blocks share on
Hopper; attention_gpu_test.py runs them."""

from __future__ import annotations

import ctypes
import itertools

import torch

from attention_gpu_cases import (BF16, F16, Lib, chosen, far, gradients, off_centred, pack,
                                 randn)  # first: it sets the path
from attention_calls import Backward, Forward, Options

# batch, heads, kv_heads, q_len, k_len, head_dim, dtype: with 7 to 32 shares of a tile, also as many
# as divide neither the group nor a tile's steps, and one query head a key head.
SHARED = [
    (1, 8, 1, 1100, 1100, 128, BF16), (1, 16, 1, 1030, 900, 64, F16), (2, 6, 1, 700, 1500, 128, F16),
    (1, 32, 1, 600, 600, 64, BF16), (1, 12, 1, 520, 1300, 256, BF16), (1, 7, 1, 1500, 333, 96, BF16),
    (1, 16, 2, 1000, 1000, 256, F16), (1, 1, 1, 4100, 4100, 128, BF16), (1, 20, 1, 300, 777, 192, BF16),
]
FEATURES = [
    Options(causal=True), Options(), Options(causal=True, window=700), Options(window=300),
    Options(causal=True, softcap=5.0), Options(softcap=20.0, window=257),
]
MODES = ("hp", "hpm", "fa")


def workspace(lib: Lib, b: int, h: int, hk: int, n: int, d: int) -> int:
    """Bytes of a causal backward's workspace."""
    q, k = torch.empty(b, h, n, d, device="cuda"), torch.empty(b, hk, n, d, device="cuda")
    o = Forward(lib, *(t.to(BF16) for t in (q, k, k)), Options(causal=True), fill=False)
    return int(lib.bw_attention_backward_workspace(ctypes.byref(o.params)))


def test_shared_tiles_have_the_gradients_of_rule_a(lib: Lib) -> None:
    """max|dX - ref| <= 2x (softcap: 3x) the yardstick's + 1e-5; dK and dV repeat bit for bit, and dQ
    where that is asked for."""
    worst: dict[str, float] = {}
    for index, (b, h, hk, n, m, d, dtype) in enumerate(SHARED):
        if not chosen(d):
            continue
        for number, feature in enumerate(FEATURES):
            torch.manual_seed(index)
            q = randn(b, n, h, d, dtype=dtype).transpose(1, 2)
            k, v = randn(b, hk, m, d, dtype=dtype), randn(b, hk, m, d, dtype=dtype)
            g = randn(b, h, n, d, dtype=dtype)
            exact = gradients(*(t.double() for t in (q, k, v, g)), feature)
            yard = gradients(q, k, v, g, feature)
            for variant, stats in itertools.product(range(3), (False, True)):
                deterministic = (index + number + variant) % 2 == 0
                o = Options(**{**feature.__dict__, "mode": MODES[(index + variant) % 3], "stats": stats,
                               "deterministic": deterministic})
                op = Forward(lib, q, k, v, o)
                op.run()
                back = Backward(op, g)
                first = [t.clone() for t in back.run()]
                for name, mine, ref, bar in zip(("dq", "dk", "dv"), first, exact, yard):
                    ratio = far(mine, ref, bar, 3 if o.softcap else 2)
                    assert ratio <= 1, f"{name} {o} {SHARED[index]}: {ratio}"
                    worst[name] = max(worst.get(name, 0), ratio)
                for _ in range(3):
                    back.workspace.fill_(255)
                    again = [torch.equal(x, y) for x, y in zip(first, back.run())]
                    assert again[1] and again[2], f"{o} {SHARED[index]}: {again}"
                    assert again[0] or not deterministic, f"{o} {SHARED[index]}: {again}"
    print("  worst error / bar", {k: round(v, 2) for k, v in worst.items()})


def test_shared_tiles_of_centred_keys(lib: Lib) -> None:
    """dK minus its mean, rounded once more; dV the same; and dQ of keys that were centred."""
    for index, (b, h, hk, n, m, d, dtype) in enumerate(SHARED):
        if not chosen(d):
            continue
        torch.manual_seed(index)
        q, g = randn(b, h, n, d, dtype=dtype), randn(b, h, n, d, dtype=dtype)
        k, v = randn(b, hk, m, d, dtype=dtype) + 1, randn(b, hk, m, d, dtype=dtype)
        for causal, mode in itertools.product((True, False), ("hp", "hpm")):
            o = Options(mode=mode, causal=causal, deterministic=index % 2 == 0)
            op = Forward(lib, q, k, v, o)
            op.run()
            dq, dk, dv = Backward(op, g).run()
            back = Backward(op, g)
            back.params.center = 1
            mine_q, mine, mine_v = back.run()
            where = f"{SHARED[index]} {o}"
            assert torch.equal(dv, mine_v), where
            off = off_centred(mine, dk)
            assert off <= 2e-6, f"{where}: {off}"
            off_q = ((mine_q.double() - dq.double()).norm() / dq.double().norm()).item()
            assert off_q <= 2e-2, f"{where}: dq {off_q}"


def test_shared_tiles_of_packed_sequences_leak_no_nan(lib: Lib) -> None:
    """What lies in other sequences and behind them is not read, not even to be multiplied by 0."""
    lengths = [0, 1, 900, 129, 0, 1023]
    for d, h in ((64, 16), (128, 8), (256, 12)):
        if not chosen(d):
            continue
        for o in (Options(causal=True, mode="hpm", deterministic=True), Options(),
                  Options(causal=True, center=True), Options(window=400, deterministic=True)):
            torch.manual_seed(d)
            cu = (pack(lengths), pack(lengths, 37))
            q, g = (randn(1, h, int(cu[0][-1]), d) for _ in range(2))
            k, v = (randn(1, 1, int(cu[1][-1]), d) for _ in range(2))
            for i, n in enumerate(lengths):
                if n == 0:
                    continue
                rows, keys = (slice(int(c[i]), int(c[i + 1])) for c in cu)
                alone = [t[:, :, s] for t, s in ((q, rows), (k, keys), (v, keys), (g, rows))]
                poisoned = [torch.full_like(t, float("nan")) for t in (q, k, v, g)]
                for whole, part, s in zip(poisoned, alone, (rows, keys, keys, rows)):
                    whole[:, :, s] = part
                op = Forward(lib, *poisoned[:3], o, cu)
                op.run()
                packed = Backward(op, poisoned[3]).run()
                single = Forward(lib, *(t.contiguous() for t in alone[:3]), o)
                single.run()
                want = Backward(single, alone[3].contiguous()).run()
                for name, mine, ref, s in zip(("dq", "dk", "dv"), packed, want, (rows, keys, keys)):
                    off = (mine[:, :, s].double() - ref.double()).norm() / (ref.double().norm() + 1e-3)
                    assert off.item() <= 4e-3, f"{name} {o} sequence {i}, head dim {d}: {off}"


def test_full_gpu_needs_no_workspace_for_shares(lib: Lib) -> None:
    """Workspaces: in proportion to the heads and tokens where nothing is shared, more where it is."""
    per_row = workspace(lib, 4, 16, 16, 4096, 128) / (4 * 16)
    assert abs(workspace(lib, 8, 16, 16, 4096, 128) / (8 * 16) - per_row) <= 0.01 * per_row
    # One key head instead of eight needs less of everything but shares.
    assert workspace(lib, 1, 8, 1, 8192, 128) > 1.2 * workspace(lib, 1, 8, 8, 8192, 128)
