"""Goal: outputs and gradients of bellwether.attention are as exact as PyTorch's, or better.
Method: against attention in double on the same inputs; the bar is twice the error of the same
formula in the inputs' own type, plus 1e-5 (three times for gradients through a softcap).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import bellwether

from attention_reference import KINDS, Features, inputs, plain, with_gradients

MODES = ("fa", "hp", "hpm", "paper", "sr", "hp-nolt", "lt")
NAMES = ("o", "dq", "dk", "dv")


def compare(given: tuple[Tensor, ...], features: Features, **how: Any) -> None:
    *qkv, d_o = given
    gqa = qkv[0].shape[1] != qkv[1].shape[1]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bellwether.attention(
            q, k, v, causal=features.causal, window=features.window, softcap=features.softcap,
            scale=features.scale, enable_gqa=gqa, **how,
        )  # fmt: skip

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v, features)

    torch.manual_seed(0)
    got = with_gradients(ours, tuple(qkv), d_o)
    want = with_gradients(theirs, tuple(qkv), d_o, torch.float64)
    yardstick = with_gradients(theirs, tuple(qkv), d_o)
    for name, g, w, y in zip(NAMES, got, want, yardstick):
        factor = 3.0 if features.softcap and name != "o" else 2.0
        if how.get("mode") == "sr":
            factor += 0.5  # Rounds O by up to a whole ulp, beside the rounding of P.
        error, bar = float((g - w).abs().max()), factor * float((y - w).abs().max()) + 1e-5
        assert error <= bar, f"{name}: {error:.2e} > {bar:.2e} ({features}, {how})"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["fa", "hp", "hpm", "sr"])
def test_all_kinds_of_inputs(kind: str, mode: str) -> None:
    for causal in (False, True):
        compare(inputs(kind), Features(causal=causal), mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_with_every_feature(mode: str) -> None:
    for causal, window, softcap in itertools.product((False, True), (0, 17), (0.0, 8.0)):
        features = Features(causal=causal, window=window, softcap=softcap, scale=0.2)
        compare(inputs("randn", heads=4, kv_heads=2), features, mode=mode)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types(dtype: torch.dtype) -> None:
    compare(inputs("randn", dtype=dtype), Features(causal=True))


@pytest.mark.parametrize("heads", [1, 4, 8])
def test_key_heads_serve_groups_of_query_heads(heads: int) -> None:
    compare(inputs("randn", heads=heads, kv_heads=1), Features(causal=True))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 130), (70, 130), (130, 70), (33, 1)])
def test_any_lengths(lengths: tuple[int, int]) -> None:
    # Causal with more queries than keys: the first rows see nothing and are 0.
    compare(inputs("randn", q_len=lengths[0], k_len=lengths[1]), Features(causal=True))


@pytest.mark.parametrize("dim", [1, 8, 20, 128, 192])
def test_any_head_dim(dim: int) -> None:
    compare(inputs("randn", dim=dim), Features())


@pytest.mark.parametrize("mode", ["fa", "hp", "hpm"])
def test_centring_inside_is_exact(mode: str) -> None:
    given = inputs("randn", heads=4, kv_heads=2)
    for causal in (False, True):
        compare(given, Features(causal=causal), mode=mode, center=True)


def test_centring_inside_is_centring_outside() -> None:
    q, k, v, d_o = inputs("sink", dtype=torch.float32)

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bellwether.attention(q, k, v, causal=True, center=True)

    def outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bellwether.attention(q, bellwether.center_keys(k), v, causal=True)

    for a, b in zip(
        with_gradients(inside, (q, k, v), d_o), with_gradients(outside, (q, k, v), d_o)
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    _, _, dk, _ = with_gradients(inside, (q, k, v), d_o)
    assert float(dk.sum(dim=2).abs().max()) < 1e-4


def test_centring_reduces_the_key_gradient_bias_of_fa() -> None:
    q, k, v, d_o = inputs("sink")
    leaks = []
    for center in (False, True):

        def ours(q: Tensor, k: Tensor, v: Tensor, center: bool = center) -> Tensor:
            return bellwether.attention(q, k, v, mode="fa", center=center)

        _, _, dk, _ = with_gradients(ours, (q, k, v), d_o)
        leaks.append(float(dk.sum(dim=2).norm() / dk.norm(dim=-1).sum(dim=2).norm()))
    assert leaks[1] < leaks[0]


def packed(lengths: list[tuple[int, int]]) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    of_q, of_k = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in zip(*lengths)
    )
    given = inputs("randn", heads=4, kv_heads=2, q_len=int(of_q[-1]), k_len=int(of_k[-1]), batch=1)
    return list(given), (of_q, of_k)


@pytest.mark.parametrize("mode", ["fa", "hp", "hpm"])
@pytest.mark.parametrize("center", [False, True])
def test_packed_sequences_are_as_each_alone(mode: str, center: bool) -> None:
    (q, k, v, d_o), cu = packed([(0, 1), (1, 1), (127, 127), (129, 64), (3, 40)])
    how = {"causal": True, "mode": mode, "center": center, "enable_gqa": True}

    def together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bellwether.attention(q, k, v, cu_seqlens=cu, **how)

    o, dq, dk, dv = with_gradients(together, (q, k, v), d_o)
    for s in range(len(cu[0]) - 1):
        rows, keys = (slice(int(c[s]), int(c[s + 1])) for c in cu)

        def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return bellwether.attention(q, k, v, **how)

        mine = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        want = with_gradients(alone, mine, d_o[:, :, rows])
        got = (o[:, :, rows], dq[:, :, rows], dk[:, :, keys], dv[:, :, keys])
        for name, g, w in zip(NAMES, got, want):
            assert torch.equal(g, w), (s, name)


def test_one_cu_seqlens_serves_both() -> None:
    (q, k, v, _), (cu, _) = packed([(5, 5), (9, 9)])
    both = bellwether.attention(q, k, v, cu_seqlens=(cu, cu), enable_gqa=True)
    assert torch.equal(bellwether.attention(q, k, v, cu_seqlens=cu.long(), enable_gqa=True), both)


@pytest.mark.parametrize("mode", MODES)
def test_nan_stays_in_its_sequence_and_head(mode: str) -> None:
    (q, k, v, d_o), cu = packed([(40, 40), (30, 30), (50, 50)])
    broken = slice(40, 70)
    bad_q, bad_k, bad_v = q.clone(), k.clone(), v.clone()
    for t in (bad_q, bad_k, bad_v):
        t[:, :, 41:69] = float("nan")

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bellwether.attention(q, k, v, mode=mode, causal=True, enable_gqa=True, cu_seqlens=cu)

    torch.manual_seed(0)
    want = with_gradients(ours, (q, k, v), d_o)
    torch.manual_seed(0)
    got = with_gradients(ours, (bad_q, bad_k, bad_v), d_o)
    for name, g, w in zip(NAMES, got, want):
        assert torch.isnan(g[:, :, broken]).any(), name
        for sound in (slice(0, 40), slice(70, 120)):
            assert torch.equal(g[:, :, sound], w[:, :, sound]), name


def test_a_nan_query_is_not_hidden() -> None:
    q, k, v, _ = inputs("randn")
    q[0, 0, 5] = float("nan")
    assert torch.isnan(bellwether.attention(q, k, v)[0, 0, 5]).all()


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"window": 3}, {"softcap": 2.0}])
@pytest.mark.parametrize("mode", ["hp", "hpm"])
def test_gradients_are_the_derivative(features: dict[str, Any], mode: str) -> None:
    torch.manual_seed(3)
    q = torch.randn(1, 4, 6, 5, requires_grad=True)
    k, v = (torch.randn(1, 2, 7, 5, requires_grad=True) for _ in range(2))
    for center in (False, True) if "softcap" not in features else (False,):

        def ours(q: Tensor, k: Tensor, v: Tensor, center: bool = center) -> Tensor:
            return bellwether.attention(
                q, k, v, mode=mode, center=center, enable_gqa=True, **features
            )

        # In float32: a step of 1e-2 leaves 1e-4 of rounding and as much of curvature.
        assert torch.autograd.gradcheck(ours, (q, k, v), eps=1e-2, atol=2e-3, rtol=1e-2)


def test_the_residual_makes_the_output_unbiased() -> None:
    from bellwether._attention.attention_op import attention_forward

    q, k, v, _ = inputs("sink", heads=8, kv_heads=8, q_len=512, k_len=512, dim=64)
    settings = (*[None] * 6, "hp", 64**-0.5, False, 0, 0.0, False)
    o, o_lo, *_ = attention_forward(q, k, v, *settings)
    p = torch.softmax(q.double() @ k.double().mT * 64**-0.5, dim=-1)
    rounded = (o.double() - p @ v.double()).abs().mean()
    whole = (o.double() + o_lo.double() - p @ v.double()).abs().mean()
    # What is left is the rounding of P, which averages out over 512 keys.
    assert whole < 0.5 * rounded


def test_arguments_that_do_not_fit_are_refused() -> None:
    q, k, v, _ = inputs("randn", heads=4, kv_heads=2)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("enable_gqa", {}),
        ("mode is 'best'", {"mode": "best", "enable_gqa": True}),
        ("scale is 0.0", {"scale": 0.0, "enable_gqa": True}),
        ("window is -1", {"window": -1, "enable_gqa": True}),
        ("center=True with softcap", {"softcap": 1.0, "center": True, "enable_gqa": True}),
        ("batch is 2", {"cu_seqlens": torch.tensor([0, 96]), "enable_gqa": True}),
    ]
    for text, how in refused:
        with pytest.raises(ValueError, match=text):
            bellwether.attention(q, k, v, **how)
    with pytest.raises(ValueError, match="3 dimensions"):
        bellwether.attention(q[0], k, v)
    with pytest.raises(ValueError, match="do not fit"):
        bellwether.attention(q, k, v[:, :, 1:], enable_gqa=True)
    with pytest.raises(RuntimeError, match=r"cu_seqlens_q\[2\] is 95"):
        bellwether.attention(
            q[:1], k[:1], v[:1], cu_seqlens=torch.tensor([0, 9, 95]), enable_gqa=True
        )


def test_tensors_of_another_device_are_refused() -> None:
    q, k, v, _ = inputs("randn", heads=4, kv_heads=4, batch=1)
    cu = torch.tensor([0, 96])
    for name, tensors in (("k", (q, k.to("meta"), v)), ("v", (q, k, v.to("meta")))):
        with pytest.raises(ValueError, match=f"{name} is on meta, but must be on cpu"):
            bellwether.attention(*tensors)
    for packed in (cu.to("meta"), (cu, cu.to("meta"))):
        with pytest.raises(ValueError, match="cu_seqlens is on meta, but must be on cpu"):
            bellwether.attention(q, k, v, cu_seqlens=packed)

    class Calls(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(*tensors)

    model = Calls()
    with bellwether.stabilize(model), pytest.raises(RuntimeError):
        model(q, k.to("meta"), v)  # PyTorch's own word for it.


def test_numbers_beyond_the_kernels_are_refused() -> None:
    q, k, v, _ = inputs("randn", heads=4, kv_heads=4, batch=1)
    for window in (2**31, 2**32, 2**32 + 1):
        with pytest.raises(ValueError, match=f"window is {window}, but must be at most 2147483647"):
            bellwether.attention(q, k, v, causal=True, window=window)
    widest = bellwether.attention(q, k, v, causal=True, window=2**31 - 1)
    assert torch.equal(widest, bellwether.attention(q, k, v, causal=True))
    for operation in (
        lambda cu: bellwether.attention(q, k, v, cu_seqlens=cu),
        lambda cu: bellwether.center_keys(k, cu),
    ):
        with pytest.raises(ValueError, match=r"cu_seqlens is torch.float32, but must be"):
            operation(torch.tensor([0.0, 96.0]))
        for wrapping in ([0, 2**32 + 96], [2**32, 96], [0, 96 - 2**32]):
            with pytest.raises(RuntimeError, match="cu_seqlens"):
                operation(torch.tensor(wrapping))


def test_nothing_to_do_is_fine() -> None:
    for batch, q_len in ((0, 4), (2, 0)):
        q, k, v, d_o = inputs("randn", q_len=q_len, batch=batch)
        o, dq, dk, dv = with_gradients(bellwether.attention, (q, k, v), d_o)
        assert o.shape == dq.shape == q.shape
        assert not dk.any() and not dv.any()
