"""Goal: an action is applied once, at the boundary that it names, and answered; whatever is not
allowed, not legal, late or repeated changes nothing and says why; nothing reaches the training.
Method: actions as JSON into the monitor of a small model that trains and is recorded.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import bellwether
from bellwether._actions import callbacks
from bellwether._hook import attention_switch
from bellwether._step.boundaries import Boundaries
from bellwether.actions import Malformed, allowed, decode, out_of_range

from asking import ALL, Training, action
from models import Shape
from recording import Recording


@pytest.fixture(autouse=True)
def no_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "_everywhere", {})


def test_allow_lists_are_parsed_and_checked() -> None:
    assert allowed("attention.mode, stop") == {"attention.mode", "stop"}
    assert allowed("[qk.clip]") == {"qk.clip"} and allowed("") == frozenset()
    with pytest.raises(ValueError, match=r"\['qk.clop'\] unknown, legal are .*'qk.clip'"):
        allowed({"qk.clop"})
    with pytest.raises(ValueError, match=r"allow: .*rollback"):
        bellwether.attach(torch.nn.Linear(2, 2), allow=["rollback.suggest"])


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("attention.mode", {"mode": "hp-nolt"}, "mode = 'hp-nolt': fa, paper, sr, hp, hpm, sdpa"),
        ("attention.center_k", {"value": 2}, "value = 2: 0 .off. and 1 .on."),
        ("qk.clip", {"value": 1.5}, "value = 1.5: a gamma"),
        ("qk.clip", {"value": -0.1}, "value = -0.1: a gamma"),
        ("lr.scale", {"value": 0}, "value = 0: a factor"),
        ("lr.scale", {"value": 10.5}, "value = 10.5: a factor"),
        ("batch.skip", {"value": 1001}, "value = 1001: 1 to 1000"),
        ("batch.skip", {"value": 1.5}, "value = 1.5: 1 to 1000"),
        ("sampling.deepen", {"value": 1_000_001}, "1 to 1000000 steps"),
        ("qk.clip", {"undoes": "a-1"}, "qk.clip cannot be undone"),
    ],
)
def test_ranges(kind: str, fields: dict[str, Any], why: str) -> None:
    import re

    assert re.search(why, out_of_range(decode(action(kind, **fields))) or "")


@pytest.mark.parametrize(
    "payload",
    ["", "[]", "{}", '{"id": 5}', '{"id": "a", "kind": "ACTION_KIND_RM"}', "[" * 100_000,
     '{"id": "a", "kind": "ACTION_KIND_STOP", "value": "much"}',
     '{"id": "a", "kind": "ACTION_KIND_STOP", "apply_at_step": "-1"}',
     '{"id": "a", "kind": "ACTION_KIND_STOP", "attempt": true}',
     '{"id": "a", "kind": "ACTION_KIND_STOP", "scope": {"layers": ["x"]}}',
     '{"id": "a", "kind": "ACTION_KIND_STOP", "scope": {"heads": [[1, 2]]}}',
     '{"id": "a", "kind": ["ACTION_KIND_STOP"]}', '{"id": "' + "a" * 65 + '"}'],
)  # fmt: skip
def test_malformed_actions_are_rejected(payload: str) -> None:
    with pytest.raises(Malformed):
        decode(payload)


def test_protobufs_json_is_read() -> None:
    from google.protobuf.json_format import MessageToJson

    from bellwether.v1 import actions_pb2  # type: ignore[import-not-found, unused-ignore]

    message = actions_pb2.Action(
        id="12345678-1", attempt=2, kind=actions_pb2.ACTION_KIND_QK_CLIP, value=0.25,
        apply_at_step=1 << 40, expires_unix_ns=1 << 60, undoes="12345678-0",
    )  # fmt: skip
    message.scope.layers.extend([3, 1])
    message.scope.heads.add(layer=0, head=7)
    message.scope.heads.add()
    read = decode(MessageToJson(message, preserving_proto_field_name=True))
    assert (read.id, read.attempt, read.kind, read.value) == ("12345678-1", 2, "qk.clip", 0.25)
    assert (read.apply_at_step, read.expires_unix_ns) == (1 << 40, 1 << 60)
    assert (read.layers, read.heads, read.undoes) == ((1, 3), ((0, 7), (0, 0)), "12345678-0")
    names = {v.name for v in actions_pb2.ActionKind.DESCRIPTOR.values if v.number}
    from bellwether.actions import JSON_KINDS, KINDS

    assert names == set(JSON_KINDS)
    for name, kind in JSON_KINDS.items():
        assert actions_pb2.ActionKind.Value(name) == KINDS[kind]


@pytest.mark.parametrize("told", [True, False])
def test_nothing_allowed_or_nothing_asked_changes_no_bit(told: bool, tmp_path: Path) -> None:
    plain = Training(None)
    plain.step(6)
    for allow in ("", ALL):
        asked = Training(tmp_path / f"{len(allow)}.bwrun", allow=allow, told=told)
        carries = [attention_switch.ATTRIBUTE in vars(m) for m in asked.model.attentions()]
        assert carries == [bool(allow)] * 2
        asked.step(3)
        for kind in ("attention.mode", "stop", "batch.skip"):  # Malformed or not to be had here.
            asked.ask(kind, mode="none")
        asked.step(3)
        asked.ends()
        assert all(torch.equal(a, b) for a, b in zip(plain.losses, asked.losses))
        for p, q in zip(plain.model.parameters(), asked.model.parameters()):
            assert torch.equal(p, q)
        assert not any(attention_switch.ATTRIBUTE in vars(m) for m in asked.model.attentions())
    assert attention_switch.users == 0


def test_refusals_say_why(tmp_path: Path) -> None:
    training = Training(tmp_path / "a.bwrun", allow={"attention.center_k", "stop"})
    training.step(3)
    now = time.time_ns()
    why = {
        training.ask("lr.scale", value=0.5): "not allowed: attach(allow=...)",
        training.ask("stop"): "nothing here carries it out: bellwether.on_action('stop', ...)",
        training.ask("attention.center_k", value=3): "value = 3",
        training.ask("attention.center_k", value=1, attempt=1): "it is for attempt 1, and this",
        training.ask("attention.center_k", value=1, expires_unix_ns=str(now - 1)): "expired",
        training.ask("attention.center_k", value=1, apply_at_step="3"): "late: step 3 has begun",
        training.ask("attention.center_k", undoes="x-1"): "x-1 is not in force here",
        training.ask("attention.center_k", value=1, scope={"layers": [2]}): "the model has 2",
    }
    soon = training.ask(
        "attention.center_k", value=1, apply_at_step=5, expires_unix_ns=time.time_ns() + 10**7
    )
    time.sleep(0.02)
    training.step(3)
    why[soon] = "expired"
    for id, text in why.items():
        answer = training.answer(id)
        assert answer is not None and not answer["applied"] and text in answer["reason"], answer
    assert not any(layer.seen.centred for layer in training.monitor.layers)
    training.ends()
    results = {
        m.action_result.id: m.action_result
        for m in Recording(tmp_path / "a.bwrun", ended=True).messages
        if m.WhichOneof("body") == "action_result"
    }
    assert results.keys() == why.keys() and not any(r.applied for r in results.values())


@pytest.mark.parametrize("told", [True, False])
def test_applied_at_the_step_it_names_and_answered_again(told: bool, tmp_path: Path) -> None:
    training = Training(tmp_path / "a.bwrun", told=told)
    training.step(2)
    seen: list[tuple[int, str]] = []
    training.monitor.on_action("checkpoint.now", lambda a: None)
    id = training.ask("attention.mode", mode="hp", apply_at_step="5")
    for _ in range(6):
        before = attention_switch.of(training.model.attentions()[0])
        seen.append((training.steps, before))
        training.step()
    assert seen == [(2, ""), (3, ""), (4, ""), (5, "hp"), (6, "hp"), (7, "hp")]
    answer = training.answer(id)
    assert answer == {"applied": True, "step": 5, "reason": ""}
    again = json.dumps({"id": id, "kind": "ACTION_KIND_ATTENTION_MODE", "mode": "fa"})
    training.monitor.actions.take(again.encode())
    training.step()
    assert attention_switch.of(training.model.attentions()[0]) == "hp"
    training.ends()
    recorded = Recording(tmp_path / "a.bwrun", ended=True)
    results = [
        m.action_result for m in recorded.messages if m.WhichOneof("body") == "action_result"
    ]
    assert [(r.id, r.applied, r.step) for r in results] == [(id, True, 5)] * 2
    told_mode = [(e.step, e.text) for e in recorded.events if e.kind == 9]
    assert told_mode == [(5, "bellwether-hp")]


def test_hello_says_what_is_allowed_and_to_be_had(tmp_path: Path) -> None:
    training = Training(tmp_path / "a.bwrun", allow=[*ALL.split(","), "checkpoint.now", "stop"])
    training.monitor.on_action("stop", lambda action: None)
    training.step(2)
    training.ends()
    hello = Recording(tmp_path / "a.bwrun", ended=True).hello
    assert sorted(hello.capabilities) == [1, 2, 3, 4, 7, 8, 9]  # No checkpoint.now: no callback.
    nothing = Training(tmp_path / "b.bwrun", allow=None)
    nothing.step(2)
    nothing.ends()
    assert not Recording(tmp_path / "b.bwrun", ended=True).hello.capabilities


def test_callbacks(tmp_path: Path) -> None:
    kinds = ["checkpoint.now", "batch.skip", "stop", "lr.scale"]
    training = Training(tmp_path / "a.bwrun", allow=kinds)
    called: list[bellwether.Action] = []

    @bellwether.on_action("batch.skip")
    def skip(asked: bellwether.Action) -> str:
        called.append(asked)
        return "two batches less"

    bellwether.on_action("stop", lambda asked: False)
    training.monitor.on_action("checkpoint.now", lambda asked: 1 / 0)
    training.monitor.on_action("lr.scale", called.append)  # In the place of ours.
    with pytest.raises(ValueError, match=r"kind: 'save' is not one of attention\.mode"):
        bellwether.on_action("save")
    training.step(2)
    skipped = training.ask("batch.skip", value=2)
    stop, save = training.ask("stop"), training.ask("checkpoint.now")
    rate = training.ask("lr.scale", value=0.5)
    training.step()
    undo = training.ask("lr.scale", undoes=rate)
    training.step()
    answers = {id: training.answer(id) for id in (skipped, stop, save, rate, undo)}
    assert answers[skipped] == {"applied": True, "step": 3, "reason": "two batches less"}
    assert answers[stop] == {"applied": False, "step": 3, "reason": "the callback refused it"}
    assert answers[save] == {
        "applied": False, "step": 3, "reason": "it failed: ZeroDivisionError: division by zero",
    }  # fmt: skip
    assert answers[rate] and answers[rate]["applied"] and answers[undo]["applied"]  # type: ignore[index]
    assert [(a.kind, a.value, a.step, a.undoes) for a in called] == [
        ("batch.skip", 2.0, 3, ""), ("lr.scale", 0.5, 3, ""), ("lr.scale", 0.5, 4, rate),
    ]  # fmt: skip
    training.ends()


def test_advice_is_logged_and_the_sampling_deepened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path / "a.bwrun")
    training.monitor.steps.governor.set_base(50)
    training.step(2)
    advice, deepen = training.ask("rollback.suggest"), training.ask("sampling.deepen", value=3)
    training.step()
    assert training.monitor.status()["sampling_period"] == 3
    assert "go back to an earlier checkpoint" in caplog.text
    undo = training.ask("sampling.deepen", undoes=deepen)
    training.step()
    assert training.monitor.status()["sampling_period"] == 50
    for id in (advice, deepen, undo):
        answer = training.answer(id)
        assert answer and answer["applied"], answer
    training.ends()


def boundaries_of(steps: str, explicit: bool = True, graphed: bool = False) -> str:
    """The steps as letters, with a | for each boundary: f a forward pass, a and b optimizers, s
    mon.step(); where that is not called, s is what closes the step at the next forward pass.
    """
    boundaries, said = Boundaries(), ""
    for letter in steps.replace(" ", ""):
        said += letter
        if letter == "f":
            boundaries.computes()
        elif letter == "s":
            said += "|" if boundaries.closed(explicit, graphed) else ""
        else:
            ahead = boundaries.optimizer_stepped(ord(letter), explicit)
            said += "" if ahead is None else "|"
    return said


@pytest.mark.parametrize(
    ("steps", "explicit"),
    [("fas|fas|fas|", True), ("ffas|ffas|", True), ("fa|sfa|sfa|", False),
     ("fs|afsa|fsa|", True),  # Told before the optimizer (the first one is not known yet).
     ("fas|fsfas|", True),  # A GradScaler skipped a step.
     ("fas|fsfs|fs|", True),  # From the second step on the optimizer is compiled.
     ("fas|fsfas|fsfs|fas|", True),
     ("fabs|fabs|", True), ("fa|b|sfab|sfab|s", False)],
)  # fmt: skip
def test_a_boundary_lies_behind_the_last_optimizer(steps: str, explicit: bool) -> None:
    assert boundaries_of(steps.replace("|", ""), explicit) == steps


def test_a_captured_step_has_its_boundary_where_it_is_told() -> None:
    assert boundaries_of("fasfas fs s s", graphed=True) == "fas|fas|fs|s|s|"


def test_too_many_are_refused(tmp_path: Path) -> None:
    training = Training(tmp_path / "a.bwrun")
    training.step(1)
    ids = [training.ask("lr.scale", value=0.5, apply_at_step=10**6) for _ in range(65)]
    assert [training.answer(id) for id in ids[:64]] == [None] * 64
    answer = training.answer(ids[64])
    assert answer and answer["reason"] == "64 actions wait already"
    training.ends()


def test_action_that_raises_is_refused_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path / "a.bwrun", shape=Shape(layers=3))
    training.step(2)
    put, calls = attention_switch.put, []

    def failing(module: Any, text: str) -> None:
        calls.append(text)
        if len(calls) == 2:
            raise RuntimeError("planted")
        put(module, text)

    monkeypatch.setattr(attention_switch, "put", failing)
    id = training.ask("attention.mode", mode="hp")
    training.step(2)
    answer = training.answer(id)
    assert answer and answer["reason"] == "it failed: RuntimeError: planted"
    assert [attention_switch.of(m) for m in training.model.attentions()] == ["", "", ""]
    training.ends()
