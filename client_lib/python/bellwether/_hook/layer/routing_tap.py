"""What a router does in a sampled step: how many tokens each expert gets, how sure it is of them,
and how alike two of its experts are.

The results of the forward alone are read, and sums of them stay on the device.  So a router that is
frozen, or that is called without gradients by a reentrant checkpoint, is no other case.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from ..._kernels.memory import capturing
from ..._util.guard import in_words
from ..hosts import LinearHost
from ..running import apart, being_traced, checkpointed
from .readable import readable, wrapped
from .routers import Routed, Router, by_reading

CHUNK = 1 << 22  # Logits that are taken at once: what is made of them is memory.
# Why a call is left out.
IN_GRAPH = "it is captured into a CUDA graph, or traced"
OTHER_TYPE = "its results are of other types or layouts"
OTHER_RESULT = "its result does not say what it has chosen"
UNREAD = "its result could not be read"
CACHED = "a checkpoint keeps some of what is computed there"
EMPTY = "it was given no token"

# Behind the loads of all experts, and the numbers of dropped ones.
ENTROPY, LOGIT_MAX, COSINE = 0, 1, 2
TAIL = 3


class Routing:
    """Of one router in one step, still on the device.

    sums    float64 [2 experts + TAIL]
    tokens  that it was given
    """

    def __init__(self, row: int, router: Router) -> None:
        self.row, self.router = row, router
        self.sums: Optional[Tensor] = None
        self.tokens = 0
        self.with_load = self.with_dropped = self.with_entropy = self.with_peak = True
        self.with_cosine = False

    def add(self, tokens: int, routed: Routed, sums: Tensor) -> None:
        self.tokens += tokens
        self.with_load &= routed.chosen is not None or routed.loads is not None
        self.with_dropped &= routed.kept is not None
        self.with_entropy &= routed.logits is not None
        self.with_peak &= routed.logits is not None and routed.peak
        if self.sums is None:
            self.sums = sums
            return
        largest = self.sums[-TAIL + LOGIT_MAX :].maximum(sums[-TAIL + LOGIT_MAX :])
        self.sums += sums
        self.sums[-TAIL + LOGIT_MAX :] = largest


def _counts(at: Tensor, experts: int, of: Optional[Tensor] = None) -> Any:
    """float64 [experts]: how often each number is there; others are not counted."""
    # The first and the last place take the others.  Each operation counts: this is of every router.
    flat = at.reshape(-1).long().clamp(-1, experts).add_(1)
    if of is None:
        ones = torch.ones((), dtype=torch.float64, device=at.device).expand(flat.shape[0])
    else:
        ones = of.reshape(-1).double()
    found = torch.zeros(experts + 2, dtype=torch.float64, device=at.device)
    return found.scatter_add_(0, flat, ones)[1:-1]


def _entropy(logits: Tensor) -> Tensor:
    """float64 []: the sum over rows of the entropy of their softmax."""
    rows = logits.reshape(-1, logits.shape[-1])
    step = max(CHUNK // max(rows.shape[1], 1), 1)
    parts = [
        torch.special.entr(part.softmax(-1, dtype=torch.float32)).sum(dtype=torch.float64)
        for part in torch.split(rows, step)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def measure(routed: Routed, experts: int, device: torch.device) -> Tensor:
    """As Routing has it, but for the cosine.  What is not there is 0."""
    found = torch.zeros(2 * experts + TAIL, dtype=torch.float64, device=device)
    found[-TAIL + COSINE].fill_(-2.0)  # A number that is assigned is copied there, and waited for.
    if routed.chosen is not None:
        found[:experts] = _counts(routed.chosen, experts)
        if routed.kept is not None:
            found[experts : 2 * experts] = _counts(routed.chosen, experts, routed.kept == 0)
    elif isinstance(routed.loads, Tensor):
        found[:experts] = routed.loads
    elif routed.loads is not None:  # The host knows them.
        known = torch.tensor([float(n) for n in routed.loads], dtype=torch.float64, device="cpu")
        known = known.pin_memory() if device.type == "cuda" else known
        found[:experts].copy_(known, non_blocking=True)
    if routed.logits is not None:
        found[-TAIL + ENTROPY] = _entropy(routed.logits)
        found[-TAIL + LOGIT_MAX] = routed.logits.amax()
    return found


def row_cosine(weight: Tensor) -> Tensor:
    """float64 []: the largest cosine of two rows.  In float64, which no setting of torch rounds."""
    rows = weight.detach().double()
    rows = rows / rows.square().sum(1, keepdim=True).sqrt().clamp(min=1e-300)
    return (rows @ rows.mT).fill_diagonal_(-2.0).amax()


class RoutingTap:
    """
    routing   where it is added to
    cosine    whether the weight is asked, too
    takes     whether a call is measured, after so many that were
    """

    def __init__(
        self, host: LinearHost, routing: Routing, cosine: bool, takes: Callable[[int], bool],
        left_out: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self.host, self.routing = host, routing
        self._cosine, self._takes, self._left_out = cosine, takes, left_out
        self._open, self._calls, self._in_forward = True, 0, False

    def close(self) -> None:
        """Nothing more is measured."""
        self._open = False

    def input(self, args: Any) -> None:
        """Nothing of it is needed."""

    def output(self, args: Any, output: Any) -> None:
        """The router's forward is over."""
        if not self._open or not self.host.live() or not torch.is_grad_enabled():
            return
        # What a checkpoint computes again was measured when it was computed first.
        recomputed = self.host.in_backward()
        if (recomputed and self._in_forward) or not self._takes(self._calls):
            return
        start = time.perf_counter()
        why = self._measure(output)
        if why is not None:
            self._left_out(self.routing.router.name, why)
        else:
            self._calls += 1
            self._in_forward |= not recomputed
        self.host.hook_seconds += time.perf_counter() - start

    def _measure(self, output: Any) -> Optional[str]:
        """Says why not."""
        if being_traced() or capturing():
            return IN_GRAPH
        if checkpointed() and torch._C._len_torch_dispatch_stack() > 0:
            return CACHED  # What is added there would be found where the recomputation looks.
        with torch.no_grad(), apart():
            try:
                return self._read(output)
            except Exception as e:  # Another release's router, or what the user gave as read=.
                return f"{UNREAD}: {in_words(e)}"

    def _read(self, output: Any) -> Optional[str]:
        router = self.routing.router
        routed = by_reading(router.read, output, router.experts, router.top_k)
        if routed is None:
            return OTHER_RESULT
        tensors = [routed.logits, routed.chosen, routed.kept, routed.loads]
        there = [t.detach() for t in tensors if isinstance(t, Tensor)]
        if any(wrapped(t) or not readable(t) for t in there):
            return OTHER_TYPE
        rows = routed.logits if routed.logits is not None else routed.chosen
        if rows is not None and rows.numel() == 0:
            return EMPTY
        if not there and routed.loads is None:
            return OTHER_RESULT
        device = there[0].device if there else torch.device("cpu")
        sums = measure(routed, router.experts, device)
        self._add_cosine(sums)
        tokens = rows.numel() // rows.shape[-1] if rows is not None else 0
        self.routing.add(tokens, routed, sums)
        return None

    def _add_cosine(self, sums: Tensor) -> None:
        weight = self.routing.router.weight() if self._cosine else None
        if weight is None or self.routing.with_cosine:
            return
        usable = not wrapped(weight) and readable(weight) and weight.is_floating_point()
        if usable and weight.device == sums.device:
            sums[-TAIL + COSINE] = row_cosine(weight)
            self.routing.with_cosine = True
