"""Goal: runs of a cluster are spread over its databases, and one that is away holds its own runs
and no others.  Nothing acknowledged is lost or there twice in any of them.  A list of databases
that is not the cluster's is refused at the start.
Method: two real PostgreSQL, three real bellwetherd, trainers that write down what they were
promised (cluster_fleet.py).  An owner is killed, then each database goes away for longer than a
lease: the second while a server starts, the first while an alert is due of a run of the second's.
Takeovers of the second's partitions are made to hang (a lock on a table that only they read).
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, Server, await_silence, wait_for
from cluster_fleet import (
    FRAME_TABLES,
    LEASE_S,
    Cluster,
    RoamingTrainer,
    database_of_run,
    describe,
    name_databases,
)
from partitions import PARTITIONS
from postgres_processes import Postgres, bin_folder, dsn_of, start_primary

RUNS, PERIOD = 12, 0.05


@pytest.fixture
def second() -> Iterator[Postgres]:
    started = start_primary()
    yield started
    started.remove()


def up(server: Server, database: int) -> bool:
    """What it says of one, counted from 1."""
    return f'bellwether_cluster_database_up{{database="{database}"}} 1' in server.get("/metrics")


def acked(cluster: Cluster, trainers: list[RoamingTrainer]) -> int:
    return sum(cluster.ledger.acked.get((trainer.run, 0), 0) for trainer in trainers)


def check_other_goes_on(cluster: Cluster, gone: Postgres, away: int) -> None:
    """While a database is away, counted from 0, for longer than a lease; brings it back."""
    waiting, going_on = cluster.runs_of(away), cluster.runs_of(1 - away)
    before = await_silence(lambda: acked(cluster, waiting))
    since = time.monotonic()
    wait_for(
        "all say which is away",
        lambda: not any(up(server, away + 1) for server in cluster.servers),
    )
    for server in cluster.servers:
        assert up(server, 2 - away), "the other is not away"
        assert server.get("/-/ready"), "it serves half of all runs"
    if away > 0:  # Without the first nobody starts.
        again = cluster.servers[0]
        assert again.stop() == 0, again.log()
        again.start()
    wait_for(
        "somebody says that he does less",
        lambda: any(server.metric("bellwether_degraded") >= 1 for server in cluster.servers),
    )
    while time.monotonic() - since < LEASE_S + 1:
        cluster.await_acks(10, 20, going_on)
    assert acked(cluster, waiting) == before, "acknowledged without a database"
    gone.start()
    cluster.await_acks(5, 40)
    cluster.await_balance()


def alerts_of(cluster: Cluster, run: str) -> list[int]:
    """The numbers of the run's alerts as its owner has them; 0 = not stored yet."""
    owner = next(t for t in cluster.trainers if t.run == run).serving
    server = next((s for s in cluster.servers if s.grpc == owner), None)
    if server is None:
        return []
    try:
        listed = server.call("ListAlerts", run=run, limit=100)["alerts"]
    except urllib.error.HTTPError:  # It has not come so far.
        return []
    return [int(alert["last"]["id"]) for alert in listed]


def test_a_database_that_is_away_holds_its_own_runs_alone(
    tmp_path: Path, primary: Postgres, second: Postgres
) -> None:
    with Cluster(tmp_path, primary, 3, further=[second]) as cluster:
        cluster.add_trainers(RUNS, PERIOD)
        cluster.await_acks(5)
        assert len(cluster.runs_of(0)) >= 3 and len(cluster.runs_of(1)) >= 3
        for database in cluster.databases:
            ((places,),) = database.sql(f"SELECT count(DISTINCT p) FROM ({FRAME_TABLES}) AS f;")
            assert int(places) >= 3, "no run is logged there"

        # Killed: others take its partitions of both.
        victim = max(cluster.servers, key=lambda server: len(cluster.served_by(server)))
        victim.kill()
        cluster.await_acks(5)
        victim.start()
        cluster.await_balance()

        second.stop()
        check_other_goes_on(cluster, second, 1)

        # The first: alerts of the other's runs are told without a number, and have one later.
        primary.stop()
        names = (f"sick-{i}" for i in range(64))
        sick = [name for name in names if database_of_run(name, 2) == 1][:2]
        addresses = [server.grpc for server in cluster.servers]
        for run in sick:
            cluster.trainers.append(
                RoamingTrainer(
                    addresses, 0, run, cluster.ledger, PERIOD, sick_from=10, layers=2, heads=4
                )
            )
        told = [
            wait_for(f"an alert of {run} is told", lambda run=run: alerts_of(cluster, run))
            for run in sick
        ]
        assert not any(map(any, told)), f"numbered without the first database: {told}"
        ((waiting,),) = second.sql("SELECT count(*) FROM bellwether.alerts_waiting;")
        assert int(waiting) >= sum(map(len, told)), "an alert is not kept with its run"

        check_other_goes_on(cluster, primary, 0)
        wait_for(
            "their alerts are numbered",
            lambda: set(sick) <= {run for run, _, _ in cluster.ledger.alerts.values()},
        )
        result = cluster.check()
        assert second.sql("SELECT count(*) FROM bellwether.alerts;") == [["0"]]
        assert second.sql("SELECT count(*) FROM bellwether.alerts_waiting;") == [["0"]]
        ((places,),) = primary.sql("SELECT count(*) FROM bellwether.alerts WHERE p >= 64;")
    print(describe(result))
    assert result["alerts"] > 0 and int(places) > 0, "the sick runs were not told of"


