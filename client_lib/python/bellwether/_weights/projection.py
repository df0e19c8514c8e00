"""One projection as the model computes with it: rows first, of DTensors the part that lies in this
process, unpacked where it is quantised, with its adapters beside it."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

from torch import Tensor, nn

from .adapters import LowRank, NotWhole, Unreadable, split
from .parametrized import attribute
from .quantised import UNPACKED_BYTES_MAX, Packed, packed

_PLAIN = {"weight", "bias"}


def resolve(holder: nn.Module, path: str) -> object:
    """The module or tensor at a dotted path, or None.  Of "x.weight" it is the module x, which may
    have adapters beside its weight."""
    item: object = holder
    for part in path.split("."):
        child = item._modules.get(part) if isinstance(item, nn.Module) else None
        parent, item = item, attribute(item, part) if child is None else child
    named = path.rpartition(".")[2] == "weight" and isinstance(item, Tensor)
    return parent if named and isinstance(parent, nn.Module) and parent is not holder else item


def stored(item: object) -> Optional[Tensor]:
    """The tensor that a projection keeps its weight in, however that is packed or split."""
    if isinstance(item, nn.Module):
        try:
            item = attribute(split(item)[0], "weight")
        except Unreadable:
            item = attribute(item, "weight")
    return item if isinstance(item, Tensor) else None


def _local(weight: Tensor) -> Tensor:
    local: Any = getattr(weight, "to_local", None)
    part: Tensor = weight if local is None else local()
    return part


def _transposed(module: object) -> bool:
    base = getattr(module, "base_layer", module)
    return type(base).__name__ == "Conv1D"  # Its weight is [width, rows].


def shape_of(item: object) -> Optional[tuple[int, int]]:
    """(rows, width) of a projection, also of one whose weight is not whole at this time; None if
    it is none."""
    weight = stored(item)
    if weight is None:
        return None
    unpacked = packed(_base(item), weight)
    whole = getattr(weight, "ds_shape", None)  # DeepSpeed's, of a weight that is elsewhere.
    shape = unpacked.shape if unpacked is not None else whole
    if shape is None:
        shape = _local(weight).shape
    sizes = [int(size) for size in shape]
    if _by_head(item, len(sizes)):
        return sizes[1] * sizes[2], sizes[0]
    if len(sizes) != 2 and not (is_pointwise(_base(item)) and len(sizes) > 2):
        return None
    rows, width = sizes[:2]
    return (width, rows) if _transposed(item) else (rows, width)


def _by_head(item: object, dimensions: int) -> bool:
    """Whether it is a parameter [width, heads, dim], as XLNet has them: not a module's weight."""
    return dimensions == 3 and isinstance(item, nn.Parameter)


def is_pointwise(module: object) -> bool:
    """Whether it is a convolution that treats each place by itself: a matrix for the channels."""
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    return module.groups == 1 and set(module.kernel_size) == {1}


def _base(item: object) -> Optional[nn.Module]:
    if not isinstance(item, nn.Module):
        return None
    base = getattr(item, "base_layer", item)
    return base if isinstance(base, nn.Module) else item


def _there(tensor: Tensor) -> bool:
    """Whether its memory is: FSDP keeps views of weights whose storage is given back."""
    end = tensor.storage_offset() + 1
    end += sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return tensor.untyped_storage().nbytes() >= end * tensor.element_size()


@dataclasses.dataclass(frozen=True)
class Projection:
    weight: Tensor  # As it is stored, in this process.
    packed: Optional[Packed]
    transposed: bool
    convolves: int  # The dimensions of its weight, where it is a convolution; else 0.
    by_head: bool  # Its weight is [width, heads, dim].
    updates: list[LowRank]

    def _dimensions(self) -> int:
        return 3 if self.by_head else self.convolves or 2

    def base(self) -> Tensor:
        """[rows, width] without the adapters: a view, or unpacked.  Raises Unreadable."""
        matrix = self.weight.detach()
        if self.packed is not None:
            if self.packed.bytes() > UNPACKED_BYTES_MAX:
                raise Unreadable(
                    f"a quantised weight is unpacked up to {UNPACKED_BYTES_MAX >> 20} MiB, and "
                    f"this one has {self.packed.bytes() >> 20}"
                )
            matrix = self.packed.unpack().detach()
        elif type(self.weight) not in (Tensor, nn.Parameter):
            raise Unreadable(f"{type(self.weight).__name__} as a weight")
        elif self.weight.dim() != self._dimensions() or not _there(matrix):
            raise NotWhole("sharded weights, which were not whole")
        elif self.convolves or self.by_head:
            matrix = matrix.flatten(1)
        if not matrix.is_floating_point() or matrix.element_size() < 2:
            raise Unreadable(f"{matrix.dtype} as a weight")
        return matrix.t() if self.transposed or self.by_head else matrix

    def stamp(self) -> Optional[tuple[int, int]]:
        """Changes when the base does; None if it is trained, and changes each step."""
        if self.weight.requires_grad:
            return None
        return self.weight.data_ptr(), self.weight._version


def _plain(item: object) -> Optional[nn.Parameter]:
    """The weight of a module that has nothing but that and a bias: no adapter, and nothing that
    computes it.  Most are such, and all are read in each sample."""
    if not isinstance(item, nn.Module) or item._modules or item._parameters.keys() - _PLAIN:
        return None
    weight = item._parameters.get("weight")
    return weight if type(weight) is nn.Parameter else None


def read(item: object) -> Projection:
    """A projection by its module or its weight.  Raises Unreadable."""
    updates: list[LowRank] = []
    base: Optional[nn.Module] = None
    plain = _plain(item)
    weight = item if plain is None else plain
    if plain is not None and isinstance(item, nn.Module):
        base = item
    elif isinstance(item, nn.Module):
        base, updates = split(item)
        weight = attribute(base, "weight")
    if not isinstance(weight, Tensor):
        raise Unreadable("the weights are gone")
    local = _local(weight)
    convolves = local.dim() if is_pointwise(base) else 0
    by_head = _by_head(item, local.dim())
    return Projection(local, packed(base, local), _transposed(base), convolves, by_head, updates)
