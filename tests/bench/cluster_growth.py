#!/usr/bin/env python3
"""Frames a second that become durable: one server alone, and 1, 2, 3 of a cluster.

Real bellwetherd, a real PostgreSQL of its own for each turn (with --standbys a synchronous one),
and `load_cluster`: streams that send 16 KiB frames as fast as acknowledgements come, the same
number for every server.  Turns are interleaved, --rounds of each; the figure is the median.
Prints one JSON object: frames a second, and what a frame takes of the servers' and the database's
processors.

    python3 tests/bench/cluster_growth.py --servers 1 2 3 3x2 --cpus-per-server 2 --database-cpus 3
    python3 tests/bench/cluster_growth.py --servers 1 --rounds 5    # beside one alone, any cores

"3x2" is three servers on two databases.

With --cpus-per-server each server has so many processors of its own, each database --database-cpus
and the load what is left; without, all share all.  With --quota each server may use that part of
one processor and no more (a control group; root).  So a few processors hold several servers, the
database and the load, none of which waits for another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, Server, wait_for
from postgres_processes import Postgres, dsn_of, start_primary, synchronous_standbys

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Size:
    """Of a cluster."""

    servers: int
    databases: int = 1

    @staticmethod
    def parse(text: str) -> Size:
        servers, _, databases = text.partition("x")
        return Size(int(servers), int(databases or 1))

    def __str__(self) -> str:
        return f"{self.servers} of a cluster" + (
            f", {self.databases} databases" if self.databases > 1 else ""
        )


class Pinned(Server):
    """A server on processors of its own; of a cluster if there are databases."""

    def __init__(
        self, folder: Path, cpus: str, quota: float, databases: Sequence[Postgres] = ()
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.group = make_group(f"bellwether-{folder.name}", quota) if quota else None
        config = ""
        if databases:
            names = [f"dsn{i}" for i in range(len(databases))]
            for name, database in zip(names, databases):
                dsn = folder / name
                dsn.write_text(dsn_of(database) + "\n")
                dsn.chmod(0o600)
            config = f"cluster: {{dsn_files: [{', '.join(names)}], node: {folder.name}}}\n"
        super().__init__(folder, config)
        self.cpus = cpus

    def program(self, name: str) -> list[str]:
        words = super().program(name)
        if name == "bellwetherd" and self.cpus:
            words = ["taskset", "-c", self.cpus, *words]
        if name == "bellwetherd" and self.group is not None:
            enter = f'echo $$ > {self.group}/cgroup.procs && exec "$@"'
            words = ["sh", "-c", enter, "sh", *words]
        return words

    def __exit__(self, *why: object) -> None:
        super().__exit__(*why)
        if self.group is not None:
            self.group.rmdir()


def make_group(name: str, quota: float) -> Path:
    """A control group whose processes use `quota` of a processor at most; version 1 or 2."""
    period_us = 10_000
    quota_us = round(quota * period_us)
    old = Path("/sys/fs/cgroup/cpu")
    group = (old if old.is_dir() else Path("/sys/fs/cgroup")) / name
    group.mkdir()
    if old.is_dir():
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {period_us}")
    return group


def cpu_seconds(pid: int) -> float:
    """Of a process and of its children."""
    used = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It has gone.
        if int(stat.parent.name) == pid or int(fields[1]) == pid:
            used += (int(fields[11]) + int(fields[12])) / TICKS
    return used


class Cores:
    """The processors of servers, databases and load; "" = any."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.each, self.of_one_database = options.cpus_per_server, options.database_cpus
        self.all = sorted(os.sched_getaffinity(0))
        self.databases = self.each * max(size.servers for size in options.servers)
        wanted = self.databases + self.of_one_database * max(s.databases for s in options.servers)
        self.load = wanted
        if self.each and wanted >= len(self.all):
            sys.exit(
                f"{wanted} processors and one for the load are wanted, {len(self.all)} are here"
            )

    def _text(self, first: int, end: int) -> str:
        return ",".join(map(str, self.all[first:end])) if self.each else ""

    def of_server(self, number: int) -> str:
        return self._text(number * self.each, (number + 1) * self.each)

    def of_database(self, number: int) -> str:
        first = self.databases + number * self.of_one_database
        return self._text(first, first + self.of_one_database)

    def of_load(self) -> str:
        return self._text(self.load, len(self.all))


