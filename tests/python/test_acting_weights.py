"""Goal: qk.clip makes the named heads smaller and nothing else, wherever their rows lie, biases and
the optimizer's memory with them, and the next steps do not put the norm back.
Method: weights before and after, by head, against the same computed from the whole matrix.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asking import Training
from models import Attention, Model, Shape, batch

SHAPES = {
    "fused": Shape(),
    "fused, grouped queries": Shape(heads=4, kv_heads=2),
    "separate": Shape(fused=False),
    "separate, grouped queries": Shape(fused=False, heads=4, kv_heads=2),
}


class WithBias(Attention):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        for name, child in list(self.named_children()):
            if name != "out":
                setattr(self, name, nn.Linear(child.in_features, child.out_features))


class Megatron(Attention):
    """Rows by group: two queries, their key, their value, then the next group."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.linear_qkv = nn.Linear(shape.width, 8 * shape.dim)
        del self.qkv

    def split(self, x: Tensor) -> list[Tensor]:
        groups = self.linear_qkv(x).unflatten(-1, (2, 4, self.shape.dim))
        parts = (groups[..., :2, :].flatten(-3, -2), groups[..., 2, :], groups[..., 3, :])
        return [part.transpose(1, 2) for part in parts]


class TransposedQkv(Attention):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from transformers.pytorch_utils import Conv1D

        self.c_attn = Conv1D(self.qkv.out_features, shape.width)
        del self.qkv

    def split(self, x: Tensor) -> list[Tensor]:
        s = self.shape
        parts = self.c_attn(x).split([s.heads * s.dim, s.kv_heads * s.dim, s.kv_heads * s.dim], -1)
        return [p.unflatten(-1, (-1, s.dim)).transpose(1, 2) for p in parts]


def scores(model: Any, layer: int, x: Tensor) -> Tensor:
    """q k^T of the layer's heads, [batch, heads, tokens, tokens]."""
    with torch.no_grad():
        q, k, _ = model.attentions()[layer].split(x)
        return q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT


CASES: dict[str, tuple[Shape, type[Attention]]] = {
    **{name: (shape, Attention) for name, shape in SHAPES.items()},
    **{f"{name}, bias": (shape, WithBias) for name, shape in SHAPES.items()},
    "by groups": (Shape(heads=4, kv_heads=2), Megatron),
    "transposed": (Shape(heads=4, kv_heads=2), TransposedQkv),
}


@pytest.mark.parametrize("name", CASES)
def test_scores_of_the_named_heads_are_multiplied_by_gamma(name: str, tmp_path: Path) -> None:
    shape, kind = CASES[name]
    torch.manual_seed(7)
    training = Training(tmp_path / "a.bwrun", shape=shape, model=Model(shape, kind=kind))
    training.step(2)
    x = batch(shape, 99)
    before = [scores(training.model, layer, x) for layer in (0, 1)]
    named = [p.detach().clone() for _, p in training.model.named_parameters()]
    # With grouped queries: a whole group (2, 3) and half of another (0).
    heads = [{"layer": 1, "head": head} for head in (0, 2, 3)]
    id = training.ask("qk.clip", value=0.25, scope={"heads": heads})
    training.monitor.actions.boundary(2)
    answer = training.answer(id)
    assert answer and answer["applied"], answer
    after = [scores(training.model, layer, x) for layer in (0, 1)]
    assert torch.equal(before[0], after[0])
    factor = torch.tensor([0.25, 1.0, 0.25, 0.25])[None, :, None, None]
    torch.testing.assert_close(after[1], before[1] * factor, rtol=1e-5, atol=1e-6)
    changed = {
        which
        for (which, p), old in zip(training.model.named_parameters(), named)
        if not torch.equal(p, old)
    }
    assert changed and all(n.startswith("blocks.1.attention.") for n in changed)
    assert not any("v_proj" in n or "out" in n for n in changed)
    training.step(2)
    training.ends()


def sick(shape: Shape, layer: int, head: int, size: float, **given: Any) -> Training:
    """A training in which one head's W_Q has a direction of its own that is far too large."""
    training = Training(shape=shape, **given)
    with torch.no_grad():
        attention = training.model.attentions()[layer]
        generator = torch.Generator().manual_seed(3)
        u = torch.randn(shape.dim, generator=generator)
        v = torch.randn(shape.width, generator=generator)
        push = size * (u / u.norm())[:, None] * (v / v.norm())[None]
        attention.q_proj.weight[head * shape.dim : (head + 1) * shape.dim] += push
    return training


def sigmas(model: Any, which: str, dim: int) -> Tensor:
    with torch.no_grad():
        return torch.stack([
            torch.linalg.matrix_norm(getattr(a, which).weight.unflatten(0, (-1, dim)), ord=2)
            for a in model.attentions()
        ])  # fmt: skip


