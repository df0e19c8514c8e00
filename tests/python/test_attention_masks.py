"""Goal: masks, key lengths, sinks and values of their own width give the softmax that they state,
with its gradients, by the kernels and by PyTorch alike.
Method: random combinations against the formula in double; padded batches against each sequence
alone; torch.library.opcheck and torch.compile.
"""

from __future__ import annotations

import logging
import random
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import bellwether
from bellwether._attention import dispatch
from bellwether._attention.attention_op import attention_backward, attention_forward
from bellwether._attention.center_keys import _center_keys

HIDDEN = (-1e4, -torch.inf, -3e38)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dispatch, "_said", set())
    caplog.set_level(logging.WARNING, "bellwether")
    return lambda: [r.message for r in caplog.records if r.name == "bellwether"]


def formula(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: int = 0,
    softcap: float = 0.0, mask: Optional[Tensor] = None, key_lengths: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None, **_: Any,
) -> Tensor:  # fmt: skip
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    row, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    diagonal = row + k.shape[2] - q.shape[2]
    seen = torch.ones(scores.shape, dtype=torch.bool)
    seen &= key <= diagonal if causal else True
    seen &= key > diagonal - window if window else True
    if key_lengths is not None:
        lengths = key_lengths if key_lengths.dim() == 2 else F.pad(key_lengths[:, None], (1, 0))
        seen &= (key >= lengths[:, :1, None, None]) & (key < lengths[:, 1:, None, None])
    if mask is not None and mask.dtype == torch.bool:
        seen &= mask
    elif mask is not None:
        seen &= mask.detach() > -1e4
        scores = scores + mask
    scores = scores.masked_fill(~seen, -1e300)
    logits = torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks
    column = logits.double().view(-1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return weights.masked_fill(~seen, 0.0) @ v


def drawn(
    seed: int, lengths: tuple[int, ...] = (1, 9, 40), dims: tuple[int, ...] = (8, 20)
) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v, d_o in double and the options of a call."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv_heads, group = (
        draw.choice((1, 2)),
        draw.choice((1, 2)),
        draw.choice((1, 3)),
    )
    q_len, k_len, dim = (
        draw.choice(lengths),
        draw.choice((1, 33, lengths[-1])),
        draw.choice(dims),
    )
    v_dim = draw.choice((dim, 8, 24))
    heads = kv_heads * group
    shapes = ((heads, q_len, dim), (kv_heads, k_len, dim), (kv_heads, k_len, v_dim))
    tensors = [torch.randn(batch, *s, dtype=torch.double) for s in (*shapes, (heads, q_len, v_dim))]
    how: dict[str, Any] = {
        "causal": draw.random() < 0.5,
        "window": draw.choice((0, 0, 7)),
        "softcap": draw.choice((0.0, 0.0, 2.0)),
        "mode": draw.choice(("fa", "hp", "hpm")),
    }
    kind = draw.choice((None, torch.bool, torch.float32, torch.bfloat16, torch.float64))
    if kind is not None:
        shape = [draw.choice((1, n)) for n in (batch, heads, q_len)] + [k_len]
        hides = torch.rand(shape) < 0.3
        mask = ~hides if kind == torch.bool else torch.randn(shape)
        if kind != torch.bool:
            mask = mask.to(kind).masked_fill(hides, draw.choice(HIDDEN))
        how["mask"] = mask[0] if shape[0] == 1 and draw.random() < 0.5 else mask
    if draw.random() < 0.5:
        how["key_lengths"] = torch.randint(0, k_len + 1, (batch,))
        if draw.random() < 0.5:
            how["key_lengths"] = torch.sort(torch.randint(0, k_len + 1, (batch, 2)))[0].int()
    if draw.random() < 0.5:
        how["sinks"] = torch.randn(heads, dtype=torch.double)
    return tensors, how


