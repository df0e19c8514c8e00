"""Goal: what is told of tensors in 8 bits equals a recomputation from what was multiplied: how many
elements are saturated, are 0 or have become 0.  So do their scales, and how old those are.  What
cannot be seen is said.  Training stays the same bit for bit, and nothing of ours is left in torch.
Method: trainings whose linear layers multiply by torch._scaled_mm and keep their tensors, compared
with their recordings.
"""

from __future__ import annotations

import concurrent.futures
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch._dynamo
from fp8_models import E4M3, E5M2, SHAPE, SIDES, Kept, Model, ScaledLinear
from told_tensors import Told, rows_told
from torch import Tensor, nn

import bellwether
from bellwether._hook.layer import fp8_tap
from bellwether._hook.layer.fp8_tap import (
    NO_BACKWARD,
    OTHER_FORMAT,
    OTHER_SHAPE,
    Fp8Tap,
    Runs,
    new_quantised,
    read_meta,
)
from bellwether._native import c_api
from bellwether._step import scaled_products
from bellwether._step.fp8 import NO_SCALE, NONE, TURNS, may_have_products
from bellwether._step.fp8_sample import SIGNALS, Ages
from bellwether._step.tapped_modules import COMPILED

from gpu import DEVICES
from models import batch
from no_waiting import DEVICE, NoWaiting
from tap_host import Host

WATCHED: dict[str, Any] = {
    "stats": ["drift", "fp8"], "every": 1, "overhead_budget": 1e9, "run": "fp8",
}  # fmt: skip
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def wanted_of(kept: list[Kept]) -> dict[str, float]:
    """Of one side of a module; the age is not among it."""
    found = dict.fromkeys(SIGNALS, 0.0)
    del found["fp8_amax_age"]
    for one in kept:
        q, before = one.q.double(), one.before.double()
        found["fp8_elements"] += q.numel()
        found["fp8_saturated"] += float((q.abs() == LARGEST[one.q.dtype]).sum())
        found["fp8_zeros"] += float((q == 0).sum())
        found["fp8_nonzero_inputs"] += float((before != 0).sum())
        found["fp8_flushed"] += float(((before != 0) & (q == 0)).sum())
        found["fp8_nonfinite"] += float((~q.isfinite()).sum())
        found["fp8_scale"] = float(one.scale.double().max())
    return found


def told_in(path: Path) -> Told:
    return rows_told(path, c_api.MODULE, SIGNALS)


def trained(
    path: Optional[Path], steps: int = TURNS + 4, micro: int = 1,
    checkpointing: Optional[str] = None, device: str = "cpu", dtype: torch.dtype = torch.bfloat16,
    change: Callable[[Model], Any] = lambda model: None, how: Optional[dict[str, Any]] = None,
    **watch: Any,
) -> tuple[list[dict[str, dict[str, list[Kept]]]], Any, list[Tensor]]:  # fmt: skip
    """What was multiplied by step, module and side; the status; the weights at the end."""
    torch._dynamo.utils.counters.clear()  # Else a test before this one was compiled.
    torch.manual_seed(0)
    model = Model(checkpointing, **(how or {})).to(device, dtype)
    change(model)
    monitor = None
    if path is not None:
        monitor = bellwether.attach(model, record=str(path), **(WATCHED | watch))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    kept: list[dict[str, dict[str, list[Kept]]]] = []
    for step in range(steps):
        optimizer.zero_grad()
        kept.append({})
        for name, module in model.scaled().items():
            module.step, module.kept = step, kept[-1].setdefault(name, {})
        for part in range(micro):
            x = batch(SHAPE, step * micro + part, tokens=48, device=device).to(dtype)
            (model(x).float().square().mean() / micro).backward()
        optimizer.step()
    status = None
    if monitor is not None:
        status = monitor.status()
        assert status["errors"] == 0 and status["live"], status["last_error"]
        monitor.detach()
        assert not scaled_products._replaced
    return kept, status, [p.detach().clone() for p in model.parameters()]


