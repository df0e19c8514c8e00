"""Several servers on PostgreSQL, trainers that go where they are sent, and a checker.

The trainers are ack_ledger's: what they were promised is in a ledger.  check() holds it against
what the servers tell and what lies in the database: nothing acknowledged is missing, nothing is
there twice, each partition's log was written by one owner an epoch.  Of several databases each is
looked at; partitions are counted as the cluster does, those of the second from 64 on.
"""

from __future__ import annotations

import json
import queue
import random
import struct
import sys
import time
import urllib.error
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import grpc
import zstandard
from ack_ledger import Ledger, Trainer, Watcher, frame_value
from bellwether_process import ROOT, Server, wait_for
from postgres_processes import PASSWORD, Postgres, dsn_of

sys.path.insert(0, str(ROOT / "deploy/sizing"))
from partitions import PARTITIONS, database_of

LEASE_S = 5
FRAME_TABLES = " UNION ALL ".join(
    f"SELECT p, first_lsn, epoch, owner, body FROM bellwether.frames_{i}" for i in range(4)
)


def records(body: bytes) -> Iterator[tuple[int, int, int, int]]:
    """lsn, run, rank and seq of each record of a commit; see server/store/wal_format.h."""
    plain = zstandard.ZstdDecompressor().decompress(body, max_output_size=64 << 20)
    at = 0
    while at < len(plain):
        (length,) = struct.unpack_from("<I", plain, at)
        lsn, _, run, _, seq = struct.unpack_from("<5Q", plain, at + 8)
        (rank,) = struct.unpack_from("<I", plain, at + 48)
        yield lsn, run, rank, seq
        at += (8 + length + 7) & ~7


class RoamingTrainer(Trainer):
    """Comes to any server, goes where it is sent, and tries the next when one is gone."""

    def __init__(
        self,
        servers: list[str],
        first: int,
        run: str,
        ledger: Ledger,
        period: float,
        **options: int,
    ) -> None:
        self._servers, self._next = servers, first
        self.moves = 0
        self.last_ack = 0.0
        self.serving = ""  # Where it was welcomed last.
        super().__init__(servers[first % len(servers)], run, ledger, period, **options)

    def _followed(self, answers: Iterator[Any]) -> Iterator[Any]:
        for answer in answers:
            if answer.HasField("moved"):
                self.address = answer.moved.address
                self.moves += 1
                return
            if answer.HasField("welcome"):
                self.serving = self.address
                acked = self.ledger.acked.get((self.run, 0), 0)
                durable = answer.welcome.durable_seq
                if durable < acked:
                    self.ledger.contradictions.append(
                        f"{self.run}: acknowledged {acked}, welcomed with {durable}"
                    )
            if answer.HasField("ack"):
                self.last_ack = time.monotonic()
            yield answer

    def _talk(self, answers: Iterator[Any], outbox: queue.SimpleQueue[Optional[bytes]]) -> None:
        try:
            super()._talk(self._followed(answers), outbox)
        except grpc.RpcError:
            self._next += 1
            self.address = self._servers[self._next % len(self._servers)]
            raise


