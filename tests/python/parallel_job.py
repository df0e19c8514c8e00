"""One of two processes that train a small model in parallel, in one way after the other, without
the hook and with it: `parallel_job.py DEVICE FOLDER MODE ...`, with RANK, WORLD_SIZE and the
address in the environment.  DEVICE is cpu (gloo), or cuda (NCCL, each process on a GPU of its
own).  Prints nothing; writes a recording for each process that reports, and what it came to, into
FOLDER/MODE."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bellwether

from models import Attention, Model, Shape, batch

STEPS = 3
device = torch.device("cpu")  # Of this process.
SHAPE = Shape(fused=False, heads=4, kv_heads=2)


class Local(Attention):
    """As tensor-parallel models are written: as many heads as there are columns here."""

    def split(self, x: Tensor) -> list[Tensor]:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return [p.unflatten(-1, (-1, self.shape.dim)).transpose(1, 2) for p in parts]


def data_parallel(model: Model) -> tuple[nn.Module, dict[str, Any]]:
    return nn.parallel.DistributedDataParallel(model), {}


def fully_sharded(model: Model) -> tuple[nn.Module, dict[str, Any]]:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, {}


def tensor_parallel(model: Model) -> tuple[nn.Module, dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        plan[f"blocks.*.attention.{name}"] = ColwiseParallel()
    plan["blocks.*.attention.out"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    return model, {}


class Stage(nn.Module):
    """One layer of the model, as a pipeline stage holds it."""

    def __init__(self, model: Model, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.inlet = model.inlet if rank == 0 else nn.Identity()
        self.blocks = nn.ModuleList([model.blocks[rank]])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.inlet(x))


def pipeline_step(stage: Stage, step: int) -> None:
    """GPipe by hand with one micro-batch: activations there, gradients back."""
    x = batch(SHAPE, step).to(device)
    if stage.rank == 0:
        y = stage(x)
        dist.send(y.detach(), 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, 1)
        y.backward(gradient)
    else:
        y = torch.empty(*x.shape[:2], SHAPE.width, device=device)
        dist.recv(y, 0)
        y.requires_grad_()
        stage(y).square().mean().backward()
        assert y.grad is not None
        dist.send(y.grad, 0)


def context_parallel(model: Model) -> tuple[nn.Module, dict[str, Any]]:
    """Each process has its part of the tokens; what they exchange does not matter here."""
    rank = dist.get_rank()
    return model, {"parallel": bellwether.Parallel(context=(rank, dist.get_world_size()))}


def sharded_numbers(model: nn.Module) -> dict[str, Any]:
    """A norm as FSDP2 gives it, whole on each rank, and a number that would have to be added up by
    all ranks, of which one alone reports."""
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    part = DTensor.from_local(torch.tensor(1.0 + dist.get_rank(), device=device), mesh, [Partial()])
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=False)
    return {"grad_norm": norm, "tokens": part}


MODES = {"ddp": data_parallel, "fsdp": fully_sharded, "tp": tensor_parallel, "cp": context_parallel}


def train(mode: str, folder: Path, hooked: bool) -> None:
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = Model(SHAPE, kind=Local).to(device)
    whole = [[getattr(a, n).weight.detach().cpu().clone() for n in ("q_proj", "k_proj")]
             for a in model.attentions()]  # fmt: skip
    more: dict[str, Any] = {}
    run: nn.Module
    if mode == "pp":
        run = Stage(model, rank)
        more["parallel"] = bellwether.Parallel(pipeline=(rank, 2), first_layer=rank, layers=2)
    else:
        run, more = MODES[mode](model)
    monitor: Any = contextlib.nullcontext()
    if hooked:
        monitor = bellwether.attach(
            run, record=str(folder / "p.bwrun"), run="p", every=1, rows=0, sequences=0,
            overhead_budget=1e9, **more,
        )  # fmt: skip
    # One parameter at a time: foreach takes no DTensors beside plain tensors.
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1, foreach=False)
    results = []
    left_out: dict[str, int] = {}  # Numbers of a step.
    with monitor:
        for step in range(STEPS):
            if mode == "pp":
                pipeline_step(run, step)  # type: ignore[arg-type]
            else:
                seed = 10 * step + (rank if mode in ("ddp", "fsdp", "cp") else 0)
                loss = run(batch(SHAPE, seed).to(device)).square().mean()
                loss.backward()
                results.append(loss.detach().cpu().clone())
            told = sharded_numbers(run) if mode == "fsdp" else {}
            optimizer.step()
            optimizer.zero_grad()
            if hooked:
                monitor.step(loss=1.0, **told)
            results += [n.to_local() for n in told.values()]
        if hooked and monitor.live():
            assert monitor.flush(20), monitor.status()
            assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
            left_out = monitor.status()["numbers_left_out"]
    results += [getattr(p, "to_local", lambda p=p: p)().detach().cpu() for p in run.parameters()]
    saved = {"results": results, "whole": whole, "left_out": left_out}
    torch.save(saved, folder / f"{'h' if hooked else 'p'}{rank}.pt")


def main() -> None:
    global device
    folder, modes = Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    if sys.argv[1] == "cuda":
        device = torch.device("cuda", int(os.environ["RANK"]))
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    for mode in modes:
        (folder / mode).mkdir(exist_ok=True)
        for hooked in (False, True):
            train(mode, folder / mode, hooked)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
