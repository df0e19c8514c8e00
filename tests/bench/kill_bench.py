#!/usr/bin/env python3
"""What a training job feels when the server or the sender is killed: paired, in one process.

examples/tiny_transformer.py's model trains under watch against a real bellwetherd.  Blocks of steps
in which the server (or the sender) is killed with SIGKILL at a random moment, and started again,
take turns with blocks in which nothing happens.  Reported is, over the pairs, how much longer the
median step and the longest step of a block took, with 95 % intervals; and that nothing was lost.

    python3 tests/bench/kill_bench.py --pairs 20
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "client_lib" / "python"))
from bellwether_process import Server
from tiny_transformer import Data, TinyTransformer

import bellwether

from paired import median_and_interval


class Job:
    def __init__(self, server: Server) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.data, self.model = Data(1), TinyTransformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.monitor = bellwether.attach(
            self.model, server=server.grpc, run="killed", every=20, overhead_budget=1e9,
            byte_budget=0,
        )  # fmt: skip

    def block(self, steps: int) -> list[float]:
        """Milliseconds of each step."""
        taken = []
        for _ in range(steps):
            began = time.perf_counter()
            tokens, target = self.data.batch()
            loss = (self.model(tokens) - target).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.monitor.step(loss=loss)
            taken.append(1e3 * (time.perf_counter() - began))
        return taken


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=20, help="kills of each kind")
    parser.add_argument("--steps", type=int, default=200, help="of a block")
    args = parser.parse_args(argv)
    chance = random.Random(1)
    found: dict[str, object] = {"pairs": args.pairs, "steps": args.steps}
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        job = Job(server)
        job.block(args.steps)

        def kill_server() -> None:
            server.kill()
            server.start()

        def kill_sender() -> None:
            os.kill(job.monitor.status()["counters"].sender_pid, signal.SIGKILL)

        kinds: dict[str, Callable[[], None]] = {"server": kill_server, "sender": kill_sender}
        for kind, kill in kinds.items():
            median, longest, plain = [], [], []
            for pair in range(args.pairs):
                quiet = job.block(args.steps)
                later = threading.Timer(chance.uniform(0.05, 0.3), kill)
                later.start()
                killed = job.block(args.steps)
                later.join()
                plain.append(statistics.median(quiet))
                median.append(100 * (statistics.median(killed) / statistics.median(quiet) - 1))
                longest.append(max(killed) - max(quiet))
                if sys.stderr.isatty():
                    print(f"\r{kind} {pair + 1}/{args.pairs}", end="", file=sys.stderr)
            found[kind] = {
                "step_ms": statistics.median(plain),
                "median_step_percent": median_and_interval(median),
                "longest_step_ms": median_and_interval(longest),
            }
        assert job.monitor.flush(60)
        counters = job.monitor.status()["counters"]
        found["frames"] = {
            "queued": counters.frames_queued,
            "acked": counters.frames_acked,
            "dropped": counters.frames_dropped_ring + counters.frames_dropped_window,
        }
        stored = server.series("killed", "loss")
        found["steps_stored"] = len(stored)
        job.monitor.detach()
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
