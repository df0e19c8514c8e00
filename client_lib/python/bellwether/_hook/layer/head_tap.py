"""The gradient of lm_head's weight in a sampled step, and of its logits where they can be seen.

    logits are made by the module   a hook on the node of its product sees dz, and dW of this call
    a function takes the weight     it makes logits, loss and gradients by itself, in chunks.  Only
                                    the weight's gradient is seen: as it comes to be added to .grad

What comes to .grad is of all uses of the weight in one backward pass.  Where it is an embedding,
too, the rows' sum is that of the embedding's own gradient, not zero: Lookups has it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._kernels.memory import capturing
from ..._kernels.modules import equal_rows
from ..._kernels.probe import DTYPES
from ..._util.guard import harmless
from ..hosts import LinearHost
from ..running import apart, being_traced, checkpointed
from .linear_tap import Held, product_node
from .readable import readable, wrapped
from .row_sums import of_logits, over_columns, over_rows, significand_bits, some_rows

LOOKUP = "EmbeddingBackward0"
_NEAR = 4  # Nodes between a module's result and what made it.
BF16_BITS, TF32_BITS = 7, 10
# Why nothing was measured.
OTHER_TYPE = "its gradient is of another type or layout"
IN_GRAPH = "it is captured into a CUDA graph, or traced"
UNSEEN = "it is tied to an embedding that was not called, or whose gradient is not its own"
CHECKPOINTED = "its logits are made in a checkpointed region"
SEVERAL = "the gradient of another call came first"
HOOKED = "a hook of the weight may change its gradient"
NO_ROOM = "its input is larger than what may be held"


def accumulator(weight: Tensor) -> Optional[Any]:
    """The node that adds to a parameter's .grad."""
    if not weight.requires_grad or not weight.is_leaf:
        return None
    with apart(), torch.enable_grad():
        node = weight.view_as(weight).grad_fn
    return None if node is None else node.next_functions[0][0]


def node_named(output: Tensor, name: str) -> Optional[Any]:
    """The nearest node of this name that a result was made by, itself the first."""
    node = output.grad_fn
    for _ in range(_NEAR):
        if node is None or node.name() == name:
            return node
        following = [n for n, _ in node.next_functions if n is not None]
        node = following[0] if len(following) == 1 else None
    return None


def rounds_to_bf16(device: str) -> bool:
    """Whether products of float32 may be made in 16 bits here."""
    return torch.is_autocast_enabled(device) or (torch.get_float32_matmul_precision() == "medium")


def _usable(tensor: Optional[Tensor]) -> bool:
    return (
        tensor is not None and not wrapped(tensor) and readable(tensor) and tensor.dtype in DTYPES
    )


class Lookups:
    """The gradients that the calls of an embedding give its weight in one step.  A tap of Taps.

    tied  its weight makes logits, too: only then they are added up
    """

    def __init__(self, host: LinearHost, tied: bool) -> None:
        self.host, self._tied = host, tied
        self.calls = 0
        self.unseen = False
        self.in_16_bits = False
        self.sums: Optional[Tensor] = None  # float64 [d], of the rows, behind the backward.
        self._open = True

    def close(self) -> None:
        self._open = False

    def input(self, args: Any) -> None:
        """Nothing of it is needed."""

    def output(self, args: Any, output: Any) -> None:
        if not self._open or not torch.is_grad_enabled() or not isinstance(output, Tensor):
            return
        if not output.requires_grad:
            return
        self.calls += 1
        self.in_16_bits = self.in_16_bits or rounds_to_bf16(output.device.type)
        if not self._tied:
            return
        node = None if wrapped(output) else node_named(output, LOOKUP)
        if node is None:
            self.unseen = True
        else:
            node.register_hook(self._gradient)

    @harmless("an embedding's gradient")
    def _gradient(self, inputs: Any, outputs: Any) -> None:
        """Behind its backward: (dE,) and what came to its result."""
        gradient = inputs[0]
        if not self._open or not self.host.live() or gradient is None:
            return
        if not _usable(gradient):
            self.unseen = True
            return
        start = time.perf_counter()
        with torch.no_grad():
            sums = over_rows(self.host.memories.of(gradient.device), gradient, TF32_BITS)[0]
            self.sums = sums if self.sums is None else self.sums + sums
        self.host.hook_seconds += time.perf_counter() - start


class RowsMeasured:
    """Still on the device."""

    def __init__(
        self, row: int, sums: Tensor, some: Tensor, equals: Tensor, fused: bool,
        classes: Optional[Tensor] = None, logits: Optional[tuple[Tensor, Tensor]] = None,
        bits: Optional[int] = None,
    ) -> None:  # fmt: skip
        self.row = row
        self.sums = sums  # float64 [3, d], as over_rows() has them.
        self.some, self.equals = some, equals
        self.fused = fused  # What has made the gradient was not seen.
        # float64 [6, tokens]: as over_columns() and of_logits() have them.
        self.classes = classes
        self.logits = logits  # z and dz at some of the tokens.
        self.bits = bits  # Behind the leading one, of logits in 16 bits.

    def tensors(self) -> list[Tensor]:
        optional = [self.classes, *(self.logits or ())]
        return [self.sums, self.some, self.equals, *(t for t in optional if t is not None)]