class HungReads:
    """That database's log cannot be read, which is never an error: everything else of it goes on.
    Takeovers of its partitions wait as long as a server waits for an answer, one after another.
    """

    def __init__(self, database: Postgres) -> None:
        # Neither today's table, nor yesterday's, nor tomorrow's: commits and leases do not need it.
        table = (int(time.time()) // 86400 + 2) % 4
        self._database = database
        place = ["-h", str(database.folder), "-p", str(database.port), "-d", "bellwether"]
        self._psql = subprocess.Popen(
            [str(bin_folder() / "psql"), "-AtXq", "-U", "owner", *place],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self._say(f"BEGIN; LOCK TABLE bellwether.frames_{table} IN ACCESS EXCLUSIVE MODE;")
        held = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted;"
        wait_for("the lock is held", lambda: database.sql(held) == [["1"]])

    def _say(self, text: str) -> None:
        assert self._psql.stdin is not None
        self._psql.stdin.write(text + "\n")
        self._psql.stdin.flush()

    def end(self) -> None:
        self._say("ROLLBACK;")
        assert self._psql.stdin is not None
        self._psql.stdin.close()
        self._psql.wait(20)


def takeovers(server: Server, since: int) -> list[tuple[int, bool]]:
    """Partitions and whether they were taken, in the order in which its log tells of them."""
    found = re.findall(r"partition (\d+) (is served|cannot be taken up)", server.log()[since:])
    return [(int(partition), said == "is served") for partition, said in found]


def test_silent_database_delays_no_takeover_in_the_others(
    tmp_path: Path, primary: Postgres, second: Postgres
) -> None:
    with Cluster(tmp_path, primary, 2, further=[second]) as cluster:
        cluster.add_trainers(RUNS, PERIOD)
        cluster.await_acks(5)
        victim, server = cluster.servers
        hung = HungReads(second)
        since = len(server.log())
        victim.kill()
        wait_for(
            "the first is the other's", lambda: sum(cluster.owners(primary).values()) == 64, 60
        )
        cluster.await_acks(5, 60, cluster.runs_of(0))

        def failed() -> int:
            return sum(p >= PARTITIONS and not taken for p, taken in takeovers(server, since))

        def served_again(p: int, times: int) -> bool:
            return takeovers(server, since).count((p, True)) > times

        # Takeovers of the second's partitions hang one after the other, each until it has
        # failed.  Meanwhile some of the first's are lost and taken again, one by one: where both
        # wait for one lock, each of them waits for the end of a takeover that hangs.
        # On a slow machine one may end meanwhile all the same: some are served before any does.
        wait_for("takeovers hang", lambda: failed() > 0, 60)
        undelayed = 0
        for p in range(24):
            before, served = failed(), takeovers(server, since).count((p, True))
            primary.sql(
                "UPDATE bellwether.lease SET owner = '', address = '', until = '1970-01-01' "
                f"WHERE p = {p};"
            )
            wait_for(
                f"partition {p} is served again",
                partial(served_again, p, served),
                60,
            )
            undelayed += failed() == before
            if undelayed == 4:
                break
        assert undelayed == 4, takeovers(server, since)
        assert not any(taken for p, taken in takeovers(server, since) if p >= PARTITIONS)
        hung.end()
        cluster.await_acks(5, 60)
        victim.start()
        cluster.await_balance(60)
        result = cluster.check()
    print(describe(result))


def refusal(folder: Path, *databases: Postgres) -> str:
    """What a server says that is given these."""
    folder.mkdir()
    where = name_databases(folder, [dsn_of(database) for database in databases])
    server = Server(folder, f"cluster: {{{where}, node: x}}\n")
    with pytest.raises(AssertionError), server:
        pass
    assert server.process is not None and server.process.returncode not in (0, None)
    return server.log()


def test_a_list_that_is_not_the_clusters_is_refused(
    tmp_path: Path, primary: Postgres, second: Postgres
) -> None:
    with Cluster(tmp_path, primary, 1, further=[second]):
        pass
    says = "cluster.dsn_files: entry 1 leads to database 2 of the 2 of its cluster"
    assert says in refusal(tmp_path / "swapped", second, primary)
    says = "leads to database 1 of the 2 of its cluster, and stands here as 1 of 1"
    assert says in refusal(tmp_path / "shorter", primary)
    says = "entries 1 and 2 lead to the same database"
    assert says in refusal(tmp_path / "twice", primary, primary)
    # A database of nobody's in the place of the second, which learns nothing by that.
    second.sql("UPDATE bellwether.identity SET name = 'fresh', databases = '';")
    says = "database 1 of the 2 of its cluster, but the others are not those that it knows"
    assert says in refusal(tmp_path / "fresh", primary, second)
    assert second.sql("SELECT databases FROM bellwether.identity;") == [[""]]


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ("{dsn_file: a, dsn_files: [a, b]}", "one of the two"),
        ("{dsn_files: []}", "cluster.dsn_files holds 0 entries: at least 1"),
        (
            f"{{dsn_files: [{', '.join(f'f{i}' for i in range(17))}]}}",
            "17 entries: at most 16",
        ),
        ("{dsn_files: a}", "cluster.dsn_files = a: must be a list"),
        ("{dsn_files: [a, a]}", "cluster.dsn_files[1] = a: stands at [0] already"),
        ("{dsn_files: [a, [b]]}", "cluster.dsn_files[1] = a list: must be a text"),
        ("{dsn_files: [a, b]}", "cluster.dsn_files, entry 1 = "),
    ],
)
def test_bad_lists_of_databases_are_refused(
    tmp_path: Path, cluster: str, says: str
) -> None:
    config = tmp_path / "server.yml"
    config.write_text(f"cluster: {cluster}\n")
    done = subprocess.run(
        [str(BIN / "bellwetherd"), f"--config.file={config}", "--config.check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert says in done.stderr, done.stderr
