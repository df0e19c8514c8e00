"""Goal: from Python one reads what the server holds, as numbers, and hears each change once, also
over a restart of the server; what may be said wrongly is refused in words.
Method: a real server with a recorded failing run, asked through bellwether.Client.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server

sys.path.insert(0, str(ROOT / "client_lib" / "python"))
import bellwether
from bellwether import query
from bellwether._server.page import QueryError

RUN = "gpt-flash-s4"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        server.run("run", "import", str(ROOT / f"tests/testdata/runs/{RUN}.bwrun"))
        yield server


@pytest.fixture
def client(server: Server) -> bellwether.Client:
    return bellwether.Client(f"http://{server.http}/")


def test_runs_series_and_matrices_are_numbers(server: Server, client: bellwether.Client) -> None:
    [run] = client.runs()
    assert run == client.run(RUN)
    assert run["description"]["name"] == RUN and run["step"] > 4000 and run["ended"] is True
    worst = client.top_heads(RUN, "wq_sigma", limit=1)[0]
    series = client.series(RUN, "wq_sigma", worst["layer"], worst["head"], points=10_000)
    stored = server.series(RUN, "wq_sigma", worst["layer"], worst["head"])
    assert dict(zip(series.step, series.mean)) == pytest.approx(stored) and not series.downsampled
    thin = client.series(RUN, "wq_sigma", worst["layer"], worst["head"], points=50)
    assert len(thin) <= 50 and thin.downsampled and max(thin.max) == max(series.max)
    assert memoryview(thin.mean).format == "f"  # What NumPy takes as it is.
    part = client.series(RUN, "wq_sigma", worst["layer"], worst["head"], begin=1000, end=2000)
    assert 1000 <= part.step[0] and part.step[-1] < 2000
    matrix = client.matrix(RUN, "wq_sigma")
    layers = run["description"]["layout"]["layers"]
    assert matrix.layers == layers and len(matrix.values) == layers * matrix.heads
    assert matrix[worst["layer"], worst["head"]] == pytest.approx(worst["value"])
    with pytest.raises(IndexError, match="of .* layers"):
        matrix[layers, 0]


def test_lists_of_messages_stay_messages(server: Server, client: bellwether.Client) -> None:
    server.run("run", "annotate", RUN, "12", "--step", "2000")
    told = client.call("ListEvents", run=RUN)
    assert told["total"] == len(told["events"])
    assert ("EVENT_KIND_ANNOTATION", 2000, "12") in [(e["kind"], e["step"], e["text"]) for e in told["events"]]


def test_alerts_are_read_acknowledged_and_silenced(client: bellwether.Client) -> None:
    alerts = client.alerts(RUN)
    assert alerts and {alert["last"]["run"] for alert in alerts} == {RUN}
    key = alerts[0]["last"]["key"]
    history = client.alert(RUN, key)["alert"]["history"]
    assert all(isinstance(told["id"], int) and isinstance(told["step"], int) for told in history)
    assert any(math.isfinite(e["value"]) for told in history for e in told["evidence"])
    assert client.acknowledge(RUN, key, by="a", comment="12")["comment"] == "12"
    assert client.silence(RUN, key, 60, by="a")["silenced_until_unix_ns"] > 1.7e18
    with pytest.raises(QueryError, match="seconds 0: must be 1"):
        client.silence(RUN, key, 0, by="a")


def test_false_alarms_are_marked_and_undone(client: bellwether.Client) -> None:
    key = client.alerts(RUN)[0]["last"]["key"]
    marked = client.mark_false_alarm(RUN, key, by="a", reason="12")
    assert marked["muted"] and marked["false_alarm"]["reason"] == "12"
    assert isinstance(marked["false_alarm"]["step"], int)
    with pytest.raises(QueryError, match="says why"):
        client.mark_false_alarm(RUN, key, by="a", reason="")
    assert not client.undo_false_alarm(RUN, key, by="b")["muted"]
    said = client.alert(RUN, key)["alert"]["false_alarm_history"]
    assert [(one["by"], one["undone"]) for one in said] == [("a", False), ("b", True)]
    with pytest.raises(QueryError, match="not marked") as refused:
        client.undo_false_alarm(RUN, key, by="b")
    assert refused.value.status == 400


def test_a_watch_goes_on_over_a_restart(server: Server, client: bellwether.Client) -> None:
    total = sum(len(client.alert(RUN, a["last"]["key"])["alert"]["history"]) for a in client.alerts(RUN))
    assert total >= 4
    watch = client.watch(RUN, after=0)
    told = list(itertools.islice(watch, total // 2))
    server.kill()
    server.start()
    told += list(itertools.islice(watch, total - total // 2))
    ids = [transition["id"] for transition in told]
    assert ids == sorted(set(ids)) and {transition["run"] for transition in told} == {RUN}


def test_refusals_say_why(client: bellwether.Client) -> None:
    with pytest.raises(QueryError, match="no-such-run") as refused:
        client.run("no-such-run")
    assert refused.value.status == 404
    with pytest.raises(QueryError, match="points_max") as refused:
        client.series(RUN, "wq_sigma", points=10**6)
    assert refused.value.status == 400
    with pytest.raises(ValueError, match="kind is 'explode': must be one of attention.center_k, "):
        client.propose(RUN, "explode", by="a")
    with pytest.raises(QueryError, match="ended"):
        client.propose(RUN, "attention.mode", by="a", mode="hp", layers=[1])
    with pytest.raises(urllib.error.URLError):
        bellwether.Client("http://127.0.0.1:9").runs()


def test_policy_and_server(client: bellwether.Client) -> None:
    assert client.call("GetPolicy", run=RUN)["mode"].startswith("MODE_")
    info = client.info()
    assert info["version"] and info["started_unix_ns"] > 0
    assert all(isinstance(value, (int, float)) for value in info["counters"].values())


def test_the_number_fields_are_those_of_the_protos() -> None:
    numbers, words = set(), set()
    field = re.compile(r"(?:map<\w+, *)?\b(u?int64|sint64|float|double|string|bytes)>? (\w+) = \d+")
    for path in (ROOT / "proto/bellwether/v1").glob("*.proto"):
        for line in path.read_text().splitlines():
            for kind, name in field.findall(line.split("//")[0]):
                (words if kind in ("string", "bytes") else numbers).add(name)
    assert query._NUMBERS == numbers - words
    assert query._NUMBERS_BESIDE.keys() == numbers & words
