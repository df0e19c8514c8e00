"""Goal: layers take turns at the laws of attention, by the number of the sample alone.
Method: all numbers of layers up to 40; short runs on the CPU with `law_layers`.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from test_law_calls import made, step

import bellwether
from bellwether._hook.law_turns import law_turn

from recording import Recording


def test_all_layers_take_turns_in_the_fewest_samples() -> None:
    for layers in range(1, 41):
        for at_once in range(1, layers + 2):
            turns = math.ceil(layers / at_once)
            asked = [
                [i for i in range(layers) if law_turn(i, layers, sample, at_once).asked]
                for sample in range(7, 7 + turns)
            ]
            assert sorted(i for some in asked for i in some) == list(range(layers))
            assert max(map(len, asked)) <= at_once


def test_all_are_compared_and_their_keys_at_times() -> None:
    for layers in range(1, 41):
        for at_once in (1, 2, max(layers // 8, 1), layers):
            turns = math.ceil(layers / at_once)
            samples = range(4 * turns * math.ceil(layers / turns))
            for layer in range(layers):
                found = [law_turn(layer, layers, s, at_once, 4) for s in samples]
                compared = [turn for turn in found if turn.compared]
                assert len(compared) >= 4 and all(turn.asked for turn in compared)
                keys = sum(turn.with_keys for turn in compared)
                assert 1 <= keys <= math.ceil(len(compared) / 4)


def test_two_of_four_layers_are_compared_where_all_are_asked() -> None:
    for layers, at_once, most in (
        (2, 2, 1),
        (3, 3, 1),
        (4, 4, 2),
        (4, 2, 1),
        (5, 5, 2),
        (32, 32, 2),
    ):
        found = [
            sum(law_turn(i, layers, s, at_once).compared for i in range(layers)) for s in range(32)
        ]
        assert max(found) == most
    assert [[i for i in range(4) if law_turn(i, 4, s, 4).compared] for s in (0, 1)] == [
        [0, 2],
        [1, 3],
    ]


def test_a_layer_without_a_number_is_not_asked() -> None:
    assert not law_turn(-1, 4, 0, 4).asked


def test_other_layers_are_not_measured(tmp_path: Path) -> None:
    net = made()
    monitor = bellwether.attach(
        net, record=str(tmp_path / "a.bwrun"), run="laws", every=1, overhead_budget=1e9,
        settings=bellwether.Settings(law_layers=1),
    )  # fmt: skip
    for _ in range(4):
        step(net)
        monitor.step()
    assert monitor.flush(20) and monitor.status()["errors"] == 0
    monitor.detach()
    sent = Recording(tmp_path / "a.bwrun", ended=True).steps()
    assert "law_a3" not in sent[0]
    for number in (1, 2, 3):
        for signal in ("law_a3", "law_a3_variance", "dq_nonfinite", "shadow_dq_rest"):
            measured = np.isfinite(sent[number][signal]).all(-1).tolist()
            assert measured == [number % 2 == 0, number % 2 == 1], (number, signal)
            assert np.isnan(sent[number][signal][(number + 1) % 2]).all()


def test_no_layer_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="law_layers"):
        bellwether.Settings(law_layers=0)
