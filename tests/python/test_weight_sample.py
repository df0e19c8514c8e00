"""Goal: what gains of norms, tables of words and matrices tell equals a recomputation in float64:
gains in the last bin of a format of 8 bits, the mean row, the largest singular value.  Training
stays the same bit for bit.
Method: trainings whose weights are kept beside them, compared with their recordings; single
tensors.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from told_tensors import Told, rows_told
from torch import Tensor, nn
from torch.nn import functional as F

import bellwether
from bellwether._native import c_api
from bellwether._step import spectral_norms, weight_sample
from bellwether._step.spectral_norms import FIRST_STEPS, STEPS, sigmas, start, together, tridiagonal
from bellwether._step.tensor_kinds import Kind, Kinds
from bellwether._step.tensor_rows import Row
from bellwether._step.tensors import TURNS
from bellwether._step.weight_sample import OFTEN, SIGNALS, WeightSamples, last_bin, mean_sumsq

from gpu import DEVICES
from models import Attention, Shape
from no_waiting import DEVICE, NoWaiting

SHAPE = Shape(fused=False)
WORDS = 97
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(SHAPE.width), Attention(SHAPE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))  # type: ignore[no-any-return]


class Language(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SHAPE.width)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(SHAPE.width)
        self.mix = nn.Linear(SHAPE.width, SHAPE.width)
        self.head = nn.Linear(SHAPE.width, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.mix(self.norm(x)))  # type: ignore[no-any-return]


def naive_last_bin(gains: Tensor) -> float:
    count = 0
    for block in gains.double().flatten().split(32):
        largest = float(block.abs().max())
        if largest:
            scale = 2.0 ** (math.floor(math.log2(largest)) - 8)
            count += sum(abs(float(g)) > 448 * scale for g in block)
    return count


def naive_mean_sumsq(table: Tensor) -> float:
    return float(len(table) * table.double().mean(0).square().sum())


def naive_sigma(w: Tensor) -> float:
    return float(torch.linalg.matrix_norm(w.double(), 2))


def trained(
    path: Optional[Path], steps: int = TURNS + 5, tied: bool = False,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:  # fmt: skip
    """The weights behind each step, and at the end."""
    torch.manual_seed(0)
    model = Language(tied)
    for block in model.layers:  # Below 1 the last bin begins at 0.875.
        nn.init.uniform_(block.norm.weight, 0.8, 0.95)
    model = model.to(device, dtype)
    monitor = None
    if path is not None:
        monitor = bellwether.attach(
            model, run="weights", record=str(path), every=1, overhead_budget=1e9,
            stats=["drift", "tensors"],
        )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    kept = []
    for step in range(steps):
        optimizer.zero_grad()
        words = torch.randint(WORDS, (4, 17), generator=torch.Generator().manual_seed(step)).to(
            device
        )
        logits = model(words[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten()).backward()
        optimizer.step()
        kept.append({n: p.detach().cpu().double() for n, p in model.named_parameters()})
    if monitor is not None:
        status = monitor.status()
        assert status["errors"] == 0 and status["live"], status["last_error"]
        monitor.detach()
    return kept, [p.detach().clone() for p in model.parameters()]


def told_in(path: Path) -> Told:
    return rows_told(path, c_api.TENSOR, SIGNALS)


GAINS = {"layers.0.norm.weight", "layers.1.norm.weight", "norm.weight"}
TABLES = {"embed.weight", "head.weight"}
FREQUENT = {"head.weight", "layers.0.attention.out.weight", "layers.1.attention.out.weight"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_equal_a_recomputation_in_float64(
    dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    kept, _ = trained(tmp_path / "a.bwrun", dtype=dtype, device=device)
    told = told_in(tmp_path / "a.bwrun")
    matrices = {name for name, w in kept[0].items() if w.dim() == 2}
    turned: set[str] = set()
    gains, tables = ({0, *range(at, len(kept), OFTEN)} for at in (3, 4))
    for step, weights in enumerate(kept):
        got = {s: {n: of[s] for n, of in told[step].items() if s in of} for s in SIGNALS}
        # In the first sample, and then in turn: all at once, or none.
        assert set(got["norm_gain_last_bin"]) == (GAINS if step in gains else set())
        assert set(got["embedding_mean_sumsq"]) == (TABLES if step in tables else set())
        for name, value in got["norm_gain_last_bin"].items():
            assert value == naive_last_bin(weights[name]), (step, name)
        for name, value in got["embedding_mean_sumsq"].items():
            w = weights[name]
            size = float(w.abs().sum(0).square().sum()) / len(w)
            assert value == pytest.approx(naive_mean_sumsq(w), abs=1e-5 * size)
        recent = [{n for n in told[at] if "tensor_sigma" in told[at][n]} for at in range(step + 1)]
        assert set().union(*recent[-OFTEN:]) >= FREQUENT
        turned |= set(got["tensor_sigma"])
        for name, value in got["tensor_sigma"].items():
            values = torch.linalg.svdvals(weights[name])
            residual = got["tensor_sigma_residual"][name]
            near = 1e-5 * float(values[0])
            assert value <= float(values[0]) + near
            assert float((values - value).abs().min()) <= residual + near
            if name in FREQUENT and step > 2 * OFTEN:
                assert value == pytest.approx(float(values[0]), rel=1e-3), (step, name)
    assert turned == matrices
    assert any(of["layers.0.norm.weight"]["norm_gain_last_bin"] > 0 for of in told.values())


def test_a_matrix_that_stands_still_is_exact_after_some_samples() -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(300, 200), torch.randn(200, 300), torch.randn(500, 40).bfloat16()]
    starts = [start(w.shape[1], CPU) for w in matrices]
    for sample in range(8):
        b, starts = tridiagonal(matrices, starts, STEPS if sample else FIRST_STEPS)
        sigma, residual = sigmas(b)
        for w, got, rest in zip(matrices, sigma, residual):
            assert float(got) <= naive_sigma(w) * (1 + 1e-6)
            if sample == 0:
                assert float(got) == pytest.approx(naive_sigma(w), rel=2e-3)
            if sample == 7:
                assert float(got) == pytest.approx(naive_sigma(w), rel=1e-5)
                assert float(rest) < 1e-3 * float(got)


def test_pieces_of_16_bits_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(70, 30).half()
    whole, _ = tridiagonal([w], [start(30, CPU)], STEPS)
    monkeypatch.setattr(spectral_norms, "_PIECE", 300)
    pieces, _ = tridiagonal([w], [start(30, CPU)], STEPS)
    assert torch.allclose(whole, pieces, rtol=1e-5)


def test_the_workspace_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    large = [8192] * 80 + [28672] * 24 + [8192, 1 << 24]  # Of 70 B parameters, and one too wide.
    for steps in (STEPS, FIRST_STEPS):
        places = list(together(large, steps))
        assert [at for of in places for at in of] == list(range(len(large)))
        for of in places:
            widest = max(large[at] for at in of)
            assert len(of) == 1 or 4 * len(of) * widest * 4 * (steps + 1) <= 64 << 20
    assert list(together([768] * 50, FIRST_STEPS)) == [range(50)]


def test_matrices_that_go_apart_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    matrices = [torch.randn(40, width) for width in (30, 50, 20, 60, 10)]
    starts = [start(w.shape[1], CPU) for w in matrices]
    whole, ends = tridiagonal(matrices, starts, STEPS)
    monkeypatch.setattr(spectral_norms, "WORKSPACE_MAX", 2 * 60 * 4 * 4 * (STEPS + 1))
    assert len(list(together([30, 50, 20, 60, 10], STEPS))) == 3
    apart, others = tridiagonal(matrices, starts, STEPS)
    assert torch.allclose(sigmas(apart)[0], sigmas(whole)[0], rtol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ends, others))


def test_matrices_of_zeros_and_nans_hurt_no_other() -> None:
    torch.manual_seed(0)
    broken = torch.randn(5, 6)
    broken[2, 3] = torch.nan
    matrices = [torch.zeros(20, 30), broken, torch.randn(9, 7), torch.randn(1, 5)]
    starts = [start(w.shape[1], CPU) for w in matrices]
    b, starts = tridiagonal(matrices, starts, FIRST_STEPS)
    sigma, _ = sigmas(b)
    assert sigma[0] == 0 and sigma[1].isnan()
    for at in (2, 3):
        assert float(sigma[at]) == pytest.approx(naive_sigma(matrices[at]), rel=1e-5)
    assert all(float(v.norm()) == pytest.approx(1.0, rel=1e-5) for v in starts)
    matrices[0], matrices[1] = torch.eye(20, 30) * 3, torch.eye(5, 6)
    sigma, _ = sigmas(tridiagonal(matrices, starts, STEPS)[0])
    assert sigma[:2].tolist() == pytest.approx([3.0, 1.0], rel=1e-5)


def test_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    _, watched = trained(tmp_path / "a.bwrun")
    _, alone = trained(None)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone))


def test_all_have_their_turn_also_at_every_second_sample() -> None:
    model = Language()
    rows = [Row(i, p, p.detach(), n, i) for i, (n, p) in enumerate(model.named_parameters())]
    for rarer in (1, 2, 4):
        samples = WeightSamples(Kinds(lambda: model))
        told: list[set[tuple[str, int]]] = []
        for taken in range(rarer, (OFTEN + 1) * rarer + 1, rarer):
            parts = samples.measure(rows, range(0), taken)
            told.append({(part.signal, row) for part in parts for row in part.rows})
        everything = set().union(*told)
        assert set().union(*told[1:]) == everything  # The first has all matrices.
        assert len(everything) == len(FREQUENT) + len(GAINS) + len(TABLES)


def test_a_tied_table_is_told_once(tmp_path: Path) -> None:
    trained(tmp_path / "a.bwrun", steps=2, tied=True)
    told = told_in(tmp_path / "a.bwrun")[0]
    assert "head.weight" not in told
    assert {"tensor_sigma", "embedding_mean_sumsq"} <= set(told["embed.weight"])


@pytest.mark.parametrize("elements", [1, 31, 32, 33, 96])
def test_gains_in_the_last_bin_are_counted(elements: int) -> None:
    torch.manual_seed(elements)
    gains = torch.stack([
        torch.rand(elements) * 0.2 + 0.85,  # Below 1 the last bin begins at 0.875.
        torch.randn(elements),
        torch.full((elements,), 1.0),
        torch.zeros(elements),
        torch.full((elements,), -1.9),
    ])  # fmt: skip
    got = last_bin(gains)
    assert got.tolist() == [naive_last_bin(g) for g in gains]
    assert got[2:].tolist() == [0, 0, elements]


def test_a_block_that_is_not_finite_has_no_last_bin() -> None:
    gains = torch.full((1, 64), 1.9)
    gains[0, 3] = torch.inf
    assert last_bin(gains).tolist() == [32]


def test_the_mean_row_is_all_where_rows_are_the_same() -> None:
    row = torch.randn(8)
    assert float(mean_sumsq(row.expand(5, 8))) == pytest.approx(
        float(5 * row.double().square().sum())
    )
    assert float(mean_sumsq(torch.stack([row, -row]))) == 0


def rows_of(model: nn.Module) -> list[Row]:
    return [Row(i, p, p.detach(), n, i) for i, (n, p) in enumerate(model.named_parameters())]


class Shifted(nn.Module):
    """A norm that stores its gain less 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) * (1.0 + self.weight)


