"""What a module returns, or is given, in a sampled step, and the gradient of what it is given.

Nothing is added to the graph: a hook on the tensor that the module is given sees its gradient, the
sum over all that it is used for.  Tensors are read where they are, and none is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, Optional

import torch
from torch import Tensor

from ..._kernels.activations import STATS, add_activation
from ..._kernels.memory import capturing
from ..._kernels.probe import DTYPES
from ..._util.guard import harmless
from ..hosts import LinearHost
from ..running import being_traced, checkpointed
from .edge_tap import CHECKPOINTED, IN_GRAPH, OTHER_TYPE
from .logits import add_logits, new_logits
from .readable import readable, wrapped

OTHER_RESULT = "what it returns does not begin with a tensor"
OTHER_INPUT = "what it is given does not begin with a tensor"
OTHER_WIDTH = "its calls have other numbers of channels"


class Activation:
    """What one row has in a step, on the device.

    x, grad   float64 [STATS], added to
    logits    float64, as logits.py has them, where x is that
    of_mean   the mean over tokens is measured, too
    """

    def __init__(
        self, row: int, x: Tensor, grad: Tensor, of_logits: bool = False, of_mean: bool = False
    ) -> None:
        self.row, self.x, self.grad = row, x, grad
        self._of_mean, self._tokens = of_mean, 0
        self._total: Optional[Tensor] = None  # float64 [channels], over tokens.
        self.logits = new_logits(x.device) if of_logits else None
        self.calls = 0  # That are in x.
        self.gradients = 0
        self.left_out: Optional[str] = None
        self._channels: Optional[Tensor] = None

    def add(self, host: LinearHost, x: Tensor, gradient: bool) -> None:
        """x  of a call, or its gradient"""
        out = self.grad if gradient else self.x
        if x.dtype not in DTYPES or x.device != out.device or not readable(x):
            self.left_out = OTHER_TYPE
            return
        if x.dim() == 0 or x.numel() == 0:
            return
        with host.lock:
            channels = None if gradient else self._of_channels(x)
            add_activation(host.memories.of(x.device), x, out, channels)
        if self._of_mean and not gradient:
            self._add_tokens(x)
        if self.logits is not None and not gradient and x.shape[-1] > 1:
            add_logits(x, self.logits)
        if gradient:
            self.gradients += 1
        else:
            self.calls += 1

    def _add_tokens(self, x: Tensor) -> None:
        rows = torch.nan_to_num(x.reshape(-1, x.shape[-1]), 0.0, 0.0, 0.0)
        total = rows.sum(0, dtype=torch.float32).double()
        if self._total is None:
            self._total = torch.zeros_like(total)
        if self._total.shape == total.shape:
            self._total += total
            self._tokens += rows.shape[0]

    def mean_sumsq(self) -> Optional[Tensor]:
        """Tokens times the squared norm of their mean, float64 [1]; None: not asked for."""
        if self._total is None:
            return None
        return self._total.square().sum().reshape(1) / self._tokens

    def _of_channels(self, x: Tensor) -> Optional[Tensor]:
        if self._channels is None:
            self._channels = torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
        if self._channels.shape[0] != x.shape[-1]:
            self.left_out = OTHER_WIDTH
            return None
        return self._channels


def new_activations(
    rows: list[int], device: torch.device, of_logits: Collection[int] = (),
    of_mean: Collection[int] = (),
) -> list[Activation]:  # fmt: skip
    """All in one piece of memory.  of_logits, of_mean: rows of which more is measured"""
    slab = torch.zeros(len(rows), 2, STATS, dtype=torch.float64, device=device)
    return [
        Activation(row, x, grad, row in of_logits, row in of_mean)
        for row, (x, grad) in zip(rows, slab)
    ]


class BeginTap:
    """Of a module whose next forward may begin a step.

    begins  called before it; afterwards the taps that the step has are told of the call
    """

    def __init__(self, begins: Callable[[], None], told: Callable[[Any], None]) -> None:
        self._begins, self._told = begins, told
        self._open = True

    def close(self) -> None:
        self._open = False

    def input(self, args: Any) -> None:
        """The module's forward begins."""
        if self._open and torch.is_grad_enabled() and not capturing():
            self._open = False
            self._begins()
            self._told(args)

    def output(self, args: Any, output: Any) -> None:
        """Its forward is over."""


class ActivationTap:
    """
    of_input    the activation is what the module is given, else what it returns
    gradients   the gradient of what it is given is measured, too
    """

    def __init__(
        self, host: LinearHost, into: Activation, of_input: bool = False, gradients: bool = False
    ) -> None:
        self.host, self._into = host, into
        self._of_input, self._gradients = of_input, gradients
        self._calls = 0
        self._begun = False  # A call whose beginning was seen.
        self._runs = False  # It is measured.
        self._open = True

    def close(self) -> None:
        """Nothing more is measured."""
        self._open = False

    def input(self, args: Any) -> None:
        """The module's forward begins."""
        self._begun, self._runs = True, False
        if not self._open or not torch.is_grad_enabled() or not self.host.live():
            return
        start = time.perf_counter()
        self._runs = self._measures()
        x = args[0] if args else None
        if self._runs and (self._of_input or self._gradients):
            if not isinstance(x, Tensor):
                self._into.left_out = OTHER_INPUT
            elif self._of_input:
                self._add(x, gradient=False)
            elif x.grad_fn is not None and not wrapped(x):
                self._hear(x)
        self.host.hook_seconds += time.perf_counter() - start

    def _measures(self) -> bool:
        if self.host.in_backward() or checkpointed():
            self._into.left_out = CHECKPOINTED
            return False
        if being_traced() or capturing():
            self._into.left_out = IN_GRAPH
            return False
        self._calls += 1
        return self.host.samples_call(self._calls - 1)

    def output(self, args: Any, output: Any) -> None:
        """Its forward is over.  Where the step began within it its beginning was not seen."""
        begun, self._begun = self._begun, False
        if not self._open or self._of_input or not torch.is_grad_enabled():
            return
        if not (self._runs if begun else self.host.live() and self._measures()):
            return
        start = time.perf_counter()
        x = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(x, Tensor):
            self._add(x, gradient=False)
        else:
            self._into.left_out = OTHER_RESULT
        self.host.hook_seconds += time.perf_counter() - start

    def _add(self, x: Tensor, gradient: bool) -> None:
        with torch.no_grad():
            self._into.add(self.host, x.detach(), gradient)

    def _hear(self, x: Tensor) -> None:
        told: list[bool] = []  # Once for each call.

        @harmless("a block's gradient")
        def hear(gradient: Tensor) -> None:
            if told or not self._open or not self.host.live() or capturing():
                return
            told.append(True)
            start = time.perf_counter()
            self._add(gradient, gradient=True)
            self.host.hook_seconds += time.perf_counter() - start

        x.register_hook(hear)  # type: ignore[no-untyped-call]
