"""Goal: what is told of each parameter equals a recomputation in float64, for each way of training.
A parameter that does not move, one whose gradient explodes and one that is not finite are seen.
Training stays the same bit for bit.
Method: trainings whose gradients, moments and weights are kept beside them, compared with their
recordings; parts of tensors by stand-ins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from told_tensors import Kept, Told, told_in
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether._hook.model.parallel import Parallel
from bellwether._kernels import large_tensors
from bellwether._kernels.memory import Memories
from bellwether._step.tensor_rows import MOMENTS_ELSEWHERE, SPARSE, UNHEARD, TensorRows
from bellwether._step.tensor_sample import SIGNALS, TURN_SIGNALS
from bellwether._step.tensors import COPIED_LEAST, Tensors
from bellwether.settings import STATS

from conftest import in_long
from models import Model, Shape, batch

SHAPE = Shape(layers=1, fused=False)
ALL: dict[str, Any] = {"stats": frozenset(STATS)}


def keep(model: nn.Module, optimizer: Optimizer) -> Callable[[], dict[str, Kept]]:
    """Of now, before the optimizer's step; what is returned is to be called behind it."""

    def double(t: Any) -> Any:
        return t.detach().double().clone() if isinstance(t, Tensor) else None

    names = {p: n.removeprefix("_orig_mod.") for n, p in model.named_parameters()}
    groups = {p: g for g in optimizer.param_groups for p in g["params"]}
    kept = {}
    for p, name in names.items():
        state, group = optimizer.state.get(p, {}), groups.get(p, {})
        first = state.get("exp_avg", state.get("momentum_buffer", state.get("state1")))
        second = state.get("exp_avg_sq", state.get("state2"))
        eps = group.get("eps", 0) if "betas" in group else 0
        kept[name] = Kept(
            double(p.grad), double(p), double(p),
            double(first), double(second), float(state.get("step", group.get("k", 0))) + 1,
            group.get("betas", (0, 0))[1], eps,
        )  # fmt: skip

    def stepped() -> dict[str, Kept]:
        for p, name in names.items():
            kept[name].after = double(p)
        return kept

    return stepped


def trained(
    path: Path, make: Callable[[nn.Module], Optimizer], steps: int = 20,
    model: Optional[nn.Module] = None, scaler: Any = None, micro: int = 1,
    clip: Optional[float] = None, change: Callable[[nn.Module, int], Any] = lambda m, s: None,
    **settings: Any,
) -> tuple[list[dict[str, Kept]], Any]:  # fmt: skip
    torch.manual_seed(0)
    model = Model(SHAPE) if model is None else model
    monitor = bellwether.attach(
        model, run="tensors", record=str(path), every=1, overhead_budget=1e9, **(ALL | settings)
    )
    optimizer = make(model)
    kept = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            loss = model(batch(SHAPE, step * micro + part)).square().mean() / micro
            (scaler.scale(loss) if scaler else loss).backward()
        change(model, step)
        if scaler:
            scaler.unscale_(optimizer)
        stepped = keep(model, optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            # Moments meet the clipped gradients.
            clipped = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        kept.append(stepped())
        if clip is not None:
            for name, grad in clipped.items():
                of = dataclasses.replace(kept[-1][name], g=grad.double().clone())
                unclipped = kept[-1][name].wanted()
                wanted = {
                    k: unclipped[k] if k.startswith("tensor_grad") else x
                    for k, x in of.wanted().items()
                }
                kept[-1][name].wanted = lambda wanted=wanted: wanted  # type: ignore[method-assign]
    status = monitor.status()
    assert status["errors"] == 0 and status["live"], status["last_error"]
    monitor.detach()
    return kept, status["tensors"]


def assert_told(
    path: Path, kept: list[dict[str, Kept]], skip: tuple[str, ...] = (),
    not_of: Optional[set[str]] = None,
) -> Told:  # fmt: skip
    """skip  signals of no parameter; not_of  parameters without moments"""
    told = told_in(path)
    turns: dict[str, set[str]] = {signal: set() for signal in TURN_SIGNALS}
    for step, of_step in enumerate(kept):
        for name, of in of_step.items():
            got, want = told[step][name], of.wanted()
            for signal in SIGNALS:
                assert (signal in got) == (signal in want), (step, name, signal)
            for signal, value in got.items():
                size = want[signal]
                if signal == "tensor_momentum_dot":
                    assert of.g is not None and of.m is not None
                    size = float((of.g * of.m).abs().sum())
                assert value == pytest.approx(want[signal], abs=1e-5 * abs(size)), (name, signal)
                if signal in TURN_SIGNALS:
                    turns[signal].add(name)
    for signal, names in turns.items():
        none = not_of if not_of is not None and "change" not in signal else set()
        assert names == (set() if signal in skip else set(kept[0]) - none), signal
    return told


def adamw(**how: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), 1e-3, **how)


