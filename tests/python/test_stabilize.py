"""Goal: stabilize() changes what a model's attention computes and nothing else, beside a monitor,
under compilation and checkpointing, and until it is closed.
Method: small models against the same model whose attention calls bellwether.attention itself.
"""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from test_intercept import snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether._attention import dispatch
from bellwether._hook.calls.kernel_choice import SDPA
from bellwether._hook.patches import class_patches, registry
from bellwether._hook.running import running

import models
from models import ByAttribute, ByName, Model, Shape, batch

SHAPE = Shape(heads=4, kv_heads=2, dtype=torch.bfloat16, spread=3.0)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dispatch, "_said", set())
    caplog.set_level(logging.WARNING, "bellwether")
    return lambda: [r.message for r in caplog.records if "not stabilized" in r.message]


class ByHand(models.Attention):
    """What a stabilized Attention is to compute."""

    mode = "hp"
    center = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        return bellwether.attention(
            q, k, v, causal=self.shape.causal, mode=self.mode, center=self.center, enable_gqa=gqa
        )


def made(kind: type = models.Attention, checkpointing: Optional[str] = None) -> Model:
    torch.manual_seed(4)
    return Model(SHAPE, kind=kind, checkpointing=checkpointing)


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss = model(batch(SHAPE, 1)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


def by_hand(mode: str = "hp", center: bool = False) -> list[Tensor]:
    class Mine(ByHand):
        pass

    Mine.mode, Mine.center = mode, center
    return gradients(made(Mine))


@pytest.mark.parametrize("kind", [models.Attention, ByName, ByAttribute])
def test_the_models_attention_is_ours_until_closed(kind: type, messages: Any) -> None:
    model = made(kind)
    before, plain = snapshot(model), gradients(model)
    with bellwether.stabilize(model) as handle:
        assert handle.modules == ["blocks.0.attention", "blocks.1.attention"]
        assert same(gradients(model), by_hand()) and not same(by_hand(), plain)
    for key, value in snapshot(model).items():
        assert value == before[key], key
    assert not registry.functions and not class_patches.users
    assert same(gradients(model), plain)
    handle.close()  # Twice is once.
    assert messages() == []


def test_switches_in_flight() -> None:
    model = made()
    handle = bellwether.stabilize(model, mode="fa")
    assert same(gradients(model), by_hand("fa"))
    handle.mode = "hpm"
    assert same(gradients(model), by_hand("hpm"))
    handle.center = True
    assert same(gradients(model), by_hand("hpm", center=True))
    with pytest.raises(ValueError, match="mode is 'best'"):
        handle.mode = "best"
    assert bellwether.stabilize(model, mode="hp") is handle
    assert same(gradients(model), by_hand())
    handle.close()


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_checkpointed_blocks_are_recomputed_as_they_were(checkpointing: str) -> None:
    model = made(checkpointing=checkpointing)
    with bellwether.stabilize(model):
        assert same(gradients(model), by_hand())


class Reentrant(models.Attention):
    """Computes its attention a second time, outside of the module, for the backward."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

        result: Tensor = checkpoint(attend, q, k, v, use_reentrant=True)
        return result


def test_a_reentrant_checkpoint_inside_stays_pytorchs_and_says_so(messages: Any) -> None:
    model = made(Reentrant)
    plain, ours = gradients(model), by_hand()
    assert not same(plain, ours)
    with bellwether.stabilize(model):
        # One and the same in the forward and in the recomputation, and said.
        assert same(gradients(model), plain)
        assert len(messages()) == 1 and "checkpoint() inside" in messages()[0]
        with torch.no_grad():  # Nothing is recomputed.
            assert torch.equal(model(batch(SHAPE, 1)).square().mean(), ours[0])


def test_compiled_whole_and_switched_in_flight() -> None:
    torch._dynamo.reset()
    model = made()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    plain = gradients(compiled)
    handle = bellwether.stabilize(compiled)  # Compiled before: it is compiled anew.
    assert same(gradients(compiled), by_hand()) and not same(plain, by_hand())
    handle.mode = "fa"
    assert same(gradients(compiled), by_hand("fa"))
    handle.close()
    assert same(gradients(compiled), plain)


def test_compiled_with_graph_breaks() -> None:
    class Breaks(models.Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
            torch._dynamo.graph_break()
            return super().attend(q, k, v, gqa)

    torch._dynamo.reset()
    model = made(Breaks)
    with bellwether.stabilize(model):
        assert same(gradients(torch.compile(model, backend="aot_eager")), by_hand())
    assert running.stack == []


@pytest.mark.parametrize("attached_first", [False, True])
def test_beside_a_monitor(attached_first: bool, tmp_path: Any) -> None:
    model = made()
    before = snapshot(model)

    def attach() -> bellwether.Monitor:
        return bellwether.attach(
            model, record=str(tmp_path / "a.bwrun"), run="both", every=1, overhead_budget=1e9
        )

    if attached_first:
        monitor, handle = attach(), bellwether.stabilize(model)
    else:
        handle, monitor = bellwether.stabilize(model), attach()
    assert same(gradients(model), by_hand())
    assert [layer.fired for layer in monitor.layers] == [1, 1]
    assert monitor.status()["errors"] == 0
    if attached_first:
        monitor.detach()
        assert same(gradients(model), by_hand())
        handle.close()
    else:
        handle.close()
        assert not same(gradients(model), by_hand())
        assert [layer.fired for layer in monitor.layers] == [2, 2]
        monitor.detach()
    for key, value in snapshot(model).items():
        assert value == before[key], key


def test_other_models_of_the_class_and_copies_stay_plain() -> None:
    model, other = made(), made()
    plain = gradients(other)
    with bellwether.stabilize(model):
        assert same(gradients(other), plain)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert same(gradients(twin), plain)
        x = torch.randn(1, 2, 8, 16)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), SDPA(x, x, x))


class Options(nn.Module):
    """Calls the function with options that a test sets."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.options: dict[str, Any] = {}
        self.inputs = [torch.randn(2, 4, 12, dim) + 1 for _ in range(3)]
        self.inside = False

    def forward(self) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, **self.options)

        if self.inside:
            result: Tensor = checkpoint(attend, *self.inputs, use_reentrant=False)
            return result
        return attend(*self.inputs)


