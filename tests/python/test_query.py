"""Goal: what bellwether.Client changes is noted under the user's name, or the one that is given.
Method: the requests alone, in the place of a server; tests/e2e/test_query_client.py has answers.
"""

from __future__ import annotations

import getpass
from typing import Any

import pytest

import bellwether

KEY = "drift/1/2/220"
CHANGES: dict[str, tuple[Any, ...]] = {
    "acknowledge": ("r", KEY),
    "silence": ("r", KEY, 60),
    "mark_false_alarm": ("r", KEY),
    "undo_false_alarm": ("r", KEY),
    "propose": ("r", "stop"),
    "approve": ("r", "1"),
    "reject": ("r", "1"),
    "undo": ("r", "1"),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = []

    def call(self: bellwether.Client, method: str, **request: Any) -> dict[str, Any]:
        requests.append(request)
        return {}

    monkeypatch.setattr(bellwether.Client, "call", call)
    return requests


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noted_under_the_users_name(
    name: str, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "ann")
    change = getattr(bellwether.Client(), name)
    change(*CHANGES[name])
    change(*CHANGES[name], by="bob")
    change(*CHANGES[name], "carol")
    assert [request["by"] for request in asked] == ["ann", "bob", "carol"]


def test_without_user_the_login_is_noted(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("USER", raising=False)
    monkeypatch.setenv("LOGNAME", "dave")
    bellwether.Client().acknowledge("r", KEY)
    assert asked[0]["by"] == "dave"


def test_an_unnamed_user_signs_nothing(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("USER", raising=False)

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 1000730000")

    monkeypatch.setattr(getpass, "getuser", nameless)
    bellwether.Client().acknowledge("r", KEY)
    assert asked[0]["by"] == ""


def test_the_reason_of_a_false_alarm_may_follow_by_name(asked: list[dict[str, Any]]) -> None:
    bellwether.Client().mark_false_alarm("r", KEY, reason="the data mix changed")
    bellwether.Client().mark_false_alarm("r", KEY, "ann", "the data mix changed")
    assert [request["reason"] for request in asked] == ["the data mix changed"] * 2
