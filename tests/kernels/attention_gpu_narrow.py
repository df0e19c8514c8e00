"""Keys of 129 to 192 channels with values of up to 128, as multi-head latent attention has them: on
Hopper their backward is a kernel of its own.
"""

from __future__ import annotations

import itertools
import math

import torch
from attention_calls import STATS, Backward, Forward, Options
from attention_gpu_cases import BF16, F16, Lib, chosen, far, gradients, pack, randn, row_sums

# batch, heads, kv_heads, q_len, k_len, head_dim, v_dim, dtype
SHAPES = [
    (2, 4, 4, 512, 512, 192, 128, BF16), (1, 2, 2, 1, 7, 192, 128, BF16),
    (1, 4, 2, 333, 430, 192, 128, F16), (2, 2, 1, 257, 100, 136, 64, BF16),
    (1, 2, 2, 700, 257, 160, 128, BF16), (1, 3, 1, 129, 1025, 192, 40, BF16),
    (1, 16, 2, 1000, 1000, 192, 128, BF16),
]
FEATURES = [
    Options(), Options(causal=True), Options(causal=True, window=100), Options(softcap=20.0),
    Options(causal=True, softcap=5.0, window=130),
]


def test_narrow_values_have_the_gradients_of_rule_a(lib: Lib) -> None:
    """In every mode, with and without statistics, centred and by turns."""
    worst: dict[str, float] = {}
    for feature, (index, shape) in itertools.product(FEATURES, enumerate(SHAPES)):
        b, h, hk, n, m, d, dv, dtype = shape
        if not chosen(d):
            continue
        for variant, mode in enumerate(("hp", "hpm", "fa")):
            o = Options(**{**feature.__dict__, "mode": mode, "stats": (index + variant) % 2 == 0,
                           "deterministic": (index + variant) % 3 == 0,
                           "center": not feature.softcap and (index // 2 + variant) % 2 == 0})
            torch.manual_seed(index)
            q = randn(b, n, h, d, dtype=dtype).transpose(1, 2)
            k, v = randn(b, hk, m, d, dtype=dtype), randn(b, hk, m, dv, dtype=dtype)
            g = randn(b, h, n, dv, dtype=dtype)
            op = Forward(lib, q, k, v, o)
            op.run()
            ours = Backward(op, g).run()
            exact = gradients(*(t.double() for t in (q, k, v, g)), o)
            yard = gradients(q, k, v, g, o)
            for name, mine, ref, bar in zip(("dq", "dk", "dv"), ours, exact, yard):
                ratio = far(mine, ref, bar, 3 if o.softcap else 2)
                assert ratio <= 1, f"{name} {o} {shape}: {ratio}"
                worst[name] = max(worst.get(name, 0), ratio)
    print("  worst error / bar", {k: round(v, 2) for k, v in worst.items()})


def all_of(lib: Lib, inputs: list[torch.Tensor], o: Options,
           cu: tuple[torch.Tensor, torch.Tensor] | None = None) -> list[torch.Tensor]:
    op = Forward(lib, *inputs[:3], o, cu)
    op.run()
    return [t.clone() for t in Backward(op, inputs[3]).run()]


def test_narrow_values_of_packed_sequences_leak_no_nan(lib: Lib) -> None:
    """Bit for bit what each sequence has alone, between sequences of NaN."""
    if not chosen(192):
        return
    lengths = [0, 1, 127, 129, 300, 0, 64, 511, 2]
    for o in (Options(causal=True, deterministic=True, mode="hpm"),
              Options(causal=True, window=70, deterministic=True, center=True)):
        torch.manual_seed(5)
        cu = (pack(lengths), pack(lengths, 37))
        tokens, keys = int(cu[0][-1]), int(cu[1][-1])
        q, g = randn(1, 4, tokens, 192), randn(1, 4, tokens, 128)
        k, v = randn(1, 2, keys, 192), randn(1, 2, keys, 128)

        for i, n in enumerate(lengths):
            if n == 0:
                continue
            spans = [slice(int(c[i]), int(c[i + 1])) for c in (cu[0], cu[1], cu[1], cu[0])]
            parts = [t[:, :, s].contiguous() for t, s in zip((q, k, v, g), spans)]
            lone = [torch.full_like(t, math.nan) for t in (q, k, v, g)]
            for t, part, s in zip(lone, parts, spans):
                t[:, :, s] = part
            pairs = zip(("dq", "dk", "dv"), all_of(lib, lone, o, cu), all_of(lib, parts, o), spans)
            for name, mine, alone, s in pairs:
                assert torch.equal(mine[:, :, s], alone), f"{name} {o} sequence {i}"


def test_narrow_values_repeat_bit_for_bit(lib: Lib) -> None:
    """By turns all gradients do, else dK and dV; then the errors of delta are those of fp64."""
    if not chosen(192):
        return
    for causal, deterministic in itertools.product((False, True), (False, True)):
        torch.manual_seed(3)
        q, g = randn(2, 8, 1030, 192), randn(2, 8, 1030, 128)
        k, v = randn(2, 8, 1030, 192), randn(2, 8, 1030, 128)
        o = Options(mode="fa", causal=causal, deterministic=deterministic, stats=True)
        op = Forward(lib, q, k, v, o)
        op.run()
        back = Backward(op, g)
        first = [t.clone() for t in back.run()]
        for _ in range(50):
            now = back.run()
            for name, a, b in list(zip(("dq", "dk", "dv"), first, now))[0 if deterministic else 1:]:
                assert torch.equal(a, b), f"{name} {o}"
        if deterministic:  # On Hopper e comes from the rounded dS there.
            continue
        op.forget()
        op.run()
        back.run()
        assert op.stats is not None
        e, _, _ = row_sums(op, (q, k, v, g))
        found, want = op.stats[STATS["error_abs"]].double(), e.abs().sum((0, 2))
        assert ((found - want).abs() <= 1e-2 * want).all(), f"{o}: {found / want}"
