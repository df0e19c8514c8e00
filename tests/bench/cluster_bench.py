#!/usr/bin/env python3
"""What a cluster costs its database, measured beside what deploy/sizing says of the same load.

Real bellwetherd on a real PostgreSQL (with --standbys a synchronous standby), trainers of 16 KiB
frames with full mantissas at a set rate.  After a warm-up the database's own counters are read
twice: frames, commits, bytes, renewals, looks, connections, saved states.  Then a server is killed
and the times of its partitions are held against the simulation.  Prints one JSON object.

    python3 tests/bench/cluster_bench.py --runs 100 --frames 1 --seconds 60
    python3 tests/bench/cluster_bench.py --ceiling       # the database alone, by pgbench

The trainers are Python and share the processors with all the rest: some hundred frames a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import struct
import sys
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy/sizing"))
import cost
import simulation
from ack_ledger import INGEST, SIGNALS
from bellwether_process import wait_for
from cluster_fleet import LEASE_S, Cluster, RoamingTrainer
from postgres_processes import Postgres, start_primary, synchronous_standbys

LAYERS, HEADS = 32, 32
BODIES = 256  # As many as a chunk has steps: what repeats sooner packs too well.
FRAMES = " UNION ALL ".join(f"SELECT at, body FROM bellwether.frames_{i}" for i in range(4))
# The transaction of a commit (server/cluster/postgres_log.h), for pgbench.
TRANSACTION = r"""
\set p random(0, 63)
BEGIN;
SELECT epoch FROM bellwether.lease WHERE p = :p FOR UPDATE;
SELECT 1 / count(*) FROM bellwether.lease WHERE p = :p AND epoch = 0;
INSERT INTO bellwether.frames_0 (p, first_lsn, last_lsn, epoch, owner, body)
  SELECT :p, nextval('bench'), 0, 0, 'bench/0000000000000000', body FROM bench_body
  ON CONFLICT (p, first_lsn) DO NOTHING;
COMMIT;
"""


def make_bodies(seed: int) -> list[bytes]:
    """Blocks of a norm, a signed sum, a mean and a rare count, as ingest_bench's."""
    chance = random.Random(seed)
    heads = LAYERS * HEADS
    norm = [chance.uniform(1, 2) for _ in range(heads)]
    mean = [chance.gauss(5, 1) for _ in range(heads)]
    bodies = []
    for _ in range(BODIES):
        norm = [value * (1 + chance.gauss(0, 2e-4)) for value in norm]
        mean = [5 + 0.9 * (value - 5) + chance.gauss(0, 0.1) for value in mean]
        signals = {
            "WQ_SIGMA": norm,
            "DELTA_BIAS_SUM": [chance.gauss(0, 1e-3) for _ in range(heads)],
            "LOGIT_MAX": mean,
            "TIED_ROWS_BF16": [float(chance.random() < 0.02) for _ in range(heads)],
        }
        message = INGEST.ClientMessage()
        for signal, values in signals.items():
            block = message.frame.blocks.add(
                signal=getattr(SIGNALS, f"SIGNAL_{signal}"), layer_count=LAYERS, head_count=HEADS
            )
            block.values.extend(values)
        bodies.append(bytes(message.SerializeToString()))
    return bodies


class BenchTrainer(RoamingTrainer):
    """Its frames were encoded before: {seq, step} and bytes that the decoder merges."""

    bodies = make_bodies(1)

    def __init__(self, *words: Any, **options: Any) -> None:
        self.chance = random.Random(words[1])
        super().__init__(*words, **options)

    def _frame(self, seq: int) -> bytes:
        head = INGEST.ClientMessage(seq=seq)
        head.frame.step, head.frame.parts, head.frame.time_unix_ns = seq, 1, time.time_ns()
        return bytes(head.SerializeToString()) + self.bodies[seq % BODIES]


def add_trainers(cluster: Cluster, runs: int, frames: float) -> None:
    addresses = [server.grpc for server in cluster.servers]
    chance = random.Random(2)
    for i in range(runs):
        name = f"bench-{i}-{uuid.UUID(int=chance.getrandbits(128))}"
        cluster.trainers.append(
            BenchTrainer(addresses, i, name, cluster.ledger, 1 / frames, layers=LAYERS, heads=HEADS)
        )
        time.sleep(1 / frames / runs)  # Spread over the period, as trainers are.


def numbers(database: Postgres, sql: str) -> list[float]:
    return [float(text or 0) for text in database.sql(sql)[0]]


