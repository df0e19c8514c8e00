"""Goal: two runs are compared over tensors, modules, layers and experts.  Rows are compared by their names,
in whatever order the runs have them, and what only one has is left out.  Rows that take turns are compared
also where the runs have them at other steps.

Method: bellwetherd and clients that say every value: the same data, and gradients of one run eight times larger.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / room) for room in ("support", "python")]
from bellwether_process import Server, wait_for
from scraping import MODULE, TENSOR

from bellwether.client import Block, RunClient, RunOptions

STEPS, CHANGE, EXPERTS = 64, 40, 3
TURNS = 5
# Of sizes that are far apart, and one of which only one run has.
SIZES = {f"layers.{layer}.{name}.weight": 10.0 ** (2 * layer - 6) for layer in range(6) for name in ("q", "up")}
ONLY = {"base": "adapter.weight", "changed": "head.weight"}


def report(server: Server, run: str, factor: float) -> None:
    names = [*SIZES, ONLY[run]]
    if run == "changed":
        names.reverse()
    with RunClient(RunOptions(run, layers=2, heads=2, experts=EXPERTS, server=server.grpc)) as client:
        assert client.push_names(TENSOR, names) == len(names)
        assert client.push_names(MODULE, ["layers.0", "layers.1"]) == 2
        for step in range(STEPS):
            scale = factor if step >= CHANGE else 1.0
            squares = [(SIZES.get(name, 1.0) * scale * (1 + step % 3 / 50)) ** 2 for name in names]
            blocks = [
                Block("loss", [2.0]),
                Block("tensor_elements", [1.0] * len(names), 0, len(names)),
                Block("tensor_grad_sumsq", squares, 0, len(names)),
                Block("module_elements", [4.0, 4.0], 0, 2),
                Block("module_sumsq", [4.0, 4.0 * (4 if scale > 1 else 1)], 0, 2),
                Block("expert_load", [5.0, 5.0, 5.0 * scale], 1, 1, 0, EXPERTS),
                Block("router_logit_max", [scale], 1),
            ]
            assert client.push(step, blocks)
        assert client.flush(60)
    wait_for("the last step", lambda: int(server.call("GetRun", run=run).get("step", -1)) >= STEPS - 1)


def report_in_turn(server: Server, run: str, begin: int, factor: float) -> None:
    """Modules of which each sample has one, as a fifth of the steps has it."""
    names = [f"layers.{at}" for at in range(TURNS)]
    with RunClient(RunOptions(run, layers=2, heads=2, server=server.grpc)) as client:
        assert client.push_names(MODULE, names) == TURNS
        for step in range(TURNS * STEPS):
            row, scale = (begin + step) % TURNS, factor if step >= TURNS * CHANGE else 1.0
            square = (1 + step // TURNS % 3 / 50) * scale**2
            blocks = [Block("loss", [2.0]), Block("module_elements", [4.0], row, 1), Block("module_sumsq", [4.0 * square], row, 1)]
            assert client.push(step, blocks) and (step % STEPS or client.flush(60))  # The ring has room for 256.
        assert client.flush(60)
    wait_for("the last step", lambda: int(server.call("GetRun", run=run).get("step", -1)) >= TURNS * STEPS - 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("compared")) as running:
        report(running, "base", 1.0)
        report(running, "changed", 8.0)
        report_in_turn(running, "base_in_turn", 0, 1.0)
        report_in_turn(running, "changed_in_turn", 2, 4.0)
        yield running


def test_all_gradients_are_eight_times_larger_by_name(server: Server) -> None:
    compared = server.call("CompareRuns", run="changed", baseline="base", signal="tensor_grad_norm")
    assert compared["heads_differing"] == len(SIZES)
    found = {head["name"]: (int(head["first_step"]), round(head["ratio"], 3)) for head in compared["heads"]}
    assert found == dict.fromkeys(SIZES, (CHANGE, 3.0))
    table = server.run("run", "compare", "changed", "base", "--signal", "tensor_grad_norm")
    assert "layers.5.up.weight" in table and "LAYER" not in table


def test_commands_show_rows_by_name(server: Server) -> None:
    series = [f"tensor_grad_norm@layers.{layer}.q.weight" for layer in (0, 5)]
    rows = server.run("series", "get", "base", *series, "-o", "csv").splitlines()[1:]
    assert {row.split(",")[0] for row in rows} == set(series)
    matrix = server.run("matrix", "changed", "module_rms", "-o", "csv").splitlines()
    assert [row.split(",")[0] for row in matrix[1:]] == ["layers.0", "layers.1"]


@pytest.mark.parametrize("signal,where,ratio", [
    ("module_rms", {"name": "layers.1", "layer": 1}, 1.0),
    ("expert_load", {"layer": 1, "head": 2}, 3.0),
    ("router_logit_max", {"layer": 1}, 3.0),
])  # fmt: skip
def test_modules_layers_and_experts_are_compared(server: Server, signal: str, where: dict[str, object], ratio: float) -> None:
    compared = server.call("CompareRuns", run="changed", baseline="base", signal=signal)
    (worst,) = [head for head in compared["heads"] if int(head["first_step"]) >= 0]
    assert {key: worst.get(key, 0) for key in where} == where
    assert (int(worst["first_step"]), round(worst["ratio"], 3)) == (CHANGE, ratio)


def test_rows_that_take_turns_at_other_steps_are_compared(server: Server) -> None:
    compared = server.call("CompareRuns", run="changed_in_turn", baseline="base_in_turn", signal="module_rms")
    found = {head["name"]: round(head["ratio"], 1) for head in compared["heads"] if int(head["first_step"]) >= 0}
    assert found == {f"layers.{at}": 2.0 for at in range(TURNS)}
    for head in compared["heads"]:
        assert 0 <= int(head["first_step"]) - TURNS * CHANGE <= 2 * TURNS


def test_runs_without_a_common_name_are_refused(server: Server) -> None:
    with RunClient(RunOptions("other", layers=2, heads=2, experts=EXPERTS, server=server.grpc)) as client:
        assert client.push_names(TENSOR, ["other.weight"]) == 1
        assert client.push(0, [Block("tensor_grad_sumsq", [1.0], 0, 1)]) and client.flush(60)
    with pytest.raises(Exception, match="have no tensor or module of the same name"):
        server.call("CompareRuns", run="other", baseline="base", signal="tensor_grad_norm")
