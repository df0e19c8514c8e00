"""Goal: a model that is compiled after it was attached tells what the eager one tells, keeps one
graph for all its blocks, and trains as it would without the hook.
Method: the same few steps eager and compiled, recorded and compared; backend "aot_eager", which
keeps the operations of eager mode, and once the default one (BELLWETHER_LONG).
"""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from comparing import OF_LINEAR
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether._hook.compiled import compiled_taps, recipes
from bellwether._step import backward_calls, clipping

from models import Attention, Biased, Model, PaddedLeft, Shape, batch
from recording import Recording

STEPS = 3

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < compiled_taps.TORCH_MIN:
    pytest.skip("compiled modules are not watched with this torch", allow_module_level=True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Checkpointed(torch.nn.Module):
    """A block whose recomputation lies inside the compiled region."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Ours(PaddedLeft):
    """Calls bellwether.attention, with all that says what a row sees."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.sinks = torch.nn.Parameter(torch.linspace(-1, 1, shape.heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        lengths = torch.full((q.shape[0],), k.shape[2] - 2)
        return bellwether.attention(
            q, k, v, causal=True, window=20, mask=self.mask(q, k), key_lengths=lengths,
            sinks=self.sinks, enable_gqa=gqa,
        )  # fmt: skip


def build(
    shape: Shape, how: str, checkpointing: Optional[str], kind: type[Attention] = Attention
) -> Model:
    torch.manual_seed(5)
    model = Model(shape, kind=kind, checkpointing=checkpointing)
    if how == "checkpoint inside":
        model.blocks = torch.nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return model


def compile_(model: Model, how: str, backend: str) -> Any:
    if how == "whole":
        return torch.compile(model, fullgraph=True, backend=backend)
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    return model


def train(
    path: Optional[Path], shape: Shape, how: str = "eager", *, tell: bool = True,
    checkpointing: Optional[str] = None, backend: str = "aot_eager", autocast: bool = False,
    evaluate: bool = False, kind: type[Attention] = Attention, stabilized: bool = False,
) -> tuple[list[Tensor], dict[int, dict[str, np.ndarray]]]:  # fmt: skip
    """(losses and weights, what was recorded)."""
    model = build(shape, how, checkpointing, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = bellwether.stabilize(model) if stabilized else None
    monitor = None
    if path is not None:
        monitor = bellwether.attach(
            model, record=str(path), run="c", every=2, rows=0, overhead_budget=1e9
        )
    run = model if how == "eager" else compile_(model, how, backend)
    found = []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(batch(shape, step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None and tell:
            monitor.step(loss=loss)
        found.append(loss.detach())
        if evaluate:
            with torch.no_grad():  # Not a sample.
                run(batch(shape, 99))
    found += [p.detach() for p in model.parameters()]
    if handle is not None:
        handle.close()
    if monitor is None:
        return found, {}
    assert monitor.flush(20)
    assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
    fired = [layer.fired for layer in monitor.layers]
    assert fired == ([2] * shape.layers if how == "eager" and not checkpointing else fired)
    monitor.detach()
    assert path is not None
    return found, Recording(path, ended=True).steps()


CASES: dict[str, dict[str, Any]] = {
    "blocks": dict(shape=Shape(), evaluate=True),
    "repeated keys": dict(shape=Shape(kv_heads=2, repeat=True, causal=False, fused=False)),
    "autocast": dict(shape=Shape(kv_heads=2), autocast=True),
    "padded": dict(shape=Shape(kv_heads=2), kind=PaddedLeft),
    "learned bias": dict(shape=Shape(), kind=Biased),
    "ours": dict(shape=Shape(kv_heads=2), kind=Ours),
    "stabilized": dict(shape=Shape(kv_heads=2), kind=PaddedLeft, stabilized=True),
    "whole": dict(shape=Shape(dtype=torch.bfloat16), how="whole"),
    "checkpoint inside": dict(shape=Shape(), how="checkpoint inside"),
    "checkpoint outside": dict(shape=Shape(), checkpointing="non-reentrant"),
    "the hook is the step": dict(shape=Shape(), tell=False),
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_tells_what_eager_tells(name: str, tmp_path: Path) -> None:
    case = {"how": "blocks", **CASES[name]}
    eager_case = {k: v for k, v in case.items() if k != "how"}
    unhooked, _ = train(None, **case)
    hooked, got = train(tmp_path / "c.bwrun", **case)
    assert all(torch.equal(a, b) for a, b in zip(unhooked, hooked))
    _, want = train(tmp_path / "e.bwrun", **eager_case)
    assert sorted(got) == sorted(want) == list(range(STEPS))
    for step, signals in want.items():
        assert got[step].keys() == signals.keys() - OF_LINEAR, step
        for signal, values in signals.items():
            if signal not in ("step_seconds", "hook_seconds", *OF_LINEAR):
                same = np.allclose(got[step][signal], values, 1e-3, 1e-5, equal_nan=True)
                assert same, (step, signal)
    assert "delta_bias_sum" in got[0] and "rows" not in got[1]


def test_all_blocks_share_one_graph(tmp_path: Path) -> None:
    shape = Shape(layers=12)
    model = Model(shape)
    with bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="shared", every=1, overhead_budget=1e9
    ) as monitor:
        torch._dynamo.utils.counters.clear()
        compile_(model, "blocks", "aot_eager")
        for step in range(2):  # More than eight graphs would raise FailOnRecompileLimitHit.
            model(batch(shape, step)).sum().backward()
            monitor.step()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert [layer.fired for layer in monitor.layers] == [2] * 12
        sums = [layer.sums for layer in monitor.layers]
        assert len({id(s) for s in sums}) == 12 and monitor.status()["errors"] == 0


@pytest.mark.parametrize("which, read", [("first", [1, 0, 0, 1, 0, 0]), ("all", [1] * 6)])
def test_micro_batches_that_are_not_measured_are_not_read(
    which: str, read: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reads: list[None] = []
    before = recipes.Recipe.read

    def counted(*args: Any) -> Any:
        reads.append(None)
        return before(*args)

    monkeypatch.setattr(recipes.Recipe, "read", counted)
    model = Model(Shape(layers=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    with bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="m", every=1, microbatches=which
    ) as monitor:
        run = compile_(model, "blocks", "aot_eager")
        for _ in range(2):
            for _ in range(3):
                reads.clear()
                run(batch(model.shape, 0)).sum().backward()
                found.append(len(reads))
            optimizer.step()
        assert [layer.fired for layer in monitor.layers] == [6]
    assert found == read


class Twice(Attention):
    """Two attentions, the second perhaps in a checkpoint of its own."""

    inside = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        def again(y: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(y, 2 * k, v, is_causal=True)

        y = super().attend(q, k, v, gqa)
        return checkpoint(again, y, use_reentrant=False) if self.inside else again(y)


def test_compiled_calls_of_one_forward_are_layers(tmp_path: Path) -> None:
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build(Shape(), "blocks", None, Twice)
        monitor = bellwether.attach(
            model, record=str(tmp_path / f"{compiled}.bwrun"), run="t", every=1, rows=0,
            overhead_budget=1e9,
        )  # fmt: skip
        if compiled:
            compile_(model, "blocks", "aot_eager")
        for step in range(2):
            model(batch(model.shape, step)).square().mean().backward()
            monitor.step(loss=1.0)
        assert [layer.fired for layer in monitor.layers] == [2] * 4
        assert [layer.index for layer in monitor.layers] == [0, 1, 2, 3]
        found.append(monitor.metrics())
        monitor.detach()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    layers = {name: value for name, value in found[0].items() if "/layer" in name}
    assert len({v for n, v in layers.items() if n.endswith("logit_max")}) == 4
    for name, value in layers.items():
        assert found[1][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_checkpoints_within_compiled_attention_still_compile(tmp_path: Path) -> None:
    unhooked, _ = train(None, Shape(), "blocks", kind=type("Inside", (Twice,), {"inside": True}))
    torch._dynamo.reset()
    hooked, _ = train(
        tmp_path / "a.bwrun", Shape(), "blocks", kind=type("Inside", (Twice,), {"inside": True})
    )
    assert all(torch.equal(a, b) for a, b in zip(unhooked, hooked))


@pytest.mark.skipif(not os.environ.get("BELLWETHER_LONG"), reason="half a minute of compiling")
def test_the_default_backend(tmp_path: Path) -> None:
    shape = Shape(layers=1)
    unhooked, _ = train(None, shape, "blocks", backend="inductor")
    hooked, got = train(tmp_path / "c.bwrun", shape, "blocks", backend="inductor")
    assert all(torch.equal(a, b) for a, b in zip(unhooked, hooked))
    _, want = train(tmp_path / "e.bwrun", shape)
    for signal in ("rows", "common_mode_sum", "key_gradient_sum", "delta_abs_sum", "wq_sigma"):
        assert np.allclose(got[2][signal], want[2][signal], rtol=1e-3), signal


def test_copies_of_a_compiled_model_are_not_watched(tmp_path: Path) -> None:
    model = Model(Shape(layers=1))
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="copies") as monitor:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert getattr(other.blocks[0].attention, compiled_taps.ATTRIBUTE) is None
            compile_(other, "blocks", "aot_eager")
            other(batch(other.shape, 0)).sum().backward()
        assert [layer.fired for layer in monitor.layers] == [0]
    assert compiled_taps.ATTRIBUTE not in vars(model.blocks[0].attention)
    assert not compiled_taps._layers


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_has_nothing_of_ours(strict: bool, tmp_path: Path) -> None:
    model = Model(Shape(layers=1))
    x = batch(model.shape, 0)
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="export"):
        exported = torch.export.export(model, (x,), strict=strict)
        assert not any("bellwether" in str(node.target) for node in exported.graph.nodes)
        assert not exported.constants
        assert torch.equal(exported.module()(x), model(x))


def test_an_older_torch_compiles_what_it_always_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_taps, "TORCH_MIN", (99, 0))
    model = Model(Shape(layers=1))
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="old") as monitor:
        compile_(model, "blocks", "aot_eager")
        model(batch(model.shape, 0)).sum().backward()
        assert [layer.fired for layer in monitor.layers] == [0]
        assert compiled_taps.ATTRIBUTE not in vars(model.blocks[0].attention)


def test_an_error_in_a_compiled_backward_stays_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bellwether._hook.layer import gradients

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(gradients, "add_probe", broken)
    monkeypatch.setattr(gradients, "add_key_leak", broken)
    unhooked, _ = train(None, Shape(), "blocks")
    model_and_losses = train_with_errors(tmp_path / "a.bwrun")
    assert all(torch.equal(a, b) for a, b in zip(unhooked, model_and_losses))


def train_with_errors(path: Path) -> list[Tensor]:
    model = build(Shape(), "blocks", None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = bellwether.attach(model, record=str(path), run="c", every=1)
    run = compile_(model, "blocks", "aot_eager")
    found = []
    for step in range(STEPS):
        loss = run(batch(Shape(), step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=loss)
        found.append(loss.detach())
    assert "planted" in monitor.status()["why_off"]
    monitor.detach()
    return found + [p.detach() for p in model.parameters()]


class Told:
    """A host of backward() and clip_grad_norm_()."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def backward_called(self) -> None:
        self.calls.append("begins")

    def backward_returned(self) -> None:
        self.calls.append("ends")

    def gradients_clip(self, *_: Any) -> None:
        self.calls.append("clips")


def compiled_steps(told: Optional[Told], direct: bool) -> tuple[list[Tensor], list[list[str]]]:
    """Losses and weights, and the operations of each graph.  Of steps that are compiled whole."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 8)
    graphs: list[list[str]] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([node.name for node in graph.graph.nodes])
        return graph.forward

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if direct:
            torch.autograd.backward(loss)
        else:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss.detach()

    hosts: Any = (backward_calls, clipping)
    for module in hosts if told is not None else ():
        module.install(told)
    try:
        compiled = torch.compile(step, backend=backend)
        losses = [compiled(batch(Shape(width=8), i)) for i in range(STEPS)]
    finally:
        for module in hosts if told is not None else ():
            module.uninstall(told)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients], graphs


@pytest.mark.parametrize("direct", [False, True])
def test_a_compiled_step_tells_its_backward(direct: bool) -> None:
    """Also with a torch that compiles what of ours it is not kept from."""
    told = Told()
    bare, bare_graphs = compiled_steps(None, direct)
    bits, graphs = compiled_steps(told, direct)
    assert graphs == bare_graphs and len(bits) == len(bare)
    assert all(torch.equal(a, b) for a, b in zip(bits, bare))
    assert [call for call in told.calls if call != "clips"] == ["begins", "ends"] * STEPS
