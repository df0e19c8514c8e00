"""Goal: attention modules are found whatever their shape, and patching leaves nothing behind.
Method: small models of each kind; every namespace is compared before and after.
"""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bellwether
from bellwether._hook.model.candidates import find_candidates
from bellwether._hook.patches import class_patches, registry
from bellwether._weights import names

import models
from models import ByAttribute, ByName, Model, Shape, batch


def names_of(model: nn.Module) -> list[str]:
    found = find_candidates(model, lambda name, module: names.named(module))
    return [name for name, _ in found]


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class WithCore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk = nn.Linear(8, 8), nn.Linear(8, 8)
        self.core = Core()


class UsesFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attend(x)


class Unrelated(nn.Module):
    """Mentions scaled_dot_product_attention in words only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


def test_candidates() -> None:
    assert names_of(Model(Shape(layers=3))) == [f"blocks.{i}.attention" for i in range(3)]
    assert names_of(nn.Sequential(WithCore(), Unrelated(), WithCore())) == ["0", "2"]
    assert names_of(nn.Sequential(Core(), UsesFunction(), Unrelated())) == ["0", "1"]
    assert names_of(Unrelated()) == []
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)
    assert names_of(encoder) == ["layers.0.self_attn", "layers.1.self_attn"]


def snapshot(model: nn.Module) -> dict[Any, Any]:
    """Everything that attaching might touch."""
    seen: dict[Any, Any] = {"F": F.scaled_dot_product_attention}
    for name, value in vars(models).items():
        seen["models", name] = value
    for module in model.modules():
        seen[id(module)] = dict(vars(module))
        for cls in type(module).__mro__:
            seen[cls] = dict(vars(cls))
    return seen


@pytest.mark.parametrize("kind", [models.Attention, ByName, ByAttribute])
def test_detach_leaves_nothing(kind: type, tmp_path: Any) -> None:
    model = Model(Shape(), kind=kind)
    before = snapshot(model)
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="nothing")
    assert F.scaled_dot_product_attention is before["F"]
    assert snapshot(model) != before
    monitor.detach()
    after = snapshot(model)
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert after[key] == value, key
    assert not registry.layers and not class_patches.users
    monitor.detach()  # Twice is once.
    assert F.scaled_dot_product_attention is before["F"]


def test_two_models_of_one_class_do_not_mix(tmp_path: Any) -> None:
    first, second = Model(Shape(layers=1)), Model(Shape(layers=2))
    original = models.Attention.forward
    a = bellwether.attach(first, record=str(tmp_path / "a.bwrun"), run="a")
    b = bellwether.attach(second, record=str(tmp_path / "b.bwrun"), run="b")
    first(batch(Shape(), 0)).sum().backward()
    assert [layer.fired for layer in a.layers] == [1]
    assert [layer.fired for layer in b.layers] == [0, 0]
    a.detach()
    second(batch(Shape(), 0)).sum().backward()
    assert [layer.fired for layer in b.layers] == [1, 1]
    b.detach()
    assert models.Attention.forward is original


@pytest.mark.parametrize("inherited", [False, True])
def test_a_patch_over_ours_stays(inherited: bool, tmp_path: Any) -> None:
    class Own(models.Attention):
        if not inherited:

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)

    model = Model(Shape(), kind=Own)
    x = batch(model.shape, 0)
    plain = model(x)
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="over")
    ours = Own.forward

    def theirs(self: Any, x: Tensor) -> Tensor:
        return 2 * ours(self, x)

    Own.forward = theirs  # type: ignore[method-assign]
    doubled = model(x)
    assert not torch.equal(doubled, plain)
    monitor.detach()
    assert Own.forward is theirs and torch.equal(model(x), doubled)
    # Once more over theirs: one call is one call.
    with bellwether.attach(model, record=str(tmp_path / "b.bwrun"), run="again") as monitor:
        model(x).sum().backward()
        assert [layer.calls for layer in monitor.layers] == [1, 1]
    assert Own.forward is theirs and torch.equal(model(x), doubled)


def test_deepcopy_and_pickle_work_while_attached(tmp_path: Any) -> None:
    model = Model(Shape(), kind=ByAttribute)
    x = batch(model.shape, 0)
    want = model(x)
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="copies")
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert twin.state_dict().keys() == model.state_dict().keys()
    for other in (twin, loaded):
        assert torch.equal(other(x), want)
        other(x).sum().backward()
    assert [layer.fired for layer in monitor.layers] == [0, 0]  # Copies are not watched.
    monitor.detach()
    assert torch.equal(twin(x), want) and torch.equal(loaded(x), want)


def test_output_may_be_changed_in_place_as_before(tmp_path: Any) -> None:
    class InPlace(models.Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, k, v).mul_(2)

    def gradients(model: Model) -> list[Tensor]:
        model(batch(model.shape, 1)).square().sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    model = Model(Shape(), kind=InPlace)
    plain = gradients(model)
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="inplace"):
        watched = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))


def test_checkpoint_around_the_call_itself_is_left_alone(tmp_path: Any) -> None:
    class Inside(models.Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
            call = torch.utils.checkpoint.checkpoint
            return call(lambda *x: F.scaled_dot_product_attention(*x), q, k, v, use_reentrant=False)

    model = Model(Shape(), kind=Inside)
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="inside") as monitor:
        model(batch(model.shape, 1)).sum().backward()  # A CheckpointError would end the test.
        assert all("checkpoint" in " ".join(x["notes"]) for x in monitor.status()["layers"])


def test_torch_func_and_double_backward_pass_through(tmp_path: Any) -> None:
    model = Model(Shape(layers=1))
    x = batch(model.shape, 1).requires_grad_()
    with (
        bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="func") as monitor,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        g.square().sum().backward()
        torch.func.grad(lambda z: model(z).sum())(x.detach())
        assert monitor.status()["errors"] == 0


def test_compiled_code_is_not_broken(tmp_path: Any) -> None:
    model = Model(Shape(layers=2))
    x = batch(model.shape, 1)
    want = model(x)
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="compiled"):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        got = compiled(x)
        got.sum().backward()
    assert torch.allclose(got, want)
    sys.modules["torch._dynamo"].reset()