# On CPUs foreach is off by itself.
HOWS = [{}, {"foreach": True}, {"fused": True}, {"foreach": False}, {"amsgrad": True}]


@pytest.mark.parametrize("how", in_long([{"foreach": False}], HOWS), ids=str)
def test_values_equal_a_recomputation_in_float64(how: dict[str, Any], tmp_path: Path) -> None:
    kept, status = trained(tmp_path / "a.bwrun", adamw(**how))
    assert_told(tmp_path / "a.bwrun", kept)
    assert status["rows"] == len(kept[0]) and status["left_out"] == {}


def test_accumulated_gradients_are_those_of_the_step(tmp_path: Path) -> None:
    kept, _ = trained(tmp_path / "a.bwrun", adamw(), steps=4, micro=3)
    told = told_in(tmp_path / "a.bwrun")
    for step, of_step in enumerate(kept):
        for name, of in of_step.items():
            want = of.wanted()["tensor_grad_sumsq"]
            assert told[step][name]["tensor_grad_sumsq"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_told_without_the_loss_scale(fused: bool, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    kept, _ = trained(tmp_path / "a.bwrun", adamw(fused=fused), scaler=scaler)
    assert_told(tmp_path / "a.bwrun", kept)


def test_a_fused_step_that_unscales_itself_is_told_unscaled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(SHAPE)
    monitor = bellwether.attach(
        model, run="tensors", record=str(tmp_path / "a.bwrun"), every=1, overhead_budget=1e9, **ALL
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch(SHAPE, step)).square().mean()).backward()
        norms.append({n: p.grad.norm() / 1024 for n, p in model.named_parameters()})  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
    monitor.detach()
    told = told_in(tmp_path / "a.bwrun")
    for step, of_step in enumerate(norms):
        for name, norm in of_step.items():
            got = told[step][name]["tensor_grad_sumsq"]
            assert math.sqrt(got) == pytest.approx(float(norm), rel=1e-5)


def test_clipping_is_not_seen_in_gradients(tmp_path: Path) -> None:
    kept, _ = trained(tmp_path / "a.bwrun", adamw(), clip=1e-4)
    assert_told(tmp_path / "a.bwrun", kept)


def test_a_step_that_the_job_skips_itself_is_not_told(tmp_path: Path) -> None:
    """It clips, sees that the norm is no number, and goes on."""
    torch.manual_seed(0)
    model = Model(SHAPE)
    path = tmp_path / "a.bwrun"
    monitor = bellwether.attach(model, run="tensors", record=str(path), every=1, **ALL)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(6):
        optimizer.zero_grad()
        model(batch(SHAPE, step)).square().mean().backward()
        if step == 3:
            next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        monitor.step()
    monitor.detach()
    assert {step for step, of in told_in(path).items() if any(of.values())} == {0, 1, 2, 4, 5}


@pytest.mark.parametrize("clip", [None, 1e-4])
def test_steps_are_told_apart_without_attention(clip: Optional[float], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48))
    kept, _ = trained(tmp_path / "a.bwrun", adamw(), model=model, clip=clip)
    assert_told(tmp_path / "a.bwrun", kept)


@pytest.mark.parametrize("rate", [1e-3, 0.0])
def test_large_parameters_are_told(rate: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 6000), nn.GELU(), nn.Linear(6000, 48))
    assert model[0].weight.numel() >= large_tensors.LEAST
    kept, _ = trained(
        tmp_path / "a.bwrun", lambda m: torch.optim.AdamW(m.parameters(), rate),
        model=model, steps=6,
    )  # fmt: skip
    told = told_in(tmp_path / "a.bwrun")
    for step, of_step in enumerate(kept):
        for name, of in of_step.items():
            want = of.wanted()
            for signal in SIGNALS:
                near = pytest.approx(want[signal], abs=1e-5 * abs(want[signal]))
                assert told[step][name][signal] == near, (name, signal)


def test_optimizers_without_a_second_moment_say_so(tmp_path: Path) -> None:
    kept, status = trained(
        tmp_path / "a.bwrun", lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)
    )
    assert_told(tmp_path / "a.bwrun", kept, skip=("tensor_lag_sum",))
    assert set(status["left_out"]) == set(kept[0])
    assert "second moment" in next(iter(status["left_out"].values()))


