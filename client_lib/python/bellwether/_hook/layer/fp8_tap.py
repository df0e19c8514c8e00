"""What a module's products in 8 bits are made of, in a sampled step: x and w of its forward, dy of
its backward.

A product is that of the module whose forward, or the backward of whose function, runs in this
thread.  Which operand is which is told by the shape of the module's weight.  The tensor before it
had 8 bits is what the module is given, its weight, or the gradient of what it returns.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._kernels.memory import capturing
from ..._kernels.probe import DTYPES
from ..._util.guard import harmless
from ..hosts import LinearHost
from ..running import apart, being_traced, checkpointed
from .edge_tap import IN_GRAPH
from .readable import readable, wrapped

X, W, DY = SIDES = ("x", "w", "dy")
# Bits without the sign of the largest number; what is above is NaN or infinite.
_LARGEST = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
COUNTS = ("saturated", "zeros", "nonfinite", "nonzero_inputs", "flushed")
STATS = ("elements", *COUNTS, "scale", "scales")  # The largest scale, and their sum.
# Where Transformer Engine keeps the scales of a first product: in what, and at which place.
_META = ((X, "scaling_fwd", 0), (W, "scaling_fwd", 1), (DY, "scaling_bwd", 0))
_NODES_MAX = 16  # That are walked behind a result.

OTHER_FORMAT = "its tensors are in another format than E4M3 and E5M2, or not torch's own"
OTHER_SHAPE = "its products are not of its input and its weight"
NO_BACKWARD = "its backward is not that of a torch.autograd.Function"


class Quantised:
    """What one side of a module has in a step, on the device: float64 [STATS], `whole[at]`."""

    def __init__(self, row: int, side: str, whole: Tensor, at: tuple[int, int]) -> None:
        self.row, self.side = row, side
        self.whole, self.at, self.slab = whole, at, whole[at]
        self.calls = 0
        self.before_seen = False
        self.scale_alone = False  # Nothing else is known.

    def add(self, q: Tensor, scale: Any, before: Optional[Tensor]) -> bool:
        """before  of q's shape.  False: its format is not known."""
        largest = _LARGEST.get(q.dtype)
        if largest is None or not readable(q) or q.device != self.slab.device:
            return False
        counts = _counts(q.detach().view(torch.uint8), largest)
        if before is not None and _is_like(before, q):
            # What is not 0 in q was not 0 before.
            there = torch.count_nonzero(before.detach())
            counts += [there, (there - q.numel() + counts[1]).clamp(min=0)]
            self.before_seen = True
        self.slab[0] += q.numel()
        self.slab[1 : 1 + len(counts)] += torch.stack(counts)
        self.add_scale(scale)
        self.calls += 1
        return True

    def add_scale(self, scale: Any) -> None:
        """A tensor, or a list that begins with one."""
        if isinstance(scale, (list, tuple)):
            scale = scale[0] if scale else None
        if not isinstance(scale, Tensor) or not readable(scale) or scale.numel() == 0:
            return
        scale = scale.detach().to(self.slab.device).double()
        if scale.numel() == 1:
            self.slab[6:] = scale.reshape(())
        else:
            self.slab[6:] = torch.stack([scale.max(), scale.sum()])


def _is_like(before: Tensor, q: Tensor) -> bool:
    """Whether it can be what q was made of."""
    same = before.shape == q.shape and before.device == q.device
    return same and before.dtype in DTYPES and readable(before)


def _counts(bits: Tensor, largest: int) -> list[Tensor]:
    """How many elements are the largest number, 0, and not finite."""
    if bits.device.type == "cpu":  # In one pass.
        flat = (bits if bits.is_contiguous() else bits.t()).reshape(-1)
        found = torch.bincount(flat, minlength=256).view(2, 128).sum(0)
        return [found[largest], found[0], found[largest + 1 :].sum()]
    bits = bits & 0x7F
    zeros = bits.numel() - torch.count_nonzero(bits)
    return [torch.count_nonzero(bits == largest), zeros, torch.count_nonzero(bits > largest)]


class Runs(threading.local):
    """Innermost last: taps whose module's forward, or whose backward, runs in this thread."""

    def __init__(self, host: LinearHost) -> None:
        self.host = host
        # With whether that is its backward.  Another thread's may stay until that one's next: no
        # tensor is in it.
        self.stack: list[tuple[Fp8Tap, bool]] = []

    @harmless("a product in 8 bits")
    def product(self, a: Any, scale_a: Any, b: Any, scale_b: Any) -> None:
        """torch has made a @ b of tensors in 8 bits."""
        if self.stack and isinstance(a, Tensor) and isinstance(b, Tensor):
            tap, backward = self.stack[-1]
            tap.product(a, scale_a, b, scale_b, backward)


