"""Goal: what is read of a call of PyTorch's flex_attention and varlen_attn, of transformers' way to
flex_attention and of our own attention is what they compute.
Method: the functions themselves, but varlen_attn, which needs a GPU (flash_stand_in.py), against
fp64 from what was read (read_calls.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flash_stand_in import two, varlen_attn
from read_calls import check
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from transformers.integrations.flex_attention import flex_attention_forward

from bellwether._adapters import (
    flash_attention,
    imported,
    own_attention,
    torch_flex,
    torch_varlen,
)
from bellwether._attention.composed import composed
from bellwether._attention.dispatch import attention
from bellwether._hook.functions import python_call
from bellwether._hook.layer import probe_mask
from bellwether._kernels.probe import Unsupported

LENGTHS = torch.tensor([20, 17, 5])
DOCUMENT = torch.tensor([0] * 7 + [1] * 2 + [2] * 11)
BIAS = torch.randn(4, 20, 20, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    yield


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors(kv_heads: int = 4, keys: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    return (random(3, 4, 20, 16), random(3, kv_heads, keys, 16),
            random(3, kv_heads, keys, 16) + 1)  # fmt: skip


def read(function: Any, *args: Any, **kwargs: Any) -> Any:
    return torch_flex.read(function, args, kwargs)


Mod = Callable[..., Tensor]
MASKS: dict[str, Mod] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 4),
    "padding": lambda b, h, q, k: k < LENGTHS[b],
    "documents": lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k),
    "each head its own": lambda b, h, q, k: q - k < 2 * h + 2,
}
CHANGES: dict[str, tuple[Mod, bool]] = {  # And whether it adds the same to each score.
    "alibi": (lambda s, b, h, q, k: s - (h + 1) * 0.1 * (q - k).abs(), True),
    "a learned bias": (lambda s, b, h, q, k: s + BIAS[h, q, k], True),
    "softcap": (lambda s, b, h, q, k: 2 * torch.tanh(s / 2), False),
    "hides": (lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), True),
}


@pytest.mark.parametrize("block", [4, 128])
@pytest.mark.parametrize("name", MASKS)
def test_block_masks(name: str, block: int) -> None:
    heads = 4 if "head" in name else None
    mask = flex.create_block_mask(MASKS[name], 3, heads, 20, 20, device="cpu", BLOCK_SIZE=block)
    for scale in (None, 0.5):
        call = check(read(flex.flex_attention, *tensors(), block_mask=mask, scale=scale))
        assert call.cancels


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_scores(name: str) -> None:
    change, adds = CHANGES[name]
    assert check(read(flex.flex_attention, *tensors(), change)).cancels == adds
    mask = flex.create_block_mask(MASKS["documents"], 3, None, 20, 20, device="cpu", BLOCK_SIZE=4)
    check(read(flex.flex_attention, *tensors(2), score_mod=change, block_mask=mask,
               enable_gqa=True))  # fmt: skip


def test_visible_keys_cost_no_more_than_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head is asked where all are alike, and none where a function hides no key."""
    mask = flex.create_block_mask(MASKS["padding"], 3, None, 20, 20, device="cpu", BLOCK_SIZE=4)
    q, k, v = tensors()
    call = read(flex.flex_attention, q, k, v, block_mask=mask)
    sampled = probe_mask.Sampled(call.scale, 4, 7)
    monkeypatch.setattr(probe_mask, "SCORES_MAX", 3 * 20 * 20)
    found = probe_mask.probe_mask(call.mask, q, k, sampled)
    assert found.visible is not None and found.visible.shape == (3, 1, 20)
    assert torch.equal(found.visible.sum(2)[:, 0], LENGTHS)
    each = flex.create_block_mask(MASKS["causal"], 3, 4, 20, 20, device="cpu", BLOCK_SIZE=4)
    call = read(flex.flex_attention, q, k, v, block_mask=each)
    with pytest.raises(Unsupported, match="1200 scores"):
        probe_mask.probe_mask(call.mask, q, k, sampled)
    call = flash_attention.read(
        two.flash_attn_func,
        (q.transpose(1, 2),) * 3,
        {"causal": True, "alibi_slopes": BIAS[:, 0, 0]},
    )
    monkeypatch.setattr(probe_mask, "SCORES_MAX", 0)
    found = probe_mask.probe_mask(call.mask, q, k, sampled)  # type: ignore[union-attr]
    assert found.visible is not None and bool(found.visible.all())


