"""Tests of attention on a GPU with masks, key bounds, sinks and values of another width;
attention_gpu_test.py runs them."""

from __future__ import annotations

import itertools
import math
import os
import random

import torch

from attention_gpu_cases import (BF16, F16, Lib, attention, chosen, far, gradients, randn, scores,
                                 softmax)  # first: it sets the path
from attention_gpu_statistics import check_statistics, counted_rows, integers, naive_statistics
import attention_calls as calls
from attention_calls import Backward, Forward, Options, Seen

# batch, heads, kv_heads, q_len, k_len, head_dim, v_dim, dtype
SHAPES = [
    (2, 4, 4, 320, 320, 64, 64, BF16), (3, 4, 2, 257, 257, 128, 128, BF16),
    (2, 2, 1, 190, 333, 96, 96, F16), (2, 2, 2, 150, 150, 256, 256, BF16),
    (2, 4, 1, 300, 130, 64, 64, F16), (2, 2, 2, 200, 700, 128, 128, F16),
    (2, 2, 1, 193, 193, 192, 128, BF16), (2, 2, 2, 260, 260, 64, 128, BF16),
    (1, 2, 2, 1, 1, 128, 64, BF16), (3, 2, 1, 64, 65, 80, 40, F16), (2, 2, 2, 130, 130, 256, 64, F16),
]
MASKS = (None, None, None, "bool", "keys", "bf16", "f16", "f32", "turned", "odd")
SHARE_SEEN = 0.7


def make_mask(kind: str | None, b: int, h: int, n: int, m: int, draw: random.Random) -> torch.Tensor | None:
    """A third of the keys is hidden, and of some rows all."""
    if kind is None:
        return None
    shape = [draw.choice((1, size)) for size in (b, h, n)]
    if kind == "keys":
        shape[2] = 1
    shown = torch.rand(*shape, m, device="cuda") < SHARE_SEEN
    if kind != "keys":
        shown[..., :: 37, :] &= torch.rand(m, device="cuda") < 0
    if kind in ("bool", "keys"):
        return shown
    dtype = {"bf16": BF16, "f16": F16}.get(kind, torch.float32)
    bias = torch.randn(*shape, m, device="cuda").to(dtype)
    bias = bias.masked_fill(~shown, draw.choice((-math.inf, -1e4, -3e4)))
    if kind == "turned":  # keys are apart, as those of a bias table are
        return bias.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "odd":  # one element from where pairs are aligned
        return torch.nn.functional.pad(bias, (1, 2))[..., 1:-2]
    return bias


