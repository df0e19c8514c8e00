"""The law of a gated MLP, y = act(g) u, where y goes into the layer that projects back:

    in each row: sum of u du = sum of y dy

since y grows as u does.  u and y are what the layers around return and are given.  Dropout and
casts between them keep the law.  What is clamped, or is made of u otherwise, is left out.

Nothing is recomputed and no graph is changed.  Which of two layers is the gate is told by the
nodes: from u to y there are only those that keep the law.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._kernels.memory import Memory, capturing
from ..._kernels.probe import DTYPES
from ..running import being_traced, checkpointed
from .edge_tap import (
    CHECKPOINTED,
    IN_GRAPH,
    OTHER_TYPE,
    EdgeTap,
    Gradients,
    Laws,
    VectorLaw,
    edge_of,
)
from .linear_tap import VIEWS, Taps
from .readable import wrapped
from .row_sums import chunk, largest_power, power_of_two, significand_bits

LAW = "y=du"
# Of a module's children: two, of which one is the gate, and the one behind them.
CHILDREN = (("gate_proj", "up_proj", "down_proj"), ("wi_0", "wi_1", "wo"), ("w1", "w3", "w2"))
# Nodes behind which y is as many times larger as u is, and rounded.
ROUNDING = ("MulBackward0", "ToCopyBackward0", "NativeDropoutBackward0")
# What a product may lose by underflow; of fp16 a half of the least number.
_FLUSHED, _FLUSHED_16 = 2.0**-126, 2.0**-25
_NODES_MAX = 64
OTHER_GATE = "its product is not known to be a gate's, or is changed in place"


def gate_children(module: nn.Module) -> Optional[tuple[nn.Module, nn.Module, nn.Module]]:
    """Those of CHILDREN that a module has."""
    for names in CHILDREN:
        first, second, behind = (module._modules.get(name) for name in names)
        if first is not None and second is not None and behind is not None:
            return first, second, behind
    return None


def _between(y: Tensor, ends: list[Any]) -> Optional[dict[Any, list[Any]]]:
    """The nodes between y and what has made others, with the edges of each; None if too many."""
    found: dict[Any, list[Any]] = {}
    left: list[Any] = [y.grad_fn]
    while left:
        node = left.pop()
        if node in found or node in ends:
            continue
        if len(found) >= _NODES_MAX:
            return None
        found[node] = [edge for edge in node.next_functions if edge[0] is not None]
        left += [following for following, _ in found[node]]
    return found


def way(y: Tensor, u: Tensor, other: Tensor) -> Optional[tuple[Any, int, int]]:
    """The node that returns the gradient of u for what makes y, the gradient's place, and how many
    nodes on the way round; None where the way does not keep the law."""
    end, second = edge_of(u), edge_of(other)
    if end is None or second is None:
        return None
    following = _between(y, [end[0], second[0]])
    if following is None:
        return None
    users = [
        (node, at)
        for node in following
        for at, edge in enumerate(node.next_functions)
        if edge == end
    ]
    if len(users) != 1:
        return None
    on_the_way, count = {users[0][0]}, 0
    while count < len(on_the_way):
        count = len(on_the_way)
        on_the_way |= {
            node for node, edges in following.items() if any(n in on_the_way for n, _ in edges)
        }
    names = [node.name() for node in on_the_way]
    rounds = sum(name in ROUNDING for name in names)
    if y.grad_fn not in on_the_way or len(names) > rounds + sum(name in VIEWS for name in names):
        return None
    return *users[0], rounds


class _Listens:
    """A tap on one of the layers around."""

    def __init__(self, gate: GateTap, place: int) -> None:
        self._gate, self._place = gate, place

    def close(self) -> None:
        """The gate's own is closed."""

    def input(self, args: Any) -> None:
        if self._place == 2:
            self._gate.ends(args)

    def output(self, args: Any, output: Any) -> None:
        if self._place < 2:
            self._gate.heard(self._place, output)


