"""Goal: what is told of activations behind blocks, attention and gated products, and of the
gradients at blocks' inputs, equals a recomputation in float64.  What cannot be seen is said.
Training stays the same bit for bit, and nothing waits for a GPU.
Method: trainings whose activations are kept beside them, compared with their recordings; models
whose blocks lie in other lists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch._dynamo
from rank_jobs import run_ranks
from told_tensors import Told, rows_told
from torch import Tensor, nn

import bellwether
from bellwether._hook.layer import activation_tap
from bellwether._hook.layer.activation_tap import (
    OTHER_WIDTH,
    ActivationTap,
    new_activations,
)
from bellwether._hook.layer.edge_tap import CHECKPOINTED
from bellwether._hook.layer.logits import ROWS, add_logits, new_logits
from bellwether._hook.model.blocks import find_blocks
from bellwether._hook.model.parallel import Parallel
from bellwether._kernels import activations as activation_kernels
from bellwether._kernels.memory import HostMemory
from bellwether._native import c_api
from bellwether._step.activation_sample import (
    GRADIENT_SIGNALS,
    LOGIT_SIGNALS,
    MEAN_SIGNALS,
    SIGNALS,
    ActivationSample,
)
from bellwether._step.activations import NO_BLOCKS
from bellwether._step.law_rows import LawRows
from bellwether._step.tapped_modules import COMPILED
from bellwether._step.tensor_rows import global_name

from conftest import ROOT
from gpu import DEVICES
from models import Attention, Shape, batch, through
from no_waiting import DEVICE, NoWaiting
from tap_host import Host as TapHost

SHAPE = Shape()
WATCHED: dict[str, Any] = {
    "stats": ["drift", "modules"], "every": 1, "overhead_budget": 1e9, "run": "modules",
}  # fmt: skip


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 70), nn.Linear(width, 70)
        self.down_proj = nn.Linear(70, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention, self.mlp = Attention(shape), Gated(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, checkpointing: Optional[str] = None, blocks: int = 2) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.inlet = nn.Linear(SHAPE.width, SHAPE.width)
        self.layers = nn.ModuleList(Block(SHAPE) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        return through(self.layers, self.inlet(x), self.checkpointing)


NAMES = [
    f"layers.{at}{part}" for at in range(2) for part in ("", ".attention", ".mlp product")
]  # fmt: skip


class Kept:
    """Activations and gradients of a training, by step and row, in float64."""

    def __init__(self, model: Gpt) -> None:
        self.x: list[dict[str, list[Tensor]]] = []
        self.grad: list[dict[str, list[Tensor]]] = []
        for at, block in enumerate(model.layers):
            name = f"layers.{at}"
            block.register_forward_hook(self._output(name))
            block.attention.register_forward_hook(self._output(f"{name}.attention"))
            block.mlp.down_proj.register_forward_pre_hook(self._input(f"{name}.mlp product"))
            block.register_forward_pre_hook(self._gradient(name))

    def begin(self) -> None:
        self.x.append({})
        self.grad.append({})

    def _output(self, name: str) -> Callable[..., None]:
        return lambda module, args, y: self._keep(self.x, name, y)

    def _input(self, name: str) -> Callable[..., None]:
        return lambda module, args: self._keep(self.x, name, args[0])

    def _gradient(self, name: str) -> Callable[..., None]:
        def hear(module: nn.Module, args: Any) -> None:
            args[0].register_hook(lambda g: self._keep(self.grad, name, g))

        return hear

    def _keep(self, into: list[dict[str, list[Tensor]]], name: str, t: Tensor) -> None:
        into[-1].setdefault(name, []).append(t.detach().double().cpu().flatten(0, -2))


def wanted_of(x: list[Tensor]) -> dict[str, float]:
    whole = torch.cat(x)
    finite = torch.where(whole.isfinite(), whole, 0.0)
    count = float(whole.isfinite().sum())
    squares = finite.square()
    mean = float(squares.sum()) / count
    channels = squares.sum(0)
    return {
        "module_elements": count,
        "module_sumsq": float(squares.sum()),
        "module_largest": float(finite.abs().max()),
        "module_largest_ratio": float(finite.abs().max()) / math.sqrt(mean),
        "module_nonfinite": whole.numel() - count,
        "module_fourths": float(squares.square().sum()) / mean,
        "module_top_sumsq": float(channels.max()),
        "module_top_channel": float(channels.argmax()),
    }


def wanted_of_logits(logits: Tensor) -> dict[str, float]:
    z = logits.flatten(0, -2).double()
    z = z[z.isfinite().all(1)]
    log_z, top = z.logsumexp(1), z.sort(1).values
    return {
        "logits_rows": float(len(z)),
        "logits_log_z_sum": float(log_z.sum()),
        "logits_log_z_max": float(log_z.max()),
        "logits_max": float(z.max()),
        "logits_margin_sum": float((top[:, -1] - top[:, -2]).sum()),
    }


def told_in(path: Path) -> Told:
    signals = (*SIGNALS, *GRADIENT_SIGNALS, *LOGIT_SIGNALS, *MEAN_SIGNALS)
    return rows_told(path, c_api.MODULE, signals)


def trained(
    path: Optional[Path], steps: int = 4, micro: int = 1, scaler: Any = None,
    checkpointing: Optional[str] = None, device: str = "cpu", dtype: torch.dtype = torch.float32,
    change: Callable[[Gpt], Any] = lambda model: None, **watch: Any,
) -> tuple[Kept, Any, list[Tensor]]:  # fmt: skip
    """What was kept, the status, and the weights at the end."""
    torch._dynamo.utils.counters.clear()  # Else a test before this one was compiled.
    torch.manual_seed(0)
    model = Gpt(checkpointing).to(device, dtype)
    monitor = None
    if path is not None:
        monitor = bellwether.attach(model, record=str(path), **(WATCHED | watch))
    kept = Kept(model)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        kept.begin()
        for part in range(micro):
            x = batch(SHAPE, step * micro + part, device=device).to(dtype)
            loss = model(x).square().mean() / micro
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    status = None
    if monitor is not None:
        status = monitor.status()
        assert status["errors"] == 0 and status["live"], status["last_error"]
        monitor.detach()
    return kept, status, [p.detach().clone() for p in model.parameters()]


def assert_told(told: Told, kept: Kept, micro: int = 1, scale: float = 1.0) -> None:
    assert set(told[len(kept.x) - 1]) == set(NAMES)
    # In the first step blocks are not known yet; the next one begins within the first block.
    for step in range(2, len(kept.x)):
        for name in NAMES:
            got, want = told[step][name], wanted_of(kept.x[step][name][:micro])
            if name in kept.grad[step]:
                g = torch.cat(kept.grad[step][name][:micro]) / scale
                want["module_grad_elements"] = float(g.isfinite().sum())
                want["module_grad_sumsq"] = float(g.square().sum())
                want["module_grad_nonfinite"] = 0.0
            assert set(got) == set(want), (step, name)
            for signal, value in want.items():
                assert got[signal] == pytest.approx(value, rel=1e-5, abs=1e-40), (
                    name,
                    signal,
                )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_equal_a_recomputation_in_float64(
    device: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    kept, status, _ = trained(tmp_path / "a.bwrun", device=device, dtype=dtype)
    assert_told(told_in(tmp_path / "a.bwrun"), kept)
    assert status["modules"] == {
        "blocks": 2,
        "rows": 6,
        "turns": 1,
        "divided_by": 1.0,
        "not_measured": None,
        "left_out": {},
    }


@pytest.mark.parametrize("microbatches, count", [("first", 1), ("all", 3)])
def test_micro_batches_add_up_where_all_are_asked(
    microbatches: str, count: int, tmp_path: Path
) -> None:
    kept, _, _ = trained(tmp_path / "a.bwrun", micro=3, microbatches=microbatches)
    assert_told(told_in(tmp_path / "a.bwrun"), kept, count)


def test_gradients_are_told_without_the_loss_scale(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    kept, _, _ = trained(tmp_path / "a.bwrun", scaler=scaler)
    assert_told(told_in(tmp_path / "a.bwrun"), kept, scale=1024.0)


@pytest.mark.parametrize("device", DEVICES)
def test_training_is_the_same_bit_for_bit(device: str, tmp_path: Path) -> None:
    _, _, watched = trained(tmp_path / "a.bwrun", device=device)
    _, _, alone = trained(None, device=device)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone))


def test_without_the_part_nothing_is_told(tmp_path: Path) -> None:
    trained(tmp_path / "a.bwrun", stats=["drift", "linear"])
    assert not any(told_in(tmp_path / "a.bwrun").values())


def test_elements_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    def change(model: Gpt) -> None:
        calls = []

        def damage(module: nn.Module, args: Any, y: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) < 2:
                return y
            y = y.clone()
            y[0, 3, 5], y[1, 0, 0] = math.nan, math.inf
            return y

        model.layers[1].attention.out.register_forward_hook(damage)

    trained(tmp_path / "a.bwrun", steps=2, change=change)
    got = told_in(tmp_path / "a.bwrun")[1]["layers.1.attention"]
    assert got["module_nonfinite"] == 2 and math.isfinite(got["module_sumsq"])


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_checkpointed_blocks_are_left_out_and_said(how: str, tmp_path: Path) -> None:
    _, status, watched = trained(tmp_path / "a.bwrun", checkpointing=how)
    assert not any(told_in(tmp_path / "a.bwrun").values())
    assert f"layers.0: {CHECKPOINTED}" in status["modules"]["left_out"]
    _, _, alone = trained(None, checkpointing=how)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone))


def test_compiled_models_are_left_out_and_said(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gpt()
    model.layers[0].mlp.compile(backend="eager")
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), **WATCHED)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        model(batch(SHAPE, step)).square().mean().backward()
        optimizer.step()
    status = monitor.status()
    monitor.detach()
    assert status["errors"] == 0 and status["modules"]["not_measured"] == COMPILED
    assert not any(told_in(tmp_path / "a.bwrun").values())


class Single(nn.Module):
    """Its blocks are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.block = nn.Linear(SHAPE.width, SHAPE.width), Block(SHAPE)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.inlet(x))  # type: ignore[no-any-return]