def test_unsupported_calls_stay_pytorchs_and_warn_once(messages: Any) -> None:
    torch.manual_seed(0)
    model = Options()
    learned = torch.randn(12, 12).requires_grad_()
    doubles = [t.double() for t in model.inputs]
    shorter = [model.inputs[0][:, :, :5], *model.inputs[1:]]
    nested = [t[None] for t in model.inputs]
    cases: list[tuple[str, dict[str, Any], Any, bool]] = [
        ("the mask requires a gradient", {"attn_mask": learned}, None, False),
        ("dropout_p is above 0", {"dropout_p": 0.5}, None, False),
        ("scale is not above 0", {"scale": -1.0}, None, False),
        ("torch.float64 on cpu", {}, doubles, False),
        ("causal with as many queries", {"is_causal": True}, shorter, False),
        ("5 dimensions", {}, nested, False),
        ("checkpoint() inside", {}, [t.requires_grad_() for t in model.inputs], True),
    ]
    plain = []
    for _, model.options, given, model.inside in cases:
        model.inputs, before = given or model.inputs, model.inputs
        torch.manual_seed(1)
        plain.append(model())
        model.inputs = before
    with bellwether.stabilize(model):
        for round_ in range(2):
            for (_, model.options, given, model.inside), want in zip(cases, plain):
                model.inputs, before = given or model.inputs, model.inputs
                torch.manual_seed(1)
                assert torch.equal(model(), want)
                model.inputs = before
            assert len(messages()) == len(cases), round_
    for (text, *_), message in zip(cases, messages()):
        assert message.startswith("attention is PyTorch's own, not stabilized: ")
        assert text in message


def test_keys_stay_centred_where_pytorch_computes() -> None:
    model = Options()
    q, k, v = model.inputs
    mask = torch.rand(12, 12) > 0.3
    mask[:, 9:] = False
    model.options = {"attn_mask": mask, "dropout_p": 1e-12}
    centred = bellwether.center_keys(k, visible=mask.any(0))
    torch.manual_seed(1)
    want = F.scaled_dot_product_attention(q, centred, v, **model.options)
    with bellwether.stabilize(model, center=True):
        torch.manual_seed(1)
        assert torch.equal(model(), want)


def test_the_functions_own_arguments(messages: Any) -> None:
    model = Options()
    q, k, v = model.inputs
    model.options = {"is_causal": True, "scale": 0.7}
    with bellwether.stabilize(model):
        assert torch.equal(model(), bellwether.attention(q, k, v, causal=True, scale=0.7))
        model.options = {"attn_mask": None, "dropout_p": 0.0}
        assert torch.equal(model(), bellwether.attention(q, k, v))
        for mask in (torch.rand(2, 1, 1, 12) > 0.3, torch.randn(4, 12, 12), torch.ones(12, 12)):
            model.options = {"attn_mask": mask}
            assert torch.equal(model(), bellwether.attention(q, k, v, mask=mask))
    assert messages() == []


def test_multihead_attention_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 32)
    with bellwether.stabilize(layer) as handle:
        assert handle.modules == ["self_attn"]
        ours = layer(x)
        handle.mode = "fa"
        torch.testing.assert_close(layer(x), ours)
    torch.testing.assert_close(layer(x), ours)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no module of Linear calls"):
        bellwether.stabilize(nn.Linear(2, 2))
    assert not class_patches.users