class GateTap(EdgeTap):
    """The first call of a gated MLP in a step.  Its own edges are not those of the law."""

    def listen(self, taps: Taps, module: nn.Module) -> None:
        self._results: dict[int, tuple[Tensor, int]] = {}
        taps.add(module, self)
        for place, child in enumerate(gate_children(module) or ()):
            taps.add(child, _Listens(self, place))

    def _forget(self) -> None:
        super()._forget()
        self._results = {}

    def output(self, args: Any, output: Any) -> None:
        """The module's own forward is over: nothing of it is needed."""

    def heard(self, place: int, output: Any) -> None:
        """One of the first two layers is over."""
        if not self._open or self._done or not torch.is_grad_enabled():
            return
        if isinstance(output, Tensor) and output.requires_grad:
            self._results[place] = output, output._version

    def ends(self, args: Any) -> None:
        """The layer behind them begins."""
        y = args[0] if args else None
        if not self._open or self._done or not torch.is_grad_enabled() or len(self._results) < 2:
            return
        if not isinstance(y, Tensor) or y.grad_fn is None:
            return
        start = time.perf_counter()
        self._done = True
        why = self._gate(y)
        self._results = {}
        if why is not None:
            self._left_out(self.row, why)
        self.host.hook_seconds += time.perf_counter() - start

    def _gate(self, y: Tensor) -> Optional[str]:
        results = [self._results[place] for place in (0, 1)]
        tensors = [y, *(tensor for tensor, _ in results)]
        if being_traced() or capturing() or any(wrapped(t) for t in tensors):
            return IN_GRAPH
        if checkpointed():
            return CHECKPOINTED
        if any(t.dtype not in DTYPES for t in tensors) or y.numel() == 0:
            return OTHER_TYPE
        for (u, version), (gate, _) in (results, results[::-1]):
            found = way(y, u, gate)
            if found is not None and u._version == version and u.shape == y.shape:
                node, at, rounds = found
                self._measure = functools.partial(gate_laws, rounds=rounds)
                return self._watch(u, y, {"x": [(node, at)]})
        return OTHER_GATE


def gate_laws(
    memory: Memory, module: nn.Module, u: Tensor, y: Tensor, got: Gradients, rounds: int = 1
) -> Laws:
    """
    rounds  between u and y; each may be four times the last one's square, as the numbers are not
            of the same size
    """
    if any(len(got.get(name, ())) != 1 for name in ("x", "y")):
        return None
    n = y.shape[-1]
    tensors = [t.reshape(-1, n) for t in (u, got["x"][0], y, got["y"][0])]
    if len({t.shape for t in tensors}) > 1:
        return None
    bits = min(significand_bits(t) for t in tensors)
    times = (4 * rounds - 3) * 2.0 ** (-2 * bits) / 12
    overflows = any(t.dtype == torch.float16 for t in tensors)
    flushed = _FLUSHED_16 if overflows else _FLUSHED
    # Products of two numbers of 16 bits are exact in float32.
    wide = torch.float64 if any(t.element_size() > 2 for t in tensors) else torch.float32
    # By the largest gradient, so that squares stay in a float32's range.
    scale = torch.maximum(largest_power(tensors[1]), largest_power(tensors[3]))
    scale = torch.where(scale.isfinite(), scale, 1.0)
    laws = []
    counts = u.new_zeros(2, dtype=torch.float64)
    step = max(1, chunk(y) // n)
    for at in range(0, len(tensors[0]), step):
        some = [t[at : at + step].contiguous() for t in tensors]
        a, d_a, b, d_b = (t.to(wide) for t in some)
        d_a, d_b = d_a.div_(scale), d_b.div_(scale)
        left, right = (a * d_a).sum(1), (b * d_b).sum(1)
        of_d_a = power_of_two(some[1]).to(wide).div_(scale).mul_(a)
        of_b = power_of_two(some[2]).to(wide).mul_(d_b)
        variance = times * (of_d_a.square_().sum(1) + of_b.square_().sum(1))
        sizes, d_sizes = a.abs_().sum(1), d_b.abs_().sum(1)
        alike = flushed * (sizes.double() / scale + d_sizes)
        laws.append(torch.stack([(left - right).double(), variance.double(), alike]))
        given = (sizes + d_sizes + right).isfinite().logical_not()
        counts += torch.stack([given.sum(), (left.isfinite().logical_not() & ~given).sum()])
    numbers = torch.cat(laws, 1) * torch.stack([scale, scale.square(), scale]).double()[:, None]
    return [[VectorLaw.of(LAW, numbers)]], None, counts, overflows
