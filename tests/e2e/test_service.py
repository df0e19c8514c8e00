"""Goal: what an operator relies on works in the real process: import, queries, metrics that
promtool accepts, probes, two writers, strict configuration, restart with everything there.
Method: the real bellwetherd and command on a recorded failing run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, free_port, wait_for

import bellwether
from bellwether.client import TENSOR, Block, ClientError, RunClient, RunOptions
from bellwether.query import QueryError

RECORDED = ROOT / "tests/testdata/runs/gpt-flash-s4.bwrun"
RUN = "gpt-flash-s4"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running


def test_an_imported_run_is_judged_as_its_replay(server: Server) -> None:
    server.run("run", "import", str(RECORDED))
    replayed = subprocess.run(
        [str(BIN / "bellwether"), "replay", str(RECORDED), "--json"], capture_output=True, text=True, check=True
    )
    offline = [json.loads(line) for line in replayed.stdout.splitlines()]
    assert offline and {"run", "step", "state", "severity", "stage", "layer", "head", "heads", "eta_steps", "evidence"} <= set(
        offline[0]
    )
    live = []
    for alert in server.call("ListAlerts", run=RUN, limit=1000)["alerts"]:
        live += server.call("GetAlert", run=RUN, key=alert["last"]["key"])["alert"]["history"]
    live.sort(key=lambda t: int(t["id"]))
    assert [(t["key"], t["k"], int(t["step"])) for t in live] == [(t["key"], t["k"], t["step"]) for t in offline]


def test_everything_is_there_after_a_kill(server: Server) -> None:
    def described() -> list[object]:
        run = server.call("GetRun", run=RUN)
        return [run[name] for name in ("step", "stage", "ended", "loss", "alerts_firing", "frames", "signals")]

    server.run("run", "import", str(RECORDED))
    before = (
        server.series(RUN, "drift_ratio", 1, 0),
        server.json("alert", "list"),
        server.call("GetMatrix", run=RUN, signal="wq_sigma", step=4000),
        described(),
    )
    server.kill()
    server.start()
    server.await_applied()
    after = (
        server.series(RUN, "drift_ratio", 1, 0),
        server.json("alert", "list"),
        server.call("GetMatrix", run=RUN, signal="wq_sigma", step=4000),
        described(),
    )
    assert before == after
    assert len(before[0]) > 1000
    assert server.call("GetRun", run=RUN)["ended"]


def test_requests_do_not_change_answers_about_an_ended_run(server: Server) -> None:
    """Each of them takes the run up again from what is stored."""

    def answers() -> list[Any]:
        run = server.call("GetRun", run=RUN)
        listed = [r for r in server.call("ListRuns")["runs"] if r["description"]["name"] == RUN]
        assert listed == [run]
        heads = server.call("TopHeads", run=RUN, signal="drift_ratio", limit=5)
        return [run, heads, server.call("GetMatrix", run=RUN, signal="wq_sigma", step=-1)]

    def ask(method: str, **request: Any) -> None:
        refused = False
        try:
            server.call(method, run=RUN, **request)
        except urllib.error.HTTPError as error:
            error.close()
            refused = True
        assert refused == (method not in ("SetPolicy", "Annotate", "AcknowledgeAlert", "SilenceAlert")), method

    rules = server.folder / "rules.yml"
    server.run("run", "import", str(RECORDED))
    key = server.call("ListAlerts", run=RUN)["alerts"][0]["last"]["key"]
    rules.write_text("{}\n")
    server.flags.append(f"--rules.file={rules}")
    decided = {"id": "nothing-1", "by": "ann", "reason": ""}
    requests: list[tuple[str, dict[str, Any]]] = [
        *((f"{verb}Action", decided) for verb in ("Approve", "Reject", "Undo")),
        ("ProposeAction", {"action": {"kind": "ACTION_KIND_CENTER_K", "value": 1}, "by": "ann"}),
        ("SetPolicy", {"policy": {"mode": "MODE_PROPOSE"}, "by": "ann"}),
        ("AcknowledgeAlert", {"key": key, "by": "ann"}),
        ("SilenceAlert", {"key": key, "by": "ann", "seconds": 60}),
        ("Annotate", {"event": {"kind": "EVENT_KIND_ANNOTATION", "text": "looked at"}}),
    ]
    for method, request in requests:
        server.kill()
        server.start()
        server.await_applied()
        before = answers()
        assert math.isfinite(float(before[0]["loss"]))
        ask(method, **request)
        server.call("GetPolicy", run=RUN)  # Comes behind what is concluded of the request.
        assert answers() == before, method
        assert actions_waiting(server) == []
    # This is to change them, until it is undone.
    server.call("MarkFalseAlarm", run=RUN, key=key, by="ann", reason="known")
    assert answers() != before
    server.call("MarkFalseAlarm", run=RUN, key=key, by="ann", undo=True)
    assert answers() == before
    rules.write_text("off: [overhead]\n")
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)
    wait_for("the rules are read again", lambda: server.metric("bellwether_config_last_reload_successful") == 1)
    assert answers() == before


def actions_waiting(server: Server) -> list[str]:
    actions = server.call("ListActions", run=RUN).get("actions", [])
    return [a["id"] for a in actions if a["state"] == "ACTION_STATE_PROPOSED"]


def test_ending_server_removes_only_its_own_files(tmp_path: Path) -> None:
    """Somebody takes the first one's socket for a dead one's, and starts another with the same flags."""
    ready, socket = tmp_path / "ready.json", tmp_path / "grpc.sock"

    def pid_told() -> int:
        return int(json.loads(ready.read_text())["pid"])

    first, second = Server(tmp_path), Server(tmp_path)
    first.grpc = second.grpc = f"unix:{socket}"
    second.storage = tmp_path / "other"
    with first:
        assert first.process is not None and pid_told() == first.process.pid
        socket.unlink()
        with second:
            assert second.process is not None and pid_told() == second.process.pid
            assert first.stop() == 0, first.log()
            assert pid_told() == second.process.pid, "the first one removed it"
            assert second.json("run", "list")["runs"] == []
            assert second.stop() == 0, second.log()
            assert not ready.exists() and not socket.exists()


def test_start_and_last_report_times_survive_a_kill(server: Server) -> None:
    def times() -> list[str]:
        run = server.call("GetRun", run="short")
        return [run["started_unix_ns"], run["last_report_unix_ns"]]

    with RunClient(RunOptions(run="short", layers=1, heads=1, server=server.grpc)) as client:
        client.push(0, [Block("loss", [1.0])])
        assert client.flush(20)
    wait_for("the run has ended", lambda: server.call("GetRun", run="short")["ended"])
    before = times()
    server.kill()  # Before anything of it was saved: it comes from the log.
    server.start()
    server.await_applied()
    assert times() == before
    assert before[0] <= before[1]


def test_a_clean_stop_leaves_no_log_to_read_again(tmp_path: Path) -> None:
    with Server(tmp_path, "storage:\n  wal_segment_bytes: 2097152\n") as server:
        server.run("run", "import", str(RECORDED))
        log = tmp_path / "data" / "wal"
        assert len(list(log.glob("*.wal"))) > 1, "the run fills a single segment: nothing is shown"
        before = server.series(RUN, "drift_ratio", 1, 0)
        server.stop()
        assert len(list(log.glob("*.wal"))) == 1
        server.start()
        assert server.series(RUN, "drift_ratio", 1, 0) == before


def test_an_event_is_listed_at_once_and_once(server: Server, tmp_path: Path) -> None:
    def texts() -> list[str]:
        return [event["text"] for event in server.call("ListEvents", run="noted").get("events", [])]

    with RunClient(RunOptions(run="noted", layers=1, heads=1, server=server.grpc)) as client:
        client.push(0, [Block("loss", [1.0])])
        assert client.flush(20)
        wait_for("the run is listed", lambda: "noted" in server.run("run", "list"))
        server.run("run", "annotate", "noted", "first")
        assert texts() == ["first"]
        server.kill()
        server.start()
        server.run("run", "annotate", "noted", "second")
        assert texts() == ["first", "second"]
        client.push(1, [Block("loss", [1.0])])
        assert client.flush(20)
    wait_for("the run has ended", lambda: server.call("GetRun", run="noted")["ended"])
    server.run("run", "annotate", "noted", "third")
    assert texts() == ["first", "second", "third"]
    server.run("run", "export", "noted", str(tmp_path / "noted.bwrun"))
    server.run("run", "import", str(tmp_path / "noted.bwrun"), "--name", "again")
    assert [event["text"] for event in server.call("ListEvents", run="again")["events"]] == texts()


def test_an_export_is_the_run(server: Server, tmp_path: Path) -> None:
    server.run("run", "import", str(RECORDED))
    server.run("run", "export", RUN, str(tmp_path / "out.bwrun"))
    server.run("run", "import", str(tmp_path / "out.bwrun"), "--name", "again")
    for signal_name, layer, head in (("drift_ratio", 1, 0), ("loss", 0, 0), ("wq_sigma", 5, 5)):
        # As text: a NaN equals itself there.
        assert str(server.series("again", signal_name, layer, head)) == str(server.series(RUN, signal_name, layer, head))
    server.run("run", "import", str(RECORDED), exit_code=1)  # It is here already.


def test_metrics_are_clean_and_name_the_head(server: Server) -> None:
    server.run("run", "import", "--notify", str(RECORDED))
    page = server.get("/metrics")
    assert f'bellwether_alert_active{{run="{RUN}",rule="drift"' in page
    assert "bellwether_head_drift_ratio" in page
    assert "is not exported" not in server.log()
    promtool = shutil.which("promtool")
    assert promtool, "Debian's package prometheus is missing"
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs an IPv6 loopback")
def test_everything_is_reached_by_ipv6(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.grpc, server.http = f"[::1]:{free_port()}", f"[::1]:{free_port()}"
    with server:
        server.run("run", "import", str(RECORDED))
        assert server.get("/-/ready") and server.call("GetRun", run=RUN)["ended"]
        with RunClient(RunOptions(run="live", layers=1, heads=1, server=server.grpc)) as client:
            client.push(0, [Block("loss", [1.0])])
            assert client.flush(20), client.counters()
        asking = bellwether.Client(f"http://{server.http}/")
        assert {run["description"]["name"] for run in server.call("ListRuns")["runs"]} == {RUN, "live"}
        wait_for("it is judged", lambda: asking.run("live")["loss"] == 1.0)
        environment = {
            **os.environ,
            "BELLWETHER_SERVER": server.grpc,
            "BELLWETHER_PAGE": f"http://{server.http}",
            "PYTHONPATH": str(ROOT / "client_lib/python"),
        }
        command = [sys.executable, "-m", "bellwether", "explain", RUN]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        assert f"http://{server.http}/" in done.stdout, done.stderr


def test_probes_and_page(server: Server) -> None:
    server.get("/-/healthy")
    server.get("/-/ready")
    assert "<html" in server.get("/").lower()


def test_the_second_writer_wins_and_the_first_is_told(server: Server) -> None:
    options = RunOptions(run="contested", layers=1, heads=1, server=server.grpc)
    with RunClient(options) as first, RunClient(options) as second:
        first.push(0, [Block("loss", [0.0])])
        wait_for("the first is acknowledged", lambda: first.counters().frames_acked == 1)
        second.push(1, [Block("loss", [1.0])])
        wait_for("the second is acknowledged", lambda: second.counters().frames_acked == 1)
        wait_for("the loss is stored", lambda: server.series("contested", "loss") == {0: 0.0, 1: 1.0})


def test_ranks_are_merged_and_their_disagreement_is_an_alert(server: Server) -> None:
    pair = [RunClient(RunOptions(run="pair", layers=1, heads=1, rank=rank, world=2, server=server.grpc)) for rank in range(2)]
    for rank, client in enumerate(pair):
        client.push(0, [Block("tokens", [10.0 + rank]), Block("wq_sigma", [1.0 + rank])])
        assert client.flush(20)
    wait_for("the step is stored", lambda: server.series("pair", "tokens") == {0: 21.0})
    # The run's snapshot follows within 50 ms.
    wait_for("both ranks are seen", lambda: server.call("GetRun", run="pair")["ranks_reporting"] == 2)
    wait_for("it is an alert", lambda: [a["last"]["rule"] for a in server.call("ListAlerts", run="pair")["alerts"]] == ["disagreement"])
    for client in pair:
        client.close()


def test_copies_of_a_tensor_that_differ_are_an_alert(server: Server, tmp_path: Path) -> None:
    """The ranks name the tensors in orders of their own; one of three has another copy."""
    trio = [RunClient(RunOptions(run="trio", layers=1, heads=1, rank=rank, world=3, server=server.grpc)) for rank in range(3)]
    sums = {"embed": 1.0, "blocks.0.mlp": 2.0, "head": 3.0}
    for rank, client in enumerate(trio):
        names = sorted(sums, reverse=rank == 1)
        assert client.push_names(TENSOR, names) == len(names)
        wrong = {"blocks.0.mlp": 7.0} if rank == 2 else {}
        values = [{**sums, **wrong}[name] for name in names]
        client.push(0, [Block("replica_sum_low", values, layer_count=len(names)), Block("replica_sum_high", values, layer_count=len(names))])
        assert client.flush(20)
    (alert,) = wait_for("it is an alert", lambda: server.call("ListAlerts", run="trio")["alerts"])
    assert alert["last"]["rule"] == "disagreement"
    assert "blocks.0.mlp differ at step 0: rank 2 differs from 2 others" in alert["last"]["summary"]
    for client in trio:
        client.close()

    asking = bellwether.Client(f"http://{server.http}/")

    def of(run: str, name: str) -> Any:
        series = asking.series(run, "replica_sum_high", name=name)
        return series.name, list(series.mean)

    assert of("trio", "head") == ("head", [3.0])
    matrix = asking.matrix("trio", "replica_sum_low")
    assert dict(zip(matrix.names, matrix.values))["embed"] == 1.0
    assert matrix.names[asking.series("trio", "replica_sum_low", name="head").layer] == "head"
    with pytest.raises(QueryError, match='series.name "tail": the run has no such tensor'):
        of("trio", "tail")
    wait_for("the run has ended", lambda: server.call("GetRun", run="trio")["ended"])
    server.run("run", "export", "trio", str(tmp_path / "trio.bwrun"))
    server.run("run", "import", str(tmp_path / "trio.bwrun"), "--name", "again")
    assert of("again", "head") == ("head", [3.0])


def test_bad_input_is_refused_with_words_and_counted(server: Server) -> None:
    with pytest.raises(ClientError, match="layers"):
        RunClient(RunOptions(run="wide", layers=513, heads=1, server=server.grpc))
    with pytest.raises(ClientError, match="run"):
        RunClient(RunOptions(run="no spaces", layers=1, heads=1, server=server.grpc))
    with RunClient(RunOptions(run="shape", layers=2, heads=2, server=server.grpc)) as client:
        assert client.push(0, [Block("loss", [1.0])])
        assert client.flush(20)
        with pytest.raises(ClientError):
            client.push(1, [Block("wq_sigma", [1.0, 2.0, 3.0], 0, 1, 0, 3)])
    # Another model under the same run: refused by the server, final, said by the sender.
    with RunClient(RunOptions(run="shape", layers=3, heads=2, server=server.grpc)) as other:
        other.push(0, [Block("loss", [1.0])])
        wait_for("the refusal arrives", lambda: "layout" in other.counters().error)


def test_nan_is_data(server: Server) -> None:
    with RunClient(RunOptions(run="nan", layers=1, heads=2, server=server.grpc)) as client:
        client.push(0, [Block("loss", [float("nan")]), Block("logit_max", [float("inf"), 1.0], 0, 1, 0, 2)])
        assert client.flush(20)
        wait_for("it is stored", lambda: server.series("nan", "logit_max", 0, 0) == {0: float("inf")})
        wait_for("it is an alert", lambda: [a for a in server.call("ListAlerts", run="nan")["alerts"]])
    assert server.get("/metrics")


def test_configuration_is_strict(tmp_path: Path) -> None:
    good = tmp_path / "good.yml"
    good.write_text("limits:\n  runs_live_max: 5\nalerting:\n  webhooks:\n    - url: http://127.0.0.1:9/x\n")
    bad = tmp_path / "bad.yml"
    bad.write_text("limits:\n  runs_live_max: 0\n  rums: 3\nweb:\n  listen_address: [1]\n")
    check = [str(BIN / "bellwether"), "check", "config"]
    assert subprocess.run([*check, str(good)]).returncode == 0
    done = subprocess.run([*check, str(bad)], capture_output=True, text=True)
    assert done.returncode == 3
    for words in ("bad.yml:2:18: limits.runs_live_max = 0: must be a whole number in [1, 100000]", "bad.yml:3:3: unknown key limits.rums", "bad.yml:5:19"):
        assert words in done.stderr, done.stderr


def test_runs_are_limited_and_the_refusal_is_counted(tmp_path: Path) -> None:
    with Server(tmp_path, "limits:\n  runs_live_max: 2\n") as server:
        clients = [RunClient(RunOptions(run=f"r{i}", layers=1, heads=1, server=server.grpc)) for i in range(3)]
        for client in clients[:2]:
            client.push(0, [Block("loss", [1.0])])
            assert client.flush(20)
        clients[2].push(0, [Block("loss", [1.0])])
        wait_for("the refusal arrives", lambda: "runs" in clients[2].counters().error)
        assert 'bellwether_ingest_limit_refused_total{limit="runs"}' in server.get("/metrics")
        for client in clients:
            client.close()


def test_a_run_that_the_memory_does_not_hold_is_refused(tmp_path: Path) -> None:
    (shipped := tmp_path / "shipped").mkdir()
    with Server(shipped) as server:
        # What it comes to on this machine, and not the 0 that stands for it.
        assert server.call("GetServerInfo")["limits"]["memory_max"] >= 1 << 30
    with Server(tmp_path, "limits:\n  memory_max: 661000000\n  query_memory_max: 16777216\n") as server:
        assert server.call("GetServerInfo")["limits"]["memory_max"] == 661000000
        large = RunClient(RunOptions(run="large", layers=64, heads=64, server=server.grpc))
        large.push(0, [Block("loss", [1.0])])
        wait_for("the refusal arrives", lambda: "limits.memory_max" in large.counters().error)
        assert "64 layers x 64 heads" in large.counters().error
        assert server.metric('bellwether_ingest_limit_refused_total{limit="memory"}') >= 1
        small = RunClient(RunOptions(run="small", layers=2, heads=2, server=server.grpc))
        small.push(0, [Block("loss", [1.0])])
        assert small.flush(20)
        wait_for("it is counted", lambda: server.metric("bellwether_runs_memory_bytes") > 0)
        assert server.metric("bellwether_runs_memory_bytes") < server.metric("bellwether_runs_memory_max_bytes")
        large.close()
        small.close()


def test_tensors_that_the_memory_does_not_hold_are_refused(tmp_path: Path) -> None:
    """11 MB are for runs; 6,000 tensors would come to more.  What else the run sends is kept, also over a restart."""
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(6000)]
    with Server(tmp_path, "limits:\n  memory_max: 636000000\n  query_memory_max: 16777216\n") as server:
        run = RunClient(RunOptions(run="wide", layers=2, heads=2, server=server.grpc))
        run.push_names(TENSOR, names)
        run.push(0, [Block("loss", [1.0]), Block("tensor_moved", [1.0] * len(names), layer_count=len(names))])
        assert run.flush(20)
        wait_for("its values are left out", lambda: server.metric("bellwether_ingest_values_without_row_total") == len(names))
        assert server.metric('bellwether_ingest_limit_refused_total{limit="memory"}') == 1
        assert server.metric("bellwether_runs_memory_bytes") < server.metric("bellwether_runs_memory_max_bytes")

        def told() -> list[str]:
            return [event["text"] for event in server.call("ListEvents", run="wide").get("events", [])]

        (text,) = wait_for("the run says so", told)
        assert text.startswith("names left out") and "6000 named rows more" in text and "limits.memory_max" in text
        small = RunClient(RunOptions(run="small", layers=2, heads=2, server=server.grpc))
        small.push_names(TENSOR, names[:100])
        small.push(0, [Block("tensor_moved", [1.0] * 100, layer_count=100)])
        assert small.flush(20)
        server.kill()
        server.start()
        wait_for("the loss is there", lambda: server.call("GetRun", run="wide").get("loss") == 1.0)
        assert told() == [text]
        asking = bellwether.Client(f"http://{server.http}/")
        assert len(asking.matrix("small", "tensor_moved").names) == 100
        for client in (run, small):
            client.close()


def test_a_memory_that_the_server_alone_takes_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "bellwetherd.yml"
    config.write_text(f"storage: {{path: {tmp_path}/data}}\nlimits: {{memory_max: 1000000}}\n")
    command = [str(BIN / "bellwetherd"), f"--config.file={config}", "--config.check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 3
    assert "limits.memory_max is 1000000: must be more than" in done.stderr + done.stdout


def test_a_check_says_every_file_that_is_missing(tmp_path: Path) -> None:
    config = tmp_path / "bellwetherd.yml"
    config.write_text("limits: {runs_live_max: 0}\nrules_file: r.yml\naccess_file: access.yml\ntokens_file: tokens\n")
    (tmp_path / "access.yml").write_text("identities: [{name: alice, roles: [read], runs: ['*']}]\n")
    flags = [f"--tls.cert-file={tmp_path}/c.pem", f"--tls.key-file={tmp_path}/k.pem", f"--web.token-file={tmp_path}/t"]
    command = [str(BIN / "bellwetherd"), f"--config.file={config}", *flags, "--config.check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 3, done.stderr
    begins = [
        f"{config}:1:25: limits.runs_live_max = 0: ",
        f"rules_file: {tmp_path}/r.yml: cannot be read: ",
        f"tokens_file: {tmp_path}/tokens: is not there: ",
        f"tls.cert_file: {tmp_path}/c.pem: cannot be read: ",
        f"tls.key_file: {tmp_path}/k.pem: cannot be read: ",
        f"--web.token-file={tmp_path}/t: ",
    ]
    lines = done.stderr.splitlines()
    assert len(lines) == len(begins) and all(map(str.startswith, lines, begins)), lines


def test_a_check_refuses_what_a_start_refuses(tmp_path: Path) -> None:
    config, identity = tmp_path / "bellwetherd.yml", "roles: [read], runs: []"
    (tmp_path / "access.yml").write_text(
        f"identities:\n- {{name: all, certificates: ['*'], {identity}}}\n- {{name: ann, certificates: ['x'], {identity}}}\n"
    )
    for text, flags, finding in (
        ("web: {external_url: box}", [], "web.external_url = box: must begin with https:// or http://"),
        ("", ["--web.external-url=box"], "--web.external-url = box: must begin with https:// or http://"),
        ("grpc: {listen_address: '0.0.0.0:1'}", [], "off loopback clients must show certificates"),
        ("web: {listen_address: '0.0.0.0:1'}", [], "off loopback the page must speak TLS"),
        ("access_file: access.yml", [], "ann: certificates x is taken by all, which stands before it"),
        ("grpc: {listen_address: '0.0.0.0:1'}", ["--insecure-i-understand"], ""),
    ):
        config.write_text(text)
        command = [str(BIN / "bellwetherd"), f"--config.file={config}", *flags, "--config.check"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert (done.returncode, bool(done.stderr)) == ((3, True) if finding else (0, False)), (text, done.stderr)
        assert finding in done.stderr


JOB = """
import sys, time
from bellwether.client import Block, RunClient, RunOptions
client = RunClient(RunOptions(run=sys.argv[1], layers=1, heads=1, server=sys.argv[2]))
client.push(0, [Block("loss", [1.0])])
print(int(client.flush(20)), client.counters().sender_pid, flush=True)
time.sleep(60)
"""


def test_killed_jobs_give_their_places_back(tmp_path: Path) -> None:
    config = "limits:\n  runs_live_max: 2\ningest:\n  run_silent_ms_max: 2000\n"
    with Server(tmp_path, config) as server:
        for name in ("a", "b", "c"):
            job = subprocess.Popen(
                [sys.executable, "-c", JOB, name, server.grpc],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT / "client_lib/python")},
            )
            assert job.stdout is not None
            taken, sender = map(int, job.stdout.readline().split())
            assert taken == 1, name
            for pid in (sender, job.pid):  # A lost machine: neither sees the other end.
                os.kill(pid, signal.SIGSTOP)
            for pid in (sender, job.pid):
                os.kill(pid, signal.SIGKILL)
            job.wait()
            wait_for("it leaves", lambda name=name: server.call("GetRun", run=name)["ended"])
            assert server.call("GetRun", run=name)["end_reason"] == "silent"
        assert "bellwether_runs_ended_silent_total 3" in server.get("/metrics")


def test_plaintext_off_loopback_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(BIN / "bellwetherd"), f"--storage.path={tmp_path}", "--grpc.listen-address=0.0.0.0:0"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 1 and "off loopback clients must show certificates" in done.stderr