def test_blocks_in_no_list_are_said_to_be_none(tmp_path: Path) -> None:
    torch._dynamo.utils.counters.clear()
    model = Single()
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), **WATCHED)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        model(batch(SHAPE, step)).square().mean().backward()
        optimizer.step()
    status = monitor.status()
    monitor.detach()
    assert status["errors"] == 0 and status["modules"]["not_measured"] == NO_BLOCKS


def test_models_of_transformers_have_names_and_gradients(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), **WATCHED)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.randint(0, 64, (2, 16))
    logits: list[Tensor] = []
    words: list[Tensor] = []
    hidden: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0].detach()))
    for _ in range(3):
        out = model(input_ids=ids, labels=ids, use_cache=False)
        logits.append(out.logits.detach().double())
        words.append(model.model.embed_tokens.weight.detach().double()[ids])
        out.loss.backward()
        optimizer.step()
    status = monitor.status()
    monitor.detach()
    told = told_in(tmp_path / "a.bwrun")[2]
    blocks = [f"model.layers.{at}" for at in range(2)]
    parts = ("", ".self_attn", ".mlp product")
    around = {
        "model.embed_tokens": words[2], "lm_head": logits[2],
        "lm_head input": hidden[2].double(),
    }  # fmt: skip
    assert set(told) == {block + part for block in blocks for part in parts} | set(around)
    for name, x in around.items():
        want = wanted_of([x.flatten(0, -2)])
        assert {k: told[name][k] for k in want} == pytest.approx(want, rel=1e-5)
    want = wanted_of_logits(logits[2])
    assert {k: told["lm_head"][k] for k in want} == pytest.approx(want, rel=1e-5)
    tokens = around["lm_head input"].flatten(0, -2)
    mean = float(len(tokens) * tokens.mean(0).square().sum())
    assert told["lm_head input"]["module_mean_sumsq"] == pytest.approx(mean, rel=1e-5)
    assert not set(LOGIT_SIGNALS) & set(told["model.embed_tokens"])
    assert all(told[block]["module_grad_sumsq"] > 0 for block in blocks)
    assert status["errors"] == 0 and status["modules"]["left_out"] == {}


