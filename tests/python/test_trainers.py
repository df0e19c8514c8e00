"""Goal: every optimizer step of the model is seen, once: also after its parameters were replaced,
after another optimizer went on, with several of them in each step or in turns.
Method: short runs of each kind, whose frames are counted, without mon.step(); the taking of turns
on the class itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bellwether
from bellwether._hook.model import already_compiled
from bellwether._step.changes import Changes
from bellwether._step.step_ends import PASSES_MAX
from bellwether._step.trainers import Trainers

from models import Model, Shape, batch
from recording import Recording

SHAPE = Shape(layers=1, fused=False)


def attached(model: nn.Module, path: Path) -> Any:
    return bellwether.attach(model, record=str(path), run="t", every=2, overhead_budget=1e9)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        model(batch(SHAPE, step, 1, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ended(monitor: Any, path: Path) -> list[int]:
    """The steps that were told."""
    assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()
    monitor.detach()
    recorded = Recording(path, ended=True)
    steps = recorded.steps()
    assert all(("rows" in signals) == (step % 2 == 0) for step, signals in steps.items())
    return [frame.step for frame in recorded.frames]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def fsdp2(model: Model) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def fsdp1(model: Model, original: bool = False) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))


def fsdp1_original(model: Model) -> nn.Module:
    return fsdp1(model, True)


def filled(model: Model) -> nn.Module:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
    return model


@pytest.mark.parametrize(
    "replace", [fsdp2, fsdp1, fsdp1_original, filled], ids=lambda f: f.__name__
)
def test_parameters_that_are_replaced_after_attach(
    replace: Any, tmp_path: Path, one_rank: None
) -> None:
    with torch.device("meta" if replace is filled else "cpu"):
        model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    run = replace(model)
    train(run, sgd(run), 5)
    assert ended(monitor, tmp_path / "a.bwrun") == [0, 1, 2, 3, 4]
    steps = Recording(tmp_path / "a.bwrun").steps()
    assert all(torch.tensor(steps[s]["wq_sigma"]).isfinite().all() for s in (0, 2, 4))


def test_another_optimizer_goes_on_while_the_first_is_still_there(tmp_path: Path) -> None:
    model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    first, second = sgd(model), sgd(model)
    train(model, first, 5)
    train(model, second, 6)
    assert ended(monitor, tmp_path / "a.bwrun") == list(range(11))


def test_an_optimizer_a_step(tmp_path: Path) -> None:
    model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    for _ in range(6):
        train(model, sgd(model), 1)
    assert len(monitor.steps.ends.trainers) == 1
    assert ended(monitor, tmp_path / "a.bwrun") == list(range(6))


def test_two_optimizers_in_every_step(tmp_path: Path) -> None:
    model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    parts = [p for p in model.parameters()]
    pair = [torch.optim.SGD(parts[:2], lr=0.01), torch.optim.AdamW(parts[2:], lr=0.01)]
    for step in range(6):
        model(batch(SHAPE, step, 1, 8)).square().mean().backward()
        for optimizer in pair if step % 2 else reversed(pair):
            optimizer.step()
    assert ended(monitor, tmp_path / "a.bwrun") == list(range(6))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("attention_last", [False, True])
def test_norms_are_those_behind_all_optimizers_of_a_step(
    attention_last: bool, explicit: bool, tmp_path: Path
) -> None:
    model = Model(SHAPE)
    monitor = bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="t", every=1, overhead_budget=1e9
    )
    weight = model.blocks[0].attention.q_proj.weight
    others = [p for p in model.parameters() if p is not weight]
    optimizers = [torch.optim.SGD([weight], lr=1.0), torch.optim.SGD(others, lr=0.1)]
    if attention_last:
        optimizers.reverse()
    want = []
    for step in range(3):
        model(batch(SHAPE, step, 1, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if explicit:
            monitor.step()
        heads = weight.detach().double().unflatten(0, (SHAPE.heads, -1))
        want.append(torch.linalg.matrix_norm(heads, ord=2))
    assert monitor.flush(20) and monitor.status()["errors"] == 0
    monitor.detach()
    steps = Recording(tmp_path / "a.bwrun", ended=True).steps()
    for step, norms in enumerate(want):
        assert torch.allclose(torch.tensor(steps[step]["wq_sigma"][0]).double(), norms, rtol=1e-5)


class Perturbing(torch.optim.Optimizer):
    """As SAM: it goes uphill, and steps by the gradients that it finds there."""

    def __init__(self, model: nn.Module, base: type[torch.optim.Optimizer]) -> None:
        super().__init__(model.parameters(), {})
        self.base: Any = base(self.param_groups, lr=0.01)  # type: ignore[call-arg]
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=0.1)

    @torch.no_grad()
    def descend(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["before"])
        self.base.step()

    def step(self, closure: Any = None) -> None:
        self.climb()
        self.zero_grad()
        with torch.enable_grad():
            closure()
        self.descend()


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("how", ["by hand", "closure", "twice", "lbfgs"])
def test_weights_that_change_several_times_in_a_step(
    how: str, base: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    optimizer: Any = Perturbing(model, base)
    if how == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=4)
    for step in range(5):

        def loss(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            found = model(batch(SHAPE, step, 1, 8)).square().mean()
            found.backward()
            return found

        if how != "lbfgs":
            loss()
        if how == "by hand":
            optimizer.climb()
            loss()
            optimizer.descend()
        else:
            optimizer.step((lambda: (loss(), optimizer.base.step())) if how == "twice" else loss)
    assert ended(monitor, tmp_path / "a.bwrun") == [0, 1, 2, 3, 4]


def test_an_optimizer_whose_step_has_raised_steps_again(tmp_path: Path) -> None:
    model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    optimizer = sgd(model)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    train(model, optimizer, 5)
    assert ended(monitor, tmp_path / "a.bwrun") == [0, 1, 2, 3, 4]


def test_a_model_of_two_that_are_trained_in_turns(tmp_path: Path) -> None:
    model = nn.ModuleList([Model(SHAPE), Model(SHAPE)])
    monitor = attached(model, tmp_path / "a.bwrun")
    optimizers = [torch.optim.AdamW(part.parameters()) for part in model]
    for step in range(5):
        made = model[0](batch(SHAPE, step, 1, 8))
        model[1](made.detach()).square().mean().backward()
        optimizers[1].step()
        model[1](made).square().mean().backward()
        optimizers[0].step()
        model.zero_grad()
    assert ended(monitor, tmp_path / "a.bwrun") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("micro", ["first", "all"])
def test_a_loop_without_steps_is_sampled_at_its_beginning_only(
    micro: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(SHAPE)
    with bellwether.attach(
        model, record=str(tmp_path / "a.bwrun"), run="b", microbatches=micro
    ) as monitor:
        for passes in range(1, 80):
            model(batch(SHAPE, 0, 1, 4)).sum().backward()
            assert monitor.steps.reads_calls() == (passes <= PASSES_MAX), passes
        layer = monitor.steps.layers[0]
        assert layer.sums.probed == (1 if micro == "first" else PASSES_MAX)
        monitor.step()
        model(batch(SHAPE, 0, 1, 4)).sum().backward()
        assert monitor.status()["step"] == 1
    assert "call mon.step() once per step" in caplog.text


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_is_compiled(kind: Any, tmp_path: Path) -> None:
    model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    optimizer = kind(model.parameters(), lr=0.01, foreach=False)
    compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(4):
        model(batch(SHAPE, step, 1, 8)).square().mean().backward()
        compiled()
        optimizer.zero_grad()
    assert ended(monitor, tmp_path / "a.bwrun") == [0, 1, 2, 3]


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_an_optimizer_for_each_weight_within_the_backward(
    checkpointing: Any, tmp_path: Path
) -> None:
    model = Model(Shape(layers=3, fused=False), checkpointing=checkpointing)
    monitor = attached(model, tmp_path / "a.bwrun")
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for step in range(6):
        model(batch(SHAPE, step, 1, 8)).square().mean().backward()
    assert monitor.flush(20)
    assert monitor.status()["step"] == 6
    monitor.detach()


def test_passes_without_a_step_are_told_also_between_samples(tmp_path: Path) -> None:
    model = Model(SHAPE)
    with bellwether.attach(model, record=str(tmp_path / "a.bwrun"), run="b", every=50) as monitor:
        train(model, sgd(model), 2)
        assert not monitor.steps.samples_step() or monitor.flush()
        for _ in range(64):
            model(batch(SHAPE, 0, 1, 4)).sum().backward()
        assert not monitor.steps.samples_step() and not monitor.steps.ends.warned
        model(batch(SHAPE, 0, 1, 4)).sum().backward()
        assert monitor.steps.ends.warned


class Turns:
    """Optimizers of one model; `steps` says which of them ended a step of it."""

    def __init__(self, count: int) -> None:
        self.weight = nn.Parameter(torch.zeros(1))
        self.optimizers = [torch.optim.SGD([self.weight], lr=0.1) for _ in range(count)]
        self.trainers = Trainers(lambda: [self.weight])

    def steps(self, order: str) -> str:
        """`order`: f = a forward pass, a digit = a step of that optimizer."""
        ended = ""
        for what in order:
            if what == "f":
                self.trainers.forward()
                continue
            optimizer = self.optimizers[int(what)]
            assert self.trainers.trains(optimizer)
            ended += what if self.trainers.ends_step(optimizer) else ""
        return ended


@pytest.mark.parametrize(
    ("order", "ended"),
    [
        ("f0f0f1f1f1", "00111"),  # One after the other.
        ("f0f0f1f1f0f0f0", "001100"),  # And back: the first of them is known already.
        ("f0f1f0f1f0f1", "000"),  # In turns.
        ("f01f01f10f10", "0011"),  # Together.
        ("f0f01f0f01f0f01", "000000"),  # One of them every other time.
        ("f0011", "001"),  # Where the forward passes are not known.
        ("0000111", "000011"),
    ],
)
def test_the_right_optimizer_ends_the_step(order: str, ended: str) -> None:
    assert Turns(2).steps(order) == ended


def test_other_optimizer_is_asked_seldom_and_may_become_trainer() -> None:
    asked: list[int] = []
    own, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def parameters() -> list[nn.Parameter]:
        asked.append(1)
        return [own]

    trainers = Trainers(parameters)
    stranger = torch.optim.SGD([other], lr=0.1)
    assert not any(trainers.trains(stranger) for _ in range(1000))
    assert len(asked) == 10  # 1, 2, 4 ... 512
    stranger.add_param_group({"params": [own]})
    assert trainers.trains(stranger) and trainers.known() == [stranger]
    count = len(asked)
    assert all(trainers.trains(stranger) for _ in range(100)) and len(asked) == count
    del stranger
    assert trainers.known() == []


def test_optimizers_of_other_models_are_not_asked_for_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That would look through the whole process for each of them."""
    asked: list[None] = []
    monkeypatch.setattr(already_compiled, "optimizer_step", lambda: asked.append(None))
    own, *others = (nn.Parameter(torch.zeros(1)) for _ in range(4))
    strangers = [torch.optim.SGD([other], lr=0.1) for other in others]
    trainers = Trainers(lambda: [own])
    assert not trainers.one_has_not_stepped() and not asked and len(strangers) == 3
    optimizer = torch.optim.SGD([own], lr=0.1)
    assert trainers.one_has_not_stepped() and len(asked) == 1
    del optimizer