def assert_told(
    told: Told, kept: list[dict[str, dict[str, list[Kept]]]], micro: int = 1
) -> set[str]:
    """Rows that were told."""
    rows = set()
    for step, of_step in told.items():
        for row, got in of_step.items():
            name, _, side = row.partition(" fp8:")
            want = wanted_of(kept[step][name][side][:micro])
            assert set(got) == {*want, "fp8_amax_age"}, (step, row)
            for signal, value in want.items():
                assert got[signal] == pytest.approx(value, rel=1e-6), (step, row, signal)
            rows.add(row)
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_equal_what_was_multiplied(device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kept, status, _ = trained(tmp_path / "a.bwrun", device=device, dtype=dtype)
    rows = assert_told(told_in(tmp_path / "a.bwrun"), kept)
    assert rows == {f"{name} fp8:{side}" for name in kept[0] for side in SIDES}
    assert status["fp8"] == {"modules": 4, "seen": 4, "not_measured": None, "left_out": {}}


@pytest.mark.parametrize("factor, side", [(0.25, "saturated"), (1e4, "flushed")])
def test_scales_that_do_not_fit_show(factor: float, side: str, tmp_path: Path) -> None:
    kept, _, _ = trained(tmp_path / "a.bwrun", how={"factor": factor})
    told = told_in(tmp_path / "a.bwrun")
    assert_told(told, kept)
    got = next(of["layers.0.mlp.up fp8:x"] for of in told.values() if "layers.0.mlp.up fp8:x" in of)
    assert got[f"fp8_{side}"] > 0.05 * got["fp8_elements"]


@pytest.mark.parametrize("microbatches, count", [("first", 1), ("all", 3)])
def test_micro_batches_add_up_where_all_are_asked(
    microbatches: str, count: int, tmp_path: Path
) -> None:
    kept, _, _ = trained(tmp_path / "a.bwrun", micro=3, microbatches=microbatches)
    assert assert_told(told_in(tmp_path / "a.bwrun"), kept, count)


def test_a_weights_gradient_may_come_first(tmp_path: Path) -> None:
    def change(model: Model) -> None:
        for module in model.scaled().values():
            module.weight_first = True

    kept, _, _ = trained(tmp_path / "a.bwrun", change=change)
    assert len(assert_told(told_in(tmp_path / "a.bwrun"), kept)) == 12


def test_modules_take_turns_several_in_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for together in (4, 3, 1):
        monkeypatch.setattr("bellwether._step.fp8.TOGETHER", together)
        trained(tmp_path / f"{together}.bwrun", steps=5)
        told = told_in(tmp_path / f"{together}.bwrun").values()
        modules = [{row.partition(" fp8:")[0] for row in of} for of in told if of]
        turns = max(1, 4 // together)
        assert {len(of) for of in modules} <= {4 // turns, -(-4 // turns)}
        assert min(len(of) for of in modules) >= together
        assert len(set().union(*modules[:turns])) == 4


def test_scales_are_as_old_as_their_first_sample(tmp_path: Path) -> None:
    steps = 4 * TURNS
    trained(tmp_path / "a.bwrun", steps=steps, how={"delayed": 3 * TURNS})
    told = told_in(tmp_path / "a.bwrun")
    seen: dict[float, int] = {}
    ages = []
    for step, of_step in told.items():
        if "layers.1.mlp.down fp8:w" in of_step:
            got = of_step["layers.1.mlp.down fp8:w"]
            since = seen.setdefault(got["fp8_scale"], step)
            assert got["fp8_amax_age"] == step - since
            ages.append(step - since)
    assert max(ages) >= TURNS and len(seen) == 2


def test_new_scales_have_no_age_and_rollbacks_begin_anew() -> None:
    ages = Ages()
    told = [ages.of("a", (s, s), step) for s, step in ((1.0, 3), (1.0, 7), (2.0, 9), (2.0, 4))]
    assert told == [0, 4, 0, 0] and ages.of("b", (2.0, 2.0), 5) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_training_is_the_same_bit_for_bit(device: str, tmp_path: Path) -> None:
    _, _, watched = trained(tmp_path / "a.bwrun", device=device)
    _, _, alone = trained(None, device=device)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone))


def test_without_the_part_torch_stays_as_it_is(tmp_path: Path) -> None:
    theirs, seen = torch._scaled_mm, []
    trained(
        tmp_path / "a.bwrun", stats=["drift"],
        change=lambda model: model.register_forward_hook(
            lambda *_: seen.append(torch._scaled_mm is theirs)
        ),
    )  # fmt: skip
    assert all(seen) and not any(told_in(tmp_path / "a.bwrun").values())


def test_between_samples_torch_stays_as_it_is(tmp_path: Path) -> None:
    theirs, seen = torch._scaled_mm, []
    trained(
        tmp_path / "a.bwrun", every=3,
        change=lambda model: model.register_forward_hook(
            lambda *_: seen.append(torch._scaled_mm is theirs)
        ),
    )  # fmt: skip
    assert True in seen[3:] and False in seen


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_recomputations_are_not_measured(how: str, tmp_path: Path) -> None:
    kept, status, watched = trained(tmp_path / "a.bwrun", checkpointing=how)
    told = told_in(tmp_path / "a.bwrun")
    rows = assert_told(told, kept)
    if how == "non-reentrant":
        assert len(rows) == 12
    else:
        assert not rows and status["fp8"]["seen"] == 0
    _, _, alone = trained(None, checkpointing=how)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone))


