#!/usr/bin/env python3
"""The failing run, repaired by its server: seeds of examples/divergence_gpt.py, side by side.

For each seed there are five runs of the same data:

* `untouched` is watched and let alone;
* `centred` has keys that are centred from step 0;
* `by-centring` is repaired by one remedy, PyTorch's kernel with centred keys;
* `by-hp` is repaired by the unbiased kernel;
* `late` is left alone until sigma(W_Q) has passed 100 and then repaired by the built-in policy.

A bellwetherd (of BELLWETHER_LIB_DIR: a bundle's bin, say) repairs the last three from its own
alerts at the default thresholds.

How late is too late, and what does going back to a checkpoint bring?  `untouched` leaves a
checkpoint every so often.  Three runs branch off, as a restart would, from each of three
checkpoints.  They are the first ones at which sigma(W_Q) has passed 30, it has passed 100, and the
loss has left that of `centred`.  Each has one remedy: keys centred; hp; keys centred and W_Q and
W_K clipped once, by the server at a person's request.  From the newest checkpoint before the first
critical alert two, centred and hp, go on to the end: that is what `rollback.suggest` advises.

A run that is not done when the time is up goes on with the same command: its checkpoint, the
server's data and what was measured stay in --out.  Runs share the GPUs that are there.  At the end
summary.json has each run's actions and their history, and the step of the explosion.  It has the
mean loss of the last steps beside that of `centred` over the same steps.  There are two pictures
for each seed.

    BELLWETHER_LIB_DIR=bundle/bin python3 tests/bench/closed_loop_runs.py --tokens tokens.npy \\
        --seed 4 --seed 12 --seed 17 --steps 12000 --minutes 8 --out closed-loop
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from bellwether_process import Server  # noqa: E402
from live_runs import EXAMPLE, Job, exploded, first, named, say  # noqa: E402

LATE_SIGMA = 100.0  # Past which the late run is repaired.
LOSS_STEPS = 500  # Over which the losses are compared.
LEFT_STEPS, LEFT = 200, 0.3  # The loss has left: its mean over so many steps is so much higher.
CHECKPOINT_EVERY = 250
RULE = (
    "{{mode: enforce, rules: [{{when: {{rule: [drift, ties, norm]}}, confirm_steps: 40,"
    " ladder: [{{{}, trial_steps: 1000, undo: never}}]}}]}}"
)
#          kind -> its options, its policy from the start
KINDS = {
    "untouched": ("", "mode: observe"),
    "centred": ("--center", "mode: observe"),
    "by-centring": (
        "--allow attention.center_k", RULE.format("do: attention.center_k, scope: all"),
    ),
    "by-hp": ("--allow attention.mode", RULE.format("do: attention.mode, mode: hp, scope: all")),
    "late": ("--allow attention.center_k,qk.clip,attention.mode", "mode: observe"),
}  # fmt: skip
#            remedy -> the options of a run that branches off
REMEDIES = {
    "centred": "--center",
    "hp": "--attention bellwether-hp",
    "clipped": "--center --allow qk.clip",
}
POINTS = ("sigma-30", "sigma-100", "loss-left", "before-alert")


class Run:
    """One run over as many calls as it takes."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self.kind, self.seed, self.folder = kind, seed, folder
        self.name = f"{kind}-s{seed}"
        self.job: Optional[Job] = None
        self.options = shlex.split(KINDS[kind][0]) if kind in KINDS else []
        self.first = 0  # The step at which it began or branched off.
        self.steps: Optional[int] = None  # Its last; None: as all.
        self.device = ""

    def checkpoints(self) -> Path:
        return self.folder / f"untouched-s{self.seed}"

    def own(self) -> Optional[dict[str, Any]]:
        path = self.folder / f"{self.name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else None

    def done(self, steps: int) -> bool:
        own = self.own()
        if own is None:
            return False
        return own["steps"][-1] >= (self.steps or steps) - 1 or "not finite" in own["ended"]

    def start(self, server: Server, device: str, attempt: int, options: list[str]) -> None:
        self.device = device
        told = [f"CUDA_VISIBLE_DEVICES={device}", f"BELLWETHER_ATTEMPT={attempt}"]
        words = [*told, *options, *self.options, "--seed", str(self.seed)]
        if self.steps is not None:
            words += ["--steps", str(self.steps)]
        words += ["--server", server.grpc, "--checkpoint", str(self.folder / f"{self.name}.pt")]
        self.job = Job(self.name, EXAMPLE, words, self.folder)

    def running(self) -> bool:
        return self.job is not None and self.job.process.poll() is None


