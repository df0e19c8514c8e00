"""Goal: both paths of the attention on a GPU compute what attention.h says, in every
mode and with every feature, within the accuracy bars, and leak nothing between
sequences.

Method: fp64 references from the same 16-bit inputs; the yardstick of rule A is
attention with every step in the input type.  Outputs start as NaN, so an unwritten
element fails; NaN makes every comparison here false.  Each test runs in a process of
its own on each path: a kernel that faults ends no other test.  Needs a GPU of compute
capability 8.0: without one it is skipped (exit status 77), or fails if
BELLWETHER_REQUIRE_GPU is 1.

    attention_gpu_test.py LIBRARY [--path sm80|sm90] [--head-dims 64,256] [SUBSTRING ...]
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import pathlib
import subprocess
import sys
from typing import Callable

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels" / "bench"))
import attention_calls as calls  # noqa: E402
from attention_calls import Backward, Forward, Options  # noqa: E402
from attention_gpu_cases import (BF16, F16, HEAD_DIMS_VARIABLE, Lib, attention,  # noqa: E402
                                 bias_inputs, chosen, far, gradients, pack, randn, row_sums,
                                 run_forward, scores)
from attention_gpu_ahead import (  # noqa: E402, F401
    test_rows_prepared_ahead_have_the_gradients_of_rule_a)
from attention_gpu_keys import (  # noqa: E402, F401
    test_centred_keys_take_the_mean_from_every_gradient, test_keys_that_no_query_sees)
from attention_gpu_masks import (  # noqa: E402, F401
    test_bounds_cut_what_a_mask_hides_bit_for_bit, test_delta_statistics_of_masked_calls,
    test_masked_forward_and_backward_rule_a, test_masked_launches_repeat_bit_for_bit,
    test_statistics_of_masked_rows_equal_a_naive_count)
from attention_gpu_narrow import (  # noqa: E402, F401
    test_narrow_values_have_the_gradients_of_rule_a,
    test_narrow_values_of_packed_sequences_leak_no_nan, test_narrow_values_repeat_bit_for_bit)
from attention_gpu_shares import (  # noqa: E402, F401
    test_shared_tiles_have_the_gradients_of_rule_a, test_shared_tiles_of_centred_keys,
    test_shared_tiles_of_packed_sequences_leak_no_nan,
    test_full_gpu_needs_no_workspace_for_shares)
from attention_gpu_statistics import (  # noqa: E402, F401
    test_delta_statistics_are_the_error_of_delta, test_row_statistics_equal_a_naive_count,
    test_row_statistics_of_packed_sequences, test_the_largest_score_is_of_all_launches_so_far)

# batch, heads, kv_heads, q_len, k_len, head_dim, dtype
SHAPES = [
    (2, 4, 4, 512, 512, 64, BF16), (1, 2, 2, 1, 1, 128, BF16), (1, 4, 1, 129, 129, 64, F16),
    (2, 8, 2, 127, 127, 128, BF16), (1, 4, 4, 1000, 1000, 128, F16), (1, 2, 1, 333, 777, 64, BF16),
    (1, 2, 2, 300, 100, 128, BF16), (1, 4, 4, 1500, 1500, 64, BF16), (3, 4, 2, 64, 1, 64, F16),
    (1, 1, 1, 191, 2049, 128, BF16), (2, 2, 2, 260, 260, 96, BF16), (1, 2, 1, 200, 200, 32, F16),
    (1, 3, 3, 150, 400, 80, BF16), (2, 2, 1, 1025, 1025, 128, BF16),
    (1, 2, 1, 190, 300, 256, BF16), (2, 2, 2, 333, 333, 192, F16), (1, 2, 2, 129, 65, 96, F16),
    (1, 2, 2, 1025, 1025, 256, F16), (1, 4, 2, 1, 1, 256, BF16), (2, 1, 1, 130, 700, 136, BF16),
]
FEATURES = [
    Options(), Options(causal=True), Options(causal=True, window=100), Options(window=257),
    Options(softcap=20.0), Options(causal=True, softcap=5.0, window=130),
]


def vary(inputs: tuple[torch.Tensor, ...], kind: int) -> tuple[torch.Tensor, ...]:
    q, k, v = inputs
    if kind == 1:  # outliers
        q = q * torch.where(torch.rand_like(q) < 1e-3, 30.0, 1.0).to(q.dtype)
    if kind == 2:  # all scores of a row equal
        k = k[:, :, :1].repeat(1, 1, k.shape[2], 1)
    if kind == 3:  # exact ties of pairs
        k = k.clone()
        k[:, :, 1::2] = k[:, :, : k.shape[2] // 2 * 2: 2][:, :, : k[:, :, 1::2].shape[2]]
    if kind == 4:  # saturated: |S| to thousands
        q = q * 60
    return q, k, v


def test_forward_rule_a(lib: Lib) -> None:
    """max|O - ref| <= 2x the yardstick's + 1e-5, |dL| <= 1e-5 max(1, |L|)."""
    worst: dict[str, float] = {}
    for feature in FEATURES:
        for mode in calls.MODES:
            o = Options(**{**feature.__dict__, "mode": mode, "seed": 7})
            for index, (b, h, hk, n, m, d, dtype) in enumerate(SHAPES):
                if mode == "sr" and m == 1:
                    continue  # O = V is exact, but not when rounded at random
                if not chosen(d):
                    continue
                torch.manual_seed(index)
                q = randn(b, n, h, d, dtype=dtype).transpose(1, 2)
                inputs = vary((q, randn(b, hk, m, d, dtype=dtype), randn(b, hk, m, d, dtype=dtype)),
                              index % 5)
                op = Forward(lib, *inputs, o, counter=index % 2 == 0)
                op.run()
                wide = [t.double() for t in inputs]
                exact, s = attention(*wide, o), scores(*wide[:2], o)
                lse = torch.logsumexp(s, -1)
                yard = attention(*inputs, o)
                ratio = far(op.o, exact, yard, 2)
                if mode == "paper":  # a shifted row's P are all below 1, and all rounded
                    ratio = ((op.o.double() - exact).abs().max() / exact.abs().max()).item()
                    ratio /= 2**-7 if dtype == BF16 else 2**-10
                if mode == "sr":  # up to a whole ulp instead of half of one
                    ratio /= 2
                if op.o_lo is not None:
                    ratio = max(ratio, far(op.o.double() + op.o_lo.double(), exact, yard, 2))
                some = ~lse.isinf()
                off = ((op.lse.double() - lse).abs() / lse.abs().clamp(min=1))[some]
                where = f"{o} {SHAPES[index]}"
                assert ratio <= 1, f"{where}: {ratio}"
                assert torch.equal(op.lse.isneginf(), ~some), where
                assert off.numel() == 0 or off.max().item() <= 1e-5, f"{where} L {off.max()}"
                worst[mode] = max(worst.get(mode, 0), ratio)
    print("  worst error / bar", {k: round(v, 2) for k, v in worst.items()})


