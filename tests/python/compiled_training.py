"""A small model whose blocks are compiled, or are not, trained with and without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import bellwether

from models import Attention, Model, Shape, batch
from recording import Recording


class Flex(Attention):
    """A mask of documents, and a change of the scores with a tensor of its own."""

    length = 11  # Of a document, in tokens.

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("slopes", torch.linspace(0.1, 0.5, shape.heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> Tensor:
        document = torch.arange(q.shape[2], device=q.device) // self.length

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (document[i] == document[j])

        def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - self.slopes[h] * (i - j)

        blocks = flex.create_block_mask(mask, None, None, q.shape[2], k.shape[2], q.device)
        return flex.flex_attention(q, k, v, change, blocks, enable_gqa=gqa)


def inductor_graphs(module: Any, inputs: Any) -> Any:
    """A backend: the graphs that inductor would make code of run as they are."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def run(graph: Any, *_: Any, **__: Any) -> Any:
        return make_boxed_func(graph.forward)

    return compile_fx(module, inputs, inner_compile=run)


class Found:
    """What a training left."""

    def __init__(self) -> None:
        self.bits: list[Tensor] = []  # Losses and weights.
        self.recorded: dict[int, dict[str, np.ndarray]] = {}
        self.notes: list[list[str]] = []
        self.graphs = 0


def train(
    path: Optional[Path],
    shape: Shape,
    kind: type[nn.Module],
    compiled: bool = True,
    *,
    backend: Any = "aot_eager",
    device: str = "cpu",
    tokens: int = 40,
    steps: int = 3,
    every: int = 1,
    lr: float = 0.01,
) -> Found:
    """path  of the recording; None: nothing of ours is there"""
    torch.manual_seed(5)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, found = Model(shape, kind=kind).to(device), Found()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    monitor = None
    if path is not None:
        monitor = bellwether.attach(
            model, record=str(path), run="c", every=every, rows=0, overhead_budget=1e9
        )
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True, backend=backend)
    for step in range(steps):
        torch.manual_seed(step)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            x = batch(shape, step, tokens=tokens, device=device)
            loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.bits.append(loss.detach())
        if monitor is not None:
            monitor.step(loss=loss)
    found.bits += [p.detach() for p in model.parameters()]
    found.graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if monitor is not None:
        assert monitor.flush(20)
        status = monitor.status()
        assert status["errors"] == 0, status["last_error"]
        found.notes = [sorted(layer["notes"]) for layer in status["layers"]]
        monitor.detach()
        assert path is not None
        found.recorded = Recording(path, ended=True).steps()
    for module in model.modules():  # Other tests in this process find the classes as they are.
        bellwether.unwrap_attention(module)
    return found
