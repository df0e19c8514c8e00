"""One of two processes that train a model whose parameters, or whose moments, lie at both:
`sharded_job.py FOLDER MODE ...`, with RANK, WORLD_SIZE and the address in the environment (gloo).
Each way trains without the hook and with it.  Prints nothing; writes into FOLDER/MODE a recording
for each process that reports, what it came to, and what all steps should tell of the whole
parameters, in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from told_tensors import Kept
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import checkpoint

import bellwether
from bellwether.settings import STATS

from models import Model, Shape, batch
from parallel_job import Local

SHAPE = Shape(layers=1, fused=False, heads=4, kv_heads=2)
STEPS = 11  # One for each parameter, and the first, in which there are no moments.


class Headed(nn.Module):
    """Behind the model a layer whose rows do not come out even: 3, and a gain of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(SHAPE, kind=Local)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(SHAPE.width, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.inner(x)) * self.gain


@dataclasses.dataclass
class Way:
    """How a model is trained."""

    wrap: Callable[[Headed], nn.Module]
    optimizers: Callable[[nn.Module], list[Optimizer]]
    micro: int = 1
    clip: Optional[float] = None
    scaler: bool = False
    same_data: bool = False  # Both processes have the same.


def adamw(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)]


def fully_sharded(model: Headed) -> nn.Module:
    for block in model.inner.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def replicated_shards(model: Headed) -> nn.Module:
    """Hybrid: each process has all shards of a copy."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    fully_shard(model, mesh=mesh)
    return model


def compiled_shards(model: Headed) -> nn.Module:
    fully_sharded(model)
    for block in model.inner.blocks:
        block.compile(backend="aot_eager")
    return model


def tensor_parallel(model: Headed) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        plan[f"inner.blocks.*.attention.{name}"] = ColwiseParallel()
    plan["inner.blocks.*.attention.out"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    return model


class Checkpointed(nn.Module):
    def __init__(self, headed: Headed) -> None:
        super().__init__()
        self.headed = headed

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.headed, x, use_reentrant=False)


def copies(model: Headed) -> nn.Module:
    return nn.parallel.DistributedDataParallel(Checkpointed(model))


def muon(model: nn.Module) -> list[Optimizer]:
    """For matrices, and AdamW for the rest: two optimizers."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [torch.optim.Muon(matrices, 1e-3), torch.optim.AdamW(rest, 1e-3)]


def zero_1(model: nn.Module) -> list[Optimizer]:
    return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)]


WAYS = {
    "fsdp": Way(fully_sharded, adamw, micro=2, clip=1e-3),
    "fsdp_compiled": Way(compiled_shards, adamw, scaler=True),
    "hsdp": Way(replicated_shards, adamw),
    "tp": Way(tensor_parallel, adamw, same_data=True),
    "zero_1": Way(copies, zero_1, micro=2),
    "ddp_muon": Way(copies, muon, scaler=True, clip=1e-3),
}


def whole(t: Any) -> Optional[Tensor]:
    if isinstance(t, DTensor):
        t = t.full_tensor()
    return t.detach().double().clone() if isinstance(t, Tensor) else None


def products(g: Any, m: Any) -> Optional[float]:
    """Of the norms of the parts, added up."""
    if g is None or m is None:
        return None
    if not isinstance(g, DTensor) or all(p.is_replicate() for p in g.placements):
        return None
    found = g.to_local().double().norm() * m.to_local().double().norm()
    if g.device_mesh.ndim == 1:
        dist.all_reduce(found)
    return float(found)