def test_backward_rule_a(lib: Lib) -> None:
    """max|dX - ref| <= 2x (softcap: 3x) the yardstick's + 1e-5."""
    worst: dict[str, float] = {}
    for feature in FEATURES:
        for index, (b, h, hk, n, m, d, dtype) in enumerate(SHAPES):
            others = ("fa", "paper", "sr", "hp-nolt", "lt")
            for variant, mode in enumerate(("hp", "hpm", others[index % len(others)])):
                if mode in ("sr", "paper") and (m == 1 or index % 4 == 2):
                    continue  # dQ is 0, and their delta is not exact
                if not chosen(d):
                    continue
                o = Options(**{**feature.__dict__, "mode": mode,
                               "deterministic": (index + variant) % 3 == 0,
                               "center": not feature.softcap and (index + variant) % 2 == 0})
                torch.manual_seed(100 + index)
                q = randn(b, n, h, d, dtype=dtype).transpose(1, 2)
                k, v = randn(b, hk, m, d, dtype=dtype), randn(b, hk, m, d, dtype=dtype)
                q, k, v = vary((q, k, v), index % 4)
                g = randn(b, h, n, d, dtype=dtype)
                op = Forward(lib, q, k, v, o)
                op.run()
                ours = Backward(op, g).run()
                exact = gradients(q.double(), k.double(), v.double(), g.double(), o)
                yard = gradients(q, k, v, g, o)
                for name, mine, ref, bar in zip(("dq", "dk", "dv"), ours, exact, yard):
                    ratio = far(mine, ref, bar, 3 if o.softcap else 2)
                    if mode in ("sr", "paper"):  # one rounding of O more
                        off = (mine.double() - ref).norm() / max(ref.norm().item(), 1e-2)
                        ratio = off.item() / (2**-6 if dtype == BF16 else 2**-9)
                    assert ratio <= 1, f"{name} {o} {SHAPES[index]}: {ratio}"
                    worst[name] = max(worst.get(name, 0), ratio)
    print("  worst error / bar", {k: round(v, 2) for k, v in worst.items()})


