"""Routers and their experts in a running job: which layer each router is of, and its taps in
sampled steps.

_hook/layer/routers.py finds them and reads what they return, routing_tap.py says what is measured.
The layer is that of the attention in the router's block.  Where not every router has one of its
own, as in models that mix attention with other layers, routers are counted in their order.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import nn

from .._hook.hosts import LinearHost
from .._hook.layer.linear_tap import Taps
from .._hook.layer.routers import (
    EXPERTS_MAX,
    Declared,
    Read,
    Router,
    declared,
    declared_in,
    plain,
    routers,
    wrap_router,
)
from .._hook.layer.routing_tap import Routing, RoutingTap
from .._hook.model.parallel import Parallel
from .._native import c_api
from .._util import log
from .._util.guard import harmless
from .expert_sample import ExpertSample
from .tapped_modules import COMPILED, compiles

LEFT_OUT_MAX = 64  # Reasons that are remembered.
# Products of the weights' rows in one sample: beyond it routers take turns.
COSINE_PRODUCTS, COSINE_PRODUCTS_ON_GPUS = 1 << 26, 1 << 34
COSINE_TURNS_ON_GPUS = 4  # Samples until each router had its turn, at least: launches cost more.

HOW_MANY = "how many experts it has is not known: bellwether.wrap_router(module, experts=...)"
TAKEN = "its layer has another router"
STAGES = "which layer it is of is not known: wrap_router(..., layer=...)"
BEYOND = f"its layer is beyond {c_api.LAYERS_MAX}"
COPY = "the first tensor-parallel rank tells of them"
BEGUN = "it was declared after the first step"
NOT_ASKED = "stats= does not name experts"


class Experts:
    """
    model   gives the model, None once it is gone
    placed  where this process's layers lie
    """

    def __init__(
        self, host: LinearHost, model: Callable[[], Optional[nn.Module]], placed: Parallel
    ) -> None:
        self.host, self._model, self._placed = host, model, placed
        self.left_out: Counter[tuple[str, str]] = Counter()  # Name of the router, why.
        self.not_measured: Optional[str] = COPY if placed.tensor[0] else None
        self.layers: dict[str, int] = {}  # Of routers, by their names.
        self.most = 0  # Experts of a layer.
        self._routers: list[tuple[int, Router]] = []  # With their layers.
        self._functions: list[Router] = []  # Until the layout is told.
        self._begun = self._watching = False
        self._taps = Taps(host)
        self._of_functions: dict[int, RoutingTap] = {}
        self._routings: list[tuple[int, Routing]] = []
        self._turn = 0

    def watch(self) -> None:
        """From the next sampled step on."""
        self._watching = True

    def leave_out(self, name: str, why: str) -> None:
        if (name, why) in self.left_out or len(self.left_out) < LEFT_OUT_MAX:
            self.left_out[name, why] += 1

    # ---- which routers there are ----

    def wrap(
        self, router: Any, name: str, experts: Optional[int], top_k: Optional[int],
        layer: Optional[int], read: Optional[Read],
    ) -> Any:  # fmt: skip
        """Raises ValueError or TypeError."""
        if isinstance(router, nn.Module):
            if self._begun:
                self.leave_out(name or type(router).__name__, BEGUN)
            return wrap_router(router, experts=experts, top_k=top_k, layer=layer, read=read)
        said = declared(experts, top_k, layer, read)
        if not callable(router) or said.experts is None:
            raise TypeError("router: a module, or a function with experts=")
        return self._wrapped(router, name or getattr(router, "__name__", "router"), said)

    def _wrapped(self, function: Callable[..., Any], name: str, said: Declared) -> Any:
        assert said.experts is not None
        of = Router(str(name)[:128], None, said.experts, said.top_k, said.read or plain, said.layer)
        if self._begun:
            self.leave_out(of.name, BEGUN)
            return function
        self._functions.append(of)
        us = weakref.ref(self)

        @functools.wraps(function)
        def routed(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            if not torch.compiler.is_compiling():
                experts = us()
                if experts is not None:
                    experts.heard(of, output)
            return output

        return routed

    @harmless("a router's result")
    def heard(self, router: Router, output: Any) -> None:
        """A function that was wrapped has returned."""
        tap = self._of_functions.get(id(router))
        if tap is not None:
            tap.output((), output)

    def not_asked(self) -> None:
        """The layout is about to be told, and stats= does not name experts.  Where routers were
        declared that is said, once."""
        self._begun, model = True, self._model()
        names = declared_in(model) if model is not None else []
        names += [router.name for router in self._functions]
        if not names or self.not_measured is not None:
            return
        self.not_measured = NOT_ASKED
        for name in names:
            self.leave_out(name, NOT_ASKED)
        log.warning(
            f"wrap_router(): {NOT_ASKED}, so {len(names)} routers are not measured ({names[0]})"
        )

    def place(self, attention: Sequence[tuple[str, int]]) -> None:
        """The layout is about to be told.

        attention  names of modules with their layers, from 0 in this process
        """
        self._begun = True
        model = self._model() if self._watching else None
        # Copies count them, too: all tensor-parallel ranks tell one layout.
        if model is None or self.not_measured not in (None, COPY):
            return
        found: list[Router] = []
        for name, _, router in routers(model):
            if router is None:
                self.leave_out(name, HOW_MANY)
            else:
                found.append(router)
        found = self._without_those_in_attention(found)
        places = [_block_layer(router.name, attention) for router in found]
        known = [p for p, r in zip(places, found) if r.layer is None]
        by_blocks = None not in known and len(set(known)) == len(known)
        first = self._placed.first_layer
        stages = self._placed.pipeline[1] > 1
        for order, router in enumerate([*found, *self._functions]):
            layer = router.layer
            if layer is None and by_blocks and order < len(found):
                layer = (places[order] or 0) + first
            elif layer is None and not stages:
                layer = order
            self._take(router, layer)
        self.most = max((router.experts for _, router in self._routers), default=0)

    def _without_those_in_attention(self, found: list[Router]) -> list[Router]:
        """A block has one router of its own: JetMoe's queries are experts', too."""
        kept = []
        for router in found:
            beside = [r for r in found if _block(r.name) == _block(router.name) and _block(r.name)]
            if "att" in router.name.rsplit(".", 1)[0].lower() and len(beside) > 1:
                self.leave_out(router.name, TAKEN)
            else:
                kept.append(router)
        return kept

    def _take(self, router: Router, layer: Optional[int]) -> None:
        if layer is None:
            self.leave_out(router.name, STAGES)
        elif layer >= c_api.LAYERS_MAX:
            self.leave_out(router.name, BEYOND)
        elif layer in self.layers.values() or router.name in self.layers:
            self.leave_out(router.name, TAKEN)
        else:
            self.layers[router.name] = layer
            self._routers.append((layer, router))

    def layers_needed(self) -> int:
        """Of the run, for those that are told of."""
        return max(self.layers.values(), default=-1) + 1

    # ---- a step ----

    def begin_step(self, sampled: bool) -> None:
        """What was measured before is forgotten; in a sampled step routers get their taps."""
        self.stop()
        self._routings = []
        model = self._model() if sampled and self._routers else None
        if model is None or torch.compiler.is_compiling() or self.not_measured is not None:
            return
        if compiles(model):
            self.not_measured = COMPILED
            return
        asked = self._weights_in_turn()
        for at, (layer, router) in enumerate(self._routers):
            routing = Routing(at, router)
            tap = RoutingTap(
                self.host, routing, at in asked, self.host.samples_call, self.leave_out
            )
            module = router.module() if router.module is not None else None
            if module is not None:
                self._taps.add(module, tap)
            elif router.module is None:
                self._of_functions[id(router)] = tap
            self._routings.append((layer, routing))

    def _weights_in_turn(self) -> set[int]:
        """Routers whose rows are compared in this step."""
        asked: set[int] = set()
        products = 0
        for _ in range(len(self._routers)):
            router = self._routers[self._turn % len(self._routers)][1]
            weight = router.weight()
            if weight is not None:
                most = COSINE_PRODUCTS_ON_GPUS if weight.is_cuda else COSINE_PRODUCTS
                products += router.experts**2 * int(weight.shape[-1])
                enough = weight.is_cuda and COSINE_TURNS_ON_GPUS * len(asked) >= len(self._routers)
                if asked and (products > most or enough):
                    break
                asked.add(self._turn % len(self._routers))
            self._turn += 1
        return asked

    def stop(self) -> None:
        """No router is looked at any more."""
        self._taps.close()
        of_functions, self._of_functions = self._of_functions, {}
        for tap in of_functions.values():
            tap.close()

    def compiled(self) -> None:
        """torch.compile is asked for something: nothing is measured any more."""
        if self._watching:
            self.not_measured = self.not_measured or COMPILED
            self.stop()

    def sample(self) -> Optional[ExpertSample]:
        """What was measured in this step."""
        placed, self._routings = self._routings, []
        placed = [(layer, routing) for layer, routing in placed if routing.sums is not None]
        return ExpertSample(placed, self.most) if placed else None


def _block(name: str) -> str:
    """Up to the last number in its path, "" where there is none."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else ""


def _block_layer(name: str, attention: Sequence[tuple[str, int]]) -> Optional[int]:
    """The first layer whose attention is in the router's block."""
    best, found = 0, None
    parts = name.split(".")
    for other, layer in attention:
        same = 0
        for at, (a, b) in enumerate(zip(parts, other.split("."))):
            if a != b:
                break
            same = at + 1 if a.isdigit() else same
        if same > best:
            best, found = same, layer
    return found


assert EXPERTS_MAX == c_api.EXPERTS_MAX