def test_models_without_such_modules_say_so(tmp_path: Path) -> None:
    def change(model: Model) -> None:
        for block in model.layers:
            block.mlp = nn.Linear(SHAPE.width, SHAPE.width).bfloat16()

    _, status, _ = trained(tmp_path / "a.bwrun", steps=3, change=change)
    assert status["fp8"]["not_measured"] == NONE


def test_compiled_models_are_left_out_and_said(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model().bfloat16()
    model.layers[0].attention.compile(backend="eager")
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), **WATCHED)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model(batch(SHAPE, step).bfloat16()).square().mean().backward()
        optimizer.step()
    status = monitor.status()
    monitor.detach()
    assert status["errors"] == 0 and status["fp8"]["not_measured"] == COMPILED
    assert not any(told_in(tmp_path / "a.bwrun").values())


class TapHost(Host):
    def samples_call(self, calls_before: int) -> bool:
        return calls_before == 0


class Tapped:
    """One module's tap in one step."""

    def __init__(self, module: nn.Module) -> None:
        self.host = TapHost()
        runs = Runs(self.host)  # type: ignore[arg-type]
        self.of = new_quantised([0], torch.device("cpu"))[0]
        self.tap = Fp8Tap(runs, module, self.of)
        self.end = scaled_products.listen(runs.product)
        self.module = module

    def run(self, x: Tensor) -> Any:
        self.tap.input((x,))
        y = self.module(x)
        self.tap.output((x,), y)
        return y

    def close(self) -> None:
        self.tap.close()
        self.end()
        assert not self.host.errors and not scaled_products._replaced


def test_rows_have_the_largest_of_their_scales() -> None:
    class ByRows(ScaledLinear):
        def scale(self, side: str, before: Tensor, dtype: torch.dtype) -> Tensor:
            return before.detach().abs().amax(1, keepdim=True).float() / torch.finfo(dtype).max

        @staticmethod
        def multiply(a: Tensor, s_a: Tensor, b: Tensor, s_b: Tensor) -> Tensor:
            if s_b.shape[0] == b.shape[1]:
                return torch._scaled_mm(a, b, s_a, s_b.t(), out_dtype=torch.bfloat16)
            return a.float() @ b.float()

    tapped = Tapped(ByRows(32, 48))
    tapped.module.kept = kept = {}  # type: ignore[assignment]
    tapped.run(torch.randn(16, 32, requires_grad=True))
    tapped.close()
    assert float(tapped.of["x"].slab[6]) == float(kept["x"][0].scale.max())
    assert float(tapped.of["w"].slab[7]) == pytest.approx(float(kept["w"][0].scale.double().sum()))


def test_numbers_that_are_not_finite_are_counted() -> None:
    q = torch.tensor([[448.0, -448.0, 0.0, -0.0, torch.nan, 1.0]]).to(E4M3)
    of = new_quantised([0], torch.device("cpu"))[0]["x"]
    assert of.add(q, torch.tensor(2.0), None)
    assert of.slab.tolist() == [6, 2, 2, 1, 0, 0, 2, 2]
    wide = torch.tensor([[57344.0, torch.inf, -torch.inf, torch.nan]]).to(E5M2)
    of = new_quantised([0], torch.device("cpu"))[0]["x"]
    assert of.add(wide, torch.tensor(2.0), None)
    assert of.slab.tolist() == [4, 1, 0, 3, 0, 0, 2, 2]


