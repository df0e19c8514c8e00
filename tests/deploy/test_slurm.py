"""Goal: a job of deploy/slurm that is requeued goes on in its run, as the next attempt.
Method: the batch script itself with torchrun, a small model and a real server, twice with what Slurm sets
in the environment; srun and scontrol are stand-ins for one node, as no Slurm is here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from bellwether_process import BIN, ROOT, Server, free_port

STEPS = 30


def submit(folder: Path, server: Server, **slurm: str) -> None:
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, does in {"srun": 'exec "$@"', "scontrol": "echo 127.0.0.1"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    (tools / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (tools / "torchrun").chmod(0o755)
    job = {"JOB_NAME": "train", "JOB_ID": "4711", "JOB_NODELIST": "node1", "JOB_NUM_NODES": "1", **slurm}
    script = ROOT / "examples/tiny_transformer.py"
    done = subprocess.run(
        ["bash", ROOT / "deploy/slurm/train.sbatch", script, "--steps", str(STEPS), "--every", "10"],
        env={
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT / "client_lib/python"),
            "BELLWETHER_LIB_DIR": str(BIN),
            "BELLWETHER_SERVER": server.grpc,
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            **{f"SLURM_{name}": text for name, text in job.items()},
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_requeued_job_goes_on_in_its_run(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        submit(tmp_path, server)
        server.await_end("train-4711", attempt=0)
        submit(tmp_path, server, RESTART_COUNT="1")
        server.await_end("train-4711", attempt=1)
        (run,) = server.json("run", "list")["runs"]
        assert run["description"]["name"] == "train-4711"
        assert int(run["description"]["attempt"]) == 1
        assert int(run["steps_recorded"]) == 2 * STEPS
        assert server.stop() == 0
