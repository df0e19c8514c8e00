"""Goal: attention that is no scaled_dot_product_attention tells the same compiled and eager, in one
graph for all blocks, and without recompilation after the first step; training is the same bits.
Method: models whose attention calls what adapters read, compiled by "aot_eager"; transformers'
models as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import transformers
import transformers.models.llama.modeling_llama as llama
from comparing import OF_LINEAR
from flash_stand_in import four, two
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import bellwether
from bellwether._hook.compiled import compiled_taps, recipes, written_anyway

from compiled_training import Flex, inductor_graphs, train
from conftest import in_long
from models import Attention, Model, Shape, batch, causal
from recording import Recording

STEPS = 3
GQA = Shape(kv_heads=2)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < compiled_taps.TORCH_MIN:
    pytest.skip("compiled modules are not watched with this torch", allow_module_level=True)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that remembers nothing, flash attention's stand-ins, flex_attention on CPUs."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    for name, module in (("flash_attn", two), ("flash_attn.cute", four)):
        monkeypatch.setitem(sys.modules, name, module)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Eager(Attention):
    """transformers' own function, with padding."""

    num_key_value_groups = 2
    dropout = 0.0

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        length = 40 - 7 * torch.arange(q.shape[0])
        seen = causal(q, k) & (torch.arange(k.shape[2]) < length[:, None, None])
        return torch.zeros(1).where(seen, torch.finfo(torch.float32).min).to(q.dtype)[:, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        o, _ = llama.eager_attention_forward(
            self,
            q,
            k,
            v,
            self.mask(q, k),
            scaling=self.shape.dim**-0.5,
            dropout=self.dropout,
        )
        return o.transpose(1, 2)


class Dropped(Eager):
    dropout = 0.3


class Scattered(Eager):
    """Nothing of its mask can be made again."""

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        return -(torch.rand(q.shape[0], 1, q.shape[2], k.shape[2]) < 0.2).float()


class Flash(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o, _ = four.flash_attn_func(q, k, v, causal=True, window_size=(5, 0))
        return o.transpose(1, 2)


class Packed(Attention):
    """With a softcap."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        packed = torch.stack([t.transpose(1, 2) for t in (q, k, v)], 2)
        return two.flash_attn_qkvpacked_func(packed, causal=True, softcap=2.0).transpose(1, 2)


class Ours(Attention):
    """With values that are narrower than the keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        o = bellwether.attention(q, k, v[..., :8], causal=True, enable_gqa=gqa)
        return o.repeat(1, 1, 1, 2)


class FlexPlain(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return flex.flex_attention(q, k, v, enable_gqa=gqa)


class FlexScaled(Attention):
    """Not added to the scores: the gradients of the keys need not add up to 0."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return flex.flex_attention(q, k, v, lambda s, b, h, i, j: s * (1 + h), enable_gqa=gqa)


class Core(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        return weights @ value


class Wrapped(Attention):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.core = bellwether.wrap_attention(Core(), layout="bhtd")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return self.core(q, k, v)


class WrittenKeys(Attention):
    """Keys that are put together in place, as latent attention does it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        keys = k.new_empty(k.shape)
        keys[..., :4].copy_(k[..., :4])
        keys[..., 4:].copy_(k[..., 4:])
        return F.scaled_dot_product_attention(q, keys, v, is_causal=True)


class Fused(nn.Module):
    """Models differ in the order of these rows: here each head has its q, k and v side by side."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.Wqkv = nn.Linear(shape.width, 3 * shape.heads * shape.dim)
        self.out = nn.Linear(shape.heads * shape.dim, shape.width)

    def turned(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] * torch.linspace(0.1, 1, x.shape[3] // 2)
        a, b = x.chunk(2, -1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.Wqkv(x).unflatten(-1, (self.shape.heads, 3, self.shape.dim))
        q, k, v = (t.transpose(1, 2) for t in parts.unbind(-2))
        o = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        return self.out(o.transpose(1, 2).flatten(2))


class KnownFused(Fused):
    """By a name whose rows are q, k and v in other models."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.c_attn = self.Wqkv
        del self.Wqkv

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).unflatten(-1, (self.shape.heads, 3, self.shape.dim))
        q, k, v = (t.transpose(1, 2) for t in parts.unbind(-2))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Weighs(nn.Module):
    """nn.MultiheadAttention that is asked for its weights."""

    weights = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.keys = nn.Linear(shape.width, 20)
        self.inner = nn.MultiheadAttention(
            shape.width, shape.heads, kdim=20, batch_first=True, bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        padded = torch.arange(x.shape[1]) >= 40 - 7 * torch.arange(x.shape[0])[:, None]
        y, weights = self.inner(
            x, self.keys(x), x, attn_mask=hidden, key_padding_mask=padded, is_causal=True,
            need_weights=self.weights, average_attn_weights=False,
        )  # fmt: skip
        return y + 0.0 * weights.sum() if self.weights else y  # type: ignore[no-any-return]


class Calls(Weighs):
    """The same without: it calls scaled_dot_product_attention, where dynamo does not look."""

    weights = False


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.width, shape.heads, 64, dropout=0.1, batch_first=True)

    def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(src)


class Decoder(nn.TransformerDecoderLayer):
    """With two calls of attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.width, shape.heads, 64, dropout=0.0)

    def forward(self, tgt: Tensor) -> Tensor:  # type: ignore[override]
        hidden = nn.Transformer.generate_square_subsequent_mask(tgt.shape[0])
        return super().forward(tgt, tgt.flip(0), tgt_mask=hidden, tgt_is_causal=True)


CASES: dict[str, tuple[Shape, type[nn.Module]]] = {
    "eager": (GQA, Eager),
    "eager bf16": (Shape(kv_heads=2, dtype=torch.bfloat16), Eager),
    "dropout": (GQA, Dropped),
    "flash": (Shape(), Flash),
    "packed tensor": (Shape(), Packed),
    "ours": (GQA, Ours),
    "flex": (GQA, Flex),
    "flex plain": (Shape(), FlexPlain),
    "flex scaled": (Shape(), FlexScaled),
    "wrapped": (Shape(), Wrapped),
    "keys in place": (Shape(), WrittenKeys),
    "order of rows": (Shape(), Fused),
    "order of known rows": (Shape(), KnownFused),
    "multihead with weights": (Shape(), Weighs),
    "multihead": (Shape(), Calls),
    "encoder": (Shape(), Encoder),
    "decoder": (Shape(), Decoder),
}


# "eager bf16" and "dropout" attend as "eager" does, and "flex" as "flex plain".
@pytest.mark.parametrize("name", in_long(["eager", "flex plain"], CASES))
def test_a_compiled_call_tells_what_the_eager_one_tells(name: str, tmp_path: Path) -> None:
    plain, got = train(None, *CASES[name]), train(tmp_path / "c.bwrun", *CASES[name])
    assert all(torch.equal(a, b) for a, b in zip(plain.bits, got.bits))
    assert got.graphs == plain.graphs == 1
    want = train(tmp_path / "e.bwrun", *CASES[name], compiled=False)
    assert got.notes == want.notes and sorted(got.recorded) == list(range(STEPS))
    for step, signals in want.recorded.items():
        assert got.recorded[step].keys() == signals.keys() - OF_LINEAR, step
        for signal, values in signals.items():
            if signal not in ("step_seconds", "hook_seconds", *OF_LINEAR):
                same = np.allclose(got.recorded[step][signal], values, 1e-3, 1e-5, equal_nan=True)
                assert same, (step, signal)
    assert {"common_mode_sum", "wq_sigma"} <= got.recorded[0].keys()


@pytest.mark.parametrize("name", in_long(["eager"], ["eager", "eager bf16", "wrapped"]))
def test_the_same_is_told_by_what_inductor_writes(name: str, tmp_path: Path) -> None:
    shape, kind = CASES[name]
    plain = train(None, shape, kind, backend=inductor_graphs, steps=1)
    got = train(tmp_path / "c.bwrun", shape, kind, backend=inductor_graphs, steps=1)
    assert all(torch.equal(a, b) for a, b in zip(plain.bits, got.bits))
    want = train(tmp_path / "e.bwrun", shape, kind, compiled=False, steps=1)
    told = got.recorded[0].keys()
    assert told == want.recorded[0].keys() - OF_LINEAR and "key_gradient_sum" in told
    for signal in told - {"step_seconds", "hook_seconds"}:
        a, b = got.recorded[0][signal], want.recorded[0][signal]
        assert np.allclose(a, b, 2e-2 if "bf16" in name else 1e-3, 1e-4, equal_nan=True), signal


def test_a_mask_that_cannot_be_made_again_is_not_measured(tmp_path: Path) -> None:
    plain = train(None, GQA, Scattered, backend=inductor_graphs, steps=1)
    got = train(tmp_path / "c.bwrun", GQA, Scattered, backend=inductor_graphs, steps=1)
    assert all(torch.equal(a, b) for a, b in zip(plain.bits, got.bits))
    assert got.notes == [[written_anyway.NOT_WRITTEN]] * 2


def of_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def of_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return two.flash_attn_func(q, k, v).transpose(1, 2)


@pytest.mark.parametrize("part", [of_sdpa, of_flash, flex.flex_attention])
def test_a_compiled_part_of_a_forward_is_measured_once(part: Any, tmp_path: Path) -> None:
    compiled = torch.compile(part, backend="aot_eager")

    class Part(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
            return compiled(q, k, v)  # type: ignore[no-any-return]

    plain = train(None, Shape(), Part, compiled=False)
    got = train(tmp_path / "a.bwrun", Shape(), Part, compiled=False)
    assert all(torch.equal(a, b) for a, b in zip(plain.bits, got.bits))
    assert got.graphs == plain.graphs == 1 and got.notes == [[], []]
    assert got.recorded[0]["rows"].tolist() == [[3 * 40.0] * 4] * 2


def test_graphs_of_before_and_behind_a_watch_are_without_taps(tmp_path: Path) -> None:
    def losses(attached: bool) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        model, found = Model(GQA, kind=Eager), []
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = None
        for step in range(6):
            if attached and step == 2:
                monitor = bellwether.attach(
                    model, record=str(tmp_path / "a.bwrun"), run="part", every=1
                )
            if monitor is not None and step == 4:
                monitor.detach()
            loss = model(batch(GQA, step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert monitor is None or [layer.fired for layer in monitor.layers] == [2, 2]
        return found

    assert losses(False) == losses(True)


class OneForAll(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def test_a_compiled_call_that_is_not_measured_is_said(tmp_path: Path) -> None:
    found = train(tmp_path / "c.bwrun", Shape(layers=1), OneForAll)
    assert found.notes == [
        ["q, k and v of a compiled call are not apart from each other: not measured"]
    ]


class Hidden(nn.Module):
    """No name of it says that it is attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a(x).unflatten(-1, (3, 4, 12)).unbind(-3)
        return self.b(two.flash_attn_func(q, k, v, causal=True).flatten(2))


def test_compiled_modules_are_found_where_they_call(tmp_path: Path) -> None:
    def run(monitored: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(1)
        model = nn.Sequential(Hidden(), nn.Linear(48, 48), Hidden())
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = None
        if monitored:
            monitor = bellwether.attach(
                model,
                record=str(tmp_path / "a.bwrun"),
                run="hidden",
                every=1,
                overhead_budget=1e9,
            )
        for step in range(STEPS):
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                compiled(batch(Shape(), step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        if monitor is not None:
            assert monitor.flush(20) and monitor.status()["errors"] == 0
            found = [(layer.name, layer.index, layer.fired) for layer in monitor.layers]
            assert found == [("0", 0, STEPS), ("2", 1, STEPS)]
            monitor.detach()
            assert not any(compiled_taps.ATTRIBUTE in vars(m) for m in model.modules())
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True)))


class AroundFlex(Attention):
    """Calls what torch.compile made of the function alone."""

    function = staticmethod(torch.compile(flex.flex_attention, backend="aot_eager"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return self.function(q, k, v)


def test_each_watch_sees_a_function_compiled_before(tmp_path: Path) -> None:
    shape = Shape(layers=1, causal=False)
    Model(shape, kind=AroundFlex)(batch(shape, 0)).square().mean().backward()
    for watch in range(4):
        model = Model(shape, kind=AroundFlex)
        path = str(tmp_path / f"{watch}.bwrun")
        with bellwether.attach(model, record=path, run="again", every=1) as monitor:
            model(batch(shape, 0)).square().mean().backward()
            assert [layer.fired for layer in monitor.layers] == [1], watch


class LateFlex(Attention):
    """Compiles the function in a forward."""

    made: Any = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        if LateFlex.made is None:
            LateFlex.made = staticmethod(torch.compile(flex.flex_attention, backend="aot_eager"))
        o: Tensor = LateFlex.made(q, k, v)
        return o


def test_a_function_compiled_late_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateFlex, "made", None)
    shape = Shape(layers=2, causal=False)
    for watch in range(2):
        model, path = Model(shape, kind=LateFlex), tmp_path / f"{watch}.bwrun"
        with bellwether.attach(
            model, record=str(path), run="late", every=2, rows=0, microbatches="all",
            overhead_budget=1e9,
        ) as monitor:  # fmt: skip
            for step in range(5):
                # Another length: compiled anew, in a step that is not sampled and in one that is.
                x = batch(shape, step, tokens=40 if step < 3 else 56)
                model(x).square().mean().backward()
                monitor.step()
            assert monitor.flush(20) and monitor.status()["errors"] == 0
        steps = Recording(path, ended=True).steps()
        for step, tokens in ((0, 40), (2, 40), (4, 56)):
            assert (steps[step]["rows"] == 3 * tokens).all(), (watch, step)


def test_recipes_have_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipes, "RECIPES_MAX", 0)
    monkeypatch.setattr(recipes, "_numbers", {})
    found = train(tmp_path / "c.bwrun", Shape(layers=1), Flash)
    assert "common_mode_sum" not in found.recorded[0]
    assert found.notes == [["more compiled calls than are kept: not measured"]]


# Of "sdpa" some cells of tests/matrix tell it.
@pytest.mark.parametrize("implementation", in_long(["sdpa"], ["eager", "flex_attention", "sdpa"]))
def test_transformers_compiled_whole_is_watched(implementation: str, tmp_path: Path) -> None:
    from transformers.integrations.flex_attention import WrappedFlexAttention

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation=implementation,
    )  # fmt: skip
    WrappedFlexAttention._is_flex_compiled = WrappedFlexAttention.training = True
    WrappedFlexAttention._compiled_flex_attention = staticmethod(flex.flex_attention)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="hf", every=1, overhead_budget=1e9
    )
    run = torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(step))
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            run(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.flush(20) and monitor.status()["errors"] == 0
    assert [layer.fired for layer in monitor.layers] == [STEPS] * 2
    status = monitor.status()["layers"]
    assert [(layer["not_judged_by"], layer["without_laws"]) for layer in status] == [([], {})] * 2
    monitor.detach()
