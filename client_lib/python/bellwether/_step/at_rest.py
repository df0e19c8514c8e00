"""Weights at rest: a bit that flips in one between an optimizer's step and the next forward.

No law of products sees it: both sides of a law have the weight as it is.  So behind the optimizer's
step before a sample some parameters' bits are summed, a part of all in turn, and once more when
attention first runs in the sample.  Where the sums differ, their difference says which bit it was:
it is w_i (b' - b) for the one element i that changed, with w_i odd.  So (b' - b) is known for each
i, and is a power of two for that i alone.

Trainers change weights between steps, too, as by load_state_dict() or by `data.clamp_()`.  What
torch counts as a change is not compared, and what is more than one bit is no flip.  Such a trainer
is let alone from then on, since it may also change a single bit on purpose.  What was told of it as
a flip is then taken back.

A flip is an event, and its alert ends when the parameter has had its next turn and held.

Left out: parameters that are not on the CPU, in parts or not in one piece of memory, those of
float64 and those of fewer than 64 elements.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

from .._hook.model.parallel import is_dtensor, is_fully_sharded
from .._kernels.bits import CHUNK, INTEGERS, sum_of_bits, weights_on
from .law_rows import LawRow

TURNS_MAX = 16  # Samples until all were among them.
_ELEMENTS_LEAST = 1 << 18  # In a sample, if there are as many.
NUMEL_MIN = 64  # One value that a trainer limits may change by one bit on purpose.
BYTES_MAX = 4  # Of an element: a higher bit leaves too little of w_i in the difference.
FLIPS_MAX = 64  # That are remembered.


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements `begin` to `end` of a parameter, in the order of memory."""

    name: str
    of: weakref.ref[Tensor]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class _Summed:
    piece: Piece
    version: int
    address: int
    total: Tensor


@dataclasses.dataclass(frozen=True)
class Flip:
    name: str
    element: tuple[int, ...]
    bit: int  # From the lowest on.
    before: float
    after: float

    def text(self) -> str:
        place = ", ".join(str(i) for i in self.element)
        return (
            f"bit {self.bit} of element [{place}] has flipped at rest, from {self.before:.6g} "
            f"to {self.after:.6g}"
        )


class FlipSample:
    """What was found since the last sample, as rows for the server: parameters of which a bit has
    flipped, and those of which one had and that held now."""

    def __init__(self, flips: list[Flip], held: set[str]) -> None:
        self._flips, self._held = flips, held

    def ready(self) -> bool:
        return True

    def law_rows(self) -> list[LawRow]:
        """Bits that changed, where none should: its variance is no rounding's."""
        changed = dict.fromkeys(self._held, 0.0) | {flip.name: 1.0 for flip in self._flips}
        return [LawRow(name, "W:at-rest", changed[name], 1e-12) for name in sorted(changed)]

    def summary(self) -> dict[str, float]:
        return {}


def _inverse(odd: Tensor) -> Tensor:
    """Modulo 2^64."""
    found = odd.clone()
    for _ in range(5):
        found = found * (2 - odd * found)
    return found


def flipped(values: Tensor, difference: Tensor) -> Optional[tuple[int, int]]:
    """The element and its bit whose flip changed the sum of the bits of `values`, one dimension and
    at most CHUNK elements of BYTES_MAX, by `difference`; None if it was no single bit."""
    bits = values.view(INTEGERS[values.element_size()])
    width = 8 * values.element_size()
    change = difference * _inverse(weights_on(values.device)[: values.numel()])
    for bit in range(width):
        power = 1 << bit
        for at in ((change == power) | (change == -power)).nonzero().flatten()[:4].tolist():
            after = int(bits[at])
            # The same difference may also carry into higher bits.
            if (after ^ (after - int(change[at]))) & ((1 << width) - 1) == 1 << bit:
                return at, bit
    return None


