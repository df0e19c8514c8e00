"""Goal: a caller with a bad or missing token, or one for another run, is refused with the code for
that.  The log has it once a second at most, and the audit each time.  A right that was taken away
is gone from open streams.  No caller learns of runs that it may not see.  The audit names each
caller.
Method: the real server with real certificates and tokens, asked by the real sender, command and
page. Rows 16 and the quotas of the fault matrix.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, wait_for
from secure_server import SecureServer, eventually, tool

from bellwether.client import Block, RunClient, RunOptions
from bellwether.query import Client, QueryError

ACCESS = """
tenants:
  small: {streams_max: 2, runs_max: 1, frames_per_second_max: 20}
identities:
- {name: trainers, certificates: ["spiffe://bellwether/client/trainers"], roles: [write], runs: ["team-a/*"]}
- {name: per-run, certificates: ["spiffe://bellwether/run/*"], roles: [write], runs: ["$1"]}
- {name: small-trainers, tenant: small, certificates: ["spiffe://bellwether/client/small"], roles: [write], runs: ["*"]}
- {name: operators, certificates: ["spiffe://bellwether/client/operators"], roles: [admin], runs: ["*"]}
- {name: alice, roles: [read, act], runs: ["team-a/*"]}
- {name: bob, roles: [read], runs: ["team-b/*"]}
- {name: carol, roles: [read], runs: ["team-a/*"]}
- {name: root, roles: [admin], runs: ["*"]}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecureServer]:
    with SecureServer(tmp_path, ACCESS) as running:
        yield running


def send(server: SecureServer, run: str, shown: dict[str, str]) -> None:
    with server.trainer(run, shown) as client:
        client.push(0, [Block("loss", [1.0])])
        assert client.flush(20), client.counters()


def tokens_listed(server: SecureServer) -> list[str]:
    return tool("token", "list", "--file", str(server.folder / "tokens")).splitlines()


def refused(client: RunClient, words: str) -> None:
    client.push(0, [Block("loss", [1.0])])  # The sender starts with the first frame.
    wait_for(f"refused: {words}", lambda: words in client.counters().error)


def test_tokens_missing_wrong_expired_and_of_another_run(server: SecureServer) -> None:
    trainers, operators = server.client_certificate("trainers"), server.client_certificate("operators")
    send(server, "team-a/1", trainers)
    alice, bob, root = server.token("alice"), server.token("bob"), server.token("root")
    # The last is: the file may have been read between two of them.
    wait_for("the tokens are read", lambda: server.ask("ListRuns", root, {})[0] == 200)

    # Over gRPC the certificate opens the door, and the token says who comes in.
    for token, code, words in [
        ("bw_" + "x" * 43, 5, "the token is wrong"),
        (bob, 5, "bob has the role read but not for run"),
    ]:
        assert words in server.command(operators, "run", "get", "team-a/1", token=token, exit_code=code)
    assert "team-a/1" in server.command(operators, "run", "get", "team-a/1", token=alice)
    assert "lacks the role read" in server.command(trainers, "run", "list", exit_code=5)

    # Over HTTPS with a token alone: 401 is 16, 403 is 7.
    assert server.ask("GetRun", "", {"run": "team-a/1"})[0] == 401
    assert server.ask("GetRun", "bw_wrong", {"run": "team-a/1"})[0] == 401
    assert server.ask("GetRun", alice + "x", {"run": "team-a/1"})[0] == 401
    assert server.ask("GetRun", "x" * 5000, {"run": "team-a/1"})[0] == 401
    assert server.ask("GetRun", alice, {"run": "team-a/1"})[0] == 200
    there, missing = (server.ask("GetRun", bob, {"run": run}) for run in ("team-a/1", "team-a/2"))
    assert there[0] == missing[0] == 403
    assert there[1].replace("team-a/1", "?") == missing[1].replace("team-a/2", "?"), "the answer tells what there is"
    assert server.metric(root, "bellwether_access_refused_total") >= 6

    # Its file is read again by itself; what has expired counts no more.
    file = server.folder / "tokens"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line.replace("never", "2020-01-01T00:00:00Z") if " bob " in line else line for line in lines))
    wait_for("expired", lambda: "expired at 2020" in server.ask("ListRuns", bob, {})[1])

    listed = tool("token", "list", "--file", str(file))
    assert "(expired)" in listed and alice not in listed
    tool("token", "revoke", next(line.split()[0] for line in listed.splitlines() if " alice " in line), "--file", str(file))
    wait_for("revoked", lambda: server.ask("ListRuns", alice, {})[0] == 401)
    for secret in (alice, bob, root):
        for kept in (file, server.folder / "server.log", server.folder / "data/audit.log"):
            assert secret not in kept.read_text(), kept


