"""One call of a linear layer in a sampled step: y, dy, x, dx, W and dW of that call alone.

The tap adds nothing to the graph.  A hook on the node of the matrix product sees what its backward
returns, before the gradients of other calls are added.  So dx is of this consumer of x alone, and
dW of this micro-batch alone, also where a weight is tied.  Under autocast the copies are taken.

  output.grad_fn -> view -> Addmm or Mm     what is in between may only be views

In a checkpointed region nothing is held between the passes: x and y are those of the recomputation.
Where it ends before y is there (it is no longer needed then), x and dW are compared alone.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any, Optional, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from ..._kernels.memory import capturing
from ..._kernels.modules import add_equal_rows, new_equals
from ..._kernels.probe import DTYPES
from ..._kernels.products import NO_GRID, Product, add_products, grids, new_sums, own_grid
from ..._util.guard import harmless
from ..hosts import LinearHost
from ..running import being_traced, checkpointed
from .readable import readable, wrapped
from .recomputed import Recomputed

VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0")
PRODUCTS = ("AddmmBackward0", "MmBackward0")
_VIEWS_MAX = 4
# Why a call was not measured, or only a part of it.
OTHER_PRODUCT = "its result is not that of one matrix product"
CHANGED = "a tensor was changed in place before the backward"
OTHER_TYPE = "its tensors are of other types or devices"
NO_ROOM = "its output is larger than what may be held"
SEVERAL = "it is called several times in a checkpointed region"
IN_GRAPH = "it is captured into a CUDA graph, or traced"
NOT_AT_HAND = "its tensors are not at hand in the backward"
NO_GRADIENT = "neither its input nor its weight has a gradient"


class Held:
    """Bytes that taps may keep from the forward to the backward in one step."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def take(self, tensor: Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        if size > self.left:
            return False
        self.left -= size
        return True


def product_node(output: Tensor) -> Optional[Any]:
    """The node of the matrix product that an output is a view of."""
    node = output.grad_fn
    for _ in range(_VIEWS_MAX):
        if node is None or node.name() in PRODUCTS:
            return node
        if node.name() not in VIEWS:
            return None
        node = node.next_functions[0][0]
    return None


class Call:
    """A call whose backward is yet to come."""

    def __init__(self, deferred: bool, weight: Optional[Tensor], bias: Optional[Tensor]) -> None:
        self.deferred = deferred  # Its tensors come from a recomputation.
        self.x: Optional[Tensor] = None
        self.y: Optional[Tensor] = None
        # What the module had then: functional_call() lends others.
        self.weight, self.bias = weight, bias
        self._own = [] if weight is None else [weight._version]
        self._versions: tuple[int, ...] = (0, 0)
        self.done = False

    def keep(self, x: Optional[Tensor], y: Optional[Tensor]) -> None:
        self.x, self.y = x, y
        self._versions = tuple(0 if t is None else t._version for t in (x, y))

    def weight_is_same(self) -> bool:
        return self.weight is not None and self._own == [self.weight._version]

    def take(self) -> tuple[Optional[Tensor], Optional[Tensor], bool]:
        """x, y and whether one of them has changed since; they are let go."""
        x, y, versions = self.x, self.y, self._versions
        self.x = self.y = None
        same = [t is None or t._version == v for t, v in zip((x, y), versions)]
        return x if same[0] else None, y if same[1] else None, not all(same)


class Measured:
    """What a call gave, still on the device: `sums` has a row for each of `sides`."""

    def __init__(
        self, row: int, sides: tuple[str, ...], sums: Tensor, equals: Tensor, dtype: torch.dtype,
        shape: tuple[int, int, int],
    ) -> None:  # fmt: skip
        self.row, self.sides, self.sums, self.equals = row, sides, sums, equals
        self.dtype, self.shape = dtype, shape  # tokens, in, out


def _two_dimensional(tensor: Tensor, rows: int) -> Optional[Tensor]:
    return tensor.reshape(rows, -1) if tensor.numel() % max(1, rows) == 0 else None


