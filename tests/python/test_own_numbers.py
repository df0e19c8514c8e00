"""Goal: mon.log() takes any number of the job's own to the frame of its step, on sampled steps and
others, and never raises, waits or costs a frame.
Method: short runs that are recorded and read back; odd names, values and words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bellwether
from bellwether._native import c_api
from bellwether._step import frames
from bellwether._unwatched import Unwatched
from bellwether.client import Block, ClientError, OwnValues, RunClient, RunOptions

from models import Model, Shape, batch
from recording import Recording

SHAPE = Shape(layers=2)
STEPS = 6
MEAN, SUM, MAX = 3, 1, 2  # Merge of signals.proto.
Step = Callable[[Any, int], None]


def nothing(monitor: Any, step: int) -> None:
    pass


def run(
    path: Path,
    *,
    forward: Step = nothing,
    stepped: Step = nothing,
    closed: Step = nothing,
    explicit: bool = False,
    steps: int = STEPS,
) -> tuple[dict[int, dict[tuple[str, int, int], float]], dict[str, int], list[Any]]:
    """What was recorded of own numbers by step, what was left out, and their messages; `forward`,
    `stepped`, `closed`: behind the forward, the optimizer's step and mon.step()."""
    model = Model(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = bellwether.attach(
        model, record=str(path), run="own", every=3, overhead_budget=1e9
    )  # fmt: skip
    for step in range(steps):
        loss = model(batch(SHAPE, step)).square().mean()
        forward(monitor, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped(monitor, step)
        if explicit:
            monitor.step(loss=loss)
        closed(monitor, step)
    assert monitor.flush(20)
    status = monitor.status()
    monitor.detach()
    assert status["errors"] == 0, status["last_error"]
    found: dict[int, dict[tuple[str, int, int], float]] = {}
    messages = []
    for message in Recording(path, ended=True).messages:
        if message.WhichOneof("body") != "frame":
            continue
        cells = found.setdefault(message.frame.step, {})
        for own in message.frame.own:
            messages.append(own)
            across = own.granularity in (2, 5)
            for i, value in enumerate(own.values):
                layer, head = (own.layer, own.head + i) if across else (own.layer + i, own.head)
                cells[own.name, layer, head] = value
    return found, status["numbers_left_out"], messages


def test_numbers_are_of_the_step_that_the_optimizer_ends(tmp_path: Path) -> None:
    found, left_out, _ = run(
        tmp_path / "a.bwrun",
        forward=lambda monitor, step: monitor.log({"before": step}),
        stepped=lambda monitor, step: monitor.log({"behind": step}),
    )
    assert found == {s: {("before", 0, 0): s, ("behind", 0, 0): s} for s in range(STEPS)}
    assert left_out == {}


def test_behind_mon_step_they_are_of_the_step_that_ended(tmp_path: Path) -> None:
    found, left_out, _ = run(
        tmp_path / "a.bwrun", explicit=True,
        forward=lambda monitor, step: monitor.log("before", step),
        closed=lambda monitor, step: monitor.log("behind", step),
    )  # fmt: skip
    assert left_out == {}
    assert [found[s].get(("before", 0, 0)) for s in range(STEPS)] == list(range(STEPS))
    # The first frame was gone before it was known that anything comes behind it.
    assert [found[s].get(("behind", 0, 0)) for s in range(STEPS)] == [None, *range(1, STEPS)]


def test_a_step_may_be_said(tmp_path: Path) -> None:
    found, left_out, _ = run(
        tmp_path / "a.bwrun", explicit=True,
        closed=lambda monitor, step: monitor.log("x", step, step=step),
        forward=lambda monitor, step: monitor.log("y", step, step=step + 7),
    )  # fmt: skip
    assert [found[s].get(("x", 0, 0)) for s in range(1, STEPS)] == list(range(1, STEPS))
    assert any("is not under way" in why for why in left_out)


@pytest.mark.parametrize(
    "value", [2, 2.0, True + 1, torch.tensor(2), torch.tensor([2.0], requires_grad=True),
              np.float64(2), np.array(2), np.array([2], dtype=np.int8),
              torch.tensor(2.0).bfloat16()],
)  # fmt: skip
def test_all_that_is_a_number_is_taken(tmp_path: Path, value: Any) -> None:
    found, left_out, _ = run(
        tmp_path / "a.bwrun", steps=1, forward=lambda monitor, _: monitor.log("x", value)
    )
    assert left_out == {}
    assert found == {0: {("x", 0, 0): 2.0}}


def test_values_of_layers_heads_and_experts(tmp_path: Path) -> None:
    def log(monitor: Any, step: int) -> None:
        monitor.log("layers", torch.tensor([1.0, 2.0]))
        monitor.log("one_layer", 3, layer=1)
        monitor.log("heads", [4.0] * SHAPE.heads, layer=1)
        monitor.log("experts", np.arange(SHAPE.heads + 3.0), layer=0)
        monitor.log("load", torch.ones(2, 5), of="expert", merge="sum", unit="tokens")
        monitor.log("of_rank", 7, of="rank", layer=0)

    found, left_out, messages = run(tmp_path / "a.bwrun", steps=1, stepped=log)
    assert left_out == {}
    of = {message.name: message.granularity for message in messages}
    assert of == {"layers": 4, "one_layer": 4, "heads": 2, "experts": 5, "load": 5, "of_rank": 6}
    assert found[0]["layers", 1, 0] == 2 and found[0]["one_layer", 1, 0] == 3
    assert found[0]["heads", 1, SHAPE.heads - 1] == 4
    assert found[0]["experts", 0, SHAPE.heads + 2] == SHAPE.heads + 2
    assert found[0]["load", 1, 4] == 1 and ("load", 1, 5) not in found[0]
    assert {m.merge for m in messages if m.name == "load"} == {SUM}


def test_several_calls_of_a_step_are_merged(tmp_path: Path) -> None:
    def log(monitor: Any, step: int) -> None:
        for value in (1.0, 2.0, 6.0):
            monitor.log({"mean": value})
            monitor.log("sum", value, merge="sum")
            monitor.log("max", value, merge="max")
        monitor.log("nan", math.nan, merge="max")
        monitor.log("nan", 1.0)

    found, _, _ = run(tmp_path / "a.bwrun", steps=1, forward=log)
    assert found[0]["mean", 0, 0] == 3 and found[0]["sum", 0, 0] == 9 and found[0]["max", 0, 0] == 6
    assert math.isnan(found[0]["nan", 0, 0])


def test_words_and_limits_come_with_the_first_values(tmp_path: Path) -> None:
    _, _, messages = run(
        tmp_path / "a.bwrun",
        stepped=lambda monitor, _: monitor.log("kl", 0.1, unit="nats", help="of the policy", low=0),
    )
    assert (messages[0].unit, messages[0].help, messages[0].low) == ("nats", "of the policy", 0)
    assert not messages[0].HasField("high")
    assert messages[1].unit == "" and not messages[1].HasField("low")


def test_limits_that_no_value_keeps_are_refused(tmp_path: Path) -> None:
    def log(monitor: Any, step: int) -> None:
        monitor.log("both", 5.0, low=6, high=2)
        monitor.log("one", 5.0, low=6)
        monitor.log("one", 7.0, high=2)
        monitor.log("same", 5.0, low=5, high=5)
        monitor.log("nan", 5.0, low=math.nan)

    found, left_out, messages = run(tmp_path / "a.bwrun", steps=2, forward=log)
    assert found[1] == {("one", 0, 0): 5.0, ("same", 0, 0): 5.0}
    assert left_out == {
        "log both: ValueError: low=6, must be at most high=2": 2,
        "log one: ValueError: low=6, must be at most high=2": 2,
        "log nan: ValueError: low=nan, must be finite": 2,
    }
    one = next(m for m in messages if m.name == "one")
    assert one.low == 6 and not one.HasField("high")


def test_names_become_plain(tmp_path: Path) -> None:
    found, left_out, _ = run(
        tmp_path / "a.bwrun", steps=1,
        forward=lambda monitor, _: monitor.log({"train/KL (mean)": 1, "a-b.c": 2}),
    )  # fmt: skip
    assert left_out == {}
    assert found[0] == {("train/kl__mean_", 0, 0): 1, ("a-b.c", 0, 0): 2}


def test_names_that_become_equal_are_told_apart(tmp_path: Path) -> None:
    def log(monitor: Any, step: int) -> None:
        monitor.log({"KL": 1.0, "kl": 3.0})
        monitor.log("a b", 4.0)
        monitor.log("a_b", 6.0)

    found, left_out, _ = run(tmp_path / "a.bwrun", steps=3, forward=log)
    assert found == {s: {("kl", 0, 0): 1.0, ("a_b", 0, 0): 4.0} for s in range(3)}
    assert sorted(left_out.items()) == [
        ("log a_b: ValueError: it is stored as a_b, and 'a b' has that name", 3),
        ("log kl: ValueError: it is stored as kl, and 'KL' has that name", 3),
    ]


class Odd:
    def __float__(self) -> float:
        raise RuntimeError("no number")


def test_a_number_that_cannot_be_taken_costs_itself(tmp_path: Path) -> None:
    def log(monitor: Any, step: int) -> None:
        monitor.log({"loss": 1.0, "drift_ratio": 1.0, "": 1, 3: 1, "1st": 1, "x" * 65: 1})
        monitor.log({"text": "seven", "none": None, "odd": Odd(), "complex": torch.tensor(1j)})
        monitor.log({"deep": torch.ones(2, 2, 2), "empty": [], "huge": torch.ones(20000)})
        monitor.log("z", 1.0, of="tensor")
        monitor.log("z", 1.0, merge="equal")
        monitor.log("z", 1.0, layer=-1)
        monitor.log("z", 1.0, layer=c_api.LAYERS_MAX)
        monitor.log("z", 1.0, high=math.inf)
        monitor.log("meta", torch.ones((), device="meta"))
        monitor.log("good", 1.0)
        monitor.log("good", 1.0, layer=1, of="layer")
        monitor.log("large", 1e300)

    found, left_out, _ = run(tmp_path / "a.bwrun", steps=2, forward=log)
    assert found == {s: {("good", 0, 0): 1, ("large", 0, 0): math.inf} for s in range(2)}
    assert len(left_out) >= 10
    assert all(count == 2 for why, count in left_out.items() if why.startswith("log text"))


def test_many_reasons_are_said_once_and_all_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "bellwether")
    _, left_out, _ = run(
        tmp_path / "a.bwrun", steps=3,
        forward=lambda monitor, _: monitor.log({f"text{i}": "seven" for i in range(20)}),
    )  # fmt: skip
    assert caplog.text.count("is left out") == frames.LEFT_OUT_MAX + 1
    assert len(left_out) == frames.LEFT_OUT_MAX + 1 and left_out[frames.OTHER_REASONS] == 3 * 4
    assert sum(left_out.values()) == 3 * 20


def test_a_run_has_so_many_signals(tmp_path: Path) -> None:
    def log(monitor: Any, step: int) -> None:
        monitor.log({f"s{i}": i for i in range(300)})

    found, left_out, _ = run(tmp_path / "a.bwrun", steps=2, forward=log)
    assert len(found[1]) == 256
    assert any("at most 256" in why for why in left_out)


def test_a_client_of_ones_own_says_what_it_refuses(tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    with RunClient(RunOptions("own", layers=1, heads=1, record_path=str(path))) as client:
        good = OwnValues("kl", [1.0], unit="nats", low=0.0)
        assert client.push(0, [Block("loss", [1.0])], own=[good])
        for wrong in (
            OwnValues("KL", [1.0]), OwnValues("loss", [1.0]), OwnValues("x", []),
            OwnValues("x", [1.0, 2.0]), OwnValues("x", [1.0], of="module"),
            OwnValues("x", [1.0], merge="equal"), OwnValues("x", [1.0], low=math.nan),
            OwnValues("x", [1.0], unit="u" * 33), OwnValues("x", [1.0], layer=1),
            OwnValues("x", [1.0] * 1025, of="expert"), OwnValues("x", [1.0], of="rank", layer=1),
            OwnValues("x", [1.0], low=6.0, high=2.0),
        ):  # fmt: skip
            with pytest.raises(ClientError):
                client.push(1, [Block("loss", [1.0])], own=[wrong])
        assert client.flush(20)
    frames = [m.frame for m in Recording(path, ended=True).messages if m.HasField("frame")]
    assert [(own.name, list(own.values)) for frame in frames for own in frame.own] == [
        ("kl", [1.0])
    ]


LOSSES = [1.0, 2.0]


def handle_of(model: Model, rank: int, path: Path, **more: Any) -> Any:
    """Of one of 4 copies of the model."""
    return bellwether.attach(
        model, record=str(path), run="ranks",
        parallel=bellwether.Parallel(data=(rank, 4)), **more
    )  # fmt: skip


def test_a_rank_that_stands_aside_counts_its_numbers(tmp_path: Path) -> None:
    model = Model(SHAPE)
    monitor = handle_of(model, 1, tmp_path / "a.bwrun")
    for _ in range(3):
        monitor.log({"reward": 1.0, "kl": 2.0})
        monitor.log("q", 1.0, of="rank", layer=1)
        monitor.losses(LOSSES)
        monitor.rollout(LOSSES, LOSSES)
        monitor.log_alike({"entropy": 1.0})
    why = 'this rank does not report: attach(ranks="all")'
    status = monitor.status()
    assert status["numbers_left_out"] == {
        f"log(): {why}": 6, f"losses(): {why}": 3, f"rollout(): {why}": 3,
    }  # fmt: skip
    assert status["ranks"] == {"reporting": 1, "of": 4}


@pytest.mark.parametrize(
    ("more", "call", "said"),
    (({}, "log", 1), ({}, "losses", 1), ({}, "log_alike", 0), ({"ranks": "all"}, "log", 0)),
)
def test_that_other_ranks_do_not_report_is_said_once(
    more: dict[str, str], call: str, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "bellwether")
    model = Model(SHAPE)
    with handle_of(model, 0, tmp_path / "a.bwrun", **more) as monitor:
        for _ in range(3):
            getattr(monitor, call)(LOSSES if call == "losses" else {"reward": 1.0})
        status = monitor.status()
    assert caplog.text.count("1 of 4 ranks report, and what the others say is left out") == said
    assert status["ranks"] == {"reporting": 4 if more else 1, "of": 4}
    assert status["numbers_left_out"] == {} and status["errors"] == 0


def test_a_handle_that_is_off_takes_them(tmp_path: Path) -> None:
    Unwatched("why").log({"x": 1})
    monitor = bellwether.attach(Model(SHAPE), record=str(tmp_path / "a.bwrun"), run="off")
    monitor.detach()
    monitor.log({"x": 1})
    monitor.log(3, "four", layer="five")  # type: ignore[arg-type]
