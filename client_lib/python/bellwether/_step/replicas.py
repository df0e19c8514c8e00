"""Sums of what ranks hold copies of, which the server compares.

Copies that data parallelism keeps are equal bit for bit.  A rank without an all-reduce makes them
differ, and so does a flipped bit; every step makes that worse while no loss shows it.  So in a
sampled step, after the optimizer's, each rank reports a sum of the bits of some parameters.  The
server compares those of the same step and name.

Known are parameters of a DistributedDataParallel of all ranks, and those that FSDP2 holds along a
replicated dimension of a mesh of all ranks (HSDP).  Not compared is what may differ on purpose:
buffers, what DDP ignores, and methods that average the weights themselves now and then.  Nor are
copies of tensor parallelism, whose gradients each rank computes by itself.
"""

from __future__ import annotations

import array
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch import nn

from .._hook.model.averaging import adds_up_alike, ddp_around, fsdp_groups, unequal_hook
from .._hook.model.parallel import is_dtensor
from .._kernels.bits import sum_of_bits
from .._kernels.probe import mixed
from .._native import c_api
from .._native.run_client import Block
from .._util.ranks import rank_and_world

ALONE = "one rank trains"
SILENT = 'one copy reports: attach(ranks="all") compares them'
NO_SIGMA = "they are summed with the spectral norms, and stats= lacks sigma"
UNKNOWN = (
    "neither DistributedDataParallel nor FSDP2 with a replicated dimension (HSDP) says which are; "
    "an all-reduce of the job's own and tensor parallelism do not"
)
PARTIAL = "DistributedDataParallel, or the mesh, is of some of the ranks"
UNEQUAL = "a hook of the job's own may leave the ranks with different gradients"
SIGNALS = ("replica_sum_low", "replica_sum_high")
_BITS = 24  # Of each of them: what a float32 holds.
_TURNS_MAX = 12  # Samples until most tensors were among them.
_BYTES_LEAST = 64 << 20  # A sample has these many bytes at least, if there are as many.


