"""Goal: training jobs go on at another server when theirs is killed, whichever server they know.
Method: real PostgreSQL, three real bellwetherd, real senders that all know one of the two that
live.  With a lease of ten seconds that one goes on sending them to the one that is dead.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import wait_for
from cluster_fleet import LEASE_S, Cluster
from postgres_processes import Postgres

from bellwether.client import Block, RunClient, RunOptions

RUNS, BACK_S = 24, 60.0


def test_senders_find_the_new_owner(tmp_path: Path, primary: Postgres) -> None:
    cluster = Cluster(tmp_path, primary, 3)
    for server in cluster.servers:
        config = server.folder / "server.yml"
        lease = f"lease_seconds: {LEASE_S}"
        assert lease in config.read_text()
        config.write_text(config.read_text().replace(lease, "lease_seconds: 10"))
    with cluster:
        known = cluster.servers[1].grpc
        clients = [
            RunClient(RunOptions(run=f"job-{i}", layers=1, heads=1, server=known))
            for i in range(RUNS)
        ]
        try:
            step = push(clients, 0)
            wait_for("all are acknowledged", lambda: waiting(clients, [0] * RUNS) == [], 120)
            victim = cluster.servers[0]
            assert victim.metric("bellwether_ingest_streams") > 0, "it serves nobody"
            victim.kill()
            before = [client.counters().frames_sent for client in clients]
            deadline = time.monotonic() + BACK_S
            while (left := waiting(clients, before)) and time.monotonic() < deadline:
                step = push(clients, step)
                time.sleep(0.1)
            told = [clients[i].counters().error for i in left]
            assert not left, f"{len(left)} of {RUNS} jobs have no server: {told}"
            dropped = sum(client.counters().frames_dropped_window for client in clients)
            assert dropped == 0
        finally:
            for client in clients:
                client.close()


def push(clients: list[RunClient], step: int) -> int:
    for client in clients:
        client.push(step, [Block("loss", [float(step)])])
    return step + 1


def waiting(clients: list[RunClient], sent: list[int]) -> list[int]:
    """Whose frames beyond what was sent then are not acknowledged yet."""
    return [i for i, client in enumerate(clients) if client.counters().frames_acked <= sent[i]]