class Worded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(16, SHAPE.width, sparse=True), Model(SHAPE)

    def forward(self, x: Tensor) -> Tensor:
        words = torch.arange(x.shape[1], dtype=torch.int64) % 16
        return self.inner(x + self.words(words))  # type: ignore[no-any-return]


def watched_steps(
    path: Path, model: nn.Module, step: Callable[[], Any], steps: int = 4
) -> dict[str, str]:
    """What is left out of the parameters."""
    monitor = bellwether.attach(
        model, run="tensors", record=str(path), every=1, overhead_budget=1e9, **ALL
    )
    for number in range(steps):
        model.zero_grad()
        model(batch(SHAPE, number)).square().mean().backward()
        step()
    status = monitor.status()
    monitor.detach()
    assert status["errors"] == 0, status["last_error"]
    return status["tensors"]["left_out"]


def test_sparse_gradients_are_left_out_by_name(tmp_path: Path) -> None:
    model = Worded()
    sparse = torch.optim.SparseAdam([model.words.weight], 1e-3)
    dense = torch.optim.AdamW(model.inner.parameters(), 1e-3)
    both = (sparse, dense)
    left_out = watched_steps(tmp_path / "a.bwrun", model, lambda: [o.step() for o in both])
    assert left_out == {"words.weight": SPARSE}


def test_an_optimizer_of_another_kind_is_said(tmp_path: Path) -> None:
    model = Model(SHAPE)

    @torch.no_grad()
    def step() -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.1)

    left_out = watched_steps(tmp_path / "a.bwrun", model, step)
    assert left_out == {name: UNHEARD for name, _ in model.named_parameters()}


def test_an_optimizer_that_is_heard_late_is_not_said(tmp_path: Path) -> None:
    model = Model(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    done: list[int] = []

    @torch.no_grad()
    def step() -> None:
        done.append(1)
        if len(done) > 3:
            optimizer.step()
        for p in model.parameters() if len(done) < 4 else ():
            p.mul_(0.9)

    assert watched_steps(tmp_path / "a.bwrun", model, step, steps=7) == {}


def test_muon_has_momentum_and_no_second_moment(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(3)))
    kept, status = trained(
        tmp_path / "a.bwrun", lambda m: torch.optim.Muon(m.parameters(), 1e-3), model=model
    )
    assert_told(tmp_path / "a.bwrun", kept, skip=("tensor_lag_sum",))
    assert set(status["left_out"]) == set(kept[0])


def test_factored_moments_are_left_out_by_name(tmp_path: Path) -> None:
    kept, status = trained(
        tmp_path / "a.bwrun", lambda m: torch.optim.Adafactor(m.parameters(), 1e-3)
    )
    moments = ("tensor_lag_sum", "tensor_momentum_dot", "tensor_momentum_norms")
    assert_told(tmp_path / "a.bwrun", kept, skip=moments)
    assert set(status["left_out"]) == set(kept[0])


def test_schedule_free_moments_have_the_steps_of_their_group(tmp_path: Path) -> None:
    schedulefree = pytest.importorskip("schedulefree")

    def free(model: nn.Module) -> Any:
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-3, warmup_steps=5)
        optimizer.train()
        return optimizer

    kept, status = trained(tmp_path / "a.bwrun", free)
    assert_told(tmp_path / "a.bwrun", kept, ("tensor_momentum_dot", "tensor_momentum_norms"))
    assert status["left_out"] == {}


def test_moments_of_eight_bits_are_left_out_by_name(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 128))
    kept, status = trained(
        tmp_path / "a.bwrun", lambda m: bitsandbytes.optim.AdamW8bit(m.parameters(), 1e-3),
        model=model,
    )  # fmt: skip
    # What is small has moments of 32 bits.
    assert set(status["left_out"]) == {"1.weight"}
    for of_step in kept:
        of_step["1.weight"].m = of_step["1.weight"].v = None
    assert_told(tmp_path / "a.bwrun", kept, not_of={"1.weight"})