class ReplicaSample:
    """The sums of one step, perhaps still on their way from a GPU."""

    def __init__(self, first: int, sums: torch.Tensor) -> None:
        self._first = first
        hashed = mixed(sums)  # A sum's highest bits tell of signs and exponents of float64.
        low = hashed & ((1 << _BITS) - 1)
        high = (hashed >> _BITS) & ((1 << _BITS) - 1)
        parts = torch.stack([low, high]).to(torch.float32)
        self._event: Any = None
        self._host = parts
        if parts.is_cuda:
            self._host = torch.empty_like(parts, device="cpu", pin_memory=True)
            self._host.copy_(parts, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def blocks(self) -> list[Block]:
        return [
            Block(signal, array.array("f", row.tolist()), self._first, row.numel())
            for signal, row in zip(SIGNALS, self._host)
        ]


class Replicas:
    """
    model     gives the model, None once it is gone
    compared  all ranks report
    """

    def __init__(self, model: Callable[[], Optional[nn.Module]], compared: bool) -> None:
        self._model, self._compared = model, compared
        self._wrapper: Any = None  # A weak reference to the DDP module.
        self._turns: list[tuple[int, list[weakref.ref[torch.Tensor]]]] = []  # First row, tensors.
        self.names: list[str] = []  # Of the first rows of tensors.
        self._settled = False
        self._why: Optional[str] = None
        self._looked_for_shards = False

    @property
    def why_not(self) -> Optional[str]:
        """Why no copies are compared; None: some are."""
        if self.names:
            return None
        if rank_and_world()[1] == 1:
            return ALONE
        return SILENT if not self._compared else self._why or UNKNOWN

    def settle(self) -> list[str]:
        """The names that have the first rows.  From now on these are all."""
        self._look_for_shards()
        self._settled = True
        return self.names

    def forward_begins(self) -> None:
        """DDP may be around the model that was attached to: it shows while it runs."""
        if self._wrapper is not None or not self._compared or self._settled:
            return
        model = self._model()
        wrapper = None if model is None else ddp_around(model)
        if wrapper is not None and model is not None:
            self._wrapper = weakref.ref(wrapper)
            self._choose(wrapper, model)

    def _choose(self, wrapper: Any, model: nn.Module) -> None:
        # In other groups of ranks the same name may be another tensor, or another part of it.
        world_size = torch.distributed.get_world_size
        if world_size(wrapper.process_group) < world_size():
            self._why = PARTIAL
            return
        if unequal_hook(wrapper) is not None:
            self._why = UNEQUAL
            return
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        names = {p: n for n, p in wrapper.module.named_parameters() if n not in ignored}
        prefix = "module." if model is wrapper else ""
        found = [
            (name.removeprefix(prefix), p)
            for name, p in model.named_parameters()
            if p in names and not is_dtensor(p) and p.is_floating_point() and p.numel() > 0
        ]
        self._take(found)

    def _take(self, found: Sequence[tuple[str, torch.Tensor]]) -> None:
        found = found[: c_api.NAMED_ROWS_MAX]
        self.names = [name for name, _ in found]
        sizes = [_local(p).nbytes for _, p in found]
        limit = max(_BYTES_LEAST, sum(sizes) // _TURNS_MAX)
        size = limit
        for row, ((_, p), nbytes) in enumerate(zip(found, sizes)):
            if size + nbytes > limit:
                self._turns.append((row, []))
                size = 0
            self._turns[-1][1].append(weakref.ref(p))
            size += nbytes

    def _look_for_shards(self) -> None:
        """Of FSDP2, whose parameters are in parts again when the optimizer steps."""
        model = self._model()
        if self._looked_for_shards or self._settled or not self._compared or model is None:
            return
        self._looked_for_shards = True
        meshes = [group.mesh_info for group in fsdp_groups(model)]
        meshes = [mesh for mesh in meshes if getattr(mesh, "replicate_mesh_size", 1) > 1]
        if self.names or not meshes:
            return
        if not all(adds_up_alike(group) for group in fsdp_groups(model)):
            self._why = UNEQUAL
            return
        dimensions = {mesh.replicate_mesh_dim for mesh in meshes}
        found: list[tuple[str, torch.Tensor]] = []
        for name, p in model.named_parameters():
            part = _part(p, dimensions) if is_dtensor(p) else None
            if part is not None and p.is_floating_point() and _local(p).numel() > 0:
                found.append((name + part, p))
        if not found:
            self._why = PARTIAL
        self._take(found)

    def measure(self, step: int) -> Optional[ReplicaSample]:
        """Those tensors whose turn it is, which is the same on all ranks: it follows from the
        step alone.  Called after the optimizer's step."""
        self._look_for_shards()
        if not self._turns:
            return None
        turn = (step * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 33
        first, chosen = self._turns[turn % len(self._turns)]
        tensors = list(self._there(chosen))
        if len(tensors) != len(chosen) or len({t.device for t in tensors}) != 1:
            return None
        with torch.no_grad():
            return ReplicaSample(first, torch.stack([sum_of_bits(t) for t in tensors]))

    def _there(self, chosen: list[weakref.ref[torch.Tensor]]) -> Iterator[torch.Tensor]:
        for reference in chosen:
            tensor = reference()
            if tensor is not None:
                yield _local(tensor)


def _local(p: torch.Tensor) -> torch.Tensor:
    return p.to_local() if is_dtensor(p) else p  # type: ignore[attr-defined]


def _part(p: Any, replicated: set[int]) -> Optional[str]:
    """What tells the part of a DTensor here from others, behind its name; None: other ranks hold
    no copies of it, or not all ranks are in its mesh."""
    mesh = p.device_mesh
    if len(replicated) != 1 or mesh.size() < torch.distributed.get_world_size():
        return None
    (copies,) = replicated
    if not p.placements[copies].is_replicate():
        return None
    others = [d for d in range(mesh.ndim) if d != copies and mesh.size(d) > 1]
    return "".join(f" part {mesh.get_local_rank(d)} of {mesh.size(d)}" for d in others)
