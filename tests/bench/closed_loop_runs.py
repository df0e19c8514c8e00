#!/usr/bin/env python3
"""The failing run, repaired by its server: seeds of examples/divergence_gpt.py, side by side.

For each seed five runs of the same data: `untouched`, which is watched and let alone until it has
exploded; `centred`, whose keys are centred from step 0; and three that are repaired by a
bellwetherd (of BELLWETHER_LIB_DIR: a bundle's bin, say) from its own alerts at the default
thresholds, by one remedy each: `by-centring`, PyTorch's kernel with centred keys; `by-hp`, the
unbiased kernel; and `late`, which is left alone until sigma(W_Q) has passed 100 and then centred
and clipped by the built-in policy.

A run that is not done when the time is up goes on with the same command: its checkpoint, the
server's data and what was measured stay in --out.  Runs share the GPUs that are there.  At the end:
summary.json with each run's actions and their history, the step of the explosion and the mean loss
of the last steps beside that of `centred` over the same steps; and a picture for each seed.

    BELLWETHER_LIB_DIR=bundle/bin python3 tests/bench/closed_loop_runs.py --tokens tokens.npy \\
        --seed 4 --seed 12 --seed 17 --steps 12000 --minutes 8 --out closed-loop
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from bellwether_process import Server  # noqa: E402
from live_runs import EXAMPLE, Job, exploded, named, say  # noqa: E402

LATE_SIGMA = 100.0  # Past which the late run is repaired.
LOSS_STEPS = 500  # Over which the losses are compared.
RULE = "{{mode: enforce, rules: [{{when: {{rule: [drift, ties, norm]}}, ladder: [{{{}}}]}}]}}"
#          kind -> its options, its policy from the start
KINDS = {
    "untouched": (f"--stop-sigma {LATE_SIGMA:g}", "mode: observe"),
    "centred": ("--center", "mode: observe"),
    "by-centring": (
        "--allow attention.center_k", RULE.format("do: attention.center_k, scope: layers"),
    ),
    "by-hp": ("--allow attention.mode", RULE.format("do: attention.mode, mode: hp, scope: all")),
    "late": ("--allow attention.center_k,qk.clip,attention.mode", "mode: observe"),
}  # fmt: skip


class Run:
    """One run over as many calls as it takes."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self.kind, self.seed, self.folder = kind, seed, folder
        self.name = f"{kind}-s{seed}"
        self.job: Optional[Job] = None

    def own(self) -> Optional[dict[str, Any]]:
        path = self.folder / f"{self.name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def done(self, steps: int) -> bool:
        own = self.own()
        return own is not None and (own["steps"][-1] >= steps - 1 or "sigma" in own["ended"])

    def start(self, server: Server, device: str, attempt: int, options: list[str]) -> None:
        told = [f"CUDA_VISIBLE_DEVICES={device}", f"BELLWETHER_ATTEMPT={attempt}"]
        own = shlex.split(KINDS[self.kind][0])
        checkpoint = ["--checkpoint", str(self.folder / f"{self.name}.pt")]
        self.job = Job(
            self.name, EXAMPLE,
            [*told, *options, *own, "--seed", str(self.seed), "--server", server.grpc, *checkpoint],
            self.folder,
        )  # fmt: skip

    def running(self) -> bool:
        return self.job is not None and self.job.process.poll() is None


def gpus() -> list[str]:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(i) for i in range(len(listed.stdout.splitlines()))]


def actions_of(server: Server, run: str) -> list[dict[str, Any]]:
    return list(server.call("ListActions", run=run).get("actions", []))


def set_policy(server: Server, run: str, text: str) -> None:
    mode = "MODE_ENFORCE" if "enforce" in text else "MODE_OBSERVE"
    server.call("SetPolicy", run=run, policy={"mode": mode, "yaml": text}, by="closed_loop_runs")


def sigma_said(run: Run) -> float:
    """The largest sigma(W_Q) that the run's log told of last."""
    assert run.job is not None
    told = [line for line in run.job.log.read_text().splitlines() if "sigma(W_Q) " in line]
    return float(told[-1].split("sigma(W_Q) ")[1].split()[0]) if told else 0.0


def losses(own: dict[str, Any], before: int) -> list[float]:
    """Of the LOSS_STEPS steps before."""
    points = zip(own["steps"], own["loss"])
    return [x for step, x in points if before - LOSS_STEPS <= step < before and x is not None]


