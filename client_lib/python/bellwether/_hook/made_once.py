"""Tensors that are made once more of the inputs of a compiled graph, such as masks: once for all
layers of a step that share them.

The same inputs lie in the same storages, in the same way, and autograd's counter says that nothing
has been written there since.  No tensor of the host is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._kernels.memory import capturing, stream_of

ENTRIES_MAX = 4  # Of one step: models have one mask or two.
BYTES_MAX = 64 << 20  # Of a tensor that is kept.


class _Made(NamedTuple):
    numbers: tuple[Any, ...]
    storages: tuple[StorageWeakRef, ...]  # Their addresses are no others' as long as these live.
    tensor: Tensor


_made: list[_Made] = []
_lock = threading.Lock()  # Each device has a thread of autograd.


def forget() -> None:
    """A step begins."""
    with _lock:
        _made.clear()


def storage(t: Tensor) -> StorageWeakRef:
    return StorageWeakRef(t.untyped_storage())  # type: ignore[no-untyped-call]


def lies(t: Tensor) -> tuple[Any, ...]:
    """How it lies in its storage, for work of the current stream, and how often it was written."""
    stream = stream_of(t.device) if t.is_cuda else 0
    return (t.device, stream, t.storage_offset(), t.shape, t.stride(), t.dtype, t._version)


def made_once(graph: int, of: Sequence[Any], make: Callable[[], Tensor]) -> Tensor:
    """`make`'s answer, or that to a call with the same graph and inputs in this step.

    of  inputs of a compiled graph, which it does not write, and sizes
    """
    tensors = [t for t in of if isinstance(t, Tensor)]
    if capturing() or any(t.is_inference() for t in tensors):
        return make()
    numbers = (graph, *(lies(t) if isinstance(t, Tensor) else t for t in of))
    storages = tuple(map(storage, tensors))
    with _lock:
        for made in _made:
            if made.numbers == numbers and made.storages == storages:
                return made.tensor
    tensor = make()
    if tensor.numel() * tensor.element_size() <= BYTES_MAX:
        with _lock:
            del _made[: max(0, len(_made) - ENTRIES_MAX + 1)]
            _made.append(_Made(numbers, storages, tensor))
    return tensor


def are_made(tensors: Iterable[Tensor]) -> bool:
    """Whether all are of made_once(), and so nothing writes to them."""
    with _lock:
        known = [storage(made.tensor) for made in _made]
    return all(storage(t) in known for t in tensors)