def test_answers_hide_runs_without_read_access(server: SecureServer) -> None:
    operators = server.client_certificate("operators")
    send(server, "team-a/1", operators)
    send(server, "team-b/1", operators)
    alice = server.token("alice")
    wait_for("the token is read", lambda: server.ask("ListRuns", alice, {})[0] == 200)
    wait_for("the runs are listed", lambda: "team-b/1" in server.command(operators, "run", "list"))
    listed = server.ask("ListRuns", alice, {})[1]
    assert "team-a/1" in listed and "team-b" not in listed and '"total": 1' in listed.replace('":1', '": 1')
    assert server.ask("CompareRuns", alice, {"run": "team-a/1", "baseline": "team-b/1"})[0] == 403
    assert server.ask("/metrics", alice)[0] == 403, "it shows all runs"
    assert json.loads(server.ask("GetServerInfo", alice, {})[1])["caller"] == {"name": "alice", "may_act": True, "may_admin": False}
    assert "storage" not in server.ask("GetServerInfo", alice, {})[1].replace("storage_path\":\"\"", "")
    # The page by its address: the token goes into a cookie that only this server reads.
    assert server.ask(f"/?token={alice}")[0] in (200, 404, 401)  # After the redirect.
    # A certificate is as good as a token.
    assert "team-b/1" in server.ask("ListRuns", "", {}, shown=operators)[1]


def test_the_writer_of_one_run_cannot_touch_another(server: SecureServer) -> None:
    trainers = server.client_certificate("trainers")
    send(server, "team-a/1", trainers)
    with server.trainer("team-b/1", trainers) as client:
        refused(client, "PERMISSION_DENIED")
    # Not by its uuid under a name of its own either: that is a run of its own.
    wait_for("listed", lambda: "team-a/1" in server.command(server.client_certificate("operators"), "run", "list"))
    told = server.command(server.client_certificate("operators"), "run", "get", "team-a/1", "-o", "json")
    uuid = base64.b64decode(json.loads(told)["description"]["uuid"]).hex()
    own = server.client_certificate("own", "spiffe://bellwether/run/own")
    with server.trainer("own", own, run_uuid=uuid) as client:
        client.push(7, [Block("loss", [7.0])])
        assert client.flush(20), client.counters()
    other = server.command(server.client_certificate("operators"), "run", "get", uuid, "-o", "json")
    assert json.loads(other)["description"]["name"] == "team-a/1"
    send(server, "own", own)
    with server.trainer("own2", own) as client:
        refused(client, "PERMISSION_DENIED")
    with server.trainer("x", server.client_certificate("nobody")) as client:
        refused(client, "UNAUTHENTICATED")
    lines = [line for line in server.audit() if line["call"] == "Attach"]
    assert {"who": "trainers", "run": "team-a/1", "result": "OK"}.items() <= lines[0].items()
    assert any(line["result"] == "PERMISSION_DENIED" and line.get("run") == "team-b/1" for line in lines)


def uuid_of(name: str) -> str:
    """What a client takes as the uuid of a run that was given none: anybody can."""
    mask = (1 << 64) - 1
    state = (0x6C62272E07BB0142 << 64) | 0x62B821756295C58D
    for byte in name.encode():
        state = (state ^ byte) * ((1 << 88) + 0x13B) % (1 << 128)

    def mix(half: int) -> int:
        half = (half ^ (half >> 33)) * 0xFF51AFD7ED558CCD & mask
        half = (half ^ (half >> 33)) * 0xC4CEB9FE1A85EC53 & mask
        return half ^ (half >> 33)

    low = mix(state & mask)
    return f"{mix((state >> 64) ^ low):016x}{low:016x}"


def test_no_run_is_taken_by_the_hash_of_its_name(server: SecureServer) -> None:
    trainers = server.client_certificate("trainers")
    own = server.client_certificate("own", "spiffe://bellwether/run/own")
    # Before its owner comes: he is not kept out.
    with server.trainer("own", own, run_uuid=uuid_of("team-a/llama")) as client:
        client.push(0, [Block("loss", [1.0])])
        assert client.flush(20), client.counters()
    send(server, "team-a/llama", trainers)
    # Behind him: nothing says whether there is such a run.
    send(server, "team-a/secret", trainers)
    for name in ("team-a/secret", "team-a/none"):
        with server.trainer("own", own, run_uuid=uuid_of(name)) as client:
            client.push(0, [Block("loss", [1.0])])
            assert client.flush(20), client.counters()
    operators = server.client_certificate("operators")
    for name in ("team-a/llama", "team-a/secret"):
        told = json.loads(server.command(operators, "run", "get", uuid_of(name), "-o", "json"))
        assert told["description"]["name"] == name
    # The same uuid is the same run, when its trainer comes again.
    before = server.command(operators, "run", "list").count("own ")
    with server.trainer("own", own, run_uuid=uuid_of("team-a/none")) as client:
        client.push(1, [Block("loss", [1.0])])
        assert client.flush(20), client.counters()
    assert server.command(operators, "run", "list").count("own ") == before == 3


