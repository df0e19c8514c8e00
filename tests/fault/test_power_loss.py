"""Goal: a power cut takes nothing that was acknowledged, and nothing that was sent to people.
Method: the real server on a disk that writes down each change and each sync (faulty_disk.c), under
trainers that keep a ledger.  It is killed at random, and its folder becomes what the disk holds.
That is what was synced and an arbitrary choice of 4 KiB pages, lengths and directory entries of the
rest.
The seed is printed and can be given by BELLWETHER_SEED; `./check --long` cuts the power more often.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import Fleet
from bellwether_process import Server
from faulty_disk import SYNC_END, WRITE, FaultyDisk

CUTS = 50 if os.environ.get("BELLWETHER_LONG") else 6
SEED = int(os.environ.get("BELLWETHER_SEED", time.time_ns() % 1_000_000))
# Small segments and buffers, so that a life of seconds rotates, flushes and compacts.
CONFIG = "storage: {wal_segment_bytes: 4194304, wal_bytes_flush: 8388608}\n"


def test_the_journal_sees_every_segment_and_its_syncs(tmp_path: Path) -> None:
    """The disk is not blind: each acknowledged byte of the log went through it."""
    disk = FaultyDisk(tmp_path / "disk", journal=True)
    server = Server(tmp_path, CONFIG)
    server.storage, server.environment = disk.root / "data", disk.environment
    with server:
        fleet = Fleet(server, tmp_path, runs=1, period=0.01, layers=4, heads=4)
        fleet.await_acks(100)
        fleet.kill()
    kinds = [record[0] for record in disk.records()]
    # One may be of many frames: how many depends on how quick the disk is.
    told = {line for line in fleet.ledger.path.read_text().splitlines() if line.startswith("ack ")}
    assert kinds.count(SYNC_END) >= len(told) > 0, "an acknowledgement without a sync"
    written = sum(record[3] for record in disk.records() if record[0] == WRITE)
    assert written >= 100 * 4 * 16 * 4
    for trainer in fleet.trainers:
        trainer.abandon()
    fleet.watcher.stop()


def test_a_disk_that_lies_is_found_out(tmp_path: Path) -> None:
    """The check can fail: of a sync that was none something is missing after the cut."""
    disk = FaultyDisk(tmp_path / "disk", journal=True)
    server = Server(tmp_path, CONFIG)
    server.storage, server.environment = disk.root / "data", disk.environment
    server.start()
    fleet = Fleet(server, tmp_path, runs=1, period=0.01, layers=4, heads=4)
    fleet.await_acks(50)
    disk.set(lies=1)
    fleet.await_acks(200)
    fleet.kill()
    for trainer in fleet.trainers:
        trainer.abandon()
    fleet.watcher.stop()
    disk.cut_power(seed=1)
    disk.set(lies=0)
    with pytest.raises(AssertionError, match="missing|is damaged"):
        with server:  # It refuses to start, or has lost what it acknowledged.
            fleet.check_acked()


def test_power_cuts_lose_nothing_acknowledged(tmp_path: Path) -> None:
    print(f"BELLWETHER_SEED={SEED}")
    chance = random.Random(SEED)
    disk = FaultyDisk(tmp_path / "disk", journal=True)
    server = Server(tmp_path, CONFIG)
    server.storage, server.environment = disk.root / "data", disk.environment
    server.start()
    fleet = Fleet(server, tmp_path, runs=4, period=0.02, layers=8, heads=16)
    unsynced = 0
    for cut in range(CUTS):
        fleet.await_acks(40)
        time.sleep(chance.uniform(0, 3 if cut % 3 == 2 else 0.3))
        fleet.kill()
        unsynced += disk.cut_power(chance.randrange(1 << 30))
        server.start()
        fleet.check_acked()
    assert unsynced > 0, "every cut found everything synced: the disk forgets nothing"
    fleet.await_acks(40)
    fleet.finish()
    assert server.stop() == 0, server.log()
