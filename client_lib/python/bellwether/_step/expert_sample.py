"""What the routers of one step did, as blocks of a frame."""

from __future__ import annotations

import array
import math
from collections.abc import Callable, Iterator
from typing import Union

import torch
from torch import Tensor

from .._hook.layer.routing_tap import COSINE, ENTROPY, LOGIT_MAX, TAIL, Routing
from .._native import c_api
from .._native.run_client import Block
from .tapped_modules import Arriving

OF_EXPERTS = ("expert_load", "expert_dropped", "expert_dead")
OF_LAYERS = (
    "expert_ideal_load",
    "expert_largest_load",
    "router_tokens",
    "router_entropy_sum",
    "router_entropy_largest_sum",
    "router_logit_max",
    "router_row_cosine_max",
)


class ExpertSample:
    """Of one step, perhaps on its way from a GPU.

    placed   routers with the layers of the run that they are of
    experts  of the run's layers, at most
    """

    def __init__(self, placed: list[tuple[int, Routing]], experts: int) -> None:
        placed = [(layer, routing) for layer, routing in placed if routing.sums is not None]
        self._experts = experts
        devices: dict[torch.device, list[tuple[int, Routing]]] = {}
        for layer, routing in placed:
            assert routing.sums is not None
            devices.setdefault(routing.sums.device, []).append((layer, routing))
        self._placed = [one for of in devices.values() for one in of]
        self._arriving = Arriving(
            [torch.cat([r.sums for _, r in of if r.sums is not None]) for of in devices.values()]
        )

    def ready(self) -> bool:
        return self._arriving.ready()

    def _each(self) -> Iterator[tuple[int, Routing, Tensor]]:
        """With the numbers of each router, float64 on the host."""
        at, found = 0, torch.cat(self._arriving.tensors())
        for layer, routing in self._placed:
            size = 2 * routing.router.experts + TAIL
            yield layer, routing, found[at : at + size]
            at += size

    def blocks(self) -> list[Block]:
        """One for each signal that was measured.  Must be ready."""
        if not self._placed:
            return []
        first = min(layer for layer, _ in self._placed)
        layers = max(layer for layer, _ in self._placed) + 1 - first
        wide = {signal: _missing(layers, self._experts) for signal in OF_EXPERTS}
        narrow = {signal: _missing(layers, 1) for signal in OF_LAYERS}
        there: set[str] = set()
        for layer, routing, numbers in self._each():

            def put(
                signal: str, values: Union[Tensor, float], at: int = layer - first,
                width: int = routing.router.experts,
            ) -> None:  # fmt: skip
                there.add(signal)
                if signal in wide:
                    wide[signal][at, :width] = values
                else:
                    narrow[signal][at, 0] = values

            _tell(routing, numbers, put)
        return [
            Block(signal, array.array("f", m.flatten().tolist()), first, layers, 0, m.shape[1])
            for signal, m in (wide | narrow).items()
            if signal in there
        ]

    def summary(self) -> dict[str, float]:
        """For people and other loggers.  Must be ready."""
        found: dict[str, float] = {}
        for layer, routing, numbers in self._each():
            prefix, load = f"layer{layer}/", numbers[: routing.router.experts]
            if routing.with_load and float(load.sum()) > 0:
                found[prefix + "expert_largest_share"] = float(load.max() / load.mean())
                found[prefix + "experts_dead"] = float((load == 0).sum())
            if routing.with_entropy:
                found[prefix + "router_entropy"] = float(numbers[-TAIL + ENTROPY]) / routing.tokens
        return found


def _missing(layers: int, columns: int) -> Tensor:
    fill = torch.full((layers, columns), c_api.NOT_MEASURED_BITS, dtype=torch.int32, device="cpu")
    return fill.view(torch.float32)


def _tell(
    routing: Routing, numbers: Tensor, put: Callable[[str, Union[Tensor, float]], None]
) -> None:
    experts = routing.router.experts
    load, dropped = numbers[:experts], numbers[experts : 2 * experts]
    if routing.tokens:
        put("router_tokens", float(routing.tokens))
    if routing.with_load:
        put("expert_load", load)
        put("expert_dead", (load == 0).double())
        put("expert_ideal_load", load.mean())
        put("expert_largest_load", load.max())
        if routing.with_dropped:
            put("expert_dropped", dropped)
    if routing.with_entropy:
        put("router_entropy_sum", numbers[-TAIL + ENTROPY])
        put("router_entropy_largest_sum", routing.tokens * math.log(experts))
    if routing.with_peak:
        put("router_logit_max", numbers[-TAIL + LOGIT_MAX])
    if routing.with_cosine:
        put("router_row_cosine_max", numbers[-TAIL + COSINE])