def make_bounds(b: int, m: int, draw: random.Random) -> torch.Tensor | None:
    kind = draw.choice((None, "right", "left", "both", "none"))
    if kind is None:
        return None
    ends = [(0, draw.randint(1, m)) if kind == "right" else
            (draw.randint(0, m - 1), m + 5) if kind == "left" else
            tuple(sorted((draw.randint(0, m), draw.randint(0, m)))) if kind == "both" else (m, m)
            for _ in range(b)]
    if kind == "none":  # one entry is all padding
        ends[0] = (0, m)
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def poisoned(t: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Keys or values with NaN where padding is."""
    if seen.bounds is None:
        return t
    key = torch.arange(t.shape[2], device="cuda")
    inside = (key >= seen.bounds[:, :1]) & (key < seen.bounds[:, 1:])
    return t.masked_fill(~inside[:, None, :, None], math.nan)


def test_masked_forward_and_backward_rule_a(lib: Lib) -> None:
    """All features at once, drawn: O, L and every gradient against fp64, with NaN where padding is."""
    worst: dict[str, float] = {}
    modes = ("hp", "hpm", "fa", "hp", "hp-nolt", "lt", "sr", "paper")
    for number, (shape, kind) in enumerate(itertools.product(SHAPES, MASKS)):
        b, h, hk, n, m, d, e, dtype = shape
        if not chosen(d):
            continue
        draw = random.Random(number)
        torch.manual_seed(number)
        mode = modes[number % len(modes)]
        if m == 1 and mode not in ("hp", "hpm"):
            continue  # dQ and dK are as small as the error of their delta
        sinks = torch.randn(h, device="cuda") if draw.random() < 0.4 else None
        if sinks is not None and draw.random() < 0.5:
            sinks[0] = draw.choice((-math.inf, 12.0, -40.0))
        seen = Seen(make_mask(kind, b, h, n, m, draw), make_bounds(b, m, draw), sinks)
        softcap = draw.choice((0.0, 0.0, 8.0))
        o = Options(mode=mode, causal=draw.random() < 0.5, window=draw.choice((0, 0, 100)),
                    softcap=softcap, deterministic=draw.random() < 0.4, seed=7,
                    center=not softcap and sinks is None and draw.random() < 0.6)
        q = randn(b, n, h, d, dtype=dtype).transpose(1, 2)
        k, v = randn(b, hk, m, d, dtype=dtype), randn(b, hk, m, e, dtype=dtype)
        g = randn(b, h, n, e, dtype=dtype)
        op = Forward(lib, q, poisoned(k, seen), poisoned(v, seen), o, seen=seen)
        op.run()
        back = Backward(op, g)
        ours = [*back.run(), back.d_sinks]
        where = f"{o} {shape} mask {kind} bounds {seen.bounds} sinks {sinks}"
        wide = [t.double() for t in (q, k, v)]
        exact, yard = attention(*wide, o, seen), attention(q, k, v, o, seen)
        loose = 2 * (2 if mode == "sr" else 1)
        if mode == "paper":
            ratio = ((op.o.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-3)).item()
            ratio /= 2**-7 if dtype == BF16 else 2**-10
        else:
            ratio = far(op.o, exact, yard, loose)
        assert ratio <= 1, f"o {where}: {ratio}"
        s = scores(*wide[:2], o, seen)
        if sinks is not None:
            s = torch.cat((s, sinks.double().view(-1, 1, 1).expand(*s.shape[:3], 1)), -1)
        lse = torch.logsumexp(s, -1)
        some = ~lse.isinf()
        assert torch.equal(op.lse.isneginf(), ~some), where
        off = ((op.lse.double() - lse).abs() / lse.abs().clamp(min=1))[some]
        assert off.numel() == 0 or off.max().item() <= 1e-5, f"{where} L {off.max()}"
        exacts = gradients(*wide, g.double(), o, seen)
        yards = gradients(q, k, v, g, o, seen)
        for name, mine, ref, bar in zip(("dq", "dk", "dv", "d_sinks"), ours, exacts, yards):
            assert mine is not None
            ratio = far(mine, ref, bar, 3 if softcap else 2)
            if mode in ("sr", "paper"):  # one rounding of O more
                off = (mine.double() - ref).norm() / max(ref.norm().item(), 1e-2)
                ratio = off.item() / (2**-6 if dtype == BF16 else 2**-9)
            if name == "d_sinks":  # a sum over rows, whose terms are exact to delta's rounding
                size = max(float(n) ** 0.5, ref.abs().max().item())
                ratio = (mine.double() - ref).abs().max().item() / (2**-7 * size)
            assert ratio <= 1, f"{name} {where}: {ratio}"
            worst[name] = max(worst.get(name, 0), ratio)
        if seen.bounds is not None:
            hidden = poisoned(torch.zeros_like(k), seen).isnan()
            assert not ours[1][hidden].any(), f"dk of padding, {where}"
    print("  worst error / bar", {k: round(v, 2) for k, v in worst.items()})


def test_bounds_cut_what_a_mask_hides_bit_for_bit(lib: Lib) -> None:
    """Key bounds, the mask of the same keys, and no bounds at all.  Where sm90 has bounds, but no
    masks, within what their orders of summation differ by."""
    for d, mode in itertools.product((64, 96, 128, 256), ("fa", "hp", "hpm")):
        if not chosen(d):
            continue
        torch.manual_seed(d)
        n = 300
        q, k, v, g = (randn(3, 2, n, d) for _ in range(4))
        bounds = torch.tensor([[0, n], [0, 130], [0, 257]], dtype=torch.int32, device="cuda")
        shown = torch.arange(n, device="cuda") < bounds[:, 1:]
        o = Options(mode=mode, causal=True, deterministic=True)

        def run(seen: Seen) -> list[torch.Tensor]:
            op = Forward(lib, q, k, v, o, seen=seen)
            op.run()
            return [op.o, op.lse, *Backward(op, g).run()]

        by_bounds, by_mask = run(Seen(bounds=bounds)), run(Seen(mask=shown[:, None, None]))
        everything = run(Seen(bounds=torch.tensor([[-3, n + 9]] * 3, dtype=torch.int32, device="cuda")))
        for name, a, b, whole in zip(("o", "lse", "dq", "dk", "dv"), by_bounds, by_mask, everything):
            off = (a.float() - b.float()).nan_to_num().norm() / b.float().nan_to_num().norm()
            bar = 2e-2 if d <= 128 and os.environ.get(calls.PATH_VARIABLE) == "sm90" else 0.0
            assert off <= bar, f"{name} {mode} {d}: {off}"
            assert torch.equal(a[0], whole[0]), f"{name} {mode} {d}: entry 0"


def test_masked_launches_repeat_bit_for_bit(lib: Lib) -> None:
    """60 launches; the backward in its deterministic variant."""
    for d, h, hk, n in ((128, 4, 4, 1030), (64, 8, 2, 777), (96, 4, 4, 300), (256, 4, 2, 300)):
        if not chosen(d):
            continue
        torch.manual_seed(7)
        q, g = randn(2, h, n, d), randn(2, h, n, d)
        k, v = randn(2, hk, n, d), randn(2, hk, n, d)
        bounds = torch.tensor([[0, n - 100], [77, n]], dtype=torch.int32, device="cuda")
        mask = torch.rand(2, 1, n, n, device="cuda") < SHARE_SEEN
        for seen, center in ((Seen(mask, bounds), True), (Seen(mask, bounds, randn(h).float()), False)):
            o = Options(causal=True, deterministic=True, center=center, mode="hpm")
            op = Forward(lib, q, k, v, o, seen=seen)
            back = Backward(op, g)
            first = [t.clone() for t in (op.run(), op.lse, *back.run())]
            sinks = None if back.d_sinks is None else back.d_sinks.clone()
            for _ in range(59):
                now = (op.run(), op.lse, *back.run())
                assert all(torch.equal(a, b) for a, b in zip(first, now)), f"{d} center {center}"
                assert sinks is None or torch.equal(sinks, back.d_sinks), f"{d}"


def test_statistics_of_masked_rows_equal_a_naive_count(lib: Lib) -> None:
    """Rows without keys are none, hidden keys count for nothing, a sink takes its part."""
    torch.manual_seed(3)
    for mode, d, with_sinks, causal in itertools.product(
            ("fa", "hp", "paper"), (64, 128, 256), (False, True), (False, True)):
        if not chosen(d):
            continue
        n = 410
        q, k = integers(2, 2, 4, n, d), integers(2, 2, 4, n, d)
        mask = torch.rand(2, 4, n, n, device="cuda") < SHARE_SEEN
        mask[:, :, 5::9] = False
        bounds = torch.tensor([[0, 300], [33, n]], dtype=torch.int32, device="cuda")
        sinks = torch.tensor([-math.inf, 0.0, 3.0, -7.0], device="cuda") if with_sinks else None
        seen = Seen(mask, bounds, sinks)
        for every in (1, 3):
            o = Options(mode=mode, causal=causal, stats=True, stats_every=every, seed=1)
            op = Forward(lib, q, k, randn(2, 4, n, d), o, seen=seen)
            op.run()
            s = scores(q.double(), k.double(), o, seen).float()
            counted = torch.stack(counted_rows(o, [n, n]))
            naive, sums, largest = naive_statistics(s, counted)
            if sinks is not None:
                p = softmax(s.double(), sinks)
                some = ~s.isneginf().all(-1)
                all_keys = torch.cat((s.double(), sinks.double().view(-1, 1, 1).expand(2, 4, n, 1)), -1)
                rows = counted[:, None] & some
                number = (~s.isneginf()).sum(-1).double()
                entropy = torch.special.entr(p).sum(-1) / number.log()
                sums = {"entropy": torch.where(rows & (number > 1), entropy, 0.0).sum((0, 2)),
                        "sink": torch.where(rows, p[..., 0], 0.0).sum((0, 2))}
                top = all_keys.amax(-1, keepdim=True)
                saturated = torch.exp(all_keys - top).sum(-1) < 1 + 2**-7
                naive["saturated"] = (rows & saturated).sum((0, 2)).double()
            check_statistics(op, naive, sums, largest, f"{o} {d} sinks {sinks}")


def test_delta_statistics_of_masked_calls(lib: Lib) -> None:
    """fa's error of delta with key bounds and a mask, within 1e-2 of sum |e|."""
    for d in (64, 128, 256):
        if not chosen(d):
            continue
        torch.manual_seed(d)
        n = 500
        q, k = randn(2, 4, n, d) * 0.03, randn(2, 4, n, d)
        v, g = ((torch.rand(2, 4, n, d, device="cuda") + 0.5).to(BF16) for _ in range(2))
        bounds = torch.tensor([[0, 300], [33, n]], dtype=torch.int32, device="cuda")
        seen = Seen((torch.rand(2, 1, n, n, device="cuda") < SHARE_SEEN), bounds)
        o = Options(mode="fa", stats=True)
        op = Forward(lib, q, k, v, o, seen=seen)
        op.run()
        Backward(op, g).run()
        p = softmax(scores(q.double(), k.double(), o, seen), None)
        dp = g.double() @ v.double().transpose(-1, -2)
        e = (g.double() * op.o.double()).sum(-1) - (p * dp).sum(-1)
        assert op.stats is not None
        said, size = op.stats[calls.STATS["bias"]].double(), e.abs().sum((0, 2))
        off = ((said - e.sum((0, 2))).abs() / size).max().item()
        assert off <= 1e-2, f"{d}: {off}"
