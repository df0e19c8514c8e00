"""Goal: the study of the laws on real activations measures what it says.  A fault that nothing
outside of a kernel sees is named in its first sample, a healthy training gives no alarm.
Method: a slice of tests/bench/law_study.py: a small GPT after 12 steps, some faults at their stated
strengths, by kept calls and by training passes of their own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))
import law_study
from planted_below import FAULTS, Planted

SIZE = law_study.Size(
    layers=2, width=64, head_dim=32, vocab=512, context=96, batch=2, steps=12, rate=1e-2
)
SOME = "negated|P of a head|NaN|scale of dS"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


def run(folder: Path, *options: str) -> list[dict[str, Any]]:
    text = str(ROOT / "client_lib" / "python" / "bellwether" / "settings.py")
    given = ["--out", str(folder), "--text", text, "--type", "bf16", *options]
    assert law_study.main(given, SIZE) == 0
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("way", ("kept", "whole"))
def test_faults_that_nothing_outside_sees_are_named(way: str, folder: Path) -> None:
    options = ["--only", SOME, "--stated", "--heads", "1", "--layers", "1"]
    found = run(folder, *options, *(["--whole"] if way == "whole" else []))
    found = [result for result in found if result["way"] == way]
    assert len(found) == 4
    for result in found:
        assert result["place"] and result["in_set"] and not result["other"], result
        # No sum tells of dq and dk that are both twice as large; the layer is compared at once.
        assert result["first"] == 1 == result["compared"], result


def test_a_result_that_is_there_is_not_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--only", "NaN", "--stated", "--heads", "0", "--layers", "1"]
    before = run(folder, *options)
    monkeypatch.setattr(law_study, "replayed_alerts", None)
    assert run(folder, *options) == before


def test_a_healthy_training_gives_no_alarm(folder: Path) -> None:
    results = run(folder, "--only", "none", "--samples", "20")
    (healthy,) = [result for result in results if result["fault"] == "healthy"]
    assert healthy["alerts"] == 0
    assert healthy["asked"] == 20 * 2 * 2 * 18 + 19 * 8 * 2


def test_a_kernel_without_a_fault_returns_its_own_bits() -> None:
    torch.manual_seed(1)
    given = [torch.randn(2, 2, 50, 16).bfloat16().requires_grad_() for _ in range(3)]

    def gradients() -> tuple[torch.Tensor, ...]:
        o = F.scaled_dot_product_attention(*given, is_causal=True)
        return torch.autograd.grad(o.float().square().sum(), given)

    plain = gradients()
    with Planted(1) as planted:
        untouched = gradients()
        planted.begin()
        planted.plant(FAULTS["dq of a head, times"], 0, 1, 2)
        dq, dk, dv = gradients()
    for a, b in zip(plain, untouched):
        assert torch.equal(a, b)
    assert torch.equal(dq[:, 0], plain[0][:, 0]) and torch.equal(dq[:, 1], 2 * plain[0][:, 1])
    assert torch.equal(dk, plain[1]) and torch.equal(dv, plain[2])
    assert all(torch.equal(a, b) for a, b in zip(gradients(), plain))
