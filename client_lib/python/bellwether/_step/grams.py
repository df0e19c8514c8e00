"""Gram matrices of some heads, of whose full spectra the server makes the gram_* signals.

Shipping all heads would be more bytes than everything else together, so few are shipped: the heads
that the server asked for, which are on their way to fail, and the others in turn.  `gram_bytes` is
the limit.  Half of it may go on average a sampled step to W_Q W_Q^T of heads.  The other half goes
to pairs of matrices that hold the spectrum of the change of W_Q^T W_K of a head since the last
sample (SpectrumKind of ingest.proto).  What is not spent is saved up for one that costs more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from .._hook.model.parallel import Parallel
from .._kernels.memory import capturing, on_device
from .._native import c_api
from .._native.run_client import RunClient

if TYPE_CHECKING:
    from .._hook.layer.layer import Layer

_Head = tuple[int, int]  # Index of the layer, of the head: of those in this process.


def triangle(n: int) -> int:
    """Values of the upper triangle of an n x n matrix."""
    return n * (n + 1) // 2


@dataclasses.dataclass(frozen=True)
class Gram:
    """One matrix, [scale, upper triangle by rows] from `begin` on in the values of its batch."""

    layer: int  # Of the whole model, as are the heads.
    head: int
    kind: int
    n: int
    begin: int


class GramBatch:
    """The matrices of one step, perhaps still on their way from GPUs."""

    def __init__(self, grams: list[Gram], parts: list[Tensor]) -> None:
        """parts  one for each matrix, double, on any devices"""
        self.grams = grams
        self._events: list[Any] = []
        sizes = [1 + triangle(gram.n) for gram in grams]
        on_gpu = any(part.device.type != "cpu" for part in parts)
        self._values = torch.empty(sum(sizes), dtype=torch.float32, device="cpu", pin_memory=on_gpu)
        devices = set()
        for gram, part in zip(grams, parts):
            whole = self._values[gram.begin : gram.begin + len(part)]
            whole.copy_(part.to(torch.float32), non_blocking=True)
            if part.device.type != "cpu":
                devices.add(part.device)
        for device in devices:
            with on_device(device):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            self._events.append(event)

    def ready(self) -> bool:
        return all(event.query() for event in self._events)

    def push(self, client: RunClient, step: int) -> None:
        """Queues all of them; they must be ready, and come before the frame of the step."""
        for gram in self.grams:
            scale = float(self._values[gram.begin])
            if not math.isfinite(scale):
                scale = 1.0  # The matrix says that it is not finite.
            address = self._values.data_ptr() + (gram.begin + 1) * self._values.element_size()
            client.push_spectrum(step, gram.layer, gram.head, gram.kind, gram.n, scale, address)


class _Purse:
    """Bytes that may be spent: so many more each sample, saved up to the price of one thing."""

    def __init__(self, bytes_per_sample: float) -> None:
        self._each = self._most = bytes_per_sample
        self.bytes = 0.0

    def fill(self, price_max: int) -> None:
        """A sample begins; nothing costs more than `price_max`."""
        self._most = max(self._each, price_max)
        self.bytes = min(self.bytes + self._each, self._most)

    def affords(self, price: int) -> bool:
        return self.bytes >= price

    def will_afford(self, price: int) -> bool:
        """At the next sample."""
        return min(self.bytes + self._each, self._most) >= price


def _packed(matrix: Tensor, scale: Optional[Tensor] = None) -> Tensor:
    n = len(matrix)
    row, column = torch.triu_indices(n, n, device=matrix.device)
    first = torch.ones(1, dtype=matrix.dtype, device=matrix.device)
    return torch.cat([first if scale is None else scale.reshape(1), matrix[row, column]])


def gram(w: Tensor) -> Tensor:
    """[rows, rows] of [rows, width], double: a float32 product may be rounded to 10 bits (TF32)."""
    w = w.detach().double()
    return w @ w.T


def increment_grams(
    wq: Tensor, wq_before: Tensor, wk: Tensor, wk_before: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A A^T, B B^T [2 rows, 2 rows] and c of one head, A = [c dW_Q; W_Q], B = [W_K / c; dW_K] with
    W as it was before; all of them double, from [rows, width]."""
    q, k = wq_before.double(), wk_before.double()
    dq, dk = wq.detach().double() - q, wk.detach().double() - k
    c = q.norm() / dq.norm()
    c = torch.where(torch.isfinite(c) & (c > 0), c, torch.ones_like(c))
    return gram(torch.cat([c * dq, q])), gram(torch.cat([k / c, dk])), c


class _Turn:
    """Whose turn it is, of the heads that were asked for and of all others."""

    def __init__(self) -> None:
        self.asked = self.others = 0

    def had(self, is_asked: bool, turn: int) -> None:
        if is_asked:
            self.asked = turn + 1
        else:
            self.others = turn + 1