def test_a_run_that_is_in_the_way_is_not_named(tmp_path: Path) -> None:
    # From when there were no rights: whoever came said what he liked.
    with Server(tmp_path) as before:
        options = RunOptions(
            run="hidden", layers=1, heads=1, server=before.grpc, run_uuid=uuid_of("own")
        )
        with RunClient(options) as client:
            client.push(0, [Block("loss", [1.0])])
            assert client.flush(20), client.counters()
        assert before.stop() == 0
    with SecureServer(tmp_path, ACCESS) as server:
        own = server.client_certificate("own", "spiffe://bellwether/run/own")
        with server.trainer("own", own) as client:
            refused(client, "PERMISSION_DENIED")
            assert "hidden" not in client.counters().error


def test_revoked_rights_end_open_streams(server: SecureServer) -> None:
    with server.trainer("team-a/1", server.client_certificate("trainers")) as client:
        client.push(0, [Block("loss", [1.0])])
        assert client.flush(20)
        file = server.folder / "access.yml"
        file.write_text(ACCESS.replace('"team-a/*"', '"team-c/*"'))
        refused(client, "PERMISSION_DENIED")
        # A file that is not legal changes nothing.
        file.write_text(ACCESS.replace("roles: [write]", "roles: [wirte]"))
        wait_for("the finding is told", lambda: "must be one of read, write, act, admin" in server.log())
    with server.trainer("team-c/1", server.client_certificate("trainers")) as client:
        client.push(0, [Block("loss", [1.0])])
        assert client.flush(20), client.counters()


def test_open_streams_end_with_their_token_and_nothing_is_lost(server: SecureServer) -> None:
    operators, root = server.client_certificate("operators"), server.token("root")
    file = server.folder / "trainer.token"

    def give_token(*more: str) -> str:
        file.unlink(missing_ok=True)
        file.write_text(server.token("root", *more))
        file.chmod(0o600)
        return next(line.split()[0] for line in reversed(tokens_listed(server)) if " root " in line)

    def ended(reason: str) -> float:
        return server.metric(root, f'bellwether_access_streams_ended_total{{reason="{reason}"}}')

    given = give_token()
    alice, carol = server.token("alice"), server.token("carol")
    wait_for("the tokens are read", lambda: server.ask("ListRuns", carol, {})[0] == 200)
    with server.trainer("team-a/1", operators, token_file=str(file)) as client:
        for step in range(10):
            assert client.push(step, [Block("loss", [float(step)])])
        assert client.flush(20), client.counters()
        with server.trainer("team-a/sick", operators) as sick:
            sick.push(0, [Block("loss", [math.nan])])
            assert sick.flush(20)
        watch = server.begin(operators, "alert", "watch", token=alice)
        narrowed = server.begin(operators, "alert", "watch", token=carol)
        events, poor = server.events(alice), server.events(carol)
        listed = tokens_listed(server)
        for token in (given, next(line.split()[0] for line in listed if " alice " in line)):
            tool("token", "revoke", token, "--file", str(server.folder / "tokens"))
        wait_for("trainer, watch and page end", lambda: ended("token_wrong") >= 3)
        said, code = watch()
        assert code == 5 and "the token was revoked" in said, said
        told = events()
        assert "event: refused" in told and "the token was revoked" in told, told
        # carol, who may not read any more, is told that.
        access = server.folder / "access.yml"
        access.write_text(access.read_text().replace("{name: carol, roles: [read]", "{name: carol, roles: [write]"))
        said, code = narrowed()
        assert code == 5 and "carol lacks the role read" in said, said
        told = poor()
        assert "event: refused" in told and "carol lacks the role read" in told, told
        assert ended("role") == 2
        # The trainer's sender tries again, with what stands in the file then.
        for step in range(10, 50):
            assert client.push(step, [Block("loss", [float(step)])])
        wait_for("told", lambda: "UNAUTHENTICATED" in client.counters().error)
        assert client.counters().frames_acked == 10
        give_token()
        assert client.flush(60), client.counters()
        counters = client.counters()
        assert (counters.frames_acked, counters.frames_dropped_ring, counters.frames_dropped_window) == (50, 0, 0)
    wait_for("each frame once", lambda: '"frames":"50"' in server.ask("GetRun", root, {"run": "team-a/1"})[1].replace(" ", ""))
    assert server.log().count("open streams of alice end: ") == 1 == server.log().count("open streams of carol end: ")