# ---- gradients of several ranks ----

JOB = """
import sys, torch
from torch import distributed as dist, nn
sys.path.insert(0, {tests!r})
import bellwether
from models import batch
from test_activations import SHAPE, WATCHED, Gpt

folder, *ways = sys.argv[1:]
world = 1 if ways == ["one"] else 2
if world > 1:
    dist.init_process_group("gloo")
rank = dist.get_rank() if world > 1 else 0
for way in ways:
    torch.manual_seed(0)
    model = wrapped = Gpt()
    if way == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif way.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard
        fully_shard(model)
        if way == "fsdp_sum":
            model.set_gradient_divide_factor(1.0)
            model.set_force_sum_reduction_for_comms(True)  # gloo divides by no factor itself.
    monitor = bellwether.attach(model, record=f"{{folder}}/{{way}}.bwrun", ranks="all", **WATCHED)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.cat([batch(SHAPE, step), batch(SHAPE, step + 50)])
        wrapped(x.chunk(world)[rank]).square().mean().backward()
        optimizer.step()
    status = monitor.status()
    monitor.detach()
    assert status["errors"] == 0, status["last_error"]
    wanted = {{"one": 1.0, "ddp": 2.0, "fsdp": 2.0, "fsdp_sum": 1.0, "own": None}}[way]
    assert status["modules"]["divided_by"] == wanted, status["modules"]
if world > 1:
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@functools.cache
def gradients_told(folder: Path) -> dict[str, float]:
    """The mean square of the gradient at the last block's input, over the ranks, by the way."""
    script = folder / "job.py"
    script.write_text(JOB.format(tests=str(ROOT / "tests" / "python")))
    several = ("ddp", "fsdp", "fsdp_sum", "own")
    run_ranks(script, str(folder), "one", ranks=1)
    run_ranks(script, str(folder), *several)
    told = {}
    for way in ("one", *several):
        paths = [folder / f"{way}.bwrun", folder / f"{way}-rank1.bwrun"]
        rows = [told_in(path)[3]["layers.1"] for path in paths[: 1 if way == "one" else 2]]
        elements = sum(row["module_grad_elements"] for row in rows)
        told[way] = sum(row["module_grad_sumsq"] for row in rows) / elements
    return told


