"""How long a clean stop (SIGTERM) of one of three servers of a cluster keeps its trainers waiting:
from the signal to the first acknowledgement of each at another server; the slowest counts.

Trainers and servers are the fault tests' own (tests/support/cluster_fleet.py), on a PostgreSQL of
its own with synchronous standbys, one of which must confirm each commit.  Prints a line for each
stop, and the median and the largest of all.  A line has times in ms since the signal.  They are
when the trainers were notified, when the others had first and last taken up a partition, when
trainers were welcomed and acknowledged, and when the process had ended.

    python tests/bench/stop_bench.py --stops 10 --standbys 1
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server
from cluster_fleet import Cluster, RoamingTrainer
from postgres_processes import start_primary, synchronous_standbys


class TimedTrainer(RoamingTrainer):
    """Remembers when it was first welcomed and acknowledged elsewhere than at `left`."""

    left = ""
    told = welcomed = acked = 0.0

    def leaves(self, address: str) -> None:
        self.told = self.welcomed = self.acked = 0.0
        self.left = address

    def _followed(self, answers: Iterator[Any]) -> Iterator[Any]:
        here = self.address
        try:
            for answer in super()._followed(answers):
                if self.left and here != self.left:
                    now = time.time()
                    if answer.HasField("welcome") and not self.welcomed:
                        self.welcomed = now
                    if answer.HasField("ack") and not self.acked:
                        self.acked = now
                yield answer
        finally:
            if here == self.left and not self.told:
                self.told = time.time()


def taken_up(server: Server, since: float) -> list[float]:
    """When it began to serve partitions, as its log says."""
    moments = []
    for line in server.log().splitlines():
        if "is served, epoch" not in line:
            continue
        (stamp,) = re.findall(r"\d{4}-\d\d-\d\dT[\d:.]+Z?", line)[:1]
        moment = datetime.fromisoformat(stamp.rstrip("Z")).replace(tzinfo=timezone.utc).timestamp()
        if moment >= since:
            moments.append(moment)
    return moments


def one_stop(cluster: Cluster, victim: Server) -> dict[str, int]:
    hit = [t for t in cluster.served_by(victim) if isinstance(t, TimedTrainer)]
    for trainer in hit:
        trainer.leaves(victim.grpc)
    assert victim.process is not None
    began = time.time()
    victim.process.terminate()
    ended = 0.0
    deadline = began + 60
    while not all(trainer.acked for trainer in hit) or not ended:
        assert time.time() < deadline, "not everybody was acknowledged elsewhere within a minute"
        if not ended and victim.process.poll() is not None:
            ended = time.time()
        time.sleep(0.002)
    served = [at for s in cluster.alive() for at in taken_up(s, began)]

    def ms(at: float) -> int:
        return round(1000 * (at - began))

    return {
        "trainers": len(hit),
        "told": ms(max(trainer.told for trainer in hit)),
        "taken_first": ms(min(served)),
        "taken_last": ms(max(served)),
        "welcomed": ms(max(trainer.welcomed for trainer in hit)),
        "acked_median": ms(statistics.median(trainer.acked for trainer in hit)),
        "acked": ms(max(trainer.acked for trainer in hit)),
        "ended": ms(ended),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--standbys", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=50)
    parser.add_argument("--period", type=float, default=0.1, help="seconds between two frames")
    parser.add_argument("--warm-up", type=float, default=30, help="seconds before the first stop")
    flags = parser.parse_args()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        primary = start_primary()
        stack.callback(primary.remove)
        stack.enter_context(synchronous_standbys(primary, flags.standbys))
        cluster = stack.enter_context(Cluster(Path(folder), primary, 3))
        cluster.add_trainers(flags.trainers, flags.period, of=TimedTrainer)
        cluster.await_acks(5)
        time.sleep(flags.warm_up)
        stops = []
        for i in range(flags.stops):
            victim = cluster.servers[i % 3]
            load = os.getloadavg()[0]
            stops.append(one_stop(cluster, victim))
            print({"load": round(load, 1), **stops[-1]}, flush=True)
            victim.start()
            cluster.await_balance()
            cluster.await_acks(5)
            time.sleep(3)
        for what in ("acked", "ended"):
            all_of_them = [stop[what] for stop in stops]
            print(f"{what}: median {statistics.median(all_of_them)} ms, most {max(all_of_them)} ms")
        cluster.check_log()


if __name__ == "__main__":
    main()