def reached(untouched: dict[str, Any], centred: Optional[dict[str, Any]]) -> dict[str, int]:
    """The step at which each of POINTS was reached by the untouched run."""
    found = {}
    for step, sigmas in zip(untouched["steps"], untouched["sigma_wq"]):
        for limit in (30, 100):
            if max(sigmas) > limit:
                found.setdefault(f"sigma-{limit}", step)
    if centred is not None:
        for step in untouched["steps"]:
            mine, its = (losses(run, step, LEFT_STEPS) for run in (untouched, centred))
            if len(mine) == len(its) > 5 and sum(mine) / len(mine) - sum(its) / len(its) > LEFT:
                found["loss-left"] = step
                break
    return found


def branches(
    untouched: Run,
    centred: Run,
    critical: Optional[int],
    steps: int,
    last: int,
    chosen: Sequence[str],
) -> list[Run]:
    """The runs that can branch off by now, at the chosen of POINTS.  `critical`: the step of the
    first critical alert."""
    own = untouched.own()
    if own is None:
        return []
    points = reached(own, centred.own())
    if critical is not None:
        points["before-alert"] = critical
    found = []
    for point, step in points.items():
        if point not in chosen:
            continue
        back = point == "before-alert"
        begin = (step - 1 if back else step + CHECKPOINT_EVERY - 1) // CHECKPOINT_EVERY
        begin *= CHECKPOINT_EVERY
        checkpoint = untouched.checkpoints() / f"step-{begin}.pt"
        for remedy, options in REMEDIES.items() if checkpoint.exists() else ():
            if back and remedy == "clipped":
                continue  # Nothing stands out yet.
            run = Run(f"{remedy}-from-{point}", untouched.seed, untouched.folder)
            run.first, run.steps = begin, last if back else min(begin + steps, last)
            run.options = [*shlex.split(options), "--start-from", str(checkpoint)]
            found.append(run)
    return found


def gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return [""]  # A rehearsal, with --options "--device cpu ...".
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(i) for i in range(len(listed.stdout.splitlines()))]


def actions_of(server: Server, run: str) -> list[dict[str, Any]]:
    return list(server.call("ListActions", run=run).get("actions", []))


def set_policy(server: Server, run: str, text: str) -> None:
    server.call("SetPolicy", run=run, policy={"yaml": text}, by="closed_loop_runs")


def clip_once(server: Server, run: str) -> bool:
    """As a person would: the heads whose W_Q stands out, down to the others' median; whether the
    server has a sample to tell them by."""
    heads = server.call("TopHeads", run=run, signal="wq_sigma", step=-1, limit=64).get("heads", [])
    out = [h for h in heads if h["value"] > 2 * h["median"]]
    if not out:
        return False
    scope = {"heads": [{"layer": h.get("layer", 0), "head": h.get("head", 0)} for h in out]}
    action = {"kind": "ACTION_KIND_QK_CLIP", "value": 0, "scope": scope}
    server.call("ProposeAction", run=run, action=action, by="closed_loop_runs", approve=True)
    say(f"{run}: clipping {len(out)} heads, the worst of sigma {out[0]['value']:g}")
    return True


def sigma_said(run: Run) -> float:
    """The largest sigma(W_Q) that the run's log told of last."""
    assert run.job is not None
    told = [line for line in run.job.log.read_text().splitlines() if "sigma(W_Q) " in line]
    return float(told[-1].split("sigma(W_Q) ")[1].split()[0]) if told else 0.0