class InBlocks(torch.optim.SGD):
    """With moments as bitsandbytes keeps them."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            moment = torch.zeros(p.shape, dtype=torch.uint8)
            self.state[p] = {"step": 1, "state1": moment, "state2": moment.clone()}
            self.state[p] |= {"absmax1": torch.ones(1), "absmax2": torch.ones(1)}
        return super().step(closure)


def test_moments_in_blocks_of_eight_bits_are_named(tmp_path: Path) -> None:
    _, status = trained(tmp_path / "a.bwrun", lambda m: InBlocks(m.parameters(), 1e-3))
    assert status["left_out"] and all("8 bits" in why for why in status["left_out"].values())


def test_a_second_optimizer_is_told_from_its_first_step_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(SHAPE)
    monitor = bellwether.attach(
        model, run="tensors", record=str(tmp_path / "a.bwrun"), every=1, overhead_budget=1e9, **ALL
    )
    halves = [
        [p for n, p in model.named_parameters() if n.startswith("blocks.0") == first]
        for first in (True, False)
    ]
    optimizers = [torch.optim.AdamW(half, 1e-3) for half in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    for step in range(3):
        scaler.scale(model(batch(SHAPE, step)).square().mean()).backward()
        norms.append({n: p.grad.norm() / 1024 for n, p in model.named_parameters()})  # type: ignore[union-attr]
        for optimizer in optimizers:
            scaler.step(optimizer)  # Unscales its own gradients, and no others.
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    monitor.detach()
    told = told_in(tmp_path / "a.bwrun")
    for step, of_step in enumerate(norms):
        assert set(moved_in(told, step).values()) == {1.0}
        for name, norm in of_step.items():
            got = told[step][name]["tensor_grad_sumsq"]
            assert math.sqrt(got) == pytest.approx(float(norm), rel=1e-5), (step, name)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(SHAPE)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointed_models_are_told(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kept, _ = trained(tmp_path / "a.bwrun", adamw(), model=Checkpointed())
    assert_told(tmp_path / "a.bwrun", kept)


def test_compiled_models_have_their_plain_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.compile(Model(SHAPE), backend="aot_eager")
    kept, _ = trained(tmp_path / "a.bwrun", adamw(), model=model)  # type: ignore[arg-type]
    told = assert_told(tmp_path / "a.bwrun", kept)
    assert not any("_orig_mod" in name for name in told[0])


def test_a_closure_makes_the_gradients_within_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(SHAPE)
    monitor = bellwether.attach(
        model, run="tensors", record=str(tmp_path / "a.bwrun"), every=1, overhead_budget=1e9, **ALL
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    norms = []
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch(SHAPE, step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        norms.append({n: float(p.grad.norm()) for n, p in model.named_parameters()})  # type: ignore[union-attr]
    monitor.detach()
    told = told_in(tmp_path / "a.bwrun")
    for step, of_step in enumerate(norms):
        for name, norm in of_step.items():
            got = told[step][name]["tensor_grad_sumsq"]
            assert math.sqrt(got) == pytest.approx(norm, rel=1e-5)


def moved_in(told: Told, step: int) -> dict[str, float]:
    return {name: of["tensor_moved"] for name, of in told[step].items()}


def test_a_layer_that_no_optimizer_holds_does_not_move(tmp_path: Path) -> None:
    def all_but_the_first(model: nn.Module) -> Optimizer:
        held = [p for n, p in model.named_parameters() if not n.startswith("blocks.0.")]
        return torch.optim.AdamW(held, 1e-3)

    trained(tmp_path / "a.bwrun", all_but_the_first, steps=3)
    told = told_in(tmp_path / "a.bwrun")
    for step in range(3):
        for name, moved in moved_in(told, step).items():
            assert moved == (0 if name.startswith("blocks.0.") else 1)
            assert told[step][name]["tensor_grad_sumsq"] > 0


def test_nothing_moves_at_a_rate_of_zero(tmp_path: Path) -> None:
    trained(tmp_path / "a.bwrun", lambda m: torch.optim.AdamW(m.parameters(), 0.0), steps=3)
    told = told_in(tmp_path / "a.bwrun")
    assert set(moved_in(told, 2).values()) == {0.0}
    changes = [of["tensor_change_sumsq"] for of in told[2].values() if "tensor_change_sumsq" in of]
    assert changes == [0.0]


def test_a_row_that_explodes_shows_in_its_tensor_alone(tmp_path: Path) -> None:
    def explode(model: nn.Module, step: int) -> None:
        if step == 2:
            model.blocks[0].attention.out.weight.grad[5] *= 1e4  # type: ignore[index,union-attr]

    trained(tmp_path / "a.bwrun", adamw(), steps=4, change=explode)
    told = told_in(tmp_path / "a.bwrun")
    for name in told[0]:
        grew = told[2][name]["tensor_grad_max"] / told[1][name]["tensor_grad_max"]
        assert (grew > 1e3) == (name == "blocks.0.attention.out.weight"), (name, grew)


def test_gradients_that_are_not_finite_are_counted_by_name(tmp_path: Path) -> None:
    def damage(model: nn.Module, step: int) -> None:
        if step == 2:
            model.blocks[0].attention.out.weight.grad[5, :3] = math.nan  # type: ignore[index,union-attr]

    trained(tmp_path / "a.bwrun", adamw(), steps=4, change=damage)
    told = told_in(tmp_path / "a.bwrun")
    found = {n: of["tensor_grad_nonfinite"] for n, of in told[2].items()}
    assert found.pop("blocks.0.attention.out.weight") == 3 and set(found.values()) == {0.0}
    assert math.isnan(told[2]["blocks.0.attention.out.weight"]["tensor_weight_sumsq"])


def test_a_step_that_a_scaler_skips_is_not_told(tmp_path: Path) -> None:
    def overflow(model: nn.Module, step: int) -> None:
        if step == 2:
            next(iter(model.parameters())).grad[0] = math.inf  # type: ignore[index]

    for fused in (False, True):
        path = tmp_path / f"{fused}.bwrun"
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        trained(path, adamw(fused=fused), steps=5, scaler=scaler, change=overflow)
        for of_step in told_in(path).values():
            for of in of_step.values():
                assert of.get("tensor_grad_nonfinite", 0) == 0 and of.get("tensor_moved", 1) == 1


def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    ends = []
    for stats in ("drift,tensors", "drift"):
        torch.manual_seed(0)
        model = Model(SHAPE)
        trained(tmp_path / f"{stats}.bwrun", adamw(), model=model, clip=0.1, stats=stats)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends))


# ---- turns and parts, without a run


def watched(
    model: nn.Module, placed: Optional[Parallel] = None, all_report: bool = False
) -> Tensors:
    rows = TensorRows(lambda: model, placed or Parallel(), all_report, list)
    return Tensors(rows, Memories())


def stepped(tensors: Tensors, model: nn.Module, optimizer: Optimizer, step: int) -> Iterator[Any]:
    tensors.begin_step(True, step)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    tensors.optimizer_steps(optimizer, [optimizer], False)
    optimizer.step()
    tensors.optimizer_stepped(optimizer)
    sample = tensors.sample()
    return iter([] if sample is None else sample.blocks(len(tensors.rows.names)))


def test_each_parameter_has_its_turn_within_fifty_samples() -> None:
    model = nn.Sequential(*(nn.Linear(70, 80) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters())
    tensors, seen = watched(model), set()
    for step in range(50):
        for block in stepped(tensors, model, optimizer, 7 * step):
            if block.signal == "tensor_change_sumsq":
                seen |= set(range(block.layer_begin, block.layer_begin + block.layer_count))
    assert seen == set(range(80))


def test_copies_are_a_hundredth_of_the_weights() -> None:
    model = nn.Sequential(nn.Embedding(40_000, 256), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tensors = watched(model)
    for step in range(4):
        list(stepped(tensors, model, optimizer, step))
    assert 0 < tensors.copied_max <= max(tensors.rows.elements // 100, COPIED_LEAST)


def test_copies_are_told_by_the_first_that_holds_them() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for placed in (Parallel(data=(1, 2)), Parallel(tensor=(1, 2)), Parallel(context=(1, 2))):
        tensors = watched(model, placed, all_report=True)
        assert list(stepped(tensors, model, optimizer, 0)) == [] and tensors.rows.names == []
    model.weight.tensor_model_parallel = True  # type: ignore[assignment]
    tensors = watched(model, Parallel(tensor=(1, 2)))
    assert list(stepped(tensors, model, optimizer, 0)) and tensors.rows.names == ["weight"]


def test_moments_at_silent_ranks_are_left_out_by_name() -> None:
    model = nn.Linear(8, 8)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        optimizer.optim.param_groups[0]["params"].pop()  # As if another rank had the bias.
        tensors, signals = watched(model), set()
        for step in range(6):
            signals |= {block.signal for block in stepped(tensors, model, optimizer, step)}
    finally:
        dist.destroy_process_group()
    assert tensors.rows.left_out == {"bias": MOMENTS_ELSEWHERE} and "tensor_lag_sum" in signals


def test_layers_of_a_pipeline_have_their_global_numbers() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 4, bias=False)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tensors = watched(model, Parallel(pipeline=(1, 2), first_layer=6, layers=12))
    list(stepped(tensors, model, optimizer, 0))
    assert tensors.rows.names == ["layers.6.weight"]
