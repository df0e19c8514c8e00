"""Where the rows of single heads lie in the projections, weights and biases, to change them.

A location gives W_Q and W_K as [heads, dim, width] to be read, copied where no view has them so.
Here are views of the live tensors, head by head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._weights.adapters import Unreadable
from .._weights.location import Location
from .._weights.projection import read, resolve


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of one head in one tensor of the model."""

    owner: Tensor  # The parameter, as the optimizer knows it.
    begin: int
    count: int
    dim: int  # Along which the rows lie in it.

    def of(self, like: Tensor) -> Tensor:
        """These rows of a tensor that is laid out like the owner, of its local part where it is
        split: a view, rows first."""
        local: Any = getattr(like, "to_local", None)
        whole: Tensor = like if local is None else local()
        rows = whole.narrow(self.dim, self.begin, self.count)
        return rows if self.dim == 0 else rows.t()


def _tensors(module: nn.Module, name: str) -> tuple[Optional[Tensor], Optional[Tensor], bool]:
    """(weight, bias or None, whether the weight is [width, rows]) that a name stands for."""
    item: Any = module
    for part in name.split("."):
        parent, item = item, getattr(item, part, None)
    if isinstance(item, nn.Module):
        bias = getattr(item, "bias", None)
        return getattr(item, "weight", None), bias, type(item).__name__ == "Conv1D"
    leaf = name.rsplit(".", 1)[-1]
    bias = getattr(parent, leaf.replace("weight", "bias"), None) if "weight" in leaf else None
    return item, bias if isinstance(bias, Tensor) else None, False


def parts(module: nn.Module, location: Location, query: bool, head: int) -> Iterator[Part]:
    """The weight of W_Q's (else W_K's) head, then its bias if there is one."""
    rows = location.query if query else location.key
    begin = rows.begins[head]
    weight, bias, transposed = _tensors(module, rows.path)
    if weight is not None:
        yield Part(weight, begin, location.dim, 1 if transposed else 0)
    if bias is not None:
        yield Part(bias, begin, location.dim, 0)


def unchangeable(module: nn.Module, location: Location) -> Optional[str]:
    """Why these weights cannot be changed in place; None if they can."""
    if location.shared:
        return "its keys are those of another layer"
    for query in (True, False):
        rows = location.query if query else location.key
        if rows.step != 1:
            return "rows of a head that do not lie side by side"
        try:
            found = read(resolve(module, rows.path))
            if found.updates:
                return "adapters beside a weight"
            if found.by_head:
                return "a weight of three dimensions"
        except Unreadable as e:
            return str(e)
        for part in parts(module, location, query, 0):
            owner = part.owner
            if not isinstance(owner, nn.Parameter):
                return f"a {type(owner).__name__} as a weight, not a plain parameter"
            if not owner.dtype.is_floating_point or owner.dtype.itemsize < 2:
                return f"quantized weights ({owner.dtype})"
            placements = getattr(owner, "placements", None)
            if placements is None and type(owner) not in (nn.Parameter, Tensor):
                return f"quantized weights ({type(owner).__name__})"
            if placements is not None and any(
                not place.is_replicate() and not place.is_shard(0) for place in placements
            ):
                return "weights sharded within their heads"
    with torch.no_grad():
        return None if location.views(module) is not None else "the weights changed their shape"


def spectral_norms(module: nn.Module, location: Location) -> Optional[tuple[Tensor, Tensor]]:
    """sigma of W_Q and of W_K, by head, float64 on the CPU."""
    with torch.no_grad():
        views = location.views(module)
        if views is None:
            return None
        found = []
        for view in views:
            wide = view.detach().double()
            found.append(torch.linalg.eigvalsh(wide @ wide.mT)[:, -1].clamp(min=0).sqrt().cpu())
        return found[0], found[1]
