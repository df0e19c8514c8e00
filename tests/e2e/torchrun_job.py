"""One rank of a job that torchrun starts, watched: `torchrun ... torchrun_job.py FOLDER NODE SERVER`.

It trains until FOLDER/stop is there, and without a word to the other rank, as one whose
collectives hang.  FOLDER/kill-NODE kills it once.  FOLDER/counts-NODE gets what torchrun says of
each of its starts."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "client_lib" / "python"))
import bellwether
from models import Model, Shape, batch


def main() -> None:
    folder, node, server = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with open(folder / f"counts-{node}", "a") as counts:
        print(os.environ["TORCHELASTIC_RESTART_COUNT"], file=counts)
    torch.manual_seed(3)
    shape = Shape(heads=2, kv_heads=2)
    model = Model(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kill = folder / f"kill-{node}"
    with bellwether.attach(
        model, run="job", server=server, ranks="all", every=1, rows=0, overhead_budget=1e9, byte_budget=0
    ) as monitor:
        step = 0
        while not (folder / "stop").exists():
            if kill.exists():
                kill.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(batch(shape, step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss)
            step += 1
            time.sleep(0.02)


if __name__ == "__main__":
    main()
