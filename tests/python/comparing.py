"""Signals that were recorded, against the definition in fp64, and against another recording.

Sums agree to 1e-5 with the definition.  What is counted, and what only rounding makes, may be off
by as much as definitions.py says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bellwether._step import law_rows
from bellwether.settings import STATS

from definitions import Expected

# Signals of laws: which layers are asked is each monitor's own turn.  Compiled code is not asked
# about linear layers.
OF_LINEAR = frozenset(law_rows.SIGNALS)
LAWS = frozenset((*STATS["laws"], *law_rows.SIGNALS))
# Of all cases: signal -> rows within rounding of the threshold, rows that count, rows.
counted: dict[str, np.ndarray] = {}
_COUNTED = ("tied_rows_bf16", "tied_rows_eps", "tied_rows_eps_paper", "saturated_rows")
_OWN_LIMIT = (
    *_COUNTED, "rows", "sequences", "nonfinite_rows", "delta_bias_sum", "delta_bias_sumsq",
    "delta_error_abs_sum", "key_leak_sum",
)  # fmt: skip


def compare(signal: str, got: np.ndarray, expected: Expected, rows: float) -> None:
    want = expected.values[signal].numpy()
    got = got.astype(np.float64)
    assert np.isfinite(got).all(), (signal, got)
    if signal not in _OWN_LIMIT:
        assert np.allclose(got, want, rtol=1e-5, atol=1e-6), (signal, got, want)
        return
    slack = expected.slack[signal].numpy()
    assert (np.abs(got - want) <= slack).all(), (signal, got, want, slack)
    if signal in _COUNTED:
        assert (slack <= max(2.0, 0.02 * rows)).all(), "the case proves nothing"
        counted.setdefault(signal, np.zeros(3))
        counted[signal] += slack.sum(), want.sum(), rows * len(slack)


def assert_same_calls(found: dict[str, Any], want: dict[str, Any]) -> None:
    """Steps of two recordings have the same numbers.  Norms come by iteration, which each monitor
    begins anew; other signals of weights look at more steps than one.  Which layers the laws ask
    is each monitor's own turn."""
    for signal, values in want.items():
        if signal in law_rows.SIGNALS:
            continue
        if signal in STATS["laws"]:
            both = ~np.isnan(found[signal]) & ~np.isnan(values)
            np.testing.assert_array_equal(found[signal][both], values[both], signal)
            continue
        if signal in ("wq_sigma", "wk_sigma"):
            np.testing.assert_allclose(found[signal], values, rtol=1e-5, err_msg=signal)
        elif not signal.startswith(("wq_", "wk_", "qk_")) and not signal.endswith("_seconds"):
            np.testing.assert_array_equal(found[signal], values, signal)
