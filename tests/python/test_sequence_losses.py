"""Goal: what is told of the losses of sequences equals a recomputation in float64, and the largest
are named by their ids, which leave the job hashed.  A batch of one repeated token is seen at once.
Method: trainings that tell losses they made up, compared with their recordings.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import bellwether
from bellwether._step import sequence_losses
from bellwether._step.sequence_losses import (
    EVENT_EVERY,
    EVENTS_MAX,
    ID_MAX,
    KNOWN_AFTER,
    LARGEST,
    SEQUENCES_MAX,
    SequenceLosses,
    read,
)

from models import Model, Shape, batch
from no_waiting import DEVICE, NoWaiting
from recording import Recording

SHAPE = Shape(fused=False)
TOKENS = 32


def hashed(value: Any) -> str:
    return hashlib.blake2b(str(value).encode(), digest_size=8).hexdigest()


def trained(
    path: Optional[Path], steps: int, tell: Callable[[Any, int], None], explicit: bool = True
) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = Model(SHAPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, status = None, None
    if path is not None:
        monitor = bellwether.attach(model, run="l", record=str(path), every=1)
    for step in range(steps):
        model(batch(SHAPE, step)).square().mean().backward()
        tell(monitor, step)
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None and explicit:
            monitor.step()
    if monitor is not None:
        assert monitor.why_off == "", monitor.why_off
        status = monitor.status()
        monitor.detach()
    return [p.detach() for p in model.parameters()], status


def told(path: Path, step: int) -> dict[str, float]:
    found = Recording(path, ended=True).steps()[step]
    return {name: float(v[0, 0]) for name, v in found.items() if name.startswith("loss_")}


@pytest.mark.parametrize("explicit", (False, True))
def test_values_are_those_of_float64(explicit: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    losses = [[torch.rand(n) * 4 for n in (5, 12)] for _ in range(4)]
    labels = [[torch.randint(0, 3, (len(x), TOKENS)) for x in of] for of in losses]
    for of in labels:
        of[0][:, :7] = -100

    def tell(monitor: Any, step: int) -> None:
        for x, y in zip(losses[step], labels[step]):
            monitor.losses(x.requires_grad_(), labels=y)

    path = tmp_path / "a.bwrun"
    trained(path, 4, tell, explicit)
    for step, (of, given) in enumerate(zip(losses, labels)):
        double = [x.detach().double() for x in of]
        whole = torch.cat(double)
        repeated = sum(
            float(row[i] == row[i - 1] and row[i] != -100)
            for y in given for row in y for i in range(1, TOKENS)
        )  # fmt: skip
        wanted = {
            "loss_sequences": 17,
            "loss_sequence_sum": float(whole.sum()),
            "loss_sequence_max": float(whole.max()),
            "loss_microbatch_max": max(float(x.mean()) for x in double),
            "loss_tokens": 17 * TOKENS - 5 * 7,
            "loss_masked_tokens": 5 * 7,
            "loss_given_tokens": 17 * TOKENS,
            "loss_repeated_tokens": repeated,
        }
        assert told(path, step) == pytest.approx(wanted, rel=1e-6)


def test_a_batch_of_one_repeated_token_is_told(tmp_path: Path) -> None:
    torch.manual_seed(1)

    def tell(monitor: Any, step: int) -> None:
        labels = torch.randint(0, 1000, (4, TOKENS))
        labels = torch.full_like(labels, 7) if step == 3 else labels
        monitor.losses(torch.rand(4), labels=labels)

    path = tmp_path / "a.bwrun"
    trained(path, 5, tell)
    share = [told(path, s)["loss_repeated_tokens"] / told(path, s)["loss_tokens"] for s in range(5)]
    assert share[3] == (TOKENS - 1) / TOKENS and max(share[:3]) < 0.1


def test_the_largest_are_named_by_hashed_ids(tmp_path: Path) -> None:
    losses = torch.arange(20.0)

    def tell(monitor: Any, step: int) -> None:
        monitor.losses(losses[:10], ids=[f"doc-{i}" for i in range(10)])
        monitor.losses(losses[10:], ids=torch.arange(10, 20))

    _, status = trained(tmp_path / "a.bwrun", 2, tell)
    largest = status["losses"]["largest"]
    assert [x["loss"] for x in largest] == [float(19 - i) for i in range(LARGEST)]
    assert [x["id"] for x in largest] == [hashed(19 - i) for i in range(LARGEST)]


def test_allowed_ids_are_sent_as_they_are_and_bounded(tmp_path: Path) -> None:
    ids = ["a\nb", "x" * 1000]

    def tell(monitor: Any, step: int) -> None:
        monitor.losses([2.0, 1.0], ids=ids, allow_ids=True)

    _, status = trained(tmp_path / "a.bwrun", 2, tell)
    assert [x["id"] for x in status["losses"]["largest"]] == ["a b", "x" * ID_MAX]


def test_a_loss_far_beyond_the_others_is_an_event(tmp_path: Path) -> None:
    torch.manual_seed(1)
    bad = KNOWN_AFTER + 10

    def tell(monitor: Any, step: int) -> None:
        losses = 2 + 0.1 * torch.rand(16)
        if step in (5, bad, bad + 3):
            losses[6] = 40.0
        monitor.losses(losses, ids=[f"{step}/{i}" for i in range(16)])

    path = tmp_path / "a.bwrun"
    _, status = trained(path, bad + 6, tell)
    events = [e for e in Recording(path, ended=True).events if "largest losses" in e.text]
    assert [e.step for e in events] == [bad] and events[0].value == 40
    assert events[0].text.startswith(f"largest losses of sequences: 40 {hashed(f'{bad}/6')}, 2.")
    assert status["losses"]["events"] == 1


def test_ids_leave_the_job_hashed(tmp_path: Path) -> None:
    def tell(monitor: Any, step: int) -> None:
        monitor.losses(torch.tensor([1.0, math.nan]), ids=["secret-a", "secret-b"])

    path = tmp_path / "a.bwrun"
    trained(path, 3, tell)
    recording = Recording(path, ended=True)
    assert not any("secret" in str(message) for message in recording.messages)


def test_a_loss_that_is_no_number_is_the_largest() -> None:
    losses = SequenceLosses()
    one = read(torch.tensor([1.0, math.nan]), [1, 2], None, -100, True)
    _, event = losses.of_frame(0, [one])
    assert math.isnan(losses.status["largest"][0]["loss"])
    assert losses.status["largest"][0]["id"] == "2" and event is None


@pytest.mark.parametrize("bad", (math.inf, -math.inf))
def test_an_infinite_loss_of_either_sign_is_listed(bad: float, tmp_path: Path) -> None:
    values = [*(float(i) for i in range(2 * LARGEST)), bad, -5.0, math.nan, bad]
    ids = [f"id-{i}" for i in range(len(values))]

    def tell(monitor: Any, step: int) -> None:
        monitor.losses(values[:-2], ids=ids[:-2], allow_ids=True)
        monitor.losses(values[-2:] if step == 2 else values[-1:], ids=None)

    path = tmp_path / "a.bwrun"
    _, status = trained(path, 2, tell)
    largest = status["losses"]["largest"]
    assert [x["loss"] for x in largest] == [bad, bad, *values[15:9:-1]]
    assert largest[0]["id"] == "id-16"
    found = told(path, 1)
    assert found["loss_sequence_max"] == max(15.0, bad) and found["loss_sequence_sum"] == bad
    _, status = trained(path, 3, tell)
    assert math.isnan(status["losses"]["largest"][0]["loss"])
    assert [x["loss"] for x in status["losses"]["largest"][1:4]] == [bad, bad, 15.0]


def test_many_infinite_losses_hide_no_largest_one(tmp_path: Path) -> None:
    path = tmp_path / "a.bwrun"
    values = torch.tensor([-math.inf] * (LARGEST + 1) + [3.0, 2.0])
    _, status = trained(path, 2, lambda monitor, step: monitor.losses(values))
    assert [x["loss"] for x in status["losses"]["largest"]] == [-math.inf] * LARGEST
    assert told(path, 1)["loss_sequence_max"] == 3.0


def test_events_are_few() -> None:
    losses = SequenceLosses()
    told = 0
    for step in range(KNOWN_AFTER + 4 * EVENT_EVERY):
        values = [1.0, 1.1 + 50.0 ** (step > KNOWN_AFTER) * step]
        one = read(torch.tensor(values), None, None, -100, False)
        told += losses.of_frame(step, [one])[1] is not None
    assert 1 <= told <= 4


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_no_earlier_event_hides_a_loss_that_is_not_finite(bad: float) -> None:
    losses, told = SequenceLosses(), {}
    for step in range(KNOWN_AFTER + 20 + EVENT_EVERY):
        values = [1.0, 1.1, 1.2]
        if step == KNOWN_AFTER + 5:
            values[0] = 50.0
        if step >= KNOWN_AFTER + 10:
            values[1] = bad
        one = read(torch.tensor(values), ["a", "b", "c"], None, -100, True)
        event = losses.of_frame(step, [one])[1]
        if event is not None:
            told[step] = event[0]
    first = KNOWN_AFTER + 10
    assert list(told) == [KNOWN_AFTER + 5, first, first + EVENT_EVERY]
    assert f": {bad:.4g} b, " in told[first]
    assert losses.status["events"] == 3


def test_a_rollback_begins_the_wait_for_events_anew() -> None:
    losses, told = SequenceLosses(), []
    for step in (*range(500, 540), *range(100, 110)):
        values = [1.0, 1.1 if step not in (530, 535, 105, 107) else math.nan]
        event = losses.of_frame(step, [read(torch.tensor(values), None, None, -100, False)])[1]
        told += [] if event is None else [step]
    assert told == [530, 105]


def test_far_losses_use_up_no_event_of_nan() -> None:
    losses, told = SequenceLosses(), []
    for step in range(KNOWN_AFTER + EVENT_EVERY * (EVENTS_MAX + 2)):
        values = [1.0, 1.1]
        if step > KNOWN_AFTER and step % EVENT_EVERY == 0:
            values[0] = 1e4 * (1 + step)
        if step > KNOWN_AFTER + EVENT_EVERY * (EVENTS_MAX + 1):
            values[0] = math.nan
        event = losses.of_frame(step, [read(torch.tensor(values), None, None, -100, False)])[1]
        told += [] if event is None else [event[1]]
    assert len(told) == EVENTS_MAX + 1 and math.isnan(told[-1])


@pytest.mark.parametrize(
    "wrong",
    (
        {"losses": []},
        {"losses": torch.zeros(SEQUENCES_MAX + 1)},
        {"losses": torch.zeros(2, dtype=torch.int64)},
        {"losses": [1.0, 2.0], "ids": ["a"]},
        {"losses": [1.0, 2.0], "ids": "ab"},
        {"losses": [1.0, 2.0], "ids": torch.zeros(2)},
        {"losses": [1.0], "labels": torch.zeros(2)},
        {"losses": [1.0], "labels": [1, 2]},
        {"losses": "one"},
        {"losses": None},
    ),
)
def test_bad_arguments_cost_themselves_alone(wrong: dict[str, Any], tmp_path: Path) -> None:
    def tell(monitor: Any, step: int) -> None:
        given = dict(wrong)
        monitor.losses(given.pop("losses"), **given)

    path = tmp_path / "a.bwrun"
    _, status = trained(path, 2, tell)
    assert len(status["numbers_left_out"]) == 1 and status["errors"] == 0
    assert told(path, 1) == {}


def test_no_bit_of_a_training_changes(tmp_path: Path) -> None:
    def tell(monitor: Any, step: int) -> None:
        losses = torch.rand(4, requires_grad=True)
        if monitor is not None:
            monitor.losses(losses, ids=range(4), labels=torch.zeros(4, 8, dtype=torch.int64))

    plain, _ = trained(None, 5, tell)
    watched, _ = trained(tmp_path / "a.bwrun", 5, tell)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))


def test_no_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copied:
        def __init__(self, tensors: list[Tensor]) -> None:
            assert all(t.device.type == DEVICE for t in tensors)

    monkeypatch.setattr(sequence_losses, "Arriving", Copied)
    monkeypatch.setattr(sequence_losses, "_DEVICES", (DEVICE,))
    losses, ids = (torch.empty(16, dtype=d, device=DEVICE) for d in (torch.float32, torch.int64))
    labels = torch.empty(16, TOKENS, dtype=torch.int64, device=DEVICE)
    with NoWaiting() as seen:
        read(losses, ids, labels, -100, False)
    assert seen.operations
