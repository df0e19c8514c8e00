#!/usr/bin/env python3
"""The failing run, watched live: many seeds of examples/divergence_gpt.py on one GPU, one server.

A bellwetherd (of BELLWETHER_LIB_DIR: a bundle's bin, say) watches all of them at once, hook and
probes on for the whole run.  Beside them `scan --follow` reads the checkpoints of the seeds under
--scan.  When the first of these seeds drifts, a script that never imports us goes on from its
newest checkpoint.  It is attached by its PID, and let go once an alert names a layer.

The results lie in --out: NAME.bwrun as exported by the server, NAME.json with the run's own curves,
and summary.json.  The latter has the alerts of each run beside the step at which sigma(W_Q) of a
head exploded.  An explosion is that of tests/testdata/runs/labels.json (above 20, and doubled
within 500 steps).

    BELLWETHER_LIB_DIR=bundle/bin python3 tests/bench/live_runs.py --tokens tokens.npy \\
        --run flash-s12 "--seed 12" --run centred-s13 "--seed 13 --center" --scan flash-s12 \\
        --steps 6000 --minutes 8 --out live
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from bellwether_process import Server, cusolver_flags  # noqa: E402

EXAMPLE = ROOT / "examples" / "divergence_gpt.py"
SIGMA_MIN, DOUBLED_WITHIN = 20.0, 500  # Of what counts as an explosion.
DRIFTS = 12.0  # A drift ratio at which a run is called ill already, by its own curves.
SAMPLES_MAX = 64  # Within which a run that is attached when ill must be named.
ATTACHED_EVERY = 10
KEPT = 20  # Checkpoints of a run: they were scanned seconds ago.
GRACE_SECONDS = 20  # For the attached script, behind the time of the others.
VARIABLE = re.compile("[A-Z_]+=")
_OURS = ("import bellwether\n", "import bellwether._attention.dispatch\n")
_WEIGHTY = ("SEVERITY_WARNING", "SEVERITY_CRITICAL")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def exploded(run: dict[str, Any]) -> tuple[Optional[int], Optional[int]]:
    """(step, layer) of the first point at which the worst head's sigma(W_Q) of a layer was above
    SIGMA_MIN and had doubled within DOUBLED_WITHIN steps; None = never."""
    steps, sigma = run["steps"], run["sigma_wq"]
    for i, step in enumerate(steps):
        for layer, value in enumerate(sigma[i]):
            before = [sigma[j][layer] for j in range(i) if 0 < step - steps[j] <= DOUBLED_WITHIN]
            if value > SIGMA_MIN and before and value >= 2 * min(before):
                return step, layer
    return None, None


class Job:
    """One process of the example."""

    def __init__(self, name: str, script: Path, options: list[str], folder: Path) -> None:
        self.name, self.folder = name, folder
        self.log = folder / f"{name}.log"
        told = dict(word.split("=", 1) for word in options if VARIABLE.match(word))
        options = [word for word in options if not VARIABLE.match(word)]
        command = [sys.executable, "-u", str(script), "--name", name, "--out", str(folder)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*command, *options], stdout=log, stderr=log, env={**environment(), **told}
            )

    def said(self) -> tuple[int, float]:
        """(step, drift ratio) that it told of last."""
        told = re.findall(r"\] (\d+)/.* drift ([\d.]+|nan) ", self.log.read_text())
        return (int(told[-1][0]), float(told[-1][1])) if told else (-1, 0.0)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "client_lib" / "python"), "OMP_NUM_THREADS": "1"}


def named(server: Server, run: str) -> list[dict[str, Any]]:
    """Every transition of the alerts of a run, the earliest first."""
    found = []
    for alert in server.call("ListAlerts", run=run, limit=1000)["alerts"]:
        told = server.call("GetAlert", run=run, key=alert["last"]["key"])["alert"]["history"]
        found += [
            {name: t.get(name) for name in ("step", "severity", "state", "stage", "rule", "layer",
                                             "head", "heads", "eta", "summary", "evidence")}
            for t in told
        ]  # fmt: skip
    return sorted(found, key=lambda t: int(t["step"]))


def first(transitions: list[dict[str, Any]], *severities: str) -> Optional[dict[str, Any]]:
    return next((t for t in transitions if t["severity"] in severities and t["layer"] >= 0), None)


class Attached(threading.Thread):
    """A plain script that goes on from a drifting run's checkpoint, attached by its PID."""

    def __init__(
        self, server: Server, source: str, folder: Path, checkpoint: Path, options: list[str],
        deadline: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self._deadline = deadline  # By time.monotonic().
        self.result: dict[str, Any] = {"source": source, "from": checkpoint.name}
        self._server, self._folder = server, folder
        text = EXAMPLE.read_text()
        for line in _OURS:
            assert text.count(line) == 1
            text = text.replace(line, "")
        script = folder / "plain.py"
        script.write_text(text)
        self._job = Job("plain", script, [*options, "--start-from", str(checkpoint)], folder)

    def _command(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "bellwether", "attach", str(self._job.process.pid), *words],
            capture_output=True, text=True, timeout=180, env=environment(),
        )  # fmt: skip
        return (done.stdout + done.stderr).strip()

    def run(self) -> None:
        try:
            self._visit()
        except Exception as e:
            self.result["error"] = f"{type(e).__name__}: {e}"
        self._job.process.send_signal(signal.SIGTERM)
        self._job.process.wait()
        say(f"attached: {self.result}")

    def _visit(self) -> None:
        while self._job.said()[0] < 0:
            if self._job.process.poll() is not None:
                raise RuntimeError(self._job.log.read_text()[-2000:])
            time.sleep(0.05)
        run = "attached"
        self.result["said"] = self._command(
            "--server", self._server.grpc, "--run", run, "--every", str(ATTACHED_EVERY),
            "--overhead-budget", "1",
        )  # fmt: skip
        found = None
        while found is None and self._job.process.poll() is None:
            time.sleep(0.5)
            try:
                found = first(named(self._server, run), *_WEIGHTY)
            except urllib.error.HTTPError:  # The run is not there yet.
                continue
            late = time.monotonic() > self._deadline
            if late or len(self._samples(run)) > 4 * SAMPLES_MAX:
                break
        if self._job.process.poll() is None:
            self.result["detached"] = self._command("--detach")
        samples = self._samples(run)
        self.result["first_sample"] = min(samples, default=None)
        if found is not None:
            self.result["named"] = found
            self.result["samples"] = sum(1 for s in samples if s <= int(found["step"]))

    def _samples(self, run: str) -> list[int]:
        return sorted(self._server.series(run, "wq_sigma", 1))


