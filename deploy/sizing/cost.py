"""What a cluster costs its servers and databases, and which ceiling it meets first.

Everything is arithmetic on a few measured figures, each with where it comes from (CEILINGS, COSTS);
all can be given otherwise.  Per database and per server; runs are taken as spread evenly, and
simulation.py says how evenly they are.

Pure; any thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from partitions import PARTITIONS

DAY_S = 86_400
# Beside those that commit frames: leases, giving back, four for rows, two for alerts and for reads.
OTHER_CONNECTIONS = 10
LOOK_S_MIN, LOOK_S_MAX = 0.05, 0.5  # server/cluster/member.cc: Keep()
SAVE_S_MIN, SAVE_S_MAX, SAVE_STEPS = 2, 30, 256  # server/engine/run_saver.cc: RunSaver::IsDue()
LOG_DAYS = 2  # The tables of today and of yesterday are never emptied.


def _legal(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is not.
        raise ValueError(f"{name} = {value:g}: must be in [{low:g}, {high:g}]")


@dataclass(frozen=True)
class Plan:
    """What is to be served, by what.  ValueError names the field that cannot be."""

    runs: int = 1_000  # Live at once.
    ranks: int = 1  # That report, of a run.
    frames: float = 1.0  # Of a rank, a second.
    frame_bytes: int = 16_500  # On the wire.
    values: int = 4_096  # Of a frame.
    servers: int = 3  # In all.
    databases: int = 1
    standbys: int = 1  # Synchronous ones, of a database.
    lease_seconds: int = 5
    connections: int = 4  # cluster.connections
    history_days: int = 30  # How long series are kept as they are stored: retention.rounded_days.

    def __post_init__(self) -> None:
        _legal("runs", self.runs, 1, 10_000_000)
        _legal("ranks", self.ranks, 1, 4_096)
        _legal("frames", self.frames, 1e-6, 1_000)
        _legal("frame_bytes", self.frame_bytes, 1, 1 << 20)
        _legal("values", self.values, 1, 1 << 18)
        _legal("databases", self.databases, 1, 1_024)
        _legal("servers", self.servers, self.databases, self.databases * PARTITIONS)
        _legal("standbys", self.standbys, 0, 8)
        _legal("lease_seconds", self.lease_seconds, 2, 60)
        _legal("connections", self.connections, 1, 64)
        _legal("history_days", self.history_days, 1, 36_500)

    @property
    def frames_per_second(self) -> float:
        return self.runs * self.ranks * self.frames

    @property
    def servers_per_database(self) -> int:
        """Of the database that has most."""
        return math.ceil(self.servers / self.databases)

    @property
    def servers_of_smallest(self) -> int:
        return self.servers // self.databases


@dataclass(frozen=True)
class Figure:
    value: float
    source: str


BENCH = "tests/bench/cluster_bench.py (docs/operate/sizing.md)"


@dataclass(frozen=True)
class Costs:
    """What one thing costs: times in seconds, sizes in bytes."""

    # A commit of one partition, sent to answered, no standby.
    commit_s: Figure = Figure(0.0032, BENCH)
    # What zstd leaves of a frame, a ratio.
    packed: Figure = Figure(0.70, BENCH)
    # A row of the log without its body, and what pages and TOAST's index add to a byte of it.
    row_bytes: Figure = Figure(180, BENCH)
    table_bytes: Figure = Figure(1.05, BENCH)
    # Of the database's own log, per byte that is written.
    wal_bytes: Figure = Figure(1.15, BENCH)
    # What a save writes anew, per value of a frame.
    state_bytes: Figure = Figure(25, BENCH)
    # A value until its chunk of 256 steps is full, and in the series for good.
    unfinished_bytes: Figure = Figure(1.5, BENCH)
    value_bytes: Figure = Figure(2.0, "docs/benchmarks.md: storage_bench")


@dataclass(frozen=True)
class Ceilings:
    """What one server, or one database, was seen to bear."""

    server_frames: Figure = Figure(5_000, "docs/reliability_evidence.md: L4, two cores, TLS")
    server_values: Figure = Figure(25e6, "docs/benchmarks.md: ingest_bench, one core")
    server_runs: Figure = Figure(1_000, "limits.runs_live_max as shipped")
    database_transactions: Figure = Figure(970, BENCH + ": 15 kB, a standby")
    database_bytes: Figure = Figure(45e6, BENCH + ": 240 kB, a standby")
    database_connections: Figure = Figure(97, "PostgreSQL's max_connections as shipped, less 3")
    writer_busy: Figure = Figure(0.8, "beyond it a commit waits for several others")


@dataclass(frozen=True)
class Use:
    """One quantity against its ceiling."""

    name: str
    value: float
    ceiling: float
    source: str

    @property
    def share(self) -> float:
        return self.value / self.ceiling


@dataclass(frozen=True)
class Answer:
    plan: Plan
    # Of a database.
    frames: float
    body_bytes: float  # A second, packed.
    wal_bytes: float  # A second, all that is written; to each standby, too.
    commits: float
    connections: int
    renewals: float  # Of leases and of servers' presence: one each a time.
    looks: float  # Reads of the lease table.
    saves: float  # States of runs, a transaction each.
    rows_per_day: float  # Of the log.
    log_bytes: float  # At most, on disk.
    series_bytes: float  # After history_days.
    # Of a server.
    server_frames: float
    server_values: float
    server_runs: float
    partitions: tuple[int, int]  # Fewest and most of a server.
    writer_busy: float
    uses: list[Use] = field(default_factory=list)

    @property
    def first(self) -> Use:
        """The ceiling that is met first."""
        return max(self.uses, key=lambda use: use.share)


def look_seconds(lease_seconds: float) -> float:
    """How often a server looks at the leases."""
    return min(max(lease_seconds / 20, LOOK_S_MIN), LOOK_S_MAX)


def renew_seconds(lease_seconds: float) -> float:
    """A third of the lease, at the look that comes then."""
    look = look_seconds(lease_seconds)
    return math.ceil(lease_seconds / 3 / look - 1e-9) * look


def save_seconds(frames: float) -> float:
    """How often a run that brings `frames` steps a second is saved."""
    return min(max(SAVE_STEPS / frames, SAVE_S_MIN), SAVE_S_MAX)


def commits_of_writer(partitions: int, frames: float, commit_s: float) -> float:
    """Commits a second of a writer that serves `partitions` in turn.

    frames: a second, of one partition.  A commit takes all that waits for its partition.  So a
    partition is a machine that runs 1 / frames seconds, then waits for the one repairman.  This is
    mean value analysis (Reiser and Lavenberg 1980) of that queue, exact for exponential times.
    """
    if partitions == 0 or frames == 0:
        return 0.0
    queued = commits = 0.0
    for n in range(1, partitions + 1):
        response = commit_s * (1 + queued)
        commits = n / (1 / frames + response)
        queued = commits * response
    return commits


def writers_of(partitions: int, connections: int) -> list[int]:
    """How many partitions each of a server's connections has; a few may have none."""
    return [
        partitions // connections + (1 if i < partitions % connections else 0)
        for i in range(connections)
    ]