def reading(cluster: Cluster) -> dict[str, float]:
    """The counters, all since the beginning."""
    database = cluster.database
    names = "rows", "bytes"
    read = dict(
        zip(names, numbers(database, f"SELECT count(*), sum(length(body)) FROM ({FRAMES}) f;"))
    )
    (read["wal"],) = numbers(database, "SELECT pg_current_wal_lsn() - '0/0';")
    (read["disk"],) = numbers(
        database,
        "SELECT "
        + " + ".join(f"pg_total_relation_size('bellwether.frames_{i}')" for i in range(4))
        + ";",
    )
    stats = (
        "SELECT n_tup_ins + n_tup_upd, seq_scan FROM pg_stat_user_tables "
        "WHERE schemaname = 'bellwether' AND relname = '{}';"
    )
    read["renewals"], read["looks"] = numbers(database, stats.format("servers"))
    read["saved_rows"], _ = numbers(database, stats.format("run_rows"))
    read["commit_s"] = read["commit_n"] = 0.0
    for server in cluster.servers:
        read["commit_s"] += server.metric("bellwether_wal_fsync_seconds_sum")
        read["commit_n"] += server.metric("bellwether_wal_fsync_seconds_count")
    read["acked"] = float(cluster.ledger.total)
    read["at"] = time.monotonic()
    return read


def states(database: Postgres) -> dict[str, float]:
    """Bytes of a run's rows by their kind."""
    rows = database.sql(
        "SELECT convert_from(substr(key, 1, 1), 'LATIN1'), sum(length(value)) "
        "FROM bellwether.run_rows GROUP BY 1;"
    )
    return {kind: float(size) for kind, size in rows}


class LeaseWatch(threading.Thread):
    """When each partition of a killed server has a new owner."""

    def __init__(self, database: Postgres, owner: str) -> None:
        super().__init__(daemon=True)
        self._database, self._owner = database, owner
        rows = database.sql(f"SELECT p FROM bellwether.lease WHERE owner LIKE '{owner}/%';")
        self.partitions = {int(row[0]) for row in rows}
        self.owned_s: dict[int, float] = {}
        self._began = time.monotonic()
        self.start()

    def run(self) -> None:
        while len(self.owned_s) < len(self.partitions) and time.monotonic() < self._began + 60:
            rows = self._database.sql(
                f"SELECT p FROM bellwether.lease WHERE owner NOT LIKE '{self._owner}/%' "
                "AND until > now();"
            )
            now = time.monotonic() - self._began
            for row in rows:
                if int(row[0]) in self.partitions:
                    self.owned_s.setdefault(int(row[0]), now)
            time.sleep(0.02)