class Scan:
    """scan --follow over the checkpoints of a run."""

    def __init__(
        self, server: Server, name: str, checkpoints: Path, heads: int, folder: Path
    ) -> None:
        self.run = f"scan-{name}"
        checkpoints.mkdir(parents=True)
        self._log = open(folder / f"{self.run}.log", "w")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bellwether", "scan", str(checkpoints), "--follow", "--settle",
             "1", "--heads", str(heads), "--server", server.grpc, "--run", self.run],
            stdout=self._log, stderr=self._log, env=environment(),
        )  # fmt: skip

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._log.close()


def tell(server: Server, run: str, own: Optional[dict[str, Any]]) -> dict[str, Any]:
    """What the server said of a run beside what became of it."""
    transitions = named(server, run)
    told: dict[str, Any] = {"run": run, "transitions": transitions}
    for key, severities in (("warning", _WEIGHTY), ("critical", _WEIGHTY[1:])):
        found = first(transitions, *severities)
        told[f"first_{key}"] = found and {k: found[k] for k in ("step", "rule", "layer", "head")}
    if own is not None:
        told["t_sigma"], told["layer"] = exploded(own)
        told["last_step"], told["ended"] = own["steps"][-1], own["ended"]
        told["sigma"], told["drift_ratio"] = own["sigma_wq"][-1], own["drift_ratio"][-1]
    return told