class LinearTap:
    """
    row      of the module among those that have names
    finished called with what was measured
    classes  its outputs are the logits of words: the sum of dy is measured, too
    recomputed  called with its row and whether its input was the same when it was recomputed
    """

    def __init__(
        self, host: LinearHost, row: int, module: nn.Module, held: Held,
        finished: Callable[[Measured], None], left_out: Callable[[int, str], None],
        classes: bool = False, recomputed: Optional[Callable[[int, Tensor], None]] = None,
    ) -> None:  # fmt: skip
        self.host, self.row = host, row
        self._module = weakref.ref(module)
        self._held, self._finished, self._left_out = held, finished, left_out
        self._classes = classes
        self._again = (
            None if recomputed is None else Recomputed(host, functools.partial(recomputed, row))
        )
        self._call: Optional[Call] = None
        self._calls = 0
        self._open = True

    def close(self) -> None:
        """Nothing more is measured."""
        self._open = False
        if self._again is not None:
            self._again.close()
        if self._call is not None:
            self._call.done = True
            self._call.keep(None, None)

    def _recomputes(self) -> bool:
        call = self._call
        return (
            call is not None and call.deferred and not call.done
            and self.host.in_backward() and torch.is_grad_enabled()
        )  # fmt: skip

    def input(self, args: Any) -> None:
        """The module's forward begins."""
        if self._open and self._again is not None:
            start = time.perf_counter()
            self._again.input(args)
            self.host.hook_seconds += time.perf_counter() - start
        if not self._open or not self._recomputes():
            return
        assert self._call is not None
        if self._calls == 1 and args and isinstance(args[0], Tensor):
            self._call.keep(args[0].detach(), None)

    def output(self, args: Any, output: Any) -> None:
        """Its forward is over."""
        if not self._open or not torch.is_grad_enabled():
            return
        start = time.perf_counter()
        x = args[0] if args else None
        if isinstance(output, Tensor) and isinstance(x, Tensor):
            if self._recomputes():
                if self._calls == 1 and self._call is not None:
                    self._call.keep(x.detach(), output.detach())
            else:
                self._called(x, output)
        self.host.hook_seconds += time.perf_counter() - start

    def _called(self, x: Tensor, output: Tensor) -> None:
        if self._call is not None and self._call.done:
            return
        self._calls += 1
        if self._calls > 1:
            if self._call is not None and self._call.deferred:
                self._give_up(SEVERAL)
            return
        if being_traced() or capturing() or wrapped(output):
            self._left_out(self.row, IN_GRAPH)
            return
        if output.dtype not in DTYPES or output.numel() == 0:
            self._left_out(self.row, OTHER_TYPE)
            return
        if not output.requires_grad:
            self._calls = 0
            return
        node = product_node(output)
        if node is None:
            self._left_out(self.row, OTHER_PRODUCT)
            return
        module = self._module()
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        call = self._call = Call(checkpointed(), weight, bias)
        if not call.deferred:
            self._keep(call, x, output, node)
        node.register_hook(lambda inputs, outputs: self._gradients(call, inputs, outputs))

    def _keep(self, call: Call, x: Tensor, output: Tensor, node: Any) -> None:
        """The graph keeps what the product saw of x, if W has a gradient; y it may not keep."""
        saved = x.dtype == output.dtype
        if not saved:
            seen = getattr(node, "_saved_mat1", getattr(node, "_saved_self", None))
            if isinstance(seen, Tensor) and seen.dtype == output.dtype:
                x, saved = seen, True
        y: Optional[Tensor] = output
        if not self._held.take(output):
            self._left_out(self.row, NO_ROOM)
            y = None
        kept: Optional[Tensor] = x
        if not saved and not self._held.take(x):
            kept = None
        call.keep(None if kept is None else kept.detach(), None if y is None else y.detach())

    def _give_up(self, why: str) -> None:
        if self._call is not None:
            self._call.done = True
            self._call.keep(None, None)
        self._left_out(self.row, why)

    @harmless("a linear layer's gradients")
    def _gradients(self, call: Call, inputs: Any, outputs: Any) -> None:
        """Behind the backward of the product: (.., dx, dW) and (dy,)."""
        if call.done or not self._open or not self.host.live():
            return
        start = time.perf_counter()
        call.done = True
        module = self._module()
        if module is not None and not capturing():
            with torch.no_grad():
                self._measure(call, module, inputs, outputs)
        self.host.hook_seconds += time.perf_counter() - start

    def _measure(self, call: Call, module: Any, inputs: Any, outputs: Any) -> None:
        x, y, changed = call.take()
        if changed:
            self._left_out(self.row, CHANGED)
        d_y, (d_x, d_w) = outputs[0], inputs[-2:]
        if d_y is None or (d_x is None and d_w is None):
            self._left_out(self.row, NO_GRADIENT)
            return
        there = [t for t in (d_y, d_x, d_w) if t is not None]
        if any(
            wrapped(t) or not readable(t) or t.dtype != d_y.dtype or t.device != d_y.device
            for t in there
        ):
            self._left_out(self.row, OTHER_TYPE)
            return
        products = self._products(call, isinstance(module, nn.Linear), x, y, d_y, d_x, d_w)
        if len({"y", "x", "w"} & products.keys()) < 2:
            if not changed:
                self._left_out(self.row, NOT_AT_HAND)
            return
        if self._classes:
            ones = d_y.new_ones(()).expand_as(d_y)
            products["c"] = Product(ones, d_y, NO_GRID, own_grid(d_y.dtype))
        memory = self.host.memories.of(d_y.device)
        with self.host.lock:
            sums = new_sums(len(products), d_y.device)
            add_products(memory, list(products.values()), sums)
            equals = new_equals(2, d_y.device)
            for at, rows in enumerate((products["y"].x if "y" in products else None, d_x)):
                if rows is not None:
                    add_equal_rows(memory, rows, equals[at])
        inner = d_w.shape[0] if d_w is not None else d_x.shape[1]
        shape = d_y.shape[0], inner, d_y.shape[1]
        self._finished(Measured(self.row, tuple(products), sums, equals, d_y.dtype, shape))

    def _products(
        self, call: Call, transposed: bool, x: Optional[Tensor], y: Optional[Tensor], d_y: Tensor,
        d_x: Optional[Tensor], d_w: Optional[Tensor],
    ) -> dict[str, Product]:  # fmt: skip
        dtype, device, tokens = d_y.dtype, d_y.device, d_y.shape[0]
        rounded, other = grids(dtype)
        found: dict[str, Product] = {}

        def usable(tensor: Optional[Tensor]) -> bool:
            return tensor is not None and tensor.device == device and readable(tensor)

        if y is not None and y.dtype == dtype and usable(y):
            rows = _two_dimensional(y, tokens)
            bias = call.bias
            if rows is not None and rows.shape == d_y.shape and (bias is None or usable(bias)):
                found["y"] = Product(rows, d_y, rounded, other)
                if bias is not None:
                    given = bias.detach().to(dtype).expand_as(d_y)
                    found["b"] = Product(given, d_y, rounded, NO_GRID)
        if x is not None and d_x is not None and usable(x):
            rows = _two_dimensional(x.to(dtype), tokens)
            if rows is not None and rows.shape == d_x.shape:
                found["x"] = Product(rows, d_x, other, rounded)
        weight = call.weight
        if weight is not None and d_w is not None and usable(weight) and call.weight_is_same():
            weight = weight.detach().to(dtype)
            weight = weight.t() if transposed else weight
            if weight.shape == d_w.shape:
                found["w"] = Product(weight, d_w, other, rounded)
        return found


