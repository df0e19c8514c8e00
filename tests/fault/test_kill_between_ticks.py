"""Goal: the alert log of a run is the same, entry by entry, whether its server was killed or not.
Method: a recorded failing run is sent by the real client to the real server.  The server is killed
with SIGKILL between two of its ticks (the ends of its batches, at which the detectors run), and
started again.  `./check --long` kills between any two ticks; otherwise a choice of them, around
each entry of the log among others.  The seed is printed and can be given by BELLWETHER_SEED.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from bellwether_process import ROOT, Server, wait_for

from bellwether.client import Block, RunClient, RunOptions

from conftest import generated_protos as generated_protos
from recording import Recording

RUN = "killed"
TICK_STEPS = 20  # JudgeOptions.trend.batch_steps
RING_FRAMES = 4096
SEED = int(os.environ.get("BELLWETHER_SEED", time.time_ns() % 1_000_000))


def ticks_of(recorded: Recording) -> list[list[Any]]:
    """The frames of each tick; the last list may be short of one."""
    ticks: list[list[Any]] = [[]]
    begin = 0
    for frame in recorded.frames:
        ticks[-1].append(frame)
        if frame.step - begin >= TICK_STEPS:
            ticks.append([])
            begin = frame.step
    return ticks


def send(server: Server, recorded: Recording, kills: Collection[int]) -> list[dict[str, Any]]:
    """Sends the run, killing the server after the ticks of these numbers; the log that results."""
    described = recorded.hello.run
    options = RunOptions(
        run=RUN,
        layers=described.layout.layers,
        heads=described.layout.heads,
        server=server.grpc,
        attention_kernel=described.attention.kernel,
        score_dtype=described.attention.score_dtype,
        ring_frames=RING_FRAMES,
    )
    chance = random.Random(SEED)
    frames = 0
    with RunClient(options) as client:
        for number, tick in enumerate(ticks_of(recorded)):
            for frame in tick:
                blocks = [
                    Block(recorded.names[b.signal], list(b.values), b.layer_begin, b.layer_count, b.head_begin,
                          b.head_count)
                    for b in frame.blocks
                ]  # fmt: skip
                assert client.push(frame.step, blocks, time_unix_ns=frame.time_unix_ns)
                frames += 1
                if frames % (RING_FRAMES // 2) == 0:
                    assert client.flush(60), client.counters()
            if number in kills:
                # Half of them with the tick acknowledged, half with it anywhere on its way.
                if chance.random() < 0.5:
                    assert client.flush(60), client.counters()
                server.kill()
                server.start()
        assert client.flush(60), client.counters()
    wait_for(
        "all frames are judged", lambda: int(server.call("GetRun", run=RUN)["frames"]) == frames, 30
    )
    return server.alert_log(RUN)


def test_kills_do_not_change_the_alert_log(tmp_path: Path) -> None:
    print(f"BELLWETHER_SEED={SEED}")
    recorded = Recording(ROOT / "tests/testdata/tiny/bf16-1.bwrun")
    (tmp_path / "whole").mkdir()
    with Server(tmp_path / "whole") as server:
        expected = send(server, recorded, kills=())
    assert len(expected) >= 3, "a failing run has a log"
    ticks = len(ticks_of(recorded))
    if os.environ.get("BELLWETHER_LONG"):
        kills = set(range(ticks))
    else:
        told = {int(t["step"]) // TICK_STEPS for t in expected}
        kills = {at + near for at in told for near in (-1, 0)}
        kills |= set(random.Random(SEED).sample(range(ticks), 10))
    (tmp_path / "killed").mkdir()
    with Server(tmp_path / "killed") as server:
        assert send(server, recorded, kills) == expected
