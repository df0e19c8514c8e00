"""Goal: an hour without its database costs a cluster nothing that was acknowledged, and nothing
that was sent meanwhile.  A run that falls ill in it is reported at once, and stored later.  The
servers' memory does not grow with the hour.
Method: real PostgreSQL, three real bellwetherd; the database is stopped while trainers go on, and
is started an hour later (BELLWETHER_AWAY_S: other seconds).  With BELLWETHER_LONG only.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.error
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, wait_for
from cluster_fleet import Cluster, describe
from postgres_processes import Postgres

AWAY_S = float(os.environ.get("BELLWETHER_AWAY_S", 3600))
RUNS, PERIOD = 12, 1.0
# Its window and the detectors' state; 12 trainers send 43,200 frames in an hour.
GROWTH_MIB = 256


def resident_mib(server: Server) -> float:
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def ready(server: Server) -> bool:
    try:
        server.get("/-/ready")
    except urllib.error.HTTPError as error:
        assert error.code == 503, error
        return False
    return True


@pytest.mark.skipif(not os.environ.get("BELLWETHER_LONG"), reason="BELLWETHER_LONG: an hour")
def test_an_hour_without_the_database(tmp_path: Path, primary: Postgres) -> None:
    with Cluster(tmp_path, primary, 3) as cluster:
        cluster.add_trainers(RUNS, PERIOD, sick_from=40)
        cluster.await_acks(5)
        sick = cluster.trainers[-1]
        before = [resident_mib(server) for server in cluster.servers]
        primary.stop()
        away = time.monotonic()
        assert cluster.ledger.acked[sick.run, 0] < sick.sick_from, "it fell ill before"
        wait_for("an alert that is not stored", lambda: cluster.ledger.unstored, 60)
        told = time.monotonic() - away
        assert {run for run, _, _ in cluster.ledger.unstored} == {sick.run}
        acked = cluster.ledger.total
        most = 0.0
        while time.monotonic() - away < AWAY_S:
            time.sleep(1)
            assert not any(ready(server) for server in cluster.servers)
            grown = [resident_mib(s) - b for s, b in zip(cluster.servers, before)]
            most = max(most, *grown)
        assert cluster.ledger.total == acked, "acknowledged without a database"
        waited = sum(len(trainer.unacked) for trainer in cluster.trainers)
        primary.start()
        back = time.monotonic()
        wait_for("all servers are ready", lambda: all(map(ready, cluster.servers)), 60)
        cluster.await_balance(60)
        made = {trainer.run: trainer.made for trainer in cluster.trainers}
        wait_for(
            "what was sent meanwhile is acknowledged",
            lambda: all(cluster.ledger.acked[run, 0] >= last for run, last in made.items()),
            600,
        )
        caught_up = time.monotonic() - back
        result = cluster.check()
    figures = {"told_s": told, "waited": waited, "caught_up_s": caught_up, "grown_mib": most}
    print(describe(result), {what: round(value, 1) for what, value in figures.items()})
    assert result["alerts"] > 0
    assert most < GROWTH_MIB, figures