@contextmanager
def database_on(options: argparse.Namespace, cpus: str) -> Iterator[Postgres]:
    with ExitStack() as stack:
        mine = os.sched_getaffinity(0)
        if cpus:
            os.sched_setaffinity(0, map(int, cpus.split(",")))  # Inherited.
        try:
            primary = start_primary()
            stack.callback(primary.remove)
            primary.configure(max_connections="100", max_wal_size="8GB")
            primary.sql("SELECT pg_reload_conf();")
            stack.enter_context(synchronous_standbys(primary, options.standbys))
        finally:
            os.sched_setaffinity(0, mine)
        yield primary


def load(options: argparse.Namespace, cores: Cores, servers: list[Server]) -> dict[str, Any]:
    words = [
        str(BIN / "load_cluster"),
        "--servers", ",".join(server.grpc for server in servers),
        "--runs", str(options.runs * len(servers)),
        "--window", str(options.window),
        "--warm", str(options.warm),
        "--seconds", str(options.seconds),
    ]  # fmt: skip
    if cores.of_load():
        words += ["--cpus", cores.of_load()]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def measure(options: argparse.Namespace, cores: Cores, servers: list[Server]) -> dict[str, Any]:
    found = load(options, cores, servers)
    frames = sum(server.metric("bellwether_ingest_frames_total") for server in servers)
    commits = sum(server.metric("bellwether_wal_fsync_seconds_count") for server in servers)
    used = sum(cpu_seconds(s.process.pid) for s in servers if s.process is not None)
    return found | {"server_ms": 1000 * used / frames, "frames_a_commit": frames / commits}


def alone(options: argparse.Namespace, cores: Cores, folder: Path) -> dict[str, Any]:
    with Pinned(folder, cores.of_server(0), options.quota) as server:
        return measure(options, cores, [server])


def together(options: argparse.Namespace, cores: Cores, folder: Path, size: Size) -> dict[str, Any]:
    with ExitStack() as stack:
        databases = [
            stack.enter_context(database_on(options, cores.of_database(i)))
            for i in range(size.databases)
        ]

        def used() -> float:
            return sum(cpu_seconds(d.process.pid) for d in databases if d.process is not None)

        before = used()
        servers: list[Server] = [
            stack.enter_context(
                Pinned(folder / "abcdefgh"[i], cores.of_server(i), options.quota, databases)
            )
            for i in range(size.servers)
        ]
        wait_for(
            "each has its share",
            lambda: (
                sum(owned := [s.metric("bellwether_cluster_partitions") for s in servers])
                == 64 * size.databases
                and max(owned) <= -(-64 // size.servers) * size.databases
            ),
        )
        found = measure(options, cores, servers)
        frames = sum(server.metric("bellwether_ingest_frames_total") for server in servers)
        found["database_ms"] = 1000 * (used() - before) / frames
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--servers",
        type=Size.parse,
        nargs="+",
        default=[Size(1), Size(2), Size(3)],
        metavar="N[xDATABASES]",
        help="of the cluster, each a turn",
    )
    parser.add_argument("--runs", type=int, default=32, help="streams a server")
    parser.add_argument("--window", type=int, default=64, help="frames that a stream sends ahead")
    parser.add_argument("--warm", type=float, default=10, help="seconds before what is counted")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--standbys", type=int, default=0)
    parser.add_argument("--cpus-per-server", type=int, default=0)
    parser.add_argument("--database-cpus", type=int, default=4)
    parser.add_argument("--quota", type=float, default=0, help="of one processor, of each server")
    options = parser.parse_args()
    cores = Cores(options)
    turns: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for size in [None, *options.servers]:
            with tempfile.TemporaryDirectory() as folder:
                found = (
                    together(options, cores, Path(folder), size)
                    if size
                    else alone(options, cores, Path(folder))
                )
            name = str(size or "alone")
            turns.setdefault(name, []).append(found)
            print(f"{name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    median = {
        name: {
            field: round(statistics.median(turn[field] for turn in each), 3)
            for field in each[0]
            if isinstance(each[0][field], (int, float))
        }
        for name, each in turns.items()
    }
    base = median["alone"]["frames_per_second"]
    print(
        json.dumps(
            {
                "load": vars(options) | {"servers": [str(size) for size in options.servers]},
                "processors": len(cores.all),
                "load_average": os.getloadavg()[0],
                "median": median,
                "of_one_alone": {
                    name: round(each["frames_per_second"] / base, 3)
                    for name, each in median.items()
                },
                "all_frames_per_second": {
                    name: [t["frames_per_second"] for t in each] for name, each in turns.items()
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
