"""Finds operations that wait for a GPU, on a machine without one.

Tensors on "meta" stand for those of a GPU: they have shapes and no values.  Which operations would
wait follows from their names and arguments.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

DEVICE = "meta"

# What they return, or its shape, depends on values.
_READ = {
    "_local_scalar_dense", "bincount", "equal", "is_nonzero", "masked_select", "nonzero",
    "nonzero_numpy", "unique_consecutive", "unique_dim", "_unique", "_unique2",
}  # fmt: skip


class Waits(Exception):
    """An operation that waits; the text says which, and why."""


def _indices_wait(args: Any) -> bool:
    """Of tensor[indices]: a mask has as many elements as it has ones; others must be copied."""
    indices = [i for i in args[1] if i is not None]
    return any(i.dtype in (torch.bool, torch.uint8) or i.device.type != DEVICE for i in indices)


def _copied(func: Any, args: Any, kwargs: Any) -> Optional[tuple[str, str, bool]]:
    """From where, to where, and whether the host waits for it."""
    name = func._schema.name
    if name == "aten::copy_":
        blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return args[1].device.type, args[0].device.type, blocks
    if name == "aten::_to_copy" and kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type
        return args[0].device.type, there, not kwargs.get("non_blocking", False)
    return None


def why(func: Any, args: Any, kwargs: Any) -> str:
    """Empty if an operation does not wait."""
    name = func._schema.name.removeprefix("aten::")
    copied = _copied(func, args, kwargs)
    if copied is not None:
        begin, end, blocks = copied
        return "a copy between devices that blocks" if begin != end and blocks else ""
    flat = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    if all(t.device.type != DEVICE for t in flat):
        return ""
    if name in _READ or name.startswith(("linalg_", "_linalg_check")):
        return "it reads values"
    if name in ("index", "index_put", "index_put_") and _indices_wait(args):
        return "it reads a mask, or copies indices to the device"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "the size of its result is a sum of values"
    return ""


class _Written(TorchFunctionMode):
    """What copies numbers of Python to the device, before an operation is dispatched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        found = func(*args, **kwargs)
        made = name in ("tensor", "as_tensor", "new_tensor") and found.device.type == DEVICE
        of_numbers = made and not isinstance(args[0 if name != "new_tensor" else 1], Tensor)
        index = args[1] if name in ("__getitem__", "__setitem__") else None
        indices = index if isinstance(index, tuple) else (index,)
        there = index is not None and args[0].device.type == DEVICE
        by_list = there and any(isinstance(i, list) for i in indices)
        # A slice is filled; to a single element the number is copied.
        one = there and name == "__setitem__" and isinstance(args[2], (int, float))
        one = one and all(isinstance(i, int) for i in indices) and len(indices) == args[0].dim()
        if of_numbers or by_list or one:
            raise Waits(f"{name}: it copies numbers to the device")
        return found


class NoWaiting(TorchDispatchMode):
    """Raises Waits at the first operation that waits."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []  # By name, in their order.
        self._written = _Written()

    def __enter__(self) -> Any:
        self._written.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._written.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        said = why(func, args, kwargs)
        if said:
            raise Waits(f"{func}: {said}")
        self.operations.append(func._schema.name)
        copied = _copied(func, args, kwargs)
        if copied is not None and copied[0] == DEVICE != copied[1]:  # There is nothing to copy.
            return args[0] if func._schema.name == "aten::copy_" else torch.empty(args[0].shape)
        return func(*args, **kwargs)
