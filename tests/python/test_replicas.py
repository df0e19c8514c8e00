"""Goal: ranks that hold copies of a parameter report the same sum of its bits, whatever its type.
One other bit makes another sum.  What may differ on purpose is not compared.
Method: sums of tensors with one bit flipped; two processes with gloo of which one damages a weight,
and what they record.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import run_ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
    fp16_compress_wrapper,
)

from bellwether._kernels.bits import sum_of_bits
from bellwether._native import c_api
from bellwether._step.replicas import (
    ALONE,
    PARTIAL,
    SIGNALS,
    SILENT,
    UNEQUAL,
    UNKNOWN,
    Replicas,
    ReplicaSample,
)

from conftest import ROOT
from recording import Recording

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)


def reported(tensor: torch.Tensor) -> list[float]:
    low, high = ReplicaSample(0, sum_of_bits(tensor)[None]).blocks()
    return [*low.values, *high.values]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(600, 1000).to(dtype)  # More than one piece.
    whole = reported(tensor)
    raw = tensor.view(torch.uint8).reshape(-1)
    for place in (0, 1, len(raw) // 2, len(raw) - 1):
        for bit in (0, 7):
            raw[place] ^= 1 << bit
            assert reported(tensor) != whole
            raw[place] ^= 1 << bit
    assert reported(tensor) == whole


def test_exchanged_values_change_the_sum() -> None:
    tensor = torch.arange(600_000, dtype=torch.float32)
    other = tensor.clone()
    other[[3, 500_000]] = other[[500_000, 3]]
    assert reported(tensor) != reported(other)


def test_the_sum_is_of_values_not_of_their_layout() -> None:
    tensor = torch.randn(30, 40)
    assert reported(tensor) == reported(tensor.t().contiguous().t())


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def named(*, compared: bool = True, hook: Any = None) -> list[str]:
    model = nn.Linear(3, 2)
    wrapper = nn.parallel.DistributedDataParallel(model)
    if hook is not None:
        wrapper.register_comm_hook(None, hook)
    replicas = Replicas(lambda: wrapper, compared)
    replicas.forward_begins()
    return replicas.names


def test_copies_that_may_differ_on_purpose_are_not_compared(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert named() == named(hook=fp16_compress_hook) == ["weight", "bias"]
    assert named(compared=False) == []
    assert named(hook=noop_hook) == named(hook=fp16_compress_wrapper(noop_hook)) == []
    # DDP is of a part of the ranks: others have other tensors of these names.
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1 if group else 4)
    assert named() == []


def test_the_cause_is_said_where_nothing_is_compared(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    assert Replicas(lambda: model, True).why_not == ALONE
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1 if group else 4)
    assert Replicas(lambda: model, False).why_not == SILENT
    assert Replicas(lambda: model, True).why_not == UNKNOWN
    wrapper = nn.parallel.DistributedDataParallel(model)
    replicas = Replicas(lambda: wrapper, True)
    replicas.forward_begins()
    assert replicas.why_not == PARTIAL
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    wrapper.register_comm_hook(None, noop_hook)
    replicas = Replicas(lambda: wrapper, True)
    replicas.forward_begins()
    assert replicas.why_not == UNEQUAL


JOB = """
import sys, torch
from torch import nn
import bellwether
sys.path.insert(0, {tests!r})
from models import Model, Shape, batch

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(0)
shape = Shape(fused=False)
model = Model(shape)
if sys.argv[2] == "hsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    wrapped = fully_shard(model, mesh=mesh)
else:
    wrapped = nn.parallel.DistributedDataParallel(model)
mon = bellwether.attach(model, run="copies", record=sys.argv[1], every=1, ranks="all")
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(4):
    loss = wrapped(batch(shape, step + 10 * rank)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if sys.argv[2] == "gradient" and step >= 2 and rank == 1:
        model.blocks[1].attention.out.weight.grad *= 1.01  # As if it had missed the all-reduce.
    optimizer.step()
    if sys.argv[2] != "gradient" and step == 1 and rank == 1:
        with torch.no_grad():
            weight = model.blocks[1].attention.out.weight
            getattr(weight, "to_local", lambda: weight)().view(torch.int32)[0, 0] ^= 1 << 20
    mon.step()
assert mon.status()["errors"] == 0 and mon.status()["replicas"]["not_compared"] is None
mon.detach()
"""


@pytest.mark.parametrize("fault", ["bit", "gradient", "hsdp"])
def test_ranks_with_another_copy_report_another_sum(fault: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB.format(tests=str(ROOT / "tests" / "python")))
    run_ranks(script, str(tmp_path / "copies.bwrun"), fault)
    ranks = [
        Recording(tmp_path / name, ended=True) for name in ("copies.bwrun", "copies-rank1.bwrun")
    ]
    told = [m.names for m in ranks[0].messages if m.WhichOneof("body") == "names"]
    names = [list(of.names) for of in told if of.granularity == c_api.TENSOR]
    assert len(names) == 1 and names[0][0].startswith("inlet")
    steps = [recording.steps() for recording in ranks]
    for step in range(4):
        differ = set()
        for signal in SIGNALS:
            mine, other = (s[step][signal].reshape(-1) for s in steps)
            assert len(mine) == len(names[0])
            differ |= {name for name, a, b in zip(names[0], mine, other) if a != b}
        # All ranks take the same gradients of it, so that no later step repairs it.
        assert differ == ({"blocks.1.attention.out.weight"} if step >= 2 else set())
