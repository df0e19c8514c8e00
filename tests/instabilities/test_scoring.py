"""Goal: alarms are held against the truth as score.py's head says, whatever their order.
Method: made-up lines of a replay, alarms and series, scored by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instabilities.bars import of_faults, told_by_scorecard
from instabilities.monitors import Alarm, Run, all_monitors, bellwether
from instabilities.score import Verdict, deadline, family_table, judged, runs_of, scored, summary

WEIGHT = "layers.1.self_attn.q_proj.weight"


def line(step: int, severity: str, cause: str, **more: Any) -> str:
    return json.dumps(
        {"run": "r", "step": step, "state": "firing", "severity": severity, "layer": None,
         "heads": [], "rule": "loss", "key": "a1", "summary": "r: loss", "cause": cause, **more}
    )  # fmt: skip


def test_a_replay_is_read_with_its_places() -> None:
    printed = "\n".join([
        line(110, "warning", "dead experts", layer=1, experts=[[1, 3], [1, 5]], advice="Wait."),
        line(120, "critical", "replicas apart", layer=1, heads=[[0, 7], [1, 2], [1, 0]], key="b1",
             tensors=[WEIGHT], ranks=[4]),
        line(130, "warning", "unknown", rule="overhead"),
        line(140, "warning", "unknown", state="resolved"),
    ])  # fmt: skip
    first, second = bellwether.alarms_in(printed)
    assert (first.cause, first.layer, first.expert) == ("dead experts", 1, 3)
    assert first.more["advice"] == "Wait." and first.tensors == () and first.rank is None
    assert (second.heads, second.tensors, second.rank) == ((2, 0), (WEIGHT,), 4)


def test_detected_is_by_the_second_sample(truth: dict[str, Any]) -> None:
    assert deadline(truth) == 120 and deadline({**truth, "onset": 110}) == 120
    # Three layers take turns, or their modules in six samples.
    for family, until in (("faulty-kernel", 160), ("fp8-saturation", 220)):
        assert deadline({**truth, "family": family, "setting": {"layers": 3}}) == until
    for step, detected in ((105, True), (120, True), (121, False)):
        verdict = judged("r", truth, [Alarm(step, cause="corruption", layer=1, heads=(2,))])
        assert (verdict.detected, verdict.after) == (detected, step - 105)
        assert verdict.cause and verdict.place


def test_unknown_and_other_causes_are_wrong(truth: dict[str, Any]) -> None:
    for cause in ("unknown", "stall"):
        assert not judged("r", truth, [Alarm(110, cause=cause)]).cause


def test_the_most_severe_of_the_first_alarms_counts(truth: dict[str, Any]) -> None:
    alarms = [
        Alarm(118, "critical", "corruption", key="b1"), Alarm(110, key="a1"),
        Alarm(300, "critical", "stall", key="c1"),
    ]  # fmt: skip
    verdict = judged("r", truth, alarms)
    assert verdict.cause and verdict.after == 5
    assert not judged("r", truth, alarms[1:]).cause


def test_one_illness_is_judged_by_its_last_word_in_time(truth: dict[str, Any]) -> None:
    unknown, said = Alarm(106, key="a1"), Alarm(112, cause="corruption", key="a1")
    assert judged("r", truth, [unknown, said]).cause
    assert not judged("r", truth, [unknown, Alarm(150, cause="corruption", key="a1")]).cause


@pytest.mark.parametrize(
    ("alarm", "right"),
    [
        (Alarm(110, tensors=(WEIGHT,)), True), (Alarm(110, layer=1, heads=(3, 0, 2)), True),
        (Alarm(110, layer=1, heads=(3, 0, 1, 2)), False), (Alarm(110, layer=1), True),
        (Alarm(110, layer=0, heads=(2,)), False), (Alarm(110), False),
        (Alarm(110, tensors=("lm_head.weight",)), False),
    ],
)  # fmt: skip
def test_a_place_is_layer_and_head_or_tensor(
    truth: dict[str, Any], alarm: Alarm, right: bool
) -> None:
    assert judged("r", truth, [alarm]).place is right


def test_an_expert_has_to_be_named(truth: dict[str, Any]) -> None:
    dead = {**truth, "cause": "dead experts", "family": "dead-experts", "expert": 3, "tensor": None}
    assert judged("r", dead, [Alarm(110, layer=1, expert=3)]).place
    assert not judged("r", dead, [Alarm(110, layer=1, expert=2)]).place
    assert not judged("r", dead, [Alarm(110, layer=1)]).place


def test_alarms_before_the_fault_are_false(truth: dict[str, Any]) -> None:
    alarms = [Alarm(50, key="a1"), Alarm(60, key="a1"), Alarm(70, "critical", key="a1")]
    verdict = judged("r", truth, [*alarms, Alarm(110, key="a1")])
    assert (verdict.warnings, verdict.criticals, verdict.steps) == (1, 1, 105)
    assert verdict.alarm is None  # What went on is no detection.
    healthy = {**truth, "cause": "healthy", "family": "healthy", "kind": "healthy", "onset": None}
    assert judged("r", healthy, [Alarm(399)]).warnings == 1


def test_information_is_no_alarm_unless_asked_for(truth: dict[str, Any]) -> None:
    told = [Alarm(110, "info", "corruption")]
    assert judged("r", truth, told).alarm is None
    assert judged("r", truth, told, severity="info").detected


def test_slow_faults_are_told_before_the_loss_is_up(truth: dict[str, Any]) -> None:
    slow = {**truth, "kind": "slow", "loss_up": 200}
    verdicts = [judged("r", slow, [Alarm(step)]) for step in (150, 190, 200)]
    verdicts.append(judged("r", slow, []))
    assert [v.lead for v in verdicts] == [50, 10, 0, None]
    of = summary(verdicts)
    assert (of["in_time"], of["lead"], of["at_all"], of["steps"]) == (50, 30, 75, 85)


def test_time_left_is_held_against_the_rise_of_the_loss(truth: dict[str, Any]) -> None:
    slow = {**truth, "kind": "slow", "loss_up": 200}
    for eta, ratio, covers in (((100, 60, 150), 2, False), ((40, 30, 60), 0.8, True)):
        verdict = judged("r", slow, [Alarm(140), Alarm(150, key="b1", eta=eta)])
        assert (verdict.eta_ratio, verdict.eta_covers) == (ratio, covers)
    never = {**slow, "loss_up": None}
    told = [judged("r", never, [Alarm(150, eta=(50, 20, high))]) for high in (100, 900)]
    assert [verdict.eta_covers for verdict in told] == [False, None]
    of = summary([*told, judged("r", slow, [Alarm(150, eta=(40, 30, 60))])])["time_left"]
    assert of == {"told": 2, "in_interval": 50, "ratio": 0.8}


def test_harmless_runs_stand_apart(truth: dict[str, Any]) -> None:
    harmless = {**truth, "harmless": True}
    always = {**harmless, "cause": "faulty kernel", "family": "faulty-kernel"}
    verdicts = [judged("r", harmless, [Alarm(110)]), judged("r", harmless, [])]
    of = summary([*verdicts, judged("r", truth, [Alarm(110)]), judged("r", always, [])])
    assert (of["counted"], of["harmless_alarmed"], of["detected"]) == (2, 1, 50)


def test_splits_are_scored_apart(truth: dict[str, Any]) -> None:
    verdicts = [judged("r", {**truth, "split": split}, []) for split in ("train", "test", "test")]
    found = scored(verdicts)
    assert [found[split]["all"]["runs"] for split in ("train", "test")] == [1, 2]
    assert "| corruption | 2 | 0 of 0 | 0 |" in family_table(found["test"])


def of_kind(truth: dict[str, Any], kind: str, alarms: list[Alarm], count: int) -> list[Verdict]:
    known = {**truth, "kind": kind, "loss_up": 200}
    if kind == "healthy":
        known |= {"cause": "healthy", "family": "healthy", "onset": None, "steps": 1000}
        known |= dict.fromkeys(("layer", "head", "tensor"))
    return [judged("r", known, alarms)] * count


def test_bars_say_what_is_met_missed_or_not_judged(truth: dict[str, Any]) -> None:
    right, late = Alarm(110, cause="corruption", layer=1), Alarm(190, cause="corruption")
    verdicts = of_kind(truth, "injected", [right], 19) + of_kind(truth, "injected", [late], 1)
    told = {bar.bar: bar for bar in of_faults(verdicts)}
    detected, cause, place, in_time, warnings, criticals = told.values()
    assert (detected.figure, detected.met) == (95, True)
    assert cause.met and place.figure == 95 and place.met
    assert (in_time.figure, in_time.met) == (None, None)
    assert "| - | at least 90 | not judged: no such runs |" in in_time.row()
    assert (warnings.figure, criticals.figure) == (0, 0)
    verdicts += of_kind(truth, "slow", [], 1) + of_kind(truth, "healthy", [right], 1)
    verdicts += of_kind(truth, "injected", [], 1)
    states = [bar.met for bar in of_faults(verdicts)]
    assert states == [False, True, True, False, False, True]
    assert "| 90.5 | at least 95 | missed |" in of_faults(verdicts)[0].row()


def test_bars_of_recordings_are_those_of_the_scorecard() -> None:
    bars = told_by_scorecard(
        '{"run":"a"}\n{"run":null,"bars":[{"bar":"least lead","figure":612.0,"limit":500,'
        '"at_least":true,"goal":1000,"met":true},{"bar":"criticals","figure":null,"limit":0,'
        '"at_least":false,"goal":null,"met":null}]}\n'
    )
    assert [bar.met for bar in bars] == [True, None]
    assert bars[0].row() == "| least lead | 612 | at least 500, goal 1000 | met |"


def recorded(folder: Path, losses: list[float]) -> Run:
    rows = "".join(f"{step},{loss!r},{loss!r}\n" for step, loss in enumerate(losses))
    (folder / "r.csv").write_text("step,loss,grad_norm\n" + rows)
    return Run(folder / "r.bwrun")


def test_the_rules_of_others_fire_where_they_say(tmp_path: Path) -> None:
    noise = [2 + 0.01 * (step * 7919 % 13) for step in range(400)]
    monitors = {n: alarms for n, alarms in all_monitors().items() if n != "bellwether"}
    assert len(monitors) == 5
    quiet = recorded(tmp_path, noise)
    assert {name: monitor(quiet) for name, monitor in monitors.items()} == {n: [] for n in monitors}
    for height, fires in (
        (3.0, {"loss 6 sigma", "gradient z 2.5"}),
        (30.0, set(monitors)),
    ):
        run = recorded(tmp_path, [*noise[:300], *[height] * 10, *noise[310:]])
        found = {name: [a.step for a in monitor(run)] for name, monitor in monitors.items()}
        assert {name for name, steps in found.items() if steps} == fires
        assert all(steps[0] in (300, 304) for steps in found.values() if steps)


def test_a_folder_without_its_recordings_is_refused(truth: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no runs"):
        runs_of(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(truth))
    with pytest.raises(ValueError, match=r"a\.bwrun is missing"):
        runs_of(tmp_path)
