"""Tests of attention on a GPU about batches whose rows the Hopper backward prepares ahead, and whose
dQ it finishes later, beside its products; attention_gpu_test.py runs them."""

from __future__ import annotations

import torch

from attention_gpu_cases import BF16, F16, Lib, chosen, far, gradients, randn  # first: it sets the path
from attention_calls import Backward, Forward, Options

# batch, heads, q_len, k_len, head_dim, dtype, causal: more heads than are prepared by a kernel, and as
# many tiles as waves of a whole GPU, so that no tile is shared.
BATCHES = [
    (3, 11, 1100, 1000, 128, BF16, False), (3, 11, 1024, 1024, 64, F16, False), (3, 6, 2100, 2100, 128, F16, True),
    (3, 6, 2048, 2048, 64, BF16, True), (3, 11, 1030, 1000, 96, BF16, False), (3, 6, 2050, 2050, 40, BF16, True),
    (2, 10, 1600, 1000, 128, BF16, False), (2, 6, 3100, 3100, 104, F16, True),  # centred keys at more than 64, too
    (3, 11, 1100, 1300, 88, F16, False),
]


def test_rows_prepared_ahead_have_the_gradients_of_rule_a(lib: Lib) -> None:
    """max|dX - ref| <= 2x the yardstick's + 1e-5; dK and dV repeat bit for bit, whatever the workspace holds.
    Of centred keys, too, whose dK sums to zero."""
    worst: dict[str, float] = {}
    for index, (b, h, n, m, d, dtype, causal) in enumerate(BATCHES):
        if not chosen(d):
            continue
        torch.manual_seed(index)
        q, g = (randn(b, n, h, d, dtype=dtype).transpose(1, 2) for _ in range(2))
        k, v = randn(b, h, m, d, dtype=dtype), randn(b, h, m, d, dtype=dtype)
        o = Options(causal=causal)
        exact = gradients(*(t.double() for t in (q, k, v, g)), o)
        yard = gradients(q, k, v, g, o)
        for mode, center in (("hp", False), ("fa", False), ("hp", True)):
            op = Forward(lib, q, k, v, Options(causal=causal, mode=mode, center=center))
            op.run()
            back = Backward(op, g)
            first = [t.clone() for t in back.run()]
            for name, mine, ref, bar in zip(("dq", "dk", "dv"), first, exact, yard):
                ratio = far(mine, ref, bar, 2)
                assert ratio <= 1, f"{name} {mode} center {center} {BATCHES[index]}: {ratio}"
                worst[name] = max(worst.get(name, 0), ratio)
            if center:
                leak = (first[1].double().sum(2).norm() / first[1].double().norm(dim=-1).sum()).item()
                assert leak <= 3 * 2**-8 / m**0.5, f"{BATCHES[index]}: {leak}"
            for _ in range(5):
                back.workspace.fill_(255)
                back.dq.fill_(float("nan"))
                dq, dk, dv = back.run()
                assert torch.equal(dk, first[1]) and torch.equal(dv, first[2]), (
                    f"{mode} center {center} {BATCHES[index]}")
                off = ((dq.double() - first[0].double()).norm() / first[0].double().norm()).item()
                assert off <= 1e-3, f"dq {mode} center {center} {BATCHES[index]}: {off}"
    print("  worst error / bar", {k: round(v, 2) for k, v in worst.items()})
