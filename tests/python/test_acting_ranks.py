"""Goal: the ranks of a job apply an action at the same step or not at all, the lowest answers for
all, and nothing of it holds training up, whatever becomes of the other rank.
Method: two real processes with gloo and DDP, actions handed to rank 0.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import run_ranks

import acting_job
from conftest import in_long
from recording import Recording


def job(case: str, folder: Path, attempts: tuple[int, int] = (0, 0)) -> list[dict[str, Any]]:
    """What the ranks did, which were told these numbers of the attempt; a rank that was killed did
    nothing."""
    script = Path(__file__).with_name("acting_job.py")
    killed = [1] if case == "killed" else []
    of_rank = {"BELLWETHER_ATTEMPT": attempts}
    said = run_ranks(script, str(folder), case, of_rank=of_rank, killed=killed)
    found = []
    for rank in range(2):
        path = folder / f"rank{rank}.json"
        found.append(
            {**(json.loads(path.read_text()) if path.exists() else {}), "said": said[rank]}
        )
        assert not found[-1].get("errors"), found[-1]["errors"]
    return found


def changes(values: list[Any]) -> dict[int, Any]:
    """Step -> the new value, wherever it is not that of the step before."""
    return {i: v for i, v in enumerate(values) if i and v != values[i - 1]}


def answers(rank: dict[str, Any]) -> list[tuple[bool, int, str]]:
    found = rank["actions"]["answers"].values()
    return [(a["applied"], a["step"], a["reason"]) for a in found]


# torchrun's nodes count by themselves: what the root is handed is of its own attempt's number.
@pytest.mark.parametrize("attempts", in_long([(0, 0)], [(0, 0), (0, 3)]))
def test_both_apply_at_the_same_step(tmp_path: Path, attempts: tuple[int, int]) -> None:
    first, second = job("agrees", tmp_path, attempts)
    assert changes(first["words"]) == changes(second["words"])
    assert changes(first["rates"]) == changes(second["rates"])
    [(centred_at, words)] = changes(first["words"]).items()
    [(scaled_at, factor)] = changes(first["rates"]).items()
    assert words == ["+", "+"] and factor == 0.5
    # An offer, a vote, a confirmation: each 16 steps behind the one before.
    assert centred_at <= 20 + 3 * 16 and scaled_at == centred_at + 48
    assert first["saves"] == second["saves"] and len(first["saves"]) == 1
    assert first["weights"] == second["weights"]  # Also clipped alike, at the same step.
    told = answers(first)
    assert [(applied, step) for applied, step, _ in told][:2] == [
        (True, centred_at), (True, scaled_at),
    ]  # fmt: skip
    assert all(applied for applied, *_ in told) and len(told) == 4
    assert second["actions"]["answers"] == {} and second["why_off"].startswith("rank 0 reports")
    recorded = Recording(tmp_path / "r.bwrun", ended=True)
    assert recorded.hello.ranks_agree and sorted(recorded.hello.capabilities) == [1, 2, 3, 4, 5, 9]
    assert not (tmp_path / "r-rank1.bwrun").exists()
    launched = [t for t in first["launch"] if t > 0]
    print(f"launching took {1e6 * statistics.median(launched):.0f} us, once in 16 steps")
    # The quickest: others may be given the core in the midst of any.
    assert min(launched) < 0.005


def test_the_rank_that_has_the_head_clips_it(tmp_path: Path) -> None:
    """Tensor parallel: layer 1's heads 2 and 3, which share a key head, are rank 1's."""
    first, second = job("tp", tmp_path)
    [(applied, step, word)] = answers(first)
    assert applied and second["actions"]["answers"] == {} and word == "no head of this process"
    ratio = [
        [a / b for a, b in zip(rank["norms"][step][which], rank["norms"][step - 1][which])]
        for rank in (first, second)
        for which in (0, 1)
    ]
    assert ratio[0] == pytest.approx([1, 1], abs=0.01)
    assert ratio[2] == pytest.approx([1, 0.25], abs=0.01)  # The key head stays: head 2 needs it.
    assert ratio[1] + ratio[3] == pytest.approx([1, 1], abs=0.01)


def test_a_rank_that_cannot_apply_stops_all(tmp_path: Path) -> None:
    first, second = job("refuses", tmp_path)
    assert first["stops"] == [] and second["stops"] == []
    (stopped, _, why), (centred, step, _) = answers(first)
    assert not stopped and why == "rank 1 cannot; its log says why"
    assert "nothing here carries it out" in second["said"]
    assert centred and changes(first["words"]) == changes(second["words"]) == {step: ["+", "+"]}


def test_failure_on_one_rank_is_undone_on_all(tmp_path: Path) -> None:
    first, second = job("raises", tmp_path)
    [(applied, _, why)] = answers(first)
    assert not applied and why == "rank 1 cannot; its log says why"
    assert "RuntimeError: planted" in second["said"]
    on, off = changes(first["words"]).items()
    assert on[1] == ["hp", "hp"] and off == (on[0] + 16, ["", ""])
    assert changes(second["words"]) == {}


def test_a_rank_that_dies_ends_actions_and_nothing_else(tmp_path: Path) -> None:
    first, _ = job("killed", tmp_path)
    assert len(first["words"]) == acting_job.STEPS["killed"]  # It trained on.
    (before, step, _), (after, _, why) = answers(first)
    assert before and changes(first["rates"]) == {step: 0.5} and step < acting_job.KILLED_AT
    assert not after and "the ranks do not agree any more" in why
    # WAIT_SECONDS (5) and what a busy machine adds; gloo's own patience would be 30 s.
    assert first["longest"] < 20
    assert first["actions"]["ranks_agree"] is False


def test_without_all_ranks_only_what_is_harmless_alone(tmp_path: Path) -> None:
    first, second = job("not all", tmp_path)
    (scaled, _, why), (centred, step, _) = answers(first)  # (The refusal came first.)
    assert not scaled and "not all ranks have attached with allow=" in why
    assert centred and step == 21 and changes(first["words"]) == {21: ["+", "+"]}
    assert second["why_off"].startswith("rank 0 reports") and second["words"] == []
    hello = Recording(tmp_path / "r.bwrun", ended=True).hello
    assert not hello.ranks_agree and sorted(hello.capabilities) == [1, 2, 9]


@pytest.mark.parametrize("world", ["1", "2"])
def test_without_a_process_group_each_for_itself(
    world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asking import Training

    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("RANK", "0")
    training = Training(tmp_path / "a.bwrun", ranks="all")
    training.step(2)
    centre = training.ask("attention.center_k", value=1, apply_at_step=4)
    rate = training.ask("lr.scale", value=0.5, apply_at_step=4)
    training.step(4)
    answer = training.answer(centre)
    assert answer == {"applied": True, "step": 4, "reason": ""}
    answer = training.answer(rate)
    assert answer and answer["applied"] == (world == "1"), answer
    training.ends()