def tell(server: Server, run: Run, twin: Optional[dict[str, Any]]) -> dict[str, Any]:
    own = run.own()
    assert own is not None
    told: dict[str, Any] = {"run": run.name, "kind": run.kind, "seed": run.seed}
    told["t_sigma"], told["layer"] = exploded(own)
    told["last_step"], told["ended"] = own["steps"][-1], own["ended"]
    told["sigma"] = max(own["sigma_wq"][-1])
    end = own["steps"][-1] + 1 if twin is None else min(own["steps"][-1], twin["steps"][-1]) + 1
    mine = losses(own, end)
    told["loss"] = sum(mine) / len(mine) if mine else None
    if twin is not None:
        its = losses(twin, end)
        if mine and its:
            told["of_centred"] = sum(mine) / len(mine) / (sum(its) / len(its))
    told["transitions"] = named(server, run.name)
    told["actions"] = actions_of(server, run.name)
    return told


def draw(runs: list[Run], summary: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(10, 7), dpi=100)
    for number, (run, told) in enumerate(zip(runs, summary)):
        own = run.own()
        assert own is not None
        color = f"C{number}"
        above.plot(own["steps"], [max(x) for x in own["sigma_wq"]], color=color, label=run.kind)
        shown = [float("nan") if x is None else x for x in own["loss"]]
        below.plot(own["steps"], shown, color=color, lw=0.8)
        for action in told["actions"]:
            for change in action.get("history", []):
                if change["state"] == "ACTION_STATE_APPLIED":
                    for axis in (above, below):
                        axis.axvline(int(change["step"]), color=color, ls=":", lw=0.9)
    above.set_yscale("log")
    above.set_ylabel("sigma(W_Q), worst head")
    above.legend(fontsize=8)
    below.set(ylim=(1, 4), ylabel="loss", xlabel="step; dotted: an action was applied")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, action="append", required=True, help="named before it is seen")
    add("--kind", action="append", choices=KINDS, help="only these")
    add("--tokens", type=Path, required=True, help="the text as tokens (.npy)")
    add("--options", default="--compile-loss", help="what the example is told for all runs")
    add("--steps", type=int, default=12_000)
    add("--minutes", type=float, default=8, help="of training in this call")
    add("--at-once", type=int, default=8, help="runs that share one GPU")
    add("--out", type=Path, default=Path("closed-loop"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    counter = args.out / "attempt"
    attempt = int(counter.read_text()) + 1 if counter.exists() else 0
    counter.write_text(str(attempt))
    runs = [Run(kind, seed, args.out) for seed in args.seed for kind in args.kind or list(KINDS)]
    options = ["--tokens", str(args.tokens.resolve()), "--steps", str(args.steps)]
    options += ["--minutes", str(args.minutes), *shlex.split(args.options)]
    devices = gpus()
    with Server(args.out) as server:
        waiting = [run for run in runs if not run.done(args.steps)]
        places = itertools.cycle(devices)
        told: set[str] = set()
        late: set[str] = set()
        said, began = 0.0, time.monotonic()
        started: list[Run] = []
        while waiting or any(run.running() for run in started):
            free = args.at_once * len(devices) - sum(run.running() for run in started)
            while waiting and free > 0 and time.monotonic() - began < 60 * args.minutes:
                run = waiting.pop(0)
                run.start(server, next(places), attempt, options)
                started.append(run)
                free -= 1
            if time.monotonic() - began >= 60 * args.minutes:
                waiting = []
            time.sleep(0.25)
            for run in started:
                if run.name not in told and run.running():
                    try:  # As soon as the run is known: its alerts are thousands of steps away.
                        set_policy(server, run.name, KINDS[run.kind][1])
                        told.add(run.name)
                    except OSError:
                        continue
                if run.kind == "late" and run.name not in late and sigma_said(run) > LATE_SIGMA:
                    set_policy(server, run.name, "mode: enforce")
                    late.add(run.name)
                    say(f"{run.name}: sigma {sigma_said(run):g}, to be repaired from now on")
            if time.monotonic() - said > 20:
                said = time.monotonic()
                say("  ".join(f"{r.name} {r.job.said()[0]}" for r in started if r.job is not None))
        summary = []
        for run in runs:
            if run.own() is None:
                log = run.job.log.read_text()[-2000:] if run.job is not None else "never started"
                say(f"{run.name}: {log}")
                continue
            twin = Run("centred", run.seed, args.out).own() if run.kind != "centred" else None
            summary.append(tell(server, run, twin))
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for seed in args.seed:
        of = [r for r in runs if r.seed == seed and r.own() is not None]
        draw(of, [s for s in summary if s["seed"] == seed], args.out / f"closed-loop-s{seed}.png")
    for line in summary:
        changes = [
            (action["kind"], change["state"], change.get("step"), change.get("reason"))
            for action in line.pop("actions")
            for change in action["history"]
        ]
        line.pop("transitions")
        print(line, changes, flush=True)
    left = [run.name for run in runs if not run.done(args.steps)]
    if left:
        print(f"the same command goes on with {', '.join(left)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