def test_blocks_alone_are_a_mask() -> None:
    count = torch.tensor([[[1, 2, 1, 0, 5]]], dtype=torch.int32)
    index = torch.tensor(
        [[[[2, 0, 0, 0, 0], [0, 4, 1, 1, 1], [1, 0, 0, 0, 0], [0] * 5, [0, 1, 2, 3, 4]]]],
        dtype=torch.int32,
    )
    for full in (False, True):
        lists = (count, index, count.flip(-1), index.flip(2)) if full else (count, index)
        mask = flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=4, seq_lengths=(20, 20))
        call = read(flex.flex_attention, *tensors(), block_mask=mask)
        rows = torch.arange(20).expand(3, 4, -1)
        shown = call.mask.function(rows, torch.zeros(3, 4, 20, 20)) == 0
        dense = mask.to_dense()[0, 0].bool().repeat_interleave(4, 0).repeat_interleave(4, 1)
        assert torch.equal(shown, dense.expand(3, 4, 20, 20))


def test_some_rows_of_some_sequences() -> None:
    mask = flex.create_block_mask(MASKS["padding"], 3, None, 20, 20, device="cpu", BLOCK_SIZE=4)
    call = read(flex.flex_attention, *tensors(), block_mask=mask)
    rows = torch.tensor([3, 0, 19]).expand(2, 4, -1)
    found = call.mask.function(rows, torch.zeros(2, 4, 3, 20))
    every = torch.arange(20).expand(3, 4, -1)
    whole = call.mask.function(every, torch.zeros(3, 4, 20, 20))
    assert torch.equal(found, whole[:2, :, [3, 0, 19]])


