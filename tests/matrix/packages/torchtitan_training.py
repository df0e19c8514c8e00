"""torchtitan's Llama and Qwen3 on a CPU, with documents packed into its sequences.

What is no part of it here: expert parallelism, whose module asks for Triton; and compiled
flex_attention by Inductor, which has no backward for CPUs.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Optional
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import projections
from capture import Calls, as_given, copied
from definitions import Call
from training import STEPS, VOCABULARY, Training, tokens

_DIM, _HEADS, _KV_HEADS, _LENGTH = 64, 4, 2, 20
_DOCUMENTS = ((7, 11, 2), (3, 17))


def _model(backend: str, fused: bool, family: str) -> Any:
    sys.modules.setdefault("torchtitan.distributed.minimal_async_ep", mock.MagicMock())
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

    sizes = dict(
        n_layers=2, dim=_DIM, n_heads=_HEADS, n_kv_heads=_KV_HEADS, hidden_dim=96, fuse_qkv=fused,
        attn_backend="flex",
    )  # fmt: skip
    positions = dict(dim=_DIM // _HEADS, max_seq_len=128, theta=5e5)
    if family == "qwen3":  # It normalises queries and keys head by head.
        layers = qwen3._build_qwen3_layers(
            **sizes, head_dim=_DIM // _HEADS, rope=CosSinRoPE.Config(**positions)
        )
        kind: Any = qwen3.Qwen3Model
    else:
        layers = llama3._build_llama3_layers(**sizes, rope=ComplexRoPE.Config(**positions))
        kind = llama3.Llama3Model
    if backend == "sdpa":
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    draw = {"weight": nn.init.normal_}
    model = kind.Config(
        dim=_DIM, vocab_size=VOCABULARY, layers=layers,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=_DIM, param_init=draw
        ),
        norm=RMSNorm.Config(normalized_shape=_DIM, param_init={"weight": nn.init.ones_}),
        lm_head=Linear.Config(in_features=_DIM, out_features=VOCABULARY, param_init=draw),
    ).build()  # fmt: skip
    torch.manual_seed(0)
    model.init_states()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.19)
    return model.train()


def _rows(module: Any, heads: int, kv_heads: int, dim: int) -> Optional[projections.Pair]:
    """Of `qkv_linear` beside it: the queries of a group, its key, its value, then the next."""
    linear = module.get_submodule("qkv_linear")
    if hasattr(linear, "wq"):
        wq, wk = (w.weight.detach().double() for w in (linear.wq, linear.wk))
        return wq.reshape(heads, dim, -1), wk.reshape(kv_heads, dim, -1)
    weight = linear.wqkv.weight.detach().double()
    group = weight.reshape(kv_heads, -1, dim, weight.shape[-1])
    return group[:, :-2].reshape(heads, dim, -1), group[:, -2]


def _captured(calls: Calls, compiled: Any) -> Any:
    """torchtitan keeps the compiled function in its own class."""

    def seen(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
        copies = [copied(x) for x in (q, k, v)]
        scale = given["scale"] or q.shape[-1] ** -0.5
        call = Call(calls.running[-1], *copies, copies[0], scale, kv_heads=k.shape[1])
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        call.allowed = flex.create_mask(given["block_mask"].mask_mod, *sizes, "cpu")
        with as_given(call, k) as own:
            o, aux = compiled(q, own, v, **given)

        def arrived(gradient: Tensor) -> None:
            call.d_o = copied(gradient)

        call.o = copied(o)
        o.register_hook(arrived)
        calls.found.append(call)
        return o, aux

    return seen


def _train(training: Training, backend: str, fused: bool, family: str = "llama3") -> None:
    model = _model(backend, fused, family)
    from torchtitan.models.common.attention import FlexAttention

    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, backend="aot_eager")
    training.reader = _rows
    training.begins(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in _DOCUMENTS])
    masks = model.get_attention_masks(positions) if backend == "flex" else None
    function = compiled
    if training.calls is not None:
        for name, module in model.named_modules():  # Its projections lie around what calls.
            if name.endswith(".inner_attention"):
                training.calls.names[id(module)] = name.rpartition(".")[0]
        function = _captured(training.calls, compiled)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(flex, "_validate_device", lambda *_: None))
        stack.enter_context(
            mock.patch.object(FlexAttention, "_compiled_flex_attn", staticmethod(function))
        )
        for step in range(STEPS):
            x = tokens(step, length=_LENGTH)
            logits = model(x, positions, masks)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.step(loss.item())
    training.ends()


def flex_fused(training: Training) -> None:
    _train(training, "flex", fused=True)


def flex_separate(training: Training) -> None:
    _train(training, "flex", fused=False)


def sdpa(training: Training) -> None:
    _train(training, "sdpa", fused=True)


def qwen3_flex(training: Training) -> None:
    _train(training, "flex", fused=True, family="qwen3")


def qwen3_sdpa(training: Training) -> None:
    _train(training, "sdpa", fused=True, family="qwen3")