def test_a_backward_reads_what_the_other_path_wrote(lib: Lib) -> None:
    """On Hopper, where a forward and its backward may be of two paths."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    path = os.environ[calls.PATH_VARIABLE]
    other = {"sm80": "sm90", "sm90": "sm80"}[path]
    for d, mode, causal in itertools.product((64, 128, 256), ("fa", "hp", "hpm"), (True, False)):
        if not chosen(d):
            continue
        torch.manual_seed(d)
        q, k, v, g = (randn(1, 2, 300, d) for _ in range(4))
        o = Options(mode=mode, causal=causal)
        op = run_forward(lib, (q, k, v), o)
        os.environ[calls.PATH_VARIABLE] = other
        ours = Backward(op, g).run()
        os.environ[calls.PATH_VARIABLE] = path
        exact = gradients(q.double(), k.double(), v.double(), g.double(), o)
        yard = gradients(q, k, v, g, o)
        for name, mine, ref, bar in zip(("dq", "dk", "dv"), ours, exact, yard):
            ratio = far(mine, ref, bar, 2)
            assert ratio <= 1, f"{name} {o} head dim {d}: {ratio}"


LENGTHS = [0, 1, 127, 129, 300, 0, 64, 511, 128, 2]


def packed_run(lib: Lib, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
               o: Options, cu: tuple[torch.Tensor, torch.Tensor] | None) -> list[torch.Tensor]:
    op = Forward(lib, q, k, v, o, cu)
    op.run()
    return [op.o, op.lse[..., None], *Backward(op, g).run()]


def test_a_maximum_that_rises_from_tile_to_tile(lib: Lib) -> None:
    """Maxima rise by little and by much in a tile of 64 or 128 keys, in all rows of a head and in
    one of 32.  O, L and the largest score hold, wherever anchors stand and however far they move.
    """
    n, m = 130, 650
    for index, (d, dtype, rise) in enumerate(itertools.product(
            (64, 96, 128, 256), (BF16, F16), (0.9, 3.4, 6.5, 7.5, 40.0, 300.0))):
        if not chosen(d):
            continue
        torch.manual_seed(index)
        q, k, v = randn(1, 2, n, d), randn(1, 2, m, d), randn(1, 2, m, d)
        q[..., 0] = 0
        q[:, 0, :, 0] = q[:, 1, 5::32, 0] = 8
        back = torch.arange(m - 1, -1, -1, device="cuda")  # the forward begins at the last key
        k[..., 0] = back * (rise * math.log(2) / 64 * math.sqrt(d) / 8)
        inputs = [t.to(dtype) for t in (q, k, v)]
        for mode, (causal, window), stats in itertools.product(
                ("fa", "hp", "hpm"), ((False, 0), (True, 0), (False, 200)), (False, True)):
            o = Options(mode=mode, causal=causal, window=window, stats=stats, stats_every=0)
            op = run_forward(lib, (*inputs,), o)
            wide = [t.double() for t in inputs]
            exact, s = attention(*wide, o), scores(*wide[:2], o)
            where = f"{o} {d} {dtype} rise {rise}"
            ratio = far(op.o, exact, attention(*inputs, o), 2)
            assert ratio <= 1, f"{where}: {ratio}"
            lse = torch.logsumexp(s, -1)
            off = ((op.lse.double() - lse).abs() / lse.abs().clamp(min=1)).max().item()
            assert off <= 1e-5, f"{where} L {off}"
            if op.stats is not None:
                largest = s.amax((0, 2, 3))
                found = op.stats[calls.STATS["logit_max"]].double()
                assert ((found - largest).abs() <= 1e-5 * largest.abs()).all(), f"{where}: {found}"


def test_scores_that_are_not_finite_stay_in_their_rows(lib: Lib) -> None:
    """Rows whose scores are NaN or +inf are NaN; those of the same warp, which vote with them,
    are what they are without."""
    for d, mode, (causal, window) in itertools.product(
            (64, 128, 256), ("fa", "sr", "hp", "hpm"), ((False, 0), (True, 0), (False, 90))):
        if not chosen(d):
            continue
        torch.manual_seed(d)
        q, k, v = (randn(1, 2, 300, d) for _ in range(3))
        k[..., 0] = k[..., 0].abs() + 0.1
        bad = torch.zeros(300, dtype=torch.bool, device="cuda")
        bad[[20, 37, 38, 299]] = True
        wrong = q.clone()
        wrong[:, :, [20, 299]] = math.nan
        wrong[:, :, [37, 38], 0] = math.inf
        o = Options(mode=mode, causal=causal, window=window)
        op = run_forward(lib, (wrong, k, v), o)
        assert op.o[:, :, bad].isnan().all() and op.lse[:, :, bad].isnan().all(), f"{o} {d}"
        wide = [t.double() for t in (q, k, v)]
        exact, yard = attention(*wide, o), attention(q, k, v, o)
        ratio = far(op.o[:, :, ~bad], exact[:, :, ~bad], yard[:, :, ~bad], 2)
        assert ratio <= 1, f"{o} {d}: {ratio}"
        off = (op.lse.double() - torch.logsumexp(scores(*wide[:2], o), -1))[:, :, ~bad].abs().max()
        assert off.item() <= 1e-4, f"{o} {d} L {off}"


def test_packed_sequences_equal_single_ones_and_leak_no_nan(lib: Lib) -> None:
    """Bit for bit, also when all other sequences and the space between are NaN."""
    for o in (Options(causal=True, deterministic=True, mode="hpm"), Options(deterministic=True),
              Options(causal=True, window=70, deterministic=True, center=True),
              Options(softcap=10.0, deterministic=True, mode="fa"), Options(mode="sr", seed=3)):
        for d, h, hk, extra in ((64, 4, 2, 0), (128, 2, 2, 37), (96, 2, 1, 5), (256, 2, 1, 0)):
            if not chosen(d):
                continue
            torch.manual_seed(5)
            cu = (pack(LENGTHS), pack(LENGTHS, extra))
            q, g = (randn(1, h, int(cu[0][-1]), d) for _ in range(2))
            k, v = (randn(1, hk, int(cu[1][-1]), d) for _ in range(2))
            whole = packed_run(lib, q, k, v, g, o, cu)
            for i, n in enumerate(LENGTHS):
                if n == 0:
                    continue
                rows, keys = (slice(int(c[i]), int(c[i + 1])) for c in cu)
                spans = [rows, rows, rows, keys, keys]
                mine = [t[:, :, s] for t, s in zip(whole, spans)]
                if o.mode != "sr":  # whose random numbers count sequences
                    alone = packed_run(lib, *(t[:, :, s].contiguous() for t, s in
                                              ((q, rows), (k, keys), (v, keys), (g, rows))), o, None)
                    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), mine, alone):
                        assert torch.equal(a, b), f"{name} {o} sequence {i}: {(a - b).abs().max()}"

                def poison(t: torch.Tensor, keep: slice) -> torch.Tensor:
                    out = torch.full_like(t, math.nan)
                    out[:, :, keep] = t[:, :, keep]
                    return out

                lone = packed_run(lib, poison(q, rows), poison(k, keys), poison(v, keys),
                                  poison(g, rows), o, cu)
                for name, a, b, s in zip(("o", "lse", "dq", "dk", "dv"), mine, lone, spans):
                    if name == "dq" and not o.deterministic:
                        assert not b[:, :, s].isnan().any(), f"{name} {o} sequence {i}"
                    else:
                        assert torch.equal(a, b[:, :, s]), f"{name} {o} sequence {i}: NaN leaked"


def test_nothing_outside_the_tensors_is_read_or_written(lib: Lib) -> None:
    """Any N: views into larger tensors of NaN, whose surroundings stay as they are."""
    for n, m, d, causal in ((1, 1, 64, False), (77, 205, 64, True), (130, 129, 128, True),
                            (191, 64, 96, False), (66, 131, 256, True)):
        if not chosen(d):
            continue
        torch.manual_seed(n)

        def inside(tokens: int) -> torch.Tensor:
            whole = torch.full((2, 3, tokens + 300, d + 8), math.nan, device="cuda", dtype=BF16)
            part = whole[:, :, 150:150 + tokens, :d]
            part.copy_(randn(2, 3, tokens, d))
            return part

        q, k, v, g = inside(n), inside(m), inside(m), inside(n)
        o = Options(causal=causal, deterministic=True)
        op = Forward(lib, q, k, v, o)
        for name in ("o", "o_lo"):
            setattr(op, name, inside(n))
            setattr(op.params, name, calls.view(getattr(op, name)))
        op.run()
        back = Backward(op, g)
        outs = {"dq": inside(n), "dk": inside(m), "dv": inside(m)}
        for name, t in outs.items():
            setattr(back.params, name, calls.view(t))
        back.run()
        clean = Forward(lib, *(t.contiguous() for t in (q, k, v)), o)
        clean.run()
        want = Backward(clean, g.contiguous())
        want.run()
        pairs = {"o": (op.o, clean.o), "o_lo": (op.o_lo, clean.o_lo), "dq": (outs["dq"], want.dq),
                 "dk": (outs["dk"], want.dk), "dv": (outs["dv"], want.dv)}
        for name, (mine, expected) in pairs.items():
            assert torch.equal(mine, expected), f"{name} at {(n, m, d)}"
            whole = mine._base
            assert whole is not None and int((~whole.isnan()).sum()) == mine.numel(), name


# ---- bias: rules B and D


def test_bias_rule_b(lib: Lib) -> None:
    """hp: |delta bias| <= 1e-5 and |O bias| <= 0.01 ulp; sr: |t| < 4; fa fails, and so does
    half of hp on broad rows."""
    for kind, d in itertools.product(("sink", "tie", "broad", "near"), (64, 256)):
        if not chosen(d):
            continue
        inputs = bias_inputs(kind, d, 512, 64)
        for mode in calls.MODES:
            op = run_forward(lib, inputs, Options(mode=mode, seed=11))
            error, size, o_bias = row_sums(op, inputs)
            bias = (error.mean() / size.mean()).item()
            spread = (error / size).std().item()
            t = error.mean().item() / (error.std().item() / math.sqrt(error.numel()))
            print(f"  {kind:5} {d:3} {mode:7} delta bias {bias:+.1e} sd {spread:.0e} O {o_bias:+.1e} ulp")
            if mode == "fa" and kind != "near":
                assert abs(bias) > 1e-5, f"{kind}: fa should be biased"
            if mode in ("hp-nolt", "lt") and kind == "broad":
                assert abs(bias) > 1e-5, f"{kind}: {mode} should be biased"
            if mode == "hp-nolt" and kind in ("sink", "tie"):
                assert abs(bias) <= 1e-5, f"{kind} {mode}"
            if mode == "hpm" or (mode == "hp" and kind != "near"):
                assert abs(bias) <= 1e-5, f"{kind} {mode}"
            if mode == "sr" and kind in ("sink", "tie"):
                assert abs(t) < 4 and abs(o_bias) <= 0.01, f"{kind} sr t {t}"
            if mode == "hp" and kind != "near":
                assert abs(o_bias) <= 0.01, f"{kind} hp"


def test_accumulation_rule_d(lib: Lib) -> None:
    """sigma of the summed error of dW_Q = dQ^T X over 100 steps with fresh noise."""
    n, d, heads, width = 512, 64, 8, 64
    torch.manual_seed(9)
    x = torch.rand(n, width, device="cuda", dtype=torch.double)
    common = torch.randn(1, heads, 1, d, device="cuda", dtype=torch.double)
    for kind in ("sink", "tie", "broad", "near"):
        at: dict[str, list[float]] = {}
        for mode in ("fa", "hp", "hpm"):
            total = torch.zeros(heads, d, width, device="cuda", dtype=torch.double)
            at[mode] = []
            for step in range(1, 101):
                inputs = bias_inputs(kind, d, n, heads, step)
                error, _, _ = row_sums(run_forward(lib, inputs, Options(mode=mode)), inputs)
                s = scores(inputs[0].double(), inputs[1].double(), Options())
                # A common mode changes neither P nor the error, but where it goes.
                pk = torch.softmax(s, -1) @ inputs[1].double() + common
                # dS misses -error P in each row, so dQ misses -scale error (PK).
                dq = -error[..., None] * pk / math.sqrt(d)
                total += dq[0].transpose(-1, -2) @ x
                if step in (50, 100):
                    at[mode].append(torch.linalg.matrix_norm(total, 2).max().item())
        slope = math.log2(at["fa"][1] / at["fa"][0])
        ratio = {m: at[m][1] / at["fa"][1] for m in ("hp", "hpm")}
        print(f"  {kind:5} fa slope {slope:.3f}, hp/fa {ratio['hp']:.1e}, hpm/fa {ratio['hpm']:.1e}")
        assert abs(slope - 1) <= 0.05, kind
        assert ratio["hpm"] <= 2e-3, kind
        assert kind == "near" or ratio["hp"] <= 1e-3, kind


# ---- the rest


def test_launches_repeat_bit_for_bit(lib: Lib) -> None:
    """200 launches; the backward in its deterministic variant."""
    for d, h, hk, n in ((128, 8, 8, 1030), (64, 8, 2, 777), (96, 4, 4, 300), (256, 4, 2, 300)):
        if not chosen(d):
            continue
        torch.manual_seed(7)
        q, g = randn(2, h, n, d), randn(2, h, n, d)
        k, v = randn(2, hk, n, d), randn(2, hk, n, d)
        for causal in (True, False):
            o = Options(causal=causal, deterministic=True, center=d in (64, 256), mode="hpm")
            op = Forward(lib, q, k, v, o)
            op.run()
            back = Backward(op, g)
            first = [t.clone() for t in (op.run(), op.o_lo, op.lse, *back.run())]
            different = 0
            for _ in range(199):
                now = (op.run(), op.o_lo, op.lse, *back.run())
                different += not all(torch.equal(a, b) for a, b in zip(first, now))
            assert different == 0, f"{different} of 200 differ, head dim {d} causal {causal}"


def test_turns_of_many_grouped_queries(lib: Lib) -> None:
    """Where one pair has so many steps that turns begin with the first keys: the gradients of
    the variant without turns but for the order of additions, each time the same."""
    for d, lengths, center in itertools.product(
            (64, 128, 256), ([2000], [3100, 0, 2900]), (False, True)):
        if not chosen(d):
            continue
        torch.manual_seed(d)
        cu = pack(lengths)
        n = int(cu[-1])
        q, g = randn(1, 64, n, d), randn(1, 64, n, d)
        k, v = randn(1, 2, n, d), randn(1, 2, n, d)

        def run(deterministic: bool) -> list[torch.Tensor]:
            o = Options(causal=True, deterministic=deterministic, center=center)
            return packed_run(lib, q, k, v, g, o, (cu, cu) if len(lengths) > 1 else None)

        plain, first = run(False), run(True)
        for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), plain, first):
            off = ((a.float() - b.float()).norm() / a.float().norm()).item()
            assert off <= 2e-3, f"{name} {d} {lengths} center {center}: {off}"
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(first, run(True))), f"{d} {lengths}"


def test_centring_removes_the_error_along_the_mean_key(lib: Lib) -> None:
    """A biased delta (mode fa) with a common mode of the keys; dK sums to zero."""
    for n, d in ((512, 64), (500, 128), (512, 256)):
        if not chosen(d):
            continue
        torch.manual_seed(21)
        q, k, v, g = (t.float() for t in bias_inputs("broad", d, n, 8))
        k = (k + 2 * torch.randn(1, 8, 1, d, device="cuda")).to(BF16)
        q, v, g = q.to(BF16), v.to(BF16), g.to(BF16)
        kbar = k.double().mean(2, keepdim=True)
        exact = gradients(q.double(), k.double(), v.double(), g.double(), Options())
        error: dict[bool, float] = {}
        leak: dict[bool, float] = {}
        for center in (False, True):
            op = Forward(lib, q, k, v, Options(mode="fa", center=center))
            op.run()
            dq, dk, _ = Backward(op, g).run()
            error[center] = ((dq.double() - exact[0]) * kbar).sum(-1).mean().abs().item()
            leak[center] = (dk.double().sum(2).norm() / dk.double().norm(dim=-1).sum()).item()
        print(f"  {d:3} mean error along kbar {error[False]:.1e} -> {error[True]:.1e}, "
              f"key leak {leak[False]:.1e} -> {leak[True]:.1e}")
        assert error[True] <= 0.05 * error[False], d
        assert leak[True] <= 3 * 2**-8 / math.sqrt(n), d


def test_paper_vectors(lib: Lib) -> None:
    """Section 3's repeated maxima rm: relative error of O for V of one sign."""
    d, n = 16, 256
    for dtype, bar in ((BF16, 2**-8), (F16, 2**-11)):
        for rm in (3.0, 0.0, 1e-4, -4.0, -120.0, 15.0, 30.0, 95.0, 300.0):
            for beta in (2.0, 8.0):
                torch.manual_seed(1)
                q = torch.zeros(1, 1, 64, d, device="cuda", dtype=dtype)
                q[..., 0] = 4.0  # = sqrt(d): the score is channel 0 of k
                k = torch.zeros(1, 1, n, d, device="cuda", dtype=dtype)
                k[..., 0] = (rm - 2 - 3 * torch.rand(n, device="cuda")).to(dtype)
                k[0, 0, 10, 0] = k[0, 0, 200, 0] = rm
                v = (torch.rand(1, 1, n, d, device="cuda") + 0.5).to(dtype)
                o = Options(mode="paper", paper_beta=beta)
                op = Forward(lib, q, k, v, o)
                op.run()
                exact = attention(q.double(), k.double(), v.double(), o)
                error = ((op.o.double() - exact).abs() / exact).max().item()
                assert error <= 1.5 * bar, f"{dtype} rm {rm} beta {beta}: {error:.2e}"


