#!/usr/bin/env python3
"""What watching costs a job with the settings that users have, and whether the line of the log
about it tells the truth.

Two processes train one model each on one device, one of them attached, the governor included, the
other never attached.  First the watched one runs alone until its sampling period has settled.  Then
blocks of both take turns (twins.py), until the 95 % half-width of how much longer the watched steps
take on average is small enough.  Of four blocks that follow each other the watched ones are held
against the others.  How many samples a block happens to have is no noise: it is known which share
of all steps is sampled, and what a sampled step takes longer.  Prints JSON; costs are in per cent.

    python3 tests/bench/cost_line_bench.py --compile --out cost.json
    python3 tests/bench/cost_line_bench.py --job packed --size 1b       # documents, by a mask
    python3 tests/bench/cost_line_bench.py --job blocks --compile       # with all statistics
    python3 tests/bench/cost_line_bench.py --size tiny --device cpu --seconds 20

A block's length should be no multiple of the period: the watched job's first step of a block
seems to it to last as long as the other's block.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "client_lib" / "python"))
from hook_overhead_bench import Job
from twins import Twin, mean_and_half_width, turns

import bellwether

#        layers, width, heads, vocabulary, batch, tokens
SIZES = {
    "124m": (12, 768, 12, 50304, 16, 1024),
    "1b": (16, 2048, 32, 32000, 1, 8192),
    "tiny": (2, 64, 4, 512, 2, 64),
}
DOCUMENTS = 5  # Of a packed sequence.
WARM_STEPS = 8
CONTEXT_BYTES = 1 << 30  # Of a process, beside what PyTorch reserves.


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


def both_fit() -> bool:
    """Whether the device has room for two jobs such as this one.  If not, each block begins by
    taking its memory from the driver anew."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return 2 * (torch.cuda.max_memory_reserved() + CONTEXT_BYTES) <= total


def block(job: Job, steps: int, step_ends: Callable[[Tensor], None]) -> list[float]:
    """Milliseconds of each step."""
    if job.device == "cuda":
        took = job.block(steps, step_ends)
        if not both_fit():  # What a job needs for a step is the other's now.
            torch.cuda.empty_cache()
        return took
    marks = [time.perf_counter()]
    for _ in range(steps):
        step_ends(job.step())
        marks.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in zip(marks, marks[1:])]


