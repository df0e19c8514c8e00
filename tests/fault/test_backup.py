"""Goal: a backup that is taken while the server works is whole, of one point in time, and a server
starts from it and goes on; what is damaged is found, and said exactly.
Method: the real programs; trainers that keep a ledger while backups are taken; bytes of a stopped
server's files flipped, files cut and removed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import Fleet
from bellwether_process import BIN, Server, wait_for
from faulty_disk import FaultyDisk

CONFIG = "storage: {wal_segment_bytes: 2097152, wal_bytes_flush: 4194304}\n"


def bellwetherd(*words: object, exit_code: int = 0) -> str:
    done = subprocess.run(
        [BIN / "bellwetherd", *map(str, words)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == exit_code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def refused_start(folder: Path, storage: Path) -> str:
    """What a server that must not start on the folder says."""
    server = Server(folder, CONFIG)
    server.storage = storage
    try:
        server.start()
    except AssertionError as error:
        return str(error)
    raise AssertionError(f"a server began on {storage}")


def test_backup_under_load_restores_to_a_working_server(tmp_path: Path) -> None:
    with Server(tmp_path, CONFIG) as server:
        fleet = Fleet(server, tmp_path, 3, 0.01, layers=8, heads=16)
        for number in range(3):
            fleet.await_acks(150)
            acked = dict(fleet.ledger.acked)
            assert "a whole copy" in bellwetherd(
                f"--storage.path={server.storage}", "backup", tmp_path / f"b{number}"
            )
        assert not (server.storage / "checkpoint").exists()
        bellwetherd(
            f"--storage.path={server.storage}", "backup", tmp_path / "b0", exit_code=1
        )  # Exists.
        fleet.finish()
        alerts = server.alert_log("run-2")
    # The machine is lost.  Another one gets the newest backup.
    bellwetherd(f"--storage.path={tmp_path / 'new'}", "restore", tmp_path / "b2")
    bellwetherd(
        f"--storage.path={tmp_path / 'new'}", "restore", tmp_path / "b2", exit_code=1
    )  # Not empty.
    second = Server(tmp_path, CONFIG)
    second.storage = tmp_path / "new"
    with second:
        second.await_applied()
        for (run, _), seq in acked.items():
            stored = second.series(run, "loss")
            assert set(stored) >= set(range(1, seq + 1)), run
            assert sorted(stored) == list(range(1, len(stored) + 1)), "not of one point in time"
        assert second.alert_log("run-2") == alerts
        again = Fleet(second, tmp_path, 1, 0.01, sick_from=0, layers=8, heads=16)
        again.await_acks(50)
        again.finish()


def test_a_backup_of_a_stopped_server_is_the_same_folder(tmp_path: Path) -> None:
    with Server(tmp_path, CONFIG) as server:
        fleet = Fleet(server, tmp_path, 1, 0.01, layers=4, heads=8)
        fleet.await_acks(100)
        fleet.finish()
        bellwetherd(f"--storage.path={server.storage}", "check-data", exit_code=1)  # In use.
        assert server.stop() == 0
    said = bellwetherd(f"--storage.path={server.storage}", "check-data")
    assert "whole" in said
    assert "1 runs" in said
    assert "a whole copy" in bellwetherd(
        f"--storage.path={server.storage}", "backup", tmp_path / "cold"
    )
    assert "whole" in bellwetherd(f"--storage.path={tmp_path / 'cold'}", "check-data")


def test_no_server_starts_while_what_it_left_is_copied(tmp_path: Path) -> None:
    with Server(tmp_path, CONFIG) as server:
        fleet = Fleet(server, tmp_path, 1, 0.01, layers=4, heads=8)
        fleet.await_acks(100)
        fleet.finish()
        assert server.stop() == 0
    disk = FaultyDisk(tmp_path / "backups")
    disk.set(sync_delay_ms=5000)  # Longer than a server needs to find out.
    target = disk.root / "cold"
    backup = subprocess.Popen(
        [BIN / "bellwetherd", f"--storage.path={server.storage}", "backup", str(target)],
        env={**os.environ, **disk.environment},
    )
    wait_for("the copy to begin", lambda: (disk.root / "cold.partial").exists(), 30)
    said = refused_start(tmp_path, server.storage)
    assert "LOCK" in said or "lock" in said, said
    assert backup.poll() is None, "the copy had ended: nothing was shown"
    disk.set(sync_delay_ms=0)
    assert backup.wait(60) == 0
    assert "whole" in bellwetherd(f"--storage.path={target}", "check-data")
    again = Server(tmp_path, CONFIG)
    again.storage = server.storage
    with again:
        pass


def test_damage_is_found_said_and_repaired(tmp_path: Path) -> None:
    with Server(tmp_path, CONFIG) as server:
        fleet = Fleet(server, tmp_path, 2, 0.005, layers=8, heads=16)
        fleet.await_acks(600)
        for trainer in fleet.trainers:
            trainer.abandon()
        fleet.watcher.stop()
        server.kill()
    path = f"--storage.path={server.storage}"
    assert "whole" in bellwetherd(path, "check-data")
    segments = sorted((server.storage / "wal").glob("*.wal"))
    data = bytearray(segments[-1].read_bytes())
    data[4096 + 300] ^= 0x10
    segments[-1].write_bytes(data)
    assert "LSN" in bellwetherd(path, "check-data", exit_code=3)
    assert "LSN" in bellwetherd(path, "check-data", exit_code=3), "a check changed something"
    assert "is damaged" in refused_start(tmp_path, server.storage)
    assert "cut out of the log: " in bellwetherd(path, "check-data", "--repair")
    assert "whole" in bellwetherd(path, "check-data")
    tables = sorted((server.storage / "db").glob("*.sst"), key=lambda table: table.stat().st_size)
    if tables:
        data = bytearray(tables[-1].read_bytes())
        data[len(data) // 3] ^= 0x10
        tables[-1].write_bytes(data)
        said = bellwetherd(path, "check-data", exit_code=3)
        assert tables[-1].name in said
        assert "rows from" in said
        assert tables[-1].name in bellwetherd(path, "check-data", "--repair")


def test_check_and_server_notice_a_missing_log_end(tmp_path: Path) -> None:
    with Server(tmp_path, CONFIG) as server:
        fleet = Fleet(server, tmp_path, 1, 0.01, layers=4, heads=8)
        fleet.await_acks(50)
        server.stop()  # Saves the run, which goes on.
        for trainer in fleet.trainers:
            trainer.abandon()
        fleet.watcher.stop()
    path = f"--storage.path={server.storage}"
    assert "whole" in bellwetherd(path, "check-data")
    for segment in (server.storage / "wal").glob("*.wal"):
        segment.unlink()
    assert "missing from the log" in bellwetherd(path, "check-data", exit_code=3)
    assert "--storage.repair" in refused_start(tmp_path, server.storage)
    assert "repaired" in bellwetherd(path, "check-data", "--repair")
    assert "whole" in bellwetherd(path, "check-data")
    (tmp_path / "new").mkdir()
    again = Server(tmp_path, CONFIG)
    again.storage = server.storage
    with again:
        new = Fleet(again, tmp_path / "new", 1, 0.01, layers=4, heads=8)
        new.await_acks(50)
        new.finish()
