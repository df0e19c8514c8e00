"""One of two processes that train copies of a model on data of their own:
`rank_norm_job.py FOLDER MODE ...`, with RANK, WORLD_SIZE and the address in the environment (gloo).
Each way trains without the hook and with it.  In step BAD_STEP the second process has a bad batch.
Prints nothing; writes into FOLDER/MODE a recording for each process, and what it came to: the norm
of each micro-batch's own gradient, computed anew by a twin, in float64."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import bellwether

from models import Model, Shape, batch

SHAPE = Shape(fused=False, heads=4, kv_heads=2)
STEPS, EVERY, BAD_STEP = 8, 2, 4


def copies(model: Model) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def views(model: Model) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def shards(model: Model) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def replicated(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    fully_shard(model, mesh=mesh)
    return model


def in_16_bits(model: Model) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    return model


# How a model is wrapped, micro-batches of a step, and how near the twin comes.
WAYS: dict[str, tuple[Callable[[Model], nn.Module], int, float]] = {
    "ddp": (copies, 1, 1e-5),
    "ddp-no-sync": (copies, 3, 1e-5),
    "ddp-views": (views, 2, 1e-5),
    "fsdp2": (shards, 1, 1e-5),
    "fsdp2-no-sync": (shards, 2, 1e-5),
    "hsdp": (replicated, 1, 1e-5),
    "fsdp2-bf16": (in_16_bits, 1, 5e-2),  # The twin is of float32.
}


def whole(p: Any) -> Tensor:
    found = p.full_tensor() if isinstance(p, DTensor) else p
    return found.detach().clone()  # type: ignore[no-any-return]


def unsynced(model: Any, last: bool) -> contextlib.AbstractContextManager[None]:
    if hasattr(model, "no_sync"):
        return contextlib.nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def trained(
    wrap: Callable[[Model], nn.Module], micro: int, monitored: Optional[Callable[[nn.Module], Any]]
) -> tuple[list[list[float]], list[Tensor], Any]:
    """Norms by step, the parameters at the end, and what the monitor says."""
    torch.manual_seed(3)
    twin = Model(SHAPE)
    torch.manual_seed(3)
    model = wrap(Model(SHAPE))
    monitor = monitored(model) if monitored is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    norms: list[list[float]] = []
    for step in range(STEPS):
        with torch.no_grad():
            for own, p in zip(twin.parameters(), model.parameters()):
                own.copy_(whole(p))
        norms.append([])
        for part in range(micro):
            x = batch(SHAPE, 2 * (micro * step + part) + dist.get_rank(), 2, 8)
            if step == BAD_STEP and dist.get_rank() == 1:
                x = x * 1000
            loss = twin(x).square().mean()
            gradients = torch.autograd.grad(loss, list(twin.parameters()))
            norms[-1].append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
            with unsynced(model, part == micro - 1):
                model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    said = None
    if monitor is not None:
        assert monitor.flush(20), monitor.status()
        said = monitor.status()
        assert said["errors"] == 0, said["last_error"]
        monitor.detach()
    return norms, [whole(p) for p in model.parameters()], said


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        folder.mkdir(exist_ok=True)

        def monitored(model: nn.Module, folder: Path = folder) -> Any:
            return bellwether.attach(
                model, record=str(folder / "s.bwrun"), run="s", every=EVERY, overhead_budget=1e9,
                ranks="all", stats="drift,rank_norms",
            )  # fmt: skip

        wrap, micro, _ = WAYS[name]
        norms, end, said = trained(wrap, micro, monitored)
        _, without, _ = trained(wrap, micro, None)
        same = all(torch.equal(a, b) for a, b in zip(end, without))
        kept = {"norms": norms, "same": same, "said": said["rank_norms"]}
        torch.save(kept, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
