"""One training of a package, in its two runs: captured without Bellwether, and watched."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

import projections
from capture import Calls
from comparison import Run, digest

device = "cpu"  # Of models and batches.
STEPS = 3
VOCABULARY = 64
WATCH = dict(
    every=1, rows=0, sequences=0, microbatches="all", overhead_budget=1e9, byte_budget=0,
    run="package",
)  # fmt: skip


class Training:
    """One of the two runs of a training; the training tells it what happens."""

    def __init__(self, watched: bool, path: Path) -> None:
        self.watched, self.path = watched, path
        self.run = Run()
        self.reader: projections.Reader = projections.separate
        self.kv_heads: Optional[int] = None  # Where the function is given each of them repeated.
        self.calls: Optional[Calls] = None
        self.monitor: Any = None
        self.status: Any = None
        self.flushed = False
        self._stack = contextlib.ExitStack()
        self._model: Optional[nn.Module] = None

    def begins(self, model: nn.Module, attach: bool = True, **more: Any) -> None:
        """Before the first step; `attach`: False where something of the package's own attaches;
        `more` is told to attach()."""
        self._model = model
        if not self.watched:
            self.calls = Calls(model)
            self._stack.enter_context(self.calls.watching())
        elif attach:
            import bellwether

            self.monitor = bellwether.attach(model, record=str(self.path), **WATCH, **more)

    def step(self, *losses: float, whole: Callable[[], Any] = contextlib.nullcontext) -> None:
        """A step of the optimizer is over; within `whole()` the weights are whole."""
        self.run.losses += losses
        if self.calls is not None and self._model is not None:
            parts = [self.calls.taken()]
            for call in parts[0]:
                call.kv_heads = self.kv_heads or call.kv_heads
            self.run.calls.append(parts)
            with whole():
                self.run.weights.append(projections.sigmas(self.reader, self._model, parts))

    def ends(self, whole: Callable[[], Any] = contextlib.nullcontext) -> None:
        """After the last step, with the monitor still attached."""
        assert self._model is not None
        self._stack.close()
        with whole():
            self.run.digest = digest(self._model)
        if self.monitor is not None:
            self.flushed = self.monitor.flush(20)
            self.status = self.monitor.status()
            self.monitor.detach()


def tokens(seed: int, size: int = 2, length: int = 20) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (size, length), generator=made).to(device)


def padded(seed: int, left: bool = False) -> dict[str, Tensor]:
    found = tokens(seed)
    mask = torch.ones_like(found)
    if left:
        mask[0, :7] = 0
    else:
        mask[1, 13:] = 0
    return {
        "input_ids": found * mask, "attention_mask": mask,
        "labels": found.masked_fill(mask == 0, -100),
    }  # fmt: skip


def llama(**options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, use_cache=False, **options,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM._from_config(
        config, attn_implementation="sdpa"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.19)
    return model.to(device).train()


def deepspeed_engine(model: nn.Module, stage: int) -> Any:
    """Of the process group that there is."""
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-3),
        config={
            "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
            "wall_clock_breakdown": False,
        },
    )  # fmt: skip
    return engine


def job_of_one() -> None:
    """The process group of a job of one; DeepSpeed keeps what it makes of the first for good."""
    if torch.distributed.is_initialized():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0",
        DS_ACCELERATOR="cpu",
    )  # fmt: skip
    torch.distributed.init_process_group("gloo")