def state_of(optimizer: Any, p: Tensor) -> dict[str, Any]:
    """With what lies at the other process."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return dict(optimizer.state.get(p, {}))
    state = optimizer.optim.state.get(p, {})
    found = {}
    for name in ("exp_avg", "exp_avg_sq", "step"):
        there = torch.zeros_like(p) if name != "step" else torch.zeros(())
        there = state[name].clone() if name in state else there
        dist.all_reduce(there)
        found[name] = there
    return found if float(found["step"]) > 0 else {}


def keep(model: nn.Module, names: list[str], optimizers: list[Any]) -> dict[str, Any]:
    """Of each parameter: of now, and the size of its parts."""
    found = {}
    for name, p in zip(names, model.parameters()):
        optimizer, group = next(
            (o, g) for o in optimizers for g in o.param_groups if any(p is q for q in g["params"])
        )
        state = state_of(optimizer, p)
        m = state.get("exp_avg", state.get("momentum_buffer"))
        kept = Kept(
            whole(p.grad), whole(p), whole(p), whole(m), whole(state.get("exp_avg_sq")),
            float(whole(state.get("step", torch.zeros(())))) + 1,
            group.get("betas", (0, 0))[1], group["eps"] if "betas" in group else 0,
        )  # fmt: skip
        found[name] = kept, products(p.grad, m)
    return found


def wanted(kept: dict[str, Any], unclipped: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    found = {}
    for (name, (of, norms)), p in zip(kept.items(), model.parameters()):
        of.after = whole(p)
        values = of.wanted()
        if norms is not None:
            values["tensor_momentum_norms"] = norms
        if of.m is not None:
            values["size"] = float((of.g * of.m).abs().sum())
        before = unclipped[name][0].wanted()
        values |= {k: x for k, x in before.items() if k.startswith("tensor_grad")}
        found[name] = values
    return found


def unsynced(model: Any, last: bool) -> contextlib.AbstractContextManager[None]:
    """While gradients are accumulated."""
    if hasattr(model, "no_sync"):
        return contextlib.nullcontext() if last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def trained(way: Way, monitored: Callable[[nn.Module], Any], told: list[Any]) -> Iterator[Any]:
    """Yields behind each step, and at last the parameters."""
    torch.manual_seed(3)
    headed = Headed()
    names = [name for name, _ in headed.named_parameters()]
    if way.wrap is copies:
        names = [f"headed.{name}" for name in names]
    model = way.wrap(headed)
    monitor = monitored(model)
    optimizers = way.optimizers(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if way.scaler else None
    for step in range(STEPS):
        for part in range(way.micro):
            seed = 2 * (way.micro * step + part) + (0 if way.same_data else dist.get_rank())
            with unsynced(model, part == way.micro - 1):
                loss = model(batch(SHAPE, seed, 2, 8)).square().mean() / way.micro
                (loss if scaler is None else scaler.scale(loss)).backward()
        for optimizer in optimizers if scaler is not None else ():
            scaler.unscale_(optimizer)  # type: ignore[union-attr]
        unclipped = keep(model, names, optimizers) if monitor is not None else {}
        kept = unclipped
        if way.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), way.clip, foreach=False)
            kept = keep(model, names, optimizers) if monitor is not None else {}
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        told.append(wanted(kept, unclipped, model))
        for optimizer in optimizers:
            optimizer.zero_grad()
    if monitor is not None:
        assert monitor.flush(20), monitor.status()
        assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
        told.append(monitor.status()["tensors"])
        monitor.detach()
    yield from (whole(p) for p in model.parameters())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        folder.mkdir(exist_ok=True)

        def monitored(model: nn.Module, folder: Path = folder) -> Any:
            return bellwether.attach(
                model, record=str(folder / "s.bwrun"), run="s", every=1, rows=0, sequences=0,
                overhead_budget=1e9, ranks="all", stats=frozenset(STATS),
            )  # fmt: skip

        told: list[Any] = []
        plain = list(trained(WAYS[name], lambda _: None, []))
        hooked = list(trained(WAYS[name], monitored, told))
        same = all(torch.equal(a, b) for a, b in zip(plain, hooked))
        saved = {"same": same, "status": told.pop(), "told": told}
        torch.save(saved, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
