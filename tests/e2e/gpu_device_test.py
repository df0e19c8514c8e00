#!/usr/bin/env python3
"""Goal: bellwetherd with its detectors on a real GPU reports what one without reports.  That holds
for every recorded run, for a job that trains beside it, and when the device breaks in the middle of
a run.  Its cuSOLVER makes the same gram_* signals of the matrices that a job ships.
Method: the real server and command, from BELLWETHER_LIB_DIR (a bundle's bin/ or a build's) with
libbellwether_bank.so and libbellwether_breaking_gpu_bank.so in that folder.  A recorded run goes to
a server with --gpu=on and to one with --gpu=off.  The alert logs must be equal to the last word,
except for what they have of other runs.  The job is examples/tiny_transformer.py, which needs
PyTorch; what it ships is also recorded, and imported by both servers.  Plain Python, so that it
runs where the GPU is; exit code 77 without a GPU (1 under BELLWETHER_REQUIRE_GPU=1).
BELLWETHER_CUSOLVER names a cuSOLVER that the loader does not find.

    BELLWETHER_LIB_DIR=bundle/bin python3 tests/e2e/gpu_device_test.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, cusolver_flags, wait_for

BREAKING = BIN / "libbellwether_breaking_gpu_bank.so"
LIVE_STEPS = 3000
SHIPPED_STEPS = 60  # An import is faster than spectra, and steps wait for theirs until 64 are behind them.
LAYERS = 2  # Of the job, of one head each.
GRAM_SIGNALS = ("gram_sigma", "gram_stable_rank", "gram_effective_rank", "gram_top2_ratio", "gram_increment_rank")
GPU_ON = ["--gpu=on", *cusolver_flags()]


def counted(server: Server, name: str) -> int:
    """The sum of a metric's series whose lines begin with `name`."""
    lines = (line for line in server.get("/metrics").splitlines() if line.startswith(name))
    return sum(int(float(line.split()[-1])) for line in lines)


def ticks(server: Server, backend: str) -> int:
    return counted(server, f'bellwether_detector_tick_seconds_count{{backend="{backend}"}}')


def train(steps: int, *options: str) -> None:
    command = [sys.executable, str(ROOT / "examples/tiny_transformer.py"), "--seed", "1", "--steps", str(steps)]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)


