"""Goal: what a layer's laws give reaches the server by name, in few blocks; nothing that does not
fit costs the frame.
Method: rows and blocks against a client that only keeps what it is given; recordings of trainings
with and without a damaged layer, read by the names in them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from test_linear_laws import damaged
from torch import Tensor, nn

import bellwether
from bellwether._native import c_api
from bellwether._step.law_rows import SIGNALS, LawRow, LawRows, ranges

from recording import Recording

ROOM = c_api.BLOCKS_MAX


class Client:
    """Takes so many names."""

    def __init__(self, names: int = 1 << 20) -> None:
        self.left, self.names = names, list[str]()

    def push_names(self, granularity: int, names: Sequence[str], first: int) -> int:
        assert granularity == c_api.MODULE and first == len(self.names)
        taken = list(names)[: self.left]
        self.left -= len(taken)
        self.names += taken
        return len(taken)


def blocks_of(
    rows: LawRows, client: Any, laws: Sequence[LawRow], scale: float = 1.0, room: int = ROOM
) -> list[Any]:
    return rows.blocks(client, laws, scale, room)


def at(place: str) -> LawRow:
    return LawRow(place, "dx=dW", 1.0, 4.0, 0.5, 0, 2, 3.0)


def is_not_measured(value: float) -> bool:
    return struct.pack("f", value) == struct.pack("f", c_api.NOT_MEASURED)


def test_a_row_is_named_by_place_and_law_once() -> None:
    rows, client = LawRows(), Client()
    for _ in range(2):
        found = blocks_of(rows, client, [at("b"), at("a")])
        assert [b.signal for b in found] == list(SIGNALS)
        assert all((b.layer_begin, b.layer_count) == (0, 2) for b in found)
    assert client.names == ["b dx=dW", "a dx=dW"]


def test_gradients_are_told_without_the_loss_scale() -> None:
    found = blocks_of(LawRows(), Client(), [at("a")], scale=8.0)
    assert [list(b.values) for b in found] == [[1 / 8], [4 / 64], [0.5 / 8], [0], [2], [3 / 8]]


def test_nan_is_not_what_was_not_measured() -> None:
    row = LawRow("a", "dx=dW", math.nan, 1.0, 0.0, 3, None)
    values = [b.values[0] for b in blocks_of(LawRows(), Client(), [row])]
    assert math.isnan(values[0]) and not is_not_measured(values[0]) and is_not_measured(values[4])


@pytest.mark.parametrize(
    "difference, variance", [(-1e26, 1e47), (1e28, 1e40), (1e60, 1e80), (3e18, 1e-12)]
)
def test_rows_beyond_a_float_keep_their_z(difference: float, variance: float) -> None:
    row = LawRow("a", "dx=dW", difference, variance, abs(difference) / 4, alike_sigma=variance**0.5)
    sent = [float(b.values[0]) for b in blocks_of(LawRows(), Client(), [row])]
    assert all(abs(value) <= 1e30 for value in sent[:3])
    assert sent[0] / sent[1] ** 0.5 == pytest.approx(difference / variance**0.5, rel=1e-5)
    assert sent[2] == pytest.approx(abs(sent[0]) / 4) and sent[5] ** 2 == pytest.approx(sent[1])


def test_infinite_and_no_numbers_stay_so() -> None:
    rows = [LawRow("a", "dx=dW", math.inf, 1.0), LawRow("a", "y=dx", math.nan, math.inf)]
    first = [b.values[:2] for b in blocks_of(LawRows(), Client(), rows)]
    assert math.isinf(first[0][0]) and first[1][0] == 1
    assert math.isnan(first[0][1]) and math.isinf(first[1][1])


def test_rows_between_are_not_measured() -> None:
    rows, client = LawRows(), Client()
    blocks_of(rows, client, [at(name) for name in "abc"])
    first, *_ = blocks_of(rows, client, [at("a"), at("c")])
    assert first.layer_count == 3 and is_not_measured(first.values[1]) and first.values[2] == 1


def test_ranges_are_cut_at_the_widest_gaps() -> None:
    assert ranges([1, 2, 900, 1000, 5000], 3) == [range(1, 3), range(900, 1001), range(5000, 5001)]
    assert ranges([1, 2, 900, 1000, 5000], 1) == [range(1, 5001)]
    assert ranges([1, 60], 9) == [range(1, 61)]
    assert ranges([], 3) == ranges([1], 0) == []


def test_a_full_frame_has_no_rows() -> None:
    rows = LawRows()
    assert blocks_of(rows, Client(), [at("a")], room=len(SIGNALS) - 1) == []
    assert rows.not_sent == 1


def test_rows_whose_names_wait_are_not_sent() -> None:
    rows, client = LawRows(), Client(names=1)
    found = blocks_of(rows, client, [at("a"), at("b")])
    assert all(b.layer_count == 1 for b in found) and rows.not_sent == 1
    client.left = 1
    assert all(b.layer_count == 2 for b in blocks_of(rows, client, [at("a"), at("b")]))


def test_a_row_without_a_place_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_api, "NAMED_ROWS_MAX", 2)
    rows = LawRows()
    laws = [at("x" * c_api.ROW_NAME_MAX), at("a"), at("b"), at("c")]
    (first, *_) = blocks_of(rows, Client(), laws)
    assert first.layer_count == 2 and rows.refused == 2


def trained(path: Path, damage: bool) -> tuple[list[str], dict[int, dict[str, Any]]]:
    """Names of rows, and what is recorded of each step."""
    torch._dynamo.utils.counters.clear()  # Else a test before this one was compiled.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 48)).to(torch.bfloat16)
    handle = None
    if damage:
        handle = damaged(net[2], "dW", lambda t: t[5, 7].fill_(200 * t.abs().max()))
    monitor = bellwether.attach(net, record=str(path), run="rows", every=1, overhead_budget=1e9)
    for step in range(6):
        x = torch.randn(256, 48, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss: Tensor = net(x.requires_grad_()).float().square().mean()
        loss.backward()
        monitor.step(loss=float(loss.detach()))
        net.zero_grad()
    counts = monitor.status()["law_rows"]
    assert counts == {"rows": 6, "refused": 0, "not_sent": 0}
    monitor.detach()
    if handle is not None:
        handle.remove()
    found = Recording(path, ended=True)
    names = [n for m in found.messages if m.WhichOneof("body") == "names" for n in m.names.names]
    return names, found.steps()


@pytest.mark.parametrize("damage", [False, True])
def test_a_damaged_layer_shows_in_the_rows_with_its_tensor(tmp_path: Path, damage: bool) -> None:
    names, steps = trained(tmp_path / "a.bwrun", damage)
    assert sorted(names) == [
        f"{place} {law}" for place in "02" for law in ("dW=y", "dx=dW", "y=dx")
    ]
    broken, asked = set(), set()
    for signals in steps.values():
        if "law_difference" not in signals:
            continue
        columns = [signals[name][:, 0] for name in SIGNALS]
        for name, difference, variance, alike, given, computed, again in zip(names, *columns):
            if math.isnan(variance):
                continue
            asked.add(name)
            assert alike == given == computed == 0 and 0 <= again < math.sqrt(variance)
            if abs(difference) / math.sqrt(variance) > 8:
                broken.add(name)
    assert asked == set(names)
    assert broken == ({"2 dW=y", "2 dx=dW"} if damage else set())