def test_other_products_and_formats_are_left_out_by_name() -> None:
    class Other(ScaledLinear):
        def forward(self, x: Tensor) -> Tensor:
            s, q = torch.tensor(1.0), torch.zeros(16, 16).to(E4M3)
            torch._scaled_mm(q, q.t(), scale_a=s, scale_b=s)
            return super().forward(x)

    tapped = Tapped(Other(32, 48))
    tapped.run(torch.randn(16, 32, requires_grad=True)).sum().backward()
    tapped.close()
    assert tapped.tap.left_out == OTHER_SHAPE and tapped.of["w"].calls == 1
    tapped.tap.left_out = None
    tapped.tap._add("x", torch.zeros(2, 2), torch.tensor(1.0), None)
    assert tapped.tap.left_out == OTHER_FORMAT


def test_a_backward_that_is_no_functions_is_said() -> None:
    class Straight(ScaledLinear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = super().forward(x)
            return y + x.sum() * 0

    tapped = Tapped(Straight(32, 48))
    tapped.run(torch.randn(16, 32, requires_grad=True)).sum().backward()
    tapped.close()
    assert tapped.tap.left_out == NO_BACKWARD
    assert [tapped.of[side].calls for side in SIDES] == [1, 1, 0]


def test_a_forward_that_raises_leaves_the_next_one_whole() -> None:
    class Raising(ScaledLinear):
        raises = True

        def forward(self, x: Tensor) -> Tensor:
            if self.raises:
                raise RuntimeError("no")
            return super().forward(x)

    module = Raising(32, 48)
    tapped = Tapped(module)
    tapped.host.samples_call = lambda calls_before: True  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        tapped.run(torch.randn(16, 32, requires_grad=True))
    module.raises = False
    tapped.run(torch.randn(16, 32, requires_grad=True)).sum().backward()
    tapped.close()
    assert [tapped.of[side].calls for side in SIDES] == [1, 1, 1]


def test_a_backward_that_raises_keeps_no_gradient() -> None:
    """Of a thread that goes on, as that of a GPU's gradients does."""

    class Raising(ScaledLinear):
        raises = False

        @staticmethod
        def multiply(*args: Any) -> Tensor:
            if Raising.raises:
                raise RuntimeError("no")
            return ScaledLinear.multiply(*args)

    tapped = Tapped(Raising(32, 48))
    y = tapped.run(torch.randn(16, 32, requires_grad=True))
    Raising.raises = True

    def backward() -> int:
        d_y = torch.ones_like(y)
        with pytest.raises(RuntimeError):
            y.backward(d_y)
        return d_y.data_ptr()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        at = thread.submit(backward).result()
        kept = tapped.tap._d_y
        assert kept is not None and kept.data_ptr() == at
        del kept
        tapped.close()
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) is Tensor and t.data_ptr() == at]
        assert tensors == []


def test_scaled_mm_of_functional_is_seen() -> None:
    scaled_mm = getattr(nn.functional, "scaled_mm", None)
    if scaled_mm is None:
        pytest.skip("torch has no torch.nn.functional.scaled_mm")
    from torch.nn.functional import ScalingType

    class Newer(ScaledLinear):
        @staticmethod
        def multiply(a: Tensor, s_a: Tensor, b: Tensor, s_b: Tensor) -> Tensor:
            whole = ScalingType.TensorWise
            return scaled_mm(a, b, s_a, whole, s_b, whole)  # type: ignore[no-any-return]

    told: list[Any] = []
    end = scaled_products.listen(lambda *given: told.append(given))
    try:
        Newer(32, 48)(torch.randn(16, 32, requires_grad=True))
    except (NotImplementedError, RuntimeError) as e:
        pytest.skip(f"not on this device: {e}")
    finally:
        end()
    assert [t[0].shape for t in told] == [(16, 32)] and told[0][3][0].numel() == 1


def test_two_listeners_end_one_by_one() -> None:
    theirs = torch._scaled_mm
    ends = [scaled_products.listen(lambda *given: None) for _ in range(2)]
    ends[0]()
    ends[0]()
    assert torch._scaled_mm is not theirs
    ends[1]()
    assert torch._scaled_mm is theirs


