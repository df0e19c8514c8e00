"""What was measured of activations in one step, as blocks of a frame."""

from __future__ import annotations

import array
import math
from typing import Optional

from .._hook.layer.activation_tap import Activation
from .._hook.layer.logits import STATS as LOGIT_STATS
from .._native import c_api
from .._native.run_client import Block, RunClient
from .law_rows import LawRows, told
from .tapped_modules import Arriving

SIGNALS = (
    "module_elements",
    "module_sumsq",
    "module_largest",
    "module_largest_ratio",
    "module_nonfinite",
    "module_fourths",
    "module_top_sumsq",
    "module_top_channel",
)
GRADIENT_SIGNALS = ("module_grad_elements", "module_grad_sumsq", "module_grad_nonfinite")
LOGIT_SIGNALS = tuple(f"logits_{name}" for name in LOGIT_STATS)
MEAN_SIGNALS = ("module_mean_sumsq",)
_RANGES_MAX = 4  # Of rows in a frame; a block each for each signal.


def _values(stats: list[float]) -> tuple[float, ...]:
    """In the order of SIGNALS."""
    of = dict(zip(c_api.MODULE_STATS, stats))
    finite, sumsq = of["elements"] - of["nonfinite"], of["sumsq"]
    mean = sumsq / finite if finite else 0.0
    ratio = of["largest"] / math.sqrt(mean) if mean else 0.0
    fourths = of["fourths"] / mean if mean else 0.0
    return (
        finite, sumsq, of["largest"], ratio, of["nonfinite"], fourths, of["top_sumsq"], of["top"],
    )  # fmt: skip


def _of_gradient(stats: list[float], scale: float) -> tuple[float, ...]:
    """In the order of GRADIENT_SIGNALS."""
    of = dict(zip(c_api.MODULE_STATS, stats))
    return of["elements"] - of["nonfinite"], of["sumsq"] / scale**2, of["nonfinite"]


class ActivationSample:
    """
    names       of all rows
    divided_by  what the ranks' gradients are divided by when they are added up
    """

    def __init__(
        self, names: list[str], measured: list[Activation], divided_by: float = 1.0
    ) -> None:
        self._names, self._measured, self._divided_by = names, measured, divided_by
        means = [(of, t) for of in measured if (t := of.mean_sumsq()) is not None]
        self._with_mean = [of for of, _ in means]
        logits = (of.logits for of in measured)
        self._arriving = Arriving(
            [t for of in measured for t in (of.x, of.grad)]
            + [t for t in logits if t is not None]
            + [t for _, t in means]
        )

    def ready(self) -> bool:
        return self._arriving.ready()

    def blocks(
        self, client: Optional[RunClient], rows: LawRows, scale: float, gradients: bool, room: int
    ) -> list[Block]:
        """For at most so many blocks.  Must be ready.

        rows       give the names their numbers
        scale      what the loss was multiplied by
        gradients  whether what comes from gradients is told
        """
        values = self._arriving.values()
        logits = iter(values[2 * len(self._measured) :])
        means = dict(zip(map(id, self._with_mean), values[len(values) - len(self._with_mean) :]))
        table: dict[int, tuple[float, ...]] = {}
        missing = (c_api.NOT_MEASURED,)
        for at, of in enumerate(self._measured):
            of_words = next(logits) if of.logits is not None else None
            if of_words is not None and not of_words[0]:
                of_words = None
            number = rows.row(self._names[of.row])
            if number is not None:
                x = _values(values[2 * at]) if of.calls else missing * len(SIGNALS)
                known = gradients and of.gradients > 0
                grad = (
                    _of_gradient(values[2 * at + 1], scale * self._divided_by)
                    if known
                    else missing * len(GRADIENT_SIGNALS)
                )
                words = missing * len(LOGIT_SIGNALS)
                table[number] = (
                    x + grad + (words if of_words is None else tuple(of_words))
                    + tuple(means.get(id(of), missing))
                )  # fmt: skip
        if client is None:
            return []
        signals = (*SIGNALS, *GRADIENT_SIGNALS, *LOGIT_SIGNALS, *MEAN_SIGNALS)
        found = []
        for of_range in rows.sent(client, table, min(_RANGES_MAX, room // len(signals))):
            lines = (table.get(n, missing * len(signals)) for n in of_range)
            for signal, column in zip(signals, zip(*lines)):
                found += told(signal, array.array("f", column), of_range.start)
        return found
