"""Goal: whatever the network does, training is not held up, the loss is counted to the frame, and
what was kept arrives; a peer that hangs or reads nothing costs the others nothing.
Method: the real client and server with a TCP link of our own between them (tcp_link.py), which is
cut, slowed and broken; processes that are stopped by SIGSTOP; a reader of alerts that never reads.
"""

from __future__ import annotations

import array
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from ack_ledger import Fleet
from bellwether_process import Server, wait_for
from tcp_link import Link

from bellwether.client import Block, RunClient, RunOptions

LAYERS, HEADS = 8, 16
LONG = bool(os.environ.get("BELLWETHER_LONG"))
# Row 5 speaks of ten minutes; in the short run the window must take what comes meanwhile.
CUT_SECONDS = 600.0 if LONG else 6.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running


class Pusher:
    """A trainer's thread; the longest push is what training felt."""

    def __init__(
        self, address: str, run: str, period_s: float, heads: int = HEADS, layers: int = LAYERS
    ) -> None:
        self.run, self.period_s, self.shape = run, period_s, (layers, heads)
        self.client = RunClient(RunOptions(run=run, layers=layers, heads=heads, server=address))
        self.steps, self.refused, self.longest_s = 0, 0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._push)
        self._thread.start()

    def _push(self) -> None:
        layers, heads = self.shape
        while not self._stop.wait(self.period_s):
            values = [float(self.steps)] * (layers * heads)
            blocks = [
                Block("loss", [float(self.steps)]),
                Block("wq_sigma", values, 0, layers, 0, heads),
            ]
            began = time.thread_time()
            taken = self.client.push(self.steps, blocks)
            self.longest_s = max(self.longest_s, time.thread_time() - began)
            self.refused += not taken
            self.steps += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def expect_accounted(server: Server, pusher: Pusher) -> None:
    """Each frame is stored or counted as dropped, here and at the server."""
    pusher.stop()
    assert pusher.client.flush(120), pusher.client.counters()
    counters = pusher.client.counters()
    dropped = counters.frames_dropped_ring + counters.frames_dropped_window
    # Acknowledged is durable; what is read follows.
    wait_for(
        "each frame is stored or counted",
        lambda: len(server.series(pusher.run, "loss")) + dropped >= pusher.steps,
    )
    stored = server.series(pusher.run, "loss")
    assert len(stored) + dropped == pusher.steps, counters
    assert all(step == value for step, value in stored.items())
    told = lambda: int(server.call("GetRun", run=pusher.run)["frames_dropped"])  # noqa: E731
    # The next frame tells of it: those dropped behind the last one are not told yet.
    wait_for(
        "the server knows what was lost",
        lambda: told() <= dropped and (told() > 0) == (dropped > 0),
    )


def test_a_cut_link_costs_the_trainer_nothing_and_catches_up(server: Server) -> None:
    link = Link(server.grpc)
    pusher = Pusher(link.address, "cut", 0.02)
    wait_for("acks", lambda: pusher.client.counters().frames_acked > 20)
    quiet = pusher.longest_s
    link.cut = True
    time.sleep(CUT_SECONDS)
    held = pusher.client.counters()
    assert held.frames_queued - held.frames_acked > 100, (
        "nothing was held back: the link was not cut"
    )
    # On the thread's own clock: what others do on the machine does not count.
    assert pusher.longest_s < max(10 * quiet, 0.05)
    link.cut = False
    link.reset()  # A cable that is back has lost its connections.
    behind = pusher.client.counters().frames_queued
    wait_for("it has caught up", lambda: pusher.client.counters().frames_acked >= behind, 60)
    assert pusher.client.counters().frames_dropped_window == 0 or LONG
    expect_accounted(server, pusher)
    link.close()


