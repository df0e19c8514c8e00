"""Whether a checkpointed region computes the same a second time: the bits of a layer's input in the
forward, and once more in the recomputation that the backward asks for.

The same kernels on the same numbers give the same bits.  So a difference is one that no law of
products sees: a value that flipped in the forward, or a computation that is not the same one.

A region is known by its first pass: tensors that are saved there are read back by code of the host,
or there is no graph.  Nothing is kept but a sum of the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from ..._kernels.bits import INTEGERS, sum_of_bits
from ..._kernels.memory import capturing
from ..hosts import LinearHost
from ..running import apart, being_traced, host_reads_back
from .readable import readable, wrapped


class Recomputed:
    """One layer in one step: the first call, if its recomputation comes before a second one.

    told  called with a bool on the device: whether both were the same
    """

    def __init__(self, host: LinearHost, told: Callable[[Tensor], None]) -> None:
        self._host, self._told = host, told
        self._first: Optional[tuple[Tensor, Any]] = None
        self._calls = 0

    def close(self) -> None:
        self._first, self._calls = None, 2

    def input(self, args: Any) -> None:
        """The layer's forward begins."""
        if self._calls > 1:
            return
        again = self._host.in_backward()
        if again and (self._first is None or not torch.is_grad_enabled()):
            return
        if not again:
            self._calls += 1
            if self._calls > 1 or (torch.is_grad_enabled() and not host_reads_back()):
                self.close()
                return
        found = self._sum(args[0] if args else None)
        first, self._first = self._first, found
        if found is None:
            self.close()
        elif again and first is not None:
            self.close()
            if first[1] == found[1]:
                self._told(first[0] == found[0])

    @staticmethod
    def _sum(x: Any) -> Optional[tuple[Tensor, Any]]:
        # A mode of dispatch counts what is called in a region, or keeps it: selective checkpoints.
        if torch._C._len_torch_dispatch_stack() > 0 or being_traced() or capturing():
            return None
        if not isinstance(x, Tensor) or wrapped(x) or not readable(x):
            return None
        if not x.is_floating_point() or x.element_size() not in INTEGERS:
            return None
        with apart(), torch.no_grad():
            return sum_of_bits(x), (x.shape, x.dtype, x.device)