class HeadTap:
    """
    row       among the modules that have names
    finished  called with what was measured
    lookups   of the model's embeddings
    tied      those of them that have the weight, too
    """

    def __init__(
        self, host: LinearHost, row: int, module: nn.Module, held: Held, lookups: list[Lookups],
        tied: list[Lookups], finished: Callable[[RowsMeasured], None],
        left_out: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        self.host, self.row = host, row
        self._module = weakref.ref(module)
        self._held, self._lookups, self._tied = held, lookups, tied
        self._finished, self._left_out = finished, left_out
        self._calls = 0
        self._open, self._done = True, False
        self._x: Optional[Tensor] = None
        self._y: Optional[Tensor] = None  # At some of the tokens.
        self._of_logits: Optional[Tensor] = None  # At all.
        self._handle: Any = None
        weight = module.weight
        assert isinstance(weight, Tensor)
        self._node = accumulator(weight)
        if self._node is not None:
            self._handle = self._node.register_prehook(self._gradient)

    def close(self) -> None:
        """Nothing more is measured."""
        self._open = False
        self._x = self._y = self._of_logits = self._node = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def input(self, args: Any) -> None:
        """Nothing of it is needed."""

    def output(self, args: Any, output: Any) -> None:
        """The module's forward is over: it is called, so its logits may be seen."""
        if not self._open or self._done or not torch.is_grad_enabled():
            return
        x = args[0] if args else None
        if not isinstance(output, Tensor) or not isinstance(x, Tensor) or not output.requires_grad:
            return
        self._calls += 1
        if self._calls > 1:
            return
        start = time.perf_counter()
        why = self._keep(x, output)
        if why is not None:
            self._left_out(self.row, why)
        self.host.hook_seconds += time.perf_counter() - start

    def _keep(self, x: Tensor, output: Tensor) -> Optional[str]:
        if being_traced() or capturing() or wrapped(output):
            return IN_GRAPH
        if checkpointed():
            return CHECKPOINTED
        node = product_node(output)
        if node is None or output.dtype not in DTYPES or output.numel() == 0:
            return OTHER_TYPE
        if not self._held.take(x):
            return NO_ROOM
        with torch.no_grad():
            self._x = x.detach()
            logits = output.detach().reshape(-1, output.shape[-1])
            self._y = some_rows(logits)
            bits = significand_bits(logits) if logits.element_size() == 2 else None
            self._of_logits = of_logits(self.host.memories.of(logits.device), logits, bits)
        node.register_hook(self._product)
        return None

    @harmless("the gradient of logits")
    def _product(self, inputs: Any, outputs: Any) -> None:
        """Behind the backward of the product: (.., dx, dW) and (dy,)."""
        if self._done or not self._open or not self.host.live() or capturing():
            return
        start = time.perf_counter()
        self._done = True
        x, y, of_z, module = self._x, self._y, self._of_logits, self._module()
        self._x = self._y = self._of_logits = None
        d_y, d_w = outputs[0], inputs[-1]
        if (
            x is None
            or of_z is None
            or module is None
            or not all(_usable(t) for t in (d_y, d_w, x))
        ):
            self._left_out(self.row, OTHER_TYPE)
            return
        with torch.no_grad():
            if isinstance(module, nn.Linear):
                d_w = d_w.t()
            memory = self.host.memories.of(d_y.device)
            classes = torch.cat([over_columns(memory, d_y), of_z])
            sums = over_rows(memory, d_w, TF32_BITS)
            rows = x.reshape(d_y.shape[0], -1).to(d_y.dtype)
            # What the gradients of the logits do not add up to is the loss's affair.
            for at in range(0, rows.shape[0], 4096):
                here = slice(at, at + 4096)
                sums[0] -= classes[0, here] @ rows[here].double()
            logits = None if y is None else (y.float(), some_rows(d_y).float())
            bits = significand_bits(d_y) if d_y.element_size() == 2 else None
            self._finished(
                RowsMeasured(
                    self.row,
                    sums,
                    some_rows(d_w),
                    equal_rows(memory, d_w),
                    False,
                    classes,
                    logits,
                    bits,
                )
            )
        self.host.hook_seconds += time.perf_counter() - start

    @harmless("the gradient of lm_head")
    def _gradient(self, gradients: Any) -> None:
        """Before it is added to the weight's .grad."""
        if self._done or not self._open or not self.host.live() or capturing():
            return
        self._done = True
        if self._calls:
            self._left_out(self.row, SEVERAL)
            return
        start = time.perf_counter()
        gradient = gradients[0]
        tied = [lookups for lookups in self._tied if lookups.calls]
        if not _usable(gradient) or gradient.dim() != 2:
            self._left_out(self.row, OTHER_TYPE)
        elif self._hooked():
            self._left_out(self.row, HOOKED)
        elif self._tied and (not tied or any(t.unseen or t.sums is None for t in self._tied)):
            self._left_out(self.row, UNSEEN)
        else:
            with torch.no_grad():
                self._measure(gradient, tied)
        self.host.hook_seconds += time.perf_counter() - start

    def _hooked(self) -> bool:
        module = self._module()
        return module is None or bool(getattr(module.weight, "_backward_hooks", None))

    def _measure(self, gradient: Tensor, tied: list[Lookups]) -> None:
        in_16_bits = rounds_to_bf16(gradient.device.type) or any(
            lookups.in_16_bits for lookups in self._lookups
        )
        memory = self.host.memories.of(gradient.device)
        sums = over_rows(memory, gradient, BF16_BITS if in_16_bits else TF32_BITS)
        for lookups in tied:
            assert lookups.sums is not None
            sums[0] -= lookups.sums
            sums[2] *= 2  # What was rounded before they were added, and the sum.
        self._finished(
            RowsMeasured(self.row, sums, some_rows(gradient), equal_rows(memory, gradient), True)
        )
