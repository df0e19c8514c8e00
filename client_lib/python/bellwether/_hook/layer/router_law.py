"""The law of a router that takes a softmax over all experts, or over the selected ones:

    in each row: the gradients of its logits add up to 0

since the probabilities do not change where all logits of a row grow alike.  What comes through the
softmax alone is asked.  So losses on the logits themselves, as for balance or a z-loss, are no part
of it.  Routers of sigmoids have no such law.

The nodes between the results and the product that makes the logits are walked.  Where the logits
come back on the same way as they go into the softmax, the gradient is that of the softmax's input.

With dp the gradient of the probabilities p, dz = p (dp - s) and s = sum of p dp.  p adds up to one
but for its rounding, so the sum of dz is off by that times |s|, which is at most the largest |dp|.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._kernels.memory import Memory, capturing
from ..._kernels.probe import DTYPES
from ..._util.guard import harmless
from ..hosts import LinearHost
from ..running import being_traced, checkpointed
from .edge_tap import CHECKPOINTED, IN_GRAPH, OTHER_TYPE, OnceTap, VectorLaw, VectorsMeasured
from .linear_tap import PRODUCTS, VIEWS
from .readable import readable, wrapped
from .row_sums import over_columns, significand_bits

LAW = "dlogits:experts"
SOFTMAX = "SoftmaxBackward0"
COPIES = (*VIEWS, "ToCopyBackward0")
# Between the product and the softmax: with them a row's logits still grow alike.
_BELOW = (*COPIES, "TopkBackward0", "GatherBackward0")
_NODES_MAX = 64
_FP32 = 2.0**-20  # What sums and quotients in float32 may lose.
_SMALL = 2.0**-60  # Sums of absolute values below it are of gradients that may underflow.
OTHER_ROUTER = "its weights are not known to come from a softmax of its logits"


def is_router(module: nn.Module) -> bool:
    of = type(module)
    return (
        of.__module__.startswith("transformers.")
        and of.__name__.endswith("Router")
        and not isinstance(module, nn.Linear)
        and "forward" not in vars(module)
    )


def _name(node: Any) -> str:
    return str(node.name())


def _walk(nodes: list[Any], ends: Callable[[Any], bool]) -> Optional[list[Any]]:
    """All nodes behind these, themselves included, up to those at which it ends; None if there are
    too many."""
    found: list[Any] = []
    left = list(nodes)
    while left:
        node = left.pop()
        if node in found:
            continue
        if len(found) >= _NODES_MAX:
            return None
        found.append(node)
        if not ends(node):
            left += [following for following, _ in node.next_functions if following is not None]
    return found


class Way:
    """From the logits to the weights of the experts.

    softmaxes  their nodes
    gradients  nodes and places: what they return there is the gradient of logits
    raw        of the results, the logits themselves
    """

    def __init__(
        self, softmaxes: list[Any], gradients: list[tuple[Any, int]], raw: list[Tensor]
    ) -> None:
        self.softmaxes, self.gradients, self.raw = softmaxes, gradients, raw


def way(results: list[Tensor]) -> Optional[Way]:
    """None where the law is not known to hold."""
    raw: list[Tensor] = []
    softmaxes: list[Any] = []
    shared: set[Any] = set()
    for result in results:
        nodes = _walk([result.grad_fn], lambda n: _name(n) in (SOFTMAX, *PRODUCTS))
        if nodes is None:
            return None
        ends = [n for n in nodes if _name(n) in PRODUCTS]
        mine = [n for n in nodes if _name(n) == SOFTMAX]
        if ends and not mine and all(_name(n) in (*COPIES, *PRODUCTS) for n in nodes):
            raw.append(result)
            shared |= set(nodes) - set(ends)
        elif mine and not ends:
            softmaxes += [n for n in mine if n not in softmaxes]
        else:
            return None
    below = _walk(softmaxes, lambda n: _name(n) in PRODUCTS)
    if not softmaxes or below is None:
        return None
    names = [_name(n) for n in below if n not in softmaxes]
    if any(name not in (*_BELOW, *PRODUCTS) for name in names):
        return None
    products = [n for n in below if _name(n) in PRODUCTS]
    # 0 is that of the rows.
    if len(products) != 1 or any(int(node._saved_dim) == 0 for node in softmaxes):
        return None
    gradients = [
        (node, at)
        for node in below
        for at, (following, _) in enumerate(node.next_functions)
        if following is products[0]
    ]
    if any(node in shared for node in below):
        gradients = [(node, 0) for node in softmaxes]
    return Way(softmaxes, gradients, raw)


class RouterTap(OnceTap):
    def __init__(
        self, host: LinearHost, row: int, finished: Callable[[VectorsMeasured], None],
        left_out: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        super().__init__(host, row, finished, left_out)
        self._raw: list[Tensor] = []
        self._waits: set[Any] = set()
        self._of_p: list[Tensor] = []
        self._of_logits: list[Tensor] = []

    def _forget(self) -> None:
        self._raw, self._of_p, self._of_logits, self._waits = [], [], [], set()

    def output(self, args: Any, output: Any) -> None:
        """The module's forward is over."""
        if not self._waiting():
            return
        given = output if isinstance(output, (tuple, list)) else (output,)
        results = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
        if not results:
            return
        self._begin(lambda: self._hook(results))

    def _hook(self, results: list[Tensor]) -> Optional[str]:
        if being_traced() or capturing() or any(wrapped(t) for t in results):
            return IN_GRAPH
        if checkpointed():
            return CHECKPOINTED
        found = way(results)
        if found is None:
            return OTHER_ROUTER
        self._raw = [t.detach() for t in found.raw]
        places: dict[Any, list[int]] = {node: [] for node in found.softmaxes}
        for node, at in found.gradients:
            places.setdefault(node, []).append(at)
        self._waits = set(range(len(places)))
        for key, (node, at_places) in enumerate(places.items()):
            is_softmax = node in found.softmaxes
            node.register_hook(functools.partial(self._gradients, key, is_softmax, at_places))
        return None

    @harmless("a router's gradients")
    def _gradients(
        self, key: int, softmax: bool, places: list[int], inputs: Any, outputs: Any
    ) -> None:
        if not self._open or not self.host.live() or key not in self._waits or capturing():
            return
        start = time.perf_counter()
        self._waits.discard(key)
        self._of_p += [t for t in outputs if softmax and t is not None]
        self._of_logits += [inputs[at] for at in places if inputs[at] is not None]
        if not self._waits:
            raw, of_p, of_logits = self._raw, self._of_p, self._of_logits
            self._forget()
            tensors = [*raw, *of_p, *of_logits]
            if any(wrapped(t) or not readable(t) or t.dtype not in DTYPES for t in tensors):
                self._left_out(self.row, OTHER_TYPE)
            elif of_p and of_logits:
                with torch.no_grad():
                    memory = self.host.memories.of(of_logits[0].device)
                    self._finished(_measured(memory, self.row, raw, of_p, of_logits))
        self.host.hook_seconds += time.perf_counter() - start


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1]).contiguous()


def _measured(
    memory: Memory, row: int, raw: list[Tensor], of_p: list[Tensor], of_logits: list[Tensor]
) -> VectorsMeasured:
    # float64 [4, rows] of each part: sums, sizes, distances of neighbours, variance.
    parts: Any = [over_columns(memory, _rows(t)) for t in of_logits]
    sums, sizes, ulps, variance = sum(parts)
    off: Any = sum(
        _rows(t).abs().amax(1).double() * (2.0 ** -(significand_bits(t) + 1) + _FP32) for t in of_p
    )
    alike = ulps / 2 + off + torch.where(sizes < _SMALL, sizes, 0.0)
    counts = None
    if raw:
        given = sum(t.isfinite().logical_not().sum() for t in (*raw, *of_p))
        made = sum(t.isfinite().logical_not().sum() for t in of_logits)
        counts = torch.stack([torch.as_tensor(given), torch.as_tensor(made)]).double()
    overflows = any(t.dtype == torch.float16 for t in (*of_p, *of_logits))
    law = VectorLaw(LAW, sums, variance, alike)
    return VectorsMeasured(row, [[law]], None, counts, overflows)
