"""Goal: nothing acknowledged is lost and nothing is applied twice, whatever is killed.
Method: kill -9 of the real server and of the real sender, many times at random moments, while a
client pushes.  Every step carries its own number as its loss.  So the stored series shows each step
that is missing, doubled or wrong.  The seed is printed and can be given by BELLWETHER_SEED.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, wait_for

from bellwether.client import Block, RunClient, RunOptions

LAYERS, HEADS = 4, 8
KILLS = 200 if os.environ.get("BELLWETHER_LONG") else 20
SEED = int(os.environ.get("BELLWETHER_SEED", time.time_ns() % 1_000_000))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    print(f"BELLWETHER_SEED={SEED}")
    with Server(tmp_path) as running:
        yield running


class Trainer:
    """Pushes a step each millisecond, on a thread of its own, until stopped."""

    def __init__(self, server: Server, run: str) -> None:
        self.run = run
        self.client = RunClient(RunOptions(run=run, layers=LAYERS, heads=HEADS, server=server.grpc))
        self.steps = 0
        self.dropped: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._push_all)
        self._thread.start()

    def _push_all(self) -> None:
        rows = [float(LAYERS * HEADS)] * (LAYERS * HEADS)
        while not self._stop.wait(0.001):
            step = self.steps
            blocks = [
                Block("loss", [float(step)]),
                Block("wq_sigma", [float(step)] * (LAYERS * HEADS), 0, LAYERS, 0, HEADS),
                Block("rows", rows, 0, LAYERS, 0, HEADS),
            ]
            if not self.client.push(step, blocks):
                self.dropped.append(step)
            self.steps += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def expect_whole(server: Server, trainer: Trainer) -> None:
    """Every pushed step is stored once, with its own values, in order."""
    trainer.stop()
    assert trainer.client.flush(60), trainer.client.counters()
    counters = trainer.client.counters()
    expected = [step for step in range(trainer.steps) if step not in set(trainer.dropped)]
    assert counters.frames_queued == len(expected) == counters.frames_acked
    # Acknowledged is in the log, and what is read comes behind it.
    wait_for("all is stored", lambda: len(server.series(trainer.run, "loss")) >= len(expected))
    stored = server.series(trainer.run, "loss")
    assert sorted(stored) == expected, sorted(set(expected) ^ set(stored))[:20]
    assert all(step == value for step, value in stored.items())
    sigma = server.series(trainer.run, "wq_sigma", LAYERS - 1, HEADS - 1)
    assert sigma == stored
    # The run's snapshot follows within 50 ms.
    wait_for(
        "each frame is counted once",
        lambda: int(server.call("GetRun", run=trainer.run)["frames"]) == len(expected),
    )


def test_killing_the_server_loses_nothing_acknowledged(server: Server) -> None:
    chance = random.Random(SEED)
    trainer = Trainer(server, "server-killed")
    for _ in range(KILLS):
        # Each kill hits a stream at work.
        acked = trainer.client.counters().frames_acked
        wait_for("an ack", lambda acked=acked: trainer.client.counters().frames_acked > acked, 60)
        time.sleep(chance.uniform(0, 0.2))
        acked = trainer.client.counters().frames_acked
        server.kill()
        server.start()
        server.await_applied()
        # What was acknowledged before the kill is there, in the log's order.
        stored = server.series(trainer.run, "loss")
        missing = [step for step in range(acked) if step not in stored and step not in trainer.dropped]
        assert not missing, f"acknowledged {acked}, missing {missing[:10]}"
    wait_for(
        "acks go on after the last kill",
        lambda acked=trainer.client.counters().frames_acked: trainer.client.counters().frames_acked > acked + 10,
    )
    expect_whole(server, trainer)
    assert trainer.client.counters().reconnects >= KILLS


def test_killing_the_sender_loses_and_doubles_nothing(server: Server) -> None:
    chance = random.Random(SEED + 1)
    trainer = Trainer(server, "sender-killed")
    for kill in range(KILLS):
        # Its acks go on: the sender was started again and took up where it was.
        acked = trainer.client.counters().frames_acked
        wait_for("an ack", lambda acked=acked: trainer.client.counters().frames_acked > acked, 60)
        time.sleep(chance.uniform(0, 0.1))
        os.kill(trainer.client.counters().sender_pid, signal.SIGKILL)
        wait_for("the restart is counted", lambda kill=kill: trainer.client.counters().sender_restarts > kill, 60)
    expect_whole(server, trainer)


def test_termination_drains(server: Server) -> None:
    trainer = Trainer(server, "drained")
    wait_for("acks", lambda: trainer.client.counters().frames_acked > 100)
    started = time.monotonic()
    assert server.stop() == 0, server.log()
    assert time.monotonic() - started < 15
    server.start()
    expect_whole(server, trainer)