def test_actions_are_their_identitys_and_stand_in_the_audit(server: SecureServer) -> None:
    trainer = server.trainer("team-a/1", server.client_certificate("trainers"))
    trainer.push(0, [Block("loss", [1.0])])
    assert trainer.flush(20)
    alice, bob, root = server.token("alice"), server.token("bob"), server.token("root")
    wait_for("the tokens are read", lambda: server.ask("ListRuns", root, {})[0] == 200)
    asked = {"run": "team-a/1", "action": {"kind": "ACTION_KIND_SAMPLING_DEEPEN", "value": 1}, "by": "mallory"}
    said = server.ask("ProposeAction", alice, asked)
    audit = [line for line in server.audit() if line["call"] == "ProposeAction"]
    assert audit, said
    assert audit[-1]["who"] == "alice" and audit[-1]["detail"].startswith("as mallory")
    actions = server.ask("ListActions", alice, {"run": "team-a/1"})[1]
    assert "alice" in actions and "mallory" not in actions
    assert server.ask("ProposeAction", bob, asked)[0] == 403
    policy = {"run": "team-a/1", "policy": {"mode": "MODE_PROPOSE"}, "by": "x"}
    assert server.ask("SetPolicy", alice, policy)[0] == 403
    assert server.ask("SetPolicy", root, policy)[0] == 200
    trainer.close()
    wait_for("the run has ended", lambda: '"ended":true' in server.ask("GetRun", root, {"run": "team-a/1"})[1].replace(" ", ""))
    last = [(line["who"], line["call"], line["result"]) for line in server.audit()][-3:]
    assert last == [
        ("bob", "ProposeAction", "PERMISSION_DENIED"),
        ("alice", "SetPolicy", "PERMISSION_DENIED"),
        ("root", "SetPolicy", "OK"),
    ]


def test_false_alarms_are_their_callers_and_audited(server: SecureServer) -> None:
    run = "team-a/1"
    with server.trainer(run, server.client_certificate("trainers")) as trainer:
        trainer.push(0, [Block("loss", [math.nan])])
        assert trainer.flush(20)
    alice, carol, root = server.token("alice"), server.token("carol"), server.token("root")
    wait_for("the tokens are read", lambda: server.ask("ListRuns", root, {})[0] == 200)
    alerts = wait_for(
        "an alert", lambda: json.loads(server.ask("ListAlerts", alice, {"run": run})[1])["alerts"]
    )
    key = alerts[0]["last"]["key"]
    mark = {"run": run, "key": key, "by": "mallory", "reason": "a test"}
    status, said = server.ask("MarkFalseAlarm", alice, mark)
    assert status == 200 and json.loads(said)["false_alarm"]["by"] == "alice"
    assert server.ask("MarkFalseAlarm", carol, {**mark, "undo": True})[0] == 403
    assert server.ask("MarkFalseAlarm", alice, {"run": run, "key": key, "undo": True})[0] == 200
    lines = [line for line in server.audit() if line["call"] == "MarkFalseAlarm"]
    assert [(line["who"], line["result"], line.get("detail", "")) for line in lines] == [
        ("alice", "OK", f"as mallory, {key}"),
        ("carol", "PERMISSION_DENIED", lines[1].get("detail", "")),
        ("alice", "OK", f"as , {key}, undo"),
    ]


def test_reloads_and_their_results_are_audited(tmp_path: Path) -> None:
    with SecureServer(tmp_path, ACCESS, "web: {enable_reload: true}") as server:
        root = server.token("root")
        wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)

        def reload() -> int:
            page = server.http.rsplit(":", 1)
            connection = http.client.HTTPSConnection(
                page[0], int(page[1]), timeout=20, context=server.context()
            )
            headers = {"Authorization": f"Bearer {root}", "Content-Type": "application/json"}
            connection.request("POST", "/-/reload", b"", headers)
            return connection.getresponse().status

        def noted(call: str) -> list[str]:
            return [line["result"] for line in server.audit() if line["call"] == call]

        assert reload() == 200
        assert noted("/-/reload") == ["OK"]
        (server.folder / "access.yml").write_text("identities: 7\n")
        assert reload() == 400
        assert noted("/-/reload") == ["OK", "INVALID_ARGUMENT"]
        assert noted("identities")[0] == "OK", "the token that was read"
        assert noted("identities")[-1] == "INVALID_ARGUMENT"


