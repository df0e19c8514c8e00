"""The gradients at a module's own edges: what its backward returns for its input and its weight,
before the gradients of other consumers are added.

Nothing is added to the graph.  The nodes between a result and the input are walked; those that
return a gradient for the input, or for a parameter, get a hook, as the one that made the result.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._kernels.memory import Memory, capturing
from ..._kernels.probe import DTYPES
from ..._util.guard import harmless
from ..hosts import LinearHost
from ..running import apart, being_traced, checkpointed
from .linear_tap import Held
from .readable import readable, wrapped

_NODES_MAX = 64  # Between a result and its input.
# Why a module was not measured.
IN_GRAPH = "it is captured into a CUDA graph, or traced"
OTHER_TYPE = "its tensors are of other types or layouts"
CHECKPOINTED = "it is in a checkpointed region"
NO_ROOM = "its tensors are larger than what may be held"
NO_EDGE = "its input's gradient is not its own"
CHANGED = "a tensor was changed in place before the backward"

Edge = tuple[Any, int]  # A node, and which of its results.
Gradients = dict[str, list[Tensor]]  # By the tensor's name: parts, that add up to it.


class VectorLaw:
    """Differences that exact arithmetic makes zero, still on the device: float64 [n] each.

    law       as LawRow has it
    variance  by independent roundings
    alike     what roundings can move it by otherwise
    """

    def __init__(self, law: str, difference: Tensor, variance: Tensor, alike: Tensor) -> None:
        self.law = law
        self.numbers = torch.stack([difference, variance, alike])

    @classmethod
    def of(cls, law: str, numbers: Tensor) -> VectorLaw:
        """numbers  the three of them, float64 [3, n]"""
        found = cls.__new__(cls)
        found.law, found.numbers = law, numbers
        return found


class VectorsMeasured:
    """
    unlike  float64 [k]: of each form that the module may have, the share of its result that the
            form does not explain; none where there is but one
    counts  float64 [2]: elements, or sums of them, that are not finite in what the call was given,
            and in what it computed from finite ones; none where they are not counted
    overflows  the latter are the loss scale's affair: fp16
    in_16_bits  whether the module was given such numbers, or has made them
    """

    def __init__(
        self, row: int, laws: list[list[VectorLaw]], unlike: Optional[Tensor],
        counts: Optional[Tensor] = None, overflows: bool = False, in_16_bits: bool = False,
    ) -> None:  # fmt: skip
        self.row, self.laws, self.unlike = row, laws, unlike  # Laws of each form.
        self.counts, self.overflows, self.in_16_bits = counts, overflows, in_16_bits

    def tensors(self) -> list[Tensor]:
        found = [law.numbers for form in self.laws for law in form]
        return [t for t in (self.unlike, self.counts) if t is not None] + found


def edge_of(tensor: Tensor) -> Optional[Edge]:
    """Where a tensor's gradient goes: a node, and which of its results it is."""
    if not tensor.requires_grad:
        return None
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    with apart(), torch.enable_grad():
        node = tensor.view_as(tensor).grad_fn
    return None if node is None else (node.next_functions[0][0], 0)


def edges(result: Tensor, into: Mapping[str, Tensor]) -> Optional[dict[str, list[tuple[Any, int]]]]:
    """By the tensor's name, the nodes between that return a gradient for it, and at which place;
    None where there are too many nodes."""
    ends = {name: edge_of(tensor) for name, tensor in into.items()}
    found: dict[str, list[tuple[Any, int]]] = {name: [] for name in into}
    nodes = [end[0] for end in ends.values() if end is not None]
    seen: set[Any] = {result.grad_fn}
    left: list[Any] = [result.grad_fn]
    while left:
        node = left.pop()
        for at, (following, place) in enumerate(node.next_functions):
            if following is None:
                continue
            if any(following is end for end in nodes):
                for name, end in ends.items():
                    if end is not None and end[0] is following and end[1] == place:
                        found[name].append((node, at))
                continue
            if following not in seen:
                if len(seen) >= _NODES_MAX:
                    return None
                seen.add(following)
                left.append(following)
    return found


# As VectorsMeasured has them.
Laws = Optional[tuple[list[list[VectorLaw]], Optional[Tensor], Optional[Tensor], bool]]
Measure = Callable[[Memory, nn.Module, Tensor, Tensor, Gradients], Laws]


