"""Goal: attention of transformers is watched whole, with numbers that are right, however it is
trained; where something cannot be there, less_than_full.py says which tensor does not exist.
Method: some cells of the matrix (matrix.py) that are full.  Two are run with a fault, which has to
be found.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import architectures
import definitions
import less_than_full
import matrix
import support_table
from cell import Cell, prepare, run_cell
from comparison import GROUPS
from definitions import Call

# Of all architectures, implementations, batches and modes some that are full; the list grows.
SLICE = """
cohere2 sdpa window reentrant float32
modernbert_decoder eager plain train autocast
stablelm bellwether plain checkpoint float32
clip eager padded_right checkpoint bfloat16
modernbert bellwether window train bfloat16
hubert bellwether padded_right reentrant autocast
opt sdpa mixed checkpoint autocast
granitemoe eager packed reentrant bfloat16
marian sdpa padded_right train float32
deepseek_v3 sdpa plain reentrant bfloat16
nemotron eager padded_left train float32
olmoe bellwether padded_left reentrant bfloat16
siglip bellwether mixed reentrant float32
mistral bellwether packed train autocast
starcoder2 sdpa packed checkpoint float32
gemma sdpa padded_left checkpoint autocast
gpt2 eager mixed train bfloat16
qwen2 bellwether window reentrant autocast
gpt_oss eager window train bfloat16
t5 bellwether mixed checkpoint bfloat16
llama4 eager padded_left train bfloat16
smollm3 sdpa mixed train float32
persimmon sdpa plain train bfloat16
falcon sdpa padded_right checkpoint bfloat16
mixtral sdpa padded_left train bfloat16
falcon_alibi sdpa padded_left train float32
roberta eager plain checkpoint bfloat16
distilbert eager padded_left reentrant bfloat16
dinov2 sdpa plain train autocast
phi3 sdpa mixed reentrant bfloat16
bart bellwether plain train autocast
bert sdpa plain checkpoint autocast
gpt_bigcode bellwether padded_right checkpoint bfloat16
vit sdpa plain checkpoint autocast
esm bellwether padded_left reentrant float32
gemma2 eager plain checkpoint float32
gpt_bigcode_mha bellwether padded_right train autocast
olmo3 sdpa padded_left checkpoint bfloat16
qwen3_moe sdpa mixed reentrant autocast
deepseek_v2 eager mixed train autocast
qwen3_next sdpa plain checkpoint autocast
nomic_bert bellwether padded_right train autocast
llama sdpa plain train float32
llama flex_attention padded_left train float32
gemma3 flex_attention window checkpoint bfloat16
vit sdpa plain compile bfloat16
cohere2 sdpa window compile bfloat16
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        prepare(tmp_path_factory.mktemp("matrix"), patch.setenv)
        yield


@pytest.mark.parametrize("words", SLICE.strip().splitlines())
def test_a_cell_has_every_signal_and_right_numbers(words: str, prepared: None) -> None:
    result = dataclasses.asdict(run_cell(Cell(*words.split())))
    assert matrix.passed(result), matrix.describe(result)


def test_a_number_that_is_off_is_found(prepared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = definitions.of_call

    def off(call: Call) -> definitions.Expected:
        found = plain(call)
        found.values["entropy_sum"] = found.values["entropy_sum"] * (1 + 1e-4)
        return found

    monkeypatch.setattr(definitions, "of_call", off)
    result = run_cell(Cell("llama", "sdpa", "padded_left", "compile", "bfloat16"))
    assert result.outcome == "wrong"
    assert all(text.startswith("entropy_sum of model.layers.") for text in result.wrong)


def test_a_signal_that_is_missing_is_found(prepared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BELLWETHER_STATS", "drift,ties,leak")
    result = run_cell(Cell("llama", "sdpa", "plain", "train", "float32"))
    assert result.outcome == "partly" and set(result.missing) == {"delta", "sigma"}
    assert not matrix.passed(dataclasses.asdict(result))


def test_the_cover_has_each_pair_in_few_cells() -> None:
    assert len(architectures.ALL) >= 40
    every, cover = matrix.every_cell(), matrix.cover()
    assert len(cover) <= 400 and set(cover) <= set(every)
    assert set().union(*map(matrix.pairs, every)) == set().union(*map(matrix.pairs, cover))
    for at, words in enumerate(
        (architectures.IMPLEMENTATIONS, architectures.BATCHES, architectures.MODES), 1
    ):
        assert {cell[at] for cell in cover} == set(words)


def test_few_cells_may_be_less_than_full() -> None:
    cover = matrix.cover()
    less = [cell for cell in cover if any(less_than_full.allows(cell, {g}) for g in GROUPS)]
    assert len(less) <= 0.1 * len(cover)
    assert all(one.tensor for one in less_than_full.ALL)


def test_the_tables_of_documents_are_those_of_the_results() -> None:
    data = json.loads(support_table.DATA.read_text())
    for path, write in support_table.TABLES.items():
        assert support_table.within(path.read_text()) == write(data), support_table.HOW


def test_the_newest_results_count_beside_those_of_other_versions() -> None:
    data: dict[str, Any] = {"trained": [], "packages": {}, "gpu": {}}
    cell = {"cell": "llama sdpa plain train float32", "missing": {}}
    for key, outcome in (("3/2/5/cpu/old", "wrong"), ("3/2/5/cpu/new", "full"),
                         ("3/1/4/cpu/new", "full"), ("3/1/4/cpu/new", "wrong")):  # fmt: skip
        support_table.take(data, [json.dumps({"key": key, "outcome": outcome, **cell})])
    assert [t["versions"]["torch"] for t in data["trained"]] == ["2", "1"]
    row = support_table.architectures_table(data).splitlines()[5]
    assert row == "| llama | decoder | full / 0 of 1 |  |  |  |"


def test_after_the_time_no_cell_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--results", str(tmp_path / "results.jsonl"), "--jobs", "4", "--seconds", "0"]
    assert matrix.main(["--random", "7", "--seed", "1", "--without", "compile", *where]) == 1
    said = capsys.readouterr().out
    assert "seed 1\n" in said and "7 cells: 0 full" in said and "7 not begun" in said


@pytest.mark.parametrize("wrong", (["--only", "lama"], ["--without", "x"], ["--jobs", "0"]))
def test_wrong_arguments_are_said(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main([*wrong, "--list"])
    assert wrong[0] in capsys.readouterr().err


def test_cells_run_once_and_a_dead_process_takes_one(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results = matrix.Results(path)
    results.add({"cell": "a", "outcome": "full"})
    path.open("a").write('{"cell": "cut')
    again = matrix.Results(path)
    assert again.found == {"a": {"key": again.key, "cell": "a", "outcome": "full"}}
    worker = matrix.Worker()
    try:
        gone = worker.run(Cell(*itertools.repeat("", 5)))  # It is told nothing that it understands.
    finally:
        worker.end()
    assert gone["outcome"] == "crashed"
