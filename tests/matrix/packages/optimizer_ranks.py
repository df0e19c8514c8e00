"""One of two processes whose optimizer is split between them: `optimizer_ranks.py WAY SERVER`, with
RANK, WORLD_SIZE and the address in the environment.

WAY is deepspeed_1 to deepspeed_3, or megatron: its distributed optimizer.  It trains without and
with Bellwether, which is told of no step and sends to SERVER.  It answers with a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

import cell  # noqa: E402
import megatron_training  # noqa: E402
from training import WATCH, deepspeed_engine, llama, padded, tokens  # noqa: E402

STEPS = 4
Step = Callable[[int], Tensor]  # Forward, backward and the optimizer; the loss.


class OnACpu(TorchFunctionMode):
    """Megatron's optimizer makes tensors on "cuda", and asks whether parameters are there."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        if function is Tensor.type and len(args) == 1:
            return found.replace("torch.", "torch.cuda.")
        return found


def deepspeed_job(stage: int, attach: Callable[[nn.Module], None]) -> Step:
    model = llama()
    attach(model)
    engine = deepspeed_engine(model, stage)

    def step(number: int) -> Tensor:
        loss: Tensor = engine(**padded(2 * number + dist.get_rank())).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def megatron_job(attach: Callable[[nn.Module], None]) -> Step:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = megatron_training.gpt(bf16=True, dtype=torch.bfloat16)
    attach(model)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, min_lr=1e-3, bf16=True, params_dtype=torch.bfloat16,
        use_distributed_optimizer=True, clip_grad=1.0,
    )  # fmt: skip
    with OnACpu():
        optimizer = get_megatron_optimizer(settings, [wrapped])

    def step(number: int) -> Tensor:
        x = tokens(2 * number + dist.get_rank(), length=megatron_training.LENGTH)
        positions = torch.arange(megatron_training.LENGTH).expand(2, -1)
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss: Tensor = wrapped(x, positions, None, labels=x).mean()
        loss.backward()
        finalize_model_grads([wrapped])
        with OnACpu():
            optimizer.step()
        return loss

    return step


def train(way: str, attach: Callable[[nn.Module], None]) -> list[float]:
    torch.manual_seed(0)
    name, _, stage = way.partition("_")
    step = deepspeed_job(int(stage), attach) if name == "deepspeed" else megatron_job(attach)
    return [step(number).item() for number in range(STEPS)]


def watched(way: str, server: str) -> tuple[list[float], Any]:
    import bellwether

    monitors: list[Any] = []

    def attach(model: nn.Module) -> None:
        monitors.append(bellwether.attach(model, server=server, ranks="all", **WATCH))

    losses = train(way, attach)
    (monitor,) = monitors
    assert monitor.flush(20)
    status = monitor.status()
    monitor.detach()
    return losses, status


def main() -> int:
    way, server = sys.argv[1:]
    answer = cell.answering()
    os.environ["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory() as own:
        cell.prepare(Path(own))
        dist.init_process_group("gloo")
        if way == "megatron":
            from megatron.core import parallel_state

            parallel_state.initialize_model_parallel(1)
            megatron_training.on_a_cpu()
        else:
            import deepspeed

            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        plain = train(way, lambda model: None)
        losses, status = watched(way, server)
        length = megatron_training.LENGTH if way == "megatron" else tokens(0).shape[1]
        found = {
            "same": losses == plain, "errors": status["last_error"],
            "rows": 2 * length,  # Of each head in a step of this process.
        }  # fmt: skip
        print(json.dumps(found), file=answer, flush=True)
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
