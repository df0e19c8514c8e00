"""Goal: the study of flipped bits measures what it says: flips that move a sum by far are found,
and those of weights at rest all are.
Method: a slice of tests/bench/flip_study.py: a small GPT after 12 steps, two places of each kind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))
import flip_study
import torch
from test_law_study import SIZE


def test_flips_that_move_a_sum_by_far_are_found(tmp_path: Path) -> None:
    text = str(ROOT / "client_lib" / "python" / "bellwether" / "settings.py")
    options = ["--out", str(tmp_path), "--text", text, "--places", "2"]
    assert flip_study.main(options, SIZE) == 0
    found = [json.loads(line) for line in (tmp_path / "flips.jsonl").read_text().splitlines()]
    of = {kind: [r for r in found if r["kind"] == kind] for kind in flip_study.KINDS}
    for kind, flips in of.items():
        assert len(flips) == 2 * (32 if kind == "weight at rest" else 16)
    assert all(flip["found"] for flip in of["weight at rest"])
    far = [r for kind in of if kind.startswith("linear") for r in of[kind] if r["moved"] > 10]
    assert far and all(r["found"] for r in far)


def test_a_bit_is_flipped_in_a_copy() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    assert flip_study.with_bit(values, 2, 15).tolist() == [[1, 2], [-3, 4]]
    assert flip_study.with_bit(values.t(), 1, 15).tolist() == [[1, -3], [2, 4]]
    assert values.tolist() == [[1, 2], [3, 4]]
