"""Goal: whatever happens to the servers of a cluster or to its database, nothing acknowledged is
lost or applied twice, a partition has one owner an epoch, and another server goes on in time.
Method: real PostgreSQL with two standbys, one of which must confirm, three real bellwetherd,
trainers that write down what they were promised and ask any server (cluster_fleet.py).  An owner is
killed, paused beyond its lease, stopped; the database goes away; standbys go away.  These come in a
fixed order.  Then come faults of servers, database and standbys at random, for a minute with a
fixed seed.  With BELLWETHER_LONG they come for ten minutes with 50 trainers and a seed that is
printed; BELLWETHER_SEED makes it again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, await_silence, wait_for
from cluster_fleet import LEASE_S, Cluster, RoamingTrainer, describe
from postgres_processes import Postgres, synchronous_standbys

LONG = bool(os.environ.get("BELLWETHER_LONG"))
# 12: within a minute each kind of fault.
SEED = int(os.environ.get("BELLWETHER_SEED", time.time_ns() % 1_000_000 if LONG else 12))
RUNS, PERIOD = (50, 0.1) if LONG else (12, 0.05)
# Until all are acknowledged again, at most; fifty trainers are in each other's way.
KILL_S, STOP_S = 6.0, 2.0  # Quiet: 4.7 and 0.5 s (docs/operate/cluster.md).


def busiest(cluster: Cluster) -> Server:
    alive = [s for s in cluster.servers if s.process is not None and s.process.poll() is None]
    return max(alive, key=lambda server: len(cluster.served_by(server)))


def first_ack_after(trainers: list[RoamingTrainer], since: float, seconds: float) -> float:
    """The longest time from `since` to a trainer's next ack."""
    seen: dict[str, float] = {}
    deadline = time.monotonic() + seconds
    while len(seen) < len(trainers):
        assert time.monotonic() < deadline, f"{len(seen)} of {len(trainers)} after {seconds} s"
        for trainer in trainers:
            if trainer.run not in seen and trainer.last_ack > since:
                seen[trainer.run] = trainer.last_ack
        time.sleep(0.005)
    return max(seen.values()) - since


def test_owners_and_database_come_and_go(tmp_path: Path, primary: Postgres) -> None:
    print(f"BELLWETHER_SEED={SEED}")
    times: dict[str, float] = {}
    with synchronous_standbys(primary, 2) as standbys, Cluster(tmp_path, primary, 3) as cluster:
        cluster.add_trainers(RUNS, PERIOD, sick_from=40)
        cluster.await_acks(5)
        assert any(trainer.moves for trainer in cluster.trainers), "nobody was sent to an owner"

        # A lease that a server has and does not know of, as when the answer to its taking was
        # lost: it is given back, not renewed with the others for ever.
        primary.sql(
            "UPDATE bellwether.lease SET epoch = epoch + 1, owner = "
            "(SELECT max(owner) FROM bellwether.lease WHERE owner LIKE 'a/%') "
            "WHERE p = (SELECT min(p) FROM bellwether.lease WHERE owner LIKE 'b/%');"
        )
        cluster.await_balance()

        # Killed: its leases run out, others take over from the log.
        victim = busiest(cluster)
        hit = cluster.served_by(victim)
        assert hit, "the busiest server serves nobody"
        victim.kill()
        killed = time.monotonic()
        times["kill"] = first_ack_after(hit, killed, 30)
        victim.start()
        cluster.await_balance()
        cluster.await_acks(5)

        # Paused beyond its lease: what it believed is over when it wakes.
        victim = busiest(cluster)
        hit = cluster.served_by(victim)
        with victim.paused():
            paused = time.monotonic()
            wait_for(
                "others own everything",
                lambda: (
                    victim.folder.name not in (owned := cluster.owners())
                    and sum(owned.values()) == 64
                ),
                30,
            )
        times["pause"] = first_ack_after(hit, paused, 30)
        cluster.await_balance()
        cluster.await_acks(5)
        assert "is lost" in victim.log() or "was taken" in victim.log(), victim.log()

        # Stopped: it gives back what it has.
        victim = busiest(cluster)
        hit = cluster.served_by(victim)
        stopped = time.monotonic()
        assert victim.stop() == 0, victim.log()
        times["stop"] = first_ack_after(hit, stopped, 30)
        victim.start()
        cluster.await_balance()
        cluster.await_acks(5)

        # The database is away: nothing is acknowledged, and everything goes on after it.
        primary.stop()
        before = await_silence(lambda: cluster.ledger.total)
        time.sleep(2)
        assert cluster.ledger.total == before, "acknowledged without a database"
        primary.start()
        back = time.monotonic()
        times["database"] = first_ack_after(cluster.trainers, back, 30)
        cluster.await_acks(5)
        cluster.await_balance()

        chance, seconds = random.Random(SEED), 600 if LONG else 60
        faults = make_faults(cluster, [primary, *standbys], chance, seconds)
        result = cluster.check() | faults
        # The checker sees what must not be: a commit of another in somebody's epoch.
        tables = " UNION ALL ".join(f"SELECT * FROM bellwether.frames_{i}" for i in range(4))
        primary.sql(
            "INSERT INTO bellwether.frames_0 SELECT p, last_lsn + 1000, last_lsn + 1000, epoch, "
            f"'another', at, body FROM ({tables}) AS f ORDER BY last_lsn DESC LIMIT 1;"
        )
        with pytest.raises(AssertionError, match="two owners"):
            cluster.check_log()
    print(describe(result), {what: round(seconds, 2) for what, seconds in times.items()})
    assert result["alerts"] > 0, "the sick run was not told of"
    assert result["cut_short"] == 0, "a stop waited for takeovers that were queued"
    assert times["kill"] <= KILL_S, times
    assert times["stop"] <= STOP_S, times
    assert times["pause"] <= LEASE_S + 3, times


