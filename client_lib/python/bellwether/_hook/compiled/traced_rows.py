"""Which rows of a projection become which heads, from the graph that torch.compile makes of a call.

No forward of the module is run that could be listened to (split_check.py).  But the graph says how
q and k are made of what a projection returns.  That part of it is run once, on random numbers in
the place of the projection's output, and on the real cosines and norms.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, fx, nn

from ..._weights import split_check
from ..calls.call import View

NODES_MAX = 300  # Between a projection and the call.
_NORMS = ("rms_norm", "layer_norm")
NUMBERS_MAX = 1 << 25  # Of a projection's output.


class _Unclear(Exception):
    """The part is too long, or something comes in that is not known while it is traced."""


def _example(node: fx.Node) -> Any:
    """What a placeholder stands for now."""
    return getattr(node.meta.get("grapharg"), "example", None)


def _output_of(weight: fx.Node) -> Optional[fx.Node]:
    """What the projection with this weight returns."""
    node, size = weight, weight.meta["example_value"].numel()
    while len(node.users) == 1:
        node = next(iter(node.users))
        fake = node.meta.get("example_value")
        if not isinstance(fake, Tensor):
            return None
        if (
            len([n for n in node.all_input_nodes if isinstance(_example(n), Tensor)])
            != len(node.all_input_nodes)
            or fake.numel() != size
        ):
            return node
    return None


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name == "setitem" or name in ("iadd", "imul", "isub", "itruediv", "ior")


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that others write to, perhaps through a view: their values are not what made them."""
    found = set()
    for node in graph.nodes:
        to = node.args[0] if _writes(node) and node.args else None
        while isinstance(to, fx.Node):
            found.add(to)
            to = to.args[0] if to.args else None
    return found


class _Part:
    """The part of a graph behind some outputs, whose values are given."""

    def __init__(self, given: dict[fx.Node, Tensor]) -> None:
        self._values: dict[fx.Node, Any] = dict(given)
        self._written = _written(next(iter(given)).graph)
        self._count = 0
        self.normalised: Optional[Tensor] = None  # What the norm was given that was met last.

    def value(self, node: fx.Node) -> Any:
        if node in self._written:
            raise _Unclear
        if node in self._values:
            return self._values[node]
        self._count += 1
        if self._count > NODES_MAX:
            raise _Unclear
        found = self._values[node] = self._compute(node)
        return found

    def _compute(self, node: fx.Node) -> Any:
        fake = node.meta.get("example_value")
        if isinstance(fake, torch.SymInt):
            return int(fake.node.hint)
        if node.op == "placeholder":
            example = _example(node)
            if not isinstance(example, Tensor) or type(example) not in (Tensor, nn.Parameter):
                raise _Unclear
            return example.detach().clone()  # The part may write there.
        if node.op not in ("call_function", "call_method"):
            raise _Unclear
        matrices = (n for n in node.all_input_nodes if isinstance(_example(n), nn.Parameter))
        if any(_example(n).dim() > 1 for n in matrices):
            raise _Unclear  # Another projection: what it gets is not known.
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = node.target
        if getattr(target, "__name__", "") in _NORMS:
            self.normalised = self.value(node.all_input_nodes[0])
        return target(*args, **kwargs)


def _random(fake: Tensor, made: torch.Generator) -> Tensor:
    shape = [size if isinstance(size, int) else size.node.hint for size in fake.shape]
    if torch.Size(shape).numel() > NUMBERS_MAX:
        raise _Unclear
    return torch.randn(shape, generator=made).to(device=fake.device, dtype=fake.dtype)


def evidence(
    modules: dict[str, nn.Module], views: tuple[View, View], q: fx.Node, k: fx.Node
) -> Optional[split_check.Evidence]:
    """modules  the projections that q and k, nodes of the graph, may come from, by their paths
    views  give q and k as [batch, heads, tokens, dim]"""
    from torch._dynamo.utils import preserve_rng_state
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    # (Not as an attribute, which some modules compute.)
    held = {path: m._parameters.get("weight") for path, m in modules.items()}
    weights = {id(weight): path for path, weight in held.items() if weight is not None}
    outputs: dict[str, fx.Node] = {}
    for node in q.graph.nodes:
        path = weights.get(id(_example(node))) if node.op == "placeholder" else None
        output = _output_of(node) if path is not None else None
        if path is not None and output is not None:
            outputs[path] = output
    if not outputs:
        return None
    cuda = q.meta["example_value"].device.type
    try:
        with (
            unset_fake_temporarily(), preserve_rng_state(), torch.no_grad(),
            torch.autocast(cuda, enabled=False),
        ):  # fmt: skip
            # The host's numbers stay, and no two projections have the same.
            made = torch.Generator().manual_seed(1)
            given = {n: _random(n.meta["example_value"], made) for n in outputs.values()}
            heard = split_check.Listening({}, {})
            for path, node in outputs.items():
                heard.hear(path, given[node])
            part, ends = _Part(given), []
            for which, view, node in zip("qk", views, (q, k)):
                part.normalised = None
                ends.append(view(part.value(node)))
                heard.hear_norm(which, part.normalised)
            return split_check.evidence(heard, *ends)
    except Exception:  # It is unclear, or the GPU's memory is full: then the order is not shown.
        return None