def test_plain_linear_layers_have_no_products_in_8_bits() -> None:
    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    modules = (nn.Linear(4, 4), nn.Embedding(4, 4), nn.LayerNorm(4), patched, ScaledLinear(4, 4))
    assert [may_have_products(m) for m in modules] == [False, False, False, True, True]


@pytest.mark.filterwarnings("ignore")
def test_torchaos_layers_tell_what_they_multiply(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.float8")

    def change(model: Model) -> None:
        for block in model.layers:
            block.mlp = nn.Sequential(
                nn.Linear(SHAPE.width, 80, bias=False), nn.GELU(), nn.Linear(80, SHAPE.width)
            ).bfloat16()
            torchao.convert_to_float8_training(block.mlp)
            for name in ("0", "2"):
                keep(block.mlp.get_submodule(name))

    kept: list[list[Tensor]] = []

    def keep(module: nn.Module) -> None:
        mine: list[Tensor] = []
        kept.append(mine)
        module.register_forward_pre_hook(lambda _, args: mine.append(args[0].detach().clone()))

    _, status, _ = trained(tmp_path / "a.bwrun", steps=TURNS + 2, change=change)
    names = [f"layers.{block}.mlp.{at}" for block in range(2) for at in (0, 2)]
    assert status["fp8"]["seen"] == 4
    rows = set()
    for step, of_step in told_in(tmp_path / "a.bwrun").items():
        rows |= set(of_step)
        for name, inputs in zip(names, kept):
            if f"{name} fp8:x" in of_step:
                x = inputs[step].flatten(0, -2).float()
                scale = torch.finfo(E4M3).max / x.abs().amax().double()
                q = (x * scale.float()).clamp(-448, 448).to(E4M3)
                want = wanted_of([Kept(q, x, 1 / scale)])
                got = of_step[f"{name} fp8:x"]
                assert {k: got[k] for k in want} == pytest.approx(want, rel=1e-6)
    assert rows == {f"{name} fp8:{side}" for name in names for side in SIDES}


class Engine(nn.Module):
    """Keeps its scales as Transformer Engine's modules do with delayed scaling."""

    class Kept:
        def __init__(self, *scales: float) -> None:
            self.scale = torch.tensor(scales)

    def __init__(self, width: int, meta: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.fp8_meta: dict[str, Any] = {"recipe": None}
        if meta:
            self.fp8_meta["scaling_fwd"] = self.Kept(4.0, 8.0, 1.0)
            self.fp8_meta["scaling_bwd"] = self.Kept(0.5, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype)


def test_scales_that_modules_keep_are_told(tmp_path: Path) -> None:
    def change(model: Model) -> None:
        model.layers[0].mlp, model.layers[1].mlp = Engine(SHAPE.width), Engine(SHAPE.width, False)

    _, status, _ = trained(tmp_path / "a.bwrun", steps=6, change=change)
    told = [of for of in told_in(tmp_path / "a.bwrun").values() if of]
    assert [of["layers.0.mlp fp8:x"]["fp8_scale"] for of in told] == [0.25] * len(told)
    assert told[-1]["layers.0.mlp fp8:w"] == {"fp8_scale": 0.125, "fp8_amax_age": len(told) - 1}
    assert told[0]["layers.0.mlp fp8:dy"] == {"fp8_scale": 2.0, "fp8_amax_age": 0}
    assert list(status["fp8"]["left_out"]) == [f"layers.1.mlp: {NO_SCALE}"]


def test_nothing_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_tap, "readable", lambda x: True)
    q, before = (torch.empty(16, 32, device=DEVICE) for _ in range(2))
    with NoWaiting() as seen:
        (of,) = new_quantised([0], torch.device(DEVICE))
        assert of["x"].add(q.to(E4M3), torch.empty(16, 1, device=DEVICE), before)
        assert of["w"].add(q.to(E5M2), torch.empty((), device=DEVICE), None)
        kept = Engine.Kept(1.0, 1.0)
        kept.scale = torch.empty(3, device=DEVICE)
        assert read_meta({"scaling_fwd": kept, "scaling_bwd": kept}, of)
    assert seen.operations
