"""Goal: a recording is imported at any server of a cluster, and ends up with the owner of its
partition, byte for byte what a server alone has of it.  An import that a killed server cut off can
be made again at any server, and gives the same.  An import never replaces a trainer's run.
Method: real PostgreSQL, three real bellwetherd; recordings of two ranks (recordings.py), whole
by the command, in part by a stream that stops in the middle while a server is killed.  The result
is compared with the same import into a server alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import QUERY
from bellwether_process import BIN, Server, wait_for
from cluster_fleet import Cluster, RoamingTrainer
from partitions import partition_of
from postgres_processes import Postgres
from recordings import write_recording
from secure_server import tool

STEPS = 400
CHUNK = 4096


def export(server: Server, run: str, file: Path) -> bytes:
    server.run("run", "export", run, str(file))
    return file.read_bytes()


def place_of(database: Postgres, run: str) -> tuple[int, str]:
    """The run's partition and its owner."""
    p = partition_of(uuid.uuid5(uuid.NAMESPACE_URL, run).bytes)
    ((owner,),) = database.sql(
        f"SELECT split_part(owner, '/', 1) FROM bellwether.lease WHERE p = {p} AND until > now();"
    )
    return p, owner


class CutOff:
    """An import that sends a part of its file, then waits."""

    def __init__(self, server: Server, file: Path, part: float, as_name: str = "") -> None:
        whole = file.read_bytes()
        self._bytes = whole[: int(len(whole) * part)]
        self._go_on, self._as_name, self._whole = threading.Event(), as_name, whole
        self.error: Optional[grpc.RpcError] = None
        self.answer: Any = None
        self._thread = threading.Thread(target=self._send, args=(server.grpc,), daemon=True)
        self._thread.start()

    def _chunks(self) -> Iterator[Any]:
        yield QUERY.ImportRunRequest(as_name=self._as_name, chunk=self._bytes[:CHUNK])
        for at in range(CHUNK, len(self._bytes), CHUNK):
            yield QUERY.ImportRunRequest(chunk=self._bytes[at : at + CHUNK])
        self._go_on.wait(60)
        for at in range(len(self._bytes), len(self._whole), CHUNK):
            yield QUERY.ImportRunRequest(chunk=self._whole[at : at + CHUNK])

    def _send(self, address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            call = channel.stream_unary(
                "/bellwether.v1.Query/ImportRun",
                request_serializer=QUERY.ImportRunRequest.SerializeToString,
                response_deserializer=QUERY.ImportRunResponse.FromString,
            )
            while True:  # Until the run's partition has an owner that this server knows.
                try:
                    self.answer = call(self._chunks(), timeout=120)
                except grpc.RpcError as error:
                    if "is being taken over" in str(error.details()) and not self._go_on.wait(0.05):
                        continue
                    self.error = error
                return

    def end(self) -> grpc.RpcError:
        """The error that ended the import, whichever server was killed."""
        self._go_on.set()
        self._thread.join(90)
        assert self.error is not None, self.answer
        return self.error


def settled_import(
    server: Server, *words: str, flags: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Asked again while the run's partition is changing its owner."""
    answers: list[subprocess.CompletedProcess[str]] = []

    def ask() -> bool:
        command = [str(BIN / "bellwether"), "--server", server.grpc, *flags]
        command += ["run", "import", *words]
        answers.append(subprocess.run(command, capture_output=True, text=True, timeout=60))
        return "is being taken over" not in answers[-1].stderr

    wait_for("the partition has an owner", ask)
    return answers[-1]


def import_fails(server: Server, *words: str) -> str:
    done = settled_import(server, *words)
    assert done.returncode != 0, done.stdout
    return done.stderr


def frames_of(server: Server, run: str) -> int:
    """The number of frames that the run has by its server; 0 while no server knows it."""
    try:
        return int(server.call("GetRun", run=run)["frames"])
    except urllib.error.HTTPError as error:
        assert error.code in (404, 503), error.read()
        return 0


def alone(folder: Path, *recordings: Path) -> dict[str, tuple[bytes, list[dict[str, Any]]]]:
    """What a server alone exports of them, and its alerts, by their stems."""
    folder.mkdir()
    exported = {}
    with Server(folder) as server:
        for file in recordings:
            server.run("run", "import", str(file))
            bytes_ = export(server, file.stem, folder / file.name)
            exported[file.stem] = (bytes_, server.alert_log(file.stem))
    return exported


def test_an_import_at_any_server_is_its_owners(tmp_path: Path, primary: Postgres) -> None:
    names = [f"recorded-{i}" for i in range(6)]
    files = [write_recording(tmp_path / f"{name}.bwrun", name, STEPS) for name in names]
    expected = alone(tmp_path / "alone", *files)
    with Cluster(tmp_path, primary, 3) as cluster:
        elsewhere = 0
        for i, file in enumerate(files):
            at = cluster.servers[i % 3]
            done = settled_import(at, str(file), "-o", "json")
            assert done.returncode == 0, done.stderr
            told = json.loads(done.stdout)
            assert int(told["frames"]) == 2 * STEPS, told
            p, owner = place_of(primary, file.stem)
            elsewhere += owner != at.folder.name
            ((rows,),) = primary.sql(
                f"SELECT count(*) FROM bellwether.run_rows WHERE p = {p} AND length(key) > 1;"
            )
            assert int(rows) > 0, "the run is not in the database"
        assert elsewhere > 0, "each was imported at its owner: nothing is shown"
        for file in files:
            found = cluster.ask_all("GetRun", run=file.stem)
            assert found["ended"] and int(found["steps_recorded"]) == STEPS, found
            for server in cluster.servers:
                where = tmp_path / f"{server.folder.name}-{file.name}"
                assert export(server, file.stem, where) == expected[file.stem][0], server.folder
                assert "is here already" in import_fails(server, str(file))
        # By another name it is another run, of another partition.
        for server in cluster.servers:
            name = f"again-at-{server.folder.name}"
            done = settled_import(server, str(files[0]), "--name", name)
            assert done.returncode == 0, done.stderr
            again = cluster.ask_all("GetRun", run=name)
            assert again["ended"] and int(again["steps_recorded"]) == STEPS
        # What is no recording is refused alike.
        garbage = tmp_path / "garbage.bwrun"
        garbage.write_bytes(b"GARBAGE" * 100)
        assert len({import_fails(server, str(garbage)) for server in cluster.servers}) == 1


@pytest.mark.parametrize("victim", ["owner", "asked"])
def test_an_import_that_a_kill_cut_off_is_made_again(
    tmp_path: Path, primary: Postgres, victim: str
) -> None:
    file = write_recording(tmp_path / "cut.bwrun", "cut", STEPS)
    expected, alerts = alone(tmp_path / "alone", file)["cut"]
    forged = write_recording(tmp_path / "forged.bwrun", "cut", 50, ranks=1, layers=3)
    with Cluster(tmp_path, primary, 3) as cluster:
        _, name = place_of(primary, "cut")
        owner = next(server for server in cluster.servers if server.folder.name == name)
        asked, third = (server for server in cluster.servers if server is not owner)
        half = CutOff(asked, file, 0.5)
        wait_for("half of it is here", lambda: frames_of(third, "cut") > STEPS // 2)
        # Two at once: the second pushes nobody out.
        assert "somebody else" in import_fails(third, str(file))
        killed = owner if victim == "owner" else asked
        killed.kill()
        error = half.end()
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        if victim == "owner":
            assert "goes on where this one stopped" in str(error.details()), error
        cluster.await_balance()

        part = cluster.ask_all("GetRun", run="cut")
        assert not part["ended"] and 0 < int(part["frames"]) < 2 * STEPS, part
        # Another recording is not mixed into it.
        assert "another recording" in import_fails(third, str(forged))
        done = settled_import(third, str(file), "-o", "json")
        assert done.returncode == 0, done.stderr
        assert int(json.loads(done.stdout)["frames"]) == 2 * STEPS, done.stdout
        for server in cluster.alive():
            assert export(server, "cut", tmp_path / f"{server.folder.name}.bwrun") == expected
        whole = cluster.ask_all("GetRun", run="cut")
        assert whole["ended"] and int(whole["frames"]) == 2 * STEPS, whole
        assert [server.alert_log("cut") for server in cluster.alive()] == [alerts] * 2
        assert "is here already" in import_fails(third, str(file))
        cluster.check_log()


def test_a_trainers_run_is_not_imported_over(tmp_path: Path, primary: Postgres) -> None:
    with Cluster(tmp_path, primary, 3) as cluster:
        cluster.add_trainers(1, 0.02)
        cluster.await_acks(20)
        live = cluster.trainers[0]
        assert isinstance(live, RoamingTrainer)
        file = tmp_path / "live.bwrun"
        export(cluster.servers[0], live.run, file)
        for server in cluster.servers:
            assert "is here already" in import_fails(server, str(file))
        # Neither while its trainer is away.
        live.stop(60)
        for server in cluster.servers:
            assert "is here already" in import_fails(server, str(file))
        cluster.check()


ACCESS = """
identities:
- {name: root, roles: [admin], runs: ["*"]}
- {name: writer, roles: [write], runs: ["writers-*"]}
- {name: reader, roles: [read], runs: ["*"]}
"""


def test_import_rights_are_the_same_at_any_server(tmp_path: Path, primary: Postgres) -> None:
    file = write_recording(tmp_path / "anything.bwrun", "anything", 20)
    cluster = Cluster(tmp_path, primary, 3)
    tokens = tmp_path / "tokens"
    (tmp_path / "access.yml").write_text(ACCESS)
    given = {
        name: tool("token", "create", name, "--file", str(tokens)).strip()
        for name in ("root", "writer", "reader")
    }
    for name, token in given.items():
        (tmp_path / f"{name}.token").touch(mode=0o600)
        (tmp_path / f"{name}.token").write_text(token)
    for server in cluster.servers:
        with open(server.folder / "server.yml", "a") as config:
            config.write(f"access_file: {tmp_path}/access.yml\ntokens_file: {tokens}\n")
        server.bearer = given["root"]
    with cluster:
        for i, server in enumerate(cluster.servers):
            for who, name, may in [
                ("reader", f"writers-{i}", False),
                ("writer", f"other-{i}", False),
                ("writer", "", False),  # Whose name the recording says.
                ("writer", f"writers-{i}", True),
                ("root", f"roots-{i}", True),
            ]:
                words = [str(file), *(["--name", name] if name else [])]
                flags = ["--token-file", str(tmp_path / f"{who}.token")]
                done = settled_import(server, *words, flags=flags)
                assert (done.returncode == 0) == may, (who, name, done.stdout, done.stderr)
        listed = {run["description"]["name"] for run in cluster.ask_all("ListRuns")["runs"]}
        assert listed == {f"writers-{i}" for i in range(3)} | {f"roots-{i}" for i in range(3)}