def test_no_mask_and_more_outputs() -> None:
    assert check(read(flex.flex_attention, *tensors())).mask.function is None
    check(read(flex.flex_attention, *tensors(), return_aux=flex.AuxRequest(lse=True)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kind", ["none", "block", "tensor"])
def test_transformers_way(kind: str, softcap: Any, bias: bool,
                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    place = "transformers.integrations.flex_attention.compile_friendly_flex_attention"

    def as_it_is(*args: Any, training: bool = False, **kwargs: Any) -> Any:
        return flex.flex_attention(*args, **kwargs)

    monkeypatch.setattr(place, as_it_is)
    given: Any = None
    if kind == "block":
        given = flex.create_block_mask(MASKS["padding"], 3, None, 20, 20, device="cpu")
    elif kind == "tensor":
        given = torch.zeros(3, 1, 20, 20).masked_fill(random(3, 1, 20, 20) > 1, -float("inf"))
    options = {"position_bias": BIAS.expand(3, -1, -1, -1)} if bias else {}
    args = nn.Identity(), *tensors(2), given
    options = {**options, "scaling": 0.3, "softcap": softcap, "dropout": 0.0}
    call = check(torch_flex.read_transformers(flex_attention_forward, args, options))
    assert call.softcap == (softcap or 0.0) and call.module is args[0]


def test_documents_laid_end_to_end() -> None:
    in_q, in_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 6, 19], [0, 8, 12, 30]))
    q, k, v = random(19, 4, 8), random(30, 2, 8), random(30, 2, 8)
    for options in ({}, {"window_size": (-1, 0)}, {"window_size": (3, 1), "scale": 0.2}):
        args = (q, k, v, in_q, in_k, 13, 18)
        check(torch_varlen.read(varlen_attn, args, {"enable_gqa": True, **options}))
    call = torch_varlen.read(varlen_attn, (q, k, v, in_q, in_k, 13, 18), {"seqused_k": in_k})
    assert call.unread == "seqused_k given"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window": 3}, {"window": 4}, {"softcap": 2.0},
     {"scale": 0.3, "mode": "sr"}],
    ids=str,
)  # fmt: skip
def test_our_own(options: dict[str, Any]) -> None:
    q, k, v = tensors(2, 30)
    call = own_attention.read(attention, (q, k, v), {"enable_gqa": True, **options})
    check(call)
    for seen in (
        {"mask": torch.rand(20, 30) > 0.2},
        {"mask": random(3, 4, 20, 30), "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"key_lengths": torch.tensor([30, 22, 29])},
        {
            "key_lengths": torch.tensor([[0, 30], [8, 30], [2, 28]]),
            "mask": torch.rand(3, 1, 1, 30) > 0.2,
        },
    ):
        check(own_attention.read(attention, (q, k, v), {"enable_gqa": True, **options, **seen}))
    offsets = torch.tensor([0, 3, 20]), torch.tensor([0, 10, 30])
    one = (t[:1] for t in (q, k, v))
    check(own_attention.read(attention, (*one,), {"enable_gqa": True, "cu_seqlens": offsets,
                                                  **options}))  # fmt: skip


def test_our_own_masks_and_sinks() -> None:
    q, k, v = tensors(2, 30)
    causal = torch.ones(20, 30, dtype=torch.bool).tril(10)
    hides = torch.zeros(20, 30).masked_fill(~causal, -float("inf"))
    lengths = torch.tensor([30, 17, 25])
    both = torch.stack([torch.tensor([0, 3, 5]), lengths], 1)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for options in (
        {"mask": causal}, {"mask": hides + random(20, 30)}, {"mask": random(3, 4, 20, 30)},
        {"key_lengths": lengths, "causal": True}, {"key_lengths": both, "window": 9},
        {"sinks": sinks, "causal": True}, {"sinks": sinks, "mask": causal, "key_lengths": both},
    ):  # fmt: skip
        check(own_attention.read(attention, (q, k, v), {"enable_gqa": True, **options}))


def test_attention_without_a_kernel() -> None:
    """composed(), with each of its parts."""
    q, k, v = tensors(2, 30)
    causal = torch.ones(20, 30, dtype=torch.bool).tril(10)
    for mask in (None, causal, random(1, 4, 20, 30).masked_fill(~causal, -float("inf"))):
        parts = {"scale": 0.3, "mask": mask}
        check(own_attention.read_composed(composed, (q, k, v), parts))
        parts |= {"softcap": 1.5, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}
        check(own_attention.read_composed(composed, (q, k, v), parts))


def test_a_row_that_sees_no_key_is_zero() -> None:
    q, k, v = tensors(2, 30)
    shown = torch.ones(20, 30, dtype=torch.bool).tril(-1)
    added = torch.zeros(20, 30).masked_fill(~shown, -float("inf"))
    by_bool, by_sum = (composed(q, k, v, scale=0.3, mask=mask) for mask in (shown, added))
    assert torch.equal(by_bool, by_sum) and not by_bool[:, :, 0].any() and by_bool[:, :, 1].any()


def test_a_compiled_function_is_seen_where_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imported, "_searches", {})
    compiled = torch.compile(flex.flex_attention, backend="eager")
    assert compiled in dict(torch_flex.functions())
    traced: list[str] = []

    def target(function: Any, args: Any, kwargs: Any) -> Any:
        assert function is compiled and not torch.compiler.is_compiling()
        call = check(read(function, *args, **kwargs), 1e-5)
        traced.append(call.kernel())
        return function(*args, **kwargs)

    python_call.divert(compiled, target)
    mask = flex.create_block_mask(MASKS["causal"], 3, None, 20, 20, device="cpu")
    try:
        python_call.see()
        compiled(*tensors(), block_mask=mask)
    finally:
        python_call.leave()
        python_call.restore(compiled)
    assert traced == ["flex_attention"]


def test_functions_are_found() -> None:
    found = [f for adapter in (torch_flex, own_attention) for f, _ in adapter.functions()]
    assert set(found) >= {flex.flex_attention, flex_attention_forward, attention, composed}
    assert functools.partial not in map(type, found)