def test_a_silent_cut_is_found_within_ten_seconds(server: Server) -> None:
    """Neither end closes anything, and the proxy goes on confirming what is sent: only the server's
    silence shows the cut.  A sending and a silent client find it alike, and come back by
    themselves.
    """
    link = Link(server.grpc)
    sending = Pusher(link.address, "silent", 0.02)
    idle = Pusher(link.address, "idle", 3600)
    idle.client.push(0, [Block("loss", [0.0])])
    wait_for("acks", lambda: sending.client.counters().frames_acked > 20)
    wait_for("its ack", lambda: idle.client.counters().frames_acked == 1)
    time.sleep(10)  # A link that is whole and has little to say is left alone.
    assert idle.client.counters().reconnects == sending.client.counters().reconnects == 0
    link.cut = True
    began = time.monotonic()
    for pusher in (sending, idle):
        wait_for(
            "the client gave the connection up",
            lambda pusher=pusher: pusher.client.counters().link != "streaming",
            15,
        )
    assert time.monotonic() - began < 10
    assert "nothing heard" in idle.client.counters().error
    link.cut = False
    for pusher in (sending, idle):
        wait_for(
            "it is back",
            lambda pusher=pusher: pusher.client.counters().link == "streaming",
            60,
        )
    expect_accounted(server, sending)
    idle.stop()
    link.close()


def test_a_slow_link_thins_and_counts_to_the_frame(server: Server) -> None:
    link = Link(server.grpc)
    link.bytes_per_second = 125_000  # 1 Mbit/s
    link.delay_s = 0.02
    # 256 KiB a frame: ten times what the link takes.
    pusher = Pusher(link.address, "slow", 0.04, heads=1024, layers=64)
    wait_for("the window is full", lambda: pusher.client.counters().frames_dropped_window > 20, 120)
    link.bytes_per_second, link.delay_s = 0, 0.0
    expect_accounted(server, pusher)
    counters = pusher.client.counters()
    steps = sorted(server.series("slow", "loss"))
    gaps = [after - before for before, after in zip(steps, steps[1:])]
    # Thinned, not torn off: what was let in while the window filled lies apart by 2, 4, 8.
    assert {1, 2} <= set(gaps), (sorted(set(gaps)), counters)
    link.close()


def test_a_long_outage_strips_heads_and_counts_each_frame(server: Server) -> None:
    """Near the window's end only the run's signals are sent.  The counter has each such step, at
    the sender, over a sender that is killed, and at the server, over one that is killed.  Steps
    that have no heads by themselves are not counted.
    """
    layers, heads = 16, 1024  # 64 KiB a frame.
    client = RunClient(
        RunOptions(run="away", layers=layers, heads=heads, server=server.grpc, ring_frames=1024)
    )
    values = array.array("f", [1.0]) * (layers * heads)
    pushed = 0

    def push(with_heads: bool = True) -> None:
        nonlocal pushed
        blocks = [Block("loss", [float(pushed)])]
        if with_heads:
            blocks.append(Block("wq_sigma", values, 0, layers, 0, heads))
        wait_for("room in the ring", lambda: client.push(pushed, blocks))
        pushed += 1

    def push_until(stripped: int) -> None:
        while client.counters().frames_stripped < stripped:
            assert pushed < 6000, client.counters()
            push()

    for step in range(20):
        push(with_heads=step % 5 != 0)
    assert client.flush(30), client.counters()
    server.kill()
    push_until(20)
    killed = client.counters().sender_pid
    os.kill(killed, signal.SIGKILL)
    wait_for("another sender", lambda: client.counters().sender_pid not in (0, killed))
    push_until(60)
    server.start()
    assert client.flush(120), client.counters()
    for _ in range(5):
        push()  # Whole again.
    assert client.flush(30), client.counters()
    counters = client.counters()
    kept = pushed - counters.frames_dropped_window
    wait_for("each frame is stored", lambda: len(server.series("away", "loss")) >= kept)
    stored = set(server.series("away", "loss"))
    whole = set(server.series("away", "wq_sigma", layers - 1, heads - 1))
    assert len(stored) == kept and whole < stored
    without = stored - whole
    assert {0, 5, 10, 15} < without and not without & set(range(pushed - 5, pushed))
    assert counters.frames_stripped == len(without) - 4 >= 60, counters

    def expect_told() -> None:
        told = lambda: server.call("GetRun", run="away")  # noqa: E731  A little behind.
        wait_for("each is counted once", lambda: int(told()["frames"]) == kept)
        assert int(told()["frames_stripped"]) == counters.frames_stripped
        assert server.metric("bellwether_run_frames_stripped_total") == counters.frames_stripped
        assert f"frames_stripped {counters.frames_stripped}\n" in re.sub(
            " +", " ", server.run("run", "get", "away")
        )

    expect_told()
    server.kill()
    server.start()
    server.await_applied()
    expect_told()
    client.close()