def make_faults(
    cluster: Cluster, databases: list[Postgres], chance: random.Random, seconds: float
) -> dict[str, int]:
    """Kills, pauses and stops at random, one after the other; how many of each.

    cut_short: stops that took so long that the server's own watchdog ended it.
    """
    made = dict.fromkeys(("kill", "pause", "stop", "database_kill", "database_pause"), 0)
    made["cut_short"] = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        victim = chance.choice([*cluster.servers, *databases])
        database = isinstance(victim, Postgres)
        time.sleep(chance.uniform(0, 3))
        what = chance.choice(["kill", "pause"] if database else ["kill", "pause", "stop"])
        made[f"database_{what}" if database else what] += 1
        if what == "kill":
            victim.kill()
            time.sleep(chance.uniform(0, 8))
            victim.start()
        elif what == "pause":
            with victim.paused():
                time.sleep(chance.uniform(1, 10))
        else:
            assert isinstance(victim, Server)
            ended = victim.stop()
            assert ended in (0, -signal.SIGALRM), f"{ended}\n{victim.log()[-4000:]}"
            made["cut_short"] += ended != 0
            victim.start()
        try:
            cluster.await_acks(3, 60)
        except AssertionError as error:
            logs = "".join(f"\n{each.name}:\n{each.log()[-2000:]}" for each in databases)
            raise AssertionError(
                f"{error}, after {what} of {victim.folder.name}; {made}{logs}"
            ) from error
    cluster.await_balance()
    return made


def test_an_ack_needs_a_synchronous_standby(tmp_path: Path, primary: Postgres) -> None:
    with synchronous_standbys(primary, 2) as standbys, Cluster(tmp_path, primary, 2) as cluster:
        cluster.add_trainers(6, PERIOD)
        cluster.await_acks(5)
        # One of two is enough.
        standbys[0].stop()
        cluster.await_acks(20)
        # None is not.
        standbys[1].stop()
        before = await_silence(lambda: cluster.ledger.total)
        time.sleep(2)
        assert cluster.ledger.total == before, "acknowledged without a standby"
        standbys[0].start()
        cluster.await_acks(5, 40)
        print(describe(cluster.check()))


def test_a_promoted_standby_has_all_that_was_acknowledged(
    tmp_path: Path, primary: Postgres
) -> None:
    with (
        synchronous_standbys(primary, 2) as standbys,
        Cluster(tmp_path, primary, 2, *standbys) as cluster,
    ):
        cluster.add_trainers(6, PERIOD, sick_from=20)
        cluster.await_acks(30)
        primary.stop()
        gone = time.monotonic()
        # Of the two that which received most: any one may have been the one that confirmed.
        received = "SELECT pg_last_wal_receive_lsn() - '0/0';"
        newest = max(standbys, key=lambda standby: int(standby.sql(received)[0][0]))
        newest.sql("SELECT pg_promote();")
        cluster.database = newest
        took = first_ack_after(cluster.trainers, gone, 40)
        cluster.await_acks(5)
        cluster.await_balance()
        print(describe(cluster.check()), f"promoted: {took:.2f} s without acknowledgements")
