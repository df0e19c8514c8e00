"""Goal: a server that is told to stop ends in time, whatever it has still to take up.  It leaves
nothing to be read again of what it has saved, and forgets nothing that it could not save.
Method: real PostgreSQL and real bellwetherd.  One has all leases of a server that was killed.  A
table that it must read for a takeover is locked by another session, so each takeover waits two
seconds in vain.  Of another the database is started again before it stops.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import wait_for
from cluster_fleet import Cluster
from postgres_processes import ROLE, Postgres, bin_folder


def test_a_stop_waits_for_no_takeover_that_is_queued(tmp_path: Path, primary: Postgres) -> None:
    cluster = Cluster(tmp_path, primary, 2)
    first, second = cluster.servers
    lock = None
    try:
        first.start()
        wait_for("it owns all", lambda: cluster.owners().get("a") == 64)
        first.kill()
        lock = subprocess.Popen(
            [
                str(bin_folder() / "psql"), "-qX", "-h", str(primary.folder),
                "-p", str(primary.port), "-U", "owner", "-d", ROLE, "-c",
                "BEGIN; LOCK TABLE bellwether.run_rows; SELECT pg_sleep(120);",
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        held = "SELECT count(*) FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND granted;"
        wait_for("the table is locked", lambda: primary.sql(held) == [["1"]])
        second.start()
        wait_for("it has all leases", lambda: cluster.owners().get("b", 0) >= 60)
        assert second.stop() == 0, second.log()[-2000:]
    finally:
        if lock is not None:
            lock.kill()
            lock.wait()
        for server in cluster.servers:
            if server.process is not None and server.process.poll() is None:
                server.kill()


def test_restart_reads_only_commits_that_were_not_saved(
    tmp_path: Path, primary: Postgres
) -> None:
    with Cluster(tmp_path, primary, 1) as cluster:
        (server,) = cluster.servers
        cluster.add_trainers(6, 0.02)
        cluster.await_acks(270)  # Each was saved once, after 256 steps.
        # Its connections are gone; that for states will not be needed before the stop.
        primary.stop()
        primary.start()
        cluster.await_acks(5)
        assert server.stop() == 0
        tables = " UNION ALL ".join(f"SELECT * FROM bellwether.frames_{i}" for i in range(4))
        ((needed, all_of_them),) = primary.sql(
            "SELECT count(CASE WHEN f.last_lsn >= l.keep THEN 1 END), count(*) "
            f"FROM ({tables}) AS f JOIN bellwether.lease l ON l.p = f.p;"
        )
        assert int(all_of_them) > 0
        assert int(needed) == 0, f"{needed} of {all_of_them} commits would be read again"
        server.start()
        cluster.await_acks(5)
        cluster.check()