def test_gradients_at_blocks_are_those_of_the_whole_batch(jobs: Path) -> None:
    told = gradients_told(jobs)
    assert told["ddp"] == pytest.approx(told["one"], rel=1e-4)
    assert told["fsdp"] == pytest.approx(told["one"], rel=1e-4)


def test_gradients_that_are_added_up_otherwise_are_the_ranks_own(jobs: Path) -> None:
    told = gradients_told(jobs)
    assert told["fsdp_sum"] == pytest.approx(told["own"], rel=1e-4)


# ---- where blocks are found ----


class Holder(nn.Module):
    """Of parts by their names."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def blocks_in(model: nn.Module) -> list[str]:
    attention = [m for m in model.modules() if isinstance(m, Attention)]
    return [name for name, _ in find_blocks(model, attention)]


def listed(*elements: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(elements)


def test_blocks_are_the_innermost_list_whose_elements_all_attend() -> None:
    stages = Holder(stages=listed(*(Holder(blocks=listed(Block(SHAPE))) for _ in range(2))))
    assert blocks_in(stages) == ["stages.0.blocks.0", "stages.1.blocks.0"]
    parts = [Holder(layer=listed(Holder(a=Attention(SHAPE)), Gated(8))) for _ in range(2)]
    assert blocks_in(Holder(block=listed(*parts))) == ["block.0", "block.1"]  # As T5's.


def test_blocks_of_another_kind_in_the_list_count() -> None:
    assert blocks_in(Holder(layers=listed(Block(SHAPE), Gated(8)))) == [
        "layers.0",
        "layers.1",
    ]
    mixed = nn.Sequential(nn.Linear(4, 4), Block(SHAPE))
    assert blocks_in(mixed) == ["1"]


def test_attention_that_is_an_element_itself_is_no_block() -> None:
    assert blocks_in(Holder(layers=listed(Attention(SHAPE)))) == []


def test_a_numbered_dict_is_a_list_of_blocks() -> None:
    blocks = {str(at): Block(SHAPE) for at in (2, 3)}
    assert blocks_in(Holder(layers=nn.ModuleDict(blocks))) == ["layers.2", "layers.3"]
    kinds = nn.ModuleDict({"self": Holder(a=Attention(SHAPE)), "cross": Holder(a=Attention(SHAPE))})
    assert blocks_in(Holder(layers=listed(Holder(of=kinds)))) == ["layers.0"]


class OwnAttention(Attention):
    """A block that calls attention itself."""

    def __init__(self, mlp: bool, norm: str = "norm") -> None:
        super().__init__(SHAPE)
        self.add_module(norm, nn.LayerNorm(SHAPE.width))
        self.rest: Optional[nn.Module] = None
        if mlp:
            self.rest = nn.Sequential(nn.Linear(SHAPE.width, 70), nn.Linear(70, SHAPE.width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + super().forward(x)
        return x if self.rest is None else x + self.rest(x)  # type: ignore[no-any-return]


def test_an_element_that_attends_itself_may_be_a_whole_block() -> None:
    assert blocks_in(Holder(layers=listed(OwnAttention(True)))) == ["layers.0"]
    assert blocks_in(Holder(layers=listed(OwnAttention(False), Gated(8)))) == []
    assert blocks_in(Holder(layers=listed(OwnAttention(True, "q_norm")))) == []
    mixed = Holder(layers=listed(OwnAttention(True), Block(SHAPE)))
    assert blocks_in(mixed) == ["layers.0", "layers.1"]


def in_a_dict() -> nn.Module:
    return nn.ModuleDict({str(at): Block(SHAPE) for at in range(2)})


def attending_themselves() -> nn.Module:
    return listed(OwnAttention(True), OwnAttention(True))


@pytest.mark.parametrize("layers", [in_a_dict, attending_themselves])
def test_such_blocks_tell_of_activations_and_gradients(
    tmp_path: Path, layers: Callable[[], nn.Module]
) -> None:
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Holder(inlet=nn.Linear(SHAPE.width, SHAPE.width), layers=layers())
    outputs: list[Tensor] = []
    list(model.layers.children())[1].register_forward_hook(
        lambda m, a, y: outputs.append(y.detach())
    )
    monitor = bellwether.attach(model, record=str(tmp_path / "a.bwrun"), **WATCHED)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        x: Tensor = model.inlet(batch(SHAPE, step))
        for block in model.layers.children():
            x = block(x)
        x.square().mean().backward()
        optimizer.step()
    status = monitor.status()
    monitor.detach()
    assert status["errors"] == 0 and status["modules"]["blocks"] == 2
    told = told_in(tmp_path / "a.bwrun")
    row = told[3]["layers.1"]
    mean = row["module_sumsq"] / row["module_elements"]
    assert mean == pytest.approx(float(outputs[3].double().square().mean()), rel=1e-5)
    assert row["module_grad_sumsq"] > 0


def test_names_count_from_the_first_layer_of_a_pipeline() -> None:
    placed = Parallel(pipeline=(1, 2), first_layer=6, layers=12)
    assert global_name("model.layers.2", placed) == "model.layers.8"
    assert global_name("model.layers.2.self_attn", placed) == "model.layers.8.self_attn"


# ---- one tap ----


class Host(TapHost):
    def samples_call(self, calls_before: int) -> bool:
        return True


def test_calls_of_another_width_are_left_out() -> None:
    host, module = Host(), nn.Identity()
    (into,) = new_activations([0], torch.device("cpu"))
    tap = ActivationTap(host, into)  # type: ignore[arg-type]
    for width in (4, 6):
        x = torch.ones(3, width)
        tap.input((x,))
        tap.output((x,), module(x))
    assert into.left_out == OTHER_WIDTH


def test_values_beyond_a_float_and_empty_ones_cost_no_frame() -> None:
    class Client:
        def push_names(self, granularity: int, names: list[str], first: int) -> int:
            return len(names)

    host = Host()
    activations = new_activations([0, 1], torch.device("cpu"))
    for into, value in zip(activations, (3e38, 0.0)):
        into.add(host, torch.full((4, 8), value), gradient=False)  # type: ignore[arg-type]
    sample = ActivationSample(["a", "b"], activations)
    told = {b.signal: list(b.values) for b in sample.blocks(Client(), LawRows(), 1.0, True, 256)}  # type: ignore[arg-type]
    assert told["module_sumsq"] == [math.inf, 0] and told["module_largest_ratio"] == [
        1,
        0,
    ]
    assert set(told) == set(SIGNALS)
    rows = LawRows()
    assert sample.blocks(Client(), rows, 1.0, True, 10) == []  # type: ignore[arg-type]
    assert rows.not_sent == 2  # They are counted.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_tokens_that_lie_evenly_are_read(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    z = (10 * torch.randn(2, 700, 97)).to(dtype)
    z[0, 3, 5], z[1, 8, 0] = math.nan, math.inf
    found = new_logits(z.device)
    add_logits(z, found)
    rows = z.flatten(0, 1)[::3]
    assert len(rows) <= ROWS
    wanted = list(wanted_of_logits(rows).values())
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)
    assert wanted[0] < len(rows)  # Row 3 is not finite.


def test_nothing_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_kernels, "call", lambda name, params: None)
    monkeypatch.setattr(activation_tap, "readable", lambda x: True)
    host = Host()
    monkeypatch.setattr(host.memories, "of", lambda device: HostMemory())
    x = torch.empty(2, 5, 8, device=DEVICE, requires_grad=True) * 2
    with NoWaiting() as seen:
        (into,) = new_activations([0], torch.device(DEVICE))
        tap = ActivationTap(host, into, gradients=True)  # type: ignore[arg-type]
        tap.input((x,))
        y = x * 3
        tap.output((x,), y)
        y.backward(torch.empty_like(y))
        add_logits(y.detach(), new_logits(y.device))
    assert seen.operations and (into.calls, into.gradients) == (1, 1) and not host.errors
