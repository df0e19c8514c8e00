"""Goal: what a compiled graph makes masks of is made once a step for all layers, and never kept for
another step, another micro-batch or other numbers.
Method: a model that makes its mask of document numbers, compiled as a whole, beside the same eager.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import bellwether
from bellwether._hook import made_once
from bellwether._hook.compiled import compiled_taps, recorded

from compiled_training import inductor_graphs
from recording import Recording

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < compiled_taps.TORCH_MIN:
    pytest.skip("compiled modules are not watched with this torch", allow_module_level=True)

LAYERS, HEADS, WIDTH, TOKENS = 3, 2, 32, 24


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y: Tensor = x + self.out(o.transpose(1, 2).flatten(2))
        return y


class Documents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        places = torch.arange(TOKENS, device=x.device)
        mask = (document[:, None, :, None] == document[:, None, None]) & (
            places[:, None] >= places[None]
        )
        for layer in self.layers:
            x = layer(x, mask)
        return x


def train(path: Path, compiled: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Documents()
    settings = bellwether.Settings(microbatches="all")
    monitor = bellwether.attach(
        model, record=str(path), run="d", every=1, rows=0, overhead_budget=1e9, settings=settings
    )
    run: Any = torch.compile(model, backend=inductor_graphs) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    document = torch.zeros(2, TOKENS, dtype=torch.int64)
    for step in range(3):
        for part in range(2):
            torch.manual_seed(10 * step + part)
            x = torch.randn(2, TOKENS, WIDTH)
            document.copy_(torch.arange(TOKENS) // (3 + 2 * step + part))  # In place.
            run(x, document).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
    assert monitor.flush(20)
    assert monitor.status()["errors"] == 0, monitor.status()["last_error"]
    monitor.detach()
    for module in model.modules():
        bellwether.unwrap_attention(module)
    return [of for _, of in sorted(Recording(path, ended=True).steps().items())]


def test_a_mask_is_made_once_for_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def counted(graph: int, of: Any, make: Callable[[], Tensor]) -> Tensor:
        def once() -> Tensor:
            nonlocal made
            made += 1
            return make()

        return made_once.made_once(graph, of, once)

    monkeypatch.setattr(recorded, "made_once", counted)
    compiled = train(tmp_path / "c.bwrun", True)
    assert made == 3 * 2  # Steps, and micro-batches of which each has a mask of its own.
    eager = train(tmp_path / "e.bwrun", False)
    assert len(compiled) == len(eager) == 3
    for name in ("logit_max", "delta_error_sum", "leak_ratio"):
        for one, other in zip(compiled, eager):
            if name in other:
                assert np.allclose(one[name], other[name], rtol=1e-4, atol=1e-6), name


def test_tensors_are_kept_for_the_same_inputs_alone() -> None:
    made_once.forget()
    x = torch.arange(8)

    def of(*given: Any) -> Tensor:
        return made_once.made_once(1, given, lambda: x + 1)

    first = of(x, 3)
    assert of(x, 3) is first and of(x, 4) is not first and of(x[2:], 3) is not first
    assert made_once.are_made([first[1:]]) and not made_once.are_made([first, x])
    x.add_(1)  # As autograd counts it.
    assert of(x, 3) is not first
    made_once.forget()
    assert not made_once.are_made([first])