def kill_one(cluster: Cluster, plan: cost.Plan) -> dict[str, Any]:
    victim = cluster.servers[0]
    hit = cluster.served_by(victim)
    victim.kill()
    killed = time.monotonic()
    watch = LeaseWatch(cluster.database, victim.folder.name)
    wait_for("all partitions are served", lambda: cluster.served() == 64, 60)
    served = time.monotonic() - killed
    wait_for("all are acknowledged again", lambda: all(t.last_ack > killed + 0.5 for t in hit), 60)
    acked = time.monotonic() - killed
    watch.join()
    took = [
        int(ms) / 1000
        for server in cluster.servers[1:]
        for ms in re.findall(r"is served, epoch \d+, after (\d+) ms", server.log())[-16:]
    ]
    free = simulation.Takeover(start_s=statistics.mean(took), bytes_per_second=1e15)
    owner = [p % plan.servers for p in range(64)]
    chance = random.Random(3)
    simulated = [
        simulation.kill([1] * 64, owner, 0, plan.lease_seconds, free, chance) for _ in range(500)
    ]
    last_owned = [max(each.owned_s) for each in simulated]
    last_served = [max(each.served_s) for each in simulated]
    return {
        "partitions": len(watch.partitions),
        "last_owned_s": round(max(watch.owned_s.values()), 2),
        "last_owned_s_simulated": [round(min(last_owned), 2), round(max(last_owned), 2)],
        "last_served_s": round(served, 2),
        "last_served_s_simulated": [round(min(last_served), 2), round(max(last_served), 2)],
        "last_acked_s": round(acked, 2),
        "a_partition_took_s": round(statistics.mean(took), 4),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        primary = start_primary()
        stack.callback(primary.remove)
        primary.configure(max_connections="100", max_wal_size="4GB")
        stack.enter_context(synchronous_standbys(primary, options.standbys))
        with Cluster(folder, primary, options.servers) as cluster:
            add_trainers(cluster, options.runs, options.frames)
            cluster.await_acks(3, 120)
            time.sleep(options.warm)
            before = reading(cluster)
            time.sleep(options.seconds)
            after = reading(cluster)
            (connections,) = numbers(
                primary, "SELECT count(*) FROM pg_stat_activity WHERE usename = 'bellwether';"
            )
            kinds = states(primary)
            moved = kill_one(cluster, plan_of(options, 1.0))
            for trainer in cluster.trainers:
                trainer.abandon()
    d = {name: after[name] - before[name] for name in before}
    seconds = d["at"]
    measured = {
        "frames_per_second": d["acked"] / seconds,
        "commits_per_second": d["rows"] / seconds,
        "body_bytes_per_second": d["bytes"] / seconds,
        "wal_bytes_per_second": d["wal"] / seconds,
        "disk_bytes_per_second": d["disk"] / seconds,
        "renewals_per_second": d["renewals"] / seconds,
        "looks_per_second": d["looks"] / seconds,
        "saved_rows_per_second": d["saved_rows"] / seconds,
        "connections": connections,
    }
    # What the model takes as given, from this run; the rest it must find.
    given = {
        "commit_s": d["commit_s"] / max(1, d["commit_n"]),
        "packed": d["bytes"] / (d["acked"] * len(frame_of(options))),
        "state_bytes": kinds.get("j", 0) / options.runs / (LAYERS * HEADS * 4),
    }
    plan = plan_of(options, measured["frames_per_second"] / (options.runs * options.frames))
    costs = cost.Costs(**{name: cost.Figure(value, "given") for name, value in given.items()})
    said = cost.answer(plan, costs)
    modelled = {
        "frames_per_second": said.frames,
        "commits_per_second": said.commits,
        "body_bytes_per_second": said.body_bytes,
        "wal_bytes_per_second": said.wal_bytes,
        "disk_bytes_per_second": said.log_bytes / (cost.LOG_DAYS * cost.DAY_S),
        "renewals_per_second": said.renewals,
        "looks_per_second": said.looks,
        "connections": float(said.connections - plan.standbys),
    }
    return {
        "load": vars(options),
        "given": {name: round(value, 5) for name, value in given.items()},
        "run_rows_bytes_of_a_run": {k: round(v / options.runs) for k, v in kinds.items()},
        "row_bytes": round((d["disk"] - d["bytes"] * 1.04) / max(1, d["rows"])),
        "wal_per_body_byte": round(d["wal"] / max(1, d["bytes"]), 3),
        "figures": {
            name: {
                "measured": round(measured[name], 2),
                "model": round(modelled[name], 2) if name in modelled else None,
            }
            for name in measured
        },
        "kill": moved,
        "load_average": os.getloadavg()[0],
    }


def frame_of(options: argparse.Namespace) -> bytes:
    return BenchTrainer.bodies[0] + bytes(20)


def plan_of(options: argparse.Namespace, kept: float) -> cost.Plan:
    return cost.Plan(
        runs=options.runs,
        frames=options.frames * kept,
        frame_bytes=len(frame_of(options)),
        values=LAYERS * HEADS * 4,
        servers=options.servers,
        standbys=options.standbys,
        lease_seconds=LEASE_S,
    )


def ceiling(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The transaction of a commit alone, by pgbench: without and with a synchronous standby."""
    found = []
    for standbys in (0, 1):
        for body in (1_024, 15_000, 240_000):
            with ExitStack() as stack:
                primary = start_primary()
                stack.callback(primary.remove)
                primary.configure(max_wal_size="4GB")
                stack.enter_context(synchronous_standbys(primary, standbys))
                noise = struct.pack("<I", 7) + random.Random(4).randbytes(body - 4)
                primary.sql(
                    "CREATE SEQUENCE bench CACHE 1000; CREATE TABLE bench_body (body bytea); "
                    "ALTER TABLE bench_body ALTER COLUMN body SET STORAGE EXTERNAL; "
                    f"INSERT INTO bench_body VALUES ('\\x{noise.hex()}');"
                )
                script = primary.folder / "commit.sql"
                script.write_text(TRANSACTION)
                script.chmod(0o644)
                out = primary.tool(
                    "pgbench", "-n", "-M", "prepared", "-c", "12", "-j", "1",
                    "-T", str(options.ceiling_seconds), "-f", str(script),
                    "-h", str(primary.folder), "-p", str(primary.port), "-U", "owner", "bellwether",
                )  # fmt: skip
                (tps,) = re.findall(r"tps = ([\d.]+)", out)
                (latency,) = re.findall(r"latency average = ([\d.]+)", out)
                found.append(
                    {
                        "standbys": standbys,
                        "body_bytes": body,
                        "commits_per_second": round(float(tps)),
                        "mb_per_second": round(float(tps) * body / 1e6, 1),
                        "latency_ms": float(latency),
                        "load_average": os.getloadavg()[0],
                    }
                )
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--frames", type=float, default=1.0, help="a second, of a run")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--standbys", type=int, default=0)
    parser.add_argument("--warm", type=float, default=35, help="seconds, until states are saved")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--ceiling", action="store_true")
    parser.add_argument("--ceiling-seconds", type=int, default=10)
    options = parser.parse_args()
    if options.ceiling:
        print(json.dumps(ceiling(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