class OnceTap:
    """Of a module's first call in a step.

    finished  called with what was measured of it
    """

    def __init__(
        self, host: LinearHost, row: int, finished: Callable[[VectorsMeasured], None],
        left_out: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        self.host, self.row = host, row
        self._finished, self._left_out = finished, left_out
        self._open, self._done = True, False

    def close(self) -> None:
        """Nothing more is measured."""
        self._open = False
        self._forget()

    def _forget(self) -> None:
        """What was kept for the backward."""

    def input(self, args: Any) -> None:
        """Nothing of it is needed."""

    def _waiting(self) -> bool:
        """Whether the call is yet to come."""
        return self._open and not self._done and torch.is_grad_enabled()

    def _begin(self, hook: Callable[[], Optional[str]]) -> None:
        """It has come.  hook  says why it is left out."""
        start = time.perf_counter()
        self._done = True
        why = hook()
        if why is not None:
            self._left_out(self.row, why)
        self.host.hook_seconds += time.perf_counter() - start


class EdgeTap(OnceTap):
    """The first call of a module in a step.

    measure   of the module, its input, its result and the gradients: what it gives
    finished  called with what was measured
    """

    def __init__(
        self, host: LinearHost, row: int, module: nn.Module, held: Held,
        measure: Measure,
        finished: Callable[[VectorsMeasured], None], left_out: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        super().__init__(host, row, finished, left_out)
        self._module = weakref.ref(module)
        self._held, self._measure = held, measure
        self._x: Optional[Tensor] = None
        self._y: Optional[Tensor] = None
        self._versions = (0, 0)
        self._waits: set[int] = set()
        self._got: Gradients = {}

    def _forget(self) -> None:
        self._x = self._y = None
        self._waits, self._got = set(), {}

    def output(self, args: Any, output: Any) -> None:
        """The module's forward is over."""
        x = args[0] if args else None
        if not self._waiting():
            return
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or not output.requires_grad:
            return
        self._begin(lambda: self._hook(x, output))

    def _hook(self, x: Tensor, output: Tensor) -> Optional[str]:
        module = self._module()
        if being_traced() or capturing() or wrapped(output) or wrapped(x) or module is None:
            return IN_GRAPH
        if checkpointed():
            return CHECKPOINTED
        if output.dtype not in DTYPES or x.dtype not in DTYPES or output.numel() == 0:
            return OTHER_TYPE
        into = {"x": x} | {
            name: p for name, p in module._parameters.items() if p is not None and p.requires_grad
        }
        found = edges(output, into)
        if found is None or not found["x"] or output.grad_fn is x.grad_fn:
            return NO_EDGE
        return self._watch(x, output, found)

    def _watch(
        self, x: Tensor, output: Tensor, found: Mapping[str, list[tuple[Any, int]]]
    ) -> Optional[str]:
        """Waits for the gradients: by the name of what they are of, nodes and places."""
        if not self._held.take(x) or not self._held.take(output):
            return NO_ROOM
        self._x, self._y = x.detach(), output.detach()
        self._versions = (x._version, output._version)
        places: dict[Any, list[tuple[str, int]]] = {output.grad_fn: []}
        for name, nodes in found.items():
            for node, at in nodes:
                places.setdefault(node, []).append((name, at))
        self._waits = set(range(len(places)))
        for key, (node, names) in enumerate(places.items()):
            made = output.output_nr if node is output.grad_fn else None
            node.register_hook(functools.partial(self._gradients, key, names, made))
        return None

    @harmless("the gradients of a module")
    def _gradients(
        self, key: int, names: list[tuple[str, int]], made: Optional[int], inputs: Any, outputs: Any
    ) -> None:
        if not self._open or not self.host.live() or key not in self._waits or capturing():
            return
        start = time.perf_counter()
        self._waits.discard(key)
        given = [(name, inputs[at]) for name, at in names]
        if made is not None:
            given.append(("y", outputs[made]))
        for name, gradient in given:
            if gradient is not None:
                self._got.setdefault(name, []).append(gradient)
        if not self._waits:
            self._finish()
        self.host.hook_seconds += time.perf_counter() - start

    def _finish(self) -> None:
        x, y, got, module = self._x, self._y, self._got, self._module()
        self._forget()
        if x is None or y is None or module is None or "y" not in got:
            return
        if (x._version, y._version) != self._versions:
            self._left_out(self.row, CHANGED)
            return
        tensors = [x, y, *(t for parts in got.values() for t in parts)]
        if any(wrapped(t) or not readable(t) or t.dtype not in DTYPES for t in tensors):
            self._left_out(self.row, OTHER_TYPE)
            return
        with torch.no_grad():
            found = self._measure(self.host.memories.of(x.device), module, x, y, got)
            if found is None:
                self._left_out(self.row, OTHER_TYPE)
            else:
                in_16_bits = 2 in (x.element_size(), y.element_size())
                self._finished(VectorsMeasured(self.row, *found, in_16_bits=in_16_bits))
