"""Goal: what is told of the steps between two samples equals a recomputation in float64, for each
way of training, and skipped steps, clipping and times are told.  Training stays the same bit for
bit.
Method: trainings whose gradients and moments are kept beside them, compared with their recordings;
a clock that the test sets.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

import bellwether
from bellwether._kernels.moment_lags import MomentLags, Moments
from bellwether._kernels.probe import DTYPES, KernelError
from bellwether._step import every_step, lag_of_steps
from bellwether._step.lag_of_steps import ELEMENTS_ON_CPU, PARAMETERS_MAX, stride_of
from bellwether._step.phases import Phases
from bellwether._step.since_sample import CLIPPED_TO, SKIPPED, SinceSample

from gpu import DEVICES
from models import Model, Shape, batch
from recording import Recording

SHAPE = Shape(fused=False)
EVERY, STEPS = 4, 21
STATS = "drift,ties,steps"


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element is read."""
    monkeypatch.setattr(lag_of_steps, "ELEMENTS_ON_CPU", 1 << 20)


class WithWords(nn.Module):
    """An embedding behind the model's other parameters: it is read first all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(SHAPE)
        self.words = nn.Embedding(40, SHAPE.width)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 40).long() % 40
        out: Tensor = self.model(x + self.words(ids))
        return out


def lags_of(model: nn.Module, optimizers: list[Optimizer]) -> tuple[float, int]:
    """The largest of the coming step in float64, and elements that are saturated."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    words = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    ordered = words + [p for p in matrices if all(p is not w for w in words)]
    largest, saturated = 0.0, 0
    for optimizer in optimizers:
        groups = {p: g for g in optimizer.param_groups for p in g["params"]}
        read = [p for p in ordered if "exp_avg_sq" in optimizer.state.get(p, {})]
        for p in read[:PARAMETERS_MAX]:
            group, state, g = groups[p], optimizer.state[p], p.grad
            if g is None:
                continue
            saturated += int((~(g.abs() < torch.finfo(g.dtype).max)).sum())
            beta2, t = group["betas"][1], float(state["step"]) + 1
            square = g.double().square()
            vhat = (beta2 * state["exp_avg_sq"].double() + (1 - beta2) * square) / (1 - beta2**t)
            ratio = square / vhat.clamp_min(group["eps"] ** 2)
            ratio = torch.where(g.isfinite() & (g != 0), ratio, 0.0)
            largest = max(largest, math.sqrt(float(ratio.mean())))
    return largest, saturated


class Ran:
    def __init__(self, path: Path, lags: list[float], saturated: list[int]) -> None:
        self.lags, self.saturated = lags, saturated  # Of each iteration whose step was taken.
        found = Recording(path, ended=True).steps()
        self.steps = {
            step: {name: float(values.flat[0]) for name, values in signals.items()}
            for step, signals in found.items()
        }

    def told(self, signal: str) -> dict[int, float]:
        return {step: s[signal] for step, s in self.steps.items() if signal in s}


def ran(
    path: Path, make: Callable[[nn.Module], list[Optimizer]], scaler: Any = None, micro: int = 1,
    clip: Optional[float] = None, explicit: bool = False, device: str = "cpu",
    change: Callable[[nn.Module, int], Any] = lambda m, s: None,
    takes: Callable[[int], bool] = lambda s: True, stats: str = STATS, counts_all: bool = False,
) -> Ran:  # fmt: skip
    """counts_all  a step that is skipped is one of the run's"""
    torch.manual_seed(0)
    model = WithWords().to(device)
    monitor = bellwether.attach(
        model, record=str(path), run="steps", every=EVERY, overhead_budget=1e9, stats=stats
    )
    optimizers = make(model)
    lags, saturated = [], []
    for step in range(STEPS):
        for part in range(micro):
            x = batch(SHAPE, step * micro + part, device=device)
            loss = model(x).square().mean() * 1e-3 / micro
            (scaler.scale(loss) if scaler else loss).backward()
        change(model, step)
        if scaler:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        told = {}
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        largest, many = lags_of(model, optimizers)
        taken = takes(step)
        for optimizer in optimizers if taken else ():
            taken = (scaler.step(optimizer) if scaler else optimizer.step()) is not False
        if scaler:
            before = scaler.get_scale()
            scaler.update()
            taken = scaler.get_scale() >= before
        if taken or explicit or counts_all:
            lags.append(largest if taken else 0.0)
            saturated.append(many if taken else 0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        if explicit:
            monitor.step(loss=loss, **told)
    assert monitor.flush(20) and monitor.status()["errors"] == 0, monitor.status()["last_error"]
    monitor.detach()
    return Ran(path, lags, saturated)


def assert_lags(found: Ran) -> None:
    told, begin = found.told("moment_lag_max"), 0
    for step in sorted(found.told("skipped_steps")):
        of = found.lags[begin : step + 1]
        if max(of) > 0:
            assert told[step] == pytest.approx(max(of), rel=1e-5), step
        else:
            assert step not in told  # The first step meets no moments.
        begin = step + 1
    assert len(told) >= STEPS // EVERY - 1


def adamw(model: nn.Module, **kwargs: Any) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3, **kwargs)]