class Cluster:
    """Servers named a, b, c; start() before use.  `others` may become the database later."""

    def __init__(
        self,
        folder: Path,
        database: Postgres,
        servers: int,
        *others: Postgres,
        dsn: str = "",
        further: Sequence[Postgres] = (),
    ) -> None:
        """`dsn`: the servers' connection string, if not that of the tests' role; `further`: the
        second database of the cluster, and those behind it."""
        self.folder, self.database, self.further = folder, database, list(further)
        self.servers: list[Server] = []
        for i in range(servers):
            home = folder / "abcdefgh"[i]
            home.mkdir()
            where = name_databases(home, [dsn or dsn_of(database, *others), *map(dsn_of, further)])
            config = f"cluster:\n  {where}\n  node: {home.name}\n  lease_seconds: {LEASE_S}\n"
            self.servers.append(Server(home, config))
        self.ledger = Ledger(folder / "ledger.txt")
        self.trainers: list[RoamingTrainer] = []
        self.watchers: list[Watcher] = []

    def start(self) -> Cluster:
        for server in self.servers:
            server.start()
        self.await_balance()
        return self

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        for trainer in self.trainers:
            trainer.abandon()
        for watcher in self.watchers:
            watcher.stop()
        for server in self.servers:
            if server.process is not None and server.process.poll() is None:
                server.kill()

    def add_trainers(
        self,
        count: int,
        period: float,
        sick_from: int = 0,
        of: type[RoamingTrainer] = RoamingTrainer,
    ) -> None:
        """The last is sick, if one is to be."""
        addresses = [server.grpc for server in self.servers]
        for i in range(count):
            sick = sick_from if i == count - 1 else 0
            self.trainers.append(
                of(addresses, i, f"run-{i}", self.ledger, period, sick_from=sick, layers=2, heads=4)
            )
        self.watchers = [Watcher(server.grpc, self.ledger) for server in self.servers]

    @property
    def databases(self) -> list[Postgres]:
        return [self.database, *self.further]

    def runs_of(self, database: int) -> list[RoamingTrainer]:
        """Trainers whose runs that database has, counted from 0."""
        count = len(self.databases)
        return [t for t in self.trainers if database_of_run(t.run, count) == database]

    def owners(self, database: Optional[Postgres] = None) -> dict[str, int]:
        """How many live leases each server's name has there."""
        rows = (database or self.database).sql(
            "SELECT split_part(owner, '/', 1), count(*) FROM bellwether.lease "
            "WHERE until > now() GROUP BY 1;"
        )
        return {name: int(count) for name, count in rows}

    def served(self) -> int:
        """Partitions that the servers say they serve."""
        return sum(
            int(server.metric("bellwether_cluster_partitions"))
            for server in self.servers
            if server.process is not None and server.process.poll() is None
        )

    def await_balance(self, seconds: float = 60) -> None:
        alive = sum(s.process is not None and s.process.poll() is None for s in self.servers)
        share = -(-PARTITIONS // alive)

        def balanced(owned: dict[str, int]) -> bool:
            return (
                len(owned) == alive
                and sum(owned.values()) == PARTITIONS
                and max(owned.values()) <= share
            )

        wait_for(
            f"each of {alive} servers has its share",
            lambda: (
                all(balanced(self.owners(database)) for database in self.databases)
                and self.served() == PARTITIONS * len(self.databases)
            ),
            seconds,
        )

    def await_acks(
        self, more: int, seconds: float = 60, of: Optional[Sequence[RoamingTrainer]] = None
    ) -> None:
        """Of each trainer, or of those."""
        waited = self.trainers if of is None else of
        before = {t.run: self.ledger.acked.get((t.run, 0), 0) for t in waited}
        wait_for(
            f"{more} more acks of each",
            lambda: all(
                self.ledger.acked.get((run, 0), 0) >= acked + more for run, acked in before.items()
            ),
            seconds,
        )

    def served_by(self, server: Server) -> list[RoamingTrainer]:
        return [trainer for trainer in self.trainers if trainer.serving == server.grpc]

    def alive(self) -> list[Server]:
        return [s for s in self.servers if s.process is not None and s.process.poll() is None]

    def ask_all(self, method: str, **request: Any) -> Any:
        """What each server that lives answers, which must be the same; asked again while one says
        that the run's owner is changing."""
        answers: list[Any] = []

        def agree() -> bool:
            answers.clear()
            for server in self.alive():
                try:
                    answers.append(server.call(method, **request))
                except urllib.error.HTTPError as error:
                    assert error.code == 503, f"{method} {request}: {error.code} {error.read()!r}"
                    return False
            return all(answer == answers[0] for answer in answers)

        try:
            wait_for(f"all answer {method} {request} alike", agree, 60)
        except AssertionError as error:
            raise AssertionError(f"{error}: {answers}") from None
        return answers[0]

    def owner_of(self, run: str) -> Server:
        """The server whose own run it is, by its metrics."""
        label = f'run="{run}"'
        found = [s for s in self.alive() if label in s.get("/metrics")]
        assert len(found) == 1, f"{run} is owned by {[s.folder.name for s in found]}"
        return found[0]

    def check(self) -> dict[str, int]:
        """Ends the trainers, then compares."""
        for trainer in self.trainers:
            trainer.stop(60)
        assert not self.ledger.contradictions, self.ledger.contradictions
        for trainer in self.trainers:
            # Of any server, most of which are not its owner.
            server = random.choice(self.alive())

            def whole(trainer: RoamingTrainer = trainer, server: Server = server) -> bool:
                try:
                    stored = server.series(trainer.run, "loss")
                except urllib.error.HTTPError as error:
                    assert error.code == 503, f"{trainer.run}: {error.code} {error.read()!r}"
                    return False
                return sorted(stored) == list(range(1, trainer.made + 1))

            wait_for(f"{trainer.run}: 1 to {trainer.made} are stored", whole, 60)
            stored = server.series(trainer.run, "loss")
            assert all(value == frame_value(step) for step, value in stored.items()), trainer.run

            def counted(trainer: RoamingTrainer = trainer, server: Server = server) -> bool:
                return int(server.call("GetRun", run=trainer.run)["frames"]) == trainer.made

            # The run's snapshot follows within 50 ms.
            wait_for(f"{trainer.run}: {trainer.made} frames are counted, once each", counted, 60)
        commits = self.check_log()
        alerts = self.check_alerts()
        for server in self.servers:
            assert PASSWORD not in server.log(), "the password is in a log"
        return {"acked": self.ledger.total, "commits": commits, "alerts": alerts}

    def check_log(self) -> int:
        """One owner an epoch, epochs and LSNs that rise with the log, seqs that rise per rank."""
        owner_of: dict[tuple[int, int], str] = {}
        last_epoch: dict[int, int] = {}
        last_lsn: dict[int, int] = {}
        last_seq: dict[tuple[int, int], int] = {}
        commits = 0
        for p, epoch, owner, body in self._commits():
            commits += 1
            assert owner_of.setdefault((p, epoch), owner) == owner, f"{p}, {epoch}: two owners"
            assert epoch >= last_epoch.get(p, 0), f"partition {p}: epoch {epoch} comes late"
            last_epoch[p] = epoch
            for lsn, run, rank, seq in records(body):
                assert lsn > last_lsn.get(p, 0), f"partition {p}: LSN {lsn} after {last_lsn[p]}"
                last_lsn[p] = lsn
                assert (run >> 32) - 1 == p, f"partition {p} holds a record of run {run:#x}"
                if seq == 0:
                    continue
                before = last_seq.get((run, rank), 0)
                assert seq == before + 1, f"run {run}, rank {rank}: seq {seq} after {before}"
                last_seq[run, rank] = seq
        return commits

    def _commits(self) -> Iterator[tuple[int, int, str, bytes]]:
        """Of all partitions, each in the order of its log: partition, epoch, owner, records."""
        for i, database in enumerate(self.databases):
            for p in range(PARTITIONS):  # Minutes of many trainers are more than one answer holds.
                for epoch, owner, body in database.sql(
                    f"SELECT epoch, owner, encode(body, 'hex') FROM ({FRAME_TABLES}) AS f "
                    f"WHERE p = {p} ORDER BY first_lsn;"
                ):
                    yield i * PARTITIONS + p, int(epoch), owner, bytes.fromhex(body)

    def check_alerts(self) -> int:
        """Each transition has one number, the numbers have no gap, and what was told is that."""
        unstored = {(key, k) for _, key, k in self.ledger.unstored}

        def all_stored() -> list[list[str]]:
            rows = self.database.sql("SELECT n, run, key, k FROM bellwether.alerts ORDER BY n;")
            return rows if unstored <= {(key, int(k)) for _, _, key, k in rows} else []

        # A server looks each second whether what it told can be stored by now.
        rows = wait_for(f"{unstored} are stored", all_stored, 60) if unstored else all_stored()
        assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
        assert len({tuple(row[1:]) for row in rows}) == len(rows)
        stored = {int(n): (key, int(k)) for n, _, key, k in rows}
        for watcher in self.watchers:
            watcher.stop()
        for number, (_, key, k) in self.ledger.alerts.items():
            assert stored.get(number) == (key, k), f"alert {number} was told as {key} {k}"
        return len(rows)


def database_of_run(run: str, databases: int) -> int:
    """Which of them, counted from 0, has the run of a trainer of that name."""
    return database_of(uuid.uuid5(uuid.NAMESPACE_URL, run).bytes, databases)


def name_databases(home: Path, dsns: Sequence[str]) -> str:
    """Writes how they are reached into files there; the line of the configuration that says so."""
    names = ["dsn"] if len(dsns) == 1 else [f"dsn-{i}" for i in range(1, len(dsns) + 1)]
    for name, dsn in zip(names, dsns):
        file = home / name
        file.touch(mode=0o600)
        file.write_text(dsn + "\n")
    return "dsn_file: dsn" if len(names) == 1 else f"dsn_files: [{', '.join(names)}]"


def describe(result: dict[str, Any]) -> str:
    return json.dumps(result, sort_keys=True)
