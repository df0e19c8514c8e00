"""Goal: a server that is cut off from the database, and not killed, loses its partitions to others.
It acknowledges and commits nothing for them any more, and has its share again when the link is
back.  No alert is doubled, and its trainers go on elsewhere.
Method: real PostgreSQL and three real bellwetherd, each in a network name space of its own with two
pairs of virtual cards, one to the database and one to the trainers.  A card goes dark, so that
nothing is confirmed or closed.  Needs `ip` and root.  Row 7 of the fault matrix.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, free_port, wait_for
from cluster_fleet import LEASE_S, Cluster, RoamingTrainer
from postgres_processes import Postgres, dsn_of, start_primary

RUNS, PERIOD, CUT_S = 12, 0.05, 20.0
# As root the name space of users stays as it is: PostgreSQL needs another user than root.
APART = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]


def possible() -> bool:
    return (
        shutil.which("ip") is not None
        and os.geteuid() == 0
        and subprocess.run([*APART, "true"], capture_output=True).returncode == 0
    )


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What main() found, in its name space."""
    if not possible():
        pytest.skip("needs `ip`, and root for PostgreSQL's user")
    folder = tmp_path_factory.mktemp("cut")
    inside = [sys.executable, str(Path(__file__).resolve()), str(folder)]
    done = subprocess.run(
        [*APART, "--kill-child", *inside], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


def test_server_cut_off_from_the_database_owns_nothing(cut: Any) -> None:
    assert cut["taken_s"] <= LEASE_S + 3
    assert cut["alerts"] > 0, "the sick run was not told of"
    assert cut["acked_s"] <= 10 and cut["balanced_s"] <= 15, "the link is back"


def test_trainers_of_a_cut_off_server_move(cut: Any) -> None:
    assert cut["moved"] == cut["at_victim"], "trainers wait at a server that is cut off"


def run(*words: str) -> None:
    subprocess.run(words, check=True)


class Apart(Server):
    """A bellwetherd in a name space: 10.72.N.2 to the database, 10.73.N.2 to trainers."""

    def __init__(self, folder: Path, number: int) -> None:
        config = f"cluster:\n  dsn_file: dsn\n  node: {folder.name}\n  lease_seconds: {LEASE_S}\n"
        super().__init__(folder, config, "--insecure-i-understand")
        self.number = number
        self.grpc = f"10.73.{number}.2:{free_port()}"
        self.http = f"10.73.{number}.2:{free_port()}"
        self.holder = subprocess.Popen(["unshare", "-n", "sleep", "600"])
        wait_for(
            "a name space",
            lambda: (
                os.readlink(f"/proc/{self.holder.pid}/ns/net") != os.readlink("/proc/self/ns/net")
            ),
        )
        self.enter = ["nsenter", "-t", str(self.holder.pid), "-n"]
        run(*self.enter, "ip", "link", "set", "lo", "up")
        for what, net in (("db", 72), ("tr", 73)):
            near, far = f"{what}{number}n", f"{what}{number}f"
            peer = ("peer", "name", far, "netns", str(self.holder.pid))
            run("ip", "link", "add", near, "type", "veth", *peer)
            run("ip", "addr", "add", f"10.{net}.{number}.1/24", "dev", near)
            run("ip", "link", "set", near, "up")
            run(*self.enter, "ip", "addr", "add", f"10.{net}.{number}.2/24", "dev", far)
            run(*self.enter, "ip", "link", "set", far, "up")
        # Where trainers come from the other servers are, too: they ask each other.
        others = ("10.73.0.0/16", "via", f"10.73.{number}.1")
        run(*self.enter, "ip", "route", "add", *others)

    def program(self, name: str) -> list[str]:
        return [*(self.enter if name == "bellwetherd" else []), *super().program(name)]

    def set_database_link(self, state: str) -> None:
        """`up` or `down`."""
        run(*self.enter, "ip", "link", "set", f"db{self.number}f", state)


@contextmanager
def cluster_apart(folder: Path, primary: Postgres) -> Iterator[Cluster]:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # Of this name space.
    cluster = Cluster(folder, primary, 3)
    servers = [Apart(server.folder, i) for i, server in enumerate(cluster.servers)]
    cluster.servers = list(servers)
    for server in servers:
        dsn = dsn_of(primary).replace("127.0.0.1", f"10.72.{server.number}.1")
        (server.folder / "dsn").write_text(dsn + "\n")
    try:
        with cluster:
            yield cluster
    finally:
        for server in servers:
            server.holder.kill()
            server.holder.wait()


def main(folder: Path) -> None:
    run("ip", "link", "set", "lo", "up")
    primary = start_primary()
    try:
        primary.configure(listen_addresses="*")
        with open(primary.data / "pg_hba.conf", "a") as hba:
            hba.write("host all all 10.72.0.0/16 scram-sha-256\n")
        primary.stop()
        primary.start()
        with cluster_apart(folder, primary) as cluster:
            check(cluster)
    finally:
        primary.remove()


def rose(cluster: Cluster, trainer: RoamingTrainer, before: dict[tuple[str, int], int]) -> bool:
    key = trainer.run, 0
    return cluster.ledger.acked.get(key, 0) > before.get(key, 0)


def check(cluster: Cluster) -> None:
    cluster.add_trainers(RUNS, PERIOD, sick_from=90)
    cluster.await_acks(5)
    sick = cluster.trainers[-1]
    # The one whose run is about to fall ill is cut off: its alert is on both sides of the cut.
    victim = next(server for server in cluster.servers if server.grpc == sick.serving)
    assert isinstance(victim, Apart)
    name = victim.folder.name
    hit = cluster.served_by(victim)
    others = [trainer for trainer in cluster.trainers if trainer not in hit]
    victim.set_database_link("down")
    cut = time.monotonic()
    wait_for(
        "others own everything",
        lambda: name not in (owned := cluster.owners()) and sum(owned.values()) == 64,
        30,
    )
    taken = time.monotonic() - cut
    # From here on nothing that the victim says counts.
    epochs = {
        int(p): int(epoch)
        for p, epoch in cluster.database.sql("SELECT p, epoch FROM bellwether.lease;")
    }
    before = dict(cluster.ledger.acked)
    waits = [trainer for trainer in hit if trainer.serving == victim.grpc]
    time.sleep(3)
    # An acknowledgement once more is a sign of life, and nothing new.
    told = [t.run for t in waits if rose(cluster, t, before) and t.serving == victim.grpc]
    assert not told, "acknowledged by a server that is cut off"
    wait_for("others go on", lambda: all(rose(cluster, t, before) for t in others), 8)
    moved = 0
    while time.monotonic() - cut < CUT_S and moved < len(hit):
        moved = sum(t.serving != victim.grpc and rose(cluster, t, before) for t in hit)
        time.sleep(0.1)
    moved_s = time.monotonic() - cut
    victim.set_database_link("up")
    back = time.monotonic()
    before = dict(cluster.ledger.acked)
    wait_for(
        "all are acknowledged again",
        lambda: all(rose(cluster, trainer, before) for trainer in cluster.trainers),
        30,
    )
    acked_s = time.monotonic() - back
    cluster.await_balance(40)
    balanced_s = time.monotonic() - back
    cluster.await_acks(5)
    tables = " UNION ALL ".join(f"SELECT * FROM bellwether.frames_{i}" for i in range(4))
    result = cluster.check()
    rows = cluster.database.sql(
        f"SELECT DISTINCT p, epoch, split_part(owner, '/', 1) FROM ({tables}) AS f;"
    )
    for p, epoch, owner in rows:
        assert owner != name or int(epoch) != epochs[int(p)], "it owned what others had taken"
    found = {
        **result,
        "at_victim": len(hit),
        "taken_s": taken,
        "moved": moved,
        "moved_s": moved_s,
        "acked_s": acked_s,
        "balanced_s": balanced_s,
    }
    print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
