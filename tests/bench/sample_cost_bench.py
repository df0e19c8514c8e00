#!/usr/bin/env python3
"""What a sampled step takes longer than the others, for several packages or lists of stats side by
side: each in a process of its own, blocks by turns there and back on one device.

    python3 tests/bench/sample_cost_bench.py \\
        --job before=/tmp/before/client_lib/python:all --job now=client_lib/python:all \\
        --job default=client_lib/python: --out samples.json

A job is NAME=PACKAGES:STATS: the folder that `bellwether` is imported from, and what is measured
(`all`: every part; nothing: the default).  The model is cost_line_bench's, so transformers is
needed.  There is no budget, so that the period stays.  Prints JSON: medians in milliseconds,
what sampled steps take longer in per cent, the kernels and the CPU's time of a sample, and how much
longer the samples took whose number leaves 0, 1, ... when it is divided by five: whatever is around
blocks has one of them, and blocks the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Optional

HERE = Path(__file__).resolve().parent
ALL = "drift,leak,ties,delta,sigma,laws,linear,rest,tensors,modules,experts,fp8,steps"
TURNS = 5
WARM_SAMPLES = 6


class Worker:
    """A job that is asked for blocks of steps, on its standard input."""

    def __init__(self, name: str, packages: str, stats: str, args: argparse.Namespace) -> None:
        self.name = name
        given = [packages, stats, args.size, args.device, str(args.every)]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker", *given],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.steps: list[tuple[int, float, float]] = []  # Sample or -1, device ms, the code's ms.

    def begin(self, steps: int) -> None:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended")
        return json.loads(line)

    def block(self, steps: int) -> None:
        self.begin(steps)
        self.steps += [tuple(step) for step in self.answer()][1:]  # The first finds it idle.

    def end(self) -> dict[str, Any]:
        self.begin(0)
        told: dict[str, Any] = self.answer()
        self._process.wait()
        return told


def median_ms(seconds: Iterable[float]) -> Optional[float]:
    known = list(seconds)
    return 1e3 * statistics.median(known) if known else None


def work(packages: str, stats: str, size: str, device: str, every: str) -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # What others print is no answer.
    sys.path[:0] = [packages, str(HERE)]
    import torch

    import bellwether

    assert Path(bellwether.__file__).resolve().is_relative_to(Path(packages).resolve())
    from cost_line_bench import TransformersJob

    job = TransformersJob(size, device)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"stats": stats} if stats else {}
        monitor = bellwether.attach(
            job.model, record=f"{folder}/run.bwrun", run="samples", every=int(every),
            overhead_budget=1e9, byte_budget=0, **settings,
        )  # fmt: skip
        samples = 0

        def mark() -> Callable[[], float]:
            """Milliseconds, to be asked when the device is idle."""
            if device != "cuda":
                now = time.perf_counter()
                return lambda: 1e3 * now
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return lambda: first.elapsed_time(event)

        if device == "cuda":
            first = torch.cuda.Event(enable_timing=True)
            first.record()
        for line in sys.stdin:
            if not int(line):
                break
            marks, numbers, code = [mark()], [], []
            for _ in range(int(line)):
                sampled, began = monitor.steps.samples_step(), time.perf_counter()
                loss = job.step()
                monitor.step(loss=loss)
                code.append(1e3 * (time.perf_counter() - began))
                numbers.append(samples if sampled else -1)
                samples += sampled
                marks.append(mark())
            if device == "cuda":
                torch.cuda.synchronize()
            times = [at() for at in marks]
            took = [b - a for a, b in zip(times, times[1:])]
            print(json.dumps(list(zip(numbers, took, code))), file=out, flush=True)
        status, price = monitor.status(), monitor.steps.reporter.cost.price
        monitor.detach()
        assert status["errors"] == 0 and status["live"], status
        told = {
            "kernels_ms": median_ms(price._kernels), "hook_cpu_ms": median_ms(price._hook),
            "modules": status["modules"], "sample_bytes": status["volume"]["sample"],
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name() if device == "cuda" else "",
        }  # fmt: skip
        print(json.dumps(told), file=out, flush=True)


def found(worker: Worker) -> dict[str, Any]:
    others = [took for sample, took, _ in worker.steps if sample < 0]
    samples = [(n, took) for n, took, _ in worker.steps if n >= WARM_SAMPLES]
    base, sampled = statistics.median(others), statistics.median(took for _, took in samples)
    turns: dict[int, list[float]] = {turn: [] for turn in range(TURNS)}
    for number, took in samples:
        turns[number % TURNS].append(took - base)
    mean = statistics.fmean(took for _, took in samples)
    return {
        "samples": len(samples), "unsampled_ms": base, "sampled_ms": sampled,
        "longer_percent": 100 * (sampled / base - 1),
        "longer_percent_mean": 100 * (mean / statistics.fmean(others) - 1),
        "longer_ms_by_turn": {t: statistics.median(of) for t, of in turns.items() if of},
        "code_ms_sampled": statistics.median(c for n, _, c in worker.steps if n >= WARM_SAMPLES),
        "code_ms_unsampled": statistics.median(c for n, _, c in worker.steps if n < 0),
        **worker.end(),
    }  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--job", action="append", required=True, help="NAME=PACKAGES:STATS")
    parser.add_argument("--size", default="124m", help="as cost_line_bench has them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--block", type=int, default=61, help="steps")
    parser.add_argument("--rounds", type=int, default=2, help="there and back")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    jobs = []
    for given in args.job:
        name, _, rest = given.partition("=")
        packages, _, stats = rest.rpartition(":")
        jobs.append((name, str(Path(packages).resolve()), ALL if stats == "all" else stats))
    workers = [Worker(*job, args) for job in jobs]
    for worker in workers:  # They begin beside each other.
        worker.begin(WARM_SAMPLES * args.every + 1)
    for worker in workers:
        worker.answer()
    for _ in range(args.rounds):
        for worker in (*workers, *reversed(workers)):
            worker.block(args.block)
    told = {worker.name: found(worker) for worker in workers}
    print(json.dumps(told))
    if args.out is not None:
        args.out.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