def test_down_to_the_median_of_the_others(tmp_path: Path) -> None:
    shape = Shape(fused=False, heads=4, kv_heads=2)
    training = sick(shape, 1, 2, 100.0, path=tmp_path / "a.bwrun")
    training.step(2)
    before, keys = (sigmas(training.model, name, shape.dim) for name in ("q_proj", "k_proj"))
    rows = training.model.attentions()[1].q_proj.weight.detach()[32:48].clone()
    scope = {"heads": [{"layer": 1, "head": 2}]}
    training.ask("qk.clip", value=0, scope=scope)
    training.monitor.actions.boundary(2)
    after = sigmas(training.model, "q_proj", shape.dim)
    others = torch.cat([before[0], before[1][[0, 1, 3]]]).double()
    assert float(before[1, 2]) > 90
    assert float(after[1, 2]) == pytest.approx(float(others.quantile(0.5)), rel=1e-5)
    keep = torch.ones_like(before, dtype=torch.bool)
    keep[1, 2] = False
    assert torch.equal(after[keep], before[keep])
    # The key head serves head 3, too, which is not in scope.
    assert torch.equal(sigmas(training.model, "k_proj", shape.dim), keys)
    # All directions but those that were too large are as they were.
    u, s, v = torch.linalg.svd(rows.double(), full_matrices=False)
    now = training.model.attentions()[1].q_proj.weight.detach()[32:48].double()
    wanted = s.clamp(max=float(others.quantile(0.5)))
    torch.testing.assert_close((u.mT @ now @ v.mT).diagonal(), wanted, rtol=1e-4, atol=1e-4)
    training.step(2)
    training.ends()


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02, momentum=0.9),
}


@pytest.mark.parametrize("value", [0.0, 0.01])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_memory_does_not_put_it_back(
    name: str, value: float, tmp_path: Path
) -> None:
    shape = Shape(fused=False, heads=4, kv_heads=4)
    given = {"path": tmp_path / "a.bwrun", "optimizer": OPTIMIZERS[name]}
    training = sick(shape, 1, 2, 40.0, **given)
    weight = training.model.attentions()[1].q_proj.weight
    rows = slice(32, 48)
    with torch.no_grad():
        direction = weight[rows] / weight[rows].norm()
    hooks = [weight.register_hook(lambda g: torch.cat([g[:32], -1e-3 * direction, g[48:]]))]
    training.step(8)  # Pushed along, as a drifting head is.
    state = training.optimizer.state[weight]
    first = next(n for n in ("exp_avg", "momentum_buffer") if n in state)
    assert state[first][rows].norm() > 0
    hooks.pop().remove()
    weight.register_hook(lambda g: torch.zeros_like(g))  # From now on only memory pushes.
    others = {k: v.clone() for k, v in state.items() if v.dim() and k != first}
    scope = {"heads": [{"layer": 1, "head": 2}]}
    id = training.ask("qk.clip", value=value, scope=scope)
    training.monitor.actions.boundary(training.steps)
    answer = training.answer(id)
    assert answer and answer["applied"] and answer["reason"] == "1 head", answer
    assert float(state[first][rows].abs().max()) == 0
    assert float(state[first][:32].abs().max()) > 0  # The other heads go on.
    assert all(torch.equal(state[k], v) for k, v in others.items())  # Second moments stay.
    clipped = float(sigmas(training.model, "q_proj", shape.dim)[1, 2])
    training.step(20)
    assert float(sigmas(training.model, "q_proj", shape.dim)[1, 2]) <= clipped * (1 + 1e-6)
    training.ends()


def test_refused_clips_say_why(tmp_path: Path) -> None:
    def asked(training: Training, value: float = 0.5, **scope: Any) -> str:
        training.step(2)
        id = training.ask("qk.clip", value=value, scope=scope)
        training.monitor.actions.boundary(training.steps)
        answer = training.answer(id)
        training.monitor.detach()
        assert answer and not answer["applied"], answer
        return str(answer["reason"])

    shape = Shape(fused=False)
    one = Training(tmp_path / "a.bwrun", shape=shape)
    assert "there is no other head" in asked(one, 0.0)
    far = Training(tmp_path / "b.bwrun", shape=shape)
    assert asked(far, heads=[{"layer": 0, "head": 4}]) == "scope: head 4, but a layer has 4"
    broken = Training(tmp_path / "c.bwrun", shape=shape)
    broken.step(2)
    before = [p.detach().clone() for p in broken.model.parameters()]
    last = broken.model.attentions()[0].q_proj.weight[60, 3]  # Of head 3, the last.
    value = float(last)
    with torch.no_grad():
        last.fill_(math.inf)
    id = broken.ask("qk.clip", value=0.5, scope={"layers": [0]})
    broken.monitor.actions.boundary(2)
    answer = broken.answer(id)
    assert answer and answer["reason"] == "the head's weights are not finite"
    with torch.no_grad():  # The heads before it are as they were, too.
        last.fill_(value)
    assert all(torch.equal(p, old) for p, old in zip(broken.model.parameters(), before))
    broken.monitor.detach()

    class Masters(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["master_param"] = p
            return super().step(closure)

    masters = Training(tmp_path / "d.bwrun", shape=shape, optimizer=lambda p: Masters(p, lr=0.1))
    assert "Masters keeps weights of its own (master_param)" in asked(masters)
    partly = Training(tmp_path / "e.bwrun", shape=shape)
    partly.optimizer = torch.optim.SGD(partly.model.inlet.parameters(), lr=0.1)
    assert "no optimizer of torch.optim holds its weights" in asked(partly)

    class Normed(Attention):
        def __init__(self, shape: Shape) -> None:
            super().__init__(shape)
            self.q_norm, self.k_norm = nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)

        def split(self, x: Tensor) -> list[Tensor]:
            q, k, v = super().split(x)
            return [self.q_norm(q), self.k_norm(k), v]

    normed = Training(tmp_path / "f.bwrun", shape=shape, model=Model(shape, kind=Normed))
    assert "normalizes queries and keys" in asked(normed)