def test_another_path_is_refused(lib: Lib) -> None:
    """The variable that forces a path is strict, and a path says what it lacks."""
    forced = os.environ.get(calls.PATH_VARIABLE)
    try:
        for path, d, words in (("sm70", 64, "sm70"), ("", 64, "must be sm80 or sm90"),
                               ("sm90", 264, "sm90"), ("sm80", 264, "264")):
            os.environ[calls.PATH_VARIABLE] = path
            t = randn(1, 1, 1, d)
            try:
                Forward(lib, t, t, t, Options()).run()
            except RuntimeError as error:
                assert words in str(error), f"{path}: {error}"
            else:
                raise AssertionError(f"{path} took head_dim {d}")
    finally:
        os.environ.pop(calls.PATH_VARIABLE)
        if forced is not None:
            os.environ[calls.PATH_VARIABLE] = forced


TESTS: dict[str, Callable[[Lib], None]] = {
    name: test for name, test in globals().items() if name.startswith("test_")}


def run_one(library: str, name: str) -> int:
    try:
        TESTS[name](calls.load(library))
    except (AssertionError, RuntimeError) as error:
        print("  ", error)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("substrings", nargs="*")
    parser.add_argument("--path", choices=("sm80", "sm90"), action="append")
    parser.add_argument("--one", action="store_true", help="the test of this name, in this process")
    parser.add_argument("--head-dims", help="of tests that go through several: only these")
    args = parser.parse_args()
    if args.head_dims:
        os.environ[HEAD_DIMS_VARIABLE] = args.head_dims
    if args.one:
        return run_one(args.library, args.substrings[0])
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        print("no GPU of compute capability 8.0 or later")
        return 1 if os.environ.get("BELLWETHER_REQUIRE_GPU") == "1" else 77
    hopper = torch.cuda.get_device_capability() == (9, 0)
    paths = args.path or (["sm80", "sm90"] if hopper else ["sm80"])
    names = [n for n in TESTS if not args.substrings or any(part in n for part in args.substrings)]
    failed = 0
    for path in paths:
        for name in names:
            done = subprocess.run(
                [sys.executable, __file__, args.library, name, "--one"],
                env={**os.environ, calls.PATH_VARIABLE: path}, capture_output=True, text=True,
                check=False)
            failed += done.returncode != 0
            print("ok    " if done.returncode == 0 else "FAILED", path, name)
            print(done.stdout, end="")
            if done.returncode != 0:
                print(done.stderr[-2000:], end="")
            sys.stdout.flush()
    print(f"{len(paths) * len(names) - failed} of {len(paths) * len(names)} passed")
    return 1 if failed or not names else 0


if __name__ == "__main__":
    sys.exit(main())
