"""Goal: parameters whose parts, or whose moments, lie at several processes are told as wholes, by
their global names, and their training stays the same bit for bit.
Method: two processes with gloo; what they record is merged by the rules of the catalogue and
compared with float64 of the whole parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sharded_job
import torch
from rank_jobs import run_ranks
from told_tensors import Told, merge_rules, told_in

from bellwether._step.tensor_sample import SIGNALS, TURN_SIGNALS

from conftest import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes have trained in every way."""
    folder = tmp_path_factory.mktemp("sharded")
    script = ROOT / "tests" / "python" / "sharded_job.py"
    run_ranks(script, str(folder), *sharded_job.WAYS)
    return folder


def merged(folder: Path) -> Told:
    """As the server merges what both processes tell."""
    rules = merge_rules()
    first, second = (told_in(folder / name) for name in ("s.bwrun", "s-rank1.bwrun"))
    for step, names in second.items():
        for name, values in names.items():
            into = first[step].setdefault(name, {})
            for signal, value in values.items():
                if signal not in into:
                    into[signal] = value
                elif rules[signal] == "MERGE_SUM":
                    into[signal] += value
                else:
                    assert rules[signal] == "MERGE_MAX"
                    into[signal] = max(into[signal], value)
    return first


@pytest.mark.parametrize("way", sharded_job.WAYS)
def test_wholes_are_told_of_what_lies_in_parts(way: str, folder: Path) -> None:
    saved: list[dict[str, Any]] = [torch.load(folder / way / f"{rank}.pt") for rank in range(2)]
    told, turns = merged(folder / way), dict.fromkeys(TURN_SIGNALS, 0)
    for step, names in enumerate(saved[0]["told"]):
        assert set(told[step]) == set(names)
        for name, want in names.items():
            got = told[step][name]
            for signal in SIGNALS:
                assert (signal in got) == (signal in want), (step, name, signal)
            for signal, value in got.items():
                size = want["size" if signal == "tensor_momentum_dot" else signal]
                near = pytest.approx(want[signal], abs=1e-5 * abs(size))
                assert value == near, (step, name, signal)
                turns[signal] = turns.get(signal, 0) + 1
    assert all(turns.values()), turns
    assert all(of["same"] for of in saved)
