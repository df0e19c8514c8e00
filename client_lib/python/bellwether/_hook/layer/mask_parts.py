"""What is found from a mask's tensors, once for all layers of a step that share them.

A mask is the same if its tensors lie in the same storages, in the same way, and autograd's counter
says that nothing has been written there since.  No tensor of the host is kept.  torch.compile
writes without counting, so masks that it writes are looked at each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..._kernels.memory import capturing
from ..calls.call import Mask
from ..made_once import lies, storage

ENTRIES_MAX = 4  # Masks of one step that are remembered: models have one or two.

# The first key of each row, the end and the diagonal; the keys that some row sees.
Parts = tuple[Optional[Tensor], Optional[Tensor]]


@dataclasses.dataclass(frozen=True)
class _Entry:
    numbers: tuple[Any, ...]
    storages: tuple[StorageWeakRef, ...]  # Their addresses are no others' as long as these live.
    parts: Parts


_entries: list[_Entry] = []


def forget() -> None:
    """A step begins."""
    _entries.clear()


def of(
    mask: Mask, q: Tensor, k_len: int, cast: Optional[torch.dtype], make: Callable[[], Parts]
) -> Parts:
    """`make`'s answer, or that to a call with the same mask, as many queries and keys."""
    tensors = mask.tensors()
    if not tensors or capturing() or any(t.is_inference() for t in tensors.values()):
        return make()
    scalars = (mask.causal, mask.top_left, mask.left, mask.right, mask.chunk, mask.padded_rows)
    lie = ((name, *lies(t)) for name, t in tensors.items())
    numbers = (q.device, q.shape[2], k_len, cast, scalars, *lie)
    storages = tuple(map(storage, tensors.values()))
    for entry in _entries:
        if entry.numbers == numbers and entry.storages == storages:
            return entry.parts
    parts = make()
    del _entries[: max(0, len(_entries) - ENTRIES_MAX + 1)]
    _entries.append(_Entry(numbers, storages, parts))
    return parts