class Fp8Tap:
    """of  by side: where it is added"""

    def __init__(self, runs: Runs, module: nn.Module, of: dict[str, Quantised]) -> None:
        self.host, self.of = runs.host, of
        self._runs = runs
        self.left_out: Optional[str] = None
        self._module = weakref.ref(module)
        self._x: Optional[Tensor] = None
        self._d_y: Optional[Tensor] = None
        self._calls = 0
        self._wants: set[str] = set()  # Sides of the running call.
        self._open = True
        self._hooks: list[Any] = []

    def close(self) -> None:
        """Nothing more is measured."""
        self._open, self._x, self._d_y = False, None, None
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        self._leave()

    def _leave(self) -> None:
        """Of this thread's stack, with what has been left by an exception."""
        places = [i for i, (tap, _) in enumerate(self._runs.stack) if tap is self]
        if places:
            del self._runs.stack[places[0] :]

    def input(self, args: Any) -> None:
        """The module's forward begins."""
        if not self._open or not torch.is_grad_enabled() or not self.host.live():
            return
        if self.host.in_backward():  # A recomputation.
            return
        self._leave()
        if being_traced() or capturing():
            self.left_out = IN_GRAPH
            return
        self._calls += 1
        if self.host.samples_call(self._calls - 1):
            self._wants = {X, W}
            x = args[0] if args else None
            self._x = x.detach() if isinstance(x, Tensor) and not wrapped(x) else None
            self._runs.stack.append((self, False))

    def output(self, args: Any, output: Any) -> None:
        """Its forward is over."""
        if self.host.in_backward():
            return
        runs = any(tap is self for tap, _ in self._runs.stack)
        self._leave()
        self._x = None
        if not runs or not self._open or W in self._wants:  # No product of its weight.
            return
        y = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(y, Tensor) and y.grad_fn is not None:
            given = args[0] if args else None
            node = _function_behind(y, given.grad_fn if isinstance(given, Tensor) else None)
            if node is None:
                self.left_out = NO_BACKWARD
                return
            self._hooks.append(node.register_prehook(self._backward))
            self._hooks.append(node.register_hook(self._backward_over))

    @harmless("the backward of a product in 8 bits")
    def _backward(self, gradients: Any) -> None:
        if self._open and self.host.live() and not capturing() and gradients:
            d_y = gradients[0]
            if isinstance(d_y, Tensor) and not wrapped(d_y):
                self._wants = {DY}
                stack = self._runs.stack
                stack[:] = [entry for entry in stack if entry[0]._open]  # Left by an exception.
                self._d_y = d_y.detach()
                stack.append((self, True))

    @harmless("the backward of a product in 8 bits")
    def _backward_over(self, inputs: Any, outputs: Any) -> None:
        self._d_y = None
        self._leave()

    def product(self, a: Tensor, scale_a: Any, b: Tensor, scale_b: Any, backward: bool) -> None:
        """a @ b, within its forward or its backward."""
        if not self._open or not self._wants or a.dim() != 2 or b.dim() != 2:
            return
        if backward and checkpointed():  # What its backward needs is computed again.
            return
        start = time.perf_counter()
        with torch.no_grad(), apart():
            if not backward:
                self._of_forward(a, scale_a, b, scale_b)
            elif self._d_y is not None:
                self._of_backward(a, scale_a, b, scale_b, self._d_y)
        self.host.hook_seconds += time.perf_counter() - start

    def _of_forward(self, a: Tensor, scale_a: Any, b: Tensor, scale_b: Any) -> None:
        module = self._module()
        own = module._parameters.get("weight") if module is not None else None
        if own is None or sorted(b.shape) != sorted(own.shape):
            self.left_out = OTHER_SHAPE
            return
        weight = None if wrapped(own) else own.detach()
        if weight is not None and (b.shape != weight.shape or b.shape[0] == b.shape[1]):
            # Square ones, too: nn.Linear has the outputs first.
            weight = weight.t()
        self._add(X, a, scale_a, self._x)
        self._add(W, b, scale_b, weight)
        self._wants = set()

    def _of_backward(self, a: Tensor, scale_a: Any, b: Tensor, scale_b: Any, d_y: Tensor) -> None:
        """dx = dy @ w, dw = dy^T @ x or x^T @ dy: the first one that is seen."""
        if d_y.dim() == 0 or d_y.numel() == 0:
            return
        rows = d_y.reshape(-1, d_y.shape[-1])
        if a.shape == rows.shape:
            self._add(DY, a, scale_a, rows)
        elif a.shape == rows.t().shape:
            self._add(DY, a, scale_a, rows.t())
        elif b.shape == rows.shape:
            self._add(DY, b, scale_b, rows)
        else:
            self.left_out = OTHER_SHAPE
            return
        self._wants = set()

    def _add(self, side: str, q: Tensor, scale: Any, before: Optional[Tensor]) -> None:
        of = self.of[side]
        if before is not None and before.numel() == q.numel():
            before = before.reshape(q.shape)
        else:
            before = None
        with self.host.lock:
            if not of.add(q, scale, before):
                self.left_out = OTHER_FORMAT


def read_meta(meta: Any, of: dict[str, Quantised]) -> bool:
    """The scales that a module of Transformer Engine keeps for its first product, in `fp8_meta`:
    what x, w and dy are multiplied by before they have 8 bits.  False: it keeps none."""
    found = False
    for side, direction, at in _META:
        kept = meta.get(direction) if isinstance(meta, dict) else None
        scale = getattr(kept, "scale", None)
        if isinstance(scale, Tensor) and scale.dim() == 1 and scale.numel() > at:
            quantised = of[side]
            with torch.no_grad(), apart():
                quantised.add_scale(scale[at].double().reciprocal())
            quantised.calls, quantised.scale_alone, found = 1, True, True
    return found


def _function_behind(output: Tensor, given: Any) -> Optional[Any]:
    """The node of the autograd.Function that made a module's result, before what it was given."""
    waiting, seen = [output.grad_fn], 0
    while waiting and seen < _NODES_MAX:
        node = waiting.pop(0)
        seen += 1
        if node is None or node is given:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node
        waiting += [behind for behind, _ in node.next_functions]
    return None


def new_quantised(rows: list[int], device: torch.device) -> list[dict[str, Quantised]]:
    """All in one piece of memory; rows  of modules."""
    whole = torch.zeros(len(rows), len(SIDES), len(STATS), dtype=torch.float64, device=device)
    return [
        {side: Quantised(row, side, whole, (i, j)) for j, side in enumerate(SIDES)}
        for i, row in enumerate(rows)
    ]
