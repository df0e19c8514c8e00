"""Goal: what is read of a call of FlashAttention's functions is what they compute, in all versions;
what is not understood is said.
Method: stand-ins with the packages' signatures, by PyTorch (flash_stand_in.py), against fp64 from
what was read (read_calls.py).
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from flash_stand_in import four, three, two
from read_calls import check
from torch import Tensor

from bellwether._adapters import flash_attention
from bellwether._hook.calls.call import AttentionCall

DOCUMENTS = torch.tensor([0, 5, 6, 19], dtype=torch.int32)
MORE_KEYS = torch.tensor([0, 8, 12, 30], dtype=torch.int32)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def dense(heads: int = 4, kv_heads: int = 2, keys: int = 9) -> tuple[Tensor, ...]:
    return random(3, 7, heads, 8), random(3, keys, kv_heads, 8), random(3, keys, kv_heads, 8) + 1


def laid_end_to_end(offsets: Tensor = DOCUMENTS) -> tuple[Tensor, ...]:
    keys = int(offsets[-1])
    return random(19, 4, 8), random(keys, 2, 8), random(keys, 2, 8) + 1


def read(function: Any, *args: Any, **kwargs: Any) -> Any:
    return flash_attention.read(function, args, kwargs)


ALL = (
    {},
    {"causal": True},
    {"window_size": (3, 0)},
    {"window_size": (2, 1), "softmax_scale": 0.4},
    {"causal": True, "window_size": (2, -1), "softcap": 1.5},
)  # fmt: skip


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("module", [two, three, four], ids=["2", "3", "4"])
def test_dense(module: Any, options: dict[str, Any]) -> None:
    call = check(read(module.flash_attn_func, *dense(), **options))
    assert not call.packed and call.dropout == 0.0
    positions = check(read(module.flash_attn_func, *dense(), **{"deterministic": True, **options}))
    assert positions.softcap == options.get("softcap", 0.0)


@pytest.mark.parametrize("options", ALL, ids=str)
def test_documents(options: dict[str, Any]) -> None:
    for offsets in (DOCUMENTS, MORE_KEYS):
        lengths = (DOCUMENTS, offsets, 13, 18)
        check(read(two.flash_attn_varlen_func, *laid_end_to_end(offsets), *lengths, **options))
        named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths))
        check(read(four.flash_attn_varlen_func, *laid_end_to_end(offsets), **named, **options))


def test_tokens_behind_the_last_document() -> None:
    q, k, v = laid_end_to_end()
    tail = (torch.cat([t, t[:4]]) for t in (q, k, v))
    check(read(two.flash_attn_varlen_func, *tail, DOCUMENTS, DOCUMENTS, 13, 13, causal=True))


@pytest.mark.parametrize("each", [False, True])
def test_alibi(each: bool) -> None:
    slopes = torch.rand(3, 4) if each else torch.rand(4)
    check(read(two.flash_attn_func, *dense(), causal=True, alibi_slopes=slopes))
    if not each:
        lengths = (DOCUMENTS, MORE_KEYS, 13, 18)
        tensors = laid_end_to_end(MORE_KEYS)
        check(read(two.flash_attn_varlen_func, *tensors, *lengths, alibi_slopes=slopes))


def test_sinks_and_chunks() -> None:
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    call = check(read(four.flash_attn_func, *dense(), causal=True, learnable_sink=sink))
    assert call.sinks is sink
    q, k, v = dense(keys=7)
    check(read(three.flash_attn_func, q, k, v, causal=True, attention_chunk=3))


def test_packed_tensors() -> None:
    qkv, kv = random(3, 7, 3, 4, 8), random(3, 9, 2, 2, 8)
    heads_apart = random(3, 7, 4 + 2 + 2, 8)
    laid, laid_kv = random(19, 3, 4, 8), random(30, 2, 2, 8)
    q = random(3, 7, 4, 8)
    calls = (
        read(two.flash_attn_qkvpacked_func, qkv, causal=True),
        read(two.flash_attn_kvpacked_func, q, kv, 0.0, 0.3, causal=True),
        read(two.flash_attn_varlen_qkvpacked_func, laid, DOCUMENTS, 13, causal=True),
        read(
            two.flash_attn_varlen_kvpacked_func, random(19, 4, 8), laid_kv, DOCUMENTS, MORE_KEYS,
            13, 18, window_size=(3, 3),
        ),
        read(three.flash_attn_qkvpacked_func, qkv, causal=True),
        read(three.flash_attn_qkvpacked_func, heads_apart, causal=True, num_heads_q=4),
    )  # fmt: skip
    for call in calls:
        assert isinstance(call, AttentionCall) and call.packed and call.k is call.v
        check(call)


def test_a_packed_gradient_is_picked_as_the_keys_are() -> None:
    qkv = random(2, 5, 3, 4, 8).requires_grad_()
    call = read(two.flash_attn_qkvpacked_func, qkv)
    call.run(qkv, qkv, qkv).square().sum().backward()
    assert qkv.grad is not None
    assert torch.equal(call.k_view(qkv.grad), qkv.grad[:, :, 1].transpose(1, 2))


def test_a_second_output_is_left_alone() -> None:
    check(read(two.flash_attn_func, *dense(), return_attn_probs=True))
    check(read(three.flash_attn_func, *dense(), return_attn_probs=True))


def test_dropout_is_told() -> None:
    assert read(two.flash_attn_func, *dense(), 0.25).dropout == 0.25


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (four.flash_attn_func, {"score_mod": print}, "score_mod given"),
        (four.flash_attn_func, {"mask_mod": print}, "mask_mod given"),
        (four.flash_attn_func, {"aux_tensors": [1]}, "aux_tensors given"),
        (three.flash_attn_func, {"q_descale": torch.ones(1)}, "q_descale given"),
        (three.flash_attn_func, {"qv": torch.ones(1)}, "qv given"),
        (two.flash_attn_func, {"softmax_scale": 0.0}, "scale is no number above 0"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_unknown_parts_are_named(function: Any, options: dict[str, Any], words: str) -> None:
    call = read(function, *dense(), **options)
    assert isinstance(call, AttentionCall) and call.unread is not None and words in call.unread


def test_wrong_arguments_are_left_to_the_function() -> None:
    assert read(two.flash_attn_func).__class__ is str
    assert read(two.flash_attn_func, *dense(), nonsense=1) is None
    assert read(two.flash_attn_func, *dense(), q=1) is None


def test_functions_of_imported_packages_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(flash_attention.functions())
    monkeypatch.setitem(sys.modules, "flash_attn", two)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", four)
    found = {function for function, _ in flash_attention.functions()}
    assert two.flash_attn_varlen_qkvpacked_func in found and four.flash_attn_func in found
    assert len(found) == 8