def two(model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [
        torch.optim.Adam(parameters[:3], lr=1e-3, betas=(0.9, 0.95)),
        torch.optim.SGD(parameters[3:-2], lr=1e-3, momentum=0.9),
        torch.optim.AdamW(parameters[-2:], lr=1e-3),
    ]


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_moment_lags_equal_float64(fused: bool, device: str, tmp_path: Path) -> None:
    found = ran(tmp_path / "a.bwrun", lambda m: adamw(m, fused=fused), device=device)
    assert_lags(found)
    assert set(found.told("grad_saturated").values()) == {0.0}


@pytest.mark.usefixtures("whole")
def test_moment_lags_meet_clipped_and_accumulated_gradients(tmp_path: Path) -> None:
    assert_lags(ran(tmp_path / "a.bwrun", adamw, micro=3, clip=1e-4))


@pytest.mark.usefixtures("whole")
def test_moment_lags_of_several_optimizers(tmp_path: Path) -> None:
    assert_lags(ran(tmp_path / "a.bwrun", two))


@pytest.mark.usefixtures("whole")
def test_a_gradient_that_explodes_between_samples_is_told(tmp_path: Path) -> None:
    def explode(model: Any, step: int) -> None:
        if step == 14:  # Samples are at 12 and 16.
            model.words.weight.grad *= 1e3

    found = ran(tmp_path / "a.bwrun", adamw, change=explode)
    assert_lags(found)
    told = found.told("moment_lag_max")
    assert told[16] > 2.3 > told[12] and told[20] < 2.3


@pytest.mark.usefixtures("whole")
def test_saturated_elements_are_counted_in_every_step(tmp_path: Path) -> None:
    def spoil(model: Any, step: int) -> None:
        if step == 14:
            model.words.weight.grad[3, :2] = math.inf
            model.words.weight.grad[4, 0] = torch.finfo(torch.float32).max

    found = ran(tmp_path / "a.bwrun", adamw, change=spoil)
    assert found.saturated[14] == 3
    told = found.told("grad_saturated")  # The weights are no numbers from then on.
    assert told[16] == sum(found.saturated[13:17]) and told[12] == 0


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
def test_steps_that_a_scaler_skips_are_counted(explicit: bool, fused: bool, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    spoiled = (6, 7, 13)

    def spoil(model: Any, step: int) -> None:
        if step in spoiled:
            model.words.weight.grad[0, 0] = math.inf

    found = ran(
        tmp_path / "a.bwrun", lambda m: adamw(m, fused=fused), scaler, change=spoil,
        explicit=explicit, counts_all=fused,
    )  # fmt: skip
    told = found.told("skipped_steps")
    assert sum(told.values()) == len(spoiled) and max(told.values()) == 2
    assert found.told("loss_scale")[0] == 256.0
    assert 32.0 in found.told("loss_scale").values()
    assert_lags(found)


def test_a_step_that_the_job_leaves_out_counts_as_skipped(tmp_path: Path) -> None:
    torch._dynamo.reset()  # Of a process that has compiled any optimizer's step it is not known.
    found = ran(tmp_path / "a.bwrun", adamw, explicit=True, takes=lambda s: s not in (5, 9, 10))
    assert found.told("skipped_steps") == {0: 0, 4: 0, 8: 1, 12: 2, 16: 0, 20: 0}


def test_the_norm_that_torch_clips_is_told(tmp_path: Path) -> None:
    found = ran(tmp_path / "a.bwrun", adamw, clip=1e-4, explicit=True)
    norms, factors = found.told("grad_norm"), found.told("clip_factor")
    assert len(norms) == STEPS
    for step in range(EVERY, STEPS, EVERY):
        largest = max(norms[s] for s in range(step - EVERY + 1, step + 1))
        assert found.told("grad_norm_max")[step] == largest
        assert factors[step] == pytest.approx(min(1.0, 1e-4 / (largest + 1e-6)), rel=1e-6)
        losses = [found.told("loss")[s] for s in range(step - EVERY + 1, step + 1)]
        assert found.told("loss_max")[step] == max(losses)


Clip = Callable[[list[Tensor], int], None]


def clipped(path: Path, clip: Clip) -> tuple[Ran, dict[str, int], list[float]]:
    """What is told of steps with such clips, what is left out, and the norms before them."""
    torch.manual_seed(0)
    model, norms = WithWords(), []
    monitor = bellwether.attach(
        model, record=str(path), run="steps", every=EVERY, overhead_budget=1e9, stats=STATS
    )
    optimizer = adamw(model)[0]
    for step in range(STEPS):
        model(batch(SHAPE, step)).square().mean().backward()
        norms.append(float(torch.linalg.vector_norm(torch.cat(
            [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        ))))  # fmt: skip
        clip([p for p in model.parameters() if p.grad is not None], step)
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.flush(20) and monitor.status()["errors"] == 0
    left_out = monitor.status()["steps"]["norm_left_out"]
    monitor.detach()
    return Ran(path, [], []), left_out, norms


def apart(order: float, begin: int = 1, limits: tuple[float, float] = (1e-5, 1e-4)) -> Clip:
    """The first parameter, and those from `begin` on."""

    def clip(parameters: list[Tensor], step: int) -> None:
        torch.nn.utils.clip_grad_norm_(parameters[:1], limits[0], order)
        torch.nn.utils.clip_grad_norm_(parameters[begin:], limits[1], order)

    return clip


def test_norms_of_groups_that_are_clipped_apart_make_one(tmp_path: Path) -> None:
    factors: list[float] = []

    def clip(parameters: list[Tensor], step: int) -> None:
        of = torch.nn.utils.clip_grad_norm_(parameters[:1], 1e-5)
        rest = torch.nn.utils.clip_grad_norm_(parameters[1:], 1e-4)
        factors.append(min(1e-5 / (float(of) + 1e-6), 1e-4 / (float(rest) + 1e-6), 1.0))

    found, left_out, norms = clipped(tmp_path / "a.bwrun", clip)
    told = found.told("grad_norm")
    assert left_out == {} and sorted(told) == list(range(STEPS))
    assert all(told[step] == pytest.approx(norms[step], rel=1e-5) for step in told)
    for step in range(EVERY, STEPS - 1, EVERY):
        least = min(factors[step - EVERY + 1 : step + 1])
        assert found.told("clip_factor")[step] == pytest.approx(least, rel=1e-5)


def test_norms_of_another_order_are_left_out(tmp_path: Path) -> None:
    for order in (math.inf, 1.0):
        path = tmp_path / f"{order}.bwrun"
        found, left_out, _ = clipped(path, apart(order))
        assert found.told("grad_norm") == {} and found.told("clip_factor")[EVERY] < 1
        assert left_out == {f"norms of other orders than 2: {order:g}": STEPS}


def test_norms_of_overlapping_groups_are_left_out(tmp_path: Path) -> None:
    found, left_out, _ = clipped(tmp_path / "a.bwrun", apart(2.0, begin=0))
    assert found.told("grad_norm") == {} == found.told("clip_factor")
    assert left_out == {"calls of clip_grad_norm_ with the same parameters": STEPS}


def test_a_second_call_that_comes_later_is_left_out_once(tmp_path: Path) -> None:
    def clip(parameters: list[Tensor], step: int) -> None:
        torch.nn.utils.clip_grad_norm_(parameters[:3], 1e-4)
        if step > 7:
            torch.nn.utils.clip_grad_norm_(parameters[3:], 1e-4)

    found, left_out, norms = clipped(tmp_path / "a.bwrun", clip)
    told = found.told("grad_norm")
    assert left_out == {"the first step with several calls of clip_grad_norm_": 1}
    assert sorted(told) == [step for step in range(STEPS) if step != 8]
    assert all(told[step] == pytest.approx(norms[step], rel=1e-5) for step in told if step > 8)


def test_more_calls_than_are_kept_are_left_out(tmp_path: Path) -> None:
    def clip(parameters: list[Tensor], step: int) -> None:
        for p in parameters:
            torch.nn.utils.clip_grad_norm_(p, 1e-4)

    found, left_out, _ = clipped(tmp_path / "a.bwrun", clip)
    assert found.told("grad_norm") == {} and list(left_out.values()) == [STEPS]


def test_times_and_their_share_are_told(tmp_path: Path) -> None:
    found = ran(tmp_path / "a.bwrun", adamw, micro=2)
    for name in ("data", "forward", "backward", "optimizer"):
        told = found.told(f"{name}_seconds")
        assert set(range(EVERY, STEPS, EVERY)) <= set(told)
        assert all(0 < seconds < 10 for seconds in told.values()), name
    assert all(0 < share < 1 for share in found.told("data_share").values())
    assert "memory_peak" not in found.steps[EVERY]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_memory_of_a_gpu_is_told(tmp_path: Path) -> None:
    found = ran(tmp_path / "a.bwrun", adamw, device="cuda")
    held, peak = found.told("memory_allocated"), found.told("memory_peak")
    assert held and all(0 < held[step] <= peak[step] for step in held)


def test_without_the_part_nothing_of_it_is_told(tmp_path: Path) -> None:
    found = ran(tmp_path / "a.bwrun", adamw, clip=1e-4, stats="drift,ties")
    names = {name for signals in found.steps.values() for name in signals}
    assert not names & {"moment_lag_max", "skipped_steps", "grad_norm", "data_share"}


def trained(watched: bool, path: Path) -> list[Tensor]:
    torch.manual_seed(0)
    model = WithWords()
    backward = torch.autograd.backward
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if watched:
        monitor = bellwether.attach(
            model, record=str(path), run="steps", every=EVERY, overhead_budget=1e9, stats=STATS
        )
        assert torch.autograd.backward is not backward
    for step in range(STEPS):
        model(batch(SHAPE, step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    if watched:
        assert monitor.status()["errors"] == 0
        monitor.detach()
        assert torch.autograd.backward is backward
    states = [v for s in optimizer.state.values() for v in s.values()]
    return [p.detach() for p in model.parameters()] + states


def test_training_stays_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain, watched = trained(False, tmp_path), trained(True, tmp_path / "a.bwrun")
    assert len(plain) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))


def test_nothing_keeps_a_model_or_its_optimizer() -> None:
    model = WithWords()
    model_ref = weakref.ref(model)
    lags = lag_of_steps.LagOfSteps(model_ref)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        model(batch(SHAPE, 0)).square().mean().backward()
        lags.optimizer_steps(optimizer)
        optimizer.step()
    assert lags.take() is not None
    known = [weakref.ref(model.words.weight), weakref.ref(optimizer)]
    known += [weakref.ref(state["exp_avg_sq"]) for state in optimizer.state.values()]
    del optimizer, model
    gc.collect()
    assert all(ref() is None for ref in known)


# ---- the part of a parameter


def test_neighbours_of_a_row_are_not_read_together() -> None:
    for elements, row, room in ((50304 * 768, 768, 1 << 15), (1 << 24, 1 << 12, 2048), (10, 5, 64)):
        stride = stride_of(elements, row, room)
        assert stride == 1 or math.gcd(stride, row) == 1
        assert -(-elements // stride) <= room
        columns = {at % row for at in range(0, min(elements, stride * 2 * row), stride)}
        assert len(columns) == min(row, -(-elements // stride))


def strided(dtype: torch.dtype, stride: int, turn: int) -> tuple[float, float]:
    """What the kernel says of a part, and what float64 does."""
    torch.manual_seed(1)
    g = (torch.randn(100_003) * 1e-3).to(dtype)
    v = torch.rand(100_003) * 1e-6
    lags = MomentLags(torch.device("cpu"), 2)
    count = -(-(len(g) - turn) // stride)
    part = Moments(
        g.data_ptr() + turn * g.element_size(), v.data_ptr() + turn * 4, DTYPES[dtype],
        DTYPES[torch.float32], count, stride, 0.99, 1e-8, 5.0, 0,
    )  # fmt: skip
    lags.put(1, part)
    lags.add(None, None)
    of, w = g[turn::stride].double(), v[turn::stride].double()
    vhat = (0.99 * w + 0.01 * of**2) / (1 - 0.99**5)
    found = lags.take()
    assert found[0].tolist() == [0, 0] and lags.take().tolist() == [[0, 0], [0, 0]]
    return float(found[1, 0]), float((of**2 / vhat.clamp_min(1e-16)).mean())


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_strided_part_equals_float64(dtype: torch.dtype) -> None:
    for stride, turn in ((1, 0), (7, 3), (1009, 1008), (100_003, 0)):
        got, want = strided(dtype, stride, turn)
        assert got == pytest.approx(want, rel=1e-12)


def test_a_step_that_is_not_taken_leaves_maxima_alone() -> None:
    g, v = torch.ones(8), torch.ones(8)
    part = Moments(g.data_ptr(), v.data_ptr(), 0, 0, 8, 1, 0.9, 1e-8, 1.0, 0)
    lags = MomentLags(torch.device("cpu"), 1)
    lags.put(0, part)
    lags.add(None, torch.ones(()))
    assert lags.take().tolist() == [[0, 0]]
    lags.add(torch.tensor(2.0), torch.zeros(()))
    quarter = 0.25 / ((0.9 + 0.1 * 0.25) / (1 - 0.9))
    assert lags.take()[0, 0].item() == pytest.approx(quarter, rel=1e-12)


def test_a_part_of_illegal_size_is_refused() -> None:
    x = torch.ones(8)
    lags = MomentLags(torch.device("cpu"), 1)
    lags.put(0, Moments(x.data_ptr(), x.data_ptr(), 0, 0, 0, 1, 0.9, 1e-8, 1.0, 0))
    with pytest.raises(KernelError, match="count is 0"):
        lags.add(None, None)


def test_large_parameters_are_read_in_part() -> None:
    model = nn.Sequential(nn.Embedding(5000, 64), nn.Linear(64, 4000))
    optimizer = torch.optim.AdamW(model.parameters())
    lags = lag_of_steps.LagOfSteps(lambda: model)
    read = []
    for _ in range(40):
        model(torch.randint(5000, (64,))).square().mean().backward()
        lags.optimizer_steps(optimizer)
        read.append(lags.take())
        optimizer.step()
    parts = lags.parts()
    assert sorted(size for size, _ in parts) == [64 * 4000, 64 * 5000]
    assert read[0] is None and read[-1] is not None
    assert all(0 < count <= ELEMENTS_ON_CPU // 2 for _, count in parts)


# ---- phases


def test_phases_of_a_step_add_up() -> None:
    now = [100.0]
    phases = Phases(lambda: now[0])

    def after(seconds: float, call: Callable[[], None]) -> None:
        now[0] += seconds
        call()

    for data in (0.0, 5.0):
        after(data, phases.forward_begins)
        for _ in range(3):  # Other layers.
            after(0.5, phases.forward_begins)
        after(0.5, phases.backward_begins)
        after(3.0, phases.backward_ends)
        after(1.0, phases.forward_begins)
        after(2.0, phases.backward_begins)
        after(3.0, phases.backward_ends)
        after(7.0, phases.optimizer_begins)  # Clipping.
        after(4.0, phases.optimizer_ends)
        phases.step_ends(22.5 + data)
    assert phases.take() == {
        "data_seconds": 3.5, "forward_seconds": 4.0, "backward_seconds": 6.0,
        "optimizer_seconds": 4.0, "data_share": 7.0 / 50.0,
    }  # fmt: skip
    assert phases.take() == {}


def test_without_a_forward_there_is_no_time_for_data() -> None:
    phases = Phases()
    for _ in range(3):
        phases.backward_begins()
        phases.backward_ends()
        phases.optimizer_begins()
        phases.optimizer_ends()
        phases.step_ends(1.0)
    assert set(phases.take()) == {"backward_seconds", "optimizer_seconds"}


def test_a_closure_is_a_part_of_its_optimizer() -> None:
    now = [1.0]
    phases = Phases(lambda: now[0])
    for call in (
        phases.optimizer_begins, phases.forward_begins, phases.backward_begins,
        phases.backward_ends, phases.optimizer_ends,
    ):  # fmt: skip
        call()
        now[0] += 1.0
    phases.step_ends(9.0)
    assert phases.take() == {"optimizer_seconds": 4.0}


def test_an_optimizer_in_the_backward_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(every_step, "Phases", lambda: Phases(lambda: now[0]))
    torch.manual_seed(0)
    model = WithWords()
    of: dict[Tensor, Optimizer] = {}

    def steps(p: Tensor) -> None:
        now[0] += 1.0  # Of the backward pass.
        of[p].step()
        of[p].zero_grad()

    class Takes(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            now[0] += 10.0
            return super().step(closure)

    for p in model.parameters():
        of[p] = Takes([p], lr=1e-3)
        p.register_post_accumulate_grad_hook(steps)
    path = tmp_path / "a.bwrun"
    monitor = bellwether.attach(
        model, record=str(path), run="steps", every=EVERY, overhead_budget=1e9, stats=STATS
    )
    for step in range(STEPS):
        loss = model(batch(SHAPE, step)).square().mean()
        now[0] += 3.0
        loss.backward()
        now[0] += 5.0
    assert monitor.flush(20) and monitor.status()["errors"] == 0
    monitor.detach()
    told, count = Ran(path, [], []), len(of)
    for step in range(2 * EVERY, STEPS - 1, EVERY):
        found = {name: told.told(f"{name}_seconds")[step] for name in ("backward", "optimizer")}
        assert found == {"backward": count, "optimizer": 10.0 * count}
        assert told.told("data_seconds")[step] == 5.0 and told.told("forward_seconds")[step] == 3.0


def test_a_backward_that_is_not_seen_is_no_forward() -> None:
    now = [1.0]
    phases = Phases(lambda: now[0])
    for _ in range(3):
        for call in (phases.forward_begins, phases.optimizer_begins, phases.optimizer_ends):
            call()
            now[0] += 1.0
        phases.step_ends(3.0)
    assert phases.take() == {"optimizer_seconds": 1.0, "data_seconds": 2 / 3, "data_share": 2 / 9}


def test_a_loss_that_is_no_number_wins() -> None:
    since = SinceSample()
    for loss in (1.0, math.nan, 3.0):
        since.add({"loss": loss}, False)
    assert math.isnan(since.take()["loss_max"])
    since.add({"loss": 2.0, SKIPPED: 2.0}, True)
    assert since.take() == {"skipped_steps": 2.0, "loss_max": 2.0}


def test_a_plan_reads_nothing_that_has_moved() -> None:
    second = torch.ones(8, 8)
    moved = nn.Parameter(torch.zeros(8, 8, device="meta"))
    moved.grad = torch.ones(8, 8, device="meta")
    part = lag_of_steps._Part(moved, second, 16)
    group = lag_of_steps._Group({"betas": (0.9, 0.999), "eps": 1e-8})
    states = {moved: {"exp_avg_sq": torch.ones(8, 8, device="meta"), "step": 3.0}}
    assert part.moments(states, 1, group) is None
    here = nn.Parameter(torch.zeros(8, 8))
    here.grad = torch.ones(8, 8)
    part = lag_of_steps._Part(here, second, 16)
    assert part.moments({here: {"exp_avg_sq": second, "step": 3.0}}, 1, group) is not None
    assert part.moments({here: ["no", "dict"]}, 1, group) is None


def test_a_factor_that_is_no_number_stays_so() -> None:
    found = SinceSample()
    for norm in (1.0, math.nan, 2.0):
        found.add({"grad_norm": norm, CLIPPED_TO: 1.0}, False)
    assert math.isnan(found.take()["clip_factor"])