class Grams:
    """Chooses the heads of each sample and computes their matrices."""

    def __init__(self, bytes_per_sample: int, placed: Parallel) -> None:
        self._placed = placed
        self._grams = _Purse(bytes_per_sample / 2)
        self._increments = _Purse(bytes_per_sample / 2)
        self._on = bytes_per_sample > 0
        self._asked: list[_Head] = []
        # Changes have turns of their own: among the matrices' they would be some heads' only.
        self._turn, self._change_turn = _Turn(), _Turn()
        # W_Q and W_K of heads at the last sample, whose change is shipped at this one.
        self._before: dict[_Head, tuple[Tensor, Tensor]] = {}

    def forget(self) -> None:
        """The weights were changed by other hands than the optimizer's."""
        self._before.clear()

    def ask(self, heads: Iterable[tuple[int, int]], heads_here: int) -> None:
        """The server wants these heads, (layer, head) of the whole model, and no others."""
        first_layer, first_head = self._placed.first_layer, self._placed.tensor[0] * heads_here
        own = [(layer - first_layer, head - first_head) for layer, head in heads]
        self._asked = [(x, y) for x, y in own if x >= 0 and 0 <= y < heads_here]

    def measure(self, layers: Sequence[Layer]) -> Optional[GramBatch]:
        """The matrices of this sample; `layers` are those whose weights can be measured."""
        if not self._on or capturing():
            return None
        found = {layer.index: layer for layer in layers if layer.index >= 0}
        heads = [(index, head) for index, layer in found.items() for head in range(layer.heads)]
        if not heads:
            return None
        with torch.no_grad():
            return self._measure(found, heads)

    def _measure(self, layers: dict[int, Layer], heads: list[_Head]) -> Optional[GramBatch]:
        n_max = max(place.dim for x in layers.values() if (place := x.weights.location) is not None)
        self._grams.fill(_price(n_max))
        self._increments.fill(2 * _price(2 * n_max))

        def slices(where: _Head) -> Optional[tuple[Tensor, Tensor]]:
            return _of_head(layers[where[0]], where[1])

        grams: list[Gram] = []
        parts: list[Tensor] = []

        def ship(where: _Head, kind: int, part: Tensor, n: int) -> None:
            begin = grams[-1].begin + 1 + triangle(grams[-1].n) if grams else 0
            layer = self._placed.first_layer + where[0]
            head = self._placed.tensor[0] * layers[where[0]].heads + where[1]
            grams.append(Gram(layer, head, kind, n, begin))
            parts.append(part)

        for is_asked, turn, where in self._in_turn(heads, self._turn):
            w = slices(where)
            if w is None:
                continue
            n = len(w[0])
            if not self._grams.affords(_price(n)):
                break
            self._grams.bytes -= _price(n)
            ship(where, c_api.SPECTRUM_WQ_GRAM, _packed(gram(w[0])), n)
            self._turn.had(is_asked, turn)
        for where, (wq_before, wk_before) in self._before.items():
            w = slices(where) if where[0] in layers else None
            if w is None or w[0].shape != wq_before.shape or w[1].shape != wk_before.shape:
                continue
            n = 2 * len(w[0])
            self._increments.bytes -= 2 * _price(n)
            a, b, c = increment_grams(w[0], wq_before, w[1], wk_before)
            ship(where, c_api.SPECTRUM_INCREMENT_A, _packed(a, c), n)
            ship(where, c_api.SPECTRUM_INCREMENT_B, _packed(b, c), n)
        self._keep(heads, slices)
        return GramBatch(grams, parts) if grams else None

    def _keep(self, heads: list[_Head], slices: Any) -> None:
        """Copies the weights of the heads whose change can be afforded at the next sample."""
        self._before = {}
        price = 0
        for is_asked, turn, where in self._in_turn(heads, self._change_turn):
            w = slices(where)
            n = 0 if w is None else 2 * len(w[0])
            # The change of 16-bit weights is mostly rounding.
            if w is None or w[0].dtype != torch.float32 or n > c_api.SPECTRUM_ROWS_MAX:
                continue
            price += 2 * _price(n)
            if not self._increments.will_afford(price):
                break
            self._before[where] = (w[0].detach().clone(), w[1].detach().clone())
            self._change_turn.had(is_asked, turn)

    def _in_turn(self, heads: list[_Head], whose: _Turn) -> Iterator[tuple[bool, int, _Head]]:
        """(whether it was asked for, its turn, the head): those that were asked for, then all
        others, each from where it stopped."""
        here, asked = set(heads), set(self._asked)
        for turn in range(whose.asked, whose.asked + len(self._asked)):
            where = self._asked[turn % len(self._asked)]
            if where in here:
                yield True, turn, where
        for turn in range(whose.others, whose.others + len(heads)):
            where = heads[turn % len(heads)]
            if where not in asked:
                yield False, turn, where


def _price(n: int) -> int:
    """Bytes of one matrix on the wire."""
    return 4 * triangle(n)


def _of_head(layer: Layer, head: int) -> Optional[tuple[Tensor, Tensor]]:
    pair = layer.weights.of_head(head)
    return None if pair is None or len(pair[0]) > c_api.SPECTRUM_ROWS_MAX else pair