def answer(plan: Plan, costs: Costs | None = None, ceilings: Ceilings | None = None) -> Answer:
    """ValueError: a cost or ceiling is not positive."""
    costs, ceilings = costs or Costs(), ceilings or Ceilings()
    for given in (costs, ceilings):
        for each in fields(given):
            _legal(each.name, getattr(given, each.name).value, 1e-12, 1e18)
    share = 1 / plan.databases
    servers = plan.servers_per_database
    fewest = PARTITIONS // servers
    most = math.ceil(PARTITIONS / plan.servers_of_smallest)
    frames = plan.frames_per_second * share
    of_partition = frames / PARTITIONS
    writers = writers_of(math.ceil(PARTITIONS / servers), plan.connections)
    commits_of_server = sum(
        commits_of_writer(n, of_partition, costs.commit_s.value) for n in writers
    )
    commits = min(frames, commits_of_server * PARTITIONS / math.ceil(PARTITIONS / servers))
    busiest = writers_of(most, plan.connections)[0]
    busy = commits_of_writer(busiest, of_partition, costs.commit_s.value) * costs.commit_s.value
    body = frames * plan.frame_bytes * costs.packed.value
    runs = plan.runs * share
    saves = runs / save_seconds(plan.frames)
    save_bytes = saves * costs.state_bytes.value * plan.values
    values = frames * plan.values
    series = values * costs.value_bytes.value
    written = body + save_bytes + series + values * costs.unfinished_bytes.value
    wal = written * costs.wal_bytes.value
    connections = servers * (plan.connections + OTHER_CONNECTIONS) + plan.standbys
    of_server = most / PARTITIONS
    found = Answer(
        plan=plan,
        frames=frames,
        body_bytes=body,
        wal_bytes=wal,
        commits=commits,
        connections=connections,
        renewals=servers / renew_seconds(plan.lease_seconds),
        looks=servers / look_seconds(plan.lease_seconds),
        saves=saves,
        rows_per_day=commits * DAY_S,
        log_bytes=LOG_DAYS
        * DAY_S
        * (commits * costs.row_bytes.value + body * costs.table_bytes.value),
        series_bytes=series * DAY_S * plan.history_days,
        server_frames=frames * of_server,
        server_values=frames * plan.values * of_server,
        server_runs=runs * of_server,
        partitions=(fewest, most),
        writer_busy=busy,
    )
    pairs = [
        ("frames/s of a server", found.server_frames, ceilings.server_frames),
        ("values/s of a server", found.server_values, ceilings.server_values),
        ("runs of a server", found.server_runs, ceilings.server_runs),
        ("transactions/s of a database", found.commits + saves, ceilings.database_transactions),
        ("bytes/s into a database's log", found.wal_bytes, ceilings.database_bytes),
        ("connections of a database", float(connections), ceilings.database_connections),
        ("time that a commit connection is busy", busy, ceilings.writer_busy),
    ]
    found.uses.extend(
        Use(name, value, ceiling.value, ceiling.source) for name, value, ceiling in pairs
    )
    return found