def run(function: Any, tensors: list[Tensor], how: dict[str, Any], dtype: torch.dtype) -> Any:
    q, k, v, d_o = (t.to(dtype) for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if "sinks" in how:
        how = {**how, "sinks": how["sinks"].to(dtype).requires_grad_()}
        leaves.append(how["sinks"])
    if how.get("mask") is not None and how["mask"].requires_grad:
        leaves.append(how["mask"])
    o = function(q, k, v, enable_gqa=True, **how)
    gradients = torch.autograd.grad(o, leaves, d_o, allow_unused=True)
    return [o.detach(), *(torch.zeros(()) if g is None else g for g in gradients)]


def assert_close(got: list[Tensor], want: list[Tensor], bar: float) -> None:
    assert len(got) == len(want)
    for number, (g, w) in enumerate(zip(got, want)):
        error = (g.double() - w.double()).abs().max() if g.numel() else torch.zeros(())
        assert error <= bar * max(1.0, float(w.abs().max())), (number, float(error))


@pytest.mark.parametrize("seed", range(60))
def test_random_combinations_equal_the_formula(seed: int, messages: Any) -> None:
    tensors, how = drawn(seed)
    want = run(formula, tensors, how, torch.double)
    assert_close(run(bellwether.attention, tensors, how, torch.float32), want, 5e-5)
    assert messages() == []
    # PyTorch computes this.
    assert_close(run(bellwether.attention, tensors, how, torch.double), want, 5e-5)
    (said,) = messages()
    assert said.startswith("attention is PyTorch's own, not stabilized: q is torch.float64 on cpu")


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_learned_bias_has_its_gradient(softcap: float, with_sinks: bool, messages: Any) -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(2, 4, 12, 8, dtype=torch.double) for _ in range(4)]
    bias = torch.randn(1, 4, 12, 12).masked_fill(torch.rand(1, 1, 12, 12) < 0.2, -torch.inf)
    how = {"mask": bias.requires_grad_(), "causal": True, "softcap": softcap}
    if with_sinks:
        how["sinks"] = torch.randn(4)
    want = run(formula, tensors, how, torch.double)
    for _ in range(2):
        assert_close(run(bellwether.attention, tensors, how, torch.float32), want, 5e-5)
    assert messages() == [f"attention is PyTorch's own, not stabilized: {dispatch.MASK_TRAINS}"]
    with torch.no_grad():
        bellwether.attention(*(t.float() for t in tensors[:3]), **how)
    assert len(messages()) == 1
    with pytest.raises(RuntimeError, match="the mask requires a gradient"):
        forward(*(t.float().requires_grad_() for t in tensors[:3]), None, None, bias)


def forward(q: Any, k: Any, v: Any, *seen: Any, mode: str = "hp") -> Any:
    seen = (*seen, *[None] * (5 - len(seen)))
    return attention_forward(q, k, v, *seen, None, mode, 0.3, True, 0, 0.0, False)


@pytest.mark.parametrize("mode", ["fa", "hp", "hpm"])
def test_opcheck_with_every_part(mode: str) -> None:
    q, k, v, d_o = (torch.randn(2, h, 9, d) for h, d in ((4, 8), (2, 8), (2, 16), (4, 16)))
    for turned in (False, True):
        q, d_o = (t.transpose(1, 2).contiguous().transpose(1, 2) if turned else t for t in (q, d_o))
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        sinks = torch.randn(4).requires_grad_()
        mask = torch.rand(1, 4, 9, 9) > 0.3
        seen = (
            None,
            None,
            mask,
            torch.tensor([[0, 7], [2, 9]], dtype=torch.int32),
            sinks,
        )
        settings = (mode, 0.3, True, 0, 0.0, False)
        torch.library.opcheck(attention_forward, (*leaves, *seen, None, *settings))
        saved = forward(*leaves, *seen, mode=mode)
        assert saved[0].transpose(1, 2).is_contiguous() == turned
        saved, seen = ([None if t is None else t.detach() for t in x] for x in (saved, seen))
        torch.library.opcheck(attention_backward, (d_o, q, k, v, *saved, *seen, *settings))
    torch.library.opcheck(_center_keys, (leaves[1], None, torch.rand(2, 1, 9) > 0.3))


