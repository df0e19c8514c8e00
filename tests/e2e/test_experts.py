"""Goal: loads of experts, and losses of sequences, go the whole way: those of several ranks are added
up, and ratios follow.  An own rule names the layer of a dead expert.  A restart of the server keeps them.

Method: bellwetherd and clients that say every value.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / room) for room in ("support", "python")]
from bellwether_process import Server, wait_for

from bellwether.client import Block, RunClient, RunOptions

RULES = """
rules:
- {name: dead_expert, signal: expert_share, aggregate: min, detector: level, below: 0.01,
   hold_batches: 1, severity: warning, stage: 1}
"""
EXPERTS, DIES = 3, 1000
DEAD = "moe: dead_expert in layer 1: expert_share 0 (limit 0.01), since step 1,000."
NAMED = (
    "moe: 1 of 3 experts of layer 1 has had no token in 2 samples, after having some: expert 1, "
    "since step 1,000."
)


def blocks(step: int) -> list[Block]:
    """Of one rank.  Layer 1 has a router of 3 experts, of which one dies."""
    if step % 20 != 0:
        return [Block("loss", [2.0 + step % 3 / 1000])]
    load = [10.0, 0.0 if step >= DIES else 5.0, 5.0 if step < DIES else 10.0]
    return [
        Block("loss", [2.0 + step % 3 / 1000]),
        Block("expert_load", load, 1, 1, 0, EXPERTS),
        Block("expert_dead", [float(n == 0) for n in load], 1, 1, 0, EXPERTS),
        Block("expert_ideal_load", [20 / EXPERTS], 1),
        Block("router_tokens", [20.0], 1),
        Block("router_entropy_sum", [30.0], 1),
        Block("router_logit_max", [float(step)], 1),
        Block("loss_sequences", [4.0]),
        Block("loss_sequence_sum", [8.0]),
    ]


def report(server: Server, steps: range, attempt: int = 0) -> None:
    ranks = [
        RunClient(
            RunOptions(
                "moe", layers=2, heads=1, experts=EXPERTS, rank=rank, world=2, attempt=attempt, server=server.grpc
            )
        )
        for rank in range(2)
    ]
    for step in steps:
        for client in ranks:
            assert client.push(step, blocks(step))
        for client in ranks if step % 10 == 0 else ():  # None is far ahead of the other.
            assert client.flush(60)
    for client in ranks:
        assert client.flush(60)
        client.close()
    last = steps[-1]
    wait_for(f"step {last} is told", lambda: int(server.call("GetRun", run="moe")["step"]) == last)


def test_loads_of_experts_go_the_whole_way(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(RULES)
    with Server(tmp_path, "", f"--rules.file={tmp_path / 'rules.yml'}") as server:
        report(server, range(1301))
        assert server.series("moe", "expert_load", 1, 0)[40] == 20
        assert server.series("moe", "expert_share", 1, 0)[40] == pytest.approx(1.5)
        assert server.series("moe", "expert_share", 1, 1)[DIES] == 0
        assert server.series("moe", "expert_dead", 1, 1)[DIES] == 1
        worst = server.call("TopHeads", run="moe", signal="expert_share", limit=1, step=-1)["heads"][0]
        assert (worst["layer"], worst["head"], worst["value"]) == (1, 1, 0)
        assert server.series("moe", "router_entropy", 1, 0)[40] == pytest.approx(1.5)
        assert server.series("moe", "router_logit_max", 1, 0)[60] == 60
        assert server.series("moe", "loss_sequence_mean", 0, 0)[40] == 2
        alerts = server.call("ListAlerts", run="moe")["alerts"]
        told = {(alert["last"]["rule"], alert["last"]["summary"]) for alert in alerts}
        assert told == {("dead_expert", DEAD), ("experts", NAMED)}
    with Server(tmp_path, "", f"--rules.file={tmp_path / 'rules.yml'}") as server:
        assert server.series("moe", "expert_share", 1, 0)[40] == pytest.approx(1.5)
        report(server, range(1301, 1342), attempt=1)
        assert server.series("moe", "expert_load", 1, 0)[1320] == 20