class ShiftedNorm(Shifted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.weight * 0)


def test_kinds_are_found_by_modules_and_names() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.self_attn = nn.ModuleDict({"o_proj": nn.Linear(8, 8), "q_proj": nn.Linear(8, 8)})
            self.q_norm, self.norm = ShiftedNorm(8), nn.LayerNorm(8)
            self.mlp = nn.ModuleDict({"c_proj": nn.Linear(8, 8)})
            self.lm_head = nn.Linear(8, 16)

    model = Holder()
    kinds = {row.name: kind for row, kind in Kinds(lambda: model).of(rows_of(model))}
    told = {name: kind for name, kind in kinds.items() if kind != Kind()}
    assert told == {
        "embed.weight": Kind(table=True),
        "self_attn.o_proj.weight": Kind(often=True),
        "q_norm.weight": Kind(gain=1.0),
        "norm.weight": Kind(gain=0.0),
        "lm_head.weight": Kind(table=True, often=True),
    }


def test_matrices_beyond_a_limit_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sample, "STARTS_MAX", 10)
    model = nn.ModuleList(nn.Linear(8, 4, bias=False) for _ in range(2))
    samples = WeightSamples(Kinds(lambda: model))
    steps = []
    for _ in range(2):
        parts = samples.measure(rows_of(model), range(2), 0)
        steps.append([(part.rows, part._host.shape[2]) for part in parts])
    assert steps == [[([0, 1], FIRST_STEPS)], [([1], FIRST_STEPS), ([0], STEPS)]]


