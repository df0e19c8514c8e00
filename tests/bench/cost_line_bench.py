#!/usr/bin/env python3
"""Whether the line about the cost of watching tells the truth: printed beside measured.

Two copies of one model train in turns in one process, one attached with the settings that users
have, governor included, the other never attached.  First the watched one runs alone until its
sampling period has settled.  Then blocks of both take turns, the order changing, until the 95 %
half-width of how much longer the watched steps take on average is small enough.  Prints JSON;
costs are in per cent of the training time.

    python3 tests/bench/cost_line_bench.py --compile --out cost.json
    python3 tests/bench/cost_line_bench.py --job packed --size 1b       # documents, by a mask
    python3 tests/bench/cost_line_bench.py --job blocks --compile       # with all statistics
    python3 tests/bench/cost_line_bench.py --size tiny --device cpu --seconds 20

A block's length should be no multiple of the period: the watched job's first step of a block
seems to it to last as long as the other's block.  Where a copy lies in memory may decide about a
per mille of its step: --watched-first makes the copies in the other order, so that two runs tell.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "client_lib" / "python"))
from hook_overhead_bench import Job

import bellwether

#        layers, width, heads, vocabulary, batch, tokens
SIZES = {
    "124m": (12, 768, 12, 50304, 16, 1024),
    "1b": (16, 2048, 32, 32000, 1, 8192),
    "tiny": (2, 64, 4, 512, 2, 64),
}
DOCUMENTS = 5  # Of a packed sequence.


class TransformersJob(Job):
    """GPT-2 by transformers, as its Trainer would train it."""

    rate = 1e-4

    def __init__(self, size: str, device: str) -> None:
        *_, vocabulary, batch, tokens = SIZES[size]
        torch.manual_seed(0)
        self.device = device
        self.model = self.made(size).to(device).train()
        self.ids = torch.randint(vocabulary, (batch, tokens), device=device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, fused=device == "cuda"
        )
        self.forward: nn.Module = self.model
        self.packed: dict[str, Tensor] = {}

    def made(self, size: str) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        layers, width, heads, vocabulary, _, tokens = SIZES[size]
        config = GPT2Config(
            vocab_size=vocabulary, n_positions=tokens, n_embd=width, n_layer=layers, n_head=heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    def compile(self) -> None:
        self.forward = torch.compile(self.model)

    def step(self) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            loss: Tensor = self.forward(input_ids=self.ids, labels=self.ids, **self.packed).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class PackedJob(TransformersJob):
    """A Llama with a key head for four queries, on documents laid end to end."""

    rate = 1e-5

    def __init__(self, size: str, device: str) -> None:
        super().__init__(size, device)
        tokens = self.ids.shape[1]
        document = -(-tokens // DOCUMENTS)
        positions = torch.arange(tokens, device=device) % document
        self.packed = {"position_ids": positions.expand_as(self.ids)}

    def made(self, size: str) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        layers, width, heads, vocabulary, _, tokens = SIZES[size]
        config = LlamaConfig(
            vocab_size=vocabulary, max_position_embeddings=tokens, hidden_size=width,
            intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads // 4, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config)


JOBS = {"transformers": TransformersJob, "packed": PackedJob, "blocks": Job}


class Watching:
    """The monitor of a job, and its steps' times by how many steps ago the last sample was."""

    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor
        self.milliseconds: dict[int, list[float]] = {}  # 0: sampled ones
        self._distance = -1
        self._of_block: list[int] = []

    def step(self, loss: Tensor) -> None:
        known = self._distance >= 0
        self._distance = 0 if self.monitor.steps.samples_step() else self._distance + known
        self._of_block.append(self._distance)
        self.monitor.step(loss=loss)

    def add(self, milliseconds: Sequence[float]) -> None:
        """A whole block's."""
        for distance, took in zip(self._of_block[1:], milliseconds[1:]):
            self.milliseconds.setdefault(distance, []).append(took)
        self._of_block.clear()


def seconds_of(job: Job, steps: int, watching: Optional[Watching]) -> float:
    """Of a block's steps but the first, which finds the device idle."""
    if job.device == "cuda":
        took = job.block(steps, watching)
        if watching is not None:
            watching.add(took)
        return sum(took[1:]) / 1e3
    began = 0.0
    for _ in range(steps):
        loss = job.step()
        if watching is not None:
            watching.step(loss=loss)
        began = began or time.perf_counter()
    return time.perf_counter() - began


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(asked, text=True).splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