def test_refusals_fill_neither_the_log_nor_the_audit(server: SecureServer) -> None:
    begin = time.monotonic()
    for _ in range(200):
        assert server.ask("GetRun", "bw_guess", {"run": "x"})[0] == 401
    seconds = time.monotonic() - begin
    assert server.log().count("refused ") <= seconds + 2
    assert len(server.audit()) <= 10 * (seconds + 2)
    root = server.token("root")
    wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)
    assert server.metric(root, "bellwether_access_refused_total") >= 200


def test_tenant_beyond_its_quota_waits_or_is_refused(server: SecureServer) -> None:
    small = server.client_certificate("small")
    root = server.token("root")
    with server.trainer("first", small) as client:
        client.push(0, [Block("loss", [1.0])])
        assert client.flush(20)
        with server.trainer("second", small) as second:
            refused(second, "1 runs are open, which is the quota")
        begin = time.monotonic()
        for step in range(1, 61):
            client.push(step, [Block("loss", [1.0])])
        assert client.flush(30), client.counters()
        # 20 at once, then 20 a second: the others wait, and none is lost.
        assert time.monotonic() - begin >= 1.5
        assert client.counters().frames_dropped_ring == 0
    wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)
    assert server.metric(root, 'bellwether_quota_refused_total{quota="runs"}') >= 1 or eventually(
        lambda: server.metric(root, "bellwether_quota_refused_total") >= 1
    )
    wait_for("all steps are there", lambda: '"step":"60"' in server.ask("GetRun", root, {"run": "first"})[1].replace(" ", ""))


def test_streams_that_say_nothing_are_the_tenants_own_and_end(server: SecureServer) -> None:
    small = server.client_certificate("small")
    root = server.token("root")
    wait_for("the token is read", lambda: server.ask("/metrics", root)[0] == 200)
    shown = [Path(small[key]).read_bytes() for key in ("tls_ca", "tls_key", "tls_cert")]
    ended = threading.Event()

    def nothing() -> Iterator[bytes]:
        ended.wait(30)
        yield from ()

    with grpc.secure_channel(server.grpc, grpc.ssl_channel_credentials(*shown)) as channel:
        attach = channel.stream_stream("/bellwether.v1.Ingest/Attach")
        began = time.monotonic()
        calls = [attach(nothing(), timeout=30) for _ in range(10)]
        wait_for("eight are refused", lambda: sum(call.done() for call in calls) == 8)
        refused = [call for call in calls if call.done()]
        wait_for("two are open", lambda: server.metric(root, "bellwether_ingest_streams") == 2)
        assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all("2 streams are open" in str(call.details()) for call in refused)
        # Others are served meanwhile, and the two end by themselves.
        send(server, "team-a/1", server.client_certificate("trainers"))
        held = [call for call in calls if call not in refused]
        assert {call.code() for call in held} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert all("hello: none came" in str(call.details()) for call in held)
        assert 4 < time.monotonic() - began < 25
        ended.set()
    assert server.metric(root, 'bellwether_ingest_limit_refused_total{limit="hello"}') == 2


def test_pythons_client_asks_over_https(server: SecureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    send(server, "team-a/1", server.client_certificate("trainers"))
    alice = server.token("alice")
    page = f"https://{server.http}"
    wait_for("the token is read", lambda: server.ask("ListRuns", alice, {})[0] == 200)
    client = Client(page, token=alice, tls_ca=server.tls / "ca.pem")
    assert [run["description"]["name"] for run in client.runs()] == ["team-a/1"]
    with pytest.raises(OSError):
        Client(page, token=alice).runs()  # Nobody it knows has signed the certificate.
    with pytest.raises(QueryError) as refusal:
        Client(page, tls_ca=server.tls / "ca.pem").runs()
    assert refusal.value.status == 401
    shown = server.client_certificate("operators")
    for name, value in shown.items():
        monkeypatch.setenv(f"BELLWETHER_{name.upper()}", value)
    assert len(Client(page).runs()) == 1, "by its certificate, from the environment"
    with pytest.raises(ValueError, match="by https, or within this machine"):
        Client("http://bellwether.example.org:7071", token=alice)
    monkeypatch.delenv("BELLWETHER_TLS_KEY")
    with pytest.raises(ValueError, match="belong together"):
        Client(page)
