"""A cluster of many runs, simulated: how evenly they are spread, and what a killed server moves.

Runs are hashed as the servers do.  Of a kill, the times are those of server/cluster/member.cc
(leases, looks, shares, one worker that takes partitions up one after the other) and of
client_lib/sender/session.cc (backoff with full jitter).  What a takeover reads of the database,
and how fast, is given.  Nothing is measured here: tests/deploy/test_sizing.py holds the constants
against the sources, tests/bench/cluster_bench.py a kill of real processes against this.

Deterministic by its seed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from cost import look_seconds, renew_seconds
from partitions import PARTITIONS, database_of, partition_of

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.25, 30.0  # client_lib/src/backoff.h


@dataclass(frozen=True)
class Takeover:
    """What a partition costs the server that acquires it (tests/bench/cluster_bench.py)."""

    start_s: float = 0.02  # Whatever it holds: the lease, its LSNs, empty reads.
    bytes_per_second: float = 16e6  # Read and applied, on two shared cores.
    run_bytes: float = 890e3  # Of a run: half a chunk of 4,096 series, its saved state.
    frame_bytes: float = 11.6e3  # Packed.
    frames_behind: float = 30  # Of a run: the log is cut each 60 s.
    retry_s: float = 0.005  # An answer of a server.

    def seconds(self, runs: int) -> float:
        return self.start_s + self.bytes(runs) / self.bytes_per_second

    def bytes(self, runs: int) -> float:
        return runs * (self.run_bytes + self.frames_behind * self.frame_bytes)


@dataclass(frozen=True)
class Spread:
    """How many runs each has: [databases][partitions], [servers]."""

    partitions: list[list[int]]
    servers: list[int]
    owners: list[list[int]]  # Of [database][partition], a server's number within the database.

    @property
    def partition_imbalance(self) -> float:
        """The fullest over the mean."""
        flat = [runs for database in self.partitions for runs in database]
        return max(flat) / statistics.mean(flat)

    @property
    def server_imbalance(self) -> float:
        return max(self.servers) / statistics.mean(self.servers)

    @property
    def database_imbalance(self) -> float:
        sums = [sum(database) for database in self.partitions]
        return max(sums) / statistics.mean(sums)


@dataclass(frozen=True)
class Kill:
    """What one killed server moved, and when it went on; times in seconds since the kill."""

    partitions: int
    runs: int
    expired_s: float  # Its leases were over.
    owned_s: list[float] = field(default_factory=list)  # Of each partition: it has an owner.
    served_s: list[float] = field(default_factory=list)  # Of each partition: it is served.
    welcomed_s: list[float] = field(default_factory=list)  # Of a sample of runs: their sender.
    read_bytes: float = 0  # From the database.

    @property
    def read_bytes_per_second(self) -> float:
        """While it is taken over."""
        return self.read_bytes / max(1e-9, max(self.served_s) - min(self.owned_s))


def spread(runs: int, servers: int, databases: int, seed: int) -> Spread:
    """`runs` uuids at random; servers as in a database each, that took their shares in turn."""
    if servers < databases or runs < 1:
        raise ValueError(f"runs = {runs}, servers = {servers}: {databases} databases need as many")
    chance = random.Random(seed)
    counts = [[0] * PARTITIONS for _ in range(databases)]
    for _ in range(runs):
        uuid = chance.randbytes(16)
        counts[database_of(uuid, databases)][partition_of(uuid)] += 1
    owners, of_servers = [], []
    for database in range(databases):
        here = servers // databases + (1 if database < servers % databases else 0)
        # Who has which is a matter of who came first; each has its share.
        order = list(range(PARTITIONS))
        chance.shuffle(order)
        owner = [0] * PARTITIONS
        for i, partition in enumerate(order):
            owner[partition] = i % here
        owners.append(owner)
        sums = [0] * here
        for partition, server in enumerate(owner):
            sums[server] += counts[database][partition]
        of_servers += sums
    return Spread(counts, of_servers, owners)


def kill(
    counts: Sequence[int],
    owner: Sequence[int],
    victim: int,
    lease_seconds: float,
    takeover: Takeover,
    chance: random.Random,
    senders: int = 0,
) -> Kill:
    """SIGKILL of `victim`, a server of one database.

    counts, owner: [64], runs and server of each partition.  ValueError: it is the only server.
    """
    survivors = sorted(set(owner) - {victim})
    if not survivors:
        raise ValueError("nobody is left to take over")
    free = [p for p in range(PARTITIONS) if owner[p] == victim]
    look, renew = look_seconds(lease_seconds), renew_seconds(lease_seconds)
    expired = lease_seconds - chance.uniform(0, renew)
    share = -(-PARTITIONS // len(survivors))
    has = {server: sum(1 for each in owner if each == server) for server in survivors}
    # Each looks in its own time; who looks first takes up to its share.
    looks = sorted((expired + chance.uniform(0, look), server) for server in survivors)
    owned: dict[int, float] = {}
    served: dict[int, float] = {}
    left = list(free)
    for at, server in looks:
        busy_until = now = at
        while left and has[server] < share:
            partition = left.pop(0)
            has[server] += 1
            now += takeover.retry_s
            owned[partition] = now
            busy_until = max(busy_until, now) + takeover.seconds(counts[partition])
            served[partition] = busy_until
    assert not left, "shares hold all partitions"
    runs = sum(counts[p] for p in free)
    welcomed = []
    if runs:
        weights = [counts[p] for p in free]
        for partition in chance.choices(free, weights=weights, k=senders):
            welcomed.append(_sender(served[partition], takeover.retry_s, chance))
    return Kill(
        partitions=len(free),
        runs=runs,
        expired_s=expired,
        owned_s=[owned[p] for p in free],
        served_s=[served[p] for p in free],
        welcomed_s=welcomed,
        read_bytes=takeover.bytes(runs),
    )


def _sender(served_s: float, retry_s: float, chance: random.Random) -> float:
    """When a sender whose stream broke at 0 is welcomed: it tries, and waits longer each time."""
    now, ceiling = 0.0, BACKOFF_FIRST_S
    while True:
        now += chance.uniform(0, ceiling) + retry_s
        ceiling = min(BACKOFF_MAX_S, ceiling * 2)
        if now >= served_s:
            return now


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that is at least as large as the q-th part of all, 0 < q <= 1."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(q * 1_000_000) * len(ordered) // 1_000_000) - 1)]
