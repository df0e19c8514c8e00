"""What some parameters tell beside what all do, behind a sampled step: gains of norms, tables of
words, and the spectral norms of matrices.

    norm_gain_last_bin    gains above 1.75 2^e, e = floor(log2(the largest of their block of 32)).
                          MX formats of 8 bits give a block the scale 2^(e - 8), and E4M3 ends at
                          448 = 1.75 2^8: all of them become one number
    embedding_mean_sumsq  n norm(mean)^2 of n rows
    tensor_sigma          spectral_norms.py; of all matrices in turn, of some more often

The first two are told of all at once: in the first sample, and in one of OFTEN.

Source of the first: arXiv:2506.20752, and what its authors count in their code; of the others,
docs/concepts/granularities.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._kernels.memory import on_device
from . import spectral_norms
from .tensor_kinds import Kind, Kinds
from .tensor_rows import Row

SIGNALS = (
    "tensor_sigma",
    "tensor_sigma_residual",
    "embedding_mean_sumsq",
    "norm_gain_last_bin",
)
BLOCK = 32  # Elements of an MX format that have a scale together.
# Samples until each of those matrices had its turn.  Odd: see activations.py.
OFTEN = 5
# In which of them gains and tables are told, and the first matrix, which may be the largest of all.
# What is measured around blocks has the first of them.
_GAINS, _TABLES, _MATRIX = 3, 4, 2
STARTS_MAX = 1 << 22  # Elements that are kept of matrices which take turns.
Put = Callable[[str, list[int], Tensor], None]


class WeightPart:
    """Numbers of some rows, perhaps on their way from a GPU."""

    def __init__(self, signal: str, rows: list[int], found: Tensor) -> None:
        """found  float64 [rows]; of tensor_sigma [rows, 2, steps], as spectral_norms has it"""
        self.signal, self.rows, self._host = signal, rows, found
        self._event: Any = None
        if found.is_cuda:
            self._host = torch.empty_like(found, device="cpu", pin_memory=True)
            self._host.copy_(found, non_blocking=True)
            with on_device(found.device):
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()

    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())

    def put(self, put: Put) -> None:
        """Must be ready."""
        if self.signal == "tensor_sigma":
            sigma, residual = spectral_norms.sigmas(self._host)
            put(self.signal, self.rows, sigma)
            put("tensor_sigma_residual", self.rows, residual)
        else:
            put(self.signal, self.rows, self._host)


def last_bin(gains: Tensor) -> Tensor:
    """gains [norms, elements], float32: how many of each, float64 [norms]."""
    short = -gains.shape[1] % BLOCK
    size = torch.nn.functional.pad(gains.abs(), (0, short)) if short else gains.abs()
    blocks = size.reshape(len(gains), -1, BLOCK)
    largest = blocks.amax(2, keepdim=True)
    _, exponent = torch.frexp(largest)  # largest = [0.5, 1) 2^exponent
    limit = torch.ldexp(torch.full_like(largest, 0.875), exponent)
    limit = torch.where(largest.isfinite(), limit, torch.inf)
    return (blocks > limit).sum((1, 2)).double()


def mean_sumsq(table: Tensor) -> Tensor:
    """n norm(mean row)^2 of [n, width], float64."""
    total = torch.zeros(table.shape[1], dtype=torch.float64, device=table.device)
    for piece in spectral_norms.pieces(table):
        # Torch's sums of 16 bits are slow on CPUs.
        total += piece.sum(0, dtype=torch.float32) if piece.is_cuda else piece.float().sum(0)
    return total.square().sum() / table.shape[0]


class WeightSamples:
    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._starts: dict[int, Tensor] = {}  # By row.
        self._kept = 0  # Elements of them.
        # By row: the place of those that have their turns often.  The same at all ranks.
        self._places: dict[int, int] = {}

    def measure(self, rows: Iterable[Row], turn: range, taken: int) -> list[WeightPart]:
        """
        turn   positions of parameters whose turn it is
        taken  turns before it
        """
        devices: dict[torch.device, list[tuple[Row, Kind]]] = {}
        for row, kind in self._kinds.of(rows):
            if kind.often and row.weight.dim() == 2:
                self._places.setdefault(row.number, len(self._places))
            if row.weight.numel():
                devices.setdefault(row.weight.device, []).append((row, kind))
        found = []
        for device, of in devices.items():
            with torch.autocast(
                device.type, enabled=False
            ):  # Of the host's, in whose forward it may be.
                found += self._gains(of) if taken % OFTEN == _GAINS or not taken else []
                found += self._tables(of) if taken % OFTEN == _TABLES or not taken else []
                found += self._matrices(of, turn, taken)
        return found

    def _gains(self, rows: list[tuple[Row, Kind]]) -> list[WeightPart]:
        widths: dict[int, list[tuple[Row, Kind]]] = {}
        for row, kind in rows:
            if kind.gain is not None and row.weight.dim() == 1:
                widths.setdefault(row.weight.shape[0], []).append((row, kind))
        found = []
        for of in widths.values():
            gains = [
                row.weight.float() + kind.gain if kind.gain else row.weight.float()
                for row, kind in of
            ]
            numbers = [row.number for row, _ in of]
            found.append(WeightPart("norm_gain_last_bin", numbers, last_bin(torch.stack(gains))))
        return found

    def _tables(self, rows: list[tuple[Row, Kind]]) -> list[WeightPart]:
        of = [row for row, kind in rows if kind.table and row.weight.dim() == 2]
        if not of:
            return []
        sums = torch.stack([mean_sumsq(row.weight) for row in of])
        return [WeightPart("embedding_mean_sumsq", [row.number for row in of], sums)]

    def _matrices(self, rows: list[tuple[Row, Kind]], turn: range, taken: int) -> list[WeightPart]:
        chosen = []
        for row, _ in rows:
            place = self._places.get(row.number)
            here = row.position in turn
            if place is not None:
                here = (place + _MATRIX) % OFTEN == taken % OFTEN
            # In the first sample all of them: there is something to compare with from then on.
            here = here or (place is not None and row.number not in self._starts)
            if here and row.weight.dim() == 2:
                chosen.append(row)
        new = {row.number for row in chosen if self._is_first(row)}
        groups = [
            [row for row in chosen if (row.number in new) is first] for first in (True, False)
        ]
        return [self._sigmas(of, first) for of, first in zip(groups, (True, False)) if of]

    def _is_first(self, row: Row) -> bool:
        known = self._starts.get(row.number)
        place = row.weight.device, row.weight.shape[1]
        return known is None or (known.device, known.shape[0]) != place

    def _sigmas(self, rows: list[Row], first: bool) -> WeightPart:
        matrices = [row.weight for row in rows]
        starts = [
            spectral_norms.start(w.shape[1], w.device) if first else self._starts[row.number]
            for row, w in zip(rows, matrices)
        ]
        steps = spectral_norms.FIRST_STEPS if first else spectral_norms.STEPS
        t, starts = spectral_norms.tridiagonal(matrices, starts, steps)
        for row, start in zip(rows, starts):
            if first and row.number not in self._places:
                if self._kept + start.numel() > STARTS_MAX:
                    continue  # It begins anew in its next turn.
                self._kept += start.numel()
            self._starts[row.number] = start.clone()  # Not all that were made at once.
        return WeightPart("tensor_sigma", [row.number for row in rows], t)
