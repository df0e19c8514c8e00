"""Goal: on a GPU compiled attention that is no scaled_dot_product_attention tells what eager tells,
in one graph, with the losses and weights of a run without us; nothing is compiled again after the
first step.
Method: transformers' eager attention, flex_attention and varlen_attn in blocks that inductor
compiles, and a whole model of transformers; skipped without a GPU, unless BELLWETHER_REQUIRE_GPU=1.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
import torch._dynamo
import transformers
import transformers.models.llama.modeling_llama as llama
from comparing import OF_LINEAR
from torch import Tensor, nn

import bellwether

import compiled_training
from compiled_training import Flex, Found
from gpu import LACKS, SKIPPED
from models import Attention, Shape, causal

if SKIPPED:
    pytest.skip(LACKS, allow_module_level=True)

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

STEPS, TOKENS = 4, 256
# Newer versions take a window in its place.
_OLD = varlen_attn is not None and "is_causal" in inspect.signature(varlen_attn).parameters
CAUSAL: dict[str, Any] = {"is_causal": True} if _OLD else {"window_size": (-1, 0)}
SHAPE = Shape(layers=2, heads=4, kv_heads=2, dim=64, width=256, dtype=torch.bfloat16)
EQUAL = Shape(layers=2, heads=4, kv_heads=4, dim=64, width=256, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Eager(Attention):
    num_key_value_groups = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        mask = torch.zeros(1, device=q.device).where(causal(q, k), -3e38).to(q.dtype)[None, None]
        o, _ = llama.eager_attention_forward(self, q, k, v, mask, scaling=self.shape.dim**-0.5)
        return o.transpose(1, 2)


class LongFlex(Flex):
    length = 100


class Varlen(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        count, tokens = q.shape[0], q.shape[2]
        begins = torch.arange(count + 1, device=q.device, dtype=torch.int32) * tokens
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        o = varlen_attn(q, k, v, begins, begins, tokens, tokens, **CAUSAL)
        return o.unflatten(0, (count, tokens)).transpose(1, 2)


def train(
    path: Optional[Path], shape: Shape, kind: type[nn.Module], compiled: bool = True
) -> Found:
    return compiled_training.train(
        path, shape, kind, compiled, backend="inductor", device="cuda", tokens=TOKENS, steps=STEPS,
        every=2, lr=1e-3,
    )  # fmt: skip


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    """Of losses: FlashAttention adds to the gradients of queries in any order."""
    return all(torch.allclose(x, y, 5e-3) for x, y in zip(a[:STEPS], b[:STEPS]))


@pytest.mark.parametrize(
    "shape, kind",
    [(EQUAL, Eager), (SHAPE, Eager), (SHAPE, LongFlex), (EQUAL, Varlen)],
    ids=["eager", "eager gqa", "flex", "varlen"],
)
def test_a_compiled_call_tells_what_the_eager_one_tells(
    shape: Shape, kind: type[Attention], tmp_path: Path
) -> None:
    if kind is Varlen and varlen_attn is None:
        pytest.skip("this torch has no varlen_attn")
    if kind is Eager and shape is EQUAL:
        kind = type("EagerEqual", (Eager,), {"num_key_value_groups": 1})
    plain = train(None, shape, kind)
    got = train(tmp_path / "c.bwrun", shape, kind)
    assert got.graphs == plain.graphs == 1
    assert (close if kind is Varlen else equal)(plain.bits, got.bits)
    want = train(tmp_path / "e.bwrun", shape, kind, compiled=False)
    assert got.notes == want.notes == [[], []]
    for step in (0, 2):
        assert got.recorded[step].keys() == want.recorded[step].keys() - OF_LINEAR
        for signal in ("rows", "common_mode_sum", "logit_max", "wq_sigma"):
            a, b = got.recorded[step][signal], want.recorded[step][signal]
            assert np.allclose(a, b, 0.03, 1e-3, equal_nan=True), (step, signal, a, b)
        assert np.isfinite(got.recorded[step]["key_gradient_sum"]).all()
    assert "rows" not in got.recorded[1]


@pytest.mark.parametrize("implementation", ["eager", "flex_attention", "sdpa"])
def test_transformers_compiled_whole_is_watched(implementation: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation=implementation,
    )  # fmt: skip

    def train(path: Optional[Path]) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config).cuda().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        monitor = None
        if path is not None:
            monitor = bellwether.attach(
                model, record=str(path), run="hf", every=1, overhead_budget=1e9
            )
        run, bits = torch.compile(model), []
        for step in range(STEPS):
            tokens = torch.randint(64, (2, 128), generator=torch.Generator().manual_seed(step))
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                loss = run(input_ids=tokens.cuda(), labels=tokens.cuda()).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            bits.append(loss.detach())
        if monitor is not None:
            assert monitor.flush(20) and monitor.status()["errors"] == 0
            assert [layer.fired for layer in monitor.layers] == [STEPS] * 2
            layers = monitor.status()["layers"]
            assert [layer["not_judged_by"] for layer in layers] == [[], []], layers
            monitor.detach()
        return [*bits, *(p.detach() for p in model.parameters())]

    # The gradient of an embedding is added in one order then.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert equal(train(None), train(tmp_path / "a.bwrun"))
    finally:
        torch.use_deterministic_algorithms(False)
