"""Goal: a disk that is full, slow or broken stops acknowledgements, and nothing else: no crash, no
loss, alerts go on, memory stays bounded; what can heal goes on by itself.
Method: the real server on a disk that fails on demand (faulty_disk.c), under trainers that keep a
ledger.  It also runs on a real file system of 64 MiB where the kernel lets us mount one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import Fleet, Trainer
from bellwether_process import Server, wait_for
from faulty_disk import WAL, FaultyDisk

# Health's answer: SERVING is 1.
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
CONFIG = "storage: {wal_segment_bytes: 2097152, wal_bytes_flush: 4194304}\n"


def health(server: Server) -> bytes:
    with grpc.insecure_channel(server.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        return bytes(check(b"", timeout=30))


def ready(server: Server) -> int:
    try:
        server.get("/-/ready")
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def resident_mb(server: Server) -> float:
    return server.metric("process_resident_memory_bytes") / 2**20


class Place:
    """A server on a failing disk, and its trainers."""

    def __init__(self, folder: Path, config: str = CONFIG) -> None:
        self.disk = FaultyDisk(folder / "disk")
        self.server = Server(folder, config)
        self.server.storage, self.server.environment = (
            self.disk.root / "data",
            self.disk.environment,
        )
        self.server.start()
        self.folder = folder

    def fleet(self, period: float = 0.02, sick_from: int = 40) -> Fleet:
        return Fleet(self.server, self.folder, 3, period, sick_from, layers=8, heads=16)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    with_server = made.server
    yield made
    with_server.__exit__()


def expect_no_acks(fleet: Fleet, seconds: float = 1.5) -> None:
    """Within a second, and then none."""
    time.sleep(1.1)
    before = fleet.ledger.total
    time.sleep(seconds)
    assert fleet.ledger.total == before, "acknowledged on a disk that takes nothing"


def stays_held(server: Server, fleet: Fleet, seconds: float = 1.5) -> bool:
    """Neither serves nor acknowledges anything meanwhile."""
    if health(server) != NOT_SERVING:
        return False
    before = fleet.ledger.total
    time.sleep(seconds)
    return health(server) == NOT_SERVING and fleet.ledger.total == before


def fall_ill(fleet: Fleet) -> Trainer:
    """The last of them does from its next frame on: none of those is acknowledged yet."""
    sick = fleet.trainers[-1]
    sick.sick_from = sick.made + 1
    return sick


def test_below_the_floor_acks_wait_and_alerts_go_on(place: Place) -> None:
    server, disk = place.server, place.disk
    fleet = place.fleet(sick_from=10**9)
    fleet.await_acks(60)
    assert health(server) == SERVING
    disk.set(free_mb=1)
    wait_for("NOT_SERVING", lambda: health(server) == NOT_SERVING)
    assert ready(server) == 503
    expect_no_acks(fleet)
    # The sick run falls ill while nothing can be acknowledged.
    sick = fall_ill(fleet)
    assert fleet.ledger.acked[sick.run, 0] < sick.sick_from
    wait_for(
        "the alert is told",
        lambda: any(run == sick.run for run, _, _ in fleet.ledger.alerts.values()),
    )
    assert fleet.ledger.acked[sick.run, 0] < sick.sick_from
    assert server.metric("bellwether_degraded") >= 1
    disk.set(free_mb=-1)
    wait_for("SERVING", lambda: health(server) == SERVING)
    fleet.await_acks(60)
    fleet.finish()
    assert "acknowledgements go on" in server.log()


def test_a_crash_below_the_floor_loses_nothing_acknowledged(place: Place) -> None:
    server, disk = place.server, place.disk
    fleet = place.fleet(sick_from=10**9)
    fleet.await_acks(60)
    disk.set(free_mb=1)
    wait_for("NOT_SERVING", lambda: health(server) == NOT_SERVING)
    sick = fall_ill(fleet)
    wait_for(
        "an alert of what is not durable",
        lambda: any(run == sick.run for run, _, _ in fleet.ledger.alerts.values()),
    )
    fleet.kill()
    disk.set(free_mb=-1)
    server.start()
    fleet.check_acked()
    fleet.await_acks(60)
    fleet.finish()  # The alert of before the crash is there once, with its number.


def test_slow_syncs_delay_acks_and_lose_none(place: Place) -> None:
    server, disk = place.server, place.disk
    fleet = place.fleet(sick_from=120)
    fleet.await_acks(60)
    before_mb = resident_mb(server)
    disk.set(sync_delay_ms=500)
    fleet.await_acks(100)
    assert max(trainer.late_s for trainer in fleet.trainers) >= 0.5, "the disk was not slow"
    assert resident_mb(server) < before_mb + 200
    sick = fleet.trainers[-1]
    wait_for(
        "the alert is told",
        lambda: any(run == sick.run for run, _, _ in fleet.ledger.alerts.values()),
    )
    disk.set(sync_delay_ms=0)
    fleet.finish()


@pytest.mark.parametrize("call", ["sync_errno", "write_errno"])
def test_an_io_error_of_the_log_is_final_and_said(place: Place, call: str) -> None:
    server, disk = place.server, place.disk
    fleet = place.fleet(sick_from=120)
    fleet.await_acks(60)
    disk.set(where=WAL, **{call: errno.EIO})
    wait_for("NOT_SERVING", lambda: health(server) == NOT_SERVING)
    acked = fleet.ledger.total
    # The same fsync is never tried again: the pages may be gone.
    disk.set(**{call: 0})
    expect_no_acks(fleet)
    assert fleet.ledger.total <= acked + 3 * len(fleet.trainers), (
        "acknowledged by a log that failed"
    )
    assert server.process is not None
    assert server.process.poll() is None, server.log()
    assert "the log failed and takes no more" in server.log()
    assert "Input/output error" in server.log()
    wait_for("streams are refused", lambda: fleet.trainers[0].refused)
    fleet.kill()
    server.start()
    fleet.check_acked()
    fleet.await_acks(60)
    fleet.finish()


def test_a_full_disk_is_waited_for(place: Place) -> None:
    """ENOSPC at every write, also the database's."""
    server, disk = place.server, place.disk
    fleet = place.fleet(period=0.01)
    fleet.await_acks(100)
    disk.set(write_errno=errno.ENOSPC)
    wait_for("NOT_SERVING", lambda: health(server) == NOT_SERVING)
    expect_no_acks(fleet)
    assert server.process is not None
    assert server.process.poll() is None, server.log()
    disk.set(write_errno=0)
    if "the log failed" in server.log():  # It met the full disk in the middle of a segment.
        fleet.kill()
        server.start()
        fleet.check_acked()
    wait_for("SERVING", lambda: health(server) == SERVING)
    fleet.await_acks(100)
    fleet.finish()


