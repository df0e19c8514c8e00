"""Goal: a truth with anything missing, unknown or impossible is refused by its name; what a fault
did to the loss is measured against the twin.
Method: made-up truths with one thing wrong each; made-up losses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instabilities import truth as truths
from instabilities.causes import CAUSES, FAMILIES, family
from instabilities.faults import FAULTS


def test_a_truth_that_is_right_is_taken(truth: dict[str, Any], tmp_path: Path) -> None:
    truths.check(truth)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(truth))
    assert truths.read(path) == truth


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cause", "gremlins"), ("cause", "stall"), ("family", "gremlins"), ("split", "validation"),
        ("kind", "sudden"), ("kind", "healthy"), ("onset", None), ("onset", -1), ("onset", 1.5),
        ("onset", 4000), ("strength", "large"), ("harmless", None), ("layer", "1"), ("steps", True),
        ("mood", "good"),
    ],
)  # fmt: skip
def test_a_faulty_truth_is_refused(
    truth: dict[str, Any], field: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**truth, field: value}))
    with pytest.raises(ValueError, match=r"a\.json: .*" + (field if field != "cause" else "")):
        truths.read(path)


def test_a_case_from_a_false_alarm_is_taken(truth: dict[str, Any]) -> None:
    nowhere = dict.fromkeys((*truths.PLACES, "onset", "until", "strength", "loss_up"))
    healthy = {"cause": "healthy", "family": "healthy", "kind": "healthy", "harmless": True}
    case = {**truth, **nowhere, **healthy, "split": truths.FIELD, "false_alarms": [{"by": "ann"}]}
    truths.check(case)
    with pytest.raises(ValueError, match="false_alarms is 'ann', list is legal"):
        truths.check({**case, "false_alarms": "ann"})


def test_a_truth_without_a_field_is_refused(truth: dict[str, Any]) -> None:
    for name in list(truth):
        with pytest.raises(ValueError, match=f"{name} is missing"):
            truths.check({of: value for of, value in truth.items() if of != name})


def test_the_loss_is_up_where_its_mean_is() -> None:
    twin = [2.0] * 100
    assert truths.loss_up(twin, twin, 0) is None and truths.is_harmless(twin, twin, 0)
    assert truths.loss_up([*twin[:60], *[2.4] * 40], twin, 30) == 65  # 6 of 20 values are 20 % above.
    assert truths.loss_up([*twin[:60], float("nan"), *twin[61:]], twin, 0) == 60
    # It cost 10 % before its first bad step.
    dearer = [*[2.2] * 60, *[2.25] * 20, *[2.6] * 20]
    assert truths.loss_up(dearer, twin, 60) == 83


def test_harm_is_a_loss_that_rose_or_ends_higher() -> None:
    twin = [2.0] * 100
    assert truths.is_harmless([1.5] * 100, twin, 0)
    assert truths.is_harmless([2.03] * 100, twin, 0)
    assert not truths.is_harmless([2.05] * 100, twin, 0)
    assert not truths.is_harmless([*twin[:50], 9.0, *twin[51:]], twin, 0)


def test_each_family_is_made() -> None:
    assert set(FAMILIES) == {"healthy", *FAULTS}
    assert all(family(cause).cause == cause for cause in CAUSES)
