"""Which process of the run this is."""

from __future__ import annotations

import os

import torch

# Why a rank stands aside: where it was told of copies of the model, and where it was not.
COPY_REPORTS = "another copy of the model reports"
RANK_REPORTS = (
    "rank 0 reports: without parallel= each rank is taken for a copy of the model, "
    "also one that holds other layers (a stage of a pipeline)"
)
ASIDE = (COPY_REPORTS, RANK_REPORTS)


def rank_and_world() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def own_path(path: str) -> str:
    """A file of this rank's own."""
    rank = rank_and_world()[0]
    if rank == 0:
        return path
    stem, dot, end = path.rpartition(".")
    return f"{stem}-rank{rank}.{end}" if dot else f"{path}-rank{rank}"