def test_norms_that_store_a_gain_less_1_tell_the_gain() -> None:
    norm = ShiftedNorm(64)
    norm.weight.data.fill_(0.9)
    (part,) = WeightSamples(Kinds(lambda: norm)).measure(rows_of(norm), range(0), 0)
    told: dict[str, Any] = {}
    part.put(lambda signal, rows, values: told.update({signal: values.tolist()}))
    assert told == {"norm_gain_last_bin": [64.0]}


def test_nothing_waits_for_a_gpu() -> None:
    matrices = [torch.empty(8, 4, device=DEVICE), torch.empty(3, 9, device=DEVICE)]
    starts = [torch.empty(w.shape[1], device=DEVICE) for w in matrices]
    with NoWaiting() as seen:
        tridiagonal(matrices, starts, STEPS)
        start(5, torch.device(DEVICE))
        last_bin(torch.empty(2, 40, device=DEVICE))
        mean_sumsq(torch.empty(5, 4, device=DEVICE))
    assert seen.operations


def test_parts_of_a_table_tell_at_least_its_mean_row() -> None:
    torch.manual_seed(0)
    table = torch.randn(64, 8) + 0.5
    by_rows = sum(float(mean_sumsq(part)) for part in table.split(20))
    by_columns = sum(float(mean_sumsq(part)) for part in table.split(3, dim=1))
    assert by_rows >= naive_mean_sumsq(table)
    assert by_columns == pytest.approx(naive_mean_sumsq(table), rel=1e-5)


def test_parts_of_a_matrix_tell_at_most_its_norm() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(64, 30)
    parts = list(matrix.split(40))
    starts = [start(30, CPU) for _ in parts]
    sigma, _ = sigmas(tridiagonal(parts, starts, FIRST_STEPS)[0])
    assert 0.5 * naive_sigma(matrix) < float(sigma.max()) <= naive_sigma(matrix)
