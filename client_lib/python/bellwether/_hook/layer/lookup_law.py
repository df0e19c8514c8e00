"""The law of an embedding: each token's gradient goes to the row of its word, and to no other.

For any weights w of the rows

    sum over the rows of w dE = sum over the tokens of w[word] dx        a vector, as wide as a row

Tokens of padding_idx give nothing.  The weights are fixed, of random signs and of sizes from 1 to
2.  So a row that was written in place of another shows.  Roundings that are alike in many rows have
no common direction.

A row whose word came n times has had n - 1 sums rounded, each by half an ulp of the sum of absolute
values at most, perhaps all in one direction.  So rows are asked apart: those of words that came
once or not at all, which are copies, those that came a few times, and those that came often.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Optional

import torch
from torch import Tensor

from ..._kernels.memory import capturing
from ..._kernels.probe import DTYPES, mixed
from ..._util.guard import harmless
from ..running import being_traced, checkpointed
from .edge_tap import CHECKPOINTED, IN_GRAPH, OTHER_TYPE, OnceTap, VectorLaw, VectorsMeasured
from .head_tap import LOOKUP, node_named
from .readable import readable, wrapped
from .row_sums import chunk, largest_power, least_normal, power_of_two, significand_bits

FEW = 8  # Times that a word comes which does not come often.
LAWS = ("dW:once", "dW:few", "dW:often")
_FLUSHED = 2.0**-126
_FP64 = 2.0**-44  # Of sums in float64, of as many terms as there may be.
OTHER_LOOKUP = "its result is not that of a lookup alone"
SPARSE = "its gradient is sparse"
BY_FREQUENCY = "its gradient is divided by how often a word comes"


class LookupTap(OnceTap):
    def output(self, args: Any, output: Any) -> None:
        """The module's forward is over."""
        if not self._waiting():
            return
        words = args[0] if args else None
        if not isinstance(words, Tensor) or not isinstance(output, Tensor):
            return
        if not output.requires_grad:
            return
        self._begin(lambda: self._hook(words, output))

    def _hook(self, words: Tensor, output: Tensor) -> Optional[str]:
        if being_traced() or capturing() or wrapped(output) or wrapped(words):
            return IN_GRAPH
        if checkpointed():
            return CHECKPOINTED
        node: Any = node_named(output, LOOKUP)
        if node is None or words.is_floating_point():
            return OTHER_LOOKUP
        if node._saved_sparse:
            return SPARSE
        if node._saved_scale_grad_by_freq:
            return BY_FREQUENCY
        # Not what the module was given: OPT's adds 2 to its positions.
        words = node._saved_indices
        if wrapped(words):
            return IN_GRAPH
        padding = int(node._saved_padding_idx)
        node.register_hook(functools.partial(self._gradient, words.detach(), padding))
        return None

    @harmless("an embedding's gradients")
    def _gradient(self, words: Tensor, padding: int, inputs: Any, outputs: Any) -> None:
        """Behind the backward of the lookup: (dE,) and what came to its result."""
        if not self._open or not self.host.live() or capturing():
            return
        start = time.perf_counter()
        d_e, d_x = inputs[0], outputs[0]
        if d_e is not None and d_x is not None:
            why = self._measure(words, padding, d_e, d_x)
            if why is not None:
                self._left_out(self.row, why)
        self.host.hook_seconds += time.perf_counter() - start

    def _measure(self, words: Tensor, padding: int, d_e: Tensor, d_x: Tensor) -> Optional[str]:
        # That nobody has changed the words since is what autograd sees to.
        if any(wrapped(t) or not readable(t) for t in (words, d_e, d_x)) or d_e.dim() != 2:
            return OTHER_TYPE
        if d_e.dtype not in DTYPES or d_x.dtype != d_e.dtype or words.device != d_x.device:
            return OTHER_TYPE
        if d_x.shape != (*words.shape, d_e.shape[1]):
            return OTHER_TYPE
        with torch.no_grad():
            rows = d_x.reshape(-1, d_x.shape[-1])
            laws, counts = lookup_laws(words.reshape(-1), padding, d_e, rows)
        self._finished(VectorsMeasured(self.row, [laws], None, counts, d_e.dtype == torch.float16))
        return None


def lookup_laws(
    words: Tensor, padding: int, d_e: Tensor, d_x: Tensor
) -> tuple[list[VectorLaw], Tensor]:
    """Those of LAWS; and columns of dx whose sum is not finite, and of dE alone.

    words [n] integers, d_e [rows, d], d_x [n, d]
    """
    rows, d = d_e.shape
    device = d_e.device
    words = words.long()
    tokens = torch.arange(len(words), dtype=torch.int64, device=device)
    # Of equal words one token speaks for all.  Which one does not matter.
    speaker = words.new_empty(rows).index_put_((words,), tokens)[words]
    ones = torch.ones_like(words)
    times = torch.zeros_like(words).index_add_(0, speaker, ones)  # 0 of those that do not speak.
    of_row_times = words.new_zeros(rows).index_add_(0, words, ones)
    bits = mixed(torch.arange(rows, dtype=torch.int64, device=device))
    of_row = (1 + ((bits >> 1) & 0xFFFFFF).double() * 2.0**-24) * (2 * (bits & 1) - 1)
    group = (of_row_times > 1).long() + (of_row_times > FEW).long()
    if 0 <= padding < rows:
        group[padding : padding + 1].zero_()
    laws = torch.arange(len(LAWS), dtype=torch.int64, device=device)[:, None]
    weights = torch.where(group == laws, of_row, 0.0)
    of_token = torch.where(words == padding, 0.0, weights[:, words])  # [laws, tokens]

    made = d_x.new_zeros(len(LAWS), d, dtype=torch.float64)
    given, sizes, variance = torch.zeros_like(made), torch.zeros_like(made), torch.zeros_like(made)
    at_once = chunk(d_e)
    step = max(1, at_once // max(1, d))
    for at in range(0, rows, step):
        made += weights[:, at : at + step] @ d_e[at : at + step].double()
    for at in range(0, len(words), step):
        some, of_some = d_x[at : at + step].double(), of_token[:, at : at + step]
        given += of_some @ some
        sizes += of_some.abs() @ some.abs()

    roundings = (of_token * (times - 1).clamp(min=0)).square().float()
    least = least_normal(d_e)
    width = max(1, at_once // max(1, len(words)))
    scale = largest_power(d_x)
    for at in range(0, d, width):
        columns = d_x[:, at : at + width].float().abs()
        sums = torch.zeros_like(columns).index_add_(0, speaker, columns)
        # By the largest element, so that squares stay in a float32's range.
        distances = power_of_two(sums).clamp(min=least) / scale
        variance[:, at : at + width] = (roundings @ distances.square()).double()
    half = scale.double() * 2.0 ** -(significand_bits(d_e) + 1)
    variance = variance * half.square() + (_FP64 * sizes).square()
    alike = torch.full_like(made, _FLUSHED * len(words))
    outside, inside = (t.isfinite().logical_not().any(0) for t in (given, made))
    return (
        [VectorLaw(*law) for law in zip(LAWS, made - given, variance, alike)],
        torch.stack([outside.sum(), (inside & ~outside).sum()]).double(),
    )
