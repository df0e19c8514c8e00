"""Goal: the function that transformers calls computes what its own would.
Method: the calls of transformers 5.23 by hand, against scaled_dot_product_attention; with
transformers installed, a small Llama too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bellwether
from bellwether import hf
from bellwether._attention import dispatch

from attention_reference import inputs


def call(attention_mask: Any = None, **options: Any) -> torch.Tensor:
    q, k, v, _ = inputs("randn", heads=4, kv_heads=2, dtype=torch.float32)
    output, weights = hf.attention_forward(nn.Module(), q, k, v, attention_mask, **options)
    assert weights is None and output.is_contiguous()
    return output.transpose(1, 2)


def test_is_the_attention_with_the_interfaces_arguments() -> None:
    q, k, v, _ = inputs("randn", heads=4, kv_heads=2, dtype=torch.float32)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.1, enable_gqa=True)
    torch.testing.assert_close(call(scaling=0.1, position_ids=None), want, rtol=1e-4, atol=1e-5)
    want = bellwether.attention(q, k, v, causal=True, window=9, softcap=5.0, enable_gqa=True)
    assert torch.equal(call(sliding_window=9, softcap=5.0), want)
    assert torch.equal(call(is_causal=False), bellwether.attention(q, k, v, enable_gqa=True))


def test_masks_biases_and_sinks_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_said", set())
    q, k, v, _ = inputs("randn", heads=4, kv_heads=2, dtype=torch.float32)
    mask, bias, sinks = torch.rand(1, 1, 96, 96) > 0.2, torch.randn(1, 4, 96, 96), torch.randn(4)
    got = call(mask, position_bias=bias, s_aux=sinks)
    both = bias.masked_fill(~mask, -torch.inf)
    want = bellwether.attention(q, k, v, mask=both, sinks=sinks, enable_gqa=True)
    assert torch.equal(got, want)
    assert dispatch._said == set()
    call(mask, dropout=0.5)
    assert dispatch._said == {"dropout_p is above 0"}


def by_hand(
    mask: Any = None, bias: Any = 0.0, softcap: float = 0.0, sinks: Any = None
) -> torch.Tensor:
    q, k, v, _ = inputs("randn", heads=4, kv_heads=2, dtype=torch.float32)
    k, v = (t.double().repeat_interleave(2, 1) for t in (k, v))
    scores = q.double() @ k.mT * q.shape[-1] ** -0.5
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    scores = scores + bias
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat(
            (scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1
        )
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).float()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_every_argument_reaches_the_softmax(
    masked: bool, with_bias: bool, with_sinks: bool, softcap: float
) -> None:
    causal = torch.ones(96, 96, dtype=torch.bool).tril()
    mask = (causal & (torch.rand(1, 1, 96, 96) > 0.2)) | torch.eye(96, dtype=torch.bool)
    bias = torch.randn(1, 4, 96, 96) if with_bias else None
    sinks = torch.randn(4) if with_sinks else None
    got = call(mask if masked else None, softcap=softcap or None, position_bias=bias, s_aux=sinks)
    want = by_hand(
        mask if masked else causal, 0.0 if bias is None else bias.double(), softcap, sinks
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_rows_without_keys_are_zero() -> None:
    mask = torch.zeros(1, 1, 96, 96, dtype=torch.bool)
    assert call(mask, s_aux=torch.zeros(4)).abs().max() == 0


@pytest.mark.parametrize("name", ["T5", "GptOss", "Gemma2"])
def test_models_with_more_than_a_mask_compute_as_eager(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    hf.register()
    sizes = dict(
        hidden_size=32, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, head_dim=8,
        intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=2, num_experts_per_tok=1, vocab_size=100, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    outputs = []
    tokens = torch.randint(1, 100, (2, 12))
    seen = torch.ones_like(tokens)
    seen[1, 8:] = 0
    for implementation in ("bellwether", "eager"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes)
        kind = "ForConditionalGeneration" if name == "T5" else "ForCausalLM"
        model = (
            getattr(transformers, name + kind)
            ._from_config(config, attn_implementation=implementation)
            .eval()
        )
        labels = {"labels": tokens} if name == "T5" else {}
        outputs.append(model(input_ids=tokens, attention_mask=seen, **labels).logits[seen.bool()])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [96, 40, 1])
@pytest.mark.parametrize("window", [None, 9, 2**40])
@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("own", [None, True, False])
def test_dropout_has_the_same_mask(
    own: Any, is_causal: Any, window: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Module()
    if own is not None:
        module.is_causal = own
    q, k, v, _ = inputs("randn", heads=4, kv_heads=2, dtype=torch.float32)
    q = q[:, :, :tokens]
    options = dict(is_causal=is_causal, sliding_window=window)
    want, _ = hf.attention_forward(module, q, k, v, None, **options)
    # A probability so small that nothing is dropped.
    got, _ = hf.attention_forward(module, q, k, v, None, dropout=1e-12, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_llama() -> None:
    transformers = pytest.importorskip("transformers")
    hf.register()
    models = []
    for name in ("bellwether", "sdpa"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=100,
        )  # fmt: skip
        models.append(transformers.LlamaForCausalLM._from_config(config, attn_implementation=name))
    tokens = torch.randint(0, 100, (2, 20))
    ours, theirs = (model(tokens).logits for model in models)
    assert models[0].config._attn_implementation == "bellwether"
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