def await_end(recording: Path) -> None:
    """The sender, a process of its own, writes the end after the job's."""
    command = [str(BIN / "bellwether"), "replay", str(recording)]
    wait_for(
        "the recording's end", lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def spectra(server: Server, run: str) -> dict[tuple[str, int], dict[int, float]]:
    """The series that came of its matrices, by signal and layer."""
    return {(signal, layer): server.series(run, signal, layer) for signal in GRAM_SIGNALS for layer in range(LAYERS)}


def spectra_where(server: Server) -> dict[str, int]:
    """How many matrices were computed, and in how many batches on which device."""
    return {
        "computed": counted(server, 'bellwether_spectra_total{result="computed"}'),
        **{b: counted(server, f'bellwether_spectra_seconds_count{{backend="{b}"}}') for b in ("cuda", "cpu")},
    }


def shipped(folder: Path, recording: Path, *flags: str) -> tuple[dict[tuple[str, int], Any], dict[str, int], str]:
    """The spectra of a recording that holds matrices, where they were computed, and the server's
    log."""
    folder.mkdir()
    with Server(folder, "", *flags) as server:
        server.run("run", "import", str(recording), "--name", "shipped")
        # Its last steps wait for their spectra.
        wait_for("the run has ended", lambda: server.call("GetRun", run="shipped").get("ended"))
        return spectra(server, "shipped"), spectra_where(server), server.log()


def judged(server: Server, run: str) -> list[dict[str, Any]]:
    """The alert log without what is told of other runs: it is of those that were learned by
    then."""
    log: list[dict[str, Any]] = server.alert_log(run)
    for transition in log:
        transition.pop("imported", None)  # Of the live run it is not so.
        for part in (transition, *transition["evidence"]):
            part.pop("siblings", None)
    return log


def imported(folder: Path, recordings: list[Path], *flags: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The alert log of each recording by its name, and what ran where."""
    folder.mkdir()
    with Server(folder, "", *flags) as server:
        logs = {}
        for recording in recordings:
            name = recording.stem
            server.run("run", "import", str(recording), "--name", name)
            logs[name] = judged(server, name)
        where = {
            "ticks_cuda": ticks(server, "cuda"),
            "ticks_cpu": ticks(server, "cpu"),
            "degraded": counted(server, 'bellwether_degraded{reason="gpu"}'),
        }
    return logs, where


def compare(what: str, expected: dict[str, Any], found: dict[str, Any]) -> int:
    different = [name for name in expected if expected[name] != found.get(name)]
    for name in different:
        print(f"{what}: {name} differs\n  cpu  {expected[name]}\n  cuda {found.get(name)}")
    return len(different)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with a line of figures")
    args = parser.parse_args()
    if shutil.which("nvidia-smi") is None or subprocess.call(["nvidia-smi"], stdout=subprocess.DEVNULL) != 0:
        print("no GPU here")
        return 1 if os.environ.get("BELLWETHER_REQUIRE_GPU") == "1" else 77
    recordings = sorted((ROOT / "tests/testdata").glob("*/*.bwrun"))
    failed = []
    figures: dict[str, Any] = {"recordings": len(recordings)}

    def expect(condition: bool, what: str) -> None:
        print(("ok      " if condition else "FAILED  ") + what, flush=True)
        if not condition:
            failed.append(what)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with ThreadPoolExecutor() as pool:
            cpu_job = pool.submit(imported, folder / "cpu", recordings, "--gpu=off")
            cuda_job = pool.submit(imported, folder / "cuda", recordings, *GPU_ON)
            broken_job = pool.submit(
                imported, folder / "broken", recordings, *GPU_ON, f"--gpu.library={BREAKING}"
            )
            (cpu, cpu_where), (cuda, cuda_where), (broken, broken_where) = (
                job.result() for job in (cpu_job, cuda_job, broken_job)
            )
        transitions = sum(map(len, cpu.values()))
        figures |= {"transitions": transitions, "cpu": cpu_where, "cuda": cuda_where, "broken": broken_where}
        expect(transitions > 50, f"{transitions} transitions on the CPU in {len(cpu)} runs")
        expect(compare("gpu=on", cpu, cuda) == 0, "the same alert logs with --gpu=on")
        expect(cuda_where["ticks_cpu"] == 0 and cuda_where["ticks_cuda"] == cpu_where["ticks_cpu"],
               f"all {cuda_where['ticks_cuda']} ticks on the GPU")  # fmt: skip
        expect(compare("broken", cpu, broken) == 0, "the same alert logs when the device breaks")
        expect(broken_where["degraded"] == 1 and broken_where["ticks_cuda"] == 100, "it broke after 100 passes")
        expect(broken_where["ticks_cuda"] + broken_where["ticks_cpu"] == cpu_where["ticks_cpu"], "no tick was lost")

        # A job that is watched while it trains, and the same frames without a GPU.
        (folder / "live").mkdir()
        with Server(folder / "live", "", *GPU_ON) as server:
            train(LIVE_STEPS, "--server", server.grpc, "--run", "live")
            live = judged(server, "live")
            figures["live_spectra"] = where = spectra_where(server)
            recording = folder / "live.bwrun"
            server.run("run", "export", "live", str(recording))
            figures["live_ticks_cuda"] = ticks(server, "cuda")
        again, _ = imported(folder / "again", [recording], "--gpu=off")
        expect(len(live) > 0 and figures["live_ticks_cuda"] > 0, f"{len(live)} transitions of a live run")
        expect(compare("live", again, {"live": live}) == 0, "the live run's log is the CPU's of the same frames")
        expect(where["computed"] > 0 and where["cuda"] > 0 and where["cpu"] == 0,
               f"{where['computed']} spectra of the live run, all on the GPU")  # fmt: skip

        # The same matrices on both.
        recording = folder / "shipped.bwrun"
        train(SHIPPED_STEPS, "--every", "1", "--record", str(recording))
        await_end(recording)
        on_cpu, cpu_spectra, _ = shipped(folder / "shipped_cpu", recording, "--gpu=off")
        on_gpu, gpu_spectra, log = shipped(folder / "shipped_gpu", recording, *GPU_ON)
        values = sum(map(len, on_cpu.values()))
        figures |= {"gram_values": values, "spectra_cpu": cpu_spectra, "spectra_cuda": gpu_spectra}
        expect("spectra run on the GPU" in log, "cuSOLVER was found")
        expect(gpu_spectra["cuda"] > 0 and gpu_spectra["cpu"] == 0, f"{gpu_spectra['computed']} spectra on the GPU")
        expect(cpu_spectra["cuda"] == 0 and cpu_spectra["computed"] == gpu_spectra["computed"], "as many on the CPU")
        expect(all(map(len, on_cpu.values())) and values > SHIPPED_STEPS, f"{values} values of gram_* signals")
        differ = {key: (on_cpu[key], on_gpu[key]) for key in on_cpu if on_cpu[key] != on_gpu[key]}
        expect(not differ, f"the same with --gpu=on, but for {differ or 'none'}")
    if args.json:
        print(json.dumps(figures))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
