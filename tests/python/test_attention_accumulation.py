"""Goal: the errors of fa's gradients point one way and add up; those of hp and hpm do not.
Method: one layer with a fixed input X and fresh noise on the scores, the values and dO in each of
100 steps.  The error is that of dW_Q = X^T dQ against double precision, summed over the steps.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import bellwether

from attention_reference import Features, plain, with_gradients

BATCH, HEADS, ROWS, KEYS, DIM, WIDTH, STEPS = 8, 1, 32, 128, 64, 48, 100


class Layer:
    """Fresh bf16 q, k, v and dO of one adverse kind each step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.generator = torch.Generator().manual_seed(0)
        self.x = self._randn(BATCH * ROWS, WIDTH) + 1
        self.direction = torch.ones(DIM) / math.sqrt(DIM)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A broad row's logits have a spread of 1e-3.  Beside a sink the other keys together weigh
        1e-2, beside a tie of two 1e-3: there rounding O goes one way."""
        spread = 1e-3 if self.kind == "broad" else 0.3
        towards = self.direction * math.sqrt(DIM)
        q = towards + 0.02 * self._randn(BATCH, HEADS, ROWS, DIM)
        k = spread * self._randn(BATCH, HEADS, KEYS, DIM) + self.direction
        if self.kind != "broad":
            k[:, :, :2] += 11 * self.direction if self.kind == "tie" else 0
            k[:, :, 0] += 9.5 * self.direction if self.kind == "sink" else 0
            k[:, :, 1] = k[:, :, 0] if self.kind == "tie" else k[:, :, 1]
        v = (1 + 0.2 * self._randn(BATCH, HEADS, KEYS, DIM)).abs()
        d_o = 1 + 0.5 * self._randn(BATCH, HEADS, ROWS, DIM)
        q, k, v, d_o = (t.bfloat16() for t in (q, k, v, d_o))
        return q, k, v, d_o

    def summed_errors(self, modes: list[str]) -> dict[str, list[float]]:
        """sigma_max of the summed error of dW_Q after each step, mode by mode."""
        total = {mode: torch.zeros(WIDTH, HEADS * DIM, dtype=torch.float64) for mode in modes}
        found: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(STEPS):
            q, k, v, d_o = self.inputs()
            _, want, *_ = with_gradients(
                lambda *t: plain(*t, Features()), (q, k, v), d_o, torch.float64
            )
            for mode in modes:

                def ours(q: Tensor, k: Tensor, v: Tensor, mode: str = mode) -> Tensor:
                    return bellwether.attention(q, k, v, mode=mode)

                _, dq, *_ = with_gradients(ours, (q, k, v), d_o)
                total[mode] += self.x.double().T @ (dq - want).transpose(1, 2).flatten(
                    0, 1
                ).flatten(1)
                found[mode].append(float(torch.linalg.matrix_norm(total[mode], ord=2)))
        return found


def slope(errors: list[float]) -> float:
    """Of log error over log steps, from step 10 on: 1 adds up, 1/2 walks at random."""
    step = torch.arange(10, STEPS + 1).double().log()
    error = torch.tensor(errors[9:]).double().log()
    step, error = step - step.mean(), error - error.mean()
    return float((step * error).sum() / (step * step).sum())


@pytest.mark.parametrize("kind", ["tie", "sink", "broad"])
def test_the_error_of_fa_adds_up_and_no_other(kind: str) -> None:
    errors = Layer(kind).summed_errors(["fa", "hp", "hpm"])
    print(kind, {m: (f"{e[-1]:.3g}", f"{slope(e):.3f}") for m, e in errors.items()})
    assert 0.9 <= slope(errors["fa"]) <= 1.1  # 100 draws leave up to 0.07 of scatter.
    for mode in ("hp", "hpm"):
        assert errors[mode][-1] <= 1e-3 * errors["fa"][-1]
