"""Goal: with a spool a server that is away for longer than the sender's memory lasts costs nothing:
every frame arrives once, over killed senders and over the end of the whole job.
Method: a real bellwetherd that is killed and started again, real clients that push twice what the
memory holds meanwhile; the sender killed on the way, or the trainer and its sender together.
"""

from __future__ import annotations

import array
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import ROOT, Server, await_silence, wait_for

from bellwether.client import Block, RunClient, RunOptions

LAYERS, HEADS = 16, 512
FRAME_BYTES = 2 * 4 * LAYERS * HEADS  # Two signals: 64 KiB.
WINDOW_BYTES = 64 * 2**20  # client_lib/src/shared_memory.h
LONG = bool(os.environ.get("BELLWETHER_LONG"))
MEMORY_FRAMES = WINDOW_BYTES // 2 // FRAME_BYTES  # Then they go to disk.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running


def drawn(seed: int) -> array.array[float]:
    """Finite, and nothing that could be packed on disk: sizes are what they look like."""
    bits = random.Random(seed)
    words = (bits.getrandbits(32) & 0xBFFFFFFF for _ in range(LAYERS * HEADS))
    return array.array("f", array.array("I", words).tobytes())


class Job:
    """A rank that pushes as fast as the ring takes it; what it does not take would be a drop."""

    def __init__(self, server: Server, folder: Path, attempt: int = 0) -> None:
        self.client = RunClient(
            RunOptions(
                run="job", layers=LAYERS, heads=HEADS, server=server.grpc, attempt=attempt,
                ring_frames=1024, spool_dir=str(folder / "spool"),
                log_path=str(folder / "sender.log"),
            )
        )  # fmt: skip
        self.values, self.others = drawn(1), drawn(2)
        self.step = 0
        self.longest_s = 0.0

    def push(self, frames: int) -> None:
        for _ in range(frames):
            wait_for("room in the ring", self._has_room)
            self.values[0] = self.others[0] = float(self.step)
            blocks = [
                Block("loss", [float(self.step)]),
                Block("wq_sigma", self.values, 0, LAYERS, 0, HEADS),
                Block("wk_sigma", self.others, 0, LAYERS, 0, HEADS),
            ]
            began = time.thread_time()
            assert self.client.push(self.step, blocks)
            self.longest_s = max(self.longest_s, time.thread_time() - began)
            self.step += 1

    def _in_the_ring(self) -> int:
        """At least so many frames are neither acknowledged, nor on disk, nor fit the memory."""
        c = self.client.counters()
        elsewhere = c.frames_acked + c.frames_spooled + c.frames_dropped_window + MEMORY_FRAMES
        return int(c.frames_queued - elsewhere)

    def _has_room(self) -> bool:
        return self._in_the_ring() < 300

    def settle(self) -> None:
        """The sender has taken all, and nothing more goes to disk."""
        wait_for("all is taken", lambda: self._in_the_ring() <= 1, 120)
        await_silence(lambda: int(self.client.counters().frames_spooled), within=120)

    def kill_sender(self) -> None:
        pid = wait_for("a sender", lambda: self.client.counters().sender_pid)
        os.kill(pid, signal.SIGKILL)
        wait_for("another sender", lambda: self.client.counters().sender_pid not in (0, pid))


def expect_each_once(server: Server, job: Job) -> None:
    server.await_applied()
    wait_for("all is stored", lambda: len(server.series("job", "loss")) >= job.step, 60)
    stored = server.series("job", "loss")
    assert stored == {step: float(step) for step in range(job.step)}
    assert server.series("job", "wk_sigma", 0, 0) == stored
    told = lambda: server.call("GetRun", run="job")  # noqa: E731  A little behind what is stored.
    wait_for("each frame is counted once", lambda: int(told()["frames"]) == job.step)
    assert int(told().get("frames_dropped", 0)) == 0


