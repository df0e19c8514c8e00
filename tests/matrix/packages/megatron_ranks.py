"""One of two processes of Megatron-Core that train its GPT: `megatron_ranks.py DEVICE WAY FOLDER`,
with RANK, WORLD_SIZE and the address in the environment.

DEVICE is cpu (gloo) or cuda (NCCL, each process on a GPU of its own).  WAY is "tensor", with
sequence parallelism, or "pipeline", by Megatron's own schedule.  It trains twice, captured without
Bellwether and watched, and answers with a line of JSON of the heads and layers that are here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import cell  # noqa: E402
import definitions  # noqa: E402
import megatron_training  # noqa: E402
from comparison import Result, Steps, judge  # noqa: E402
from training import STEPS, Training, tokens  # noqa: E402

MICROBATCHES = 3
LENGTH = megatron_training.LENGTH


def here(path: Path) -> Steps:
    """Of a recording the layers and heads of this process alone, each from 0."""
    from recording import Recording

    found: Steps = {}
    recording = Recording(path, ended=True)
    blocks = [block for frame in recording.frames for block in frame.blocks]
    first = min(block.layer_begin for block in blocks if recording.names[block.signal] == "rows")
    layers = recording.hello.run.layout.layers
    for frame in recording.frames:
        step = found.setdefault(frame.step, {})
        for block in frame.blocks:
            values = np.array(block.values, np.float32).reshape(block.layer_count, -1)
            name = recording.names[block.signal]
            whole = step.setdefault(name, np.full((layers, values.shape[1]), np.nan, np.float32))
            begin = max(block.layer_begin - first, 0)  # What belongs to no layer is at 0.
            whole[begin : begin + block.layer_count] = values
    return found


def batch(seed: int, device: str) -> Tensor:
    return tokens(seed, length=LENGTH).to(device)


def forwarded(model: nn.Module, x: Tensor) -> Tensor:
    positions = torch.arange(LENGTH, device=x.device).expand(2, -1)
    result: Tensor = model(x, positions, None, labels=x)
    return result


def one_step(model: nn.Module, way: str, step: int, device: str) -> list[float]:
    """Forward and backward; the losses, of the last stage alone."""
    if way == "tensor":
        loss = forwarded(model, batch(step, device)).mean()
        loss.backward()
        return [loss.item()]
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward(data: Any, stage: nn.Module) -> tuple[Tensor, Any]:
        def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return output.mean(), {"loss": output.detach().mean()}

        return forwarded(stage, next(data)), loss_of

    told = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([batch(10 * step + i, device) for i in range(MICROBATCHES)]),
        model=model, num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=2,
        forward_only=False,
    )  # fmt: skip
    return [one["loss"].item() for one in told]


def train(training: Training, way: str, device: str) -> None:
    import bellwether.megatron

    options: dict[str, Any] = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    if way == "pipeline":
        options = dict(pipeline_model_parallel_size=2, dtype=torch.bfloat16, bf16=True)
    if device == "cpu":
        options["batch_p2p_sync"] = False
    rank = dist.get_rank()
    first, last = way == "tensor" or rank == 0, way == "tensor" or rank == 1
    model = megatron_training.gpt(first, last, **options).to(device)
    training.reader = megatron_training.by_group
    training.begins(model, parallel=bellwether.megatron.parallel(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    capture: Any = contextlib.nullcontext()
    if not training.watched:
        capture = megatron_training.captured(training)
    with capture:
        for step in range(STEPS):
            losses = one_step(model, way, step, device)
            for parameter in model.parameters():
                if getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            training.step(*losses)
    training.ends()


def main() -> int:
    device, way, folder = sys.argv[1:]
    answer = cell.answering()
    rank = int(os.environ["RANK"])
    with tempfile.TemporaryDirectory() as own:
        cell.prepare(Path(own), device=device)
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        size = {"tensor": (2, 1), "pipeline": (1, 2)}[way]
        parallel_state.initialize_model_parallel(*size)
        if device == "cuda":
            model_parallel_cuda_manual_seed(1)
        else:
            megatron_training.on_a_cpu()
        path = Path(folder) / "run.bwrun"
        known, watched = Training(False, path), Training(True, path)
        for training in (known, watched):
            train(training, way, device)
        result = Result(f"megatron {way} rank {rank}")
        calls = [call for step in known.run.calls for part in step for call in part]
        assert len(calls) == STEPS * (2 if way == "tensor" else MICROBATCHES)
        assert all(definitions.mistaken(call) < 0.05 for call in calls)
        if not watched.run.same(known.run):
            result.wrong.append("training is not bitwise what it is without us")
        place = path if rank == 0 else path.with_name("run-rank1.bwrun")
        judge(known.run, True, watched.status, watched.flushed, here(place), result)
        print(json.dumps(dataclasses.asdict(result)), file=answer, flush=True)
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