class AtRest:
    """
    model  gives the model, None once it is gone
    """

    def __init__(self, model: Callable[[], Optional[nn.Module]]) -> None:
        self._model = model
        self._turns: Optional[list[list[Piece]]] = None
        self._turn = 0
        self._summed: list[_Summed] = []
        self._new: list[Flip] = []
        # By parameter that had a flip: where its pieces begin that have not held since.
        self._unheld: dict[str, set[int]] = {}
        self._held: set[str] = set()  # Since the last sample.
        self.flips: dict[str, str] = {}  # By parameter: the first of each.
        self.compared = 0  # Elements.
        self.elements = 0  # That have their turn.
        self.not_measured: Optional[str] = None  # Why none has.

    def _find(self, model: nn.Module) -> list[list[Piece]]:
        pieces = []
        if is_fully_sharded(model):
            self.not_measured = "the weights are whole in the passes only (FSDP, ZeRO-3)"
            return []
        for name, p in model.named_parameters():
            whole = type(p) in (Tensor, nn.Parameter) and not is_dtensor(p) and _is_whole(p)
            if not whole or p.numel() < NUMEL_MIN:
                continue
            if not p.is_floating_point() or p.element_size() > BYTES_MAX:
                continue
            for begin in range(0, p.numel(), CHUNK):
                end = min(begin + CHUNK, p.numel())
                pieces.append(Piece(name, weakref.ref(p), begin, end))
                self.elements += end - begin
        if not pieces:
            self.not_measured = "no parameter is whole on the CPU"
        limit = max(_ELEMENTS_LEAST, self.elements // TURNS_MAX)
        turns: list[list[Piece]] = []
        room = 0
        for piece in pieces:
            if room <= 0:
                turns.append([])
                room = limit
            turns[-1].append(piece)
            room -= piece.end - piece.begin
        return turns

    def optimizer_stepped(self) -> None:
        """Before a sample: what has its turn is summed, again if it is not the first optimizer."""
        model = self._model()
        if model is None or self.not_measured is not None:
            return
        if self._turns is None:
            self._turns = self._find(model)
        if not self._turns:
            return
        with torch.no_grad():
            self._summed = [
                _Summed(piece, p._version, p.data_ptr(), sum_of_bits(values))
                for piece in self._turns[self._turn % len(self._turns)]
                if (p := piece.of()) is not None and (values := _elements(p, piece)) is not None
            ]

    @property
    def pending(self) -> bool:
        return bool(self._summed)

    def forward_begins(self) -> list[Flip]:
        """Compares what was summed, once; what has flipped in it and was not told before."""
        summed, self._summed = self._summed, []
        self._turn += 1
        found = []
        with torch.no_grad():
            for before in summed:
                p, piece = before.piece.of(), before.piece
                if p is None or p._version != before.version or p.data_ptr() != before.address:
                    continue
                values = _elements(p, piece)
                if values is None:
                    continue
                self.compared += values.numel()
                difference = sum_of_bits(values) - before.total
                if not difference:
                    self._note_held(piece)
                    continue
                place = flipped(values, difference)
                if place is None:
                    self.not_measured = f"{piece.name} is changed between steps"
                    return []
                flip = _flip_of(p, piece, values, *place)
                found.append(flip)
                if piece.name in self._unheld or len(self._unheld) < FLIPS_MAX:
                    self._new.append(flip)
                    self._unheld.setdefault(piece.name, set()).add(piece.begin)
        told = [flip for flip in found if flip.name not in self.flips]
        for flip in told[: FLIPS_MAX - len(self.flips)]:
            self.flips[flip.name] = flip.text()
        return told

    def _note_held(self, piece: Piece) -> None:
        pieces = self._unheld.get(piece.name)
        if pieces is None:
            return
        pieces.discard(piece.begin)
        if not pieces:
            self._held.add(piece.name)

    def sample(self) -> Optional[FlipSample]:
        """What was found since it was last asked."""
        flips, self._new = self._new, []
        held, self._held = self._held, set()
        if self.not_measured is not None:
            held = set(self._unheld)
        return FlipSample(flips, held) if flips or held else None


def _is_whole(p: Tensor) -> bool:
    return p.device.type == "cpu" and p.is_contiguous() and not p.is_inference()


def _elements(p: Tensor, piece: Piece) -> Optional[Tensor]:
    """None where the parameter is not what it was."""
    if not _is_whole(p) or p.numel() < piece.end or p.element_size() > BYTES_MAX:
        return None
    return p.detach().view(-1)[piece.begin : piece.end]


def _flip_of(p: Tensor, piece: Piece, values: Tensor, at: int, bit: int) -> Flip:
    after = values[at : at + 1].clone()
    bits = after.view(INTEGERS[after.element_size()])
    top = 8 * after.element_size() - 1
    before = (bits ^ ((1 << bit) if bit < top else -(1 << top))).view(after.dtype)
    element = torch.unravel_index(torch.tensor(piece.begin + at), p.shape)
    return Flip(piece.name, tuple(int(i) for i in element), bit, float(before), float(after))