def test_an_outage_longer_than_the_memory_lasts_loses_nothing(
    server: Server, tmp_path: Path
) -> None:
    job = Job(server, tmp_path)
    job.push(50)
    assert job.client.flush(30), job.client.counters()
    server.kill()
    frames = 2 * WINDOW_BYTES // FRAME_BYTES
    job.push(frames // 2)
    job.kill_sender()
    job.push(frames // 2)
    wait_for("the rest is on disk", lambda: job.client.counters().spool_bytes > 80 * 2**20, 120)
    server.start()
    wait_for("it drains", lambda: job.client.counters().frames_acked > 50 + frames // 4, 60)
    job.kill_sender()
    job.push(100)
    assert job.client.flush(120), job.client.counters()
    counters = job.client.counters()
    assert counters.frames_acked == counters.frames_queued == job.step, counters
    assert counters.frames_dropped_ring == counters.frames_dropped_window == 0
    assert job.longest_s < 0.05, "a push waited"  # On the thread's own clock.
    expect_each_once(server, job)
    job.client.close()
    wait_for("nothing is left behind", lambda: not list((tmp_path / "spool").iterdir()))


@pytest.mark.skipif(not LONG, reason="a sender drains for 60 s; BELLWETHER_LONG=1")
def test_next_attempt_sends_frames_of_an_ended_job(
    server: Server, tmp_path: Path
) -> None:
    job = Job(server, tmp_path)
    job.push(50)
    assert job.client.flush(30), job.client.counters()
    server.kill()
    job.push(MEMORY_FRAMES + 200)
    wait_for("some are on disk", lambda: job.client.counters().frames_spooled > 100)
    job.client.close()
    log = tmp_path / "sender.log"
    wait_for("it has given up", lambda: "frames wait in" in log.read_text(), 90)
    server.start()
    after = Job(server, tmp_path, attempt=1)
    after.step = job.step
    after.push(20)
    assert after.client.flush(60), after.client.counters()
    expect_each_once(server, after)


JOB = """
import sys
sys.path[:0] = [{fault!r}, {support!r}]
from pathlib import Path
import test_spool as t
server = type("Server", (), {{"grpc": {grpc!r}}})
job = t.Job(server, Path({folder!r}))
job.push(50)
assert job.client.flush(30)
print("met", job.client.counters().sender_pid, flush=True)
sys.stdin.readline()
job.push({frames})
job.settle()
assert job.client.counters().spool_bytes > 40 * 2**20
print("pushed", flush=True)
sys.stdin.readline()
"""


def test_next_attempt_sends_the_spool_of_a_killed_job(
    server: Server, tmp_path: Path
) -> None:
    """What a scheduler does: SIGKILL to the trainer and to all that it started.  What is lost is
    what was in memory, and it is counted to the frame."""
    frames = 3 * WINDOW_BYTES // 2 // FRAME_BYTES
    script = JOB.format(
        fault=str(ROOT / "tests/fault"), support=str(ROOT / "tests/support"), grpc=server.grpc,
        folder=str(tmp_path), frames=frames,
    )  # fmt: skip
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdin is not None and trainer.stdout is not None
    word, sender = trainer.stdout.readline().split()
    assert word == "met"
    server.kill()
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    assert trainer.stdout.readline() == "pushed\n"
    os.kill(int(sender), signal.SIGKILL)
    trainer.kill()
    trainer.wait()

    server.start()
    job = Job(server, tmp_path, attempt=1)
    job.step = 10_000
    job.push(20)
    assert job.client.flush(120), job.client.counters()
    counters = job.client.counters()
    pushed = 50 + frames
    wait_for(
        "each frame is stored or counted",
        lambda: len(server.series("job", "loss")) + counters.frames_dropped_window >= pushed + 20,
        60,
    )
    stored = server.series("job", "loss")
    assert all(step == value for step, value in stored.items())
    assert len(stored) + counters.frames_dropped_window == pushed + 20
    # Half of the window was in memory, the rest on disk.
    assert 0 < counters.frames_dropped_window <= MEMORY_FRAMES + 1
    assert set(range(50)) | set(range(50 + counters.frames_dropped_window, pushed)) <= set(stored)
    told = lambda: server.call("GetRun", run="job")  # noqa: E731  A little behind what is stored.
    wait_for("the run is at attempt 1", lambda: int(told()["description"]["attempt"]) == 1)
    wait_for("each frame is counted once", lambda: int(told()["frames"]) == len(stored))
    job.push(1)  # The next frame tells of the loss.
    assert job.client.flush(30)
    wait_for(
        "the server knows what was lost",
        lambda: (
            int(server.call("GetRun", run="job").get("frames_dropped", 0))
            == counters.frames_dropped_window
        ),
    )
    assert "frames of attempt 0 that are left in" in (tmp_path / "sender.log").read_text()
