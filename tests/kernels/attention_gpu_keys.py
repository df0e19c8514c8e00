"""Tests of attention on a GPU about keys: centred in launches of many tiles, and seen by no
query; attention_gpu_test.py runs them."""

from __future__ import annotations

import torch

from attention_gpu_cases import (BF16, F16, Lib, chosen, far, gradients, off_centred, pack,
                                 randn)  # first: it sets the path
from attention_calls import Backward, Forward, Options

# batch, heads, kv_heads, q_len, k_len, head_dim, dtype: 256 tiles of 128 keys and more, with many
# queries each, which Hopper launches in parts (of the third and fifth with a causal mask, too);
# the last part is often narrower than those before.
LARGE = [
    (1, 300, 300, 1300, 100, 64, BF16), (4, 16, 16, 1030, 1030, 128, BF16),
    (3, 96, 24, 300, 900, 64, F16), (5, 23, 23, 1000, 650, 80, BF16),
    (2, 8, 4, 2100, 8200, 128, F16), (2, 33, 33, 1000, 700, 96, BF16),
]


def test_centred_keys_take_the_mean_from_every_gradient(lib: Lib) -> None:
    """dK is that of keys that are not centred minus its mean, rounded once more; dV the same."""
    for index, (b, h, hk, n, m, d, dtype) in enumerate(LARGE):
        if not chosen(d):
            continue
        torch.manual_seed(index)
        q, g = randn(b, h, n, d, dtype=dtype), randn(b, h, n, d, dtype=dtype)
        k = randn(b, m, hk, d, dtype=dtype).transpose(1, 2) + 2
        v = randn(b, hk, m, d, dtype=dtype) + 1
        for causal in (True, False):
            for stats in (False, True):
                # Mode fa, whose dK has a mean that is not only noise.
                o = Options(mode="fa", causal=causal, stats=stats)
                op = Forward(lib, q, k, v, o)
                op.run()
                _, dk, dv = Backward(op, g).run()
                centred = Backward(op, g)
                centred.params.center = 1
                _, mine, mine_v = centred.run()
                where = f"{LARGE[index]} causal {causal} stats {stats}"
                assert torch.equal(dv, mine_v), where
                off = off_centred(mine, dk)
                assert off <= 1e-6, f"{where}: {off}"
                first = mine.clone()
                for _ in range(5):
                    assert torch.equal(first, centred.run()[1]), f"{where}: does not repeat"


def test_keys_that_no_query_sees(lib: Lib) -> None:
    """Windows and sequences without queries leave whole tiles of keys unseen: their gradients
    are 0, and those of others right, every time."""
    for d, center in ((64, False), (128, False), (64, True), (128, True), (256, True)):
        if not chosen(d):
            continue
        torch.manual_seed(d)
        o = Options(causal=True, window=64, center=center)
        q, g = (randn(4, 8, 70, d) for _ in range(2))
        k, v = (randn(4, 8, 2000, d) for _ in range(2))
        op = Forward(lib, q, k, v, o)
        op.run()
        back = Backward(op, g)
        first = [t.clone() for t in back.run()]
        exact = gradients(q.double(), k.double(), v.double(), g.double(), o)
        yard = gradients(q, k, v, g, o)
        for name, mine, ref, bar in zip(("dq", "dk", "dv"), first, exact, yard):
            ratio = far(mine, ref, bar, 2)
            assert ratio <= 1, f"{name} head dim {d} center {center}: {ratio}"
        unseen = 2000 - 70 - 64
        assert not first[2][:, :, :unseen].any(), d
        assert center or not first[1][:, :, :unseen].any(), d
        for _ in range(100):
            _, dk, dv = back.run()
            assert torch.equal(dk, first[1]) and torch.equal(dv, first[2]), f"head dim {d} differs"

        cu = pack([0, 40, 0, 90]), pack([500, 40, 700, 90])
        q, g = (randn(1, 4, 130, d) for _ in range(2))
        k, v = (randn(1, 4, 1330, d) for _ in range(2))
        op = Forward(lib, q, k, v, Options(center=center), cu)
        op.run()
        _, dk, dv = Backward(op, g).run()
        for keys in (slice(0, 500), slice(540, 1240)):
            assert not dk[:, :, keys].any() and not dv[:, :, keys].any(), f"head dim {d}"
        assert dk[:, :, 1240:].any() and not dk.isnan().any(), f"head dim {d}"
