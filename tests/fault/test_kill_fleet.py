"""Goal: under the load of many runs 200 kills of the server lose nothing that was acknowledged,
apply nothing twice and report each alert once; and it takes up its work within seconds each time.
Method: load level L2, 100 runs of a frame of 16 KiB a second.  Each keeps a ledger of the server's
answers (ack_ledger.py).  SIGKILL comes at random moments.  The ledger is compared with the store
after each kill for a few runs and at the end for all.  Short: 10 kills, 20 runs, 5 frames a second.
Replayed by BELLWETHER_SEED, which is printed.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import Fleet
from bellwether_process import Server

LONG = bool(os.environ.get("BELLWETHER_LONG"))
KILLS, RUNS, PERIOD = (200, 100, 1.0) if LONG else (10, 20, 0.2)
SEED = int(os.environ.get("BELLWETHER_SEED", time.time_ns() % 1_000_000))


def test_a_fleet_survives_every_kill(tmp_path: Path) -> None:
    print(f"BELLWETHER_SEED={SEED}")
    chance = random.Random(SEED)
    starts = []
    with Server(tmp_path) as server:
        fleet = Fleet(server, tmp_path, RUNS, PERIOD, sick_from=20)
        fleet.await_acks(RUNS)
        for _ in range(KILLS):
            fleet.await_acks(RUNS // 2)
            time.sleep(chance.uniform(0, 0.5))
            fleet.kill()
            began = time.monotonic()
            server.start()
            starts.append(time.monotonic() - began)
            some = chance.sample(range(RUNS), 3)
            trainers, fleet.trainers = fleet.trainers, [fleet.trainers[i] for i in some]
            fleet.check_acked()
            fleet.trainers = trainers
        fleet.await_acks(RUNS)
        fleet.finish()
    print(
        f"{KILLS} kills, {fleet.ledger.total} frames acknowledged, {len(fleet.ledger.alerts)} alerts told, "
        f"start median {sorted(starts)[len(starts) // 2]:.2f} s, longest {max(starts):.2f} s"
    )
