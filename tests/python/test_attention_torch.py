"""Goal: the attention behaves as an operator of PyTorch's own: compiled, checkpointed, under
autocast, with any strides; and where it cannot run, PyTorch's runs and one message says why.
Method: the same call with and without each, bit by bit; torch.library.opcheck.
"""

from __future__ import annotations

import logging
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether._attention import dispatch
from bellwether._attention.attention_op import attention_backward, attention_forward
from bellwether._attention.center_keys import _center_keys

from attention_reference import Features, allowed, inputs, with_gradients

MODES = ("fa", "hp", "hpm", "paper", "sr")
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(mode: str, **how: Any) -> Function:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return bellwether.attention(q, k, v, causal=True, mode=mode, **how)

    return function


def assert_same(one: Function, other: Function, given: tuple[Tensor, ...]) -> None:
    *qkv, d_o = given
    torch.manual_seed(5)
    a = with_gradients(one, tuple(qkv), d_o)
    torch.manual_seed(5)
    b = with_gradients(other, tuple(qkv), d_o)
    for name, x, y in zip(("o", "dq", "dk", "dv"), a, b):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode: str) -> None:
    q, k, v, d_o = inputs("randn", heads=4, kv_heads=2, q_len=20, k_len=20)
    seed = torch.tensor(7) if mode == "sr" else None
    settings = (mode, 0.2, True, 3, 0.0, True)
    for turned in (False, True):
        leaves = tuple(
            (t.transpose(1, 2).contiguous().transpose(1, 2) if turned else t)
            .detach()
            .requires_grad_()
            for t in (q, k, v)
        )
        torch.library.opcheck(attention_forward, (*leaves, *[None] * 5, seed, *settings))
        saved = attention_forward(q, k, v, *[None] * 5, seed, *settings)
        torch.library.opcheck(attention_backward, (d_o, q, k, v, *saved, *[None] * 5, *settings))
        torch.library.opcheck(_center_keys, (leaves[1], None, None))


