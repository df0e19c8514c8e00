"""Goal: add_probe() hands every part of a mask to the kernels as it is meant; sampled_rows() are
the rows that they sample; what does not fit is refused by field, value and range.

Method: each mask is also written out as one dense tensor, by other code, and must give the same
sums.  The kernels' own arithmetic has tests in tests/kernels.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from bellwether._kernels import probe
from bellwether._kernels.memory import HostMemory
from bellwether._kernels.probe import (
    ProbeMask,
    Sums,
    add_probe,
    sampled_rows,
    visible_keys,
)
from bellwether._native import c_api

B, H, KV, Q, K, D = 2, 4, 2, 12, 15, 8
SEED = 7


def operands(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)

    def normal(heads: int, tokens: int, dim: int) -> Tensor:
        return torch.randn(B, heads, tokens, dim, generator=g).to(dtype)

    return {"q": normal(H, Q, D), "k": normal(KV, K, D), "v": normal(KV, K, 5),
            "o": normal(H, Q, 5), "d_o": normal(H, Q, 5)}  # fmt: skip


def probed(mask: ProbeMask, rows: int = 0, **more: Any) -> dict[str, list[float]]:
    memory = HostMemory()
    sums = Sums(memory, H, KV)
    add_probe(sums, **operands(), scale=0.3, mask=mask, rows=rows, seed=SEED, **more)
    copy = memory.collect(False)
    return {name: list(sums.row(copy, name)) for name in (*c_api.PROBE_STATS, "key_coherence_sum")}


def dense(mask: ProbeMask) -> Tensor:
    """[B, H, Q, K]: what is added to a score, -inf where the key is hidden."""
    row, key = torch.arange(Q)[:, None], torch.arange(K)[None]
    diagonal = row + (0 if mask.top_left else K - Q)
    allowed = torch.ones(B, 1, Q, K, dtype=torch.bool)
    if mask.ranges is not None:
        begin, end, diagonal = (mask.ranges[..., i][:, None, :, None] for i in range(3))
        allowed = allowed & (key >= begin) & (key < end)
    if mask.causal:
        allowed = allowed & (key <= diagonal)
    if mask.window_left is not None:
        allowed = allowed & (key >= diagonal - mask.window_left)
    if mask.window_right is not None:
        allowed = allowed & (key <= diagonal + mask.window_right)
    bias = torch.zeros(B, H, Q, K).masked_fill(~allowed, -math.inf)
    if mask.tensor is None:
        return bias
    if mask.tensor.dtype == torch.bool:
        return bias.masked_fill(~mask.tensor, -math.inf)
    given = mask.tensor.float()
    return bias + given.masked_fill(given <= -9984, -math.inf)


def random_bool(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.6


def random_bias(*shape: int) -> Tensor:
    bias = torch.randn(*shape, generator=torch.Generator().manual_seed(4))
    return bias.masked_fill(~random_bool(*shape), -math.inf)


def documents() -> Tensor:
    row = torch.arange(Q)
    begin = row // 5 * 5
    return torch.stack([begin, begin + 5, row], -1).int()[None]


def lengths() -> Tensor:
    """Of keys, another in each sequence: one range for all rows."""
    return torch.tensor([[[0, 9, 0]], [[4, K, 0]]], dtype=torch.int32)


MASKS = {
    "none": ProbeMask(),
    "causal": ProbeMask(causal=True),
    "causal-top-left": ProbeMask(causal=True, top_left=True),
    "windows": ProbeMask(window_left=3, window_right=2),
    "own-key-alone": ProbeMask(window_left=0, window_right=0, top_left=True),
    "documents": ProbeMask(causal=True, ranges=documents()),
    "documents-windowed": ProbeMask(window_left=2, window_right=1, ranges=documents()),
    "key-lengths": ProbeMask(ranges=lengths()),
    "bool": ProbeMask(tensor=random_bool(B, 1, Q, K)),
    "bool-by-head": ProbeMask(tensor=random_bool(B, H, Q, K), causal=True),
    "key-padding": ProbeMask(tensor=random_bool(B, 1, 1, K), causal=True),
    "two-dimensions": ProbeMask(tensor=random_bool(Q, K)),
    "transposed": ProbeMask(tensor=random_bool(B, 1, K, Q).mT),
    "bias-float32": ProbeMask(tensor=random_bias(1, H, Q, K)),
    "bias-float64": ProbeMask(tensor=random_bias(B, H, Q, K).double(), window_left=5),
    "bias-bfloat16": ProbeMask(tensor=random_bias(B, 1, Q, K).bfloat16(), ranges=lengths()),
    "bias-float16": ProbeMask(tensor=random_bias(H, Q, K).half()),
    "minus-ten-thousand": ProbeMask(
        tensor=torch.where(random_bool(B, 1, 1, K), 0, -10000).bfloat16()
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("rows", [0, 5])
def test_equals_one_dense_tensor(name: str, rows: int) -> None:
    mask = MASKS[name]
    bias = dense(mask)
    seen = (bias > -math.inf).any(2)
    found = visible_keys(mask, operands()["q"], K)
    assert torch.equal(found.expand(B, H, K), seen)
    got = probed(mask, rows)
    assert got["rows"][0] > 0
    want = probed(ProbeMask(tensor=bias, visible=seen), rows)
    for stat, values in want.items():
        assert got[stat] == pytest.approx(values, rel=1e-6, abs=1e-9), stat
    narrowed = visible_keys(dataclasses.replace(mask, tensor=None), operands()["q"], K)
    assert narrowed.shape[1] == 1 or mask.tensor is not None


@pytest.mark.parametrize("name", MASKS)
def test_visible_keys_are_found_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_CHUNK", 40)
    found = visible_keys(MASKS[name], operands()["q"], K)
    assert torch.equal(found.expand(B, H, K), (dense(MASKS[name]) > -math.inf).any(2))


def test_common_mode_is_over_visible_keys() -> None:
    x, padding = operands(), random_bool(B, 1, 1, K)
    got = probed(ProbeMask(tensor=padding))
    weight = padding[:, 0, 0].double()[:, None, :, None]
    mean = (x["k"].double() * weight).sum(2) / weight.sum(2)
    score = 0.3 * torch.einsum("bhtd,bhd->bht", x["q"].double(), mean.repeat_interleave(2, 1))
    assert got["common_mode_sum"] == pytest.approx(score.abs().sum((0, 2)).tolist(), rel=1e-5)


def test_sinks_and_softcap_arrive() -> None:
    sinks = torch.tensor([0.0, 3.0, -math.inf, 1.0])
    plain, got = probed(ProbeMask()), probed(ProbeMask(), sinks=sinks.bfloat16())
    assert got["sink_sum"][2] == plain["sink_sum"][2] and got["sink_sum"][1] < plain["sink_sum"][1]
    assert got["logit_max"] == plain["logit_max"]
    assert max(probed(ProbeMask(), softcap=0.25)["logit_max"]) <= 0.25


@pytest.mark.parametrize("rows", [1, 5, 11])
def test_sampled_rows_are_the_kernels(rows: int) -> None:
    sample = c_api.kernels().bw_probe_sampled_row
    sample.restype, sample.argtypes = c_api.c_int64, [c_api.c_uint64] * 6
    for seed in (0, 5, (1 << 64) - 3, -1):
        got = sampled_rows(B, H, Q, rows, seed, head_offset=6)
        for b, h, i in itertools.product(range(B), range(H), range(rows)):
            want = sample(c_api.c_uint64(seed), b, 6 + h, i, rows, Q)
            assert got[b, h, i] == want
    assert sampled_rows(1, 1, 1 << 30, 3, 1).max() < 1 << 30


@pytest.mark.parametrize("rows", [0, Q, Q + 1])
def test_all_rows_are_sampled(rows: int) -> None:
    assert sampled_rows(B, H, Q, rows, 1).tolist() == [[list(range(Q))] * H] * B


@pytest.mark.parametrize("rows", [0, 5])
def test_a_mask_by_sampled_row_equals_that_by_token(rows: int) -> None:
    whole = random_bias(B, H, Q, K)
    at = sampled_rows(B, H, Q, rows, SEED)[..., None].expand(B, H, -1, K)
    seen = (whole > -math.inf).any(2)
    by_sample = ProbeMask(tensor=whole.gather(2, at), by_sample=True, visible=seen)
    assert probed(by_sample, rows) == probed(ProbeMask(tensor=whole), rows)


@pytest.mark.parametrize(
    "mask, sinks, said",
    [
        (dict(window_left=-1), None, "window_left is -1, must be an integer of 0 to 2147483646"),
        (dict(window_right=1 << 31), None, "window_right is 2147483648"),
        (dict(ranges=documents().long()), None, "ranges is torch.int64, must be"),
        (dict(ranges=documents()[0]), None, None),
        (dict(ranges=documents()[:, 1:]), None, "shape [1, 11, 3], must broadcast to"),
        (dict(tensor=random_bool(B, 3, Q, K)), None, "tensor has shape [2, 3, 12, 15]"),
        (dict(tensor=random_bool(Q, K).long()), None, "tensor is torch.int64, must be"),
        (dict(tensor=random_bool(Q, K), by_sample=True), None, "visible is None, must be given"),
        (dict(visible=torch.ones(K)), None, "visible is torch.float32, must be torch.bool"),
        (dict(visible=random_bool(B, 1, K + 1)), None, "visible has shape [2, 1, 16]"),
        (dict(tensor=torch.ones(Q, K, device="meta")), None, "tensor is on meta, must be on cpu"),
        ({}, torch.ones(3), "sinks has shape [3], must broadcast to [4]"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(
    mask: dict[str, Any], sinks: Optional[Tensor], said: Optional[str]
) -> None:
    if said is None:  # Leading dimensions may be absent.
        assert probed(ProbeMask(**mask))["rows"][0] > 0
        return
    with pytest.raises(ValueError) as refused:
        probed(ProbeMask(**mask), sinks=sinks)
    assert said in str(refused.value)