class Master:
    """Steps copies of the parameters, and writes them back: what mixed precision and ZeRO do."""

    def __init__(self, model: nn.Module, parts: int = 1, by_data: bool = False) -> None:
        self.model, self.by_data = list(model.parameters()), by_data
        self.copies = [p.detach().clone().requires_grad_() for p in self.model]
        self.inner = torch.optim.AdamW(self.copies, lr=0.01)
        self.parts = parts

    def step(self) -> None:
        for number in range(self.parts):
            own = range(number, len(self.copies), self.parts)
            for i in own:
                self.copies[i].grad = self.model[i].grad
            self.inner.param_groups[0]["params"] = [self.copies[i] for i in own]
            self.inner.step()
        with torch.no_grad():
            for p, copy in zip(self.model, self.copies):
                (p.data if self.by_data else p).copy_(copy)

    def zero_grad(self) -> None:
        for p in self.model:
            p.grad = None


class Own:
    """No optimizer of torch."""

    def __init__(self, model: nn.Module, how: str) -> None:
        self.model, self.how = list(model.parameters()), how

    @torch.no_grad()
    def step(self) -> None:
        for p in self.model:
            assert p.grad is not None
            if self.how == "in place":
                p.sub_(0.01 * p.grad)
            elif self.how == "by data":
                p.data -= 0.01 * p.grad
            else:
                p.data = p.data - 0.01 * p.grad

    def zero_grad(self) -> None:
        for p in self.model:
            p.grad = None


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_an_optimizer_of_copies_of_the_parameters(
    parts: int, by_data: bool, tmp_path: Path
) -> None:
    model, path = Model(SHAPE), tmp_path / "a.bwrun"
    optimizer = Master(model, parts, by_data)
    monitor = attached(model, path)
    want = []
    for _ in range(5):
        train(model, optimizer, 1)
        weight = model.attentions()[0].q_proj.weight.detach()
        want.append(torch.linalg.matrix_norm(weight.unflatten(0, (SHAPE.heads, -1)), ord=2))
    assert ended(monitor, path) == [0, 1, 2, 3, 4]
    steps = Recording(path).steps()
    for step in (0, 2, 4):  # That of the model behind the step.
        assert torch.allclose(torch.tensor(steps[step]["wq_sigma"][0]), want[step], rtol=1e-4)


