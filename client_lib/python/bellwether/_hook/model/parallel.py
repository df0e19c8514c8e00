"""Where the layers and heads of this process lie in the whole model, and whether it reports.

Told by the user, or read off the weights where they are DTensors: the rows of W_Q that tensor
parallelism has put here say which heads are ours.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Optional

from torch import Tensor, nn

from ..._util.ranks import rank_and_world
from ..._weights import names, projection


@dataclasses.dataclass(frozen=True)
class Parallel:
    """(rank, size) of this process in each direction; (0, 1) = not parallel.

    tensor       heads are split: this process has the rank-th part of every layer's
    pipeline     layers are split: `first_layer` is the number of the first one here, `layers`
                 that of all of them
    context      tokens are split: what is measured are parts of the rows, and marked as such
    data         copies of the model; copy 0 reports
    """

    tensor: tuple[int, int] = (0, 1)
    pipeline: tuple[int, int] = (0, 1)
    context: tuple[int, int] = (0, 1)
    data: tuple[int, int] = (0, 1)
    first_layer: int = 0
    layers: int = 0  # 0 = those found here.

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "data"):
            rank, size = getattr(self, name)
            if not 0 <= rank < size:
                raise ValueError(f"parallel.{name}: rank {rank} is outside of 0 to {size - 1}")
        if self.first_layer < 0 or self.layers < 0:
            raise ValueError(
                f"parallel.first_layer, layers: {self.first_layer}, {self.layers} are below 0"
            )
        if self.pipeline[1] > 1 and self.layers == 0:
            raise ValueError("parallel.layers: with pipeline stages, all layers must be told")

    @property
    def shards(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tensor[1] * self.pipeline[1] * self.context[1]


def is_dtensor(tensor: Any) -> bool:
    home = sys.modules.get("torch.distributed.tensor")
    return home is not None and isinstance(tensor, home.DTensor)


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether weights are whole in the forward and backward pass only (FSDP, ZeRO-3)."""
    home = sys.modules.get("torch.distributed.fsdp")
    names = ("FSDPModule", "FullyShardedDataParallel")
    kinds = tuple(getattr(home, name) for name in names if hasattr(home, name))
    if kinds and any(isinstance(module, kinds) for module in model.modules()):
        return True
    # The marks of DeepSpeed and of FSDP1, which may be outside of what was attached to.
    return any(
        hasattr(p, "ds_id") or getattr(p, "_fsdp_flattened", False) for p in model.parameters()
    )


def _tensor_split(weight: Tensor, sharded: bool) -> Optional[tuple[tuple[int, int], bool]]:
    """((rank, size) of the split of the rows, whether this is the first copy) of a DTensor."""
    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    split, first = None, True
    for dimension, placement in enumerate(placements):
        place = (mesh.get_local_rank(dimension), mesh.size(dimension))
        # FSDP2 shards rows too, along the first dimension of the mesh.
        if placement.is_shard(0) and not (sharded and dimension == 0):
            split = place
        elif place[0] != 0:
            first = False
    return None if split is None else (split, first)


def detect(model: nn.Module) -> Optional[Parallel]:
    """What the weights say of tensor parallelism; None where nothing is split by heads."""
    sharded = is_fully_sharded(model)
    for module in model.modules():
        fused, query, _ = names.projections(module)
        name = query or fused
        weight = projection.stored(getattr(module, name)) if name is not None else None
        if weight is not None and is_dtensor(weight):
            found = _tensor_split(weight, sharded)
            if found is None:
                return None
            split, first = found
            copies = max(1, rank_and_world()[1] // split[1])
            return Parallel(tensor=split, data=(0 if first else copies - 1, copies))
    return None
