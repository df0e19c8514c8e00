"""Goal: rules are data in the real service: read at start, read again while runs go on, part of
each run's own past after a kill, and the same in the offline commands.
Method: the real bellwetherd and command; a client that pushes steps whose entropy ratio falls.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, wait_for

from bellwether.client import Block, RunClient, RunOptions

RUNS = ROOT / "tests/testdata/runs"
SHIPPED = ROOT / "deploy/rules"
PERIOD = 20


def rule(name: str, condition: str) -> str:
    return (
        "thresholds: {context: {warmup_steps: 0}}\nrules:\n"
        f"- {{name: {name}, signal: entropy_ratio, stage: 4, severity: warning, {condition}}}\n"
    )


def push(client: RunClient, first: int, last: int, entropy: float) -> None:
    """Samples of 1 x 2 heads at every step from `first` to `last` that is one of the period."""
    for step in range(first, last + 1, PERIOD):
        client.push(
            step,
            [
                Block("rows", [1.0, 1.0], 0, 1, 0, 2),
                Block("entropy_sum", [0.9, entropy], 0, 1, 0, 2),
            ],
        )
    assert client.flush(30)


def history(server: Server, run: str) -> list[tuple[str, str, int, str]]:
    """Every transition of the run, in the order in which it happened."""
    found: list[Any] = []
    for alert in server.call("ListAlerts", run=run, limit=1000)["alerts"]:
        found += server.call("GetAlert", run=run, key=alert["last"]["key"])["alert"]["history"]
    found.sort(key=lambda t: int(t["id"]))
    return [
        (t["rule"], t["state"].removeprefix("ALERT_STATE_").lower(), int(t["step"]), t["summary"])
        for t in found
    ]


def has(server: Server, run: str, name: str, state: str) -> bool:
    return any(entry[:2] == (name, state) for entry in history(server, run))


def reload(server: Server) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)


def metric(server: Server, name: str) -> float:
    found = re.search(rf"(?m)^{name} (\S+)$", server.get("/metrics"))
    assert found, name
    return float(found[1])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    # A relative path is one beside the configuration.
    (tmp_path / "rules.yml").write_text(rule("early", "detector: level, below: 0.3"))
    with Server(tmp_path, "rules_file: rules.yml\nweb: {enable_reload: true}\n") as running:
        yield running


def test_a_reload_goes_through_the_log(server: Server) -> None:
    rules = server.folder / "rules.yml"
    with RunClient(RunOptions(run="r", layers=1, heads=2, server=server.grpc)) as client:
        push(client, 0, 400, 0.9)
        push(client, 420, 800, 0.2)
        wait_for("the first rule fires", lambda: has(server, "r", "early", "firing"))
        assert [entry[:3] for entry in history(server, "r")] == [("early", "firing", 460)]

        rules.write_text(rule("late", "detector: level, below: 0.3, hold_batches: 2"))
        reload(server)
        wait_for("its alert ends with it", lambda: has(server, "r", "early", "resolved"))
        assert "the rule was changed or removed" in history(server, "r")[-1][3]
        push(client, 820, 1000, 0.2)
        wait_for("the second rule fires", lambda: has(server, "r", "late", "firing"))
        before = history(server, "r")
        assert [entry[:3] for entry in before] == [
            ("early", "firing", 460),
            ("early", "resolved", 800),
            ("late", "firing", 840),
        ]

        # The steps up to here lie in the log alone; this rule would have fired
        # on all of them, and is in force from the restart on.
        rules.write_text(rule("always", "detector: level, below: 1, hold_batches: 1"))
        server.kill()
        server.start()
        assert history(server, "r")[: len(before)] == before
        wait_for("the rules of the new start arrive", lambda: has(server, "r", "late", "resolved"))
        assert not has(server, "r", "always", "firing")
        push(client, 1020, 1100, 0.2)
        wait_for("they judge", lambda: has(server, "r", "always", "firing"))
        assert [entry[:3] for entry in history(server, "r")] == [
            *(entry[:3] for entry in before),
            ("late", "resolved", 1000),
            ("always", "firing", 1020),
        ]


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_an_end_between_reload_and_the_next_steps_changes_nothing(server: Server, end: str) -> None:
    rules = server.folder / "rules.yml"
    with RunClient(RunOptions(run="r", layers=1, heads=2, server=server.grpc)) as client:
        push(client, 0, 100, 0.2)
        wait_for("the first rule fires", lambda: has(server, "r", "early", "firing"))
        rules.write_text(rule("late", "detector: level, below: 0.3, hold_batches: 4"))
        reload(server)
        wait_for("its alert ends with it", lambda: has(server, "r", "early", "resolved"))
        push(client, 120, 140, 0.2)
        wait_for("both steps are there", lambda: int(server.call("GetRun", run="r")["step"]) == 140)
        before = history(server, "r")
        # After a kill its past comes from the log, after a stop from its saved state.
        getattr(server, end)()
        server.start()
        push(client, 160, 180, 0.2)
        wait_for("the fourth batch of the second rule", lambda: has(server, "r", "late", "firing"))
        assert history(server, "r")[:-1] == before
        assert history(server, "r")[-1][:3] == ("late", "firing", 180)


def test_a_bad_file_leaves_the_old_rules(server: Server) -> None:
    assert metric(server, "bellwether_config_last_reload_successful") == 1
    loaded = metric(server, "bellwether_config_last_reload_success_timestamp_seconds")
    (server.folder / "rules.yml").write_text("thresholds:\n  drift:\n    grown_factor: 0\n")
    reload(server)
    wait_for(
        "the refusal shows", lambda: metric(server, "bellwether_config_last_reload_successful") == 0
    )
    why = "rules.yml:3:19: thresholds.drift.grown_factor = 0: must be a number in [1, 1e+06]"
    wait_for("it says why", lambda: why in server.log())  # Behind the metric.
    assert metric(server, "bellwether_config_last_reload_success_timestamp_seconds") == loaded
    with RunClient(RunOptions(run="r", layers=1, heads=2, server=server.grpc)) as client:
        push(client, 0, 100, 0.2)
        wait_for("the old rule judges", lambda: has(server, "r", "early", "firing"))
    (server.folder / "rules.yml").write_text("off: [overhead]\n")
    reload(server)
    wait_for(
        "the new file is good",
        lambda: metric(server, "bellwether_config_last_reload_successful") == 1,
    )


def post(server: Server, content_type: str) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://{server.http}/-/reload", data=b"", headers={"Content-Type": content_type}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_reload_by_http(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert post(server, "application/json") == (200, "reloaded\n")
    assert post(server, "text/plain")[0] == 415
    (server.folder / "rules.yml").write_text("off: [drifts]\n")
    status, body = post(server, "application/json")
    assert status == 400 and "rules.yml:1:7: off[0] = drifts" in body
    with Server(tmp_path_factory.mktemp("plain")) as plain:
        assert post(plain, "application/json")[0] == 403


def test_a_server_without_a_rules_file_takes_sighup(tmp_path: Path) -> None:
    name = "bellwether_config_last_reload_success_timestamp_seconds"
    with Server(tmp_path) as plain:
        started = metric(plain, name)
        reload(plain)
        wait_for("it says so", lambda: "there is no rules, policy or access file" in plain.log())
        # What is in force is what there is: no failure.
        wait_for("it counts as a reload", lambda: metric(plain, name) > started)
        assert metric(plain, "bellwether_config_last_reload_successful") == 1
        plain.get("/-/ready")


def test_bad_rules_stop_the_start_and_the_check_finds_them(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text("off: [drifts]\n")
    (tmp_path / "server.yml").write_text("rules_file: rules.yml\n")
    done = bellwether("check", "config", str(tmp_path / "server.yml"))
    assert done.returncode == 3 and "rules.yml:1:7" in done.stderr
    done = subprocess.run(
        [
            str(BIN / "bellwetherd"),
            f"--storage.path={tmp_path}/data",
            f"--rules.file={tmp_path}/rules.yml",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "rules.yml:1:7" in done.stderr


def bellwether(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "bellwether"), *words], capture_output=True, text=True, timeout=600
    )


def test_rules_check_test_explain(tmp_path: Path) -> None:
    example = str(SHIPPED / "example.yml")
    done = bellwether("rules", "check", example)
    assert (done.returncode, done.stdout) == (0, f"{example}: good, 5 own rules\n")
    bad = tmp_path / "bad.yml"
    bad.write_text("off: [drifts]\nrule: []\n")
    done = bellwether("rules", "check", str(bad))
    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.splitlines()) == 2

    tests = [str(SHIPPED / "example_test.yml"), str(SHIPPED / "builtin_test.yml")]
    done = bellwether("rules", "test", *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(?m)^[0-9]+ passed, 0 failed\n\Z", done.stdout)
    failing = tmp_path / "failing.yml"
    failing.write_text(
        "tests:\n- name: nothing drifts\n  steps: 20\n  series: [{signal: loss, values: '1+0.01x30'}]\n"
        "  expect: [{step: 20, alerts: [{rule: drift}]}]\n"
    )
    done = bellwether("rules", "test", str(failing))
    assert done.returncode == 1
    assert "FAILED  " in done.stdout and "step 20: expected [{rule: drift}], got []" in done.stdout
    assert bellwether("rules", "test", str(bad)).returncode == 3

    # What is wrong with one file is not in the way of the others.
    done = bellwether("rules", "check", str(bad), example, str(bad))
    assert (done.returncode, done.stdout) == (3, f"{example}: good, 5 own rules\n")
    assert done.stderr.splitlines()[-1] == "2 of 3 files have findings"
    done = bellwether("rules", "test", str(bad), *tests)
    assert done.returncode == 3 and re.search(r"(?m)^[0-9]+ passed, 0 failed\n\Z", done.stdout)
    assert "1 of 3 files could not be run" in done.stderr

    done = bellwether("rules", "explain", example, "drift.growth")
    assert done.returncode == 0 and "4.5 (built in: 4) times the median head" in done.stdout
    assert bellwether("rules", "explain", example, "nothing").returncode == 1
    assert "entropy_collapse" in bellwether("rules", "explain", example).stdout


def test_a_back_test_is_the_judgement_by_those_rules(tmp_path: Path) -> None:
    run = str(RUNS / "gpt-flash-s17.bwrun")
    plain = bellwether("replay", run, "--json")
    built_in = bellwether("replay", run, "--json", "--rules", str(SHIPPED / "builtin.yml"))
    assert plain.returncode == built_in.returncode == 0
    assert plain.stdout == built_in.stdout
    off = tmp_path / "off.yml"
    off.write_text(
        "off: [drift, ties]\nrules:\n"
        "- {name: high, signal: drift_ratio, stage: 1, severity: info, "
        "detector: level, above: 20}\n"
    )
    other = [
        json.loads(line)
        for line in bellwether("replay", run, "--json", "--rules", str(off)).stdout.splitlines()
    ]
    assert "drift" in {json.loads(line)["rule"] for line in plain.stdout.splitlines()}
    assert "high" in {t["rule"] for t in other} and "drift" not in {t["rule"] for t in other}

    # The server judges an import by the same rules alike.
    with Server(tmp_path, "", f"--rules.file={off}") as server:
        server.run("run", "import", run)
        live = history(server, "gpt-flash-s17")
    assert [entry[:3] for entry in live] == [(t["rule"], t["state"], t["step"]) for t in other]

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.bwrun").symlink_to(run)
    scores = [
        json.loads(
            bellwether("scorecard", str(tmp_path / "runs"), "--json", *flags).stdout.splitlines()[0]
        )
        for flags in ((), ("--rules", str(SHIPPED / "builtin.yml")), ("--rules", str(off)))
    ]
    warned = [score["first_warning"] for score in scores]
    assert warned[0] == warned[1] != warned[2]
    off.write_text("off: 3\n")
    assert bellwether("replay", run, "--rules", str(off)).returncode == 3
    assert bellwether("scorecard", str(tmp_path / "runs"), "--rules", str(off)).returncode == 3


def test_a_replay_goes_on_past_what_is_no_recording(tmp_path: Path) -> None:
    run = RUNS / "gpt-flash-s17.bwrun"
    (tmp_path / "a.bwrun").write_bytes(run.read_bytes()[:20_000])
    (tmp_path / "b.bwrun").symlink_to(run)
    (tmp_path / "c.bwrun").write_text("none")
    (tmp_path / "notes.txt").write_text("none")
    one = bellwether("replay", str(run))
    done = bellwether("replay", str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path}/b.bwrun:\n{one.stdout}{tmp_path}/c.bwrun:\n" in done.stdout
    assert f"{tmp_path}/a.bwrun: ends too early" in done.stderr
    assert f"{tmp_path}/c.bwrun: " in done.stderr and "notes.txt" not in done.stderr
    assert done.stderr.splitlines()[-1] == "2 of 3 files could not be judged"
    as_json = bellwether("replay", str(tmp_path / "c.bwrun"), str(run), "--json")
    assert as_json.returncode == 1
    assert as_json.stdout == bellwether("replay", str(run), "--json").stdout
    (tmp_path / "none").mkdir()
    empty = bellwether("replay", str(tmp_path / "none"))
    assert empty.returncode == 1 and "none: is a directory, holds no .bwrun" in empty.stderr


def test_a_replay_ends_with_what_the_recording_was_judged_by() -> None:
    """A rule that is off, or without its signals, finds nothing, which looks like health."""
    words = [str(BIN / "bellwether"), "replay", str(RUNS / "gpt-flash-s4.bwrun")]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True
    )
    *transitions, last = done.stdout.splitlines()
    assert last == "gpt-flash-s4: judged by: all but leak"
    assert transitions and all(line.startswith("step ") for line in transitions)
