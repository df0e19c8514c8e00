"""Goal: large tensors on CPUs are told as the kernel tells them, and the sum of their bits changes
with each bit.
Method: both ways over the same tensors, and float64; tensors with one bit flipped.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from bellwether._kernels.bits import sum_of_words
from bellwether._kernels.large_tensors import LEAST, cpu_statistics
from bellwether._kernels.memory import Memories
from bellwether._kernels.tensors import Entry, statistics
from bellwether._native import c_api

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNT = LEAST + 4099  # Rows of another length, and no whole word, at its end.


def both(scale: Optional[Tensor] = None, **parts: Any) -> list[dict[str, float]]:
    memory = Memories().of(CPU)
    entries = [Entry(**{n: t[:999] for n, t in parts.items()}), Entry(**parts)]
    found = (cpu_statistics(memory, entries, scale), statistics(memory, entries, CPU, scale))
    assert torch.equal(found[0][0], found[1][0])  # What is small.
    return [dict(zip(c_api.TENSOR_STATS, of[1].tolist())) for of in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-16])
def test_both_ways_are_equal(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(COUNT).mul_(size).to(dtype)
    x[5::7] = 0
    for part, scale in (("grad", None), ("grad", torch.tensor(1024.0)), ("weight", None)):
        ours, theirs = both(scale, **{part: x})
        for stat, value in theirs.items():
            if stat not in ("weight_bits", "weight_max"):
                assert ours[stat] == pytest.approx(value, rel=1e-6), (part, stat)
        by = 1.0 if scale is None else float(scale)
        exact = float(x.double().div(by).square().sum())
        assert ours[f"{part}_sumsq"] == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_the_kernel_takes_what_float32_cannot_add_up(value: float) -> None:
    x = torch.ones(COUNT)
    x[COUNT // 2] = value
    for part in ("grad", "weight"):
        ours, theirs = both(**{part: x})
        ours["weight_bits"] = theirs["weight_bits"]
        assert ours == theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_bit_changes_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(COUNT).to(dtype)
    whole = sum_of_words(tensor)
    raw = tensor.view(torch.uint8)
    for place in (*range(8), len(raw) // 2, *range(len(raw) - 9, len(raw))):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert sum_of_words(tensor) != whole
            raw[place] ^= 1 << bit
    assert sum_of_words(tensor) == whole


def test_opposite_changes_do_not_cancel() -> None:
    tensor = torch.randn(COUNT)
    whole = sum_of_words(tensor)
    bits = tensor.view(torch.int32)
    for one, other in ((0, 1), (0, 2), (0, 1 << 17), (0, 1 << 18), (7, COUNT - 1)):
        bits[one] += 1
        bits[other] -= 1
        assert sum_of_words(tensor) != whole
        bits[one] -= 1
        bits[other] += 1
    assert sum_of_words(tensor) == whole


def test_words_that_do_not_lie_at_words_have_no_sum() -> None:
    assert sum_of_words(torch.randn(COUNT)[1:]) is None
    ours, theirs = both(weight=torch.randn(COUNT + 1)[1:])
    assert ours == theirs