class Plain:
    """A job without a monitor."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.job = JOBS[args.job](args.size, args.device)
        if args.compile:
            self.job.compile()

    def block(self, steps: int) -> list[tuple[float, int]]:
        """Of each step its milliseconds, and how many steps ago the last sample was (-1)."""
        return [(took, -1) for took in block(self.job, steps, lambda loss: None)]

    def __call__(self, what: str, *told: Any) -> Any:
        return getattr(self, what)(*told)


class Watched(Plain):
    def __init__(self, args: argparse.Namespace) -> None:
        self.job = JOBS[args.job](args.size, args.device)
        self.lines = Lines()
        log = logging.getLogger("bellwether")
        log.addHandler(self.lines)
        log.setLevel(logging.INFO)
        self.folder = tempfile.TemporaryDirectory()
        self.monitor = bellwether.attach(
            self.job.model, record=f"{self.folder.name}/run.bwrun", run="cost", every=args.every,
            overhead_budget=args.budget,
        )  # fmt: skip
        assert self.monitor.status()["live"], self.monitor.status()["why_off"]
        self._distance = -1
        self._of_block: list[int] = []
        if args.compile:
            self.job.compile()

    def _step_ends(self, loss: Tensor) -> None:
        known = self._distance >= 0
        self._distance = 0 if self.monitor.steps.samples_step() else self._distance + known
        self._of_block.append(self._distance)
        self.monitor.step(loss=loss)

    def block(self, steps: int) -> list[tuple[float, int]]:
        self._of_block.clear()
        return list(zip(block(self.job, steps, self._step_ends), self._of_block))

    def told(self) -> tuple[Optional[float], int]:
        """The price as the log has it by now, and the sampling period."""
        return self.lines.percent(), self.monitor.steps.governor.period

    def end(self) -> dict[str, Any]:
        """What the monitor knows of the price."""
        status, price = self.monitor.status(), self.monitor.steps.reporter.cost.price
        self.monitor.detach()
        self.folder.cleanup()
        assert status["errors"] == 0 and status["live"], status
        return {
            "printed_cost": self.lines.percent(),
            "interval": status["sampling_period"],
            "sample_ms": 1e3 * (price._sample or 0.0),
            "kernels_ms": 1e3 * statistics.median(price._kernels) if price._kernels else None,
            "hook_cpu_ms": 1e3 * statistics.median(price._hook) if price._hook else None,
            "hook_cpu_ms_between": 1e3 * statistics.median(price._between)
            if price._between else None,
            "by_steps": price.by_steps(), "exposed": price._exposed,
            "layers": len([x for x in status["layers"] if x["fired"]]),
            "not_judged_by": status["layers"][0].get("not_judged_by")
            if status["layers"] else None,
            "lines": self.lines.said,
        }  # fmt: skip


class Costs:
    """What the blocks tell, in per cent of the time without watching."""

    def __init__(self) -> None:
        self.plain_ms: list[float] = []  # A step's, of each four blocks.
        self._ratios: list[float] = []  # Watched steps.
        self._sampled: list[tuple[int, int]] = []  # Samples among them, and how many there are.
        self._unsampled: list[float] = []
        self._of_samples: list[float] = []
        self._extra: list[float] = []  # What a sampled step takes longer than its block's others.
        self._samples_ms: list[tuple[int, float]] = []  # Each one's place in its block and time.
        self._all = [0, 0]  # Samples and steps, the first ones of blocks included.
        self.by_distance: dict[int, list[float]] = {}

    def add(self, plain: Sequence[Any], watched: Sequence[Any]) -> None:
        """Two blocks of each.  The first step of a block, which finds the device idle, is out."""
        base = statistics.fmean(took for steps in plain for took, _ in steps[1:])
        steps = [step for of_block in watched for step in of_block[1:]]
        self.plain_ms.append(base)
        self._ratios.append(self._cost(statistics.fmean(took for took, _ in steps), base))
        others = [took for took, distance in steps if distance != 0]
        self._unsampled.append(self._cost(statistics.fmean(others), base))
        samples = [took for took, distance in steps if distance == 0]
        self._of_samples += [self._cost(took, base) for took in samples]
        self._extra += [100 * (took - statistics.fmean(others)) / base for took in samples]
        self._sampled.append((len(samples), len(steps)))
        self._samples_ms += [
            (place, took)
            for of_block in watched
            for place, (took, distance) in enumerate(of_block)
            if place and distance == 0
        ]
        self._all[0] += sum(d == 0 for of_block in watched for _, d in of_block)
        self._all[1] += sum(len(of_block) for of_block in watched)
        for took, distance in steps:
            self.by_distance.setdefault(distance, []).append(took)

    @staticmethod
    def _cost(took: float, base: float) -> float:
        return 100 * (took / base - 1)

    def even(self) -> list[float]:
        """The ratios as if the sampled share of each four blocks were that of all."""
        extra = statistics.fmean(self._extra) if self._extra else 0.0
        share = self._all[0] / max(1, self._all[1])
        return [
            ratio - extra * (samples / steps - share)
            for ratio, (samples, steps) in zip(self._ratios, self._sampled)
        ]

    def found(self) -> dict[str, Any]:
        cost, half_width = mean_and_half_width(self.even())
        raw, raw_half_width = mean_and_half_width(self._ratios)
        unsampled, unsampled_half_width = mean_and_half_width(self._unsampled)
        sampled, sampled_half_width = mean_and_half_width(self._of_samples)
        return {
            "measured_cost": cost, "halfwidth": half_width,
            "measured_cost_uneven": raw, "halfwidth_uneven": raw_half_width,
            "unsampled_steps": unsampled, "unsampled_halfwidth": unsampled_half_width,
            "sampled_steps": sampled, "sampled_halfwidth": sampled_half_width,
            "fours": len(self._ratios), "watched_steps": sum(n for _, n in self._sampled),
            "samples": len(self._of_samples), "sampled_share": self._all[0] / max(1, self._all[1]),
            "step_ms": statistics.fmean(self.plain_ms),
            "step_ms_by_distance": {
                distance: [len(took), statistics.fmean(took), statistics.median(took)]
                for distance, took in sorted(self.by_distance.items())
            },
            "ratios": self._ratios, "samples_ms": self._samples_ms,
        }  # fmt: skip


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
    parser.add_argument("--fours-min", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=240.0, help="of blocks by turns, at most")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--budget", type=float, default=0.005)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args(argv)

    plain, watched = Twin(Plain, args), Twin(Watched, args)
    plain.begin("block", WARM_STEPS)
    if not args.compile:  # Else they compile beside each other.
        plain.answer()
    watched.ask("block", WARM_STEPS)
    if args.compile:
        plain.answer()
    settled = watched.ask("block", args.settle)
    told, period = watched.ask("told")
    costs, began = Costs(), time.monotonic()
    for order in turns(plain, watched):
        found: dict[int, list[Any]] = {id(plain): [], id(watched): []}
        for twin in order:
            found[id(twin)].append(twin.ask("block", args.block))
        costs.add(found[id(plain)], found[id(watched)])
        spent, enough = time.monotonic() - began, len(costs.plain_ms) >= args.fours_min
        narrow = enough and mean_and_half_width(costs.even())[1] <= args.half_width
        # Four more would end too late.
        if narrow or spent * (1 + 1 / len(costs.plain_ms)) > args.seconds:
            break
    found_all = {
        "printed_cost_before": told, "interval_before": period,
        **costs.found(), **watched.ask("end"),
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else "",
        "driver": driver(),
        "torch": torch.__version__, "transformers": importlib.metadata.version("transformers"),
        "job": args.job, "size": args.size, "compiled": args.compile,
        "settled_steps": len(settled),
    }  # fmt: skip
    plain.end()
    watched.end()
    print(json.dumps(found_all))
    if args.out is not None:
        args.out.write_text(json.dumps(found_all, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
