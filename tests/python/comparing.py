"""A signal that was recorded, against the definition in fp64.

Counts are exact but for rows within fp32 rounding of a threshold.  Sums agree to 1e-5, and signed
bias sums to 1e-3 of the sum of absolute values.
"""

from __future__ import annotations

import numpy as np

from reference import Expected

# Of all cases: signal -> rows within rounding of the threshold, rows that count, rows.
counted: dict[str, np.ndarray] = {}


def compare(signal: str, got: np.ndarray, expected: Expected, rows: float) -> None:
    want = expected.values[signal].numpy()
    got = got.astype(np.float64)
    assert np.isfinite(got).all(), (signal, got)
    if signal in ("rows", "sequences", "nonfinite_rows"):
        assert (got == want).all(), (signal, got, want)
    elif signal in expected.unsure:
        slack = expected.unsure[signal].numpy()
        assert (np.abs(got - want) <= slack).all(), (signal, got, want, slack)
        assert (slack <= max(2.0, 0.02 * rows)).all(), "the case proves nothing"
        counted.setdefault(signal, np.zeros(3))
        counted[signal] += slack.sum(), want.sum(), rows * len(slack)
    elif signal == "delta_bias_sum":
        limit = 1e-3 * expected.scale["delta_bias_sum"].numpy()
        floor = 2.0**-22 * expected.scale["delta_lp"].numpy()  # fp32 kernels have no bias to see
        assert (np.abs(got - want) <= limit + floor).all(), (signal, got, want, limit)
    elif signal in ("delta_bias_sumsq", "delta_error_abs_sum"):
        floor = 2.0**-21 * expected.scale["delta_lp"].numpy()
        assert (np.abs(got - want) <= 1e-3 * np.abs(want) + floor).all(), (signal, got, want)
    elif signal == "key_leak_sum":
        floor = 1e-6 * expected.values["key_gradient_sum"].numpy()
        assert (np.abs(got - want) <= 1e-5 * want + floor).all(), (signal, got, want)
    else:
        assert np.allclose(got, want, rtol=1e-5, atol=1e-6), (signal, got, want)
