"""The oldest torch that the package runs with."""

from __future__ import annotations

TORCH_MIN = (2, 8)


def dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
