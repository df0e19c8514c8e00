"""Goal: torch.compile of an attention module alone makes as many graphs with us as without, of the
same frames, and of no function of ours.
Method: the same few steps without us, watched, and watched but not compiled.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo import convert_frame, eval_frame

import bellwether
from bellwether import settings
from bellwether._hook.compiled import compiled_taps

from models import Attention, Shape
from recording import Recording

STATS = [part for part in settings.STATS if part != "linear"]  # Of eager calls alone.
TIMES = {"step_seconds", "hook_seconds"}
PHASES = {f"{name}_seconds" for name in ("data", "forward", "backward", "optimizer")} | {
    "data_share"
}
WATCHED = compiled_taps.supported()


class Plain(nn.Module):
    """Its own attention, which dynamo takes as a frame."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: Any = Attention(Shape())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Multihead(Plain):
    """torch's own, whose frames dynamo leaves to Python."""

    weights = False

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=self.weights)[0]


class Weights(Multihead):
    weights = True


class Breaking(Plain):
    """A hook, so that dynamo takes torch's forward by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.attention.register_forward_hook(self.note)
        self.noted: list[int] = []

    @torch._dynamo.disable
    def note(self, module: nn.Module, args: Any, result: Any) -> None:
        self.noted.append(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Model(nn.Module):
    def __init__(self, kind: type[Plain]) -> None:
        super().__init__()
        self.inlet = nn.Linear(48, 48)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


@dataclasses.dataclass
class Trained:
    bits: list[Tensor]
    graphs: int
    breaks: int
    frames: Counter[str]  # What was compiled of each function.
    recorded: dict[int, dict[str, np.ndarray]]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_(model: Model, how: str) -> None:
    for block in model.blocks:
        if how == "method":
            block.attention.compile(backend="aot_eager")
        elif how == "function":
            block.attention = torch.compile(block.attention, backend="aot_eager")


def train(kind: type[Plain], how: str, path: Optional[Path], first: bool = False) -> Trained:
    """first  it is compiled before it is attached"""
    torch.manual_seed(5)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    convert_frame.input_codes.clear()
    model, monitor = Model(kind), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if first:
        compile_(model, how)
    if path is not None:
        monitor = bellwether.attach(
            model, record=str(path), run="c", every=1, rows=0, overhead_budget=1e9, stats=STATS
        )
    if not first:
        compile_(model, how)
    bits = []
    for step in range(3):
        x = torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bits.append(loss.detach())
    counters, frames = torch._dynamo.utils.counters, Counter[str]()
    for known in convert_frame.input_codes.seen:
        code = known()
        made = eval_frame._debug_get_cache_entry_list(code) if code is not None else []
        if code is not None and made:
            frames[code.co_name] += len(made)
    trained = Trained(
        bits + [p.detach() for p in model.parameters()], counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()), frames, {},
    )  # fmt: skip
    if monitor is not None and path is not None:
        assert monitor.flush(20)
        status = monitor.status()
        assert status["errors"] == 0, status["last_error"]
        monitor.detach()
        trained.recorded = Recording(path, ended=True).steps()
    return trained


@pytest.mark.parametrize("first", [False, True], ids=["attached first", "compiled first"])
@pytest.mark.parametrize("how", ["method", "function"])
@pytest.mark.parametrize("kind", [Plain, Multihead, Weights, Breaking])
def test_its_graphs_are_those_that_it_has_without_us(
    kind: type[Plain], how: str, first: bool, tmp_path: Path
) -> None:
    plain = train(kind, how, None)
    watched = train(kind, how, tmp_path / "c.bwrun", first)
    assert watched.graphs == plain.graphs
    assert watched.frames == plain.frames
    assert watched.breaks == plain.breaks
    assert all(torch.equal(a, b) for a, b in zip(plain.bits, watched.bits))
    if watched.graphs and not WATCHED:
        return
    eager = train(kind, "", tmp_path / "e.bwrun").recorded
    assert eager.keys() == watched.recorded.keys()
    for step, signals in eager.items():
        # Activations end where anything is compiled, and a compiled forward is not timed.
        # A backward pass under way when its step becomes known is left out of a rank's own norms.
        left_out = ("module_", "rank_grad_norm")
        names, got = (
            {n for n in of if not n.startswith(left_out) and n not in PHASES}
            for of in (signals, watched.recorded[step])
        )
        assert names == got
        for name in names - TIMES:
            values = signals[name]
            found = watched.recorded[step][name]
            assert np.allclose(found, values, rtol=1e-3, atol=1e-6, equal_nan=True), (step, name)
