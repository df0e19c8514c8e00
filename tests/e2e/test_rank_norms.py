"""Goal: norms of ranks' own gradients go the whole way: each rank has its row, and lists begin with the
largest.  Prometheus gets them beside the median of all.  An alert of a gradient that is not finite
names the rank that it came from.

Method: bellwetherd and clients that say every value.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / room) for room in ("support", "python")]
from bellwether_process import Server, wait_for

from bellwether.client import Block, RunClient, RunOptions

RANKS, BAD = 3, 39


def blocks(rank: int, step: int) -> list[Block]:
    """Rank 1 has gradients four times as large, and at last none that is finite."""
    own = math.nan if rank == 1 and step == BAD else 4.0 if rank == 1 else 1.0
    return [
        Block("loss", [2.0 + step % 3 / 1000]),
        Block("grad_norm", [math.nan if step == BAD else 1.0]),
        Block("rank_grad_norm", [own], rank),
        Block("rank_grad_norm_max", [own + step / 8], rank),
    ]


def test_a_rank_with_other_gradients_is_named(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        ranks = [
            RunClient(RunOptions("norms", layers=2, heads=2, rank=rank, world=RANKS, server=server.grpc))
            for rank in range(RANKS)
        ]
        for step in range(BAD + 1):
            for rank, client in enumerate(ranks):
                assert client.push(step, blocks(rank, step))
            # A server waits for ranks that are behind, but for some steps only.
            assert step % 8 or all(client.flush(30) for client in ranks)
        for client in ranks:
            assert client.flush(30)
            client.close()
        wait_for("all is told", lambda: int(server.call("GetRun", run="norms")["step"]) == BAD)
        page = server.get("/metrics")
        assert 'bellwether_run_rank_grad_norm_median{run="norms"} 1\n' in page
        for name in ('bellwether_rank_grad_norm{run="norms",rank="1"}', 'bellwether_run_rank_grad_norm_max{run="norms"}'):
            assert f"{name} Nan\n" in page
        series = server.series("norms", "rank_grad_norm_max", 1, 0)
        assert series[8] == 5.0 and server.series("norms", "rank_grad_norm", 2, 0)[8] == 1.0
        top = server.call("TopHeads", run="norms", signal="rank_grad_norm", limit=3, step=BAD - 1)["heads"]
        assert [(row.get("layer", 0), row["value"], row["median"]) for row in top[:1]] == [(1, 4.0, 1.0)]
        listed = server.run("head", "top", "norms", "--signal", "rank_grad_norm", "--step", str(BAD - 1))
        assert listed.splitlines()[1].split()[:3] == ["1", "0", "4"]
        alerts = server.call("ListAlerts", run="norms")["alerts"]
        told = next(alert["last"] for alert in alerts if alert["last"]["rule"] == "nonfinite")
        assert "the own gradients of rank 1 are not finite, those of 2 others are" in str(told)