class Lines(logging.Handler):
    """What the log says of the price."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "of the training time" in record.getMessage():
            self.said.append(record.getMessage())

    def percent(self) -> Optional[float]:
        found = re.search(r"about ([\d.]+) %", self.said[-1]) if self.said else None
        return float(found[1]) if found else None


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", choices=JOBS, default="transformers")
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--block", type=int, default=47, help="steps of a block")
    parser.add_argument("--settle", type=int, default=600, help="watched steps before the first")
    parser.add_argument("--half-width", type=float, default=0.2, help="per cent")
    parser.add_argument("--pairs-min", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=240.0, help="of pairs, at most")
    parser.add_argument("--watched-first", action="store_true", help="of the copies made")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--budget", type=float, default=0.005)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args(argv)

    make = JOBS[args.job]
    plain, watched = make(args.size, args.device), make(args.size, args.device)
    if args.watched_first:
        plain, watched = watched, plain
    if args.compile:
        plain.compile()  # Before attach(): no tap is in it.
    seconds_of(plain, 8, None)
    lines = Lines()
    log = logging.getLogger("bellwether")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        monitor = bellwether.attach(
            watched.model, record=f"{folder}/run.bwrun", run="cost", every=args.every,
            overhead_budget=args.budget,
        )  # fmt: skip
        if args.compile:
            watched.compile()
            seconds_of(plain, 8, None)  # What attach() has patched may be compiled once more.
        assert monitor.status()["live"], monitor.status()["why_off"]
        watching = Watching(monitor)
        seconds_of(watched, args.settle, watching)
        watching.milliseconds.clear()
        # The price as it was told by then; what is told later comes from the same pairs.
        told, period = lines.percent(), monitor.steps.governor.period
        ratios: list[float] = []
        half_width, began = float("inf"), time.monotonic()
        samples = monitor.status()["samples"]
        without = with_it = 0.0
        while time.monotonic() - began < args.seconds:
            order = [(plain, None), (watched, watching)]
            found = {
                id(job): seconds_of(job, args.block, handle)
                for job, handle in (order if len(ratios) % 2 else reversed(order))
            }
            without += found[id(plain)]
            with_it += found[id(watched)]
            ratios.append(100 * (found[id(watched)] / found[id(plain)] - 1))
            if len(ratios) >= args.pairs_min:
                half_width = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
                if half_width <= args.half_width:
                    break
        status, price = monitor.status(), monitor.steps.reporter.cost.price
        monitor.detach()
    assert status["errors"] == 0 and status["live"], status
    steps = len(ratios) * (args.block - 1)
    found_all = {
        "printed_cost": lines.percent(),
        "printed_cost_before_pairs": told,
        "measured_cost": 100 * (with_it / without - 1),
        "halfwidth": half_width,
        "interval": status["sampling_period"],
        "interval_before_pairs": period,
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else "",
        "driver": driver(),
        "torch": torch.__version__,
        "job": args.job, "size": args.size, "compiled": args.compile,
        "pairs": len(ratios), "watched_steps": steps,
        "samples_in_pairs": status["samples"] - samples,
        "step_ms": 1e3 * without / max(1, steps),
        "sample_ms": 1e3 * (price._sample or 0.0),
        "kernels_ms": 1e3 * statistics.median(price._kernels) if price._kernels else None,
        "hook_cpu_ms": 1e3 * statistics.median(price._hook) if price._hook else None,
        "hook_cpu_ms_between": 1e3 * statistics.median(price._between) if price._between else None,
        "watched_first": args.watched_first,
        "step_ms_by_distance": {
            distance: [len(took), statistics.mean(took), statistics.median(took)]
            for distance, took in sorted(watching.milliseconds.items())
        },
        "pairs_ratio": ratios,
        "by_steps": price.by_steps(), "exposed": price._exposed,
        "layers": len([x for x in status["layers"] if x["fired"]]),
        "not_judged_by": status["layers"][0].get("not_judged_by") if status["layers"] else None,
        "lines": lines.said,
    }  # fmt: skip
    print(json.dumps(found_all))
    if args.out is not None:
        args.out.write_text(json.dumps(found_all, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