class Hog:
    """Somebody else's file: takes all that is left, and what is given back, until it is stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        with open(self._path, "wb", buffering=0) as file:
            while not self._stop.is_set():
                try:
                    file.write(bytes(1 << 16))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    self._stop.wait(0.01)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._path.unlink()


CLONE_NEWNS = 0x00020000


def can_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(
    not can_mount(), reason="mounting a small file system takes root and a mount namespace"
)
def test_a_file_system_of_64_mib_that_fills_up(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(small)], check=True)
    try:
        server = Server(tmp_path, CONFIG)
        server.storage = small / "data"
        with server:
            fleet = Fleet(server, tmp_path, 3, 0.01, layers=8, heads=16)
            fleet.await_acks(100)
            hog = Hog(small / "hog")
            # What the server gives back is room for a while, and then it goes on, if the hog is
            # not at once there to take it.
            wait_for("acknowledgements stop", lambda: stays_held(server, fleet), 60)
            assert server.process is not None
            assert server.process.poll() is None, server.log()
            hog.stop()
            wait_for("SERVING", lambda: health(server) == SERVING)
            fleet.await_acks(100)
            fleet.finish()
            # The database takes seconds to trust the disk again: the log has what it lacks.
            fleet.kill()
            server.start()
            fleet.check_acked()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)