def test_compiles_whole_with_changing_lengths() -> None:
    torch._dynamo.reset()

    def function(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return bellwether.attention(q, k, v, causal=True, **how)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (12, 20, 33):
        tensors = [torch.randn(2, 4, tokens, d) for d in (8, 8, 16, 16)]
        how = {
            "mask": torch.randn(2, 1, tokens, tokens),
            "key_lengths": torch.tensor([tokens, tokens - 3]),
            "sinks": torch.randn(4),
        }
        got, want = (
            run(lambda *a, enable_gqa, f=f, **h: f(*a, **h), tensors, how, torch.float32)
            for f in (compiled, function)
        )
        for g, w in zip(got, want):
            assert torch.equal(g, w)


@pytest.mark.parametrize("mode", ["fa", "hp", "hpm"])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("by_mask", [False, True])
def test_a_padded_sequence_is_as_alone(mode: str, center: bool, left: bool, by_mask: bool) -> None:
    torch.manual_seed(2)
    lengths = torch.tensor([20, 13])
    tensors = [torch.randn(2, h, 20, 8) for h in (4, 2, 2, 4)]
    bounds = torch.stack((20 - lengths, torch.full((2,), 20)), 1) if left else lengths
    key = torch.arange(20)
    shown = key >= 20 - lengths[:, None] if left else key < lengths[:, None]
    seen = {"mask": shown[:, None, None]} if by_mask else {"key_lengths": bounds}
    how = {"causal": True, "mode": mode, "center": center}
    tensors[3][1, :, ~shown[1]] = 0  # No loss comes from padding.
    together = run(bellwether.attention, tensors, {**how, **seen}, torch.bfloat16)
    for i in range(2):
        alone = run(
            bellwether.attention,
            [t[i : i + 1, :, shown[i]] for t in tensors],
            how,
            torch.bfloat16,
        )
        for number, (t, a) in enumerate(zip(together, alone)):
            # Rows are grouped otherwise: sums differ in their last bit, before they are rounded.
            torch.testing.assert_close(
                t[i : i + 1, :, shown[i]], a, msg=lambda m, n=number: f"{n}: {m}"
            )
            if number > 1:  # Keys that are padding.
                assert not t[i, :, ~shown[i]].any()


def test_centring_falls_back_over_the_keys_that_are_seen() -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, h, 12, 8) for h in (4, 2, 2))
    mask = torch.rand(2, 4, 12, 12) > 0.3
    mask[..., 9:] = False
    how: dict[str, Any] = {"mask": mask, "enable_gqa": True}
    want = bellwether.attention(q, k, v, **how)
    k[:, :, 9:] = 1e6  # Would spoil the mean of all.
    for dtype in (torch.float32, torch.float64):
        given = (t.to(dtype) for t in (q, k, v))
        got = bellwether.attention(*given, center=True, **how)
        torch.testing.assert_close(got.float(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_center_keys_takes_the_mean_of_visible_keys(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    k = (torch.randn(2, 3, 11, 5) + 4).to(dtype)
    visible = torch.rand(2, 1, 11) > 0.3
    shown = visible[..., None].double()
    mean = (k.double() * shown).sum(2, keepdim=True) / shown.sum(2, keepdim=True)
    want = torch.where(shown > 0, k.double() - mean, k.double())
    got = bellwether.center_keys(k, visible=visible)
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)
    leaf = torch.randn(2, 3, 11, 5, dtype=torch.double).requires_grad_()
    assert torch.autograd.gradcheck(lambda k: bellwether.center_keys(k, visible=visible), leaf)
    leaf = leaf.detach().float().requires_grad_()
    gradient = torch.randn_like(leaf)
    bellwether.center_keys(leaf, visible=visible).backward(gradient)
    assert torch.equal(leaf.grad, bellwether.center_keys(gradient, visible=visible))


def test_arguments_that_do_not_fit_are_refused() -> None:
    q = torch.randn(2, 4, 6, 8)
    cu = torch.tensor([0, 6])
    cases: list[tuple[str, dict[str, Any]]] = [
        ("mask is torch.int64", {"mask": torch.ones(6, 6, dtype=torch.int64)}),
        (
            r"mask is \[6, 5\], but must broadcast to \[2, 4, 6, 6\]",
            {"mask": torch.ones(6, 5)},
        ),
        ("mask is on meta", {"mask": torch.ones(6, 6, device="meta")}),
        (
            r"key_lengths is \[3\], but must be \[2\] or \[2, 2\]",
            {"key_lengths": torch.ones(3).int()},
        ),
        ("key_lengths is torch.float32", {"key_lengths": torch.ones(2)}),
        (
            r"sinks is torch.float32 \[3\], but must be floating \[4\]",
            {"sinks": torch.ones(3)},
        ),
        ("center=True with sinks", {"sinks": torch.ones(4), "center": True}),
    ]
    for message, how in cases:
        with pytest.raises(ValueError, match=message):
            bellwether.attention(q, q, q, **how)
    for name, given in (
        ("mask", torch.ones(6, 6)),
        ("key_lengths", torch.ones(1).int()),
    ):
        with pytest.raises(ValueError, match=f"{name} is given, but must be None with cu_seqlens"):
            bellwether.attention(q[:1], q[:1], q[:1], cu_seqlens=cu, **{name: given})
    with pytest.raises(ValueError, match="visible is given, but must be None with cu_seqlens"):
        bellwether.center_keys(q[:1], cu, visible=torch.ones(6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"visible is torch\.float32"):
        bellwether.center_keys(q, visible=torch.ones(6))
