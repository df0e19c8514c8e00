"""flex_attention as torch.compile traces it: one operator.

What changes its scores, and what hides keys, are graphs beside it, with the tensors that they have
from around them.  The recipe has these graphs, so the sampled rows are asked of what really runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, fx, nn

from ..._kernels import laws
from ..calls.call import Reader, same
from ..hosts import PatchedLayer
from .recipes import UNKNOWN, Bound, Recipe, Slot, number_of
from .traced_calls import (
    NOT_APART,
    Place,
    Plan,
    Taps,
    Tensors,
    apart,
    fake_of,
    guarded,
    layer_of,
    planned,
    shown_by,
    untapped,
)

_SYMBOL = "a compiled mask or change of the scores has a number that varies: not measured"


def _tracker(tx: Any, node: fx.Node, fake: Tensor) -> Any:
    """Of a tensor that is in the graph already."""
    from torch._dynamo.variables.builder import wrap_fx_proxy

    if node.op != "placeholder":
        del node.meta["example_value"]  # It is told once a tracker.
    try:
        return wrap_fx_proxy(tx, fx.Proxy(node, tx.output.current_tracer), example_value=fake)
    finally:
        node.meta["example_value"] = fake


def _graph(tx: Any, node: fx.Node) -> nn.Module:
    found: nn.Module = tx.output.nn_modules[node.target]
    return found


def _plan(
    tx: Any, layer: PatchedLayer, operator: Any, reader: Reader, keys: Any, trackers: list[Any],
    made: fx.Node,
) -> Plan:  # fmt: skip
    """keys  as they were before their tap
    made  the operator's node: (q, k, v, graph, mask, scale, options, what the graph has from
    around it, what the mask's has)"""
    tensors = Tensors()
    for tracker in trackers[:3]:
        fake = fake_of(tracker)
        assert fake is not None
        tensors.slot(tracker, fake)
    if not apart(tensors.fakes):
        return untapped(NOT_APART)

    def word(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        fake = value.meta.get("example_value")
        if not isinstance(fake, Tensor):
            return UNKNOWN
        return tensors.slot(_tracker(tx, value, fake), fake)

    def bound(node: fx.Node, around: tuple[Any, ...]) -> Any:
        more = tuple(word(item) for item in around)
        return Bound(_graph(tx, node), more) if all(isinstance(m, Slot) for m in more) else None

    _, _, _, graph, mask, scale, _, of_graph, of_mask = made.args
    changes, hides = bound(graph, of_graph), bound(mask[-1], of_mask)  # type: ignore[arg-type, index]
    if changes is None or hides is None:
        return untapped(_SYMBOL)
    recipe = Recipe(
        operator, reader,
        (Slot(0), Slot(1), Slot(2), changes,
         (*(word(item) for item in mask[:-1]), hides), word(scale)),  # type: ignore[index, union-attr]
        trains="".join(of for of, fake in zip("qkv", tensors.fakes) if fake.requires_grad),
        shown=shown_by(layer, trackers[0], keys, (same, same), tensors.fakes[2].shape[-1]),
    )  # fmt: skip
    return Plan(number_of(recipe), tensors.trackers)


def call(
    tx: Any, place: Place, operator: Any, reader: Reader, plain: Callable[[list[Any]], Any],
    args: list[Any],
) -> Any:  # fmt: skip
    """A call of the operator, which `plain` makes, between its taps."""
    with_tap: list[Any] = list(args)

    def begin() -> Optional[Taps]:
        fakes = [fake for tracker in args[:3] if (fake := fake_of(tracker)) is not None]
        if not torch.is_grad_enabled() or len(fakes) < 3:
            return None
        taps = Taps(tx, place)
        if apart(fakes):
            lawful = all(f.requires_grad and f.device.type in laws.DEVICES for f in fakes)
            for i in (2, 1, 0) if lawful else (1,):
                if fakes[i].requires_grad:
                    with_tap[i] = taps.input(args[i], "qkv"[i])
        return taps

    def plan() -> Plan:
        layer = layer_of(place.mark)
        if layer is None:
            return untapped("")
        node: fx.Node = result.items[0].as_proxy().node.args[0]  # It returns (output, ...).
        return _plan(tx, layer, operator, reader, args[1], with_tap, node)

    # The graphs are made with the call, so what is read of it comes behind the taps.
    taps = guarded(begin, None)
    result = plain(with_tap)
    if taps is None:
        return result
    return guarded(lambda: taps.output(result, planned(plan, "flex_attention")), result)
