"""Goal: what is read of a call of Megatron-Core's, Transformer Engine's and xformers' attention is
what it computes; what is not understood is said.
Method: stand-ins with the packages' signatures, by PyTorch (package_stand_ins.py), against fp64
from what was read (read_calls.py).
"""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import package_stand_ins as packages
import pytest
import torch
from package_stand_ins import AttnMaskType, EngineAttention, MegatronAttention, SeqLenInfo
from read_calls import check
from torch import Tensor, nn

import bellwether.megatron
from bellwether import _adapters
from bellwether._adapters import megatron, transformer_engine, xformers

LENGTHS = torch.tensor([7, 4, 6])
PADDING = (torch.arange(7) >= LENGTHS[:, None])[:, None, None]  # [batch, 1, 1, tokens]
DOCUMENTS, MORE = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 6, 19], [0, 8, 12, 30]))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors(order: str, keys: int = 7, kv_heads: int = 2) -> tuple[Tensor, ...]:
    made = random(3, 7, 4, 8), random(3, keys, kv_heads, 8), random(3, keys, kv_heads, 8) + 1
    return made if order == "bshd" else tuple(t.transpose(0, 1).contiguous() for t in made)


# ---- Megatron-Core ----


def of_megatron(module: MegatronAttention, mask: Any = None, **options: Any) -> Any:
    args = (module, *tensors("sbhd"), mask)
    return megatron.read(MegatronAttention.forward, args, options)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", list(AttnMaskType))
@pytest.mark.parametrize(
    "options",
    [{}, {"window": (2, 0)}, {"softmax_type": "learnable"}, {"softmax_type": "off-by-one"},
     {"layer_scaling": True, "layer_number": 3}],
    ids=str,
)  # fmt: skip
def test_megatron(options: dict[str, Any], kind: AttnMaskType, fused: bool, mask: bool) -> None:
    documents = torch.ones(7, 7, dtype=torch.bool).triu(1)
    documents[4:, :4] = True
    module = MegatronAttention(kind, fused=fused, **options)
    call = check(of_megatron(module, documents[None, None] if mask else None))
    assert abs(call.scale - 8**-0.5) < 1e-9 and call.module is module
    assert (call.sinks is None) == ("softmax_type" not in options)


def test_megatron_dropout_counts_in_training() -> None:
    module = MegatronAttention(dropout=0.2)
    assert of_megatron(module).dropout == 0.2
    assert of_megatron(module.eval()).dropout == 0.0


def test_unknown_parts_of_megatron_are_named() -> None:
    module = MegatronAttention(AttnMaskType.padding)
    assert "boolean" in of_megatron(module, torch.zeros(7, 7)).unread
    assert of_megatron(module, attention_bias=random(1)).unread == "attention_bias given"
    del module.softmax_scale
    assert "not known here" in of_megatron(module)


# ---- Transformer Engine ----


