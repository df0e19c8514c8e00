#!/usr/bin/env python3
"""Goal: bellwetherd whose detectors run on a real GPU tells what one without tells: of every recorded
run, of a job that trains beside it, and when the device breaks in the middle of a run.
Method: the real server and command, from BELLWETHER_LIB_DIR (a bundle's bin/ or a build's) with
libbellwether_bank.so and libbellwether_breaking_gpu_bank.so in that folder; a recorded run goes to
a server with --gpu=on and to one with --gpu=off, and the alert logs must be equal to the last word.
The job is examples/tiny_transformer.py, which needs PyTorch.  Plain Python, so that it runs where
the GPU is; exit code 77 without a GPU (1 under BELLWETHER_REQUIRE_GPU=1).

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
from bellwether_process import BIN, ROOT, Server

BREAKING = BIN / "libbellwether_breaking_gpu_bank.so"
LIVE_STEPS = 3000


def counted(server: Server, name: str) -> int:
    """The sum of a metric's series whose lines begin with `name`."""
    lines = (line for line in server.get("/metrics").splitlines() if line.startswith(name))
    return sum(int(float(line.split()[-1])) for line in lines)


def ticks(server: Server, backend: str) -> int:
    return counted(server, f'bellwether_detector_tick_seconds_count{{backend="{backend}"}}')


def imported(folder: Path, recordings: list[Path], *flags: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The alert log of each recording by its name, and what ran where."""
    folder.mkdir()
    with Server(folder, "", *flags) as server:
        logs = {}
        for recording in recordings:
            name = recording.stem
            server.run("run", "import", str(recording), "--name", name)
            logs[name] = server.alert_log(name)
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
            cuda_job = pool.submit(imported, folder / "cuda", recordings, "--gpu=on")
            broken_job = pool.submit(
                imported, folder / "broken", recordings, "--gpu=on", f"--gpu.library={BREAKING}"
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
        with Server(folder / "live", "", "--gpu=on") as server:
            subprocess.run(
                [sys.executable, str(ROOT / "examples/tiny_transformer.py"), "--seed", "1", "--steps", str(LIVE_STEPS),
                 "--server", server.grpc, "--run", "live"],
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            live = server.alert_log("live")
            recording = folder / "live.bwrun"
            server.run("run", "export", "live", str(recording))
            figures["live_ticks_cuda"] = ticks(server, "cuda")
        again, _ = imported(folder / "again", [recording], "--gpu=off")
        expect(len(live) > 0 and figures["live_ticks_cuda"] > 0, f"{len(live)} transitions of a live run")
        expect(compare("live", again, {"live": live}) == 0, "the live run's log is the CPU's of the same frames")
    if args.json:
        print(json.dumps(figures))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
