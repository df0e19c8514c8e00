"""Goal: when a server comes back, its clients do not come back all at once.  The jitter of their
waits spreads them, none is refused for good, and all that they held arrives.
Method: as many real senders as a small machine can start, each with a run of its own.  The server
is killed for longer than the waits need to reach their ceiling of 30 s, and started again.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, wait_for

from bellwether.client import Block, RunClient, RunOptions

LONG = bool(os.environ.get("BELLWETHER_LONG"))
SENDERS = int(os.environ.get("BELLWETHER_STORM_SENDERS", "200"))
AWAY_SECONDS = 60.0
CEILING_SECONDS = 30.0  # client_lib/src/backoff.h
LAYERS, HEADS = 8, 16


@pytest.mark.skipif(not LONG, reason="two minutes and 200 processes; BELLWETHER_LONG=1")
def test_senders_come_back_spread_and_drain(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        clients = [
            RunClient(
                RunOptions(
                    run=f"storm-{i}", layers=LAYERS, heads=HEADS, server=server.grpc,
                    log_path=str(tmp_path / "senders.log"),
                )
            )
            for i in range(SENDERS)
        ]  # fmt: skip
        step = 0

        def push() -> None:
            nonlocal step
            values = [float(step)] * (LAYERS * HEADS)
            blocks = [Block("loss", [float(step)]), Block("wq_sigma", values, 0, LAYERS, 0, HEADS)]
            for client in clients:
                assert client.push(step, blocks)
            step += 1

        def streaming() -> int:
            return sum(client.counters().link == "streaming" for client in clients)

        push()
        wait_for("all senders stream", lambda: streaming() == SENDERS, 240)
        server.kill()
        away_until = time.monotonic() + AWAY_SECONDS
        while time.monotonic() < away_until:
            push()
            time.sleep(1)
        began = time.monotonic()
        server.start()
        back: dict[int, float] = {}
        while len(back) < SENDERS:
            now = time.monotonic() - began
            assert now < 3 * CEILING_SECONDS, f"{SENDERS - len(back)} of {SENDERS} are not back"
            for i, client in enumerate(clients):
                if i not in back and client.counters().link == "streaming":
                    back[i] = now
            time.sleep(0.05)
        for client in clients:
            assert client.flush(60), client.counters()
        drained = time.monotonic() - began
        for client in clients:
            counters = client.counters()
            assert counters.frames_acked == counters.frames_queued == step, counters
        for i in range(0, SENDERS, 20):
            assert server.series(f"storm-{i}", "loss") == {s: float(s) for s in range(step)}
        times = sorted(back.values())
        busiest = max(sum(t <= x < t + 1 for x in times) for t in times)
        print(
            f"{SENDERS} senders, {AWAY_SECONDS:.0f} s away: back after "
            f"{times[len(times) // 2]:.1f} s in the median, {times[-1]:.1f} s at most, "
            f"{busiest} within the busiest second; "
            f"all {step * SENDERS} frames durable after {drained:.1f} s"
        )
        # Uniform over the ceiling would be 1/30 a second.
        assert busiest < SENDERS / 5
        for client in clients:
            client.close()
