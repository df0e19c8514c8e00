"""Goal: any server of a cluster answers for every run, as its owner does: queries, streams, lists
and changes.  A server that is not there is named.  A caller has no more rights by one server than
by another.
Method: real PostgreSQL, three real bellwetherd, trainers that ask any server (cluster_fleet.py);
each question goes to all three.  An owner is killed, another is stopped in its tracks.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import INGEST, QUERY, SIGNALS
from bellwether_process import BIN, ROOT, Server, wait_for
from cluster_fleet import Cluster, RoamingTrainer
from partitions import partition_of
from postgres_processes import Postgres, dsn_of
from secure_server import SecureServer, tool

from bellwether.v1 import runs_pb2

RUNS, PERIOD = 9, 0.02


def stream(server: Server, method: str, request: Any, answer: Any, **more: Any) -> Iterator[Any]:
    """Messages of a stream of Query, until it ends."""
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_stream(
            f"/bellwether.v1.Query/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        yield from call(request, timeout=20, **more)


def unary(server: Server, method: str, request: Any, answer: Any, seal: str) -> Any:
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(
            f"/bellwether.v1.Query/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return call(request, timeout=20, metadata=(("x-bellwether-passed-on", seal),))


def code_of(server: Server, method: str, **request: Any) -> int:
    try:
        server.call(method, **request)
    except urllib.error.HTTPError as error:
        print(f"{method}: {error}")  # Shown if the test fails.
        return error.code
    return 200


def quiet(cluster: Cluster) -> None:
    """Everything that was sent is counted, and nothing more comes: answers stay as they are."""
    for trainer in cluster.trainers:
        trainer.stop(60)
    for trainer in cluster.trainers:
        wait_for(
            f"{trainer.run} is counted",
            lambda run=trainer.run, made=trainer.made: (
                int(cluster.ask_all("GetRun", run=run)["frames"]) == made
            ),
        )


def names(answer: dict[str, Any]) -> set[str]:
    return {run["description"]["name"] for run in answer["runs"]}


def test_any_server_answers_before_and_after_its_owner_is_killed(
    tmp_path: Path, primary: Postgres
) -> None:
    with Cluster(tmp_path, primary, 3) as cluster:
        cluster.add_trainers(RUNS, PERIOD, sick_from=20)
        cluster.await_acks(40)
        quiet(cluster)
        everybody = {trainer.run for trainer in cluster.trainers}
        owners = {run: cluster.owner_of(run) for run in everybody}
        assert len({owner.folder.name for owner in owners.values()}) > 1, "one server has them all"

        listed = cluster.ask_all("ListRuns")
        assert names(listed) == everybody and listed["total"] == RUNS
        assert listed["unanswered"] == [] and listed["partitions_unserved"] == 0
        sick = cluster.trainers[-1].run
        wait_for("the sick run is told of", lambda: cluster.ask_all("ListAlerts")["alerts"])
        key = cluster.ask_all("ListAlerts", run=sick)["alerts"][0]["last"]["key"]
        series = [{"signal": "loss", "layer": 0, "head": 0}]
        for run in everybody:
            told = cluster.ask_all("GetRun", run=run)
            uuid = base64.b64decode(told["description"]["uuid"]).hex()
            assert cluster.ask_all("GetRun", run=uuid) == told
            assert cluster.ask_all("GetSeries", run=run, series=series, attempt=-1)["series"]
            cluster.ask_all("GetMatrix", run=run, signal="wq_sigma", step=-1)
            cluster.ask_all("ListEvents", run=run)
            cluster.ask_all("ListActions", run=run)
            cluster.ask_all("GetPolicy", run=run)
            cluster.ask_all("ListAlerts", run=run)
        assert cluster.ask_all("GetAlert", run=sick, key=key)["alert"]["history"]
        for server in cluster.servers:
            assert code_of(server, "GetRun", run="nobodys") == 404

        # Streams.
        for run in (sick, cluster.trainers[0].run):
            first = [
                next(stream(s, "WatchRun", QUERY.WatchRunRequest(run=run), QUERY.WatchRunResponse))
                for s in cluster.servers
            ]
            assert first[0].run.frames > 0 and all(one.run == first[0].run for one in first)
            exported = [
                b"".join(
                    part.chunk
                    for part in stream(
                        s, "ExportRun", QUERY.ExportRunRequest(run=run), QUERY.ExportRunResponse
                    )
                )
                for s in cluster.servers
            ]
            assert exported[0].startswith(b"BWRUN") or len(exported[0]) > 1000
            assert all(len(one) == len(exported[0]) for one in exported)
        for server in cluster.servers:
            told = []
            request = QUERY.WatchAlertsRequest(run=sick)
            for answer in stream(server, "WatchAlerts", request, QUERY.WatchAlertsResponse):
                if answer.caught_up:
                    break
                told.append((answer.transition.id, answer.transition.key, answer.transition.k))
            assert told and told == sorted(told), told
        # The page hears of runs that another server has.
        with urllib.request.urlopen(
            f"http://{cluster.servers[0].http}/api/v1/events", timeout=20
        ) as events:
            wait_for(
                "all runs may have changed", lambda: events.readline() == b'data: {"all":true}\n'
            )

        # Its owner dies: until another has taken over a run is not known, never not there.
        victim = owners[sick]
        lost = [run for run, owner in owners.items() if owner is victim]
        before = {run: cluster.ask_all("GetRun", run=run) for run in lost}
        values = {run: cluster.ask_all("GetSeries", run=run, series=series) for run in lost}
        victim.kill()
        other = cluster.alive()[0]
        seen = {code_of(other, "GetRun", run=sick)}
        missing = other.call("ListRuns")
        assert names(missing) <= everybody
        assert missing["unanswered"] == [victim.grpc] or missing["partitions_unserved"] > 0, missing
        assert names(missing).isdisjoint(lost)
        deadline = time.monotonic() + 60
        while (code := code_of(other, "GetRun", run=sick)) != 200:
            seen.add(code)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert seen == {503}, seen
        cluster.await_balance()
        for run in lost:
            after = cluster.ask_all("GetRun", run=run)
            for field in ("description", "step", "frames", "steps_recorded", "loss", "stage"):
                assert after[field] == before[run][field], (run, field)
            assert cluster.ask_all("GetSeries", run=run, series=series) == values[run]
        assert names(cluster.ask_all("ListRuns")) == everybody
        assert cluster.ask_all("GetAlert", run=sick, key=key)["alert"]["last"]["key"] == key
        assert sum(s.metric("bellwether_cluster_calls_total") for s in cluster.alive()) > 0


def test_any_server_passes_changes_to_the_runs_owner(
    tmp_path: Path, primary: Postgres
) -> None:
    with Cluster(tmp_path, primary, 3) as cluster:
        cluster.add_trainers(3, PERIOD, sick_from=20)
        cluster.await_acks(40)
        sick = cluster.trainers[-1].run
        wait_for(
            "the sick run is told of", lambda: cluster.ask_all("ListAlerts", run=sick)["alerts"]
        )
        key = cluster.servers[0].call("ListAlerts", run=sick)["alerts"][0]["last"]["key"]
        owner = cluster.owner_of(sick)
        a, b = (server for server in cluster.servers if server is not owner)
        a.call("AcknowledgeAlert", run=sick, key=key, by="ada", comment="seen")
        b.call("Annotate", run=sick, event={"kind": "EVENT_KIND_ANNOTATION", "text": "by another"})
        a.call("SetPolicy", run=sick, policy={"mode": "MODE_PROPOSE"}, by="ada")
        action = {"kind": "ACTION_KIND_LR_SCALE", "value": 0.5}
        code = code_of(b, "ProposeAction", run=sick, action=action, by="ada", reason="why not")
        assert code in (200, 400, 409), code  # As its owner says; either way it is in the audit.

        quiet(cluster)
        alert = cluster.ask_all("GetAlert", run=sick, key=key)["alert"]
        assert (alert["acknowledged"], alert["acknowledged_by"]) == (True, "ada"), alert
        listed = cluster.ask_all("ListAlerts")["alerts"]
        waits = [action["id"] for each in listed for action in each.get("proposed", [])]
        assert waits or code != 200, "what waits is told by any server"
        assert [one for one in listed if one["acknowledged"]], "the list has no notes"
        texts = [event["text"] for event in cluster.ask_all("ListEvents", run=sick)["events"]]
        assert "by another" in texts
        policy = cluster.ask_all("GetPolicy", run=sick)
        assert policy["own"] and policy["mode"] == "MODE_PROPOSE"
        told = cluster.ask_all("ListActions", run=sick)
        whats = {entry["what"] for entry in told["audit"]} | {"propose" for _ in told["actions"]}
        assert {"set_policy", "propose"} <= whats, told


def test_notes_of_alerts_move_with_their_run(tmp_path: Path, primary: Postgres) -> None:
    with Cluster(tmp_path, primary, 2) as cluster:
        cluster.add_trainers(2, PERIOD, sick_from=20)
        cluster.await_acks(40)
        sick = cluster.trainers[-1].run
        wait_for(
            "the sick run is told of", lambda: cluster.ask_all("ListAlerts", run=sick)["alerts"]
        )
        owner = cluster.owner_of(sick)
        [other] = (server for server in cluster.servers if server is not owner)
        quiet(cluster)  # Else the alert may become worse than what was judged.
        key = other.call("ListAlerts", run=sick)["alerts"][0]["last"]["key"]
        other.call("AcknowledgeAlert", run=sick, key=key, by="ada", comment="seen")
        other.call("MarkFalseAlarm", run=sick, key=key, by="ada", reason="known")
        owner.kill()
        cluster.await_balance()
        wait_for("its next owner", lambda: code_of(other, "GetAlert", run=sick, key=key) == 200)
        alert = other.call("GetAlert", run=sick, key=key)["alert"]
        assert (alert["acknowledged"], alert["comment"]) == (True, "seen")
        assert alert["muted"] and alert["false_alarm"]["reason"] == "known"


def test_run_deleted_by_any_server_stays_deleted(tmp_path: Path, primary: Postgres) -> None:
    recorded = ROOT / "tests/testdata/runs/gpt-live-flash-s1.bwrun"
    with Cluster(tmp_path, primary, 2) as cluster:
        cluster.await_balance()
        cluster.servers[0].run("run", "import", str(recorded), "--name", "old", "--notify")
        owner = cluster.owner_of("old")
        [other] = (server for server in cluster.servers if server is not owner)
        other.run("run", "rename", "old", "older")
        wait_for("all know its name", lambda: code_of(owner, "GetRun", run="older") == 200)
        uuid_of = cluster.ask_all("GetRun", run="older")["description"]["uuid"]
        rows = "SELECT count(*) FROM bellwether.run_rows WHERE substr(key, 1, 1) IN ('s', 'e', 'J');"
        assert primary.sql(rows) != [["0"]]
        other.run("run", "delete", "older", "--yes")
        assert [code_of(server, "GetRun", run="older") for server in cluster.servers] == [404, 404]
        assert primary.sql(rows) == [["0"]]
        owner.kill()
        cluster.await_balance()
        wait_for("it is not there", lambda: code_of(other, "GetRun", run="older") == 404)
        assert other.call("ListRuns")["runs"] == []
        # The same recording is a new run.
        other.run("run", "import", str(recorded), "--name", "old")
        assert other.call("GetRun", run="old")["description"]["uuid"] == uuid_of
        assert other.series("old", "loss")


def test_change_voided_by_another_owner_is_not_confirmed(
    tmp_path: Path, primary: Postgres
) -> None:
    with Cluster(tmp_path, primary, 3) as cluster:
        cluster.add_trainers(3, PERIOD)
        cluster.await_acks(20)
        quiet(cluster)  # Nothing else is committed, by which its owner would find out.
        run = cluster.trainers[0].run
        place = partition_of(uuid.uuid5(uuid.NAMESPACE_URL, run).bytes)
        owner = cluster.owner_of(run)
        # As when another server took the run, and its owner does not know it yet.  With its own
        # address it would ask itself, should it find out at once.
        primary.sql(
            "UPDATE bellwether.lease SET epoch = epoch + 1, owner = 'another/1', address = '', "
            f"until = now() + interval '3 s' WHERE p = {place};"
        )
        event = {"kind": "EVENT_KIND_ANNOTATION", "text": "void"}
        assert code_of(owner, "Annotate", run=run, event=event) == 503
        event["text"] = "made"
        wait_for(
            "it is served again", lambda: code_of(owner, "Annotate", run=run, event=event) == 200
        )
        texts = [event["text"] for event in cluster.ask_all("ListEvents", run=run)["events"]]
        assert "made" in texts and "void" not in texts, texts


class Drifting(RoamingTrainer):
    """Heads apart by a few percent; from `drifts_from` on one of them by much more."""

    def __init__(self, drifts_from: int, cluster: Cluster, first: int, run: str) -> None:
        self.drifts_from = drifts_from
        servers = [server.grpc for server in cluster.servers]
        super().__init__(servers, first, run, cluster.ledger, PERIOD, layers=2, heads=4)

    def _frame(self, seq: int) -> bytes:
        message = INGEST.ClientMessage.FromString(super()._frame(seq))
        for block in message.frame.blocks:
            if block.signal == SIGNALS.SIGNAL_WQ_SIGMA:
                for i in range(len(block.values)):
                    block.values[i] = (1 + i / 50) * (1 + (seq * (i + 3)) % 7 / 1000)
                if 0 < self.drifts_from <= seq:
                    block.values[5] *= 8
        return bytes(message.SerializeToString())


def import_here(server: Server, file: Path) -> None:
    server.run("run", "import", str(file))


def test_runs_of_two_servers_are_compared_as_one_server_would(
    tmp_path: Path, primary: Postgres
) -> None:
    with Cluster(tmp_path, primary, 3) as cluster:
        cluster.trainers = [Drifting(37 if i == 0 else 0, cluster, i, f"run-{i}") for i in range(4)]
        cluster.await_acks(90)
        quiet(cluster)
        drifting, *healthy = (trainer.run for trainer in cluster.trainers)
        owners = {trainer.run: cluster.owner_of(trainer.run) for trainer in cluster.trainers}
        apart = [run for run in healthy if owners[run] is not owners[drifting]]
        assert apart, f"one server has them all: {owners}"
        one_server = Server(tmp_path / "alone")
        one_server.folder.mkdir()
        with one_server:
            for run in (drifting, *healthy):
                file = tmp_path / f"{run}.bwrun"
                cluster.servers[0].run("run", "export", run, str(file))
                import_here(one_server, file)
            for run, baseline in [(drifting, other) for other in healthy] + [(apart[0], drifting)]:
                asked = {"run": run, "baseline": baseline, "signal": "wq_sigma"}
                expected = one_server.call("CompareRuns", **asked)
                if run == drifting:
                    assert expected["heads_differing"] == 1, expected
                    worst = expected["heads"][0]
                    assert (worst["layer"], worst["head"]) == (1, 1), expected
                    assert int(worst["first_step"]) == 37, expected
                for server in cluster.servers:
                    assert server.call("CompareRuns", **asked) == expected, server.folder.name
                    words = ("run", "compare", run, baseline, "--signal", "wq_sigma")
                    assert server.run(*words) == one_server.run(*words)
            # What is wrong with the question is said in the same words.
            for wrong in ({"signal": "nothing"}, {"signal": "wq_sigma", "limit": 5000}):
                texts = set()
                for server in (one_server, *cluster.servers):
                    with pytest.raises(urllib.error.HTTPError) as refused:
                        server.call("CompareRuns", run=drifting, baseline=apart[0], **wrong)
                    texts.add((refused.value.code, refused.value.read()))
                assert len(texts) == 1, texts
        # Its owner dies: until another has taken over nobody compares half of it.
        owners[apart[0]].kill()
        asked = {"run": drifting, "baseline": apart[0], "signal": "wq_sigma"}
        codes = {code_of(server, "CompareRuns", **asked) for server in cluster.alive()}
        assert codes <= {200, 503}, codes
        cluster.await_balance()
        assert cluster.ask_all("CompareRuns", **asked)["heads_differing"] == 1


def test_hung_server_is_named_and_delays_no_answer(
    tmp_path: Path, primary: Postgres
) -> None:
    with Cluster(tmp_path, primary, 3) as cluster:
        cluster.add_trainers(RUNS, PERIOD)
        cluster.await_acks(5)
        hung, asked = cluster.servers[2], cluster.servers[0]
        own = [t.run for t in cluster.trainers if t.serving == asked.grpc]
        with hung.paused():
            answer = asked.call("ListRuns")
            assert answer["unanswered"] == [hung.grpc], answer
            assert set(own) <= names(answer)
            assert asked.metric("bellwether_cluster_calls_total") > 0
        cluster.await_balance(60)
        # Its leases run out while two wait for it one after the other: then others have its runs.
        with hung.paused():
            command = [str(BIN / "bellwether"), "--server", asked.grpc, "run", "list"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
            assert (
                f"1 server of the cluster did not answer: its runs are missing here ({hung.grpc})"
                in done.stderr
            )
        cluster.await_balance(60)


ACCESS = """
identities:
- {name: root, roles: [admin], runs: ["*"]}
- {name: alice, roles: [read], runs: ["run-1", "run-2"]}
- {name: trainers, anonymous: true, roles: [write], runs: ["*"]}
"""


def ask_as(server: Server, token: str, method: str, **request: Any) -> tuple[int, Any]:
    call = urllib.request.Request(
        f"http://{server.http}/api/v1/{method}",
        json.dumps(request).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
    )
    try:
        with urllib.request.urlopen(call, timeout=30) as answer:
            return 200, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def seal_of(key: bytes, method: str, who: int, name: str = "", age_s: float = 0) -> str:
    """As server/access/passed_on.h says."""
    fields = ["1", str(int((time.time() - age_s) * 1000)), method, str(who), name, "", "me"]
    text = "".join(f"{len(field)}:{field}" for field in fields).encode()
    mac = hmac.new(key, text, hashlib.sha256).digest()
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (text, mac))


def test_rights_are_the_same_at_any_server(tmp_path: Path, primary: Postgres) -> None:
    cluster = Cluster(tmp_path, primary, 3)
    tokens = tmp_path / "tokens"
    (tmp_path / "access.yml").write_text(ACCESS)
    given = {
        name: tool("token", "create", name, "--file", str(tokens)).strip()
        for name in ("root", "alice")
    }
    for server in cluster.servers:
        with open(server.folder / "server.yml", "a") as config:
            config.write(f"access_file: {tmp_path}/access.yml\ntokens_file: {tokens}\n")
        server.bearer = given["root"]
    with cluster:
        cluster.add_trainers(4, PERIOD)
        cluster.await_acks(5)
        for server in cluster.servers:
            code, answer = ask_as(server, given["alice"], "ListRuns")
            assert code == 200 and names(answer) == {"run-1", "run-2"} and answer["total"] == 2
            for run, expected in {"run-1": 200, "run-2": 200, "run-3": 403, "none": 403}.items():
                assert ask_as(server, given["alice"], "GetRun", run=run)[0] == expected, run
            note = {"run": "run-1", "event": {"text": "mine"}}
            assert ask_as(server, given["alice"], "Annotate", **note)[0] == 403
            assert ask_as(server, given["root"], "Annotate", **note)[0] == 200
            assert ask_as(server, "bw-wrong", "GetRun", run="run-1")[0] == 401
        audits = [
            line
            for s in cluster.servers
            for line in (s.storage / "audit.log").read_text().splitlines()
        ]
        done = [json.loads(line) for line in audits if '"Annotate"' in line and '"OK"' in line]
        assert {line["who"] for line in done} == {"root"}
        # Where it was asked, and where it was done.
        assert sum(" by " in line["from"] for line in done) == 2, done

        # Nobody but a server is believed for whom he asks.
        request, answer = QUERY.GetRunRequest(run="run-1"), runs_pb2.Run
        key = bytes.fromhex(
            primary.sql("SELECT encode(key, 'hex') FROM bellwether.peer_key;")[0][0]
        )
        forged = {
            "garbage": "garbage",
            "another key": seal_of(b"x" * 32, "GetRun", 1),
            "another call": seal_of(key, "ListRuns", 1),
            "of yesterday": seal_of(key, "GetRun", 1, age_s=86400),
            "everybody": seal_of(key, "GetRun", 2),
            "somebody": seal_of(key, "GetRun", 4, "mallory"),
        }
        for server in cluster.servers:
            for what, seal in forged.items():
                with pytest.raises(grpc.RpcError) as refused:
                    unary(server, "GetRun", request, answer, seal)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, what
        # What was passed on is answered by the owner alone, not passed on again.
        codes = []
        for server in cluster.servers:
            try:
                unary(server, "GetRun", request, answer, seal_of(key, "GetRun", 1))
                codes.append("OK")
            except grpc.RpcError as error:
                codes.append(error.code().name)
        assert sorted(codes) == ["NOT_FOUND", "NOT_FOUND", "OK"], codes
        # The database's readers cannot read the key.
        primary.sql("CREATE ROLE person LOGIN IN ROLE bellwether_reader;")
        with pytest.raises(AssertionError, match="permission denied"):
            primary.sql("SET ROLE person; SELECT key FROM bellwether.peer_key;")


def test_servers_with_certificates_ask_each_other(tmp_path: Path, primary: Postgres) -> None:
    tls = tmp_path / "tls"
    tool("cert", "init", str(tls))
    tool("cert", "client", str(tls), "peer")
    servers: list[SecureServer] = []
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tls").symlink_to(tls)
        (folder / "dsn").touch(mode=0o600)
        (folder / "dsn").write_text(dsn_of(primary))
        # The server's own certificate cannot ask; b's configuration forgets the other.
        peer = "peer_cert_file: tls/peer.pem, peer_key_file: tls/peer.key" if name == "a" else ""
        more = f"cluster: {{dsn_file: dsn, node: {name}, lease_seconds: 5, {peer}}}"
        servers.append(SecureServer(folder, ACCESS, more))
    tokens = [server.token("root") for server in servers]
    try:
        for server in servers:
            server.start()
        halves = "SELECT count(*) FROM bellwether.lease WHERE until > now() GROUP BY owner;"
        wait_for("each has its half", lambda: primary.sql(halves) == [["32"], ["32"]])

        def unanswered(i: int) -> list[str]:
            code, text = servers[i].ask("ListRuns", tokens[i], {})
            assert code == 200, text
            return list(json.loads(text)["unanswered"])

        answered = 'bellwether_cluster_calls_total{result="answered"}'
        wait_for(
            "b answers a",
            lambda: unanswered(0) == [] and servers[0].metric(tokens[0], answered) > 0,
        )
        assert unanswered(1) == [servers[0].grpc], "without a certificate for asking"
    finally:
        for server in servers:
            server.kill()
