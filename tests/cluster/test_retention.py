"""Goal: series of a cluster's runs grow old as those of a server alone: 12 bits, then summaries,
then nothing.  That holds in the shared database as in the owner's cache, and over the death of an
owner.  It never comes earlier than by the age that its first owner began to count.  Runs themselves
stay.
Method: real PostgreSQL, three real bellwetherd with days of a few seconds, a recording that was
imported; the run's rows in the database are counted at each tier; its owner is killed between two.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, wait_for
from cluster_fleet import Cluster
from postgres_processes import Postgres
from recordings import write_recording
from test_imports import settled_import

DAY = 1 / 86_400  # A second.
STEPS = 1000
RUN = "old"


def rows(database: Postgres) -> dict[str, tuple[int, int]]:
    """Of each kind of row (database.h) how many there are, and bytes of their values."""
    counted = database.sql(
        "SELECT chr(get_byte(key, 0)), count(*), sum(length(value)) "
        "FROM bellwether.run_rows GROUP BY 1;"
    )
    return {kind: (int(count), int(size)) for kind, count, size in counted}


def rewritten(cluster: Cluster, result: str) -> float:
    name = f'bellwether_retention_rows_total{{result="{result}"}} '
    lines = [line for s in cluster.alive() for line in s.get("/metrics").splitlines()]
    return sum(float(line[len(name) :]) for line in lines if line.startswith(name))


def failures(cluster: Cluster) -> float:
    return sum(s.metric("bellwether_retention_failures_total") for s in cluster.alive())


def whole(server: Server) -> dict[int, float]:
    return server.series(RUN, "wk_sigma", 1, 2)


def series(server: Server) -> Any:
    asked = [{"signal": "wk_sigma", "layer": 1, "head": 2}]
    answer = server.call("GetSeries", run=RUN, series=asked, points_max=10_000, attempt=-1)
    return answer["series"][0]


def alike(stored: dict[int, float], first: dict[int, float], relative: float) -> bool:
    return stored.keys() == first.keys() and all(
        (math.isnan(stored[step]) and math.isnan(first[step]))
        or stored[step] == pytest.approx(first[step], rel=relative)
        for step in first
    )


def is_rounded(server: Server, first: dict[int, float]) -> bool:
    return alike(whole(server), first, 2**-12)


def is_empty(server: Server) -> bool:
    return not series(server).get("step")


def marks(database: Postgres) -> str:
    """What is known of how old the run is."""
    ((row,),) = database.sql(
        "SELECT encode(value, 'hex') FROM bellwether.run_rows WHERE get_byte(key, 0) = 120;"
    )
    return row


def owner_of(cluster: Cluster, database: Postgres) -> Server:
    ((name,),) = database.sql(
        "SELECT DISTINCT split_part(owner, '/', 1) FROM bellwether.lease l "
        "JOIN bellwether.run_rows r ON r.p = l.p WHERE until > now();"
    )
    return next(server for server in cluster.servers if server.folder.name == name)


def test_old_data_shrinks_in_the_shared_database(
    tmp_path: Path, primary: Postgres
) -> None:
    cluster = Cluster(tmp_path, primary, 3)
    # Between two of them a server dies and its runs find another, however busy the machine is.
    tiers = {"raw": 6, "rounded": 45, "summary": 80}
    days = ", ".join(f"{tier}_days: {seconds * DAY:.9f}" for tier, seconds in tiers.items())
    for server in cluster.servers:
        with open(server.folder / "server.yml", "a") as config:
            config.write(f"retention: {{{days}}}\n")
    with cluster:
        file = write_recording(tmp_path / f"{RUN}.bwrun", RUN, STEPS)
        done = settled_import(cluster.servers[0], str(file))
        assert done.returncode == 0, done.stderr
        first = whole(cluster.servers[1])
        assert len(first) == STEPS
        raw = rows(primary)
        assert raw["s"][0] > 0 and raw["m"][0] > 0, raw

        wait_for("12 bits", lambda: rewritten(cluster, "rounded") > 0, 60)
        owner = owner_of(cluster, primary)
        wait_for("all of it", lambda: rows(primary)["s"][1] < 0.8 * raw["s"][1])
        rounded = rows(primary)
        assert rounded["s"][0] == raw["s"][0] and rounded["m"] == raw["m"], (raw, rounded)
        for server in cluster.servers:
            stored = whole(server)
            assert alike(stored, first, 2**-12) and stored != first

        # Its owner dies: whoever comes next knows how old the run is.
        began = marks(primary)
        owner.kill()
        cluster.await_balance()
        assert rows(primary)["s"] == rounded["s"], "thinned before its time"
        assert marks(primary) == began, "the count began anew"
        for server in cluster.alive():
            wait_for("what was rounded is here", partial(is_rounded, server, first))

        wait_for("summaries", lambda: "s" not in rows(primary), 90)
        assert rewritten(cluster, "summarized") > 0
        assert rows(primary)["m"] == raw["m"]
        for server in cluster.alive():
            summary = series(server)
            assert summary["downsampled"] and 4 <= len(summary["step"]) <= 6, summary
            highest = max(value for value in first.values() if not math.isnan(value))
            assert max(summary["max"]) == pytest.approx(highest, rel=1e-6)

        owner.start()
        cluster.await_balance()
        wait_for("nothing is left", lambda: not {"s", "m"} & rows(primary).keys(), 120)
        for server in cluster.alive():
            wait_for("no points", partial(is_empty, server))
        found = cluster.ask_all("GetRun", run=RUN)
        assert found["ended"] and int(found["steps_recorded"]) == STEPS
        assert failures(cluster) == 0
        # The run and its last state; what is known of its age.
        assert {"r", "x"} <= rows(primary).keys(), rows(primary)