@pytest.mark.parametrize("how", ["in place", "by data", "replaced"])
@pytest.mark.parametrize("micro", [1, 3])
def test_an_optimizer_that_is_none_of_torch(how: str, micro: int, tmp_path: Path) -> None:
    model, other = Model(SHAPE), nn.Linear(4, 4)
    monitor, optimizer = attached(model, tmp_path / "a.bwrun"), Own(model, how)
    beside = torch.optim.SGD(other.parameters(), lr=0.1)  # Of another model: tells no step.
    for step in range(5):
        for part in range(micro):
            model(batch(SHAPE, step * micro + part, 1, 8)).square().mean().backward()
            other(torch.randn(2, 4)).sum().backward()
            beside.step()
        optimizer.step()
        optimizer.zero_grad()
    assert ended(monitor, tmp_path / "a.bwrun") == [0, 1, 2, 3, 4]


def test_passes_that_change_nothing_are_no_steps(tmp_path: Path) -> None:
    model = Model(SHAPE)
    with attached(model, tmp_path / "a.bwrun") as monitor:
        for _ in range(5):
            model(batch(SHAPE, 0, 1, 8)).sum().backward()
        assert monitor.status()["step"] == 0


_DEEPSPEED = """
import os, sys
os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
sys.path[:0] = [TESTS, PACKAGE]
import torch, deepspeed, bellwether
from models import Model, Shape, batch
torch.distributed.init_process_group("gloo", init_method="file://" + STORE, rank=0, world_size=1)
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
torch.manual_seed(0)
model = Model(Shape(layers=2, fused=False))
monitor = bellwether.attach(model, record=RECORD, run="d", every=1, overhead_budget=1e9,
                            stats=frozenset(bellwether.settings.STATS))
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-3),
    config={"train_micro_batch_size_per_gpu": 1, "zero_optimization":
            {"stage": STAGE, "stage3_param_persistence_threshold": PERSISTENT},
            "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True})
for step in range(5):
    engine.backward(engine(batch(Shape(), step, 1, 8).bfloat16()).float().square().mean())
    engine.step()
assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()
said = monitor.status()["tensors"]["left_out"]
assert set(said) == {n for n, _ in model.named_parameters()}, said
assert all("holds copies" in why for why in said.values()), said
monitor.detach()
"""


