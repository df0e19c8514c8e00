"""Goal: a clock that jumps by an hour, or by a day, changes nothing of what is stored, of the order
of seqs, or of what is taken.  What needs a clock uses one that does not jump.
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
from bellwether_process import Server

LIBRARIES = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")


@pytest.mark.skipif(
    not LIBRARIES or shutil.which("faketime") is None, reason="needs Debian's package faketime"
)
def test_jumps_of_the_clock_change_nothing(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    server = Server(tmp_path)
    # The monotonic clock stays true, as it does on a real machine.
    server.environment = {
        "LD_PRELOAD": LIBRARIES[0],
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    clock.write_text("+0")
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