def of_engine(module: EngineAttention, *args: Any, **options: Any) -> Any:
    return transformer_engine.read(EngineAttention.forward, (module, *args), options)


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
@pytest.mark.parametrize("kind", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("keys", [7, 9])
def test_engine(order: str, kind: str, keys: int) -> None:
    module = EngineAttention(4, 8, qkv_format=order, attn_mask_type=kind)
    check(of_engine(module, *tensors(order, keys)))
    module = EngineAttention(4, 8, qkv_format="sbhd", softmax_scale=0.2)
    check(of_engine(module, *tensors(order, keys), qkv_format=order, attn_mask_type=kind))


@pytest.mark.parametrize("kind", ["no_mask", "causal"])
@pytest.mark.parametrize("window", [(2, 0), (3, 2), (-1, 0), (-1, -1)])
def test_engine_windows(kind: str, window: tuple[int, int]) -> None:
    module = EngineAttention(4, 8, qkv_format="bshd", attn_mask_type=kind, window_size=window)
    check(of_engine(module, *tensors("bshd")))
    module = EngineAttention(4, 8, qkv_format="bshd")
    check(of_engine(module, *tensors("bshd"), attn_mask_type=kind, window_size=window))


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding,causal"])
def test_engine_padding(kind: str) -> None:
    module = EngineAttention(4, 8, qkv_format="bshd", attn_mask_type=kind)
    q, k, v = tensors("bshd")
    check(of_engine(module, q, k, v, attention_mask=PADDING))
    check(of_engine(module, q, k, v, attention_mask=(PADDING, PADDING)))
    ends = torch.cat([torch.zeros(1), LENGTHS.cumsum(0)]).int()
    check(of_engine(module, q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends))


def test_engine_arbitrary_masks() -> None:
    module = EngineAttention(4, 8, qkv_format="bshd", attn_mask_type="arbitrary")
    check(of_engine(module, *tensors("bshd"), attention_mask=random(3, 1, 7, 7) > 0.8))


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_engine_documents(kind: str) -> None:
    module = EngineAttention(4, 8, qkv_format="thd", attn_mask_type=kind)
    laid = random(19, 4, 8), random(30, 2, 8), random(30, 2, 8)
    check(of_engine(module, *laid, cu_seqlens_q=DOCUMENTS, cu_seqlens_kv=MORE))
    padded = of_engine(module, *laid, cu_seqlens_q=DOCUMENTS, cu_seqlens_kv=MORE,
                       cu_seqlens_q_padded=DOCUMENTS + 1)  # fmt: skip
    assert padded.unread == "padding between documents"


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_engine_sinks(softmax_type: str) -> None:
    module = EngineAttention(4, 8, qkv_format="bshd", softmax_type=softmax_type)
    assert check(of_engine(module, *tensors("bshd"))).sinks is not None


def test_engine_biases() -> None:
    module = EngineAttention(4, 8, qkv_format="bshd")
    q, k, v = tensors("bshd")
    bias = random(1, 4, 7, 7)
    check(of_engine(module, q, k, v, core_attention_bias_type="post_scale_bias",
                    core_attention_bias=bias))  # fmt: skip
    check(of_engine(module, q, k, v, core_attention_bias_type="alibi",
                    alibi_slopes=torch.rand(4)))  # fmt: skip
    call = of_engine(module, q, k, v, core_attention_bias_type="pre_scale_bias",
                     core_attention_bias=bias)  # fmt: skip
    assert call.unread == "core_attention_bias_type pre_scale_bias"


def test_engine_is_left_out_where_keys_are_elsewhere() -> None:
    module = EngineAttention(4, 8, qkv_format="bshd")
    module.cp_group = SimpleNamespace(size=lambda: 2)  # type: ignore[assignment]
    assert "context parallel" in of_engine(module, *tensors("bshd"))
    module.cp_group = SimpleNamespace(size=lambda: 1)  # type: ignore[assignment]
    check(of_engine(module, *tensors("bshd")))
    module.fp8 = True
    assert of_engine(module, *tensors("bshd")).unread == "q, k and v in 8 bits"


# ---- xformers ----


def of_xformers(*args: Any, **options: Any) -> Any:
    return xformers.read(packages.memory_efficient_attention, args, options)


@pytest.mark.parametrize(
    "bias",
    [
        None,
        packages.LowerTriangularMask(),
        packages.LowerTriangularFromBottomRightMask(),
        packages.LocalAttentionFromBottomRightMask(2, 1),
        packages.LowerTriangularFromBottomRightLocalAttentionMask(3),
        packages.LowerTriangularMaskWithTensorBias(random(3, 4, 7, 9)),
        random(3, 4, 7, 9),
    ],
    ids=lambda b: type(b).__name__,
)
def test_xformers(bias: Any) -> None:
    q, k, v = random(3, 7, 4, 8), random(3, 9, 4, 8), random(3, 9, 4, 8)
    check(of_xformers(q, k, v, bias))
    check(of_xformers(q, k, v, attn_bias=bias, scale=0.2))
    grouped = (t.unflatten(2, (2, 2)) for t in (q, k, v))
    if not isinstance(bias, (Tensor, packages.LowerTriangularMaskWithTensorBias)):
        check(of_xformers(*grouped, bias))
        check(of_xformers(q[:, :, 0], k[:, :, 0], v[:, :, 0], bias))


def test_xformers_biases_lie_as_the_queries() -> None:
    q, k, v = random(3, 7, 2, 2, 8), random(3, 9, 2, 2, 8), random(3, 9, 2, 2, 8)
    check(of_xformers(q, k, v, random(3, 2, 2, 7, 9)))
    check(of_xformers(q[:, :, 0, 0], k[:, :, 0, 0], v[:, :, 0, 0], random(3, 7, 9)))


@pytest.mark.parametrize(
    "kind",
    [packages.BlockDiagonalMask, packages.BlockDiagonalCausalMask,
     packages.BlockDiagonalCausalFromBottomRightMask,
     lambda q, k: packages.BlockDiagonalCausalLocalAttentionMask(q, k, 3)],
)  # fmt: skip
def test_xformers_documents(kind: Any) -> None:
    bias = kind(SeqLenInfo(DOCUMENTS), SeqLenInfo(MORE))
    check(of_xformers(random(1, 19, 4, 8), random(1, 30, 4, 8), random(1, 30, 4, 8), bias))


def test_three_dimensions_of_xformers_are_one_head() -> None:
    q, k, v = (random(3, 5, 8) for _ in range(3))  # Where the module's weights say so.
    assert of_xformers(q, k, v).one_head
    assert not of_xformers(*(t.unsqueeze(2) for t in (q, k, v))).one_head


def test_unknown_parts_of_xformers_are_named() -> None:
    info = SeqLenInfo(DOCUMENTS)
    paged = packages.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(info, info)
    q, k, v = random(1, 19, 4, 8), random(1, 19, 4, 8), random(1, 19, 4, 8)
    assert of_xformers(q, k, v, paged).unread == f"{type(paged).__name__} as attn_bias"
    assert of_xformers(q, k, v, output_dtype=torch.half).unread == "output_dtype given"
    assert of_xformers(q, k, v, p=0.25).dropout == 0.25


# ---- which are found ----


def test_classes_are_read_by_their_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "megatron.core.transformer.dot_product_attention"
    module: Any = types.ModuleType(place)
    module.DotProductAttention = MegatronAttention
    monkeypatch.setitem(sys.modules, place, module)
    assert [f for f, _ in megatron.functions()] == [MegatronAttention.forward]
    assert MegatronAttention.forward in dict(_adapters.functions())

    class Other(nn.Module):
        forward = MegatronAttention.__mro__[1].forward

    model = nn.ModuleDict({"a": nn.Module(), "b": nn.Module(), "c": nn.Module()})
    model["a"].core_attention = MegatronAttention()
    model["b"].core_attention = type("Inherits", (MegatronAttention,), {})()
    model["c"].core_attention = Other()
    assert bellwether.megatron.wrap(model) == ["c.core_attention"]
    bellwether.unwrap_attention(model["c"].core_attention)