@pytest.mark.parametrize(("stage", "persistent"), [(1, 0), (2, 0), (3, 0), (3, 100_000)])
def test_the_engine_of_deepspeed(stage: int, persistent: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    here = Path(__file__).resolve().parent
    package = here.parents[1] / "client_lib" / "python"
    told: dict[str, Any] = {
        "TESTS": str(here),
        "PACKAGE": str(package),
        "STORE": str(tmp_path / "store"),
    }
    told |= {"RECORD": str(tmp_path / "a.bwrun"), "STAGE": stage, "PERSISTENT": persistent}
    head = "".join(f"{name} = {value!r}\n" for name, value in told.items())
    ran = subprocess.run([sys.executable, "-c", head + _DEEPSPEED], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    recorded = Recording(tmp_path / "a.bwrun", ended=True)
    assert [frame.step for frame in recorded.frames] == [0, 1, 2, 3, 4]
    for step, signals in recorded.steps().items():
        assert (signals["rows"] > 0).all()
        # Weights that are whole in the forward only are known as such from the first step on.
        if step > 0 or persistent or stage < 3:
            assert torch.tensor(signals["wq_sigma"]).isfinite().all()


def test_the_wrapper_of_schedulefree(tmp_path: Path) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    model = Model(SHAPE)
    monitor = attached(model, tmp_path / "a.bwrun")
    optimizer = schedulefree.ScheduleFreeWrapper(
        torch.optim.SGD(model.parameters(), lr=0.01), momentum=0.9
    )
    optimizer.train()
    train(model, optimizer, 5)
    assert ended(monitor, tmp_path / "a.bwrun") == [0, 1, 2, 3, 4]


def test_changes_that_only_a_device_shows_say_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(SHAPE)
    seen = iter([(False, True), (True, False), (True, False), (True, False)])
    with attached(model, tmp_path / "a.bwrun") as monitor:
        monkeypatch.setattr(Changes, "look", lambda *_: next(seen))
        told: list[str] = []
        monkeypatch.setattr("bellwether._util.log.warning", told.append)
        train(model, Own(model, "by data"), 4)
        assert monitor.status()["step"] == 0 and len(told) == 1 and "call mon.step()" in told[0]
        monkeypatch.undo()
