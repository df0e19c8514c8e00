"""Goal: a clock that jumps by an hour, a day or years changes nothing of what is stored, of its age,
of the order of seqs, or of what is taken.  What needs a clock uses one that does not jump.
Method: bellwetherd under libfaketime, which moves its wall clock while it runs, under trainers that
keep a ledger.
"""

from __future__ import annotations

import glob
import shutil
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import Fleet
from bellwether_process import Server, wait_for

from bellwether.client import Block, RunClient, RunOptions

LIBRARIES = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")
DAY = 1 / 86_400  # A second.
STEPS = 600
needs_faketime = pytest.mark.skipif(
    not LIBRARIES or shutil.which("faketime") is None, reason="needs Debian's package faketime"
)


def moved_by(clock: Path) -> dict[str, str]:
    """The monotonic clock stays true, as it does on a real machine."""
    clock.write_text("+0")
    return {
        "LD_PRELOAD": LIBRARIES[0],
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@needs_faketime
def test_jumps_of_the_clock_change_nothing(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    server = Server(tmp_path)
    server.environment = moved_by(clock)
    with server:
        fleet = Fleet(server, tmp_path, 3, 0.02, layers=4, heads=8)
        for jump in ("+1h", "-1h", "+1d", "-30d", "+0"):
            fleet.await_acks(60)
            clock.write_text(jump)
            time.sleep(0.3)
        started = int(server.call("GetServerInfo")["started_unix_ns"])
        assert abs(started / 1e9 - time.time()) < 600
        clock.write_text("-1h")
        fleet.await_acks(60)
        fleet.kill()
        server.start()  # An hour before what its log says.
        fleet.check_acked()
        fleet.await_acks(60)
        # libfaketime does not move the kernel's own timers: what waits for a while is not judged here.
        fleet.kill()
        clock.write_text("+0")
        server.start()
        fleet.check_acked()
        fleet.await_acks(60)
        fleet.finish()


@needs_faketime
def test_clock_set_years_ahead_makes_nothing_old(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    retention = f"retention: {{raw_days: {4 * DAY:.9f}, rounded_days: 1, summary_days: 2}}\n"
    server = Server(tmp_path, retention)
    server.environment = moved_by(clock)
    with server:
        with RunClient(RunOptions(run="old", layers=1, heads=1, server=server.grpc)) as client:
            for step in range(STEPS):
                while not client.push(step, [Block("loss", [1 / (step + 3)])]):
                    client.flush(5)
            assert client.flush(60), client.counters()
        name = "bellwether_retention_last_pass_timestamp_seconds"
        wait_for("all is stored", lambda: len(server.series("old", "loss")) == STEPS)
        wait_for("12 bits", lambda: server.metric("bellwether_retention_rows_total") > 0)
        rows = server.metric("bellwether_retention_rows_total")
        for jump in ("+10d", "+3650d", "+0", "+30d"):
            clock.write_text(jump)
            now = time.time() + 86_400 * int(jump.rstrip("d"))
            # Of the second pass behind the jump all is done.
            for _ in range(2):
                last = server.metric(name)
                wait_for("a pass", lambda last=last: server.metric(name) != last)
            assert abs(server.metric(name) - now) < 3600
            assert len(server.series("old", "loss")) == STEPS, jump
        assert server.metric("bellwether_retention_rows_total") == rows
        assert "the clock was set ahead by" in server.log()