def losses(own: dict[str, Any], before: int, steps: int) -> list[float]:
    """Of so many steps before."""
    points = zip(own["steps"], own["loss"])
    return [x for step, x in points if before - steps <= step < before and x is not None]


def tell(server: Server, run: Run, twin: Optional[dict[str, Any]]) -> dict[str, Any]:
    own = run.own()
    assert own is not None
    told: dict[str, Any] = {"run": run.name, "kind": run.kind, "seed": run.seed}
    told["from"] = run.first
    told["t_sigma"], told["layer"] = exploded(own)
    told["last_step"], told["ended"] = own["steps"][-1], own["ended"]
    told["sigma"] = max(own["sigma_wq"][-1])
    before = [max(x) for step, x in zip(own["steps"], own["sigma_wq"]) if step < run.first]
    told["sigma_from"] = before[-1] if before else None
    end = own["steps"][-1] + 1 if twin is None else min(own["steps"][-1], twin["steps"][-1]) + 1
    mine = losses(own, end, LOSS_STEPS)
    told["loss"] = sum(mine) / len(mine) if mine else None
    if twin is not None:
        its = losses(twin, end, LOSS_STEPS)
        if mine and its:
            told["of_centred"] = sum(mine) / len(mine) / (sum(its) / len(its))
        told |= reached(own, twin) if run.kind == "untouched" else {}
    told["transitions"] = named(server, run.name)
    told["actions"] = actions_of(server, run.name)
    return told


def draw(runs: list[Run], summary: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(10, 7), dpi=100)
    lines = dict(zip(POINTS, ("-", "--", ":", "-.")))
    for number, (run, told) in enumerate(zip(runs, summary)):
        own = run.own()
        assert own is not None
        remedy, _, point = run.kind.partition("-from-")
        color = f"C{number}" if not point else f"C{1 + list(REMEDIES).index(remedy)}"
        since = next(i for i, step in enumerate(own["steps"]) if step >= run.first)
        style = {"color": color, "ls": lines.get(point, "-")}
        sigmas = [max(x) for x in own["sigma_wq"]]
        above.plot(own["steps"][since:], sigmas[since:], label=run.kind, **style)
        shown = [float("nan") if x is None else x for x in own["loss"]]
        below.plot(own["steps"][since:], shown[since:], lw=0.8, **style)
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


