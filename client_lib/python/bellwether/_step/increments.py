"""The rank of what W_Q^T W_K changed by since the last sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._kernels import probe

if TYPE_CHECKING:
    from .._hook.layer.layer import Layer

# Copies of W_Q and W_K that are kept for it: all layers of a toy, one of a real model.
INCREMENT_BYTES_MAX = 1 << 20


class Increments:
    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._rotation = 0

    def forget(self) -> None:
        """The weights were changed by other hands than the optimizer's."""
        self._before.clear()

    def measure(self, layers: list[Layer]) -> dict[int, Any]:
        """id(layer) -> rank for each head: of all layers if copies of their weights are small,
        else of one layer after the other."""
        found: dict[int, Any] = {}
        for layer in layers:
            before, now = self._before.get(id(layer)), None
            if before is not None:
                now = layer.weights.copies()
            if before is not None and now is not None:
                found[id(layer)] = probe.increment_rank(now[0], before[0], now[1], before[1])
        self._before = {}
        size = 0
        for turn in range(len(layers)):
            layer = layers[(self._rotation + turn) % len(layers)]
            copies = layer.weights.copies()
            if copies is None:
                continue
            self._before[id(layer)] = copies
            size += sum(c.numel() * 4 for c in copies)
            if size > INCREMENT_BYTES_MAX:
                break
        self._rotation += max(1, len(self._before))
        return found
