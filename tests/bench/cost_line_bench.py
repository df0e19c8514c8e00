#!/usr/bin/env python3
"""What watching costs a job with the settings that users have, and whether the line of the log
about it tells the truth.

Two processes train one model each on one device, one of them attached, the governor included, the
other never attached.  First the watched one runs alone until its sampling period has settled.  Then
blocks of both take turns (twins.py), until the 95 % half-width of how much longer the watched steps
take on average is small enough.  Of four blocks that follow each other the watched ones are held
against the others.  How many samples a block happens to have is no noise: it is known which share
of all steps is sampled, and what a sampled step takes longer.  Prints JSON; costs are in per cent.

Each step has notes: how long its code ran, how long Python collected garbage in it, and how often
memory was asked of the driver.  A step's time has these where the device waits for its next work.
--no-collections leaves Python's collector out of both.

    python3 tests/bench/cost_line_bench.py --compile --out cost.json
    python3 tests/bench/cost_line_bench.py --job packed --size 1b       # documents, by a mask
    python3 tests/bench/cost_line_bench.py --job blocks --compile       # with all statistics
    python3 tests/bench/cost_line_bench.py --size tiny --device cpu --seconds 20

--stats are those of the watched job, and --against those of the other one, which is then watched,
too.  What `steps` costs a step without a sample, with next to none sampled:

    python3 tests/bench/cost_line_bench.py --every 9999 --stats drift,steps --against drift

A block's length should be no multiple of the period: the watched job's first step of a block
seems to it to last as long as the other's block.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

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


class Noted(NamedTuple):
    """What a step's code did."""

    host_ms: float
    collected: list[tuple[int, float]]  # Collections: generation and milliseconds.
    allocations: int  # Of memory, by the driver.


class Step(NamedTuple):
    took: float  # Milliseconds.
    distance: int  # How many steps ago the last sample was; -1: none was.
    noted: Noted


class Notes:
    """What this process does between two questions."""

    def __init__(self) -> None:
        self._began, self._found = 0.0, list[tuple[int, float]]()
        self._asked, self._allocations = time.perf_counter(), 0
        gc.callbacks.append(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self._found.append((info["generation"], 1e3 * (now - self._began)))

    def taken(self) -> Noted:
        now, allocations = time.perf_counter(), 0
        if torch.cuda.is_initialized():
            # The public function takes a third of a millisecond.
            stats = torch._C._cuda_memoryStats(torch.cuda.current_device())
            allocations = stats["num_device_alloc"]
        noted = Noted(1e3 * (now - self._asked), self._found, allocations - self._allocations)
        self._asked, self._found, self._allocations = now, [], allocations
        return noted


class Plain:
    """A job without a monitor."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.job = JOBS[args.job](args.size, args.device)
        self._begin(not args.no_collections)
        if args.compile:
            self.job.compile()

    def _begin(self, collections: bool) -> None:
        if not collections:
            gc.disable()
        self.notes = Notes()
        self._of_block: list[tuple[int, Noted]] = []

    def _step_ends(self, loss: Tensor) -> None:
        self._of_block.append((-1, self.notes.taken()))

    def block(self, steps: int) -> list[Step]:
        self._of_block.clear()
        self.notes.taken()  # What was between blocks is no step's.
        took = block(self.job, steps, self._step_ends)
        return [Step(ms, *rest) for ms, rest in zip(took, self._of_block)]

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
            overhead_budget=args.budget, stats=args.stats,
        )  # fmt: skip
        assert self.monitor.status()["live"], self.monitor.status()["why_off"]
        self._distance = -1
        self._begin(not args.no_collections)
        if args.compile:
            self.job.compile()

    def _step_ends(self, loss: Tensor) -> None:
        known = self._distance >= 0
        self._distance = 0 if self.monitor.steps.samples_step() else self._distance + known
        self.monitor.step(loss=loss)
        self._of_block.append((self._distance, self.notes.taken()))

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
        # Of each its place in its block, its time, its code's, that of collections in it, and how
        # often memory was asked of the driver.
        self._samples_ms: list[tuple[int, float, float, float, int]] = []
        self._collected = {kind: Counter[int]() for kind in ("plain", "unsampled", "sampled")}
        self._collected_ms = {kind: defaultdict[int, float](float) for kind in self._collected}
        self._of_kind, self._allocations = Counter[str](), Counter[str]()
        self._host_ms: dict[str, list[float]] = {kind: [] for kind in self._collected}
        self._all = [0, 0]  # Samples and steps, the first ones of blocks included.
        self.by_distance: dict[int, list[float]] = {}

    def add(self, plain: Sequence[list[Step]], watched: Sequence[list[Step]]) -> None:
        """Two blocks of each.  The first step of a block, which finds the device idle, is out."""
        base = statistics.fmean(step.took for steps in plain for step in steps[1:])
        steps = [step for of_block in watched for step in of_block[1:]]
        self.plain_ms.append(base)
        self._ratios.append(self._cost(statistics.fmean(step.took for step in steps), base))
        others = [step.took for step in steps if step.distance != 0]
        self._unsampled.append(self._cost(statistics.fmean(others), base))
        samples = [step.took for step in steps if step.distance == 0]
        self._of_samples += [self._cost(took, base) for took in samples]
        self._extra += [100 * (took - statistics.fmean(others)) / base for took in samples]
        self._sampled.append((len(samples), len(steps)))
        self._samples_ms += [
            (
                place,
                step.took,
                step.noted.host_ms,
                sum(ms for _, ms in step.noted.collected),
                step.noted.allocations,
            )
            for of_block in watched
            for place, step in enumerate(of_block)
            if place and step.distance == 0
        ]
        self._all[0] += sum(step.distance == 0 for of_block in watched for step in of_block)
        self._all[1] += sum(len(of_block) for of_block in watched)
        for step in steps:
            self.by_distance.setdefault(step.distance, []).append(step.took)
            self._count("unsampled" if step.distance else "sampled", step)
        for step in (step for of_block in plain for step in of_block[1:]):
            self._count("plain", step)

    def _count(self, kind: str, step: Step) -> None:
        self._of_kind[kind] += 1
        self._allocations[kind] += step.noted.allocations
        self._host_ms[kind].append(step.noted.host_ms)
        for generation, ms in step.noted.collected:
            self._collected[kind][generation] += 1
            self._collected_ms[kind][generation] += ms

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
            # By the kind of step and the generation: how many, and milliseconds of all.
            "steps": self._of_kind, "driver_allocations": self._allocations,
            "host_ms": {kind: statistics.median(ms) for kind, ms in self._host_ms.items() if ms},
            "collections": {
                kind: {generation: [count, self._collected_ms[kind][generation]]
                       for generation, count in sorted(counts.items())}
                for kind, counts in self._collected.items()
            },
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
    parser.add_argument("--stats", help="of the watched job; default: those of attach()")
    parser.add_argument("--against", help="stats of the other job; default: it is not watched")
    parser.add_argument("--no-collections", action="store_true", help="without Python's collector")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args(argv)

    if args.against:
        plain = Twin(Watched, argparse.Namespace(**{**vars(args), "stats": args.against}))
    else:
        plain = Twin(Plain, args)
    watched = Twin(Watched, args)
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
        "stats": args.stats, "against": args.against, "settled_steps": len(settled),
        "collector": not args.no_collections,
    }  # fmt: skip
    plain.end()
    watched.end()
    print(json.dumps(found_all))
    if args.out is not None:
        args.out.write_text(json.dumps(found_all, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
