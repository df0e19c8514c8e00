"""Goal: the model of a cluster has the servers' partitions and periods.  Its sums add up, and more
of a load is never less work.  The simulation is the same for the same seed.
Method: a real server on a real PostgreSQL shows where runs go; constants are read from the sources;
the rest is arithmetic. tests/bench/cluster_bench.py holds figures against a real cluster.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy/sizing"))
import cost
import simulation
import zstandard
from bellwether_process import ROOT
from cluster_fleet import FRAME_TABLES, Cluster
from partitions import PARTITIONS, crc32c, database_of, partition_of
from postgres_processes import Postgres, start_primary

COMMAND = [sys.executable, str(ROOT / "deploy/sizing")]


def number(path: str, name: str) -> float:
    (text,) = re.findall(rf"{name} ?[={{] ?([\d'.]+)", (ROOT / path).read_text())
    return float(text.replace("'", ""))


@pytest.fixture
def primary() -> Iterator[Postgres]:
    started = start_primary()
    yield started
    started.remove()


def test_runs_go_where_a_real_server_puts_them(tmp_path: Path, primary: Postgres) -> None:
    with Cluster(tmp_path, primary, 1) as cluster:
        cluster.add_trainers(24, 0.05)
        cluster.await_acks(2)
        wanted = {t.uuid: partition_of(t.uuid) for t in cluster.trainers}
        (seen,) = primary.sql("SELECT count(*) FROM pg_stat_activity WHERE usename = 'bellwether';")
        found: dict[bytes, int] = {}
        for row in primary.sql(f"SELECT p, encode(body, 'hex') FROM ({FRAME_TABLES}) AS f;"):
            plain = zstandard.ZstdDecompressor().decompress(
                bytes.fromhex(row[1]), max_output_size=64 << 20
            )
            found |= {each: int(row[0]) for each in wanted if each in plain}
    assert found == wanted
    # It has given nothing back yet, for which it has one more.
    assert 4 < int(seen[0]) <= 4 + cost.OTHER_CONNECTIONS
    assert len(set(found.values())) > 8


def test_the_hash_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value.
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4.
    with pytest.raises(ValueError, match="uuid has 15 bytes"):
        partition_of(bytes(15))


def test_databases_share_all_partitions() -> None:
    seen = [
        (database_of(u, 2), partition_of(u))
        for u in (uuid.UUID(int=i).bytes for i in range(20_000))
    ]
    assert len(set(seen)) == 2 * PARTITIONS
    # What the CRC itself would do: half of each database's partitions empty.
    assert len({(partition % 2, partition) for _, partition in seen}) == PARTITIONS


def test_constants_are_the_sources() -> None:
    assert number("server/model/partition.h", "kPartitions") == PARTITIONS
    assert number("server/engine/run_saver.cc", "kSaveSteps") == cost.SAVE_STEPS
    assert number("server/engine/run_saver.cc", "kSaveNanosMin") == cost.SAVE_S_MIN * 1e9
    assert number("server/engine/run_saver.cc", "kSaveNanosMax") == cost.SAVE_S_MAX * 1e9
    assert number("client_lib/src/backoff.h", "kFirst") == simulation.BACKOFF_FIRST_S * 1e3
    assert number("client_lib/src/backoff.h", "kMax") == simulation.BACKOFF_MAX_S * 1e3
    member = (ROOT / "server/cluster/member.cc").read_text()
    assert "std::clamp<int64_t>(lease_ms / 20, 50, 500)" in member
    assert (cost.LOOK_S_MIN, cost.LOOK_S_MAX) == (0.05, 0.5)
    assert "renewed_ns_ >= lease_ms * 1'000'000 / 3" in member
    assert cost.look_seconds(5) == 0.25 and cost.renew_seconds(5) == pytest.approx(1.75)


def test_sums_add_up() -> None:
    found = cost.answer(cost.Plan(runs=2_000, ranks=2, frames=0.5, servers=6, databases=2))
    assert found.frames == 1_000 and sum(cost.writers_of(22, 4)) == 22
    assert found.partitions == (21, 22)
    assert found.connections == 3 * (4 + 10) + 1
    assert 0 < found.commits <= found.frames
    assert found.rows_per_day == pytest.approx(found.commits * 86_400)
    assert found.log_bytes >= 2 * 86_400 * found.body_bytes
    assert found.first.share == max(use.value / use.ceiling for use in found.uses)
    assert all(use.source for use in found.uses)
    # Half a frame a second: each run is saved twice a minute.
    assert found.saves == pytest.approx(1_000 / 30)
    (transactions,) = [use for use in found.uses if use.name == "transactions/s of a database"]
    assert transactions.value == pytest.approx(found.commits + found.saves)


def test_a_commit_takes_what_waits() -> None:
    """Few frames: a commit each; many: as many as the connection can."""
    assert cost.commits_of_writer(16, 0.1, 0.002) == pytest.approx(1.6, rel=0.01)
    assert cost.commits_of_writer(16, 1e6, 0.002) == pytest.approx(500, rel=0.01)
    assert cost.commits_of_writer(0, 5, 0.002) == 0
    rates = [cost.commits_of_writer(16, 2.0**k, 0.002) for k in range(-4, 12)]
    assert rates == sorted(rates)


@pytest.mark.parametrize("name", ["runs", "ranks", "frames", "frame_bytes", "values"])
def test_more_load_is_never_less_work(name: str) -> None:
    plan = cost.Plan()
    more = cost.answer(dataclasses.replace(plan, **{name: getattr(plan, name) * 2}))
    for before, after in zip(cost.answer(plan).uses, more.uses):
        assert after.value >= before.value - 1e-9, before.name
    assert more.first.share >= cost.answer(plan).first.share


def test_more_databases_share_the_load() -> None:
    one, four = (cost.answer(cost.Plan(servers=8, databases=k)) for k in (1, 4))
    assert four.wal_bytes == pytest.approx(one.wal_bytes / 4)
    assert four.connections < one.connections and four.server_frames == pytest.approx(
        one.server_frames
    )


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("servers", 0, r"servers = 0: must be in \[1, 64\]"),
        ("servers", 65, r"servers = 65: must be in \[1, 64\]"),
        ("lease_seconds", 1, r"lease_seconds = 1: must be in \[2, 60\]"),
        ("frames", float("nan"), r"frames = nan"),
    ],
)
def test_plans_out_of_range_are_refused(field: str, value: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cost.Plan(**{field: value})  # type: ignore[arg-type]


def test_a_hundred_thousand_runs_are_spread_and_go_on() -> None:
    lease = 5
    spread = simulation.spread(100_000, 128, 32, seed=11)
    assert spread == simulation.spread(100_000, 128, 32, seed=11)
    assert spread != simulation.spread(100_000, 128, 32, seed=12)
    assert sum(map(sum, spread.partitions)) == sum(spread.servers) == 100_000
    assert spread.database_imbalance < 1.06
    # As even as chance: the fullest of 2,048, mean 49, is 3.5 deviations of 7 above it.
    assert 1.3 < spread.partition_imbalance < 1.8
    for owner in spread.owners:
        sizes = [owner.count(server) for server in set(owner)]
        assert max(sizes) - min(sizes) <= 1
    chance = random.Random(1)
    counts, owner = spread.partitions[0], spread.owners[0]
    look, renew = cost.look_seconds(lease), cost.renew_seconds(lease)
    free = simulation.Takeover(start_s=0, bytes_per_second=1e12, retry_s=0)
    for _ in range(200):
        killed = simulation.kill(counts, owner, 0, lease, free, chance, senders=5)
        assert killed.partitions == owner.count(0)
        assert killed.runs == sum(n for n, server in zip(counts, owner) if server == 0)
        assert lease - renew <= killed.expired_s <= lease
        assert all(killed.expired_s <= at <= lease + look for at in killed.owned_s)
        assert min(killed.welcomed_s) >= min(killed.served_s)
    slow = dataclasses.replace(free, bytes_per_second=1e8)
    assert max(simulation.kill(counts, owner, 0, lease, slow, random.Random(1)).served_s) > max(
        simulation.kill(counts, owner, 0, lease, free, random.Random(1)).served_s
    )
    with pytest.raises(ValueError, match="nobody is left"):
        simulation.kill([1] * 64, [0] * 64, 0, lease, free, chance)


def test_quantiles() -> None:
    assert [simulation.quantile([3, 1, 2, 4], q) for q in (0.25, 0.5, 0.51, 1)] == [1, 2, 3, 4]


def test_the_document_calls_it_as_it_is() -> None:
    document = (ROOT / "docs/operate/sizing.md").read_text()
    (block,) = re.findall(
        r"<!-- run by tests/deploy/test_sizing.py -->\n```sh\n(.*?)```", document, re.S
    )
    assert block.count("deploy/sizing ") == 3
    done = subprocess.run(["bash", "-euc", block], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # What the table says of the ceilings is what is shipped.
    shipped = cost.Ceilings()
    assert f"| {shipped.database_transactions.value:.0f} |" in document
    assert f"| {shipped.database_bytes.value / 1e6:.0f} MB/s |" in document


def test_the_command(tmp_path: Path) -> None:
    told = json.loads(
        subprocess.check_output([*COMMAND, "cost", "--runs", "100", "--json"], text=True)
    )
    assert told["frames"] == 100
    text = subprocess.check_output(
        [*COMMAND, "cost", "--runs", "100000", "--servers", "10"], text=True
    )
    assert "IS EXCEEDED" in text
    given = subprocess.check_output([*COMMAND, "cost", "--set", "database_bytes=1"], text=True)
    assert "bytes/s into a database's log IS EXCEEDED" in given and "given" in given
    wrong = subprocess.run([*COMMAND, "cost", "--set", "nothing=1"], capture_output=True, text=True)
    assert wrong.returncode == 1 and "known are commit_s" in wrong.stderr
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.webp"
    small = ["--runs", "500", "--servers", "4", "--databases", "2", "--plot", str(picture)]
    said = json.loads(subprocess.check_output([*COMMAND, "simulate", *small], text=True))
    assert said["kills"] == 40 and picture.stat().st_size > 1_000