def where(server: Server) -> dict[str, int]:
    """How many passes of the detectors and batches of spectra ran on which device."""
    metric = re.compile(r'bellwether_(detector_tick|spectra)_seconds_count{backend="(\w+)"} (\S+)')
    told: dict[str, int] = {}
    for name, backend, count in metric.findall(server.get("/metrics")):
        told[f"{name} {backend}"] = told.get(f"{name} {backend}", 0) + int(float(count))
    return told


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run", nargs=2, action="append", metavar=("NAME", "OPTIONS"), required=True,
        help="a run and what else the example is told for it, its environment first")  # fmt: skip
    add("--scan", action="append", default=[], metavar="NAME", help="of these runs")
    add("--tokens", type=Path, required=True, help="the text as tokens (.npy)")
    add("--options", default="", help="what the example is told for all runs")
    add("--minutes", type=float, default=8, help="of training; then all runs end")
    add("--checkpoints", type=Path, help="where they go; default: below --out")
    add("--heads", type=int, default=6, help="of a layer")
    add("--drifts", type=float, default=DRIFTS, help="drift ratio from which a run is ill")
    add("--out", type=Path, default=Path("live"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    stores = args.checkpoints or args.out / "checkpoints"
    common = ["--tokens", str(args.tokens.resolve()), "--minutes", str(args.minutes)]
    common += shlex.split(args.options)
    began = time.monotonic()
    with Server(args.out, "", *cusolver_flags()) as server:
        jobs, scans = {}, []
        for name, options in args.run:
            own = [*common, *shlex.split(options), "--server", server.grpc]
            if name in args.scan:
                scans.append(Scan(server, name, stores / name, args.heads, args.out))
                own += ["--checkpoints", str(stores / name)]
            jobs[name] = Job(name, EXAMPLE, own, args.out)
        attached: Optional[Attached] = None
        said = 0.0
        while any(job.process.poll() is None for job in jobs.values()):
            time.sleep(0.25)
            if time.monotonic() - said > 20:
                said = time.monotonic()
                say("  ".join(f"{n} {j.said()[0]} ({j.said()[1]:g})" for n, j in jobs.items()))
            for name in args.scan:
                newest = sorted((stores / name).glob("step-*.pt"), key=lambda p: p.stat().st_mtime)
                for old in newest[:-KEPT]:
                    old.unlink()
                if attached is not None:
                    continue
                if jobs[name].said()[1] > args.drifts and newest:
                    options = [*common, *shlex.split(dict(args.run)[name]), "--steps", "1000000"]
                    deadline = began + 60 * args.minutes + GRACE_SECONDS
                    attached = Attached(server, name, args.out, newest[-1], options, deadline)
                    attached.start()
        if attached is not None:
            attached.join()
        for scan in scans:
            scan.stop()
        summary: dict[str, Any] = {"seconds": time.monotonic() - began, "runs": []}
        for name in jobs:
            own_path = args.out / f"{name}.json"
            own = json.loads(own_path.read_text()) if own_path.exists() else None
            if own is None:
                say(f"{name} failed: {jobs[name].log.read_text()[-2000:]}")
            else:
                server.run("run", "export", name, str(args.out / f"{name}.bwrun"))
            summary["runs"].append(tell(server, name, own))
        summary["scans"] = [tell(server, scan.run, None) for scan in scans]
        summary["attached"] = attached and attached.result
        summary["where"] = where(server)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for told in [*summary["runs"], *summary["scans"]]:
        print({k: v for k, v in told.items() if k != "transitions"}, flush=True)
    print(summary["attached"], summary["where"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