def test_links_that_break_all_the_time_lose_nothing(server: Server, tmp_path: Path) -> None:
    link = Link(server.grpc)
    fleet = Fleet(server, tmp_path, 3, 0.02, layers=4, heads=8)
    for trainer in fleet.trainers:
        trainer.address = link.address
    pusher = Pusher(link.address, "broken", 0.005)
    resets = 0
    while resets < 15 or pusher.client.counters().reconnects < 5:  # It waits between two tries.
        assert resets < 300, pusher.client.counters()
        time.sleep(0.3)
        link.reset()
        resets += 1
    expect_accounted(server, pusher)
    assert pusher.client.counters().frames_dropped_window == 0
    assert pusher.client.counters().reconnects >= 5
    fleet.finish()
    link.close()


def test_a_stopped_peer_is_cut_off(tmp_path: Path) -> None:
    """Half open: the process hangs, its kernel goes on answering."""
    with Server(tmp_path, "ingest: {idle_ms_max: 3000}\n") as server:
        pusher = Pusher(server.grpc, "stopped", 0.02)
        wait_for("acks", lambda: pusher.client.counters().frames_acked > 20)
        sender = pusher.client.counters().sender_pid
        os.kill(sender, signal.SIGSTOP)
        try:
            wait_for(
                "its stream is ended", lambda: server.metric("bellwether_ingest_streams") == 0, 30
            )
        finally:
            os.kill(sender, signal.SIGCONT)
        wait_for("it is back", lambda: server.metric("bellwether_ingest_streams") == 1, 30)
        expect_accounted(server, pusher)


def test_stopped_server_does_not_delay_the_trainer(server: Server) -> None:
    pusher = Pusher(server.grpc, "hung", 0.02)
    wait_for("acks", lambda: pusher.client.counters().frames_acked > 20)
    before = pusher.steps
    with server.paused():
        time.sleep(3)
    assert pusher.steps - before > 75, "the trainer stood still"
    expect_accounted(server, pusher)
    assert pusher.client.counters().frames_dropped_window == 0


def test_stopped_server_calls_no_rank_silent(tmp_path: Path) -> None:
    """It heard none while it was stopped, and its trainers went on."""
    with Server(tmp_path, "ingest: {silence_ms_min: 8000}\n") as server:
        pusher = Pusher(server.grpc, "unheard", 0.05, heads=4, layers=2)
        wait_for("acks", lambda: pusher.client.counters().frames_acked > 20)
        with server.paused():
            time.sleep(14)
        # Longer than a rank may be silent: an alert would have been told and stored by then.
        before = pusher.client.counters().frames_queued + 200
        wait_for("it goes on", lambda: pusher.client.counters().frames_acked > before, 60)
        alerts = server.call("ListAlerts", limit=10).get("alerts", [])
        assert "silent" not in [alert["last"]["rule"] for alert in alerts], alerts
        assert re.search(r"this server did not run for \d+ s", server.log())
        expect_accounted(server, pusher)


def test_readers_that_do_not_read_cost_little(server: Server, tmp_path: Path) -> None:
    fleet = Fleet(server, tmp_path, 3, 0.01, layers=8, heads=16)
    fleet.await_acks(100)
    before_mb = server.metric("process_resident_memory_bytes") / 2**20
    lazy = []
    host, port = server.http.split(":")
    for _ in range(20):  # Event streams of the page, and a long export.
        reader = socket.create_connection((host, int(port)))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.sendall(f"GET /api/v1/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        lazy.append(reader)
    fleet.await_acks(600)
    after_mb = server.metric("process_resident_memory_bytes") / 2**20
    assert after_mb < before_mb + 60, (before_mb, after_mb)
    for reader in lazy:
        reader.close()
    fleet.finish()


def test_termination_under_load_acks_what_it_took(server: Server, tmp_path: Path) -> None:
    fleet = Fleet(server, tmp_path, 6, 0.005, layers=16, heads=32)
    fleet.await_acks(300)
    began = time.monotonic()
    assert server.stop() == 0, server.log()
    assert time.monotonic() - began < 15
    fleet.note_end()
    server.start()
    fleet.check_acked()
    fleet.await_acks(100)
    fleet.finish()