@pytest.mark.parametrize("mode", MODES)
def test_compiles_whole(mode: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(causal(mode, center=True), fullgraph=True, backend="aot_eager")
    if mode == "sr":  # The compiled random numbers are others: the same call twice must agree.
        assert_same(compiled, compiled, inputs("randn"))
    else:
        assert_same(compiled, causal(mode, center=True), inputs("randn"))


def test_compiles_with_changing_lengths_and_packed_sequences() -> None:
    torch._dynamo.reset()

    def function(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return bellwether.attention(q, k, v, causal=True, cu_seqlens=cu, window=9, softcap=3.0)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (12, 40, 77):
        given = inputs("randn", q_len=tokens, k_len=tokens, batch=1)
        cu = torch.tensor([0, 5, tokens], dtype=torch.int32)
        assert_same(
            lambda q, k, v, cu=cu: compiled(q, k, v, cu),
            lambda q, k, v, cu=cu: function(q, k, v, cu),
            given,
        )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_checkpointing_changes_nothing(mode: str, reentrant: bool) -> None:
    function = causal(mode)

    def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, q, k, v, use_reentrant=reentrant)
        return result

    assert_same(checkpointed, function, inputs("randn"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_for_sdpa(dtype: torch.dtype) -> None:
    q, k, v, d_o = inputs("randn", dtype=torch.float32)

    def under(function: Function) -> Function:
        def wrapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                return function(q, k, v)

        return wrapped

    def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal("hp")(q.to(dtype), k.to(dtype), v.to(dtype))

    ours = under(causal("hp"))
    assert ours(q, k, v).dtype == under(F.scaled_dot_product_attention)(q, k, v).dtype == dtype
    assert_same(ours, by_hand, (q, k, v, d_o))
    torch._dynamo.reset()
    assert_same(torch.compile(ours, fullgraph=True, backend="aot_eager"), ours, (q, k, v, d_o))
    with torch.autocast("cpu", dtype, enabled=False):
        assert causal("hp")(q, k, v).dtype == torch.float32


def layouts(t: Tensor) -> list[Tensor]:
    """The same numbers in other memory; in the last two the elements of a row are apart."""
    wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    beside, apart = wide[..., : t.shape[-1]], wide.clone()[..., ::2]
    beside.copy_(t), apart.copy_(t)
    return [t.transpose(1, 2).contiguous().transpose(1, 2), beside, apart, t.mT.contiguous().mT]


def test_strides_do_not_matter() -> None:
    given = inputs("randn", heads=4, kv_heads=4)
    function = causal("hpm")
    want = with_gradients(function, given[:3], given[3])
    for q, k, v, d_o in zip(*(layouts(t) for t in given)):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        o = function(*leaves)
        o.backward(d_o)
        for x, y in zip((o, *(leaf.grad for leaf in leaves)), want):
            assert x is not None and torch.equal(x.double(), y)
    assert function(*(layouts(t)[0] for t in given[:3])).transpose(1, 2).is_contiguous()


def test_a_gradient_that_is_one_number_everywhere() -> None:
    q, k, v, _ = inputs("randn")
    leaf = q.clone().requires_grad_()
    causal("hp")(leaf, k, v).sum().backward()  # Its gradient has strides of 0.
    want, *_ = with_gradients(causal("hp"), (q, k, v), torch.ones_like(q))[1:]
    assert leaf.grad is not None and torch.equal(leaf.grad.double(), want)


def test_sr_repeats_with_the_seed_only() -> None:
    q, k, v, _ = inputs("randn")
    torch.manual_seed(1)
    first, second = causal("sr")(q, k, v), causal("sr")(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(causal("sr")(q, k, v), first) and not torch.equal(first, second)
    before = torch.get_rng_state()
    causal("hp")(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)  # The others leave the generator alone.


def test_threads_do_not_matter() -> None:
    given = inputs("randn", heads=8, kv_heads=2, q_len=200, k_len=200, dim=64)
    function = causal("hp", enable_gqa=True)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(with_gradients(function, given[:3], given[3]))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


# ---- where no kernel serves the call ----


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dispatch, "_said", set())
    caplog.set_level(logging.WARNING, "bellwether")
    return lambda: [r.message for r in caplog.records if r.name == "bellwether"]


@pytest.mark.parametrize("compiled", [False, True])
def test_falls_back_to_pytorch_and_says_so_once(messages: Any, compiled: bool) -> None:
    q, k, v, _ = (t.double() for t in inputs("randn", heads=4, kv_heads=2, k_len=130))
    torch._dynamo.reset()
    for features in (Features(), Features(causal=True), Features(window=9, causal=True)):

        def function(q: Tensor, k: Tensor, v: Tensor, features: Features = features) -> Tensor:
            return bellwether.attention(
                q, k, v, causal=features.causal, window=features.window, enable_gqa=True
            )

        run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
        mask = allowed(q.shape[2], k.shape[2], features)
        want = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        torch.testing.assert_close(run(q, k, v), want)
    (said,) = messages()
    assert said.startswith("attention is PyTorch's own, not stabilized: q is torch.float64 on cpu")


def test_packed_sequences_fall_back_too(messages: Any) -> None:
    cu_q = torch.tensor([0, 30, 30, 96], dtype=torch.int32)
    cu_k = torch.tensor([0, 50, 60, 130], dtype=torch.int32)
    given = inputs("randn", k_len=130, batch=1, dtype=torch.float32)[:3]
    for how in ({}, {"causal": True}, {"causal": True, "window": 20}, {"softcap": 2.0}):
        want = bellwether.attention(*given, cu_seqlens=(cu_q, cu_k), **how)
        got = bellwether.attention(*(t.double() for t in given), cu_seqlens=(cu_q, cu_k), **how)
        torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=1e-5)
    assert len(messages()) == 1


def test_softcaps_fall_back_with_their_masks(messages: Any) -> None:
    given = inputs("randn", dtype=torch.float32)[:3]
    for how in ({}, {"causal": True}, {"causal": True, "window": 20}):
        want = bellwether.attention(*given, softcap=1.0, **how)
        got = bellwether.attention(*(t.double() for t in given), softcap=1.0, **how)
        torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=1e-5)
    assert len(messages()) == 1


def test_a_missing_library_is_a_reason(messages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bellwether._attention import center_keys as center_keys_module
    from bellwether._native import c_api

    def missing() -> Any:
        raise c_api.LibraryError("libbellwether_kernels.so was not found")

    monkeypatch.setattr(c_api, "kernels", missing)
    center_keys_module._warn_once.cache_clear()
    q, k, v, _ = inputs("randn")
    want = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(bellwether.attention(q, k, v), want)
    assert bellwether.attention(q, k, v, center=True).shape == q.shape
    attention, keys = messages()
    assert attention.startswith("attention is PyTorch's own") and "was not found" in attention
    assert keys.startswith("keys are centred by PyTorch's") and "was not found" in keys