class Tap(Protocol):
    """What a module is looked at by in one step."""

    def input(self, args: Any) -> None:
        """The module's forward begins."""

    def output(self, args: Any, output: Any) -> None:
        """Its forward is over."""

    def close(self) -> None:
        """Nothing more is measured."""


class Taps:
    """The taps of one step.  They are called by hooks on all modules, which belong to none: a model
    that is copied or saved meanwhile has nothing of ours."""

    def __init__(self, host: LinearHost) -> None:
        self.host = host
        self._taps: dict[int, list[Tap]] = {}
        self._handles: list[Any] = []

    def add(self, module: nn.Module, tap: Tap) -> None:
        self._taps.setdefault(id(module), []).append(tap)
        if not self._handles:
            self._handles = [
                modules.register_module_forward_pre_hook(self._before),
                modules.register_module_forward_hook(self._after),
            ]

    def input(self, module: nn.Module, args: Any) -> None:
        """The module's forward begins."""
        for tap in self._taps.get(id(module), ()):
            tap.input(args)

    def close(self) -> None:
        """Nothing of ours is left."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        taps, self._taps = self._taps, {}
        for of_module in taps.values():
            for tap in of_module:
                tap.close()

    @harmless("a linear layer's input")
    def _before(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.input(module, args)

    @harmless("a linear layer's output")
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            for tap in self._taps.get(id(module), ()):
                tap.output(args, output)