class Campaign:
    """All runs of one call: they share the GPUs and one server."""

    def __init__(self, args: argparse.Namespace, server: Server, attempt: int) -> None:
        self.args, self.server, self.attempt = args, server, attempt
        self.began = time.monotonic()
        self.runs = [
            Run(kind, seed, args.out) for seed in args.seed for kind in args.kind or list(KINDS)
        ]
        for run in self.runs:
            if run.kind == "untouched" and args.untouched_steps:
                run.steps = min(args.untouched_steps, args.steps)
        self.started: list[Run] = []
        self.told: set[str] = set()  # Whose server knows what to do.
        self.looked: dict[int, tuple[bool, bool]] = {}  # Seed -> which of its two had run by then.
        self.devices = gpus()

    def minutes_left(self) -> float:
        return float(self.args.minutes) - (time.monotonic() - self.began) / 60

    def running(self) -> list[Run]:
        return [run for run in self.started if run.running()]

    def add_branches(self) -> None:
        of = {run.name: run for run in self.runs}
        for seed in self.args.seed if self.args.branch_steps else ():
            untouched, centred = of.get(f"untouched-s{seed}"), of.get(f"centred-s{seed}")
            if untouched is None or centred is None or untouched.running() or centred.running():
                continue
            ran = (untouched.job is not None, centred.job is not None)
            if untouched.own() is None or self.looked.get(seed) == ran:
                continue
            self.looked[seed] = ran
            alert = first(named(self.server, untouched.name), "SEVERITY_CRITICAL")
            critical = None if alert is None else int(alert["step"])
            found = branches(
                untouched,
                centred,
                critical,
                self.args.branch_steps,
                self.args.steps,
                self.args.point or POINTS,
            )
            self.runs += [run for run in found if run.name not in of]

    def start_what_waits(self) -> None:
        args = self.args
        for run in self.runs:
            places = [run.device for run in self.running()]
            device = min(self.devices, key=places.count)
            left = self.minutes_left()
            if left < 0.5 or places.count(device) >= args.at_once:
                return
            if run in self.started or run.done(args.steps):
                continue
            if run.own() is not None and run.kind != "late":
                self.told.add(run.name)  # It goes on, and so does its policy.
            options = ["--tokens", str(args.tokens.resolve()), "--steps", str(args.steps)]
            options += ["--minutes", f"{left:.2f}", *shlex.split(args.options)]
            if run.kind == "untouched" and args.branch_steps:
                options += ["--checkpoints", str(run.checkpoints())]
                options += ["--checkpoint-every", str(CHECKPOINT_EVERY)]
            run.start(self.server, device, self.attempt, options)
            self.started.append(run)

    def steer(self, run: Run) -> None:
        """What a person beside it would do: a policy, as soon as the run is known."""
        if run.name in self.told:
            return
        if run.kind == "late":
            if self.server.call("GetPolicy", run=run.name).get("mode") == "MODE_ENFORCE":
                self.told.add(run.name)
            elif sigma_said(run) > LATE_SIGMA:
                set_policy(self.server, run.name, "mode: enforce")
                say(f"{run.name}: sigma {sigma_said(run):g}, to be repaired from now on")
        elif run.kind in KINDS:
            set_policy(self.server, run.name, KINDS[run.kind][1])
            self.told.add(run.name)
        elif run.kind.startswith("clipped") and clip_once(self.server, run.name):
            self.told.add(run.name)

    def go(self) -> None:
        said = 0.0
        while True:
            self.add_branches()
            self.start_what_waits()
            if not self.running():
                return
            time.sleep(0.25)
            for run in self.running():
                try:
                    self.steer(run)
                except urllib.error.HTTPError as error:
                    if error.code != 404:  # The server does not know it yet.
                        raise SystemExit(f"{run.name}: {error.read().decode()}") from error
            if time.monotonic() - said > 20:
                said = time.monotonic()
                say("  ".join(f"{r.name} {r.job.said()[0]}" for r in self.running() if r.job))


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
    add("--branch-steps", type=int, default=2_000, help="of the runs that branch off; 0: none do")
    add("--point", action="append", choices=POINTS, help="branch off at these only")
    add("--untouched-steps", type=int, default=0, help="of the untouched runs; 0: as all")
    add("--minutes", type=float, default=8, help="of training in this call")
    add("--at-once", type=int, default=8, help="runs that share one GPU")
    add("--out", type=Path, default=Path("closed-loop"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    counter = args.out / "attempt"
    attempt = int(counter.read_text()) + 1 if counter.exists() else 0
    counter.write_text(str(attempt))
    with Server(args.out) as server:
        campaign = Campaign(args, server, attempt)
        campaign.go()
        summary = []
        for run in campaign.runs:
            if run.own() is None:
                log = run.job.log.read_text()[-2000:] if run.job is not None else "never started"
                say(f"{run.name}: {log}")
                continue
            twin = Run("centred", run.seed, args.out).own() if run.kind != "centred" else None
            summary.append(tell(server, run, twin))
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    of = {told["run"]: told for told in summary}
    for seed in args.seed:
        ran = [run for run in campaign.runs if run.seed == seed and run.name in of]
        for name, chosen in (
            ("closed-loop", [run for run in ran if run.kind in KINDS]),
            ("how-late", [run for run in ran if run.kind not in KINDS or run.kind == "untouched"]),
        ):
            draw(chosen, [of[run.name] for run in chosen], args.out / f"{name}-s{seed}.png")
    for line in summary:
        changes = [
            (action["kind"], change["state"], change.get("step"), change.get("reason"))
            for action in line.pop("actions")
            for change in action["history"]
        ]
        line.pop("transitions")
        print(line, changes, flush=True)
    left = [run.name for run in campaign.runs if not run.done(args.steps)]
    if left:
        print(f"the same command goes on with {', '.join(left)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
