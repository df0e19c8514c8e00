"""A bellwetherd with two runs that live, for the bench of the page: `large` tells of 10,275
parameters and `small` of 31, both by the client's own library, a sample a second each.

live_tensors.py BIN

Prints {"port": ...} once both have their past; ends with its input.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
from pathlib import Path

os.environ["BELLWETHER_LIB_DIR"] = str(Path(sys.argv[1]).resolve())
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import Server, wait_for

from bellwether.client import TENSOR, Block, RunClient, RunOptions

PAST, EVERY = 240, 20  # Samples of each run before it is looked at, and steps between two.
SETS = 16  # Values are made before: this program shares the machine with the page.
LAYERS = HEADS = 8
PER_BLOCK = (
    *(f"self_attn.{each}_proj.weight" for each in "qkvo"),
    "mlp.gate.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
)  # fmt: skip
# By signal: how far the values of a parameter are from each other.
SIGNALS = {"tensor_grad_sumsq": 0.2, "tensor_grad_max": 0.2, "tensor_weight_sumsq": 0.01, "tensor_lag_sum": 0.2, "tensor_elements": 0.0, "tensor_moved": 0.0}  # fmt: skip


def names_of(blocks: int, experts: int) -> list[str]:
    """As a model of `blocks` blocks with `experts` experts each has them."""
    names = ["model.embed_tokens.weight"]
    for block in range(blocks):
        names += [f"model.layers.{block}.{name}" for name in PER_BLOCK]
        names += [f"model.layers.{block}.mlp.experts.{e}.up_proj.weight" for e in range(experts)]
    return [*names, "model.norm.weight", "lm_head.weight"]


class Job:
    """One run and what it sends."""

    def __init__(self, server: Server, run: str, names: list[str]) -> None:
        self._client = RunClient(
            RunOptions(run=run, layers=LAYERS, heads=HEADS, server=server.grpc, frame_values_max=262_144)
        )
        assert self._client.push_names(TENSOR, names) == len(names)
        noise = random.Random(run)
        level = [noise.lognormvariate(-4, 2) for _ in names]
        self._tensors = [
            [
                Block(signal, [x * noise.lognormvariate(0, width) if width else 1.0 for x in level], 0, len(names))
                for signal, width in SIGNALS.items()
            ]
            for _ in range(SETS)
        ]
        self._sent = 0

    def sample(self) -> None:
        heads = [2.0 + 0.01 * ((i * 7 + self._sent) % 11) for i in range(LAYERS * HEADS)]
        blocks = [Block("loss", [2.0]), Block("grad_norm", [1.0]), Block("wq_sigma", heads, 0, LAYERS, 0, HEADS)]
        self._client.push(self._sent * EVERY, [*blocks, *self._tensors[self._sent % SETS]])
        self._sent += 1

    def past(self) -> None:
        while self._sent < PAST:
            self.sample()
            if self._sent % 4 == 0:
                assert self._client.flush(60)

    def close(self) -> None:
        self._client.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        jobs = [Job(server, "large", names_of(96, 100)), Job(server, "small", names_of(4, 0))]
        for job in jobs:
            job.past()
        last = (PAST - 1) * EVERY
        for run in ("large", "small"):
            wait_for(f"{run} has its past", lambda run=run: int(server.call("GetRun", run=run)["step"]) == last)
        print(json.dumps({"port": int(server.http.rsplit(":", 1)[1])}), flush=True)
        stop = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
        while not stop.wait(1):
            for job in jobs:
                job.sample()
        for job in jobs:
            job.close()


if __name__ == "__main__":
    main()
